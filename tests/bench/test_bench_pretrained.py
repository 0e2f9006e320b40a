"""Test rows held out for temperatures, networks that stay as they are, and the task `pretrained` at its smallest."""

import importlib
import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import dissensus as ds
from dissensus.bench.report.measures import measures
from dissensus.bench.rows.task_rows import task_data
from dissensus.bench.run import jobs
from dissensus.bench.run.evaluate_run import with_calibration
from dissensus.bench.run.run_folder import read_predictions
from dissensus.bench.task.config import load_task, run_config
from dissensus.metrics import ece
from small_runs import moons_network, task_with_weights
from small_scenes import write_cifar

TASK = """
methods = ["map", "map-scaled", "node_bnn"]
data = { name = "two_moons", count = 200, noise = 0.4, validation = 0, calibration = 60 }
network = { name = "MLP", hidden = [6], weights = "given.safetensors" }
training = { epochs = 0, threads = 1 }
method.map-scaled.training = { temperature = true }
method.node_bnn = { samples = 8 }
"""


@pytest.fixture
def task(tmp_path):
    return task_with_weights(tmp_path, TASK, moons_network(6, epochs=8))


def runs(task, tmp_path, *methods: str):
    return jobs.run_all(task, methods=methods or task.methods, seeds=[0], out=tmp_path / "runs")


def test_calibration_rows_are_test_rows_that_are_not_tested_on():
    settings = {"name": "two_moons", "count": 100, "validation": 0}
    whole = task_data(settings).test
    held = task_data(settings | {"calibration": 30})
    assert (len(held.test.y), len(held.calibration.y), len(held.train.y)) == (70, 30, 100)
    together = torch.cat([held.test.x, held.calibration.x])
    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, whole.x.tolist()))
    assert len(task_data(settings).calibration.y) == 0


def test_without_training_the_network_is_the_one_that_was_given(task, tmp_path):
    made, evaluations = runs(task, tmp_path)
    given = moons_network(6, epochs=8).state_dict()
    for run in made:
        found = run.posterior().plain_network().state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in given.items())
    plain, scaled, noisy = evaluations
    assert plain.metrics["accuracy"] == scaled.metrics["accuracy"]
    assert len({each.metrics["nll"] for each in (plain, scaled, noisy)}) == 3
    assert plain.metrics["cost/train_seconds"] == 0
    assert (made[0].folder / "log.jsonl").read_text() == ""


def test_the_best_temperature_is_that_of_the_held_out_rows(task, tmp_path):
    made, (plain, scaled, _) = runs(task, tmp_path)
    data, posterior = made[0].data, made[0].posterior()
    temperature = ds.temperature_scale(posterior, made[0].loader(data.calibration))
    assert plain.metrics["calibrated/temperature"] == pytest.approx(temperature, rel=1e-4)
    assert scaled.metrics["temperature"] == pytest.approx(temperature, rel=1e-4)
    assert scaled.metrics["calibrated/temperature"] == pytest.approx(temperature, rel=1e-3)
    predictive = ds.predict(posterior, made[0].loader(data.test))
    y = predictive.targets
    assert plain.metrics["calibrated/nll"] == pytest.approx(-float(predictive.log_prob(y).mean()), abs=1e-5)
    assert plain.metrics["calibrated/ece"] == pytest.approx(float(ece(predictive.mean, y)), abs=1e-5)
    assert scaled.metrics["nll"] == pytest.approx(plain.metrics["calibrated/nll"], abs=1e-5)
    assert not math.isclose(plain.metrics["nll"], plain.metrics["calibrated/nll"], abs_tol=1e-3)
    assert plain.metrics["calibration/nll_scaled"] <= plain.metrics["calibration/nll"]


def test_what_is_measured_at_the_best_temperature_is_in_reports_with_intervals(task, tmp_path):
    _, (plain, *_) = runs(task, tmp_path, "map")
    found = {measure.key: measure for measure in measures(plain)}
    assert found["calibrated/nll"].samples == (("calibrated/nll",),)
    assert float(plain.arrays["calibrated/nll"].mean()) == pytest.approx(plain.metrics["calibrated/nll"], abs=1e-6)
    for key in ("calibrated/accuracy", "calibrated/ece", "calibrated/temperature"):
        assert key in found
        assert all(name in plain.arrays for group in found[key].samples for name in group)


def test_a_regression_is_scaled_too(tmp_path):
    text = TASK.replace("two_moons", "cubic").replace("count = 200, noise = 0.4", "points = 40")
    text = text.replace("epochs = 0", "epochs = 2, keep_best = false").replace(', weights = "given.safetensors"', "")
    (tmp_path / "mine.toml").write_text(f"likelihood = {{ regression = {{ noise = 1.0 }} }}\n{text}")
    made, (found,) = runs(load_task(str(tmp_path / "mine.toml")), tmp_path, "map")
    held = read_predictions(made[0].folder / "predictions" / "calibration.safetensors")
    temperature = found.metrics["calibrated/temperature"]
    assert temperature > 1.5  # a network that learned nothing yet
    for other in (0.9 * temperature, 1.1 * temperature):
        assert (
            -float(held.predictive.apply_temperature(other).log_prob(held.targets).mean())
            > (found.metrics["calibration/nll_scaled"])
        )
    assert with_calibration(found, held, held).metrics["calibrated/nll"] == pytest.approx(
        found.metrics["calibration/nll_scaled"], abs=1e-6
    )


def test_a_network_that_is_neither_trained_nor_given_is_refused(task, tmp_path):
    (tmp_path / "mine.toml").write_text(TASK.replace(', weights = "given.safetensors"', ""))
    with pytest.raises(ValueError, match=r"expected network.weights for map with training.epochs = 0"):
        runs(load_task(str(tmp_path / "mine.toml")), tmp_path)
    assert not (tmp_path / "runs").exists()


def test_images_are_standardised_as_those_of_imagenet(tmp_path):
    write_cifar(tmp_path)
    data = task_data({"name": "cifar10", "standardise": "imagenet", "validation": 0}, tmp_path)
    white = data.standardiser(torch.full((1, 3, 2, 2), 255, dtype=torch.uint8))
    expected = [(1 - 0.485) / 0.229, (1 - 0.456) / 0.224, (1 - 0.406) / 0.225]
    assert white[0, :, 0, 0].tolist() == pytest.approx(expected, rel=1e-6)
    for name, got in (("digits", r"got inputs of shape \(1, "), ("two_moons", r"got inputs of shape \(2,")):
        with pytest.raises(ValueError, match=got):
            task_data({"name": name, "standardise": "imagenet", "validation": 0}, tmp_path)


@pytest.mark.slow
def test_the_task_runs_untrained_tuned_and_with_noise_on_nodes(tmp_path):
    write_cifar(tmp_path)
    (tmp_path / "resnet_cifar10").mkdir()
    save_file(ds.nets.ResNet(20).state_dict(), tmp_path / "resnet_cifar10" / "resnet20.safetensors")
    small = ["data.train=24", "data.test=20", "data.calibration=10", "data.ood_rows=10", "training.batch_size=12"]
    task = load_task("pretrained", size="smoke", overrides=[*small, "evaluation.corrupt_rows=4"])
    methods = ["map", "laplace", "map-tuned", "node_bnn-in4"]
    made, evaluations = jobs.run_all(task, methods=methods, seeds=[0], out=tmp_path / "runs", source=str(tmp_path))
    wanted = {"accuracy", "nll", "ece", "calibrated/nll", "corrupt/nll", "ood/svhn/auroc", "ood/cifar100/auroc"}
    assert all(wanted <= evaluation.metrics.keys() for evaluation in evaluations)
    assert [evaluation.metrics["cost/train_seconds"] > 0 for evaluation in evaluations] == [False, False, True, True]
    node = made[-1].posterior()
    assert (node.mode, node.components, node.batch_norm) == ("in", 4, "trained")


def test_the_task_has_the_recipe_and_its_variants():
    task = load_task("pretrained", size="paper")
    configs = {method: run_config(task, method, 0) for method in task.methods}
    assert configs["node_bnn"].settings == {**ds.NodeBNN.of_trained_settings, "samples": 32}
    nodes = [c for c in configs.values() if c.method.startswith("node_bnn") and c.training["epochs"]]
    tried = {(c.settings["mode"], c.settings["components"]) for c in nodes}
    assert tried == {(m, k) for m in ("in", "out") for k in (4, 8, 32)}
    assert {(c.training["optimizer"], c.settings["lr"]) for c in nodes} == {("default", "curvature")}
    assert {configs[name].training["epochs"] for name in ("map-tuned", "mc_dropout", "node_bnn-out4")} == {10}


@pytest.fixture
def script(benchmarks):
    return importlib.import_module("pretrained")


def test_what_is_tried_differs_from_the_recipe_in_what_it_says(script, tmp_path):
    given = SimpleNamespace(out=tmp_path, networks=["resnet20"], seeds=1, size="paper", set=[], data=None)
    jobs = {job.method.rpartition("-")[2]: job for job in script.tries(given)}
    configs = {
        name: run_config(load_task("pretrained", size="paper", overrides=job.overrides), job.method, 0)
        for name, job in jobs.items()
    }
    usual = configs["recipe"]
    for name, config in configs.items():
        told = {**config.settings, **{f"training.{key}": value for key, value in config.training.items()}}
        before = {**usual.settings, **{f"training.{key}": value for key, value in usual.training.items()}}
        changed = {key: told[key] for key in told if told[key] != before.get(key)}
        assert changed == ({} if name == "recipe" else script.TRIED[name])
