"""Weights divided over the data axis, by us or by fully_shard, train, predict and are saved as on one process."""

import re
import weakref

import pytest
import test_division
import torch
from torch import nn
from torch.optim import SGD, Adam
from workers import said, workers

import dissensus as ds
import tiny
from dissensus.utils import sharding
from thinning import often

X, Y = tiny.points(26)
M = 2


def network(mesh, dropout=0.1):
    """Axes that two ranks have uneven parts of, batch norm, dropout, and a bias that one rank has alone."""
    first = nn.Linear(4, 7, bias=False), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(dropout)
    net = nn.Sequential(*first, nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).double()
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
    """(state whole, losses and validation, predictions, bytes of weights here, bytes of their optimiser's states)"""
    torch.manual_seed(2)
    mesh = ds.distributed.mesh(members=1)
    posterior = BUILD[name](mesh if divide else None)
    made = OPTIMIZERS[optimizer](posterior.parameters())
    loader = ds.data.Batches(X, Y, batch_size=8, shuffle=True, seed=1)
    history = ds.fit(
        posterior, loader, epochs=epochs, optimizer=made, mesh=mesh, validation=[(X[:7], Y[:7]), (X[7:9], Y[7:9])],
        progress=False, checkpoint=path, engine="loop", **settings,
    )  # fmt: skip
    weights = {id(p): sharding.local_part(p).nbytes for name, p in posterior.named_parameters() if "network." in name}
    states = [t for p, state in made.state.items() if id(p) in weights for t in state.values() if t.ndim]
    whole = sharding.gather_full_tensors(posterior.state_dict())
    predictive = ds.predict(posterior, [(X[i : i + 9], Y[i : i + 9]) for i in (0, 9, 18)])  # more batches than ranks
    return (
        whole, [(e.loss, e.validation) for e in history.epochs], predictive.mean, sum(weights.values()),
        sum(sharding.local_part(t).nbytes for t in states),
    )  # fmt: skip


def close(found, expected, tolerance=1e-10):
    assert tiny.largest_difference(found[0], expected[0]) < tolerance
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert mine == pytest.approx(theirs, abs=tolerance)
    assert torch.allclose(found[2], expected[2], rtol=0, atol=tolerance)


def fit_with(name, settings):
    return fit(name, **settings)


CLIPPED = {"optimizer": "sgd", "clip": 0.05, "accumulate": 2}


@pytest.mark.parametrize(
    ("name", "settings"),
    [("deep_ensemble", CLIPPED), ("swag", {}), *(pytest.param(each, {}, marks=pytest.mark.slow) for each in BUILD)],
)
def test_two_ranks_with_parts_of_every_weight_train_as_one_process(name, settings):
    expected = fit(name, False, **settings)
    for found in workers().run(2, fit_with, name, settings):
        close(found, expected)
        assert found[3] < 0.7 * expected[3]  # rows of a layer go to ranks whole
        assert found[4] < 0.7 * expected[4]


def twice(divide=True):
    """The state after two runs of a posterior, the second with another optimiser."""
    torch.manual_seed(2)
    mesh = ds.distributed.mesh(members=1)
    posterior = BUILD["map"](mesh if divide else None)
    for _ in range(2):
        ds.fit(posterior, [(X, Y)], epochs=2, mesh=mesh, progress=False)
    return sharding.gather_full_tensors(posterior.state_dict())


def test_a_divided_posterior_is_trained_again():
    assert tiny.largest_difference(workers().run(2, twice)[0], twice(False)) < 1e-10


def most_whole():
    """(bytes of the weights of one member, the most that were put together at a time in training and prediction)"""
    alive, most, joined = {}, [0], sharding.gather_full_tensor

    def counting(tensor):
        found = joined(tensor)
        if found is not tensor:
            alive[id(found)] = found.nbytes
            weakref.finalize(found, alive.pop, id(found))
            most[0] = max(most[0], sum(alive.values()))
        return found

    mesh = ds.distributed.mesh(members=1)
    posterior = BUILD["deep_ensemble"](mesh)
    sharding.gather_full_tensor = counting
    try:
        ds.fit(posterior, [(X, Y)], epochs=2, validation=[(X, Y)], mesh=mesh, progress=False)
        posterior.predict(X)
    finally:
        sharding.gather_full_tensor = joined
    return sum(p.nbytes for p in network(None).parameters()), most[0]


def test_one_member_at_a_time_is_whole():
    for one, most in workers().run(2, most_whole):
        assert one == most


def save(name, folder):
    mesh = ds.distributed.mesh(members=1)
    posterior = BUILD[name](mesh)
    ds.fit(posterior, [(X[:13], Y[:13]), (X[13:], Y[13:])], epochs=4, mesh=mesh, progress=False)
    ds.save(posterior, folder)
    return sharding.gather_full_tensors(posterior.state_dict()), posterior.predict(X).mean


@pytest.mark.parametrize("name", often(["swag"], ["deep_ensemble", "node_bnn", "tradi"]))
def test_what_two_ranks_save_one_process_loads_bit_for_bit(name, tmp_path):
    (state, mean), _ = workers().run(2, save, name, tmp_path)
    loaded = ds.load(tmp_path, network(None))
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(state[key], value) for key, value in loaded.state_dict().items())
    assert torch.equal(loaded.predict(X).mean, mean)


@pytest.mark.parametrize("name", often(["map"], ["swag", "deep_ensemble", "tradi"]))
def test_a_checkpoint_of_two_ranks_is_resumed_by_four_and_by_two(name, tmp_path):
    path, expected = tmp_path / "run.ckpt", fit(name, False)
    workers().run(2, fit, name, True, path, 1)
    workers().run(4, fit, name, True, path, 2)
    close(workers().run(2, fit, name, True, path, 3)[0], expected)


def of_table(method, divide):
    """What training a method of the contract's table gives (see `test_division`), or the word that it cannot."""
    torch.manual_seed(0)
    mesh, (x, y) = ds.distributed.mesh(members=1), tiny.points()
    net = lambda dropout=0.0: test_division.small(dropout).double()  # noqa: E731
    try:
        make = (lambda dropout=0.0: ds.distributed.shard(net(dropout), mesh)) if divide else net
        posterior = TABLE[method](make).double()
        torch.manual_seed(1)
        loader = ds.data.Batches(x, y, batch_size=7, shuffle=True)
        history = ds.fit(posterior, loader, epochs=20, progress=False, mesh=mesh, engine="loop")
    except RuntimeError as error:  # NotImplementedError is one
        return str(error)
    torch.manual_seed(2)
    state, *rest = test_division.result(posterior, history, x)
    return sharding.gather_full_tensors(state), *rest


# Those of the table whose line there makes steps before `fit` does, with random gradients that are others of parts
TABLE = test_division.METHODS | {
    "swag": lambda net: ds.SWAG(net(), rank=3, samples=4),
    "swa": lambda net: ds.SWA(net()),
    "tradi": lambda net: ds.TRADI(net(), samples=4),
    "multi_swag": lambda net: ds.SWAG([net(), net()], rank=3, samples=4),
    "multi_swa": lambda net: ds.SWA([net(), net()]),
    "multi_tradi": lambda net: ds.TRADI([net(), net()], samples=4),
}
OWN = ("rank1_ensemble", "node_noise")  # methods of a user's, of which torch itself says that they cannot


@pytest.mark.slow
@pytest.mark.parametrize("method", TABLE)
def test_every_method_trains_divided_to_the_result_of_one_process_or_says_that_it_cannot(method):
    found, _ = workers().run(2, of_table, method, True)
    if isinstance(found, str):
        assert "got divided ones" in found or method in OWN
    else:
        assert test_division.off(found, of_table(method, False)) < 1e-8


def refused():
    """What is said of a network divided in a way that its method, engine or mesh cannot do."""
    mesh = ds.distributed.mesh(members=1)
    cases = [
        (lambda: ds.WeightRDE(several(mesh), data_size=26), {}),
        (lambda: ds.DeepEnsemble(several(mesh)), {"engine": "vectorised"}),
        (lambda: ds.DeepEnsemble(several(mesh)), {"mesh": ds.distributed.mesh(members=2)}),
        (lambda: ds.SGHMC(network(mesh), data_size=26), {}),
        (lambda: ds.Laplace(network(mesh)), {}),
        (lambda: ds.FeatureRDE(several(mesh), layer="4", head="6", data_size=26), {}),
    ]
    run = lambda build, settings: ds.fit(build(), [(X, Y)], epochs=1, progress=False, **{"mesh": mesh, **settings})  # noqa: E731
    return [said(run, *case) for case in cases]


def test_what_cannot_be_divided_says_so():
    for words in workers().run(2, refused):
        for word, start in zip(words, WORDS, strict=True):
            assert re.match(rf"(NotImplemented|Value)Error: {re.escape(start)}", word)


WORDS = [
    "expected undivided networks for WeightRDE",
    "expected engine of divided networks, which run one after the other",
    "expected mesh(members=1) for divided networks",
    "expected whole weights for LastSnapshots, got divided ones",
    "expected undivided networks for Laplace",
    "expected undivided networks for FeatureRDE",
]


def diverging():
    mesh = ds.distributed.mesh(members=1)
    posterior = ds.DeepEnsemble(several(mesh))
    if mesh.rank == 1:  # in this rank's part of one member alone
        with torch.no_grad():
            sharding.local_part(posterior.particles.own_parameters()["network.4.weight"])[1].fill_(float("inf"))
    try:
        ds.fit(posterior, [(X, Y)], epochs=1, mesh=mesh, progress=False)
    except ds.Diverged as error:
        return error.members


def test_all_ranks_name_the_member_whose_part_is_not_finite():
    assert workers().run(2, diverging) == [[1], [1]]


def plain_network(dropout=0.0):
    layers = nn.Linear(4, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)
    return nn.Sequential(*layers).double()


def divided(net, mesh):
    """The last layers by themselves, the rest with the outermost part."""
    from torch.distributed.fsdp import fully_shard  # takes a second, in the processes that need it

    for layer in net[3:]:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh.device_mesh["data"])
    return fully_shard(net, mesh=mesh.device_mesh["data"])


FULLY = {"map": ds.MAP, "mc_dropout": lambda net, **rest: ds.MCDropout(net, samples=3, **rest)}


def fit_fully(method, optimizer, path=None, epochs=3, settings=None, fully=True):
    """(state whole, losses, validation, predictions, bytes of this rank's weights)"""
    torch.manual_seed(2)
    mesh, net = ds.distributed.mesh(members=1), plain_network(0.2 if method == "mc_dropout" else 0.0)
    posterior = FULLY[method](divided(net, mesh) if fully else net)
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


def close_fully(found, expected, tolerance=1e-10):
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
    expected = fit_fully(method, optimizer, settings=settings, fully=False)
    for found in workers().run(2, fit_fully, method, optimizer, None, 3, settings):
        close_fully(found, expected)
        assert found[4] < 0.7 * expected[4]  # rows of a layer go to ranks whole


def test_a_checkpoint_of_fully_divided_weights_is_resumed_by_four_and_by_two(tmp_path):
    path, expected = tmp_path / "run.ckpt", fit_fully("map", "adam", fully=False)
    first = workers().run(2, fit_fully, "map", "adam", path, 1)
    again = workers().run(4, fit_fully, "map", "adam", path, 1)  # resumed and not trained
    assert tiny.largest_difference(first[0][0], again[0][0]) == 0
    close_fully(workers().run(2, fit_fully, "map", "adam", path, 3)[0], expected)


def refused_fully():
    mesh = ds.distributed.mesh(members=1)
    builds = (
        lambda: ds.DeepEnsemble([divided(plain_network(), mesh) for _ in range(2)]),
        lambda: ds.SWAG(divided(plain_network(), mesh)),
        lambda: ds.MAP(divided(plain_network(), mesh), weight_prior_std=1.0, data_size=26),
    )
    return [said(lambda: ds.fit(build(), [(X, Y)], epochs=1, mesh=mesh, progress=False)) for build in builds]  # noqa: B023


def test_what_cannot_be_fully_divided_says_so():
    for words in workers().run(2, refused_fully):
        starts = [*2 * ["expected a network that lies whole in a process"], "expected no prior with fully_shard"]
        assert [word.split(",")[0] for word in words] == [f"NotImplementedError: {start}" for start in starts]


def diverging_fully():
    mesh = ds.distributed.mesh(members=1)
    posterior = ds.MAP(divided(plain_network(), mesh))
    if mesh.rank == 1:  # in this rank's part alone
        with torch.no_grad():
            posterior.particles.template.network[0].weight.to_local().fill_(float("inf"))
    try:
        ds.fit(posterior, [(X, Y)], epochs=1, mesh=mesh, progress=False)
    except ds.Diverged as error:
        return error.members


def test_all_ranks_see_that_one_part_is_not_finite():
    assert workers().run(2, diverging_fully) == [[0], [0]]
