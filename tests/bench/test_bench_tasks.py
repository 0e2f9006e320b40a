"""The shipped tasks of the tracking methods, run whole at their smallest size, on files written here."""

import struct

import numpy as np
import pytest

from dissensus.bench.report.html_report import write_report
from dissensus.bench.run.jobs import bench, results_of_runs, run_all
from dissensus.bench.run.run import Run
from dissensus.bench.run.shared_training import can_share_training, companions
from dissensus.bench.task.config import load_task, run_config
from uci_files import write_uci_files

pytestmark = pytest.mark.usefixtures("undrawn")


def write_images(folder, prefix: str, count: int, seed: int) -> None:
    """IDX files of random images of ten labels."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    labels = (np.arange(count) % 10).astype(np.uint8)
    images = (generator.integers(0, 128, (count, 28, 28)) + 12 * labels[:, None, None]).astype(np.uint8)
    header = struct.pack(">IIII", 0x803, count, 28, 28)
    (folder / f"{prefix}-images-idx3-ubyte").write_bytes(header + images.tobytes())
    (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, count) + labels.tobytes())


def test_mnist_against_notmnist_runs_on_any_files_of_that_format(tmp_path):
    write_images(tmp_path / "mnist", "train", 300, 0)
    write_images(tmp_path / "mnist", "t10k", 80, 1)
    write_images(tmp_path / "notmnist", "t10k", 60, 2)
    task = load_task("mnist-ood", size="smoke")
    runs = run_all(task, methods=task.methods, seeds=[0], out=tmp_path / "runs", source=str(tmp_path))
    results = results_of_runs(*runs)
    write_report(results, tmp_path / "report.md")  # without figures, which other tests draw
    assert list(results.methods) == task.methods
    wanted = {"accuracy", "nll", "ece", "cost/train_seconds"}
    wanted |= {f"ood/notmnist/{k}" for k in ("auroc", "aupr", "aupr_adjusted", "fpr95", "fpr95_in", "ece_union")}
    for several in results.methods.values():
        assert wanted <= several[0].metrics.keys()
    text = (tmp_path / "report.md").read_text()
    assert "Beside published numbers" in text
    assert "published 94.00" in text  # AUROC of the single network there
    network = Run.open(tmp_path / "runs" / "tradi-seed0").posterior().network
    assert [type(layer).__name__ for layer in network.layers] == [
        *("Linear", "BatchNorm1d", "ReLU"),
        *("Linear", "BatchNorm1d", "ReLU", "Dropout"),
        *("Linear", "BatchNorm1d", "ReLU", "Dropout", "Linear"),
    ]


def test_uci_regression_runs_split_by_split(tmp_path):
    folder = write_uci_files(tmp_path / "files")
    results, _ = bench(load_task("uci", size="smoke"), seeds=2, out=tmp_path / "runs", source=str(folder))
    for several in results.methods.values():
        first, second = several
        assert {"rmse", "nll", "gaussian_nll", "crps"} <= first.metrics.keys()
        assert not (first.arrays["test/target"] == second.arrays["test/target"]).all()
        assert float(first.arrays["test/target"].mean()) > 100  # the targets' own units
    assert (tmp_path / "runs" / "report.html").is_file()


@pytest.mark.parametrize(
    ("name", "methods"),
    [("standard", None), pytest.param("standard-uci", None, marks=pytest.mark.slow), ("reference-uci", ["hmc", "map"])],
)
def test_the_standard_solutions_run_side_by_side(name, methods, tmp_path):
    folder = write_uci_files(tmp_path / "files")
    task = load_task(name, size="smoke")
    results, _ = bench(task, methods=methods, out=tmp_path / "runs", source=str(folder))
    assert list(results.methods) == list(methods or task.methods)
    assert len(task.methods) >= 9
    for several in results.methods.values():
        assert several[0].metrics["nll"] < 10 if name == "standard" else several[0].metrics["rmse"] > 0
    if methods is None:
        assert results.methods["swag-multi"][0].metrics["networks/count"] == 2


def test_recipes_are_measured_on_training_rows_alone(tmp_path):
    folder = write_uci_files(tmp_path)
    whole, inner = (
        Run(tmp_path, run_config(load_task("uci", overrides=[f"data.inner={share}"]), "map", 1)) for share in (0.0, 0.2)
    )
    for run in (whole, inner):
        run.load.folder = folder
    told = {float(y) for y in whole.data.train.y}
    assert {float(y) for y in inner.data.test.y} | {float(y) for y in inner.data.train.y} == told
    assert not told & {float(y) for y in whole.data.test.y}
    assert len(inner.data.test.y) == round(0.2 * len(whole.data.train.y))


def test_the_toy_of_ibnn_runs_with_node_based_networks_of_both_papers(tmp_path):
    methods = ["node_bnn", "node_bnn-ibnn"]
    runs, evaluations = run_all(load_task("cubic-gap", size="smoke"), seeds=[0], out=tmp_path, methods=methods)
    for evaluation in evaluations:
        assert {"gaussian_nll", "shift/cubic_between/nll", "shift/cubic_beyond/nll"} <= evaluation.metrics.keys()
    posteriors = [run.posterior() for run in runs]
    assert [each.divergence for each in posteriors] == ["mixture", "surrogate"]
    assert [each.mode for each in posteriors] == ["out", "in"]
    assert [run.posterior().data_size for run in runs] == [40, 40]


@pytest.mark.parametrize("name", ["cubic", "gp-draw"])
def test_toys_run_and_every_seed_is_another_draw(name, tmp_path):
    _, evaluations = run_all(load_task(name, size="smoke"), seeds=[0, 1], out=tmp_path, methods=["tradi"])
    first, second = evaluations
    assert first.arrays["test/target"].tolist() != second.arrays["test/target"].tolist()
    shift = {"cubic": "outside", "gp-draw": "gp_gap"}[name]
    assert {"gaussian_nll", f"shift/{shift}/gaussian_nll"} <= first.metrics.keys()


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("mnist-ood", ["deep_ensemble", "tradi", "tradi-layer", "tradi-diagonal"]),
        ("uci", ["mc_dropout", "deep_ensemble"]),
        ("cubic", ["mc_dropout", "deep_ensemble"]),
        ("gp-draw", ["mc_dropout", "deep_ensemble"]),
    ],
)
def test_one_training_serves_all_methods_that_can_share_it(name, alone, tmp_path):
    task = load_task(name, size="paper")
    runs = [Run(tmp_path, run_config(task, method, 0)) for method in task.methods]
    assert [run.config.method for run in runs if not can_share_training(run.config)] == alone
    shared = [method for method in task.methods if method not in alone]
    assert [run.config.method for run in companions(runs[0], runs)] == shared
