"""Every way to store or copy a posterior gives the same predictions and promises, or one clear error."""

import copy
import functools
import logging

import pytest
import torch
from torch import nn

import dissensus as ds
import test_contract
import tiny
from dissensus.numerics.hashing import fingerprint
from dissensus.training.checkpoint import Checkpoints
from dissensus.training.history import Best, History
from refusals import refuses

x, y = tiny.points(40)
values = torch.stack(
    [x.sum(1), x[:, 0] - x[:, 1], x[:, 0] * x[:, 1]], 1
)  # (40, 3): three outputs, as there are classes
CLASSES = (None, "temperature", "vector", "isotonic", "histogram")
VALUES = (None, "temperature", "scale", "isotonic")
PROMISES = {
    "lac": functools.partial(ds.conformal, score="lac", level=0.7),
    "raps": functools.partial(ds.conformal, score="raps", by="class", level=0.5, penalty=0.2, free=1),
    "unlike": functools.partial(ds.conformal, score="disagreement", level=0.6),
    "risk": functools.partial(ds.selective, risk=0.7, confidence=0.6),
    "ood": functools.partial(ds.ood_gate, false_alarm=0.2),
}
OF_VALUES = {
    "cqr": functools.partial(ds.conformal, score="cqr", level=0.7),
    "residual": functools.partial(ds.conformal, score="residual", level=0.6),
    "risk": functools.partial(ds.selective, risk=0.7, confidence=0.6, tolerance=1.0),
    "ood": functools.partial(ds.ood_gate, false_alarm=0.2),
}


def build(method, *, regression, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        likelihood = {"likelihood": ds.Regression(noise=0.5)} if regression else {}
        posterior = test_contract.METHODS[method](tiny.mlp, **likelihood).double()
        ds.refresh(posterior, [(x, values if regression else y)])
    return posterior


def stand(posterior, calibration, *, regression):
    """Calibrates the posterior and fits promises of all kinds that its predictions have; those by members have no summary."""
    loader = [(x, values if regression else y)]
    if calibration is not None:
        ds.calibrate(posterior, loader, calibration)
    summary = calibration in ("isotonic", "histogram")
    for name, fit in (OF_VALUES if regression else PROMISES).items():
        if not (summary and name == "unlike"):
            fit(posterior, loader, name=name)
    return posterior


def answers(posterior):
    """All that a posterior says of x: the prediction's moments, and every promise's."""
    predictive = posterior.predict(x)
    found = {name: getattr(predictive, name) for name in ("mean", "total", "epistemic")}
    for name, promise in posterior.promises.items():
        if isinstance(promise, ds.Gate):
            found[name] = promise(x).accept
        else:
            found |= dict(enumerate(promise.interval(x))) if "cqr" in posterior.promises else {name: promise.set(x)}
    return found


def same(posterior, wanted):
    found = answers(posterior)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():  # float64: rounding may depend on where a tensor lies in memory
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12, msg=str(name))


def saved(posterior, fresh, folder):
    ds.save(posterior, folder / "posterior")
    return ds.load(folder / "posterior", fresh().plain_network(), method=test_contract.OURS.get(posterior.name))


def from_state(posterior, fresh, folder):
    torch.save(posterior.state_dict(), folder / "state.pt")
    other = fresh()
    other.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    return other


def from_checkpoint(posterior, fresh, folder):
    other = fresh()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (posterior, other)]
    Checkpoints(folder / "run.pt", posterior, optimizers[0]).write(History(), Best())
    Checkpoints(folder / "run.pt", other, optimizers[1]).resume()
    return other


def moved(posterior, fresh, folder):
    return copy.deepcopy(posterior).to("cpu", torch.float64).to(memory_format=torch.contiguous_format)


WAYS = {"save and load": saved, "state_dict": from_state, "checkpoint": from_checkpoint, "deepcopy and to": moved}
KINDS = [(False, each) for each in CLASSES] + [(True, each) for each in VALUES]


def product():
    """Every method with every calibration; fast ones: as many as there are kinds, each with one of them."""
    fast = dict(zip(test_contract.FEW, reversed(KINDS), strict=True))
    for method in test_contract.METHODS:
        for regression, calibration in KINDS:
            name = f"{method}-{'values' if regression else 'classes'}-{calibration}"
            marks = () if fast.get(method) == (regression, calibration) else pytest.mark.slow
            yield pytest.param(method, regression, calibration, id=name, marks=marks)


@pytest.mark.parametrize(("method", "regression", "calibration"), [*product()])
def test_predictions_and_promises_are_the_same_on_every_way(method, regression, calibration, tmp_path):
    posterior = stand(build(method, regression=regression), calibration, regression=regression)
    wanted = answers(posterior)
    torch.testing.assert_close(posterior.predictor()(x)["mean"], wanted["mean"], rtol=0, atol=1e-12)
    fresh = functools.partial(copy.deepcopy, build(method, regression=regression, seed=1))
    for name, way in WAYS.items():
        other = way(posterior, fresh, tmp_path)
        try:
            same(other, wanted)
            assert (other.calibration is None) == (calibration in (None, "temperature"))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_a_state_replaces_promises_of_another_score():
    a, b = (build("deep_ensemble", regression=False) for _ in range(2))
    ds.conformal(a, [(x, y)], score="lac")
    wanted = ds.conformal(b, [(x, y)], score="aps").set(x)
    a.load_state_dict(b.state_dict())
    assert a.promises["conformal"].score == "aps"
    assert torch.equal(a.promises["conformal"].set(x), wanted)


def test_a_state_of_another_likelihood_or_network_is_refused_and_changes_nothing():
    def regression(**arguments):
        return ds.DeepEnsemble([tiny.mlp() for _ in range(2)], likelihood=ds.Regression(noise=0.5, **arguments))

    posterior = regression()
    before = tiny.state(posterior)
    scaled = regression(targets={"mean": [1e4], "std": [50.0]}).state_dict()
    refuses(lambda: posterior.load_state_dict(scaled), r"got another likelihood: arguments.targets.* not None")
    assert tiny.largest_difference(tiny.state(posterior), before) == 0
    relu, tanh = ensemble(), ensemble(activation=torch.tanh)
    with pytest.raises(ValueError, match=r"got another network: attributes.activation .*relu.*, not .*tanh"):
        tanh.load_state_dict(relu.state_dict())


def bent(activation=torch.relu, slope=1.0):
    """A network whose activation and slope are plain attributes."""
    parts = {"first": nn.Linear(4, 6), "last": nn.Linear(6, 3), "activation": activation, "slope": slope}
    return tiny.Network(lambda self, x: self.last(self.slope * self.activation(self.first(x))), **parts)


def ensemble(*, likelihood=None, **attributes):
    return ds.DeepEnsemble([bent(**attributes).double() for _ in range(2)], likelihood=likelihood)


def standardised(**settings):
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return ds.MAP(network, likelihood=ds.Regression(noise=1.0)), [(x, 1e4 + 100 * x[:, :1])], settings


OTHER_RUNS = {
    "activation": lambda: (ensemble(), ensemble(activation=torch.tanh), "network.attributes.activation"),
    "attribute": lambda: (ensemble(), ensemble(slope=2.0), "network.attributes.slope 1.0, not 2.0"),
    "ignored label": lambda: (
        ensemble(),
        ensemble(likelihood=ds.Classification(ignore_index=0)),
        "likelihood.arguments.ignore_index None, not 0",
    ),
    "class weights": lambda: (
        ensemble(likelihood=ds.Classification(class_weights=[1.0, 2.0, 1.0])),
        ensemble(),
        r"likelihood.arguments.class_weights \[1.0, 2.0, 1.0\], not None",
    ),
}


@pytest.mark.parametrize("others", OTHER_RUNS.values(), ids=OTHER_RUNS)
def test_a_checkpoint_of_another_model_is_refused(others, tmp_path):
    one, other, message = others()
    ds.fit(one, [(x, y)], epochs=1, progress=False, checkpoint=tmp_path / "run.pt")
    before = tiny.state(other)
    refuses(lambda: ds.fit(other, [(x, y)], epochs=2, progress=False, checkpoint=tmp_path / "run.pt"), message)
    assert tiny.largest_difference(tiny.state(other), before) == 0


@pytest.mark.parametrize("settings", [({"targets": "standardised"}, {}), ({}, {"targets": "standardised"})])
def test_a_checkpoint_of_standardised_targets_is_resumed_only_with_them(settings, tmp_path):
    for epochs, each in enumerate(settings, 1):
        posterior, loader, _ = standardised()
        run = functools.partial(ds.fit, posterior, loader, progress=False, checkpoint=tmp_path / "run.pt")
        run = functools.partial(run, epochs=epochs)
        if epochs == 1:
            run(**each)
    refuses(lambda: run(**each), r"another run \(likelihood.arguments.targets")
    posterior, *_ = standardised()
    ds.fit(posterior, loader, epochs=2, progress=False, checkpoint=tmp_path / "run.pt", **settings[0])


@pytest.mark.parametrize("convolutions", [False, True])
def test_a_watched_run_and_its_watchers_are_saved_one_by_one(convolutions, tmp_path):
    def net():
        if convolutions:
            return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(3, 3)).double()
        return tiny.mlp().double()

    run = ds.track(ds.DeepEnsemble([net(), net()]), [ds.SWAG, ds.SWA])
    ds.fit(run, [(x, y)], epochs=4, progress=False)
    for number, each in enumerate((run, *run.watchers)):
        ds.save(each, tmp_path / str(number))
        assert torch.equal(ds.load(tmp_path / str(number), net()).predict(x).mean, each.predict(x).mean)


def test_what_cannot_be_read_back_is_not_written(tmp_path):
    class Forgetful(ds.StackedPosterior):
        name = "forgetful"

        def config(self):
            return {key: value for key, value in super().config().items() if key != "members"}

    with pytest.raises((ValueError, TypeError, KeyError)):
        ds.save(Forgetful([tiny.mlp(), tiny.mlp()]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------- promises and what they were fitted on


def trained(posterior):
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(posterior.particles.template.network(x), y).backward()
        optimizer.step()


def edited(posterior):
    with torch.no_grad():
        posterior.particles.template.network[0].weight[1, 2] += 1e-6


def past_its_version(posterior):
    posterior.particles.template.network[0].weight.data[0, 0] = 7.0


CHANGES = {
    "plain training": trained,
    "an edit in place": edited,
    "an edit through .data": past_its_version,
    "a temperature": lambda posterior: posterior.temperature.fill_(5.0),
    "another network's weights": lambda posterior: posterior.particles.template.network.load_state_dict(
        build("map", regression=False, seed=1).member(0).state_dict()
    ),
    "half precision": lambda posterior: posterior.half(),
    "no calibration": lambda posterior: setattr(posterior, "calibration", None),
}


@pytest.fixture(scope="module")
def promising():
    """One network with promises of all kinds: what changes is a copy."""
    return stand(build("map", regression=False), "vector", regression=False)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_promise_does_not_outlive_the_predictions_it_was_fitted_to(change, promising, caplog):
    posterior = copy.deepcopy(promising)
    held = dict(posterior.promises.items())
    with caplog.at_level(logging.WARNING, "dissensus"):
        change(posterior)
        for promise in held.values():
            with pytest.raises(ValueError, match=r"expected a .* fitted to the posterior's present predictions"):
                _ = promise.posterior
    assert "predictions have changed since lac, raps, unlike, risk, ood" in caplog.text
    assert not posterior.promises


def test_what_leaves_predictions_alone_leaves_promises_alone(promising):
    posterior = copy.deepcopy(promising)
    posterior.steps.add_(1)
    posterior.classes = ("a", "b", "c")
    posterior.train().eval()
    posterior.to(torch.float64)
    ds.predict(posterior, [(x, y)])
    assert len(posterior.promises) == len(PROMISES)
    single = ds.MAP(tiny.mlp().float())
    promise = ds.conformal(single, [(x.float(), y)], level=0.7)
    assert promise.posterior is single.double()  # the same numbers


def test_a_fingerprint_sees_every_value_and_its_place():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(7, 5, generator=generator), torch.arange(6), torch.rand(3, generator=generator).double()]
    known = fingerprint(tensors)
    assert fingerprint([each.clone() for each in tensors]) == known
    assert fingerprint([tensors[0].double(), *tensors[1:]]) == known  # equal values in a wider dtype
    others = [[tensors[1], tensors[0], tensors[2]], [tensors[0].flip(0), *tensors[1:]]]
    for tensor in tensors:
        for place in range(tensor.numel()):
            before = tensor.view(-1)[place].clone()
            tensor.view(-1)[place] += 1
            others.append([each.clone() for each in tensors])
            tensor.view(-1)[place] = before
    assert fingerprint(tensors) == known
    assert len({known, *map(fingerprint, others)}) == 1 + len(others)


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in test_contract.METHODS if name not in test_contract.SLOW])
def test_an_exported_file_says_the_same_or_why_it_is_not_there(method, tmp_path):
    for regression, calibration in ((False, "vector"), (True, "scale")):
        posterior = stand(build(method, regression=regression), calibration, regression=regression)
        try:
            ds.export(posterior, tmp_path / "file.pt2", example=x)
        except ValueError as error:
            if not str(error).startswith("expected "):
                raise
            continue
        found = torch.export.load(tmp_path / "file.pt2").module()(x)
        wanted = answers(posterior)
        torch.testing.assert_close(found["mean"], wanted["mean"], rtol=0, atol=1e-10)
        for name in {*found} & {*wanted} & {*posterior.promises}:
            assert torch.equal(found[name], wanted[name]), name
