"""A network that `fully_shard` has divided trains to the result of one process; what cannot says so."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Adam
from workers import said, workers

import dissensus as ds
import tiny

X, Y = tiny.points(26)


def network(dropout=0.0):
    return nn.Sequential(
        nn.Linear(4, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)
    ).double()


def divided(net, mesh):
    """The last layers by themselves, the rest with the outermost part."""
    for layer in net[3:]:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh.device_mesh["data"])
    return fully_shard(net, mesh=mesh.device_mesh["data"])


BUILD = {"map": ds.MAP, "mc_dropout": lambda net, **rest: ds.MCDropout(net, samples=3, **rest)}
OPTIMIZERS = {"adam": lambda p: Adam(p, lr=0.01), "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9)}


def fit(method, optimizer, path=None, epochs=3, settings=None, fully=True):
    """(state whole, losses, validation, predictions, bytes of this rank's weights)"""
    torch.manual_seed(2)
    mesh, net = ds.distributed.mesh(members=1), network(0.2 if method == "mc_dropout" else 0.0)
    posterior = BUILD[method](divided(net, mesh) if fully else net)
    made = OPTIMIZERS[optimizer](posterior.parameters())
    loader = ds.data.Batches(X, Y, batch_size=8, shuffle=True, seed=1)
    history = ds.fit(
        posterior, loader, epochs=epochs, optimizer=made, mesh=mesh, validation=[(X[:7], Y[:7]), (X[7:9], Y[7:9])],
        progress=False, checkpoint=path, **(settings or {}),
    )  # fmt: skip
    here = sum(getattr(p, "_local_tensor", p).nbytes for p in posterior.parameters())
    whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in posterior.state_dict().items()}
    outputs = posterior.predict(X[:5]).mean if method == "map" else None
    return whole, [e.loss for e in history.epochs], [e.validation for e in history.epochs], outputs, here


def close(found, expected, tolerance=1e-10):
    assert tiny.largest_difference(found[0], expected[0]) < tolerance
    assert found[1] == pytest.approx(expected[1], abs=tolerance)
    assert found[2] == pytest.approx(expected[2], abs=tolerance)
    if expected[3] is not None:
        assert torch.allclose(found[3], expected[3], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("method", "optimizer", "settings"),
    [
        ("map", "adam", {}),
        pytest.param("map", "sgd", {"clip": 0.05, "accumulate": 2}, marks=pytest.mark.slow),
        pytest.param("mc_dropout", "adam", {}, marks=pytest.mark.slow),
    ],
)
def test_training_divided_over_two_ranks_is_training_on_one(method, optimizer, settings):
    expected = fit(method, optimizer, settings=settings, fully=False)
    for found in workers().run(2, fit, method, optimizer, None, 3, settings):
        close(found, expected)
        assert found[4] < 0.7 * expected[4]  # rows of a layer go to ranks whole


def test_a_checkpoint_of_two_ranks_is_resumed_by_four_and_by_two(tmp_path):
    path, expected = tmp_path / "run.ckpt", fit("map", "adam", fully=False)
    first = workers().run(2, fit, "map", "adam", path, 1)
    again = workers().run(4, fit, "map", "adam", path, 1)  # resumed and not trained
    assert tiny.largest_difference(first[0][0], again[0][0]) == 0
    close(workers().run(2, fit, "map", "adam", path, 3)[0], expected)


def refused():
    mesh = ds.distributed.mesh(members=1)
    builds = (
        lambda: ds.DeepEnsemble([divided(network(), mesh) for _ in range(2)]),
        lambda: ds.SWAG(divided(network(), mesh)),
        lambda: ds.MAP(divided(network(), mesh), weight_prior_std=1.0, data_size=26),
    )
    return [said(lambda: ds.fit(build(), [(X, Y)], epochs=1, mesh=mesh, progress=False)) for build in builds]  # noqa: B023


def test_what_cannot_be_divided_says_so():
    for words in workers().run(2, refused):
        starts = [*2 * ["expected a network that lies whole in a process"], "expected no prior with fully_shard"]
        assert [word.split(",")[0] for word in words] == [f"NotImplementedError: {start}" for start in starts]


def diverging():
    mesh = ds.distributed.mesh(members=1)
    posterior = ds.MAP(divided(network(), mesh))
    if mesh.rank == 1:  # in this rank's part alone
        with torch.no_grad():
            posterior.particles.template.network[0].weight.to_local().fill_(float("inf"))
    try:
        ds.fit(posterior, [(X, Y)], epochs=1, mesh=mesh, progress=False)
    except ds.Diverged as error:
        return error.members


def test_all_ranks_see_that_one_part_is_not_finite():
    assert workers().run(2, diverging) == [[0], [0]]
