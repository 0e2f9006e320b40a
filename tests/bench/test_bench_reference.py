"""Tasks that compare with a reference: what the report says is what the predictions say."""

import json

import pytest

from dissensus import metrics
from dissensus.bench.report.html_report import write_report
from dissensus.bench.run.jobs import bench, results_of_runs, run_all
from dissensus.bench.run.shared_training import can_share_training
from dissensus.bench.task.config import load_task, run_config

pytestmark = pytest.mark.usefixtures("undrawn")

TASKS = ("reference-posterior", "reference-digits", "reference-uci", "bimodal")


@pytest.mark.parametrize(("name", "seeds"), [("reference-digits", 1), ("bimodal", 2)])
def test_methods_are_compared_with_the_reference_of_their_seed(name, seeds, tmp_path):
    task = load_task(name, size="smoke")
    runs, evaluations = run_all(task, methods=["map", "hmc", "sghmc"], seeds=range(seeds), out=tmp_path)
    results = results_of_runs(runs, evaluations).methods
    said = {(run.config.method, run.config.seed): run.predictions().predictive for run in runs}
    for method in ("map", "sghmc"):
        for seed, evaluation in enumerate(results[method]):
            mine, theirs = said[method, seed], said["hmc", seed]
            if name == "bimodal":
                expected = metrics.mixture_total_variation(*mine.defining_tensors(), *theirs.defining_tensors())
                assert "against/agreement" not in evaluation.metrics
            else:
                expected = metrics.total_variation(mine.mean, theirs.mean)
                agreement = metrics.agreement(mine.mean, theirs.mean)
                assert evaluation.metrics["against/agreement"] == pytest.approx(float(agreement))
            assert evaluation.metrics["against/total_variation"] == pytest.approx(float(expected))
            assert "against/rhat" not in evaluation.metrics
    for seed, evaluation in enumerate(results["hmc"]):
        draws = said["hmc", seed].defining_tensors()[0].unflatten(0, (2, 4))  # two chains of four samples
        found = evaluation.metrics["against/rhat"], evaluation.metrics["against/effective_samples"]
        assert found[0] == pytest.approx(float(metrics.split_rhat(draws).max()))
        assert found[1] == pytest.approx(float(metrics.effective_sample_size(draws).min()))
        assert 0 <= evaluation.metrics["against/halves/total_variation"] <= 1
        assert "against/total_variation" not in evaluation.metrics


def test_the_report_shows_it_and_the_cost_of_the_chains(tmp_path):
    runs, evaluations = run_all(load_task("bimodal", size="smoke"), methods=["hmc", "map"], seeds=[0], out=tmp_path)
    results = results_of_runs(runs, evaluations)
    write_report(results, tmp_path / "report.md")  # without figures
    assert "Total variation" in (tmp_path / "report.md").read_text()
    epochs = [json.loads(line)["seconds"] for line in (tmp_path / "hmc-seed0" / "log.jsonl").read_text().splitlines()]
    assert results.methods["hmc"][0].metrics["cost/train_seconds"] > sum(epochs)


def test_a_reference_that_did_not_run_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="expected hmc among the runs of seed 0"):
        bench(load_task("bimodal", size="smoke"), methods=["map"], out=tmp_path)


@pytest.mark.parametrize("name", TASKS)
def test_shipped_tasks_load_in_every_size_and_chains_share_no_training(name):
    for size in ("smoke", "short", "paper"):
        task = load_task(name, size=size)
        assert task.settings["evaluation"]["against"] in task.methods
        shared = load_task(name, size=size, overrides=["training.together=true"])
        assert not can_share_training(run_config(shared, "sghmc", 0))
        assert {run_config(task, method, 0).settings.get("weight_prior_std") for method in task.methods} != {None}
        for method in task.methods:  # one posterior for all
            assert (
                run_config(task, method, 0).settings["weight_prior_std"]
                == run_config(task, "hmc", 0).settings["weight_prior_std"]
            )
