"""Members whose weights are divided over the data axis train, predict and are saved as those of one process."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from workers import workers

import dissensus as ds
import tiny
from dissensus.numerics import divided

X, Y = tiny.points(26)
M = 3


def network(mesh, dropout=0.1):
    """Axes that two ranks have uneven parts of, batch norm, dropout, and a bias that one rank has alone."""
    net = nn.Sequential(
        nn.Linear(4, 7, bias=False),
        nn.BatchNorm1d(7),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(7, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    ).double()
    return net if mesh is None else ds.distributed.shard(net, mesh)


def several(mesh):
    return [network(mesh) for _ in range(M)]


BUILD = {
    "deep_ensemble": lambda mesh: ds.DeepEnsemble(several(mesh), weight_prior_std=1.0, data_size=26),
    "map": lambda mesh: ds.MAP(network(mesh)),
    "map_of_a_list": lambda mesh: ds.MAP(several(mesh)),
    "function_rde": lambda mesh: ds.FunctionRDE(several(mesh), data_size=26),
    "node_bnn": lambda mesh: ds.NodeBNN(network(mesh), data_size=26, samples=4),
    "gaussian_perturbation": lambda mesh: ds.GaussianPerturbation(network(mesh), samples=4),
    "swag": lambda mesh: ds.SWAG(network(mesh), samples=3, rank=3),
    "multi_swag": lambda mesh: ds.SWAG(several(mesh), samples=3, rank=3),
    "tradi": lambda mesh: ds.TRADI(network(mesh), samples=3),
}
OPTIMIZERS = {"adam": lambda p: Adam(p, lr=0.01), "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9)}


def fit(name, divide=True, path=None, epochs=3, optimizer="adam", **settings):
    """(state whole, losses and validation, predictions, bytes of weights here, of the optimiser's states, whole members)"""
    torch.manual_seed(2)
    mesh = ds.distributed.mesh(members=1)
    posterior = BUILD[name](mesh if divide else None)
    made = OPTIMIZERS[optimizer](posterior.parameters())
    loader = ds.data.Batches(X, Y, batch_size=8, shuffle=True, seed=1)
    history = ds.fit(
        posterior, loader, epochs=epochs, optimizer=made, mesh=mesh, validation=[(X[:7], Y[:7]), (X[7:9], Y[7:9])],
        progress=False, checkpoint=path, engine="loop", **settings,
    )  # fmt: skip
    weights = {id(p): divided.here(p).nbytes for name, p in posterior.named_parameters() if "network." in name}
    states = [t for p, state in made.state.items() if id(p) in weights for t in state.values() if t.ndim]
    whole = divided.joined_all(posterior.state_dict())
    predictive, _ = ds.predict(posterior, [(X[i : i + 9], Y[i : i + 9]) for i in (0, 9, 18)])  # more batches than ranks
    return (
        whole,
        [(e.loss, e.validation) for e in history.epochs],
        predictive.mean,
        sum(weights.values()),
        sum(divided.here(t).nbytes for t in states),
    )


def close(found, expected, tolerance=1e-10):
    assert tiny.largest_difference(found[0], expected[0]) < tolerance
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert mine == pytest.approx(theirs, abs=tolerance)
    assert torch.allclose(found[2], expected[2], rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", BUILD)
def test_two_ranks_with_parts_of_every_weight_train_as_one_process(name):
    expected = fit(name, False)
    for found in workers().run(2, fit, name):
        close(found, expected)
        assert found[3] < 0.7 * expected[3]
        assert found[4] < 0.7 * expected[4]
