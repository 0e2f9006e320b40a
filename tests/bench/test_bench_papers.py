"""The tables of papers as tasks: their recipes, their references, and `benchmarks/papers.py` at the size smoke."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from dissensus.bench.report.published_numbers import published_numbers
from dissensus.bench.run.build import check_complete
from dissensus.bench.task.config import load_task, run_config
from dissensus.data.corruptions import BENCHMARK, CORRUPTIONS
from dissensus.evaluation.robustness_curves import Corruptions

ROOT = Path(__file__).parents[2]
TABLES = ("cifar10-forde", "cifar100-forde")


@pytest.fixture
def papers(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    import papers

    yield papers
    for name in ("papers", "papers_page", "rows"):
        sys.modules.pop(name, None)


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
    task = load_task("cifar100-forde")
    portion = papers.Portion(task, given)
    folder = tmp_path / "cifar100-forde-short" / "map-seed0"
    folder.mkdir(parents=True)
    assert portion.needs(("map", 0)) is None
    (folder / "log.jsonl").write_text("".join(json.dumps({"seconds": 10.0}) + "\n" for _ in range(4)))
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
    rng = np.random.default_rng(1)
    shared = rng.normal(0.1, 1.0, 4000)
    found = papers.papers_page.bootstrap(np.stack([shared, shared, shared]))
    assert found["difference"] == pytest.approx(shared.mean(), abs=1e-6)
    half = 1.96 * shared.std() / 4000**0.5
    assert (found["upper"] - found["lower"]) / 2 == pytest.approx(half, rel=0.15)  # 2,000 resamples: 4 % at one sigma
    assert (found["seeds"], found["above"]) == (3, 3)


@pytest.mark.parametrize(
    ("wanted", "ours", "low", "high", "said"),
    [
        (0.018, 0.011, 0.008, 0.014, "agrees"),
        (0.018, 0.005, 0.002, 0.008, "weaker"),
        (0.018, 0.005, -0.001, 0.011, "does not come out"),
        (0.018, -0.01, -0.02, -0.005, "does not come out"),
        (-0.024, -0.02, -0.03, -0.01, "agrees"),
        (0.001, 0.0, -0.002, 0.002, "agrees"),
        (0.001, 0.01, 0.008, 0.012, "does not come out"),
    ],
)
def test_a_verdict_compares_a_difference_with_the_published_one(papers, wanted, ours, low, high, said):
    assert papers.papers_page.verdict(wanted, ours, low, high, 0.001) == said


def test_a_page_shows_what_was_run_and_the_command_of_the_rest(papers):
    task = load_task("cifar100-forde")
    base = {"task": task.name, "size": "short", "commit": "c", "torch": "t", "device": "d", "seconds": "300"}
    numbers = dict.fromkeys(papers.NUMBERS, "0.5")
    rows = [base | numbers | {"method": method, "seed": "0"} for method in ("deep_ensemble", "forde-pca")]
    ours = {"difference": "0.011", "lower": "0.008", "upper": "0.014", "seeds": "1.0", "above": "1"}
    pairs = [base | ours | {"method": "forde-pca", "metric": "corrupt/accuracy"}]
    pairs += [base | ours | {"method": "forde-pca", "metric": "corrupt/nll"}]
    text = papers.papers_page.page(task, rows, pairs)
    line = next(line for line in text.splitlines() if line.startswith("| forde-pca"))
    assert "50.0 (56.1)" in line
    assert "cA +1.10 (+0.80 to +1.40; 1 of 1 seeds above 0), published +1.80: agrees" in line
    assert "cNLL +0.011" in line
    assert line.endswith("does not come out |")
    assert "--methods map weight_rde function_rde feature_rde lit forde forde-tuned --seeds" in text
