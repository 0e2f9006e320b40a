"""Training on a mesh is training on one process: the same weights, functions, losses and files."""

import pytest
import torch
from workers import workers

import dissensus as ds
import test_contract
import tiny

MESHES = {"members": (2, 1), "data": (1, 2), "both": (2, 2)}
STEPS = 200


def small(dropout=0.0):
    """4 inputs, batch norm, 3 outputs. No bias right before the norm: its gradient is rounding, which Adam makes steps of."""
    drop = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.BatchNorm1d(6), *drop, nn.Linear(6, 3))


# Methods of the contract's table whose line there runs chains before `fit` does
METHODS = test_contract.METHODS | {
    "hmc": lambda net: ds.HMC(net(), samples=3, warmup=1, leapfrog=1, data_size=12),
    "multi_hmc": lambda net: ds.HMC([net(), net()], samples=3, warmup=1, leapfrog=1, data_size=12),
}


def trained(method, mesh=None, *, net=small, epochs=40, batch_size=5, keywords=None, **settings):
    """(state, losses, predictions) after 40 epochs over 12 points in batches of 5, 5 and 2."""
    torch.manual_seed(0)
    posterior = METHODS[method](net, **(keywords or {})).to(torch.float64)
    x, y = tiny.points()
    loader = ds.data.Batches(x, y, batch_size=batch_size, shuffle=True)
    torch.manual_seed(1)
    made = None if mesh is None else ds.distributed.mesh(*mesh)
    history = ds.fit(posterior, loader, epochs=epochs, progress=False, mesh=made, **settings)
    torch.manual_seed(2)
    return posterior.state_dict(), [epoch.members for epoch in history.epochs], posterior.predict(x).members


def off(found, expected):
    """The largest difference between what two runs gave."""
    (state, losses, members), (wanted, wanted_losses, wanted_members) = found, expected
    assert state.keys() == wanted.keys()
    # Eigenvectors of equal eigenvalues turn with the rounding: what is made of them is compared.
    pairs = [(state[name], wanted[name]) for name in wanted if not name.endswith(".vectors")]
    pairs += [(torch.tensor(losses), torch.tensor(wanted_losses)), (members, wanted_members)]
    assert all(a.shape == b.shape for a, b in pairs)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel())


def several(method, which):
    """Whether members of this method can be divided."""
    return which == "data" or test_contract.METHODS[method](tiny.mlp).particles.members > 1


FAST = ["deep_ensemble", "map", "batch_ensemble", "node_bnn", "tradi", "multi_swag", "function_rde", "svgd"]


@pytest.mark.parametrize("which", ["members", "data"])
@pytest.mark.parametrize("method", FAST)
def test_a_mesh_trains_to_the_result_of_one_process(method, which):
    if not several(method, which):
        return
    for rank in workers().run(2, trained, method, MESHES[which]):
        assert off(rank, trained(method)) < 1e-8


class Weighted(torch.utils.data.Dataset):
    """13 rows with labels, some of which do not count, and weights."""

    def __init__(self):
        self.x, self.y = tiny.points(13)
        self.y[::4] = 255
        self.weight = torch.linspace(0.5, 2.0, 13, dtype=torch.float64)

    def __len__(self):
        return 13

    def __getitem__(self, index):
        return self.x[index], self.y[index], self.weight[index]


def with_sampler(mesh=None, accumulate=1, batch_size=2, method="function_rde"):
    """On a mesh with a DistributedSampler; on one process with the same rows in the same batches."""
    torch.manual_seed(0)
    posterior = test_contract.METHODS[method](plain, likelihood=ds.Classification(ignore_index=255)).double()
    data = Weighted()
    if mesh is None:
        first, second = [*range(0, 13, 2)], [*range(1, 13, 2), 0]  # what the two ranks read, the last of them again
        order = [first[i : i + 2] + second[i : i + 2] for i in range(0, 7, 2)]
        loader = [data[rows] for rows in order]
        loader[-1] = (*loader[-1][:2], torch.cat([loader[-1][2][:1], torch.zeros(1, dtype=torch.float64)]))
        made = None
    else:
        made = ds.distributed.mesh(*mesh)
        sampler = torch.utils.data.DistributedSampler(
            data, num_replicas=made.data.size, rank=made.data.rank, shuffle=False
        )
        loader = torch.utils.data.DataLoader(data, batch_size=batch_size, sampler=sampler)
    history = ds.fit(posterior, loader, epochs=30, progress=False, mesh=made, accumulate=accumulate, clip=0.5)
    return posterior.state_dict(), [epoch.members for epoch in history.epochs], posterior.predict(data.x).members


def plain(dropout=0.0):
    """4 inputs, 3 outputs, no batch norm, which would count a row that is read twice."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_rows_that_a_sampler_divides_count_by_their_weights_and_once(accumulate):
    for rank in workers().run(2, with_sampler, (1, 2), accumulate):
        assert off(rank, with_sampler(accumulate=accumulate)) < 1e-8
