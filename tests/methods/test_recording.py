"""Trajectories are collected whole: with validation, without a length, after an interruption."""

import copy

import pytest
import torch

import dissensus as ds
import tiny
from dissensus.methods import SWA, SWAG, TRADI, SnapshotEnsemble, track

EPOCHS, STEPS = 8, 4


def batches():
    x, y = tiny.points(16)
    return [(x[i : i + 4], y[i : i + 4]) for i in range(0, 16, 4)]


class Unsized:
    """The batches without len()."""

    def __iter__(self):
        return iter(batches())


class Interrupted(Exception):
    pass


def made(method, seed=0, **keywords):
    torch.manual_seed(seed)
    return method(tiny.mlp().double(), **keywords)


METHODS = {
    "swag": (lambda: made(SWAG, rank=2, samples=2), 4),
    "swa": (lambda: made(SWA), 8),  # the last quarter of 32 steps
    "snapshots": (lambda: made(SnapshotEnsemble, members=4), 4),
    "swag-every": (lambda: made(SWAG, rank=2, samples=2, every=3), 3),
}
each_method = pytest.mark.parametrize(
    ("build", "expected"),
    [pytest.param(*row, marks=pytest.mark.slow if name == "swa" else (), id=name) for name, row in METHODS.items()],
)


def collected(posterior) -> dict[str, torch.Tensor]:
    """All a posterior has recorded, its draws aside: those are random."""
    return {name: t for name, t in tiny.state(posterior).items() if not name.startswith("stored")}


@each_method
def test_validation_measures_and_cuts_nothing_off(build, expected):
    def run(validation):
        posterior = build()
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.5)  # overfits: the best epoch is an early one
        history = ds.fit(
            posterior, batches(), epochs=EPOCHS, validation=validation, optimizer=optimizer, progress=False
        )
        return posterior, history

    x, y = tiny.points(16, seed=1)
    validated, history = run([(x, y)])
    scores = [epoch.validation for epoch in history.epochs]
    assert min(scores) < scores[-1]
    assert history.best is None
    assert int(validated.recorder.snapshots.taken) == expected
    assert tiny.largest_difference(collected(validated), collected(run(None)[0])) == 0


@pytest.mark.parametrize("method", [SWAG, SWA, SnapshotEnsemble])
def test_patience_is_refused_where_no_epoch_is_best(method):
    x, y = tiny.points()
    with pytest.raises(ValueError, match=r"expected no patience for .*, got 2; it collects weights over the whole run"):
        ds.fit(made(method), batches(), epochs=2, validation=[(x, y)], patience=2, progress=False)


@each_method
def test_a_loader_without_a_length_records_the_tail_of_the_whole_run(build, expected):
    sized, unsized = build(), build()
    ds.fit(sized, batches(), epochs=EPOCHS, progress=False)
    ds.fit(unsized, Unsized(), epochs=EPOCHS, progress=False)
    assert int(unsized.recorder.snapshots.taken) == expected
    if build is not METHODS["snapshots"][0]:  # whose first snapshot may lie in the first epoch
        assert tiny.largest_difference(collected(sized), collected(unsized)) == 0
    assert unsized.recorder.snapshots.start + unsized.recorder.snapshots.every * (expected - 1) < EPOCHS * STEPS


def test_what_lies_in_the_first_epoch_of_unknown_length_is_made_up_for_in_what_follows():
    posterior = made(SnapshotEnsemble, members=6)
    ds.fit(posterior, Unsized(), epochs=3, progress=False)  # 12 steps, 4 of them before the length is known
    assert int(posterior.recorder.snapshots.taken) == 6
    assert (posterior.recorder.snapshots.start, posterior.recorder.snapshots.every) == (6, 1)


def test_a_second_run_of_unknown_length_forgets_the_first():
    posterior = made(SWAG, rank=2, samples=2)
    ds.fit(posterior, batches(), epochs=4, progress=False)
    ds.fit(posterior, Unsized(), epochs=EPOCHS, progress=False)
    assert int(posterior.recorder.snapshots.taken) == 4
    assert posterior.recorder.snapshots.start >= 16 + 24


@pytest.mark.parametrize("keywords", [{}, {"start": 2}, {"every": 2}])
def test_one_epoch_of_unknown_length_is_refused_before_it_trains(keywords):
    for posterior in (made(SWAG, **keywords), made(lambda m: track(m, [lambda n, **k: SWAG(n, **keywords, **k)]))):
        before = tiny.state(posterior)
        with pytest.raises(ValueError, match="expected start and every for one epoch of unknown length"):
            ds.fit(posterior, Unsized(), epochs=1, progress=False)
        assert tiny.largest_difference(before, tiny.state(posterior)) == 0


def test_one_epoch_of_unknown_length_will_do_where_the_times_are_given_or_the_run_was_begun():
    given = made(SWAG, start=1, every=2, samples=2)
    ds.fit(given, Unsized(), epochs=1, progress=False)
    assert int(given.recorder.snapshots.taken) == 2
    begun = made(SWAG, samples=2)
    begun.begin(STEPS, 1)
    ds.fit(begun, Unsized(), epochs=1, progress=False)
    assert int(begun.recorder.snapshots.taken) == 1


def test_tradi_starts_at_the_weights_there_are_though_the_length_is_unknown():
    posterior, other = made(TRADI), tiny.mlp().double()
    posterior.network.load_state_dict(other.state_dict())
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.0)
    ds.fit(posterior, Unsized(), epochs=1, optimizer=optimizer, progress=False)
    assert tiny.largest_difference(posterior.mean, {n: p.detach() for n, p in other.named_parameters()}) < 1e-12


def test_a_loop_of_ones_own_may_begin_late():
    posterior = made(SWAG, rank=2, samples=2)
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1)
    for step in range(EPOCHS * STEPS):
        if step == STEPS:
            posterior.begin(STEPS, EPOCHS, done=STEPS)
        posterior.zero_grad()
        posterior.backward(*batches()[step % STEPS])
        optimizer.step()
        posterior.observe(optimizer)
    assert int(posterior.recorder.snapshots.taken) == 4
    assert posterior.steps_before_run == 0


@each_method
@pytest.mark.parametrize("loader", [batches, pytest.param(Unsized, marks=pytest.mark.slow)], ids=["sized", "unsized"])
def test_the_same_cell_again_goes_on_as_if_it_had_not_been_interrupted(build, expected, loader, tmp_path):
    """Ctrl-C in the epoch after `stop`, then the same fit of the same object: the tail stays where it was."""

    def cell(posterior, checkpoint=None, interrupt=None):
        def interrupted():
            for i, batch in enumerate(batches()):
                if posterior.steps == interrupt and i == 2:
                    raise Interrupted
                yield batch

        watched = loader() if interrupt is None else _Sized(interrupted, sized=loader is batches)
        ds.fit(posterior, watched, epochs=EPOCHS, checkpoint=checkpoint, progress=False)

    whole = build()
    cell(whole)
    for stop in (0, 5, 6):
        stopped, path = build(), tmp_path / f"{stop}.pt"
        with pytest.raises(Interrupted):
            cell(stopped, path, interrupt=(stop + 1) * STEPS + 2)
        cell(stopped, path)
        assert int(stopped.recorder.snapshots.taken) == expected
        assert tiny.largest_difference(collected(whole), collected(stopped)) == 0


class _Sized:
    def __init__(self, make, *, sized):
        self.make, self.sized = make, sized

    def __iter__(self):
        return self.make()

    def __len__(self):
        if not self.sized:
            raise TypeError
        return STEPS


def test_a_run_that_is_made_longer_records_its_new_tail(tmp_path):
    posterior, again = made(SWAG, rank=2, samples=2), made(SWAG, rank=2, samples=2)
    ds.fit(posterior, batches(), epochs=EPOCHS, checkpoint=tmp_path / "c.pt", progress=False)
    ds.fit(again, batches(), epochs=2 * EPOCHS, checkpoint=tmp_path / "c.pt", progress=False)
    assert int(again.recorder.snapshots.taken) == 4
    assert again.recorder.snapshots.start >= 48
    history = ds.fit(made(SWAG, rank=2, samples=2), batches(), epochs=3, checkpoint=tmp_path / "c.pt", progress=False)
    assert len(history) == 2 * EPOCHS  # nothing left to train, nothing forgotten


def test_a_copy_has_a_plan_of_its_own():
    posterior = made(SWAG, rank=2)
    posterior.begin(10, 4)
    other = copy.deepcopy(posterior)
    other.begin(10, 8)
    assert (posterior.recorder.snapshots.start, other.recorder.snapshots.start) == (33, 64)
