"""Tasks over a grid and the tables of papers: which cells there are, recipes, and that nothing is done twice."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from dissensus.bench.report.published_numbers import published_numbers
from dissensus.bench.run.build import check_complete
from dissensus.bench.run_grid import axes_of, begin_cells, bench_grid, cells_of
from dissensus.bench.task.config import load_task, run_config
from dissensus.data.corruptions import BENCHMARK, CORRUPTIONS
from dissensus.evaluation.robustness_curves import Corruptions
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


@pytest.mark.parametrize(("old", "new", "message"), [
    ("= [0.1, 0.5]", "= 0.1", "expected a method.mc_dropout.rate for each of"),
    ('label = "dropout rate"', "values = [1]", "expected a method.mc_dropout.rate for each of"),
    ('label = "dropout rate"', 'lable = "rate"', "expected a key of .grid.rate.*'lable'"),
    ('"data.label_noise" = [0.0, 0.2]', "log = true", "expected a setting in .grid.noise., got none"),
    ("samples = 3", "rate = 0.3", "expected method.mc_dropout.rate in .grid.rate. only"),
    ("count = 60", "label_noise = 0.3", "expected data.label_noise in .grid.noise. only"),
    ("[0.0, 0.2]", "[0.0, 2.0]", "expected a number of at most 1 for small, .*label_noise, got 2"),
])  # fmt: skip
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


@pytest.mark.slow
def test_the_page_has_every_cell_and_the_reports_own_statistics(load, tmp_path, command_line, monkeypatch):
    monkeypatch.setattr(
        "dissensus.bench.report.report_figures.svg", lambda figure, prefix: "<svg></svg>"
    )  # drawn for the files
    text = TASK + 'evaluation = { focus = "mc_dropout", curves_every = 1 }'
    load(text.replace("[0.1, 0.5]", "[0.1]"))
    asked = (str(tmp_path / "small.toml"), "--seeds", "2", "--out", str(tmp_path / "out"), "--quiet")
    code, out, _ = command_line("bench", *asked)
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
    shown = wanted.split("|")[2].split()[0].replace("−", "-")  # with as many digits as its interval bears
    assert shown == f"{mine - other:+.{len(shown.partition('.')[2])}f}"
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
    refuses(lambda: bench_grid(task, methods=["mc_dropout"], out=tmp_path / "out"), "map-seed0; name all methods")
    assert len(list((tmp_path / "out").rglob("config.toml"))) == 1


# ------------------------------------------------------------------------------------------------ the tables of papers
ROOT = Path(__file__).parents[2]
TABLES = ("cifar10-forde", "cifar100-forde")


@pytest.fixture
def papers(benchmarks, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    import papers

    return papers


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    """CIFAR-100 in its binary format, with random images."""
    folder, rng = tmp_path_factory.mktemp("cifar"), np.random.default_rng(0)
    (folder / "cifar-100-binary").mkdir()
    labels = (np.arange(200) % 100).astype(np.uint8)[:, None]
    for name in ("train", "test"):
        rows = rng.integers(0, 256, (200, 3072), dtype=np.uint8)
        np.concatenate([labels // 5, labels, rows], 1).tofile(folder / f"cifar-100-binary/{name}.bin")
    return str(folder)


@pytest.mark.parametrize("name", TABLES)
def test_the_paper_size_is_the_published_recipe(name):
    task = load_task(name, size="paper")
    for method in task.methods:
        config = run_config(task, method, 0)
        check_complete(config)
        assert config.settings.get("members", 10) == 10
        assert config.network == {"name": "ResNet", "depth": 18, "zero_head": True}
        recipe = {"epochs": 300, "batch_size": 128, "lr": 0.1, "weight_decay": 5e-4, "schedule": "plateau"}
        assert recipe.items() <= config.training.items()
        assert config.evaluation["severities"] == [1, 2, 3, 4, 5]
        assert Corruptions(config.evaluation["corrupt"]).types == CORRUPTIONS
    assert "lengthscales" not in run_config(task, "forde", 0).settings
    assert run_config(task, "function_rde", 0).settings["output_prior"] == "cauchy"


@pytest.mark.parametrize("name", TABLES)
def test_every_method_but_one_network_has_published_numbers(name):
    task = load_task(name)
    theirs = published_numbers(task.settings["reference"])
    assert [*theirs] == task.methods[1:]
    keys = ["nll", "accuracy", "ece", "corrupt/accuracy", "corrupt/nll", "corrupt/ece"]
    assert all([*row] == keys for row in theirs.values())
    best = max(theirs, key=lambda method: theirs[method]["corrupt/accuracy"].value)
    assert best == "forde-pca" == min(theirs, key=lambda method: theirs[method]["corrupt/nll"].value)


def test_alpha_is_chosen_under_corruptions_that_are_not_tested():
    for size in ("smoke", "short", "paper"):
        task = load_task("cifar100-alpha", size=size)
        config = run_config(task, task.methods[-1], 0)
        assert config.data["validation"] > 0
        assert not set(config.evaluation["choose"]) & set(BENCHMARK)
        assert set(Corruptions(config.evaluation["corrupt"]).types) <= set(BENCHMARK)


@pytest.mark.slow
def test_a_portion_keeps_each_run_in_one_file_and_skips_it_afterwards(papers, cifar, tmp_path, capfd):
    out = tmp_path / "kept"
    given = ["--task", "cifar100-forde", "--methods", "map", "deep_ensemble", "--size", "smoke", "--data", cifar]
    given += ["--out", str(out), "--runs", str(tmp_path / "runs"), "--jobs", "2"]
    alone = [each for each in given if each != "map"]
    assert papers.main([*alone, "--seeds", "0", "--worker"]) == 0  # as in a process of its own
    assert papers.main(given) == 0  # the other one, in such a process
    for method in ("map", "deep_ensemble"):
        with np.load(out / "cifar100-forde-smoke" / f"{method}-seed0.npz", allow_pickle=False) as kept:
            row = json.loads(str(kept["row"]))
            assert row["method"] == method
            assert row["commit"]
            assert row["torch"]
            assert row["device"]
            assert row["command"]
            correct = np.unpackbits(kept["clean/correct"])[:60]
            assert correct.mean() == pytest.approx(row["accuracy"], abs=1e-12)
            assert kept["clean/nll"].astype(float).mean() == pytest.approx(row["nll"], rel=2**-10)
            assert kept["corrupted/nll"].dtype == np.float16
            assert kept["corrupted/nll"].shape == (2, 20)
            assert kept["corrupted/nll"].astype(float).mean() == pytest.approx(row["corrupt/nll"], rel=2**-9)
            assert kept["corrupted/accuracy"].astype(float).mean() == pytest.approx(row["corrupt/accuracy"], abs=2**-10)
            assert kept["cells/ece"].shape == (2, 2)
    rows = list(csv.DictReader((out / "papers.csv").open()))
    assert [row["method"] for row in rows] == ["deep_ensemble", "map"]
    capfd.readouterr()
    assert papers.main(given) == 0
    assert "begun" not in capfd.readouterr().out


def test_a_run_that_cannot_end_in_time_is_stopped(papers, tmp_path, monkeypatch):
    given = papers.parsed(["--minutes", "5", "--runs", str(tmp_path)])
    portion = papers.Portion(load_task("cifar100-forde"), given)
    folder = tmp_path / "cifar100-forde-short" / "map-seed0"
    folder.mkdir(parents=True)
    assert portion.needs(("map", 0)) is None
    (folder / "log.jsonl").write_text("".join(json.dumps({"epoch": i + 1, "seconds": 10.0}) + "\n" for i in range(4)))
    assert portion.needs(("map", 0)) == 36 * 10.0 + papers.EVALUATION
    portion.found[("map", 0)] = 2  # epochs of an earlier portion, which may have run beside others
    assert portion.needs(("map", 0)) is None
    del portion.found[("map", 0)]

    class Process:
        killed = False

        def poll(self):
            return -9 if self.killed else None

        def kill(self):
            self.killed = True

        def wait(self):
            return -9

    process = Process()
    portion.running[("map", 0)] = (process, portion.start)
    assert portion.look() == [("map", 0)]
    assert process.killed
    portion.lasted["map"] = 301.0
    assert not portion.fits(("lit", 0))


def test_intervals_count_images_once_however_many_seeds_share_them(papers):
    shared = np.random.default_rng(1).normal(0.1, 1.0, 4000)
    found = papers.papers_page.bootstrap(np.stack([shared, shared, shared]))
    assert found["difference"] == pytest.approx(shared.mean(), abs=1e-6)
    half = 1.96 * shared.std() / 4000**0.5
    assert (found["upper"] - found["lower"]) / 2 == pytest.approx(half, rel=0.15)  # 2,000 resamples: 4 % at one sigma
    assert (found["seeds"], found["above"]) == (3, 3)


@pytest.mark.parametrize(("wanted", "ours", "low", "high", "said"), [
    (0.018, 0.011, 0.008, 0.014, "agrees"), (0.018, 0.005, 0.002, 0.008, "weaker"),
    (0.018, 0.005, -0.001, 0.011, "does not come out"), (0.018, -0.01, -0.02, -0.005, "does not come out"),
    (-0.024, -0.02, -0.03, -0.01, "agrees"), (0.001, 0.0, -0.002, 0.002, "agrees"),
    (0.001, 0.01, 0.008, 0.012, "does not come out"),
])  # fmt: skip
def test_a_verdict_compares_a_difference_with_the_published_one(papers, wanted, ours, low, high, said):
    assert papers.papers_page.verdict(wanted, ours, low, high, 0.001) == said


def test_a_page_shows_what_was_run_and_the_command_of_the_rest(papers):
    task = load_task("cifar100-forde")
    made = {"commit": "c", "torch": "t", "device": "d", "train_seconds": "270", "evaluation_seconds": "30"}
    base = {"task": task.name, "size": "short", **made}
    numbers = dict.fromkeys(papers.NUMBERS, "0.5")
    rows = [base | numbers | {"method": method, "seed": "0"} for method in ("deep_ensemble", "forde-pca")]
    ours = {"difference": "0.011", "lower": "0.008", "upper": "0.014", "seeds": "1.0", "above": "1"}
    pairs = [base | ours | {"method": "forde-pca", "metric": "corrupt/accuracy"}]
    pairs += [base | ours | {"method": "forde-pca", "metric": "corrupt/nll"}]
    text = papers.papers_page.page(task, rows, pairs)
    line = next(line for line in text.splitlines() if line.startswith("|forde-pca|"))
    assert "|50.0/56.1|" in line
    assert "cA +1.10 (+0.80 to +1.40), published +1.80: agrees" in line
    assert "cNLL +0.011" in line
    assert "|5.0|" in line
    assert line.endswith("does not come out|")
    assert "Not run (published accuracy/cA): map, weight_rde 81.7/54.2, function_rde 80.1/51.9" in text
    assert "Verdicts: agrees: 1, does not come out: 1." in text
    nothing = papers.papers_page.page(task, [], [])
    assert "`python benchmarks/papers.py --task cifar100-forde --data DIR`" in nothing
    assert "|" not in nothing
