"""How members differ over training: what a run's folder keeps of it, also when the run was stopped."""

import json

import pytest
import torch

import dissensus as ds
from dissensus.bench.run import jobs
from dissensus.bench.run.run import Run
from dissensus.bench.run.training_watch import DISTANCES, concatenate_batches, read_measurements
from dissensus.bench.task.config import load_task, run_config
from dissensus.evaluation.member_diagnostics import MemberDistances, member_distances
from small_runs import train_until, trained


def read_distances(folder):
    return read_measurements(folder / DISTANCES, MemberDistances._fields)


pytestmark = pytest.mark.usefixtures("undrawn")


def run(folder, method: str = "deep_ensemble", *, every: int = 2, epochs: int = 5) -> Run:
    overrides = [f"evaluation.distances_every={every}", f"training.epochs={epochs}", "training.keep_best=false"]
    return Run(folder, run_config(load_task("moons", size="smoke", overrides=overrides), method, 0))


def test_the_start_and_every_kth_epoch_are_kept_and_the_end_is_measured(tmp_path):
    each = trained(run(tmp_path / "one"))
    kept = read_distances(each.folder)
    assert list(kept) == [0, 2, 4]
    evaluation = each.evaluate()
    assert evaluation.arrays["distances/epochs"].tolist() == [0, 2, 4]
    assert evaluation.arrays["distances/over/weight"].tolist() == [found["weight"] for found in kept.values()]
    x, y = concatenate_batches(each.loader(each.data.train))
    now = member_distances(ds.load(each.folder / "posterior"), x, y)
    for space, value in now._asdict().items():
        assert evaluation.metrics[f"distances/{space}"] == pytest.approx(value, rel=1e-5), space
    torch.manual_seed(0)
    networks = [ds.nets.MLP(2, 2, hidden=(50, 50)) for _ in range(2)]
    start = member_distances(ds.DeepEnsemble(networks), x, y)
    assert kept[0]["weight"] == pytest.approx(start.weight, rel=1e-6)
    assert kept[0]["gradient"] == pytest.approx(start.gradient, rel=1e-4)


def test_a_stopped_run_keeps_the_same_distances_as_one_that_was_not(tmp_path):
    whole = trained(run(tmp_path / "whole"))
    train_until(run(tmp_path / "stopped"), 2)
    path = tmp_path / "stopped" / DISTANCES
    assert list(read_distances(path.parent)) == [0, 2]
    with path.open("a") as file:
        file.write('{"epochs": 3, "wei')  # cut off in the middle of a line
    resumed = trained(run(tmp_path / "stopped"))
    assert read_distances(resumed.folder) == read_distances(whole.folder)
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_watching_does_not_change_the_training(tmp_path):
    watched = trained(run(tmp_path / "watched", every=1)).evaluate().metrics["nll"]
    task = load_task("moons", size="smoke", overrides=["training.epochs=5", "training.keep_best=false"])
    alone = trained(Run(tmp_path / "alone", run_config(task, "deep_ensemble", 0)))
    assert alone.evaluate().metrics["nll"] == watched
    assert not (alone.folder / DISTANCES).exists()
    assert not any(key.startswith("distances/") for key in alone.evaluate().metrics)


def test_single_networks_are_left_out_and_the_report_shows_the_others(tmp_path):
    task = load_task("moons", size="smoke", overrides=["evaluation.distances_every=1"])
    results, _ = jobs.bench(task, methods=["map", "deep_ensemble"], seeds=2, out=tmp_path)
    assert not (tmp_path / "map-seed0" / DISTANCES).exists()
    assert "distances/weight" not in results.methods["map"][0].metrics
    page = (tmp_path / "report.html").read_text()
    assert "How members differ, over training" in page
    text = (tmp_path / "report.md").read_text()
    table = text.split("## How far members are apart")[1].split("##")[0]
    assert "deep_ensemble" in table
    assert "map" not in table
    mean = sum(each.metrics["distances/weight"] for each in results.methods["deep_ensemble"]) / 2
    assert f"{mean:.3f}" in table


def test_a_damaged_file_is_one_clear_error(tmp_path):
    each = trained(run(tmp_path / "one"))
    (each.folder / DISTANCES).write_text('{"epochs": 0}\n')
    with pytest.raises(ValueError, match=r"expected a whole .*distances.jsonl, got a damaged one"):
        read_distances(each.folder)
