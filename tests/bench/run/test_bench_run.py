"""Runs: objects from settings, files, resuming, stages that are done, damage, and how members differ over training."""

import csv
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import dissensus as ds
from dissensus.bench.rows.task_rows import DataCache
from dissensus.bench.run import build, jobs
from dissensus.bench.run.convert import converted_config
from dissensus.bench.run.run import Run
from dissensus.bench.run.run_folder import commit, read_evaluation, remove_unused_run
from dissensus.bench.run.shared_training import can_share_training
from dissensus.bench.run.training_watch import DISTANCES, concatenate_batches, read_measurements
from dissensus.bench.task.config import load_task, run_config
from dissensus.bench.task.objects import count_setting
from dissensus.bench.task.schema import known_keys
from dissensus.evaluation.evaluate import evaluate
from dissensus.evaluation.member_diagnostics import MemberDistances, member_distances
from dissensus.methods import METHODS
from refusals import refuses
from small_runs import train_until, trained
from uci_files import write_uci_files

pytestmark = pytest.mark.usefixtures("undrawn")


def moons(method: str = "map", *overrides: str, folder, seed: int = 0) -> Run:
    task = load_task("moons", size="smoke", overrides=overrides)
    return Run(folder, run_config(task, method, seed))


def test_the_commit_is_that_of_the_source_unless_it_is_named(monkeypatch):
    monkeypatch.setenv("DISSENSUS_COMMIT", "c0ffee")
    assert commit() == "c0ffee"
    monkeypatch.delenv("DISSENSUS_COMMIT")
    assert re.fullmatch(r"none|[0-9a-f]{12}( \+ changes)?", commit())


@pytest.fixture(scope="module")
def benched(tmp_path_factory):
    """A whole bench of the smallest task."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dissensus.bench.report.report_figures.svg", lambda figure, prefix: "<svg></svg>")
        results, written = jobs.bench(load_task("moons", size="smoke"), out=folder, seeds=2)
    return folder, results, written


def test_a_bench_leaves_one_folder_per_method_and_seed(benched):
    folder, results, written = benched
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == sorted(
        f"{method}-seed{seed}" for method in ("map", "deep_ensemble", "mc_dropout") for seed in (0, 1)
    )
    assert [path.name for path in written] == ["results.csv", "report.md", "report.html"]
    assert list(results.methods) == ["map", "deep_ensemble", "mc_dropout"]
    run = folder / "mc_dropout-seed1"
    files = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert files == {
        "config.toml", "log.jsonl", "training.json", "metrics.json", "arrays.safetensors",
        "posterior/config.json", "posterior/posterior.safetensors",
        "predictions/test.safetensors", "predictions/ood-far_ring.safetensors",
        "predictions/grid.safetensors",
    }  # fmt: skip
    config = tomllib.loads((run / "config.toml").read_text())
    assert (config["task"], config["method"], config["seed"], config["size"]) == ("moons", "mc_dropout", 1, "smoke")
    assert config["settings"] == {"rate": 0.1, "samples": 3}
    assert {"commit", "torch", "device", "python", "dissensus", "command", "started"} <= config["provenance"].keys()
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in log] == [1, 2, 3]
    seconds = json.loads((run / "training.json").read_text())["seconds"]
    of_epochs = sum(line["seconds"] for line in log)
    assert of_epochs <= seconds < of_epochs + 1  # and what drawing functions took in the end


HOLD = "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); time.sleep(60)"


@pytest.mark.parametrize("processes", [1, 2], ids=["in turn", "jobs"])
def test_what_another_process_is_at_comes_last_and_is_taken_over_if_it_is_killed(tmp_path, processes, monkeypatch):
    """As on two machines that share the folder."""
    runs = [moons(folder=tmp_path / f"map-seed{seed}", seed=seed) for seed in (0, 1)]
    for run in runs:
        run.begin()
    call = [sys.executable, "-c", HOLD, str(tmp_path / ".map-seed0.lock")]
    told: list[str] = []
    with subprocess.Popen(call, stdout=subprocess.PIPE) as other:
        other.stdout.readline()  # it has the lock

        def tell(text):
            told.append(text)
            if (tmp_path / "map-seed1" / "metrics.json").exists() or "seed 1: evaluating" in text:
                other.kill()

        if processes > 1:  # the work of `--jobs` in this process, which costs no start
            monkeypatch.setattr(jobs, "_run_groups", functools.partial(run_groups_here, jobs._run_groups))
        evaluations = jobs.finish_runs(runs, jobs=processes, tell=tell)
    order = [text.partition("]")[2] for text in told if re.search("training|done|another", text)]
    first = " map-seed0: another process is at it" if processes > 1 else " map, seed 1: training"
    assert order[0] == first
    assert len(evaluations) == 2
    assert evaluations[0].metrics != evaluations[1].metrics
    assert sorted(path.name for path in tmp_path.iterdir()) == ["map-seed0", "map-seed1"]  # no lock is left


def run_groups_here(run_groups, groups, number, *args):
    run_groups(groups, 1, *args)


@pytest.mark.slow
def test_two_commands_in_one_folder_train_every_run_once(tmp_path):
    asked = ["bench", "moons", "--size", "smoke", "--seeds", "3", "--out", "shared"]
    environment = {**os.environ, "PYTHONPATH": str(Path(ds.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "-m", "dissensus", *asked]
    settings = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    both = [subprocess.Popen(call, **settings, text=True) for _ in range(2)]
    said = [each.communicate(timeout=300)[0] for each in both]
    trained = [re.findall(r"\] (\w+, seed \d): training", text) for text in said]
    every = [f"{method}, seed {seed}" for method in ("deep_ensemble", "map", "mc_dropout") for seed in range(3)]
    assert sorted([*trained[0], *trained[1]]) == every
    assert all(trained), said  # each has had some of the work
    assert (tmp_path / "shared" / "report.md").exists()
    assert not [*(tmp_path / "shared").glob(".*")]


def test_the_csv_holds_every_metric_in_full(benched):
    folder, _, _ = benched
    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    for row in rows:
        stored = json.loads((folder / f"{row['method']}-seed{row['seed']}" / "metrics.json").read_text())["metrics"]
        assert {key: float(row[key]) for key in stored} == stored
        assert all(row[key] == "" for key in row.keys() - stored.keys() if "/" in key)
        assert row["commit"]
        assert row["torch"] == torch.__version__


def test_a_run_measures_what_evaluate_measures(benched):
    run = Run.open(benched[0] / "deep_ensemble-seed0")
    stored = read_evaluation(run.folder)
    loaders = run.loader(run.data.test), {"far_ring": run.loader(run.data.ood["far_ring"])}
    direct = evaluate(ds.load(run.folder / "posterior"), loaders[0], ood=loaders[1], score="total")
    timed = {"cost/train_seconds", "cost/predict_ms"}
    more = stored.metrics.keys() - direct.metrics.keys()
    assert {name for name in more if not name.startswith("region/")} == {"cost/train_seconds"}
    for name in direct.metrics.keys() - timed:
        assert stored.metrics[name] == direct.metrics[name], name
    assert {name for name in stored.arrays if not name.startswith(("grid/", "training/"))} == direct.arrays.keys()
    assert all(torch.equal(stored.arrays[n], direct.arrays[n]) for n in direct.arrays if "reliability" not in n)
    assert (stored.kind, stored.ood, stored.score) == ("classification", ("far_ring",), "total")


def test_seeds_differ_and_repeat(benched, tmp_path):
    first, second = (read_evaluation(benched[0] / f"map-seed{i}").metrics["nll"] for i in (0, 1))
    assert first != second
    assert trained(moons(folder=tmp_path / "again", seed=1)).evaluate().metrics["nll"] == second


def test_what_is_done_is_not_done_again(benched, monkeypatch):
    folder, _, _ = benched
    monkeypatch.setattr("dissensus.bench.report.html_report.write_report", lambda results, path: [])
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*-seed*/**/*") if path.is_file()}
    told = []
    jobs.bench(load_task("moons", size="smoke"), out=folder, seeds=2, tell=told.append)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert sum("trained already" in text for text in told) == 6
    assert not any("evaluating" in text for text in told)


def test_a_run_that_knows_a_score_by_its_former_name_is_evaluated_again(benched, tmp_path):
    folder = shutil.copytree(benched[0] / "map-seed0", tmp_path / "run")
    config = (folder / "config.toml").read_text()
    assert 'score = "' in config
    (folder / "config.toml").write_text(re.sub('score = "[a-z_]+"', 'score = "entropy"', config))
    assert Run.open(folder).config.evaluation["score"] == "total"
    (folder / "metrics.json").unlink()
    assert "nll" in Run.open(folder).evaluate().metrics


def test_a_lost_stage_alone_is_done_again(benched, tmp_path):
    run = Run.open(shutil.copytree(benched[0] / "map-seed0", tmp_path / "run"))
    first = run.evaluate()
    weights = (run.folder / "posterior" / "posterior.safetensors").stat().st_mtime_ns
    (run.folder / "predictions" / "test.safetensors").unlink()
    (run.folder / "metrics.json").unlink()
    told = []
    assert Run.open(run.folder).evaluate(tell=told.append).metrics["nll"] == first.metrics["nll"]
    assert told == ["test"]
    assert (run.folder / "posterior" / "posterior.safetensors").stat().st_mtime_ns == weights


@pytest.mark.parametrize("method", ["deep_ensemble", "mc_dropout"])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path, method):
    whole, stopped = trained(moons(method, folder=tmp_path / "whole")), moons(method, folder=tmp_path / "stopped")
    train_until(stopped, 2)
    assert (stopped.folder / "checkpoint.pt").is_file()
    assert not stopped.is_trained
    resumed = trained(moons(method, folder=tmp_path / "stopped"))
    assert not (stopped.folder / "checkpoint.pt").exists()
    tensors = [(run.folder / "posterior" / "posterior.safetensors").read_bytes() for run in (whole, resumed)]
    assert tensors[0] == tensors[1]
    lines = (resumed.folder / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3]


def test_training_leaves_the_random_state_and_the_threads_alone(tmp_path):
    run = moons(folder=tmp_path / "run")
    run.begin()
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    run.train_alone()
    run.evaluate()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_a_temperature_is_fitted_on_validation_rows(tmp_path):
    run = trained(moons("map", "training.temperature=true", folder=tmp_path / "run"))
    facts = json.loads((run.folder / "training.json").read_text())
    posterior = run.posterior()
    assert facts["temperature"] == pytest.approx(float(posterior.temperature))
    fitted = float(posterior.temperature)
    assert fitted != 1
    assert ds.temperature_scale(posterior, run.loader(run.data.validation)) == pytest.approx(fitted)
    assert run.evaluate().metrics["temperature"] == pytest.approx(fitted)
    assert "temperature" in read_evaluation(run.folder).metrics


def test_the_precision_of_predictions_belongs_to_the_run(tmp_path):
    """It changes the numbers, stands beside them and in the config, and a folder of another precision is refused."""
    exact, half = moons(folder=tmp_path / "exact"), moons("map", "evaluation.precision=bf16", folder=tmp_path / "half")
    for run in (exact, half):
        trained(run).evaluate()
    stored = [read_evaluation(run.folder) for run in (exact, half)]
    assert 0 < abs(stored[1].metrics["nll"] - stored[0].metrics["nll"]) < 0.02
    assert [each.notes.get("precision") for each in stored] == [None, "bf16"]
    assert Run.open(half.folder).config.precision == "bf16"
    refuses(lambda: moons(folder=half.folder).begin(), r"evaluation\.precision")
    told = r'evaluation.precision of float32, bf16, got .float16.; half precision is "bf16"'
    refuses(lambda: moons("map", "evaluation.precision=float16", folder=tmp_path / "third"), told)
    calibrated = ("evaluation.precision=bf16", "calibration.method=temperature", "data.calibration=20")
    run = moons("map", *calibrated, folder=tmp_path / "fourth")
    refuses(run.begin, r"expected float32 predictions for \[calibration\]")


def test_a_regression_runs_too(tmp_path):
    results, _ = jobs.bench(load_task("toy-regression-1d", size="smoke"), out=tmp_path, methods=["map"])
    assert {"rmse", "nll", "crps", "coverage90", "shift/gap/nll"} <= results.methods["map"][0].metrics.keys()
    assert "Coverage of 90 % intervals" in (tmp_path / "report.md").read_text()


def test_each_seed_has_its_own_split_and_metrics_are_in_original_units(tmp_path, monkeypatch):
    monkeypatch.setattr("dissensus.bench.report.html_report.write_report", lambda results, path: [])
    path = tmp_path / "table.toml"
    path.write_text(
        'methods = ["map"]\n[data]\nname = "uci_regression"\nset = "bostonHousing"\nsplit = "seed"\nvalidation = 0\n'
        'targets = "standardised"\n[network]\nname = "MLP"\nhidden = []\n[likelihood]\nname = "Regression"\n'
        "noise = 0.5\n[training]\nepochs = 30\nlr = 0.05\nkeep_best = false\nthreads = 1\n"
    )
    folder = write_uci_files(tmp_path / "files")
    results, _ = jobs.bench(load_task(str(path)), out=tmp_path / "out", seeds=2, source=str(folder))
    runs = [Run.open(tmp_path / "out" / f"map-seed{seed}", source=str(folder)) for seed in (0, 1)]
    assert [run.config.data["split"] for run in runs] == [0, 1]
    assert not torch.equal(runs[0].data.test.y, runs[1].data.test.y)
    for run, evaluation in zip(runs, results.methods["map"], strict=True):
        data = run.data
        z = run.posterior().predict(data.standardiser(data.test.x).float())
        mean = data.targets.inverse(z.mean.double())
        sd = 0.5 * float(data.targets.std)  # one Gaussian: both conventions are its density in the original units
        expected = -torch.distributions.Normal(mean, sd).log_prob(data.test.y).mean()
        assert evaluation.metrics["gaussian_nll"] == pytest.approx(float(expected), rel=1e-6)
        assert evaluation.metrics["nll"] == pytest.approx(float(expected), rel=1e-6)
        assert evaluation.metrics["rmse"] == pytest.approx(float((mean - data.test.y).square().mean().sqrt()), rel=1e-6)
        assert evaluation.metrics["rmse"] < 30  # the noise of the targets has deviation 20, the targets themselves 36
        assert torch.equal(evaluation.arrays["test/target"], data.test.y)


@pytest.mark.parametrize(("file", "message"), [
    ("config.toml", r"expected a whole .*config\.toml, got a damaged one"),
    ("training.json", r"expected a whole .*training\.json"),
    ("predictions/test.safetensors", r"expected a whole .*test\.safetensors"),
    ("metrics.json", r"expected a whole .*metrics\.json"),
    ("arrays.safetensors", r"expected a whole .*arrays\.safetensors"),
    ("posterior/posterior.safetensors", r"posterior\.safetensors.*delete .*run and run the command again"),
])  # fmt: skip
def test_a_damaged_run_is_one_clear_error_that_names_the_file(benched, tmp_path, file, message):
    folder = shutil.copytree(benched[0] / "map-seed0", tmp_path / "run")
    if file in ("training.json", "predictions/test.safetensors", "posterior/posterior.safetensors"):
        (folder / "metrics.json").unlink()  # they are needed only without it
    path = folder / file
    path.write_bytes(path.read_bytes()[:20] + b"\xff\x00{{")
    with pytest.raises(ValueError, match=message) as error:
        Run.open(folder).evaluate()
    assert "\n" not in str(error.value)


def test_valid_files_with_the_wrong_content_are_damage_too(benched, tmp_path):
    folder = shutil.copytree(benched[0] / "map-seed0", tmp_path / "run")
    (folder / "metrics.json").write_text("[]")
    refuses(lambda: Run.open(folder).evaluate(), "list instead of a table")
    (folder / "metrics.json").write_text("{}")
    refuses(lambda: Run.open(folder).evaluate(), "KeyError: 'ood'")
    (folder / "config.toml").write_text('task = "moons"\n')
    refuses(lambda: Run.open(folder), r"config\.toml, got a damaged one")


def test_settings_are_checked_before_anything_is_trained(tmp_path):
    for override, message in (("evaluation.corrupt=foq", "'fog'"), ("evaluation.score=entropi", "expected score of")):
        task = load_task("digits", size="smoke", overrides=[override])
        refuses(functools.partial(jobs.bench, task, out=tmp_path), message)
    assert not list(tmp_path.glob("*/training.json"))
    patient = moons("swag", "training.patience=2", folder=tmp_path / "swag")
    refuses(patient.begin, "expected no training.patience for swag, which collects a trajectory")


def test_other_wrong_uses_are_one_clear_error(tmp_path):
    refuses(lambda: Run.open(tmp_path), r"expected a run folder, got no .*config\.toml", FileNotFoundError)
    run = moons(folder=tmp_path / "run")
    run.begin()
    refuses(lambda: run.evaluate(), "expected a trained run", FileNotFoundError)
    other = moons("map", "training.epochs=9", folder=tmp_path / "run")
    refuses(other.begin, r"training\.epochs = 9, got one with 3; choose another --out")
    refuses(lambda: jobs.report_runs([tmp_path / "run"], tmp_path), "dissensus evaluate", FileNotFoundError)
    refuses(lambda: jobs.report_runs([tmp_path / "nothing"], tmp_path), "expected a run folder", FileNotFoundError)
    task, taken = load_task("moons", size="smoke"), tmp_path / "file"
    refuses(lambda: jobs.bench(task, out=tmp_path, seeds=0), "expected --seeds of at least 1, got 0")
    refuses(lambda: jobs.bench(task, out=tmp_path, methods=["mapp"]), "did you mean 'map'")
    taken.write_text("")
    refuses(lambda: jobs.bench(task, out=taken), "expected a folder to write to", OSError)
    refuses(lambda: jobs.bench(task, out=taken / "below"), "expected a folder to write to", OSError)


def test_runs_of_two_tasks_make_two_reports(tmp_path):
    for size in ("smoke", "short"):
        task = load_task("moons", size=size, overrides=["training.epochs=1"])
        trained(Run(tmp_path / size, run_config(task, "map", 0))).evaluate()
    refuses(lambda: jobs.report_runs([tmp_path], tmp_path / "out"), "expected runs of one task and size")


# ---------------------------------------------------------------------------------------------- settings that failed


def test_a_run_that_failed_at_once_leaves_no_folder_in_the_way_of_corrected_settings(tmp_path, monkeypatch):
    monkeypatch.setattr("dissensus.bench.report.html_report.write_report", lambda results, path: [])
    wrong = load_task("moons", size="smoke", overrides=["network.outputs=1"])
    refuses(lambda: jobs.bench(wrong, methods=["map", "deep_ensemble"], out=tmp_path / "runs"), "expected")
    assert not list((tmp_path / "runs").iterdir())
    jobs.bench(load_task("moons", size="smoke"), methods=["map"], out=tmp_path / "runs")
    told = r"to hold a run with network.outputs = 1, got one without it; choose"
    refuses(lambda: jobs.bench(wrong, methods=["map"], out=tmp_path / "runs"), told)
    run = tmp_path / "runs" / "map-seed0"
    remove_unused_run(run)  # which it is not: it holds more than settings
    assert (run / "metrics.json").is_file()


def test_a_run_that_is_reported_twice_is_named_and_leaves_no_folder(benched, tmp_path):
    run = benched[0] / "map-seed0"
    shutil.copytree(run, tmp_path / "again" / "map-seed0")
    told = rf"got map with seed 0 in {run} and in .*again/map-seed0; name one"
    refuses(lambda: jobs.report_runs([run, tmp_path / "again"], tmp_path / "out"), told)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["evaluate", "report"])
def test_a_saved_posterior_in_place_of_a_run_is_called_one(benched, tmp_path, command, command_line):
    shutil.copytree(benched[0] / "map-seed0" / "posterior", tmp_path / "saved")
    for folder, words in (
        (tmp_path / "saved", f"ds.evaluate(ds.load('{tmp_path / 'saved'}'), loader)"),
        (benched[0] / "map-seed0" / "posterior", f"pass {benched[0] / 'map-seed0'}"),
    ):
        code, _, said = command_line(command, str(folder))
        assert code == 2
        assert words in said


# -------------------------------------------------------------------------------------------- from settings to objects
COUNTED = [name for name, method in METHODS.items() if count_setting(method) == "networks"]
FEW = {"samples": 2, "rank": 2, "members": 2, "components": 2}  # where a method has such a key


def moons_config(method: str, *overrides: str):
    few = [f"method.{method}.{key}={value}" for key, value in FEW.items() if key in known(f"method.{method}")]
    task = load_task("moons", size="smoke", overrides=[*few, *overrides], methods=[method])
    return task, run_config(task, method, 0)


def known(section: str):
    return known_keys({"data": {"name": "two_moons"}, "network": {"name": "MLP"}})[section]


def built(config):
    torch.manual_seed(3)
    return build.posterior(config, DataCache()(config.data))


def test_methods_of_one_network_or_many_count_networks_and_ensembles_count_members():
    one_or_many = {"map", "mc_dropout", "tradi", "swag", "swa", "gaussian_perturbation", "snapshot_ensemble"}
    assert {*COUNTED} == one_or_many | {"laplace", "node_bnn", "rank_one_bnn", "mean_field_vi", "sghmc", "hmc"}
    none = {name for name, method in METHODS.items() if count_setting(method) is None}
    assert none == {"batch_ensemble", "dropout_ensemble"}
    assert all(("networks" in known(f"method.{name}")) == (name in COUNTED) for name in METHODS)


@pytest.mark.parametrize("method", COUNTED)
def test_several_networks_are_built_one_after_the_other(method):
    config = moons_config(method, f"method.{method}.networks=3")[1]
    particles = built(config).particles
    torch.manual_seed(3)
    network = build.network(config, DataCache()(config.data))
    assert particles.members == 3
    weights = {name: rows for name, rows in particles.own_parameters().items() if "layers.0" in name and rows.ndim == 3}
    (weight,) = [rows for name, rows in weights.items() if name.endswith("weight")]
    assert torch.equal(weight[0], network.layers[0].weight)
    assert weight.flatten(1).unique(dim=0).shape[0] == 3


@pytest.mark.parametrize("method", ["map", "swag"])
def test_one_network_is_what_there_is_without_the_key(method):
    with_key, without = built(moons_config(method, f"method.{method}.networks=1")[1]), built(moons_config(method)[1])
    assert with_key.config() == without.config()
    assert with_key.config()["networks"] is None
    assert all(torch.equal(a, b) for a, b in zip(with_key.parameters(), without.parameters(), strict=True))


def test_a_bench_of_several_networks_predicts_with_all_of_their_samples(tmp_path):
    task, config = moons_config("swag", "method.swag.networks=3")
    jobs.run_all(task, methods=["swag"], seeds=[0], out=tmp_path)
    run = Run.open(tmp_path / "swag-seed0")
    assert run.config.settings["networks"] == 3
    assert run.measure().metrics["members/count"] == 3 * FEW["samples"]
    assert ds.load(run.folder / "posterior").particles.members == 3
    assert json.loads((run.folder / "training.json").read_text())["epochs"] == config.training["epochs"]


def test_a_number_of_networks_that_cannot_be_is_an_error_before_anything_is_written():
    for count in (0, -1):
        told = f"expected a number of at least 1 for moons: method.swag.networks, got {count}"
        refuses(functools.partial(moons_config, "swag", f"method.swag.networks={count}"), told)
    for method in ("deep_ensemble", "batch_ensemble"):  # which count otherwise
        told = rf"a key of \[method.{method}\] of .*members.*got 'method.{method}.networks'"
        refuses(functools.partial(moons_config, method, f"method.{method}.networks=3"), told)
    sets = ["network.name=MLP", "network.inputs=2", "network.outputs=2"]
    told = r"got swag, whose 4 networks would all start equal; .* or networks"
    refuses(lambda: converted_config("swag", [*sets, "method.networks=4"]), told)
    assert converted_config("swag", [*sets, "method.networks=1"]).settings == {"networks": 1}


def test_several_networks_train_on_their_own():
    shared = ("training.together=true", "training.keep_best=false")
    assert can_share_training(moons_config("swag", *shared)[1])
    assert can_share_training(moons_config("swag", *shared, "method.swag.networks=1")[1])
    assert not can_share_training(moons_config("swag", *shared, "method.swag.networks=2")[1])


# ------------------------------------------------------------------------------------ how members differ over training
def read_distances(folder):
    return read_measurements(folder / DISTANCES, MemberDistances._fields)


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
    train_until(run(tmp_path / "stopped"), 3)
    path = tmp_path / "stopped" / DISTANCES
    assert list(read_distances(path.parent)) == [0, 2]
    with path.open("a") as file:
        file.write('{"epochs": 3, "wei')  # cut off in the middle of a line
    assert read_distances(trained(run(tmp_path / "stopped")).folder) == read_distances(whole.folder)
    assert all(json.loads(line) for line in path.read_text().splitlines())
    path.write_text('{"epochs": 0}\n')
    refuses(lambda: read_distances(path.parent), r"expected a whole .*distances.jsonl, got a damaged one")


def test_watching_does_not_change_the_training(tmp_path):
    watched = trained(run(tmp_path / "watched", every=1)).evaluate().metrics["nll"]
    task = load_task("moons", size="smoke", overrides=["training.epochs=5", "training.keep_best=false"])
    alone = trained(Run(tmp_path / "alone", run_config(task, "deep_ensemble", 0)))
    assert alone.evaluate().metrics["nll"] == watched
    assert not (alone.folder / DISTANCES).exists()
    assert not any(key.startswith("distances/") for key in alone.evaluate().metrics)


def test_single_networks_are_left_out_and_the_report_shows_the_others(tmp_path):
    task = load_task("moons", size="smoke", overrides=["evaluation.distances_every=1"])
    results, _ = jobs.bench(task, methods=["map", "deep_ensemble"], out=tmp_path)
    assert not (tmp_path / "map-seed0" / DISTANCES).exists()
    assert "distances/weight" not in results.methods["map"][0].metrics
    assert "How members differ, over training" in (tmp_path / "report.html").read_text()
    text = (tmp_path / "report.md").read_text()
    table = text.split("## How far members are apart")[1].split("##")[0]
    assert "DeepEnsemble" in table
    assert "MAP" not in table
    assert f"{results.methods['deep_ensemble'][0].metrics['distances/weight']:.3f}" in table
