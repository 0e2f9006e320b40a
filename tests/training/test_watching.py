"""Methods that record a loop of the user's by a hook on its optimiser, and clipping member by member in such loops."""

import copy
import functools
import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dissensus as ds
import tiny
from dissensus.integrations.trainer_watch import TrainerWatch
from dissensus.utils.extras import MissingExtra
from refusals import refuses

METHODS = {
    "swag": functools.partial(ds.SWAG, rank=3, samples=4),
    "swa": ds.SWA,
    "tradi": functools.partial(ds.TRADI, samples=4),
    "snapshot_ensemble": functools.partial(ds.SnapshotEnsemble, members=2),
}
EPOCHS, BATCHES = 5, 3


def network():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


batches = functools.partial(tiny.point_batches, 12, 4)


def sgd(module, *, fused=True):
    """Fused, as `fit` makes it: others round differently."""
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, fused=fused)


def train(model, optimizer, *, epochs=EPOCHS, scheduler=None):
    """A plain loop, which zeroes gradients after the step."""
    for _ in range(epochs):
        for x, y in batches():
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("build", [network, lambda: tiny.mlp().double()], ids=["plain", "batch norm"])
def test_a_watched_loop_records_exactly_what_fit_records(name, build):
    model = build()
    fitted = METHODS[name](copy.deepcopy(model))
    optimizer = sgd(fitted)
    ds.fit(fitted, batches(), epochs=EPOCHS, optimizer=optimizer, scheduler=schedule(optimizer), progress=False)
    optimizer = sgd(model)
    torch.manual_seed(0)
    with ds.watching(model, optimizer, [METHODS[name]], steps=EPOCHS * BATCHES, loader=batches()) as watched:
        train(model, optimizer, scheduler=schedule(optimizer))
    mine, theirs = dict(watched[name].named_buffers()), dict(fitted.named_buffers())
    random = {key for key in mine if key.startswith("stored") and name in ("swag", "tradi")}  # drawn from another state
    assert mine.keys() == theirs.keys()
    for key in mine.keys() - random:
        assert torch.equal(mine[key], theirs[key]), key
    assert model.training
    assert watched[name].ready
    assert watched[name].steps == EPOCHS * BATCHES


def test_several_methods_and_posteriors_record_one_loop():
    model = network()
    swag = ds.SWAG(model, rank=3, samples=4)
    optimizer = sgd(model)
    with ds.watching(model, optimizer, [swag, ds.TRADI], steps=EPOCHS * BATCHES) as watched:
        train(model, optimizer)
    assert watched[0] is watched["swag"] is swag
    assert swag.recorder.snapshots.taken.value == 4  # in the last quarter of 15 steps
    assert int(watched["tradi"].filters.observed) == EPOCHS * BATCHES
    train(model, optimizer)  # after the block, nothing is recorded
    assert int(swag.steps) == EPOCHS * BATCHES
    x = tiny.points()[0]
    assert torch.equal(swag.predict(x).mean, swag.predict(x).mean)  # one stored draw


def test_an_ensemble_in_a_loop_is_watched_as_in_fit():
    networks = [network() for _ in range(3)]
    fitted = ds.track(ds.DeepEnsemble(networks), [METHODS["swag"]])
    ds.fit(fitted, batches(), epochs=EPOCHS, optimizer=sgd(fitted), progress=False)
    ensemble = ds.DeepEnsemble(networks)
    optimizer = sgd(ensemble)
    with ds.watching(ensemble, optimizer, [METHODS["swag"]], steps=EPOCHS * BATCHES) as (swag,):
        for _ in range(EPOCHS):
            for x, y in batches():
                optimizer.zero_grad()
                ensemble.backward(x, y)
                optimizer.step()
    for name, mean in fitted.watchers[0].mean.items():
        assert torch.equal(mean, swag.mean[name])
    assert swag.predict(tiny.points()[0]).member_means.shape == (12, 12, 3)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skips_are_not_recorded(fused):
    model = network().float()
    optimizer, scaler = sgd(model, fused=fused), torch.amp.GradScaler("cpu", init_scale=4.0)
    with ds.watching(model, optimizer, [ds.TRADI, functools.partial(ds.SWA, start=0, every=1)], steps=6) as watched:
        for i in range(6):
            x, y = batches()[i % BATCHES]
            scaler.scale(cross_entropy(model(x.float()), y)).backward()
            if i == 2:
                model[0].weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert int(watched["tradi"].filters.observed) == int(watched["swa"].recorder.snapshots.taken) == 5


class Wrapper:
    """An optimiser around another one, which steps after every second call, as Accelerate's does."""

    def __init__(self, optimizer):
        self.optimizer, self.calls = optimizer, 0

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self):
        self.calls += 1
        if self.calls % 2 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def zero_grad(self):
        """Only after a step."""


def test_wrapped_optimisers_and_accumulated_gradients():
    model = network()
    optimizer = Wrapper(sgd(model))
    other = network()
    with ds.watching(model, optimizer, [ds.SWA, ds.TRADI], steps=6) as watched:
        train(model, optimizer, epochs=4)
        train(other, sgd(other))  # another optimiser's steps do not count
    assert [int(each.steps) for each in watched] == [6, 6]


def test_an_interrupted_loop_is_no_longer_watched():
    model = network()
    optimizer = sgd(model)
    swag = ds.SWAG(model)

    def run():
        with ds.watching(model, optimizer, [swag], steps=15):
            train(model, optimizer, epochs=1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    train(model, optimizer, epochs=1)
    assert int(swag.steps) == BATCHES
    assert swag.stored is None


@pytest.mark.parametrize(("build", "message"), [
    (lambda model: ds.watching(model, sgd(model), steps=3), "expected methods for a network, got none; pass them"),
    (lambda model: ds.watching(model, sgd(network()), [ds.SWAG], steps=3), "expected an optimizer over the posterior's"),
    (lambda model: ds.watching(model, sgd(model), [ds.SWAG], steps=0), "expected steps of at least 1, got 0"),
    (lambda model: ds.watching(tiny.mlp(), sgd(model), [ds.SWA], steps=3),
     "expected a loader, for statistics of '1' at the end, got none; pass loader="),
])  # fmt: skip
def test_what_cannot_be_watched_is_refused_before_the_loop(build, message):
    refuses(lambda: build(network()).__enter__(), message)


def test_too_short_a_loop_is_refused_at_its_end():
    model = network()
    optimizer = sgd(model)

    def run():
        with ds.watching(model, optimizer, [ds.SWAG], steps=1000):
            train(model, optimizer)

    refuses(run, r"expected at least one snapshot of the weights, got none after 15 observed steps \(the first is at")


# ------------------------------------------------------------------------------------------------- before a record is there
def test_until_there_is_a_record_a_begun_run_predicts_with_the_network():
    posterior, (x, y) = METHODS["swag"](network()), tiny.points()
    refuses(lambda: posterior.predict(x), "expected at least one snapshot")
    posterior.begin(8, 1)
    optimizer = sgd(posterior)
    for _ in range(8):
        expected = posterior.network(x).softmax(-1).detach() if not posterior.ready else None
        assert expected is None or torch.allclose(posterior.predict(x).mean, expected, atol=1e-12)
        optimizer.zero_grad()
        posterior.backward(x, y)
        optimizer.step()
        posterior.observe(optimizer)
    assert posterior.ready
    late = ds.SWAG(network(), start=9, every=1)
    late.begin(2, 1)
    late.steps.fill_(2)  # the run is over
    refuses(lambda: late.predict(x), "expected at least one snapshot")


@pytest.mark.parametrize(("prepare", "warned"), [
    (lambda posterior: None, True),
    (lambda posterior: posterior.begin(3, 1), False),
    (lambda posterior: posterior.begin(None, 2), False),
])  # fmt: skip
@pytest.mark.parametrize("settings", [{}, {"start": 1}, {"start": 1, "every": 1}])
def test_a_run_of_unknown_length_is_warned_of_at_its_first_step(prepare, warned, settings, caplog):
    posterior, (x, y) = ds.SWAG(network(), **settings), tiny.points()
    prepare(posterior)
    optimizer = sgd(posterior)
    for _ in range(2):
        posterior.backward(x, y)
        optimizer.step()
        posterior.observe(optimizer)
    told = [record for record in caplog.records if "run of unknown length: every step is a snapshot" in record.message]
    assert len(told) == (warned and len(settings) < 2)


# ------------------------------------------------------------------------------------------------------------- clipping
@pytest.mark.parametrize("as_one", [False, True])
def test_clipping_by_member_equals_clipping_each_network(as_one):
    networks, largest = [network() for _ in range(3)], 0.1
    ensemble = ds.DeepEnsemble(networks)
    optimizers = [sgd(each) for each in networks]
    optimizer = sgd(ensemble)
    for x, y in batches():
        optimizer.zero_grad()
        ensemble.loss(x, y).backward()
        found = None if as_one else ensemble.clip_grad_norm_(largest)
        if as_one:
            nn.utils.clip_grad_norm_(ensemble.parameters(), largest)
        optimizer.step()
        for i, (each, its) in enumerate(zip(networks, optimizers, strict=True)):
            its.zero_grad()
            cross_entropy(each(x), y).backward()
            norm = nn.utils.clip_grad_norm_(each.parameters(), largest)
            assert as_one or torch.allclose(found[i], norm)
            its.step()
    members = [ensemble.member(i) for i in range(3)]
    pairs = [
        (p, q)
        for a, b in zip(members, networks, strict=True)
        for p, q in zip(a.parameters(), b.parameters(), strict=True)
    ]
    apart = max(float((p - q).detach().abs().max()) for p, q in pairs)
    assert apart > 1e-3 if as_one else apart < 1e-6  # torch divides by norm + 1e-6


def test_a_callback_clips_members_one_by_one_and_the_rest_as_one():
    posterior, (x, y) = ds.DeepEnsemble([network() for _ in range(3)]), tiny.points()
    model = nn.ModuleDict({"posterior": posterior, "extra": nn.Linear(2, 1)})  # a trainer's
    watch = TrainerWatch()
    optimizer = sgd(model)
    watch.start_run(model, optimizer, steps=2, done=0, loader=None)
    watch.max_norm = 0.1
    for _ in range(2):
        optimizer.zero_grad()
        (posterior.loss(x, y) + model["extra"](torch.ones(2)).sum()).backward()
        watch.clip_ensembles()
        assert posterior.clip_grad_norm_(9.0).tolist() == pytest.approx([0.1] * 3)
        assert float(nn.utils.get_total_norm(p.grad for p in model["extra"].parameters())) == pytest.approx(0.1)
        optimizer.step()
    watch.end_run()
    assert watch.posteriors == [posterior]
    assert int(posterior.steps) == 2
    watch.start_run(model, optimizer, steps=2, done=0, loader=None)
    watch.end_run(KeyboardInterrupt())
    optimizer.step()
    assert int(posterior.steps) == 2


# ------------------------------------------------------------------------------------------------ networks of other stacks
class Module(nn.Module):
    """As a LightningModule has it, `optimizers` is a method."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def optimizers(self):
        raise RuntimeError("not attached to a Trainer")

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize("method", [ds.MAP, METHODS["swag"], METHODS["tradi"]])
def test_a_network_with_an_attribute_optimizers_trains(method):
    posterior = method(Module())
    ds.fit(posterior, batches(), epochs=1, progress=False)
    assert posterior.predict(tiny.points()[0]).mean.shape == (12, 3)


@pytest.mark.parametrize(("name", "package"), [("hf", "transformers"), ("lightning", "lightning")])
def test_integrations_say_what_to_install(name, package, monkeypatch):
    monkeypatch.delitem(sys.modules, f"dissensus.integrations.{name}", raising=False)
    monkeypatch.delitem(vars(ds.integrations), name, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf'dissensus.integrations.{name} needs {package}.*"dissensus\[{package}\]"'):
        getattr(ds.integrations, name)


class LastWeights(ds.Recorder):
    """Keeps the weights after each step, and is ready after `wanted` of them."""

    def __init__(self, source, wanted):
        super().__init__(source)
        self.register_buffer("last", self.weights.flat())
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.wanted = wanted

    def observe(self, optimizer):
        self.last.copy_(self.weights.flat())
        self.seen += 1

    @property
    def ready(self):
        return int(self.seen) >= self.wanted

    def sample(self, samples, generator=None):
        return self.weights.unflatten(self.last[:, None].expand(-1, samples, -1))


class Last(ds.RecordingPosterior):
    name = "last"

    def __init__(self, networks, *, wanted=1, samples=2, **keywords):
        super().__init__(networks, samples=samples, **keywords)
        self.wanted, self.recorder = wanted, LastWeights(self.recorded_weights, wanted)


def test_a_recorder_that_is_not_ready_gives_no_functions():
    x, y = (torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))
    posterior = Last(tiny.mlp(), wanted=3)
    told = "expected observed steps, got none, or too few for its LastWeights; train with fit, or call observe"
    refuses(lambda: posterior.predict(x), told)
    ds.fit(posterior, [(x, y)] * 2, epochs=1, progress=False)
    refuses(lambda: posterior.predict(x), told)
    ds.fit(posterior, [(x, y)] * 3, epochs=1, progress=False)
    assert len(posterior.predict(x).log_probs) == 2


def test_a_word_for_a_mesh_that_is_none_is_refused():
    posterior = ds.MAP(tiny.mlp())
    posterior.mesh = "indepedent"
    refuses(lambda: ds.predict(posterior, tiny.points()), "got 'indepedent'; pass ds.distributed.mesh")
