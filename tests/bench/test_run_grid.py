"""Tasks over a grid: which cells there are, that nothing is done twice, and the page."""

import csv

import pytest

from dissensus.bench.run_grid import axes_of, begin_cells, bench_grid, cells_of
from dissensus.bench.task.config import load_task, run_config
from refusals import refuses

TASK = """
title = "Small"
methods = ["map", "mc_dropout"]
baseline = "map"
data = { name = "two_moons", count = 60 }
network = { name = "MLP", hidden = [6] }
method.mc_dropout = { samples = 3 }
training = { epochs = 1, keep_best = false }
grid.rate = { label = "dropout rate", "method.mc_dropout.rate" = [0.1, 0.5] }
grid.noise = { "data.label_noise" = [0.0, 0.2] }
"""


@pytest.fixture
def load(tmp_path):
    def written(text: str = TASK, **options):
        (tmp_path / "small.toml").write_text(text)
        return load_task(str(tmp_path / "small.toml"), **options)

    return written


def test_cells_are_the_product_of_the_axes(load):
    cells = cells_of(load(), ["map", "mc_dropout"])
    assert [cell.name for cell in cells] == ["rate0.1-noise0", "rate0.1-noise0.2", "rate0.5-noise0", "rate0.5-noise0.2"]
    configs = [run_config(cell.task, "mc_dropout", 0) for cell in cells]
    assert [config.settings["rate"] for config in configs] == [0.1, 0.1, 0.5, 0.5]
    assert [config.data["label_noise"] for config in configs] == [0.0, 0.2, 0.0, 0.2]
    assert [cell.axis_values for cell in cells[:2]] == [{"rate": 0.1, "noise": 0.0}, {"rate": 0.1, "noise": 0.2}]
    without = cells_of(load(), ["map"])  # a setting of a method that does not run is nobody's
    assert run_config(without[0].task, "map", 0).settings == {}


def test_an_axis_may_have_values_of_its_own(load):
    text = TASK.replace('label = "dropout rate"', 'label = "T", values = [1, 10], log = true')
    first, second = axes_of(load(text))
    assert (first.label, first.log, first.values) == ("T", True, [1.0, 10.0])
    assert (second.label, second.log, second.values) == ("noise", False, [0.0, 0.2])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("= [0.1, 0.5]", "= 0.1", "expected a method.mc_dropout.rate for each of"),
        ('label = "dropout rate"', "values = [1]", "expected a method.mc_dropout.rate for each of"),
        ('label = "dropout rate"', 'lable = "rate"', "expected a key of .grid.rate.*'lable'"),
        ('"data.label_noise" = [0.0, 0.2]', "log = true", "expected a setting in .grid.noise., got none"),
        ("samples = 3", "rate = 0.3", "expected method.mc_dropout.rate in .grid.rate. only"),
        ("count = 60", "label_noise = 0.3", "expected data.label_noise in .grid.noise. only"),
        ("[0.0, 0.2]", "[0.0, 2.0]", "expected a number of at most 1 for small, .*label_noise, got 2"),
    ],
)
def test_a_grid_that_cannot_be_is_an_error_before_anything_runs(load, old, new, message):
    refuses(lambda: cells_of(load(TASK.replace(old, new)), ["map", "mc_dropout"]), message, (ValueError, TypeError))


def test_settings_of_a_grid_cannot_be_overridden_and_no_run_is_outside_of_it(load):
    with pytest.raises(ValueError, match=r"expected data.label_noise in .grid.noise. only"):
        cells_of(load(overrides=["data.label_noise=0.1"]), ["map"])
    refuses(lambda: run_config(load(), "map", 0), r"expected a task without .grid., or a cell of one, got small")


def test_runs_that_no_axis_changes_are_done_once(load, tmp_path):
    cells = cells_of(load(), ["map", "mc_dropout"])
    asked = begin_cells(cells, ["map", "mc_dropout"], [0], tmp_path / "out", source=None)
    assert asked[0][0] is asked[2][0]  # map, whatever the rate
    assert asked[0][0] is not asked[1][0]
    assert len({run.folder for several in asked for run in several}) == 6
    assert not (tmp_path / "out" / "rate0.5-noise0" / "map-seed0").exists()


def test_the_page_has_every_cell_and_the_reports_own_statistics(load, tmp_path, command_line, monkeypatch):
    monkeypatch.setattr(
        "dissensus.bench.report.report_figures.svg", lambda figure, prefix: "<svg></svg>"
    )  # drawn for the files
    text = TASK + 'evaluation = { focus = "mc_dropout", curves_every = 1 }'
    load(text.replace("[0.1, 0.5]", "[0.1]"))
    code, out, _ = command_line(
        "bench", str(tmp_path / "small.toml"), "--seeds", "2", "--out", str(tmp_path / "out"), "--quiet"
    )
    assert code == 0
    names = ["grid.png", "curves.png", "report.md", "report.html", "results.csv"]
    assert out.splitlines()[-5:] == [str(tmp_path / "out" / name) for name in names]
    with (tmp_path / "out" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 2
    page = (tmp_path / "out" / "report.md").read_text()
    assert "Answered as labelled: dropout rate 0.1, noise 0.2, %" in page
    table = page.split("## Differences to map")[1]
    wanted = next(line for line in table.splitlines() if "NLL: dropout rate 0.1, noise 0," in line)
    mine, other = (
        sum(float(row["nll"]) for row in rows if (row["method"], row["rate"], row["noise"]) == (name, "0.1", "0.0")) / 2
        for name in ("mc_dropout", "map")
    )
    assert f"{mine - other:+.4f}".replace("-", "−") in wanted
    assert "p = " in wanted or "p < " in wanted


def test_a_grid_goes_on_where_it_was(load, tmp_path, monkeypatch):
    monkeypatch.setattr("dissensus.bench.run_grid.write_page", lambda page, folder: ([], page))
    task = load(TASK.replace("[0.1, 0.5]", "[0.1]").replace("[0.0, 0.2]", "[0.2]"))
    said, page = bench_grid(task, methods=["map"], out=tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("training.json")}
    assert len(before) == 1
    assert said == []
    again, same = bench_grid(task, methods=["map"], out=tmp_path / "out")
    assert again == said
    assert same.texts == page.texts
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("training.json")}
