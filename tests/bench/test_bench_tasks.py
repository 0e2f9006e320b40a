"""Shipped tasks at their smallest size: tracking, shifts, references; Laplace and [calibration] in tasks of one's own."""

import csv
import json
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import dissensus as ds
from dissensus import attacks, metrics
from dissensus.bench.cli import app
from dissensus.bench.report.html_report import write_report
from dissensus.bench.report.measures import measures
from dissensus.bench.rows.dataset_rows import standardised_batches
from dissensus.bench.run import build, jobs
from dissensus.bench.run.jobs import bench, results_of_runs, run_all
from dissensus.bench.run.run import Run
from dissensus.bench.run.shared_training import can_share_training, companions
from dissensus.bench.task.config import SIZES, load_task, run_config
from dissensus.bench.task.objects import network_maker
from dissensus.metrics import ece
from dissensus.nets import Residual
from refusals import refuses
from small_runs import moons_network, task_with_weights
from thinning import often
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


@pytest.mark.slow
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
    task = load_task("uci", size="smoke")
    runs = run_all(task, methods=task.methods, seeds=[0, 1], out=tmp_path / "runs", source=str(folder))
    for several in results_of_runs(*runs).methods.values():
        first, second = several
        assert {"rmse", "nll", "gaussian_nll", "crps"} <= first.metrics.keys()
        assert not (first.arrays["test/target"] == second.arrays["test/target"]).all()
        assert float(first.arrays["test/target"].mean()) > 100  # the targets' own units


@pytest.mark.slow
@pytest.mark.parametrize(("name", "methods"), [
    ("standard", None),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in (("standard-uci", None), ("reference-uci", ["hmc", "map"]))),
])  # fmt: skip
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
    tasks = (load_task("uci", overrides=[f"data.inner={share}"]) for share in (0.0, 0.2))
    whole, inner = (Run(tmp_path, run_config(task, "map", 1)) for task in tasks)
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


@pytest.mark.parametrize(("name", "alone"), [
    ("mnist-ood", ["deep_ensemble", "tradi", "tradi-layer", "tradi-diagonal"]),
    ("uci", ["mc_dropout", "deep_ensemble"]), ("cubic", ["mc_dropout", "deep_ensemble"]),
    ("gp-draw", ["mc_dropout", "deep_ensemble"]),
])  # fmt: skip
def test_one_training_serves_all_methods_that_can_share_it(name, alone, tmp_path):
    task = load_task(name, size="paper")
    runs = [Run(tmp_path, run_config(task, method, 0)) for method in task.methods]
    assert [run.config.method for run in runs if not can_share_training(run.config)] == alone
    shared = [method for method in task.methods if method not in alone]
    assert [run.config.method for run in companions(runs[0], runs)] == shared


# --------------------------------------------------------------------------------------- node-corruptions and remedies
SHIFTS = ("node-corruptions", "remedies")
REMEDIES = {  # (augmentation, dropout, ensembling, skips)
    "map": "", "map-augment": "augment", "mc_dropout": "dropout", "deep_ensemble": "ensemble", "map-skip": "skip",
    "mc_dropout-all": "augment dropout ensemble skip", "mc_dropout-no_augment": "dropout ensemble skip",
    "deep_ensemble-no_dropout": "augment ensemble skip", "mc_dropout-no_ensemble": "augment dropout skip",
    "mc_dropout-no_skip": "augment dropout ensemble",
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_each_remedy_is_there_where_the_name_says_so(size):
    task = load_task("remedies", size=size)
    assert task.methods == list(REMEDIES)
    for method, remedies in REMEDIES.items():
        config = run_config(task, method, 0)
        _, several = build.setting_and_count(config)
        found = {
            "augment": config.training.get("augment", "none") != "none",
            "dropout": config.settings.get("rate", 0) > 0,
            "ensemble": several > 1,
            "skip": config.network["skip"],
        }
        assert [name for name, there in found.items() if there] == remedies.split(), method


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SHIFTS)
def test_networks_of_every_size_can_be_built(name, size):
    task = load_task(name, size=size)
    for method in task.methods:
        settings = dict(run_config(task, method, 0).network)
        make = network_maker(settings.pop("name"))
        with torch.device("meta"):
            made = make(**settings | ({"inputs": 784, "outputs": 10} if make is network_maker("MLP") else {}))
        assert sum(parameter.numel() for parameter in made.parameters()) > 1000


SMALL = ["data.train=40", "data.test=30", "evaluation.corrupt_rows=10"]


def test_a_method_may_have_a_network_of_its_own(tmp_path):
    task = load_task("remedies", size="smoke", overrides=[*SMALL, "method.map-skip.network.hidden=[12, 12]"])
    runs, _ = run_all(task, methods=["map", "map-skip"], seeds=[0], out=tmp_path)
    plain, skipping = (run.posterior().member(0) for run in runs)
    assert plain.config["hidden"] == [16, 16, 16]
    assert skipping.config["hidden"] == [12, 12]
    assert [any(isinstance(part, Residual) for part in each.modules()) for each in (plain, skipping)] == [False, True]
    with pytest.raises(ValueError, match=r"expected a key of \[method.map-skip.network\] .*got .*skips.*did you mean"):
        load_task("remedies", size="smoke", overrides=["method.map-skip.network.skips=true"])
    with pytest.raises(ValueError, match=r"expected true or false for .*network.skip, got 1"):
        load_task("remedies", size="smoke", overrides=["method.map-skip.network.skip=1"])


@pytest.mark.slow
def test_implicit_corruptions_are_measured_and_drawn(tmp_path):
    task = load_task("node-corruptions", size="smoke", overrides=[*SMALL, "data.validation=10"])
    bench(task, methods=["map", "node_bnn"], out=tmp_path)
    rows = {row["method"]: row for row in csv.DictReader((tmp_path / "results.csv").open())}
    assert not rows["map"].get("implicit/distance")  # a single function has none
    (run,), (evaluation,) = run_all(task, methods=["node_bnn"], seeds=[0], out=tmp_path)
    data, posterior = run.data, run.posterior()
    x, *_ = next(iter(standardised_batches(data.test.sample(3, seed=0), data.standardiser, batch_size=3)))
    found = attacks.implicit_corruptions(posterior, x, penalty=0.02, functions=5, steps=60)
    change = data.standardiser.std.float() * (found.inputs - x)  # in pixels
    distance = change.flatten(2).square().mean(2).sqrt().mean()
    assert float(rows["node_bnn"]["implicit/distance"]) == pytest.approx(float(distance), rel=1e-3)
    assert float(rows["node_bnn"]["implicit/explained"]) == pytest.approx(float(found.explained.mean()), rel=1e-3)
    assert evaluation.arrays["implicit/inputs"].shape == (3, 2, 1, 28, 28)
    assert "The noise as a change of the image" in (tmp_path / "report.html").read_text()
    assert "implicit corruptions: Explained by it, %" in (tmp_path / "report.md").read_text()


# ---------------------------------------------------------------------------------------------------------- references
REFERENCES = ("reference-posterior", "reference-digits", "reference-uci", "bimodal")


@pytest.mark.parametrize(("name", "seeds"), [("reference-digits", 1), ("bimodal", 2)])
def test_methods_are_compared_with_the_reference_of_their_seed(name, seeds, tmp_path):
    task = load_task(name, size="smoke")
    runs, evaluations = run_all(task, methods=["map", "hmc", "sghmc"], seeds=range(seeds), out=tmp_path)
    compared = results_of_runs(runs, evaluations)
    results = compared.methods
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
    write_report(compared, tmp_path / "report.md")  # without figures
    assert "Total variation" in (tmp_path / "report.md").read_text()
    epochs = [json.loads(line)["seconds"] for line in (tmp_path / "hmc-seed0" / "log.jsonl").read_text().splitlines()]
    assert results["hmc"][0].metrics["cost/train_seconds"] > sum(epochs)


def test_a_reference_that_did_not_run_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="expected hmc among the runs of seed 0"):
        bench(load_task("bimodal", size="smoke"), methods=["map"], out=tmp_path)


@pytest.mark.parametrize("name", REFERENCES)
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


# ------------------------------------------------------------------------------------------------------------- Laplace
LAPLACE = """
methods = ["map", "laplace", "laplace-kron"]
baseline = "map"
data = { name = "two_moons", count = 90, validation = 10 }
network = { name = "MLP", hidden = [6], batch_norm = true }
training = { epochs = 3, batch_size = 20, lr = 0.02, keep_best = false, together = TOGETHER, threads = 1 }
method.laplace = { samples = 8 }
method.laplace-kron = { structure = "kron", prior_precision = 2.0 }
"""


@pytest.mark.parametrize("together", often(["true"], ["false"]))
def test_a_task_trains_fits_and_reports_it_and_its_variants(tmp_path, together):
    (tmp_path / "mine.toml").write_text(LAPLACE.replace("TOGETHER", together))
    jobs.bench(load_task(str(tmp_path / "mine.toml")), out=tmp_path / "runs")
    found = {}
    for method in ("map", "laplace", "laplace-kron"):
        folder = tmp_path / "runs" / f"{method}-seed0"
        found[method] = ds.load(folder / "posterior")
        assert json.loads((folder / "metrics.json").read_text())
    trained = found["map"].particles.template.network.state_dict()
    for method in ("laplace", "laplace-kron"):
        posterior = found[method]
        network = posterior.network.state_dict()
        assert all(torch.equal(trained[name], network[name]) for name in trained)
        assert torch.equal(posterior.mean["layers.3.weight"], network["layers.3.weight"])
        assert posterior.draw().members == 8
    assert found["laplace"].curvature[0].structure == "full"
    assert found["laplace-kron"].curvature[0].structure == "kron"
    assert float(found["laplace-kron"].curvature[0].precision) == 2.0
    assert "Laplace-kron" in (tmp_path / "runs" / "report.md").read_text()


# ----------------------------------------------------------------------------- [calibration] and `dissensus calibrate`
CALIBRATED = """
methods = ["map", "node_bnn"]
data = { name = "two_moons", count = 600, noise = 0.4, validation = 0 }
network = { name = "MLP", hidden = [8], weights = "given.safetensors" }
training = { epochs = 0, threads = 1 }
method.node_bnn = { samples = 8 }
calibration = { rows = 400, method = "isotonic", level = 0.9, risk = 0.2 }
"""


@pytest.fixture
def task(tmp_path):
    return task_with_weights(tmp_path, CALIBRATED, moons_network(8, epochs=20))


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
    assert "Reliability diagram of MAP, calibrated" in page


def test_promises_alone_leave_the_best_temperature_to_be_found(task, tmp_path):
    settings = {**task.settings, "calibration": {"rows": 400, "level": 0.9}}
    (run,), found = jobs.run_all(replace(task, settings=settings), methods=["map"], seeds=[0], out=tmp_path / "runs")
    best = ds.temperature_scale(run.posterior(), run.loader(run.data.calibration))
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


@pytest.mark.slow
def test_a_regression_in_its_own_units_is_calibrated(tmp_path):
    (tmp_path / "mine.toml").write_text("""
methods = ["map"]
likelihood = { regression = { noise = 1.0 } }
data = { name = "cubic", points = 60, validation = 0, targets = "standardised" }
network = { name = "MLP", hidden = [6] }
training = { epochs = 2, keep_best = false, threads = 1 }
calibration = { rows = 0.5, method = "isotonic", level = 0.8 }
""")
    task = load_task(str(tmp_path / "mine.toml"))
    made, (found,) = jobs.run_all(task, methods=["map"], seeds=[0], out=tmp_path / "r")
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
    for rows, error in ((2.7, TypeError), (-3.0, ValueError), (0.0, ValueError)):
        refuses(lambda rows=rows: jobs.calibrate_run(Run.open(run.folder), {}, rows=rows), "expected rows", error)


@pytest.mark.parametrize(("override", "message"), [
    ("calibration.method=scale", "expected calibration.method of temperature, vector, isotonic, histogram"),
    ("calibration.score=cqr", "expected calibration.score of lac"),
    ("calibration.level=1.5", "expected .*level"),
    ("calibration.alpha=0.1", "calibration.alpha"),
])  # fmt: skip
def test_what_a_task_cannot_have_is_refused_before_anything_is_trained(task, tmp_path, override, message):

    def run():
        asked = load_task(str(tmp_path / "mine.toml"), overrides=[override])
        jobs.run_all(asked, methods=["map"], seeds=[0], out=tmp_path / "runs")

    refuses(lambda: run(), message)
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").glob("*/posterior"))
