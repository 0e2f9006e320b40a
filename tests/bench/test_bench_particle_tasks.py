"""The particle tasks and CIFAR-10 at their smallest size, and `dissensus capacity`."""

import csv
import importlib.util
import re
import sys
import time
import types
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from dissensus.bench.capacity_table import capacities
from dissensus.bench.report.prose import question_sentences
from dissensus.bench.report.results import Results
from dissensus.bench.rows.named_sets import GEOMETRIES
from dissensus.bench.rows.task_rows import DataCache, task_data
from dissensus.bench.run import jobs
from dissensus.bench.run.build import check_complete, optimizer, posterior
from dissensus.bench.task.config import load_task, run_config
from dissensus.bench.task.objects import setting_value
from dissensus.data.corruptions import BENCHMARK
from dissensus.methods import METHODS
from small_scenes import write_cifar
from thinning import thinned

TASKS = (
    *("toy-regression", "toy-classification", "toy-regression-small", "toy-classification-small"),
    *("lengthscales", "forde-variants"),
)
EXPECTED = {
    "toy-regression": ("region/between/sd", "region/outside/sd", "rmse", "distances/gradient"),
    "toy-classification": ("region/off_data/total", "accuracy", "distances/gradient"),
    "toy-regression-small": ("region/between/sd", "region/outside/sd", "rmse", "distances/gradient"),
    "toy-classification-small": ("region/off_data/total", "accuracy", "distances/gradient"),
    "lengthscales": ("validation/corrupt/accuracy", "corrupt/severity5/accuracy", "ood/fashion/auroc"),
    "forde-variants": ("corrupt/accuracy", "ood/fashion/auroc", "distances/weight"),
}
SENTENCES = {
    "toy-regression": "Between the data, forde has a mean standard deviation",
    "toy-classification": "at least twice on",
    "toy-regression-small": "Between the data, forde has a mean standard deviation",
    "toy-classification-small": "at least twice on",
    "lengthscales": "is chosen of 0, 0.4, 1",
    "forde-variants": "forde-1_N",
}
DRAWN = ("toy-regression", "lengthscales")  # whose pages have every kind of figure; others get an empty one for each


@pytest.fixture(scope="module")
def benched(tmp_path_factory):
    """A function of a task's name: the folder of its smallest bench, and its results."""

    @cache
    def run(name: str) -> tuple[Path, Results]:
        folder = tmp_path_factory.mktemp(name)
        with pytest.MonkeyPatch.context() as patch:
            if name not in DRAWN:
                patch.setattr(
                    "dissensus.bench.report.report_figures.svg", lambda figure, prefix: f'<svg id="{prefix}"></svg>'
                )
            results, _ = jobs.bench(load_task(name, size="smoke"), out=folder)
        return folder, results

    return run


# Those whose like runs every time: the same kinds of data with other settings. All are built, below.
SLOW = (
    "toy-regression", "toy-regression-small", "toy-classification-small", "forde-variants", "lengthscales",
    "toy-classification",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in TASKS]
)
def test_the_smallest_size_runs_from_start_to_report(name, benched):
    task = load_task(name, size="smoke")
    folder, _ = benched(name)
    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == task.methods
    for row in rows:
        for key in EXPECTED[name]:
            assert float(row[key]) == float(row[key]), (row["method"], key)  # there, and a number
    assert SENTENCES[name] in (folder / "report.md").read_text()
    page = (folder / "report.html").read_text()
    assert "How members differ, over training" in page
    assert ("Where is it certain?" in page) == name.startswith("toy")
    assert ("Accuracy over alpha" in page) == (name == "lengthscales")


@pytest.fixture(scope="module")
def script():
    """benchmarks/particles_toy.py as a module."""
    folder = Path(__file__).parents[2] / "benchmarks"
    spec = importlib.util.spec_from_file_location("particles_toy", folder / "particles_toy.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", ["toy-regression", "lengthscales"])
def test_runs_are_collected_into_a_table_that_says_the_same(name, benched, script, tmp_path, monkeypatch):
    folder, results = benched(name)
    monkeypatch.setattr("sys.argv", ["", str(folder), "--results", str(tmp_path), "--figures", str(tmp_path)])
    script.main()
    with (tmp_path / f"{name.replace('-', '_')}.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == list(results.methods)
    for row in rows:
        metrics = results.methods[row["method"]][0].metrics
        for key in EXPECTED[name]:
            assert float(row[key]) == pytest.approx(metrics[key], rel=1e-5)
    numbers = re.compile(r"\d+\.?\d*")
    for said, expected in zip(script.sentences(rows), question_sentences(results), strict=True):
        assert numbers.sub("", said) == numbers.sub("", expected)  # rounded numbers aside
    assert (tmp_path / f"{name}.png").stat().st_size > 1000
    assert (tmp_path / f"{name}-distances.png").stat().st_size > 1000


@pytest.mark.parametrize(("name", "size"), thinned(TASKS, ("smoke", "short", "paper"), every=3))
def test_every_method_of_every_size_can_be_built(name, size):
    hidden = [4, 4, 4, 4] if name in ("toy-regression", "toy-classification") else [4, 4]
    shrink = ["method.members=2", f"network.hidden={hidden}"]
    if name in ("lengthscales", "forde-variants"):
        shrink += ["data.train=60", "data.validation=20", "data.test=10"]
    task, data = load_task(name, size=size, overrides=shrink), DataCache()
    for method in task.methods:
        config = run_config(task, method, 0)
        built = posterior(config, data(config.data))
        assert built.particles.members == 2
        optimizer(built, config.training)


@pytest.mark.parametrize(("name", "steps", "hidden", "prior"), [
    ("toy-regression", 24_000, [200, 50, 50, 50], None), ("toy-classification", 12_000, [200, 50, 50, 50], None),
    ("toy-regression-small", 5_001, [10, 10], 1.0), ("toy-classification-small", 10_000, [10, 10], 1.0),
])  # fmt: skip
def test_the_paper_size_has_the_papers_steps_and_networks(name, steps, hidden, prior):
    task = load_task(name, size="paper")
    config = run_config(task, "forde", 0)
    data = task_data(config.data)
    batches = -(-len(data.train.y) // config.training["batch_size"])
    assert batches * config.training["epochs"] == steps
    assert config.settings["members"] == 16
    assert config.network["hidden"] == hidden
    assert not config.training["keep_best"]
    assert len(data.validation.y) == 0
    assert float(data.standardiser.mean) == 0
    assert float(data.standardiser.std) == 1
    settings = {method: run_config(task, method, 0).settings for method in task.methods}
    assert {each.get("weight_prior_std") for each in settings.values()} == {prior}
    for variant, key, value in (
        ("forde-sample", "bandwidth", "sample"),
        ("forde-algorithm", "bandwidth", "algorithm"),
        ("forde-log_prob", "gradient", "log_prob"),
        ("forde-1_N", "repulsion", "1/N"),
    ):
        assert settings[variant] == settings["forde"] | {key: value}
    assert {method.partition("-")[0] for method in task.methods} == {
        *("deep_ensemble", "weight_rde", "function_rde", "feature_rde", "svgd", "lit", "forde")
    }
    assert settings["svgd-function"]["space"] == "function"


@pytest.mark.parametrize("name", ["toy-regression", "toy-classification"])
def test_plain_sgd_makes_up_for_the_mean_over_members_in_svgd(name):
    task = load_task(name, size="paper")
    others = run_config(task, "deep_ensemble", 0)
    config = run_config(task, "svgd", 0)
    assert config.training["optimizer"] == "sgd"
    assert config.training["lr"] == pytest.approx(config.settings["members"] * others.training["lr"])


def test_the_small_tasks_have_the_functional_prior_of_the_paper():
    for name, outputs in (("toy-regression-small", "logits"), ("toy-classification-small", "probabilities")):
        config = run_config(load_task(name, size="paper", overrides=["network.hidden=[4, 4]"]), "function_rde-paper", 0)
        built = posterior(config, task_data(config.data))
        assert (built.functional_prior, built.outputs) == (True, outputs)


@pytest.mark.parametrize("name", [name for name in TASKS if name.startswith("toy")])
def test_all_methods_start_from_the_same_networks_and_seeds_from_others(name):
    task, data = load_task(name, size="smoke"), DataCache()

    def start(method: str, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        config = run_config(task, method, seed)
        built = posterior(config, data(config.data))
        return built.particles.own_parameters()["network.layers.0.weight"]

    first = start("deep_ensemble", 0)
    assert all(torch.equal(first, start(method, 0)) for method in task.methods)
    assert not torch.equal(first, start("forde", 1))


def test_a_bench_of_the_method_in_focus_alone_says_nothing_about_others(tmp_path, undrawn):
    results, written = jobs.bench(load_task("toy-regression", size="smoke"), methods=["forde"], out=tmp_path)
    assert question_sentences(results) == []
    assert all(path.is_file() for path in written)


def test_choosing_without_validation_rows_is_an_error_before_anything_is_trained(tmp_path):
    with pytest.raises(ValueError, match=r"expected validation rows for evaluation.choose, got data.validation = 0"):
        jobs.bench(load_task("lengthscales", size="smoke", overrides=["data.validation=0"]), out=tmp_path / "runs")
    assert not list(tmp_path.glob("runs/*/training.json"))


def test_x_sin_x_is_drawn_anew_for_every_seed_and_looked_at_over_x_itself():
    task = load_task("toy-regression-small", size="smoke")
    first, second = (task_data(run_config(task, "forde", seed).data) for seed in (0, 1))
    assert not torch.equal(first.train.x, second.train.x)
    assert (tuple(first.train.x.shape), len(first.test.y)) == ((90, 2), 360)
    torch.testing.assert_close(first.train.x[:, 0] ** 2, first.train.x[:, 1])
    x = 2 * first.train.x[:, 0]
    assert float((first.train.y[:, 0] - x * x.sin()).std()) == pytest.approx(0.25, abs=0.06)  # 3 standard errors
    looked_at = GEOMETRIES["x_sin_x_features"](first.train.x)
    torch.testing.assert_close(2 * looked_at.inputs[:, :1], looked_at.positions)
    between = looked_at.positions[looked_at.regions["between"]]
    assert between.min() >= 2.5
    assert between.max() <= 4.5


def test_blobs_are_drawn_anew_for_every_seed_and_never_tested_on():
    task = load_task("toy-classification", size="smoke")
    first, second = (task_data(run_config(task, "forde", seed).data) for seed in (0, 1))
    assert not torch.equal(first.train.x, second.train.x)
    assert torch.cdist(first.train.x, first.test.x).min() > 0
    assert (len(first.train.y), len(first.test.y), len(first.classes)) == (200, 100, 5)


def test_what_chooses_alpha_is_neither_a_test_corruption_nor_a_test_image():
    settings = load_task("lengthscales", size="paper").settings
    assert set(settings["evaluation"]["choose"]).isdisjoint(BENCHMARK)
    assert settings["evaluation"]["corrupt"] == "benchmark"
    assert not settings["training"]["keep_best"]
    task = load_task("lengthscales", size="paper")
    alphas = [setting_value(run_config(task, method, 0).settings, "alpha") for method in task.methods]
    assert alphas == [None, None, None, 0.0, 0.1, 0.2, 0.4, 0.8, 1.0]


# ------------------------------------------------------------------------------------------------ `dissensus capacity`
# nodes: the talk on node noise and spec of its networks, Σ in_channels; parameters: torchvision's, and those of the papers
PUBLISHED = {
    "LeNet, 28×28": (44_190, 467, 44_426), "AlexNet": (61_090_496, 18_307, 61_100_840),
    "VGG16, small head": (15_239_872, 5_251, 15_245_130), "VGG16, large head": (138_344_128, 36_995, 138_357_544),
    "ResNet-50": (25_502_912, 24_579, 25_557_032), "WRN-28-10": (36_461_232, 9_475, 36_479_194),
}  # fmt: skip


def test_the_talks_table_to_the_digit():
    found = capacities([])
    assert {name: (each.weights, each.nodes, each.parameters) for name, each in found.items()} == PUBLISHED
    assert found["AlexNet"].ratio == 61_090_496 / 18_307


def test_settings_go_to_every_network_that_has_them():
    settings = ("inputs=5", "outputs=3", "hidden=[4]", "in_features=2", "out_features=9")
    found = capacities(["MLP", "LeNet", "torch.nn:Linear"], [f"network.{each}" for each in settings])
    assert [each.nodes for each in found.values()] == [5 + 4, 467, 2]
    assert found["LeNet"].layers["head.5"].weights == 84 * 3


class NoMeta(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(int(torch.ones(3).sum()), 2))  # values of a tensor, which the meta device lacks


def test_a_network_that_needs_values_is_built_with_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "mine", types.SimpleNamespace(NoMeta=NoMeta))
    assert capacities(["mine:NoMeta"])["mine:NoMeta"].nodes == 3


@pytest.mark.parametrize(("arguments", "error"), [
    (["LeNett"], r"of MLP, AlexNet, .*WideResNet, got 'LeNett'; did you mean 'LeNet'\?"),
    (["nowhere.at.all:Net"], "expected a network that can be imported"),
    (["VGG16", "--set", "network.haed=large"], "did you mean 'head'"),
    (["VGG16", "--set", "network.head=huge"], "expected head of small, large, got 'huge'"),
    (["ResNet", "--set", "depth=18"], r"expected network.key=value for --set, got 'depth=18'"),
    (["ResNet", "--set", "network.depth=deep"], "expected a whole number for network.depth, got 'deep'"),
    (["MLP"], "missing 2 required positional arguments"),
])  # fmt: skip
def test_what_a_user_gets_wrong_is_one_line(arguments, error, command_line):
    code, _, said = command_line("capacity", *arguments)
    assert code == 2
    assert re.search(error, said)


def test_the_command_prints_the_table_and_what_is_left_out(command_line):
    code, printed, _ = command_line("capacity")
    assert code == 0
    for weights, nodes, parameters in PUBLISHED.values():
        assert any(all(f"{n:,}" in line for n in (weights, nodes, parameters)) for line in printed.splitlines())
    assert "41,640" in printed
    settings = ["--set", "network.d_model=4", "--set", "network.nhead=2"]
    _, printed, _ = command_line("capacity", "torch.nn:TransformerEncoderLayer", *settings)
    assert "no nodes in self_attn, self_attn.out_proj" in printed
    assert "41,640" not in printed


# ------------------------------------------------------------------------------------------------------------ CIFAR-10
def test_every_method_has_all_that_it_needs_and_little_to_do():
    for name in METHODS:
        config = run_config(load_task("cifar10", size="smoke", methods=[name]), name, 0)
        check_complete(config)
        sized = ("members", "samples", "components", "rank")
        counts = {key: value for key, value in config.settings.items() if key in sized}
        assert all(value <= 4 for value in counts.values()), name
        assert counts or name in ("map", "swa"), name  # whose defaults would be long


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    return str(write_cifar(tmp_path_factory.mktemp("cifar"), count=60))


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_seconds(name, cifar, tmp_path):
    start = time.process_time()
    task = load_task("cifar10", size="smoke", methods=[name])
    _, (evaluation,) = jobs.run_all(task, methods=[name], seeds=[0], out=tmp_path / "runs", source=cifar)
    assert time.process_time() - start < 25  # 1 to 4 s of a processor, hmc 10; a busy machine takes longer
    assert {"accuracy", "corrupt/nll", "ood/svhn/auroc", "ood/cifar100/auroc"} <= evaluation.metrics.keys()
