"""The tasks node-corruptions and remedies: what each method is, what is measured, and what the page shows."""

import csv

import pytest
import torch

from dissensus import attacks
from dissensus.bench.rows.dataset_rows import standardised_batches
from dissensus.bench.run import build
from dissensus.bench.run.jobs import bench, run_all
from dissensus.bench.task.config import SIZES, load_task, run_config
from dissensus.bench.task.objects import network_maker
from dissensus.nets import Residual

pytestmark = pytest.mark.usefixtures("undrawn")

TASKS = ("node-corruptions", "remedies")
REMEDIES = {  # (augmentation, dropout, ensembling, skips)
    "map": "",
    "map-augment": "augment",
    "mc_dropout": "dropout",
    "deep_ensemble": "ensemble",
    "map-skip": "skip",
    "mc_dropout-all": "augment dropout ensemble skip",
    "mc_dropout-no_augment": "dropout ensemble skip",
    "deep_ensemble-no_dropout": "augment ensemble skip",
    "mc_dropout-no_ensemble": "augment dropout skip",
    "mc_dropout-no_skip": "augment dropout ensemble",
}


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
@pytest.mark.parametrize("name", TASKS)
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
