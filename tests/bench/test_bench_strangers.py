"""Tasks and results that somebody else wrote: wrong values are one clear error before anything is trained."""

import dataclasses

import pytest
import torch

import dissensus as ds
from dissensus.bench.report.results import results_of_evaluations
from dissensus.bench.rows.task_rows import task_data
from dissensus.bench.run import build
from dissensus.bench.run.jobs import report_runs
from dissensus.bench.run.records import read_evaluation, write_evaluation
from dissensus.bench.run.run import Run
from dissensus.bench.task.config import load_task, run_config
from dissensus.bench.terminal import print_results
from refusals import refuses
from small_runs import trained

pytestmark = pytest.mark.usefixtures("undrawn")

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


@pytest.mark.parametrize(
    ("change", "text"),
    [
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
        (
            {"more": '[method.deep_ensemble]\nmembers = "3"'},
            "expected a whole number for .*method.deep_ensemble.members",
        ),
        (
            {"more": "[method.swag]\nposterior_temperature = true"},
            "expected a number for .*method.swag.posterior_temperature",
        ),
        ({"more": "[likelihood]\nname = 3"}, "expected likelihood by one name, got 3"),
        ({"old": "epochs = 1, ", "new": ""}, "expected training.epochs for map, got none"),
    ],
)
def test_a_value_of_a_wrong_type_is_named(task, change, text):
    path = task(**change)
    refuses(lambda: run_config(load_task(path, size="smoke"), "map", 0), text, (ValueError, TypeError))


@pytest.mark.parametrize(
    ("hidden", "text"),
    [
        ('["a"]', "expected hidden as a whole number, got 'a'"),
        ("[-1]", "expected hidden of at least 1, got -1"),
        (f"[{10**30}]", r"expected settings that fit the network MLP, got others .*; correct them in the task"),
        ("[[]]", r"expected hidden as a whole number, got \[\]"),
    ],
)
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
    with pytest.raises(
        ValueError, match=r"expected metrics.json and arrays.safetensors that belong together in .*map-seed0"
    ):
        report_runs([run.folder], tmp_path / "report")
