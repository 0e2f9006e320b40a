"""Variants of methods: names, settings on top of settings, folders, and what a report says of them."""

import pytest

from dissensus.bench.rows.task_rows import task_data
from dissensus.bench.run.build import posterior
from dissensus.bench.run.jobs import bench, report_runs
from dissensus.bench.task.config import load_task, run_config
from dissensus.bench.task.method_names import base_name, check_methods, variants_of
from refusals import refuses

pytestmark = pytest.mark.usefixtures("undrawn")

TASK = """
methods = ["tradi", "tradi-diagonal"]
baseline = "tradi-diagonal"
data = { name = "two_moons", count = 60 }
network = { name = "MLP", hidden = [4] }
training = { epochs = 1, lr = 0.1 }
method.tradi = { samples = 4, training.lr = 0.2, training.clip = 1.0 }
method.tradi-diagonal = { covariance = "diagonal", training.lr = 0.3 }
"""


@pytest.fixture
def task_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TASK)
    return str(path)


def test_a_variant_has_its_methods_settings_with_its_own_on_top(task_file):
    task = load_task(task_file)
    base, variant = (run_config(task, name, 0) for name in task.methods)
    assert (base.method, base.settings) == ("tradi", {"samples": 4})
    assert (variant.method, variant.settings) == ("tradi-diagonal", {"samples": 4, "covariance": "diagonal"})
    assert (base.training["lr"], base.training["clip"]) == (0.2, 1.0)
    assert (variant.training["lr"], variant.training["clip"]) == (0.3, 1.0)
    built = posterior(variant, task_data(variant.data))
    assert (built.name, built.config()["covariance"], built.samples) == ("tradi", "diagonal", 4)


@pytest.mark.parametrize(
    ("override", "samples"),
    [
        ("method.tradi-diagonal.samples=5", (4, 5)),
        ("method.tradi.samples=5", (5, 5)),  # the variant has none of its own
        ("method.samples=5", (5, 5)),
    ],
)
def test_overrides_reach_a_variant_its_method_or_both(task_file, override, samples):
    task = load_task(task_file, overrides=[override])
    assert tuple(run_config(task, name, 0).settings["samples"] for name in task.methods) == samples


def test_an_override_for_all_methods_wins_over_what_a_variant_says_itself(task_file):
    task = load_task(task_file, overrides=["method.tradi-diagonal.samples=9", "method.samples=5"])
    assert [run_config(task, name, 0).settings["samples"] for name in task.methods] == [5, 5]


def test_a_variant_can_be_made_on_the_command_line():
    task = load_task("moons", size="smoke", overrides=["method.deep_ensemble-two.members=2"])
    assert run_config(task, "deep_ensemble-two", 0).settings == {"members": 2}
    assert variants_of(task.settings) == ["deep_ensemble-two"]


def test_variants_have_folders_rows_and_a_place_after_their_method(task_file, tmp_path):
    results, _ = bench(load_task(task_file), out=tmp_path / "runs")
    assert list(results.methods) == ["tradi", "tradi-diagonal"]
    assert results.baseline == "tradi-diagonal"
    assert (tmp_path / "runs" / "tradi-diagonal-seed0" / "metrics.json").is_file()
    again, _ = report_runs([tmp_path / "runs"], tmp_path / "page")
    assert list(again.methods) == ["tradi", "tradi-diagonal"]
    assert "\nmine,short,tradi-diagonal,0," in (tmp_path / "page" / "results.csv").read_text()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method.trady-diagonal.samples=5"], "got 'trady'; did you mean 'tradi'"),
        (["method.tradi-diagonal.sample=5"], "did you mean 'method.tradi-diagonal.samples'"),
        (["methods=tradi-diag"], r"expected a table \[method.tradi-diag\].*known variants are tradi-diagonal"),
        (["method.tradi-a/b.samples=3"], "expected letters, digits"),
    ],
)
def test_a_variant_that_is_not_known_is_one_clear_error(task_file, overrides, message):
    refuses(lambda: load_task(task_file, overrides=overrides), message)


def test_a_variant_is_a_method_only_with_a_table():
    assert base_name("forde-log_prob") == "forde"
    check_methods(["forde-log_prob"], {"method": {"forde-log_prob": {"gradient": "log_prob"}}})
    refuses(lambda: check_methods(["forde-log_prob"], {}), "expected a table")
