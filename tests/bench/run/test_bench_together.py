"""Training in runs: one for many methods, with the numbers of each alone, resumable, and its costs; wrong labels and curves."""

import json
import os
import re
import time

import pytest
import torch

from dissensus.bench.report import figure_sections
from dissensus.bench.report.results import results_of_evaluations
from dissensus.bench.rows.dataset_rows import TaskRows
from dissensus.bench.rows.task_rows import task_data
from dissensus.bench.run import jobs
from dissensus.bench.run.run import Run
from dissensus.bench.run.shared_training import can_share_training, companions, remove_leftovers, train_runs
from dissensus.bench.run.training_watch import CURVES, compare_with_labels
from dissensus.bench.task.config import load_task, run_config
from dissensus.methods import TRADI
from dissensus.training.fit import refresh
from small_runs import trained
from thinning import often

pytestmark = pytest.mark.usefixtures("unreported")

TASK = """
methods = ["map", "tradi", "tradi-diagonal", "swag", "swa", "gaussian_perturbation", "snapshot_ensemble", "mc_dropout"]
baseline = "map"
data = { name = "two_moons", count = 90, validation = 10 }
network = { name = "MLP", hidden = [6], batch_norm = true, dropout = 0.2 }
method.tradi = { samples = 3, state_noise = [1e-1, 1e-1] }
method.tradi-diagonal = { covariance = "diagonal" }
method.swag = { rank = 2, samples = 3 }
method.snapshot_ensemble = { members = 3 }
method.gaussian_perturbation = { samples = 2 }
method.mc_dropout = { samples = 2 }
[training]
epochs = 4
batch_size = 20
lr = 0.02
schedule = "cosine"
keep_best = false
together = true
branch_at = 0.5
tail_rate = 0.004
threads = 1
"""
METHODS = ["map", "tradi", "tradi-diagonal", "swag", "swa", "gaussian_perturbation", "snapshot_ensemble", "mc_dropout"]


@pytest.fixture(scope="module")
def task_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("task") / "mine.toml"
    path.write_text(TASK)
    return str(path)


@pytest.fixture(scope="module")
def benched(task_file, tmp_path_factory):
    """All methods on one training."""
    folder, told = tmp_path_factory.mktemp("together"), []
    jobs.bench(load_task(task_file), out=folder, tell=told.append)
    return folder, told


def weights(folder, method: str) -> bytes:
    return (folder / f"{method}-seed0" / "posterior" / "posterior.safetensors").read_bytes()


def facts(folder, method: str) -> dict:
    return json.loads((folder / f"{method}-seed0" / "training.json").read_text())


def rates(folder, method: str) -> list[float]:
    lines = (folder / f"{method}-seed0" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3, 4]
    return [json.loads(line)["lr"] for line in lines]


def test_one_training_serves_all_and_each_has_a_folder_of_its_own(benched):
    folder, told = benched
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == sorted(f"{m}-seed0" for m in METHODS)
    assert f"[1/8] map, seed 0: training together with {', '.join(METHODS[1:])}" in told
    assert sum("trained already" in text for text in told) == 7
    for method in METHODS:
        files = {path.name for path in (folder / f"{method}-seed0").iterdir()}
        assert {"config.toml", "log.jsonl", "posterior", "training.json", "metrics.json"} <= files
        assert "checkpoint.pt" not in files


@pytest.mark.parametrize("method", often(["map", "tradi-diagonal", "swag", "mc_dropout"], ["tradi", *METHODS[4:7]]))
def test_a_method_alone_gets_exactly_what_it_gets_in_company(benched, task_file, tmp_path, method):
    run = Run(tmp_path / f"{method}-seed0", run_config(load_task(task_file), method, 0))
    run.begin()
    train_runs([run])
    assert weights(tmp_path, method) == weights(benched[0], method)
    assert [path.name for path in tmp_path.iterdir()] == [f"{method}-seed0"]  # no checkpoints are left


def test_the_decayed_tail_is_an_ordinary_training(benched, task_file, tmp_path):
    task = load_task(task_file, overrides=["training.together=false"])
    jobs.bench(task, methods=["map"], out=tmp_path)
    assert weights(tmp_path, "map") == weights(benched[0], "map")


def test_the_tails_have_their_rates_and_snapshots_are_spread_over_the_constant_one(benched):
    folder, _ = benched
    assert rates(folder, "map") == pytest.approx([0.02, 0.0170711, 0.01, 0.0029289], abs=1e-6)
    assert rates(folder, "swag") == rates(folder, "tradi") == pytest.approx([0.02, 0.0170711, 0.004, 0.004], abs=1e-6)
    swag = Run.open(folder / "swag-seed0").posterior()
    # 80 rows in batches of 20: 4 steps an epoch, 8 in the head, 8 in the tail; 2 · rank = 4 snapshots, the last at the end
    assert (swag.recorder.snapshots.start, swag.recorder.snapshots.every) == (1, 2)  # it observes in the tail alone
    assert int(swag.recorder.snapshots.taken) == 4
    assert int(swag.steps) == 16
    snapshots = Run.open(folder / "snapshot_ensemble-seed0").posterior()
    assert (snapshots.recorder.snapshots.start, int(snapshots.recorder.snapshots.taken)) == (3, 3)


def test_tradis_that_differ_in_sampling_alone_share_their_filters(benched):
    folder, _ = benched
    shared, diagonal = (Run.open(folder / f"{name}-seed0").posterior() for name in ("tradi", "tradi-diagonal"))
    for name, mean in shared.mean.items():
        assert torch.equal(mean, diagonal.mean[name])
        assert torch.equal(shared.variance[name], diagonal.variance[name])
    assert int(shared.filters.observed) == int(diagonal.filters.observed) == 16
    assert (shared.recorder.settings["covariance"], diagonal.recorder.settings["covariance"]) == ("shared", "diagonal")
    assert weights(folder, "tradi") != weights(folder, "tradi-diagonal")  # they sample differently


@pytest.mark.parametrize("epoch", often([1, 4], [0, 2, 3, 5]))  # two of the head, two of either tail
def test_a_stopped_training_goes_on_as_if_it_had_not_been(benched, task_file, tmp_path, monkeypatch, epoch):
    chosen = ["map", "tradi", "tradi-diagonal", "swag"]
    log, seen = Run.log, []

    def stop(self, entry):
        log(self, entry)
        seen.append((self.config.method, entry.epoch))
        last = len(seen) == len(epochs_of(epoch)) and seen[-1] == epochs_of(epoch)[-1]
        if last:
            raise KeyboardInterrupt

    def epochs_of(count):
        """(method, epoch) pairs as they are logged, up to the epoch to stop after."""
        constant = ("tradi", "tradi-diagonal", "swag")
        whole = [*(("map", e) for e in range(1, 5)), *((m, 2 + e) for e in (1, 2) for m in constant)]
        ends = [0, 1, 2, 3, 6, 9]
        return whole[: ends[count] + 1]

    monkeypatch.setattr(Run, "log", stop)
    with pytest.raises(KeyboardInterrupt):
        jobs.bench(load_task(task_file), methods=chosen, out=tmp_path)
    assert list(tmp_path.glob(".together-*"))
    monkeypatch.setattr(Run, "log", log)
    jobs.bench(load_task(task_file), methods=chosen, out=tmp_path)
    assert not list(tmp_path.glob(".together-*"))
    for method in chosen:
        assert weights(tmp_path, method) == weights(benched[0], method)
        assert len(rates(tmp_path, method)) == 4


def test_seconds_are_those_a_method_would_have_taken_alone(task_file, tmp_path, monkeypatch):
    observe, taken = TRADI.observe, []

    def slow(self, optimizer):
        start = time.perf_counter()
        time.sleep(0.01)
        observe(self, optimizer)
        taken.append(time.perf_counter() - start)

    monkeypatch.setattr(TRADI, "observe", slow)
    jobs.bench(load_task(task_file), methods=["swa", "tradi", "tradi-diagonal"], out=tmp_path)  # all of one tail
    alone = {method: facts(tmp_path, method) for method in ("swa", "tradi", "tradi-diagonal")}
    assert len(taken) == 16  # once a step: the two TRADIs have one filter
    # SWA observes as well, in a small part of what TRADI takes here
    assert alone["tradi"]["seconds"] - alone["swa"]["seconds"] == pytest.approx(sum(taken), rel=0.25)
    assert alone["tradi"]["seconds"] >= sum(taken) >= 16 * 0.01
    assert alone["tradi-diagonal"]["seconds"] == pytest.approx(alone["tradi"]["seconds"], rel=0.25)
    taken_off = float(re.search(r"less ([\d.]+) s", alone["swa"]["counted"])[1])
    assert taken_off == pytest.approx(sum(taken), rel=0.25)
    assert "shared by swa, tradi, tradi-diagonal" in alone["swa"]["counted"]


def test_what_drawing_functions_takes_is_counted_as_of_a_method_alone(task_file, tmp_path, monkeypatch):
    def slow(posterior, loader):
        refresh(posterior, loader)
        time.sleep(0.5 if isinstance(posterior, TRADI) else 0.0)

    monkeypatch.setattr("dissensus.bench.run.shared_training.refresh", slow)
    jobs.bench(load_task(task_file), methods=["swa", "tradi"], out=tmp_path)
    alone = {method: facts(tmp_path, method)["seconds"] for method in ("swa", "tradi")}
    assert 0.3 <= alone["tradi"] - alone["swa"] < 3.0  # about 0.5, where nothing else runs


def test_only_equal_trainings_are_shared(task_file):
    task = load_task(task_file, overrides=["method.swag.training.lr=0.1", "method.mc_dropout.rate=0.1"])
    runs = [Run(None, run_config(task, method, seed)) for seed in (0, 1) for method in (*METHODS, "deep_ensemble")]
    named = {(run.config.method, run.config.seed): run for run in runs}
    assert not can_share_training(named["mc_dropout", 0].config)  # its dropout is inserted: another network
    assert not can_share_training(named["deep_ensemble", 0].config)
    assert [run.config.method for run in companions(named["swag", 0], runs)] == ["swag"]
    others = ["map", "tradi", "tradi-diagonal", "swa", "gaussian_perturbation", "snapshot_ensemble"]
    assert [(r.config.method, r.config.seed) for r in companions(named["map", 1], runs)] == [(m, 1) for m in others]


@pytest.mark.parametrize(("override", "message"), [
    ("training.keep_best=true", "expected keep_best = false, since"),
    ("training.patience=2", "expected no patience, since"),
    ("training.epochs=1", "expected two epochs or more"),
    ("training.branch_at=1.0", "expected a number below 1 for .*training.branch_at, got 1.0"),
    ("training.optimizer=default", "expected an optimizer by name"),
    ("training.tail_factor=0.1", "expected tail_rate or tail_factor, not both"),
])  # fmt: skip
def test_what_cannot_be_shared_is_one_clear_error(task_file, tmp_path, override, message):
    with pytest.raises(ValueError, match=message):
        jobs.bench(load_task(task_file, overrides=[override]), methods=["map", "tradi"], out=tmp_path)
    assert not list(tmp_path.glob("*/training.json"))


def test_checkpoints_that_nobody_will_ask_for_are_removed_once_all_runs_are_trained(tmp_path):
    for name in ("map-seed0", "swag-seed0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").touch()
    (tmp_path / "map-seed0" / "training.json").touch()
    (tmp_path / ".together-0123456789ab").mkdir()
    (tmp_path / ".together-0123456789ab" / "head.pt").touch()
    remove_leftovers(tmp_path)
    assert (tmp_path / ".together-0123456789ab" / "head.pt").is_file()  # swag may be trained by somebody now
    (tmp_path / "swag-seed0" / "training.json").touch()
    remove_leftovers(tmp_path)
    assert not (tmp_path / ".together-0123456789ab").exists()


def test_a_folder_is_tried_without_leaving_anything_and_what_was_left_is_removed(tmp_path):
    left = tmp_path / ".probe.4194304-1-1.tmp"  # no system has so many processes
    left.touch()
    os.utime(left, (0, 0))
    jobs.writable_folder(tmp_path)
    assert os.listdir(tmp_path) == []


# ----------------------------------------------------------- wrong labels, and curves that do not disturb the training
def run(folder, method: str, *overrides: str) -> Run:
    small = ["network.hidden=[8]", "training.epochs=2", "method.components=2", "method.samples=2"]
    given = [*(each for each in small if method == "node_bnn" or not each.startswith("method.")), *overrides]
    task = load_task("digits", size="smoke", overrides=["evaluation.corrupt=none", *given], methods=[method])
    return Run(folder, run_config(task, method, 0))


def test_training_labels_are_wrong_and_test_labels_are_not():
    settings = {"name": "digits", "train": 500, "validation": 100, "test": 200}
    clean, noisy = task_data(settings), task_data({**settings, "label_noise": 0.4})
    wrong = [(rows.y != rows.true_labels).sum() for rows in (noisy.train, noisy.validation)]
    assert sum(map(int, wrong)) == 200  # what is held out of a noisy set is noisy
    assert min(wrong) > 20
    assert clean.train.true_labels is None
    assert torch.equal(noisy.test.y, clean.test.y)
    assert noisy.test.true_labels is None
    assert torch.equal(
        *(
            torch.cat(each).bincount()
            for each in ([noisy.train.true_labels, noisy.validation.true_labels], [clean.train.y, clean.validation.y])
        )
    )


def test_what_is_memorised_is_counted_at_the_wrong_rows_alone():
    rows = TaskRows(torch.zeros(5, 1), torch.tensor([0, 1, 2, 2, 2]), torch.tensor([0, 1, 0, 1, 2]))
    found = compare_with_labels(torch.tensor([0, 0, 2, 1, 2]), rows)
    assert {name: each.tolist() for name, each in found.items()} == {
        "noise/memorised": [True, False], "noise/recovered": [False, True], "noise/clean": [True, False, True],
    }  # fmt: skip
    assert compare_with_labels(torch.zeros(5), TaskRows(rows.x, rows.y)) == {}


@pytest.mark.parametrize("method", ["map", "node_bnn"])
def test_curves_agree_with_the_evaluation_and_leave_the_training_alone(tmp_path, method):
    looked = trained(run(tmp_path / "looked", method, "data.label_noise=0.5", "evaluation.curves_every=1")).evaluate()
    alone = trained(run(tmp_path / "alone", method, "data.label_noise=0.5")).evaluate()
    assert looked.metrics["nll"] == alone.metrics["nll"]
    assert not (tmp_path / "alone" / CURVES).exists()
    assert looked.arrays["curves/epochs"].tolist() == [0, 1, 2]
    given = [(results_of_evaluations({method: each}, "title"), {method: "black"}) for each in (looked, alone)]
    drawn = figure_sections.epoch_section(*given[0], "curves")
    assert drawn is not None
    assert len(drawn[1][0][1].axes) == 4  # training rows, test rows, memorised, recovered
    assert figure_sections.epoch_section(*given[1], "curves") is None
    history = figure_sections.epoch_data(given[1][0], "training")
    assert [each[method][1].shape for each in history.values()] == [(1, 2)] * 2  # loss and validation, one seed
    if method == "map":  # one function, kept at the last epoch or at the best
        ends = {name: looked.arrays[f"curves/over/{name}"].tolist() for name in ("test/nll", "noise/memorised")}
        assert any(each == pytest.approx(looked.metrics["nll"], rel=1e-6) for each in ends["test/nll"])
        share = pytest.approx(looked.metrics["noise/memorised"], rel=1e-12)
        assert any(each == share for each in ends["noise/memorised"])


def test_curves_of_a_regression_are_refused(tmp_path):
    task = load_task("cubic", size="smoke", overrides=["evaluation.curves_every=1"])
    with pytest.raises(ValueError, match=r"expected classes for evaluation.curves_every, got a regression"):
        Run(tmp_path, run_config(task, task.methods[0], 0)).check()
    with pytest.raises(ValueError, match=r"expected classes for data.label_noise = 0.1, got a set without"):
        task_data({"name": "cubic", "label_noise": 0.1})
