"""What every posterior trains with: hooks of methods, the clock of a run, recorders of weights."""

import copy
import inspect
import logging
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch.optim import SGD

import dissensus as ds
import tiny
from dissensus.core.networks import StoringPosterior
from dissensus.core.posterior import Posterior
from dissensus.core.trainable import TrainableModule
from dissensus.core.weights import Recorder, network_parameters
from dissensus.methods.parts.sampling_posterior import RecordingPosterior, SamplingPosterior

PAGE = Path(__file__).parents[2] / "docs" / "developing" / "adding-a-method.md"
HOOKS, SAMPLING_HOOKS = (
    re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    for text in PAGE.read_text().split("\n## Below `SamplingPosterior`\n")
)
BASES = (TrainableModule, Posterior)
SAMPLING = (StoringPosterior, SamplingPosterior, RecordingPosterior)


def names(bases) -> set[str]:
    """Names that the base classes define or ask for, dunders aside."""
    asked = {name for each in bases for name, kind in each.__annotations__.items() if "ClassVar" in str(kind)}
    defined = {name for each in bases for name in vars(each)} | asked
    return {name for name in defined if not name.startswith(("__", "_abc"))}


def is_final(base: type, name: str) -> bool:
    found = inspect.getattr_static(base, name, None)
    return getattr(getattr(found, "fget", found), "__final__", False)


def methods(base: type) -> set[type]:
    """Every class of the library between a method and the contract of this base class."""
    classes = {each for method in ds.METHODS.values() for each in method.__mro__}
    return {each for each in classes if issubclass(each, base)} - {base}


def test_every_public_name_is_final_or_in_the_documented_list():
    public = {name for name in names(BASES) if not name.startswith("_")}
    assert {name for name in public if not is_final(Posterior, name)} == set(HOOKS)
    assert len(HOOKS) == len(set(HOOKS)) <= 21


def test_methods_override_nothing_else():
    assert len(methods(Posterior)) > 15
    others = names(BASES) - set(HOOKS)
    assert {(each.__name__, name) for each in methods(Posterior) for name in others & vars(each).keys()} == set()


def test_what_methods_that_sample_may_override_is_in_a_list_of_its_own():
    known = set(HOOKS) | set(dir(torch.nn.Module))
    public = {name for name in names(SAMPLING) - known if not name.startswith("_")}
    assert {name for name in public if not is_final(RecordingPosterior, name)} == set(SAMPLING_HOOKS)
    assert len(SAMPLING_HOOKS) == len(set(SAMPLING_HOOKS)) <= 13
    below = methods(SamplingPosterior) - {RecordingPosterior}
    assert len(below) > 8
    others = names(SAMPLING) - {*HOOKS, *SAMPLING_HOOKS}
    assert {(each.__name__, name) for each in below for name in others & vars(each).keys()} == set()
    overridden = {name for each in (*below, RecordingPosterior) for name in vars(each)}
    assert set(SAMPLING_HOOKS) <= overridden  # none that no method needs


@pytest.mark.parametrize(
    "begin", [lambda p: p.begin(3, 2), lambda p: p.begin(3, 2, done=2), lambda p: p.begin(None, 2)]
)
def test_a_run_begins_without_a_temperature(begin, caplog):
    posterior = tiny.ensemble(tiny.mlp)
    begin(posterior)
    assert not caplog.messages  # there was none
    posterior.temperature.fill_(2.5)
    with caplog.at_level(logging.WARNING, "dissensus"):
        begin(posterior)
    assert float(posterior.temperature) == 1
    assert caplog.messages == ["training sets the temperature back from 2.5 to 1; call ds.temperature_scale afterwards"]


@pytest.mark.parametrize("loader", [list, iter])  # of known length, and of one that the first epoch tells
def test_a_second_fit_judges_and_ends_at_temperature_one(loader):
    posterior, (x, y) = tiny.ensemble(tiny.mlp), tiny.points()
    ds.fit(posterior, [(x, y)], epochs=1, progress=False)
    posterior.temperature.fill_(3.0)
    history = ds.fit(posterior, loader([(x, y)]), epochs=1, validation=[(x, y)], progress=False)
    assert float(posterior.temperature) == 1
    logits = torch.stack([posterior.member(i).eval()(x) for i in range(3)])
    mixture = logits.softmax(2).mean(0)
    nll = torch.nn.functional.nll_loss(mixture.log(), y)
    assert history[0].validation == pytest.approx(float(nll.detach()), abs=1e-10)


def test_a_resumed_run_has_no_temperature_yet(tmp_path):
    posterior, (x, y) = tiny.ensemble(tiny.mlp), tiny.points()
    ds.fit(posterior, [(x, y)], epochs=1, progress=False, checkpoint=tmp_path / "run.pt")
    posterior.temperature.fill_(3.0)
    ds.fit(posterior, [(x, y)], epochs=2, progress=False, checkpoint=tmp_path / "run.pt")
    assert float(posterior.temperature) == 1


class Steps(Recorder):
    """Counts what it is shown."""

    def __init__(self, source):
        super().__init__(source)
        self.seen, self.lengths = 0, []

    def begin(self, steps, *, done=0):
        self.lengths.append((steps, done))

    def observe(self, optimizer):
        self.seen += 1

    @property
    def ready(self):
        return self.seen > 0

    def sample(self, samples, generator=None):
        return {name: rows[:, None].expand(-1, samples, *rows.shape[1:]) for name, rows in self.weights.rows().items()}


class Recorded(ds.NetworksPosterior):
    """A method whose only word about recording is an attribute."""

    name = "recorded"

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.steps_seen = Steps(self.watched)

    def watched(self):
        return network_parameters(self.particles)


def test_a_recorder_is_found_as_an_attribute_and_told_of_the_run():
    posterior = Recorded(tiny.mlp().double())
    assert posterior.recorders == [posterior.steps_seen]
    assert not posterior.ready
    ds.fit(posterior, [tiny.points()] * 3, epochs=2, progress=False)
    assert posterior.ready
    assert (posterior.steps_seen.seen, posterior.steps_seen.lengths) == (6, [(6, 0)])


@pytest.mark.parametrize("again", [copy.deepcopy, lambda posterior: pickle.loads(pickle.dumps(posterior))])
@pytest.mark.parametrize("method", [ds.SWA, ds.TRADI, ds.SnapshotEnsemble])
def test_a_copy_records_its_own_weights(method, again):
    posterior = method(tiny.mlp().double())
    other = again(posterior)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(2.0)
            parameter.grad = torch.zeros_like(parameter)
    optimizer = SGD(other.parameters(), lr=0.1)
    optimizer.step()
    other.observe(optimizer)
    assert bool((other.recorder.weights.rows()["0.weight"] == 2).all())
    assert other.ready
    assert not posterior.ready


@pytest.mark.parametrize("correct", ["temperature", "isotonic"])
def test_a_step_of_an_own_loop_drops_what_was_fitted_to_earlier_predictions(correct, caplog):
    x, y = tiny.points(40)
    posterior = ds.DeepEnsemble([tiny.mlp() for _ in range(2)]).double()
    ds.calibrate(posterior, [(x, y)], correct)
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1)
    posterior.backward(x, y)
    optimizer.step()
    assert posterior.is_corrected
    posterior.observe(optimizer)
    assert not posterior.is_corrected
    assert (float(posterior.temperature), posterior.calibration) == (1.0, None)
    assert "training " in caplog.text
