"""The command line: what it prints and returns, errors of one line, tasks and results that somebody else wrote."""

import dataclasses
import re
import runpy
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

import dissensus as ds
from dissensus.bench import cli, theory_studies
from dissensus.bench.cli import print_results
from dissensus.bench.report.comparisons import slope_weights
from dissensus.bench.report.results import results_of_evaluations
from dissensus.bench.rows.task_rows import task_data
from dissensus.bench.run import build
from dissensus.bench.run.build import check_complete
from dissensus.bench.run.jobs import report_runs
from dissensus.bench.run.run import Run
from dissensus.bench.run.run_folder import read_evaluation, write_evaluation
from dissensus.bench.task.config import load_task, run_config
from dissensus.evaluation.evaluation import Evaluation
from dissensus.methods import METHODS
from refusals import refuses
from small_runs import trained

pytestmark = pytest.mark.usefixtures("undrawn")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def dissensus(command_line, monkeypatch, tmp_path):
    """Runs the command line in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DISSENSUS_DATA", raising=False)
    return command_line


def test_train_evaluate_and_report_work_alone(dissensus, tmp_path):
    code, out, _ = dissensus("train", "moons", "--method", "map", "--size", "smoke", "--seed", "3", "--quiet")
    assert code == 0
    assert out.strip() == "runs/moons-smoke/map-seed3"
    code, out, _ = dissensus("evaluate", out.strip(), "--quiet")
    assert code == 0
    assert "accuracy" in out
    assert "ood/far_ring/auroc" in out
    again = dissensus("evaluate", "runs/moons-smoke/map-seed3", "--again", "--quiet")
    assert again[0] == 0
    code, out, _ = dissensus("report", "runs/moons-smoke", "--out", "page", "--holm", "--baseline", "map")
    assert code == 0
    assert "page/report.html" in out
    assert (tmp_path / "page" / "report.html").is_file()
    for name in ("page.tex", "v1.2/page.tex"):
        assert dissensus("report", "runs/moons-smoke", "--out", name)[0] == 0
        assert r"\begin{tabular}" in (tmp_path / name).read_text()
    assert dissensus("report", "runs/moons-smoke", "--out", "v1.3")[0] == 0
    assert (tmp_path / "v1.3" / "report.md").is_file()


def test_bench_prints_a_table_and_where_the_report_is(dissensus, tmp_path):
    code, out, err = dissensus(
        "bench", "moons", "--size", "smoke", "--methods", "map,deep_ensemble", "--set", "training.epochs=2",
        "--set", "method.members=3", "--out", "here", "--holm", "--baseline", "deep_ensemble",
    )  # fmt: skip
    assert code == 0
    assert "one seed: p-values count test examples only" in out
    report = (tmp_path / "here" / "report.md").read_text()
    assert "Differences to DeepEnsemble" in report
    assert "(Holm)" in report
    assert "Accuracy" in out
    assert "here/report.html" in out
    assert "training: map under 1 min; deep_ensemble under 1 min; in all under 1 min" in " ".join(err.split())
    assert "[2/2] deep_ensemble, seed 0: training" in err
    assert "epoch 2/2" in err
    assert (tmp_path / "here" / "deep_ensemble-seed0" / "metrics.json").is_file()
    assert "members = 3" in (tmp_path / "here" / "deep_ensemble-seed0" / "config.toml").read_text()
    command = "dissensus bench moons --size smoke"
    assert command in (tmp_path / "here" / "report.md").read_text()


def test_list_names_tasks_methods_and_data_sets(dissensus):
    code, out, _ = dissensus("list")
    assert code == 0
    for name in ("digits", "moons", "cifar10", "deep_ensemble", "mc_dropout", "shipped", "not found"):
        assert name in out


def test_what_a_method_is_said_to_be_is_a_whole_sentence():
    said = {name: method.__doc__.strip().split("\n")[0] for name, method in METHODS.items()}
    assert [line for line in said.values() if not line.endswith(".")] == []


@pytest.mark.parametrize(("arguments", "message"), [
    (("bench", "mons"), "did you mean 'moons'"),
    (("bench", "mytask.tml"), "got 'mytask.tml'; correct the path"),
    (("bench", "tasks/moons"), "got 'tasks/moons'; correct the path"),
    (("bench", "taken.txt"), "got 'taken.txt'; correct the path"),
    (("bench", "moons", "--methods", "map,deep_ensembel"), "did you mean 'deep_ensemble'"),
    (("bench", "moons", "--set", "training.epoch=1"), "did you mean 'training.epochs'"),
    (("bench", "moons", "--set", "data.ood=fashion"), "as in the training set, got (1, 28, 28)"),
    (("bench", "moons", "--size", "huge"), "expected a size"),
    (("bench", "moons", "--baseline", "deep"), "expected a baseline of map, deep_ensemble"),
    (
        ("bench", "moons", "--methods", "mc_dropout", "--baseline", "map"),
        "expected a baseline of mc_dropout, got 'map'; run it too",
    ),
    (("bench", "moons", "--methods", "map", "--set", "method.members=4"), "the methods that run (map)"),
    (("bench", "moons", "--set", "method.node_bnn.posterior_temperature=4"), "choose node_bnn, or leave it out"),
    (("train", "moons", "--method", "map", "--set", "method.members=4"), "the methods that run (map)"),
    (("bench", "moons", "--seeds", "none"), "--seeds"),
    (("bench", "moons", "--sizes", "smoke"), "--size"),
    (("bench", "moons", "--out", "taken"), "expected a folder to write to"),
    (("bench", "mine.toml"), "a .toml file, got 'mine.toml'"),
    (("train", "moons", "--method", "mapp"), "did you mean 'map'"),
    (("evaluate", "nothing"), "expected a run folder"),
    (("report", "nothing"), "expected a run folder"),
    (("flub",), "flub"),
])  # fmt: skip
def test_what_a_user_did_wrong_is_one_line_and_exit_code_2(dissensus, tmp_path, arguments, message):
    (tmp_path / "taken").write_text("")
    (tmp_path / "taken.txt").write_text("")
    code, out, err = dissensus(*arguments)
    assert code == 2
    assert message in err
    assert err.startswith("dissensus: ")
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in out + err


def test_a_setting_that_a_method_needs_is_asked_for_before_anything_is_trained(dissensus, tmp_path):
    asked = ("bench", "moons", "--size", "smoke", "--methods", "map,batch_ensemble", "--out", "here", "--quiet")
    code, _, err = dissensus(*asked)
    assert code == 2
    assert "expected the setting modulation of batch_ensemble, got none" in err
    assert "Modulation" not in err
    assert not (tmp_path / "here").exists()
    offered = re.findall(r"--set '(.*?)'", err)
    assert offered == ["method.batch_ensemble.modulation=sign", "method.batch_ensemble.modulation={normal=[1,0.1]}"]
    for text in offered:
        loaded = load_task("moons", size="smoke", overrides=[text])
        check_complete(run_config(loaded, "batch_ensemble", 0))


def test_a_missing_data_set_lists_its_files(dissensus):
    code, _, err = dissensus("bench", "cifar10", "--data", ".")
    assert code == 2
    assert "data_batch_1.bin" in err
    assert "sha256" in err


def test_a_stop_says_that_the_same_command_goes_on(dissensus, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.jobs, "bench", stop)
    code, _, err = dissensus("bench", "moons")
    assert code == 130
    assert "continues from here" in err


def test_the_traceback_can_be_asked_for(dissensus, monkeypatch):
    monkeypatch.setenv("DISSENSUS_TRACEBACK", "1")
    refuses(lambda: dissensus("bench", "mons"), "did you mean")


def test_no_arguments_print_the_help(dissensus):
    code, out, err = dissensus()
    assert code == 2
    assert "bench" in out + err


def test_a_variant_trains_under_its_own_name(dissensus):
    asked = ("--method", "forde-1_N", "--size", "smoke", "--set", "training.epochs=1")
    code, _, err = dissensus("train", "forde-variants", *asked)
    assert code == 0
    assert "forde-1_N  epoch 1/1" in err
    assert "forde  epoch" not in err


def test_the_version_is_that_of_the_package(dissensus):
    assert dissensus("--version") == (0, f"dissensus {ds.__version__}\n", "")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert ds.__version__ == project["version"]
    # Run from the source without an installation, there is no package to ask.
    installed = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    assert installed.get("dissensus", ds.__version__) == ds.__version__
    assert f"\nversion: {ds.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_without_arguments_the_help_is_shown(dissensus):
    _, out, _ = dissensus()
    assert "Usage: dissensus" in out
    for command in ("bench", "train", "evaluate", "report", "list", "--version"):
        assert command in out


def test_the_package_can_be_run_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dissensus", "--version"])
    with pytest.raises(SystemExit) as done:
        runpy.run_module("dissensus", run_name="__main__")
    assert not done.value.code
    assert capsys.readouterr() == (f"dissensus {ds.__version__}\n", "")


# --------------------------------------------------------- wrong values are one clear error before anything is trained
TASK = """
methods = ["map"]
data = { name = "two_moons", count = 40, validation = 10 }
network = { name = "MLP", hidden = [6] }
training = { epochs = 1, batch_size = 20 }
"""


@pytest.fixture
def task(tmp_path):
    """A function that writes the task with one text in place of another, and gives its path."""

    def write(old: str = "", new: str = "", *, more: str = "") -> str:
        assert old in TASK
        (tmp_path / "mine.toml").write_text(TASK.replace(old, new, 1) + more)
        return str(tmp_path / "mine.toml")

    return write


@pytest.mark.parametrize(("change", "text"), [
    ({"old": '["map"]', "new": '[["map"]]'}, "expected a list of names, got"),
    ({"old": '["map"]', "new": "[3]"}, "expected a list of names, got 3"),
    ({"old": '["map"]', "new": "3"}, "expected a list or a text for .*methods, got 3"),
    ({"more": "[method]\nmap = 3"}, "expected a table for .*: method.map, got 3"),
    ({"more": "[method.map]\ntraining = 3"}, "expected a table for .*: method.map.training"),
    ({"more": "[method]\n[size]\nsmoke = 3"}, "expected a table for .*: size.smoke"),
    ({"old": "methods", "new": "size = 3\nmethods"}, "expected a table for .*: size"),
    ({"old": '"MLP"', "new": '["MLP"]'}, "expected a text for .*network.name"),
    ({"old": '"two_moons"', "new": "{}"}, "expected a text for .*data.name"),
    ({"old": "[6]", "new": '"six"'}, "expected a whole number or a list for .*network.hidden, got 'six'"),
    ({"old": "count = 40", "new": "count = [4]"}, "expected a whole number for .*data.count"),
    ({"more": '[method.deep_ensemble]\nmembers = "3"'}, "expected a whole number for .*method.deep_ensemble.members"),
    (
        {"more": "[method.swag]\nposterior_temperature = true"},
        "expected a number for .*method.swag.posterior_temperature",
    ),
    ({"more": "[likelihood]\nname = 3"}, "expected likelihood by one name, got 3"),
    ({"old": "epochs = 1, ", "new": ""}, "expected training.epochs for map, got none"),
])  # fmt: skip
def test_a_value_of_a_wrong_type_is_named(task, change, text):
    path = task(**change)
    refuses(lambda: run_config(load_task(path, size="smoke"), "map", 0), text, (ValueError, TypeError))


@pytest.mark.parametrize(("hidden", "text"), [
    ('["a"]', "expected hidden as a whole number, got 'a'"),
    ("[-1]", "expected hidden of at least 1, got -1"),
    (f"[{10**30}]", r"expected settings that fit the network MLP, got others .*; correct them in the task"),
    ("[[]]", r"expected hidden as a whole number, got \[\]"),
])  # fmt: skip
def test_settings_that_a_network_cannot_take_are_one_clear_error(task, hidden, text):
    config = run_config(load_task(task("[6]", hidden), size="smoke"), "map", 0)
    refuses(lambda: build.network(config, task_data(config.data)), text, (ValueError, TypeError))


def test_settings_that_a_data_set_cannot_take_are_an_error_about_the_task(task):
    config = run_config(load_task(task("count = 40", "count = -40"), size="smoke"), "map", 0)
    refuses(lambda: task_data(config.data), "expected")


def test_a_task_that_is_no_text_is_one_clear_error(task):
    path = task()
    with open(path, "ab") as file:
        file.write(b"\xff\xfe")
    refuses(lambda: load_task(path), r"expected TOML in .*, got a file that is not")


@pytest.mark.parametrize("title", ["[/wide]", "[bold]", "[link=", "\\", "a\\[/b]"])
def test_a_title_that_looks_like_markup_is_printed_as_it_stands(title, capsys):
    posterior = ds.MAP(ds.nets.MLP(2, 2, hidden=(3,)))
    evaluation = ds.evaluate(posterior, [(torch.randn(6, 2), torch.arange(6) % 2)])
    print_results(results_of_evaluations({"[/red]": evaluation}, title))
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].strip() == title
    assert "[/red]" in printed


def test_results_that_do_not_belong_together_are_one_clear_error(task, tmp_path):
    run = trained(Run(tmp_path / "map-seed0", run_config(load_task(task(), size="smoke"), "map", 0)))
    run.evaluate()
    report_runs([run.folder], tmp_path / "report")
    evaluation = read_evaluation(run.folder)
    arrays = {name: array for name, array in evaluation.arrays.items() if name != "reliability/edges"}
    write_evaluation(run.folder, dataclasses.replace(evaluation, arrays=arrays))
    told = r"expected metrics.json and arrays.safetensors that belong together in .*map-seed0"
    refuses(lambda: report_runs([run.folder], tmp_path / "report"), told)


# ----------------------------------------------------------------------------------------------- results on a terminal
def evaluation(seed: int, count: int = 40) -> Evaluation:
    nll = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    metrics = {"nll": float(nll.mean()), "accuracy": 1.0}
    return Evaluation("classification", metrics, {"test/nll": nll}, "max_probability")


def test_titles_and_names_cannot_steer_the_terminal(capsys):
    evaluations = {"a\x1b[31m": evaluation(0), "b\x9b2J\x07": evaluation(1)}
    print_results(results_of_evaluations(evaluations, "t\x1b]0;owned\x07 [bold]x[/bold]\x1b[2J"))
    shown = capsys.readouterr().out
    assert not [char for char in shown if (ord(char) < 32 and char != "\n") or 127 <= ord(char) < 160]
    assert "t]0;owned [bold]x[/bold][2J" in shown


def test_few_examples_are_cautioned_about(capsys):
    print_results(results_of_evaluations({"a": evaluation(0, 12), "b": evaluation(1, 12)}, "t"))
    assert "Few examples (test: 12)" in " ".join(capsys.readouterr().out.split())
    print_results(results_of_evaluations({"a": evaluation(0), "b": evaluation(1)}, "t"))
    assert "Few examples" not in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------- `dissensus theory`
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    "arguments",
    [("kernels", "--widths", "16,32", "--seeds", "3"), ("dynamics", "--width", "32", "--steps", "5"),
     ("width", "--widths", "16,32", "--seeds", "2"), pytest.param(("regimes",), marks=pytest.mark.slow)],
    ids=lambda arguments: arguments[0],
)  # fmt: skip
def test_a_command_writes_its_figure(arguments, tmp_path, command_line):
    code, printed, _ = command_line("theory", *arguments, "--out", str(tmp_path))
    assert code == 0
    assert (tmp_path / f"theory-{arguments[0]}.png").read_bytes().startswith(PNG)
    assert f"theory-{arguments[0]}.png" in printed
    if arguments[0] == "width":
        assert (tmp_path / f"{arguments[0]}.csv").read_text().startswith("setting,width,seed")


def test_wrong_widths_are_one_line(command_line):
    code, _, said = command_line("theory", "kernels", "--widths", "64,wide")
    assert code == 2
    assert "expected --widths as a whole number, got 'wide'" in said


@pytest.mark.parametrize("command", ["kernels", "dynamics", "width", "regimes"])
def test_a_file_in_place_of_the_folder_is_found_before_anything_is_computed(
    command, tmp_path, monkeypatch, command_line
):
    (tmp_path / "file").write_text("")
    for work in ("kernels", "dynamics", "width", "regimes"):
        monkeypatch.setattr(theory_studies, work, lambda *_, **__: pytest.fail("computed"))
    code, _, said = command_line("theory", command, "--out", str(tmp_path / "file"))
    assert code == 2
    assert "expected a folder to write to, got" in said


def test_cross_member_kernels_of_independent_members_deviate_from_zero_as_one_over_the_root_of_the_width():
    widths = (32, 128, 512)
    signs = next(iter(theory_studies.SETTINGS.values()))
    far = theory_studies.deviations(signs, widths, 20)[3].numpy()  # common_cross
    assert slope_weights(widths) @ np.log2(far) == pytest.approx(-0.5, abs=0.25)  # three points of 20 draws, 16 % each
    x, _ = theory_studies.random_data(2, seed=0)
    assert float(signs.kernels(x).common_cross.abs().max()) == float(signs.kernels(x).gp_cross.abs().max()) == 0


def test_the_map_has_its_known_borders():
    rate, speed = theory_studies.regime_map([0.0, 1.0], [1, 4, 64])
    assert torch.allclose(rate[0], torch.ones(3, dtype=torch.float64))  # independent members need no smaller rate
    assert torch.allclose(speed[0], torch.ones(3, dtype=torch.float64))
    assert float(speed[1].abs().max()) < 1e-9  # equal members do not differ
    assert float(rate[1, 2]) < float(rate[1, 1]) < 1
