"""One run, several posteriors: each is what it would have been alone."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.methods import (
    MAP,
    SWA,
    SWAG,
    TRADI,
    DeepEnsemble,
    GaussianPerturbation,
    MCDropout,
    SnapshotEnsemble,
    branch,
    track,
)
from refusals import refuses


def loader():
    x, y = tiny.points(24)
    return [(x[i : i + 8], y[i : i + 8]) for i in (0, 8, 16)]


def test_every_posterior_is_what_it_would_have_been_alone():
    start = tiny.mlp().double()
    methods = {"tradi": TRADI, "swag": partial(SWAG, rank=3), "swa": SWA, "map": MAP}

    def trained(posterior):
        optimizer = torch.optim.Adam(posterior.parameters(), lr=0.01)
        ds.fit(posterior, loader(), epochs=4, optimizer=optimizer, progress=False)
        return posterior

    together = trained(track(copy.deepcopy(start), list(methods.values())))
    assert [posterior.name for posterior in together.watchers] == list(methods)
    for name, method in methods.items():
        alone = trained(method(copy.deepcopy(start)))
        same = {k: v for k, v in tiny.state(alone).items() if not k.startswith("stored")}  # stored draws are random
        found = {k: v for k, v in tiny.state(together.watchers[name]).items() if not k.startswith("stored")}
        assert tiny.largest_difference(same, found) == 0


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_watched_run_keeps_its_best_epoch_and_its_watchers_their_records(interrupted, tmp_path):
    start, epochs = tiny.mlp().double(), 8
    x, y = tiny.points(24, seed=1)
    methods = [partial(SWAG, rank=2, samples=3), TRADI, partial(SnapshotEnsemble, members=3), MAP]

    def trained(posterior, validation, **keywords):
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.5)  # overfits: the best epoch is an early one
        settings = {"epochs": epochs, "validation": validation, "progress": False, **keywords}
        return ds.fit(posterior, loader(), optimizer=optimizer, **settings)

    alone, watched, whole = MAP(copy.deepcopy(start)), *(track(copy.deepcopy(start), methods) for _ in range(2))
    expected = trained(alone, [(x, y)])
    assert expected.best < epochs - 1
    if interrupted:
        stopped, saved = track(copy.deepcopy(start), methods), {"checkpoint": tmp_path / "run.pt"}
        trained(stopped, [(x, y)], **saved, callback=lambda epoch: epoch.epoch == epochs - 3)
        history = trained(watched, [(x, y)], **saved)
    else:
        history = trained(watched, [(x, y)])
    assert history.best == expected.best
    assert torch.equal(watched.predict(x).mean, alone.predict(x).mean)
    assert torch.equal(watched.watchers["map"].predict(x).mean, alone.predict(x).mean)
    trained(whole, None)  # keeps the last epoch
    for name in ("swag", "tradi", "snapshot_ensemble"):
        mine, theirs = (tiny.state(run.watchers[name].recorder) for run in (watched, whole))
        assert mine
        assert tiny.largest_difference(mine, theirs) == 0
    assert watched.watchers["swag"].stored is not None
    snapshots = [
        run.watchers["snapshot_ensemble"].predict(x).mean for run in (watched, whole)
    ]  # drawn from the record alone
    assert torch.equal(*snapshots)


def test_patience_is_that_of_the_run_also_where_it_is_watched():
    (x, y), start, lengths = tiny.points(24, seed=1), tiny.mlp().double(), []
    for posterior in (MAP(copy.deepcopy(start)), track(copy.deepcopy(start), [partial(SWAG, start=0, every=1)])):
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.5)
        settings = {"validation": [(x, y)], "patience": 1, "progress": False}
        lengths.append(len(ds.fit(posterior, loader(), epochs=20, optimizer=optimizer, **settings)))
    assert lengths[0] == lengths[1] < 20


def test_a_run_is_unpacked_and_looked_up():
    tradi, noisy = watchers = track(tiny.mlp(), [TRADI, GaussianPerturbation]).watchers
    assert isinstance(tradi, TRADI)
    assert watchers[1] is watchers["gaussian_perturbation"] is noisy
    assert len(watchers) == 2
    refuses(lambda: watchers["swag"], "expected a watcher of tradi, gaussian_perturbation, got 'swag'")


def test_one_network_and_one_likelihood_for_all():
    module = tiny.mlp(outputs=2).double()
    run = track(module, [TRADI, partial(SWAG, start=0, every=1), MAP], likelihood=ds.Regression(initial=3.0))
    x, y = tiny.points(24)[0], 0.1 * torch.randn(24, 2, dtype=torch.float64)
    optimizer = torch.optim.Adam(run.parameters(), lr=0.1)
    ds.fit(run, [(x, y)], epochs=30, optimizer=optimizer, progress=False)
    noise = [float(posterior.predict(x).aleatoric.mean()) for posterior in run.watchers]
    assert noise[0] == pytest.approx(noise[1]) == pytest.approx(noise[2])
    assert noise[0] < 1.0
    assert len({id(p) for posterior in run.watchers for p in posterior.parameters()}) == len(list(run.parameters()))


def test_the_run_itself_predicts_what_the_network_says():
    module, (x, _) = tiny.mlp().double(), tiny.points()
    run = track(module, [TRADI]).eval()
    torch.testing.assert_close(run(x)[0], module(x), rtol=0, atol=1e-12)


def test_a_posterior_of_a_run_is_saved_alone(tmp_path):
    run = track(tiny.mlp(dropout=0.2).double(), [partial(SWAG, rank=2, samples=3), MCDropout])
    ds.fit(run, loader(), epochs=2, progress=False)
    x = tiny.points()[0]
    for posterior in run.watchers:
        ds.save(posterior, tmp_path / posterior.name)
        loaded = ds.load(tmp_path / posterior.name, tiny.mlp(dropout=0.2))
        assert torch.equal(loaded.predict(x).member_means, posterior.predict(x).member_means)
    ds.save(run, tmp_path / "run")  # what trained, without what watched it
    assert torch.equal(ds.load(tmp_path / "run", tiny.mlp(dropout=0.2)).predict(x).mean, run.predict(x).mean)


def test_a_run_resumes_from_a_checkpoint(tmp_path):
    def build():
        torch.manual_seed(0)
        return track(tiny.mlp().double(), [TRADI, partial(SWAG, rank=2)])

    whole, stopped, resumed = build(), build(), build()
    ds.fit(whole, loader(), epochs=4, progress=False)
    file = tmp_path / "run.pt"
    ds.fit(stopped, loader(), epochs=4, progress=False, checkpoint=file, callback=lambda epoch: epoch.epoch == 2)
    ds.fit(resumed, loader(), epochs=4, progress=False, checkpoint=file)
    assert tiny.largest_difference(whole.watchers["tradi"].variance, resumed.watchers["tradi"].variance) == 0
    assert tiny.largest_difference(whole.watchers["swag"].mean, resumed.watchers["swag"].mean) == 0


@pytest.mark.parametrize("scheduled", [False, True])
def test_branches_go_on_alike_and_apart(scheduled):
    run = track(tiny.mlp().double(), [TRADI, partial(SWAG, start=6, every=1)])
    optimizer = torch.optim.Adam(run.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9) if scheduled else None
    ds.fit(run, loader(), epochs=2, optimizer=optimizer, scheduler=scheduler, progress=False)
    other, its_optimizer = branch(run, optimizer)
    before = tiny.state(run.particles)
    ds.fit(other, loader(), epochs=1, optimizer=its_optimizer, progress=False)
    assert tiny.largest_difference(before, tiny.state(run.particles)) == 0  # the copy's training is its own
    assert int(run.watchers["swag"].recorder.snapshots.taken) == 0
    assert int(other.watchers["swag"].recorder.snapshots.taken) == 3
    ds.fit(run, loader(), epochs=1, optimizer=optimizer, progress=False)
    assert tiny.largest_difference(tiny.state(run.particles), tiny.state(other.particles)) == 0
    assert tiny.largest_difference(run.watchers["tradi"].mean, other.watchers["tradi"].mean) == 0


def test_what_has_nothing_to_draw_from_yet_is_not_refreshed():
    run = track(tiny.mlp().double(), [TRADI, partial(SWAG, start=1000)])
    ds.fit(run, loader(), epochs=1, progress=False)
    assert run.watchers["tradi"].stored is not None
    refuses(lambda: run.watchers["swag"].draw(), "expected at least one snapshot")


def test_methods_that_copy_the_network_are_refused():
    with pytest.raises(TypeError, match="expected methods that can record another's weights, got DeepEnsemble"):
        track(tiny.mlp(), [TRADI, lambda _, **keywords: DeepEnsemble([tiny.mlp(), tiny.mlp()], **keywords)])


def test_an_optimizer_with_other_tensors_cannot_branch():
    run, other = track(tiny.mlp(), [TRADI]), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*run.parameters(), *other.parameters()], lr=0.1)
    refuses(lambda: branch(run, optimizer), r"expected an optimizer of posterior.parameters\(\) only")


def test_names_are_no_methods():
    for methods in ({"swag": ds.SWAG}, ["swag"], []):  # without any, the run would be unwatched
        with pytest.raises(TypeError, match=r"expected methods, got .*; pass classes or functions of the network"):
            ds.track(tiny.mlp(), methods)
