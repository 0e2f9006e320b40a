"""Trajectories: when networks are recorded, that they are collected whole, and ensembles of snapshots."""

import copy
import functools

import pytest
import torch

import dissensus as ds
import tiny
from dissensus.methods import SWA, SWAG, TRADI, SnapshotEnsemble, track
from dissensus.methods.snapshots import Snapshots, cosine_cycles, evenly_spaced
from dissensus.utils.counts import Count
from dissensus.utils.parameter_groups import constant_tail
from refusals import refuses
from thinning import often


def test_a_count_is_saved_and_read_back():
    count = Count()
    assert [count.add(), count.add(), int(count)] == [1, 2, 2]
    other = Count()
    assert int(other) == 0
    other.load_state_dict(count.state_dict())
    assert int(other) == 2
    assert other.add() == 3
    assert int(copy.deepcopy(other)) == int(other.value) == 3
    other.reset()
    assert int(other) == int(other.value) == 0


@pytest.mark.parametrize(("steps", "wanted"), [(100, 10), (1000, 40), (97, 7), (8, 40), (1, 3), (3, 1), (4000, 40)])
def test_snapshots_are_spread_over_the_last_quarter_and_end_with_the_run(steps, wanted):
    first, every = evenly_spaced(steps, wanted)
    times = range(first, steps, every)
    tail = max(1, steps - int(0.75 * steps))
    assert len(times) == min(wanted, tail)
    assert times[-1] == steps - 1
    assert times[0] >= steps - tail
    assert every * len(times) <= tail < (every + 1) * len(times)  # no wider even spacing fits


def taken(snapshots: Snapshots, steps: int) -> list[int]:
    return [step for step in range(steps) if snapshots.count_step()]


def test_a_step_to_record_is_known_before_it_is_taken():
    snapshots = Snapshots(3, 4, wanted=9)
    for _ in range(14):
        expected = snapshots.reads_next_step
        assert snapshots.reads_next_step == expected  # asking changes nothing
        assert snapshots.count_step() == expected


@pytest.mark.parametrize(("start", "every", "begun", "steps", "expected"), [
    (3, 4, None, 14, [3, 7, 11]),  # given times, counted from 0
    (3, 4, 1000, 14, [3, 7, 11]),
    (None, None, None, 4, [0, 1, 2, 3]),  # without a known length: every step
    (2, None, None, 4, [2, 3]),
    (None, 2, None, 5, [0, 2, 4]),
    (None, None, 40, 40, [31, 33, 35, 37, 39]),  # the last quarter
    (10, None, 40, 40, [10, 16, 22, 28, 34]),
    (None, 3, 40, 40, [30, 33, 36, 39]),
])  # fmt: skip
def test_snapshots_are_taken_at_given_times_or_where_the_length_of_the_run_puts_them(
    start, every, begun, steps, expected
):
    snapshots = Snapshots(start, every, wanted=5)
    if begun is not None:
        snapshots.begin(begun)
    assert taken(snapshots, steps) == expected


def test_a_second_run_goes_on_counting_and_forgets_the_first_ones_snapshots():
    snapshots = Snapshots(None, None, wanted=5)
    snapshots.begin(40)
    taken(snapshots, 40)
    snapshots.taken.add()
    snapshots.begin(20)
    assert int(snapshots.taken) == 0
    assert taken(snapshots, 20) == [15, 16, 17, 18, 19]


@pytest.mark.parametrize(("start", "every", "message"), [(-1, 1, "start of at least 0"), (0, 0, "every of at least 1")])
def test_times_that_are_none_are_refused(start, every, message):
    refuses(lambda: Snapshots(start, every, wanted=3), message)


def test_the_constant_tail():
    rates = [constant_tail(t) for t in (0.0, 0.375, 0.525, 0.675, 0.75, 0.99)]
    assert rates == pytest.approx([1.0, 1.0, 0.75, 0.5, 0.5, 0.5])


def test_the_cosine_comes_back_to_its_start_in_every_cycle():
    assert [cosine_cycles(t, cycles=4) for t in (0, 0.25, 0.5, 0.75)] == pytest.approx([1.0] * 4)
    assert cosine_cycles(0.125, cycles=4) == pytest.approx(0.5)
    assert cosine_cycles(0.2499999, cycles=4) == pytest.approx(0.0, abs=1e-6)
    # the mean over a cycle is one half
    mean = torch.tensor([cosine_cycles(i / 1000, cycles=1) for i in range(1000)]).mean()
    assert float(mean) == pytest.approx(0.5, abs=1e-3)


EPOCHS, STEPS = 8, 4


batches = functools.partial(tiny.point_batches, 16, 4)


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
        settings = {"validation": validation, "optimizer": optimizer, "progress": False}
        history = ds.fit(posterior, batches(), epochs=EPOCHS, **settings)
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
    ds.fit(unsized, tiny.Unsized(batches), epochs=EPOCHS, progress=False)
    assert int(unsized.recorder.snapshots.taken) == expected
    if build is not METHODS["snapshots"][0]:  # whose first snapshot may lie in the first epoch
        assert tiny.largest_difference(collected(sized), collected(unsized)) == 0
    assert unsized.recorder.snapshots.start + unsized.recorder.snapshots.every * (expected - 1) < EPOCHS * STEPS


def test_what_lies_in_the_first_epoch_of_unknown_length_is_made_up_for_in_what_follows():
    posterior = made(SnapshotEnsemble, members=6)
    ds.fit(posterior, tiny.Unsized(batches), epochs=3, progress=False)  # 12 steps, 4 of them before the length is known
    assert int(posterior.recorder.snapshots.taken) == 6
    assert (posterior.recorder.snapshots.start, posterior.recorder.snapshots.every) == (6, 1)


def test_a_second_run_of_unknown_length_forgets_the_first():
    posterior = made(SWAG, rank=2, samples=2)
    ds.fit(posterior, batches(), epochs=4, progress=False)
    ds.fit(posterior, tiny.Unsized(batches), epochs=EPOCHS, progress=False)
    assert int(posterior.recorder.snapshots.taken) == 4
    assert posterior.recorder.snapshots.start >= 16 + 24


@pytest.mark.parametrize("keywords", [{}, {"start": 2}, {"every": 2}])
def test_one_epoch_of_unknown_length_is_refused_before_it_trains(keywords):
    for posterior in (made(SWAG, **keywords), made(lambda m: track(m, [lambda n, **k: SWAG(n, **keywords, **k)]))):
        before = tiny.state(posterior)
        with pytest.raises(ValueError, match="expected start and every for one epoch of unknown length"):
            ds.fit(posterior, tiny.Unsized(batches), epochs=1, progress=False)
        assert tiny.largest_difference(before, tiny.state(posterior)) == 0


def test_one_epoch_of_unknown_length_will_do_where_the_times_are_given_or_the_run_was_begun():
    given = made(SWAG, start=1, every=2, samples=2)
    ds.fit(given, tiny.Unsized(batches), epochs=1, progress=False)
    assert int(given.recorder.snapshots.taken) == 2
    begun = made(SWAG, samples=2)
    begun.begin(STEPS, 1)
    ds.fit(begun, tiny.Unsized(batches), epochs=1, progress=False)
    assert int(begun.recorder.snapshots.taken) == 1


def test_tradi_starts_at_the_weights_there_are_though_the_length_is_unknown():
    posterior, other = made(TRADI), tiny.mlp().double()
    posterior.network.load_state_dict(other.state_dict())
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.0)
    ds.fit(posterior, tiny.Unsized(batches), epochs=1, optimizer=optimizer, progress=False)
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
@pytest.mark.parametrize("sized", often([True], [False]))
def test_the_same_cell_again_goes_on_as_if_it_had_not_been_interrupted(build, expected, sized, tmp_path):
    """Ctrl-C in the epoch after `stop`, then the same fit of the same object: the tail stays where it was."""

    def cell(posterior, checkpoint=None, interrupt=None):
        def interrupted():
            for i, batch in enumerate(batches()):
                if posterior.steps == interrupt and i == 2:
                    raise tiny.Killed
                yield batch

        loader = (Sized if sized else tiny.Unsized)(batches if interrupt is None else interrupted)
        ds.fit(posterior, loader, epochs=EPOCHS, checkpoint=checkpoint, progress=False)

    whole = build()
    cell(whole)
    for stop in (0, 6):
        stopped, path = build(), tmp_path / f"{stop}.pt"
        with pytest.raises(tiny.Killed):
            cell(stopped, path, interrupt=(stop + 1) * STEPS + 2)
        cell(stopped, path)
        assert int(stopped.recorder.snapshots.taken) == expected
        assert tiny.largest_difference(collected(whole), collected(stopped)) == 0


class Sized(tiny.Unsized):
    def __len__(self):
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


def run(posterior, steps, x, y):
    """The network after every step, in eval mode."""
    optimizer, networks = torch.optim.SGD(posterior.parameters(), lr=0.1), []
    posterior.train()
    for _ in range(steps):
        optimizer.zero_grad()
        posterior.backward(x, y)
        optimizer.step()
        posterior.observe(optimizer)
        networks.append(copy.deepcopy(posterior.network).eval())
    return networks


@pytest.mark.parametrize(("keywords", "steps", "held"), [
    ({"members": 3}, 12, (3, 7, 11)),  # the last of each of three equal parts
    ({"members": 2, "start": 1, "every": 2}, 8, (5, 7)),  # the last ones of 1, 3, 5, 7
    ({"members": 3, "start": 0, "every": 1}, 5, (2, 3, 4)),  # in the order of the run
])  # fmt: skip
def test_members_are_the_last_networks_of_the_run_with_their_batch_statistics(keywords, steps, held):
    posterior, (x, y) = SnapshotEnsemble(tiny.mlp().double(), **keywords), tiny.points()
    if "every" not in keywords:
        posterior.begin(steps_per_epoch=4, epochs=3)
    networks = run(posterior, steps, x, y)
    for found, step in zip(posterior.eval()(x), held, strict=True):
        torch.testing.assert_close(found, networks[step](x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("networks", [1, 2])
def test_every_snapshot_has_the_noise_that_was_learned_then(networks, tmp_path):
    def make():
        return torch.nn.Linear(1, 1).double()

    given = make() if networks == 1 else [make() for _ in range(networks)]
    posterior = SnapshotEnsemble(given, members=3, likelihood=ds.Regression("learned"))
    x, y = (torch.linspace(-1, 1, 8, dtype=torch.float64)[:, None] * factor for factor in (1.0, 0.5))
    posterior.begin(steps_per_epoch=1, epochs=3)
    optimizer, learned = torch.optim.SGD(posterior.parameters(), lr=0.2), []
    for _ in range(3):
        optimizer.zero_grad()
        posterior.backward(x, y)
        optimizer.step()
        posterior.observe(optimizer)
        learned.append(posterior.current().predict(x).variances[:, 0, 0])  # (M,)
    wanted = torch.stack(learned).mT.flatten()  # network by network
    assert wanted.unique().numel() == 3 * networks
    torch.testing.assert_close(posterior.predict(x).variances[:, 0, 0], wanted, rtol=0, atol=1e-12)
    ds.save(posterior, tmp_path)
    torch.testing.assert_close(ds.load(tmp_path, make()).predict(x).variances[:, 0, 0], wanted, rtol=0, atol=1e-12)


def test_fewer_snapshots_than_members_are_fewer_functions():
    posterior, (x, y) = SnapshotEnsemble(tiny.mlp().double(), members=5), tiny.points()
    run(posterior, 2, x, y)
    assert posterior.draw().members == 2
    assert posterior.predict(x).member_means.shape == (2, 12, 3)


def test_the_schedule_has_a_cycle_for_every_member():
    schedule = SnapshotEnsemble(tiny.mlp(), members=3).default_schedule(12)
    factors = [schedule(epoch) for epoch in range(12)]
    assert factors[0] == factors[4] == factors[8] == pytest.approx(1.0)
    assert factors[2] == factors[6] == pytest.approx(0.5)


def test_refresh_leaves_the_members_alone(tmp_path):
    posterior, (x, y) = SnapshotEnsemble(tiny.mlp().double(), members=3), tiny.points()
    ds.fit(posterior, [(x, y)], epochs=6, progress=False)
    before = posterior(x)
    ds.refresh(posterior, [])
    assert torch.equal(posterior(x), before)
    ds.save(posterior, tmp_path)
    assert torch.equal(ds.load(tmp_path, tiny.mlp())(x), before)


def test_drawing_before_the_first_snapshot_is_refused():
    with pytest.raises(ValueError, match="expected at least one snapshot of the weights, got none"):
        SnapshotEnsemble(tiny.mlp(), members=2).draw()
