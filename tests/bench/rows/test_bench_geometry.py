"""Grids and regions: they are where they say, and a run's numbers there are those of its members."""

import math

import pytest
import torch

import dissensus as ds
from dissensus.bench.report.measures import as_square, plane_limits, region_keys, region_words
from dissensus.bench.rows.named_sets import GEOMETRIES, SETS, line_geometry
from dissensus.bench.rows.task_rows import task_data
from dissensus.bench.run import jobs
from dissensus.bench.run.evaluate_run import with_grid
from dissensus.bench.run.run import Run
from dissensus.bench.task.config import load_task
from dissensus.core.predictive import ClassificationPredictive, RegressionPredictive
from dissensus.evaluation.evaluation import Evaluation

pytestmark = pytest.mark.usefixtures("undrawn")

NOTHING = Evaluation("regression", {}, {}, "variance")


@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_geometry_is_of_a_known_set_and_its_data_lie_in_the_region_at_the_data(name):
    data = task_data({"name": name, "validation": 0})
    found = GEOMETRIES[name](data.train.x)
    assert found.inputs.shape[1] == data.train.x.shape[1]
    assert SETS[name].kind == data.kind
    regions = torch.stack(list(found.regions.values()))
    assert regions.sum(0).max() == 1, "regions overlap"
    assert regions.any(1).all(), "an empty region"
    # the grid point nearest to a training row is in no region of absence
    nearest = torch.cdist(found.training_positions.double(), found.positions.double()).argmin(1)
    absent = [where for region, where in found.regions.items() if region != "at_data"]
    assert all((~where[nearest]).double().mean() > 0.95 for where in absent), "training rows off the data"


def test_regions_of_a_line_are_the_intervals_and_what_is_left_of_it():
    x = torch.zeros(3, 1)
    found = line_geometry(x, window=(-2.0, 2.0), intervals=((-1.0, -0.5), (0.5, 1.0)), points=401)
    where = found.positions[:, 0]
    for i, z in enumerate(where.tolist()):
        at = -1.0 <= z <= -0.5 or 0.5 <= z <= 1.0
        outside = z < -1.0 or z > 1.0
        assert bool(found.regions["at_data"][i]) == at
        assert bool(found.regions["outside"][i]) == outside
        assert bool(found.regions["between"][i]) == (not at and not outside)
    assert "between" not in line_geometry(x, window=(-2.0, 2.0), intervals=((-1.0, 1.0),)).regions


def test_off_the_data_is_far_from_every_training_input():
    x, _ = ds.data.five_blobs(5, scale=0.4)
    found = GEOMETRIES["five_blobs"](x)
    for row in range(0, len(found.positions), 97):
        distance = min(math.dist(found.positions[row].tolist(), point) for point in x.tolist())
        assert bool(found.regions["off_data"][row]) == (distance > 1.0)
        assert bool(found.regions["at_data"][row]) == (distance < 0.5)


def test_a_grid_over_features_is_asked_at_the_features_of_its_positions():
    x, _ = ds.data.three_clusters()
    found = GEOMETRIES["three_clusters"](x)
    torch.testing.assert_close(found.inputs, ds.data.quadratic_features(found.positions))
    torch.testing.assert_close(ds.data.quadratic_features(found.training_positions), x)
    assert "digits" not in GEOMETRIES


def test_numbers_of_a_region_are_means_over_it():
    found = line_geometry(torch.zeros(1, 1), window=(0.0, 3.0), intervals=((0.0, 1.0), (2.0, 3.0)), points=31)
    means = torch.randn(4, 31, 1, dtype=torch.float64)
    evaluation = with_grid(NOTHING, RegressionPredictive(means, torch.ones_like(means)), found, torch.zeros(1, 1))
    between = [i for i in range(31) if 1.0 < float(found.positions[i]) < 2.0]
    expected = sum(float(means[:, i, 0].std(correction=0)) for i in between) / len(between)
    assert evaluation.metrics["region/between/sd"] == pytest.approx(expected, abs=1e-12)
    assert set(region_keys(evaluation)) == {"region/between/sd", "region/at_data/sd"}
    assert evaluation.arrays["grid/members"].shape == (4, 31)

    x, y = ds.data.five_blobs(4, scale=0.4)
    squares = GEOMETRIES["five_blobs"](x)
    logits = torch.randn(3, len(squares.positions), 5, dtype=torch.float64).log_softmax(2)
    evaluation = with_grid(NOTHING, ClassificationPredictive(logits), squares, y)
    mean = logits.exp().mean(0)
    entropy = -(mean * mean.log()).sum(1)
    expected = float(entropy[squares.regions["off_data"]].mean())
    assert evaluation.metrics["region/off_data/entropy"] == pytest.approx(expected, abs=1e-12)
    assert region_words("region/off_data/entropy") == ("off the data", "entropy")


@pytest.mark.parametrize("shape", [(4, 30, 1), (4, 31)], ids=["fewer points", "no outputs"])
def test_predictions_of_another_grid_are_one_error(shape):
    found = line_geometry(torch.zeros(1, 1), window=(0.0, 3.0), intervals=((0.0, 1.0), (2.0, 3.0)), points=31)
    means = torch.randn(*shape)
    with pytest.raises(ValueError, match=r"expected predictions at all grid points, got Regression.*--again"):
        with_grid(NOTHING, RegressionPredictive(means, torch.ones_like(means)), found, torch.zeros(1, 1))


def test_a_square_is_drawn_with_the_first_input_to_the_right():
    x, _ = ds.data.five_blobs(4)
    found = GEOMETRIES["five_blobs"](x)
    first, second = as_square(found.positions[:, 0]), as_square(found.positions[:, 1])
    assert torch.equal(first[0], first[-1])  # the same in every row, growing to the right
    assert (first[0].diff() > 0).all()
    assert (second[:, 0].diff() > 0).all()
    assert plane_limits(found.positions) == (-7.0, 7.0, -7.0, 7.0)


def test_a_run_measures_its_members_on_the_grid(tmp_path):
    task = load_task("toy-regression-1d", size="smoke", overrides=["data.standardise=training"])
    jobs.bench(task, methods=["deep_ensemble"], out=tmp_path)
    run = Run.open(tmp_path / "deep_ensemble-seed0")
    stored, found = run.measure(), GEOMETRIES["x_sin_x"](run.data.train.x)
    posterior = ds.load(run.folder / "posterior")
    predictive = posterior.predict(run.data.standardiser(found.inputs))
    sd = predictive.epistemic[:, 0].sqrt()
    for name, where in found.regions.items():
        assert stored.metrics[f"region/{name}/sd"] == pytest.approx(float(sd[where].mean()), rel=1e-5)
    torch.testing.assert_close(stored.arrays["grid/mean"], predictive.mean[:, 0], rtol=1e-5, atol=1e-6)
    page = (tmp_path / "report.html").read_text()
    assert "Where is it certain?" in page
    assert "Standard deviation between the data" in page
