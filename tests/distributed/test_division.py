"""Training on a mesh is training on one process: the same weights, functions, losses and files."""

import pytest
import torch
from workers import workers

import dissensus as ds
import test_contract
import tiny

MESHES = {"members": (2, 1), "data": (1, 2), "both": (2, 2)}
STEPS = 200


def trained(method, mesh=None, *, net=tiny.mlp, epochs=40, batch_size=5, keywords=None, **settings):
    """(state, losses, predictions) after 40 epochs over 12 points in batches of 5, 5 and 2."""
    torch.manual_seed(0)
    posterior = test_contract.METHODS[method](net, **(keywords or {})).to(torch.float64)
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
    pairs = [(state[name], wanted[name]) for name in wanted]
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
