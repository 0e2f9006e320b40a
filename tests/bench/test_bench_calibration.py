"""[calibration] of tasks and `dissensus calibrate`: held-out test rows calibrate, others promise, the rest is tested on."""

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import dissensus as ds
from dissensus.bench.cli import app
from dissensus.bench.report.measures import measures
from dissensus.bench.run import jobs
from dissensus.bench.run.run import Run
from dissensus.bench.task.config import load_task
from dissensus.metrics import ece
from refusals import refuses
from small_runs import moons_network, task_with_weights

pytestmark = pytest.mark.usefixtures("undrawn")

TASK = """
methods = ["map", "node_bnn"]
data = { name = "two_moons", count = 600, noise = 0.4, validation = 0 }
network = { name = "MLP", hidden = [8], weights = "given.safetensors" }
training = { epochs = 0, threads = 1 }
method.node_bnn = { samples = 8 }
calibration = { rows = 400, method = "isotonic", level = 0.9, risk = 0.2 }
"""


@pytest.fixture
def task(tmp_path):
    return task_with_weights(tmp_path, TASK, moons_network(8, epochs=20))


def test_a_task_calibrates_promises_and_reports_both(task, tmp_path):
    made, evaluations = jobs.run_all(task, methods=task.methods, seeds=[0], out=tmp_path / "runs")
    for run, found in zip(made, evaluations, strict=True):
        posterior = ds.load(run.folder / "calibrated")
        assert posterior.calibration.kind == "isotonic"
        assert posterior.calibration.facts["rows"] == posterior.promises["conformal"].rows == 200  # others
        test = run.loader(run.data.test)
        predictive = ds.predict(posterior, test)
        y = predictive.targets
        assert len(y) == 200
        assert found.metrics["calibrated/ece"] == pytest.approx(float(ece(predictive.mean, y)), abs=1e-5)
        assert found.metrics["nll"] != found.metrics["calibrated/nll"]  # as trained, and calibrated
        direct = ds.evaluate(posterior, test).metrics
        for key in ("conformal/coverage", "conformal/size", "conformal/worst_class/coverage", "selective/accepted"):
            assert found.metrics[key] == pytest.approx(direct[key], abs=1e-6), key
        shown = {measure.key for measure in measures(found)}
        assert {"calibrated/ece", "conformal/coverage", "conformal/size", "selective/risk"} <= shown
    written = jobs.report_runs([str(run.folder) for run in made], tmp_path / "report")[1]
    page = next(path for path in written if str(path).endswith("report.html")).read_text()
    assert "conformal: 90 % coverage promised" in page
    assert "Reliability diagram of map, calibrated" in page


def test_promises_alone_leave_the_best_temperature_to_be_found(task, tmp_path):
    settings = {**task.settings, "calibration": {"rows": 400, "level": 0.9}}
    (run,), found = jobs.run_all(replace(task, settings=settings), methods=["map"], seeds=[0], out=tmp_path / "runs")
    posterior = run.posterior()
    best = ds.temperature_scale(posterior, run.loader(run.data.calibration))
    assert best != 1.0
    assert found[0].metrics["calibrated/temperature"] == pytest.approx(best, rel=1e-4)


def test_rows_that_chose_the_temperature_of_training_promise_nothing(task, tmp_path):
    settings = {**task.settings, "calibration": {"rows": 400, "level": 0.9}}
    settings["training"] = {**settings["training"], "temperature": True}
    (run,), _ = jobs.run_all(replace(task, settings=settings), methods=["map"], seeds=[0], out=tmp_path / "runs")
    posterior, rows = run.posterior(), run.data.calibration
    assert float(posterior.temperature) == pytest.approx(
        ds.temperature_scale(posterior, run.loader(rows))
    )  # of all 400
    found = ds.load(run.folder / "calibrated")
    assert found.promises["conformal"].rows == 200
    others = ds.temperature_scale(posterior, run.loader(rows.select(torch.arange(0, 400, 2))))
    assert float(found.temperature) == pytest.approx(others)


def test_a_regression_in_its_own_units_is_calibrated(tmp_path):
    (tmp_path / "mine.toml").write_text("""
methods = ["map"]
likelihood = { regression = { noise = 1.0 } }
data = { name = "cubic", points = 60, validation = 0, targets = "standardised" }
network = { name = "MLP", hidden = [6] }
training = { epochs = 2, keep_best = false, threads = 1 }
calibration = { rows = 0.5, method = "isotonic", level = 0.8 }
""")
    made, (found,) = jobs.run_all(
        load_task(str(tmp_path / "mine.toml")), methods=["map"], seeds=[0], out=tmp_path / "r"
    )
    posterior, data = ds.load(made[0].folder / "calibrated"), made[0].data
    direct = ds.evaluate(posterior, made[0].loader(data.test)).metrics
    assert found.metrics["conformal/coverage"] == pytest.approx(direct["conformal/coverage"], abs=1e-6)
    scale = float(data.targets.std)
    assert found.metrics["conformal/size"] == pytest.approx(scale * direct["conformal/size"], rel=1e-4)
    assert found.metrics["calibrated/rmse"] == pytest.approx(scale * direct["rmse"], rel=1e-4)
    assert found.metrics["calibrated/coverage90"] == pytest.approx(direct["coverage90"], abs=1e-6)


def test_a_trained_run_is_calibrated_afterwards(task, tmp_path):
    settings = {key: value for key, value in task.settings.items() if key != "calibration"}
    (run,), _ = jobs.run_all(replace(task, settings=settings), methods=["map"], seeds=[0], out=tmp_path / "bare")
    assert not (run.folder / "calibrated").exists()
    before, after = jobs.calibrate_run(Run.open(run.folder), {"method": "temperature", "level": 0.9}, rows=0.5)
    assert len(after.arrays["test/nll"]) == 300
    assert after.metrics["nll"] < before.metrics["nll"]
    assert abs(after.metrics["conformal/coverage"] - 0.9) < 0.1  # 150 rows: three of a beta-binomial's deviations
    assert float(ds.load(run.folder / "calibrated").temperature) == pytest.approx(after.metrics["temperature"])
    shown = CliRunner().invoke(app, ["calibrate", str(run.folder), "--method", "isotonic", "--rows", "200", "--quiet"])
    assert shown.exit_code == 0
    assert "before" in shown.output
    assert str(run.folder / "calibrated") in shown.output.replace("\n", "")
    assert ds.load(run.folder / "calibrated").calibration.facts["rows"] == 200
    refuses(lambda: jobs.calibrate_run(Run.open(run.folder), {"method": "temperature"}), "expected rows held out")
    refuses(lambda: jobs.calibrate_run(Run.open(run.folder), {}, rows=0.5), "expected something to fit")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("calibration.method=scale", "expected calibration.method of temperature, vector, isotonic, histogram"),
        ("calibration.score=cqr", "expected calibration.score of lac"),
        ("calibration.level=1.5", "expected .*level"),
        ("calibration.alpha=0.1", "calibration.alpha"),
    ],
)
def test_what_a_task_cannot_have_is_refused_before_anything_is_trained(task, tmp_path, override, message):

    def run():
        asked = load_task(str(tmp_path / "mine.toml"), overrides=[override])
        jobs.run_all(asked, methods=["map"], seeds=[0], out=tmp_path / "runs")

    refuses(lambda: run(), message)
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").glob("*/posterior"))
