"""From settings to objects: how many networks a method is built from."""

import json

import pytest
import torch

import dissensus as ds
from dissensus.bench.rows.task_rows import DataCache
from dissensus.bench.run import build, jobs
from dissensus.bench.run.convert import converted_config
from dissensus.bench.run.run import Run
from dissensus.bench.run.shared_training import can_share_training
from dissensus.bench.task.config import load_task, run_config
from dissensus.bench.task.objects import count_setting
from dissensus.bench.task.schema import known_keys
from dissensus.methods import METHODS

COUNTED = [name for name, method in METHODS.items() if count_setting(method) == "networks"]
FEW = {"samples": 2, "rank": 2, "members": 2, "components": 2}  # where a method has such a key


def moons(method: str, *overrides: str):
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
    assert {name for name, method in METHODS.items() if count_setting(method) is None} == {
        "batch_ensemble",
        "dropout_ensemble",
    }
    assert all(("networks" in known(f"method.{name}")) == (name in COUNTED) for name in METHODS)


@pytest.mark.parametrize("method", COUNTED)
def test_several_networks_are_built_one_after_the_other(method):
    config = moons(method, f"method.{method}.networks=3")[1]
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
    with_key, without = built(moons(method, f"method.{method}.networks=1")[1]), built(moons(method)[1])
    assert with_key.config() == without.config()
    assert with_key.config()["networks"] is None
    assert all(torch.equal(a, b) for a, b in zip(with_key.parameters(), without.parameters(), strict=True))


def test_a_bench_of_several_networks_predicts_with_all_of_their_samples(tmp_path):
    task, config = moons("swag", "method.swag.networks=3")
    jobs.run_all(task, methods=["swag"], seeds=[0], out=tmp_path)
    run = Run.open(tmp_path / "swag-seed0")
    assert run.config.settings["networks"] == 3
    assert run.measure().metrics["members/count"] == 3 * FEW["samples"]
    assert ds.load(run.folder / "posterior").particles.members == 3
    assert json.loads((run.folder / "training.json").read_text())["epochs"] == config.training["epochs"]


@pytest.mark.parametrize("count", [0, -1])
def test_fewer_than_one_network_is_an_error_before_anything_is_written(count):
    with pytest.raises(
        ValueError, match=f"expected a number of at least 1 for moons: method.swag.networks, got {count}"
    ):
        moons("swag", f"method.swag.networks={count}")


@pytest.mark.parametrize("method", ["deep_ensemble", "batch_ensemble"])
def test_a_method_that_counts_otherwise_names_its_own_keys(method):
    with pytest.raises(ValueError, match=rf"a key of \[method.{method}\] of .*members.*got 'method.{method}.networks'"):
        moons(method, f"method.{method}.networks=3")


def test_several_networks_train_on_their_own():
    shared = ("training.together=true", "training.keep_best=false")
    assert can_share_training(moons("swag", *shared)[1])
    assert can_share_training(moons("swag", *shared, "method.swag.networks=1")[1])
    assert not can_share_training(moons("swag", *shared, "method.swag.networks=2")[1])


def test_several_networks_do_not_start_from_one_file():
    sets = ["network.name=MLP", "network.inputs=2", "network.outputs=2"]
    with pytest.raises(ValueError, match=r"got swag, whose 4 networks would all start equal; .* or networks"):
        converted_config("swag", [*sets, "method.networks=4"])
    assert converted_config("swag", [*sets, "method.networks=1"]).settings == {"networks": 1}
