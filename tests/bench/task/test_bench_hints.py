"""Errors about --set: what the methods that run have, and forms that work."""

import pytest

from dissensus.bench.run.convert import converted_config
from dissensus.bench.task.config import load_task, run_config
from dissensus.bench.task.method_names import check_overrides_read
from refusals import refuses

NET = ["network.name=MLP", "network.inputs=4", "network.outputs=3", "network.hidden=[6]"]


def load(*overrides, methods=None):
    return load_task("moons", size="smoke", overrides=overrides, methods=methods)


@pytest.mark.parametrize(
    ("override", "methods", "owners"),
    [
        ("method.init_spread=3", ["map", "deep_ensemble"], "node_bnn"),
        ("method.modulation=sign", ["map"], "batch_ensemble, rank_one_bnn"),
        ("method.members=4", ["map"], "deep_ensemble, .*"),  # a method of the task has it, but does not run
        ("method.init_spread=3", None, "node_bnn"),
    ],
)
def test_a_setting_that_no_running_method_has_is_an_error_that_names_those_there_are(override, methods, owners):
    running = ", ".join(methods or ["map", "deep_ensemble", "mc_dropout"])
    key = override.removeprefix("method.").partition("=")[0]
    words = rf"the methods that run \({running}\) of .*, got '{key}'; choose a method that has it \({owners}\)"
    refuses(lambda: load(override, methods=methods), words)


def test_a_setting_for_all_goes_to_methods_that_run_and_are_not_the_tasks():
    task = load("method.init_spread=3", methods=["map", "node_bnn"])
    assert run_config(task, "node_bnn", 0).settings["init_spread"] == 3
    assert run_config(task, "map", 0).settings == {}
    assert load("method.init_spread=3", "methods=map,node_bnn").settings["method"]["node_bnn"] == {"init_spread": 3}


def test_a_setting_for_all_makes_no_variant_that_no_table_makes():
    task = load("method.samples=3", methods=["mc_dropout-other"])
    refuses(lambda: run_config(task, "mc_dropout-other", 0), r"expected a table \[method.mc_dropout-other\]")


@pytest.mark.parametrize(
    "override", ["method.node_bnn.init_spread=3", "method.node_bnn.training.lr=0.1", "method.map-a.data_size=3"]
)
def test_a_setting_of_a_method_that_does_not_run_is_an_error(override):
    with pytest.raises(ValueError, match=r"expected a setting of the methods that run \(map\), got 'method"):
        check_overrides_read([override], ["map"])
    check_overrides_read([override, "method.init_spread=3", "training.epochs=1"], ["node_bnn-hot", "map-a"])


@pytest.mark.parametrize("part", ["modulation.normal=[1,0.1]", "modulation.std=0.1", "modulation.nomal=1"])
@pytest.mark.parametrize("section", ["method", "method.batch_ensemble"])
def test_a_part_of_an_object_is_answered_by_the_forms_that_work(section, part):
    words = (
        rf"expected {section}.modulation as a whole, got .*{section}.modulation={{NAME=…}}.* of .*normal\(mean, std\)"
    )
    refuses(lambda: converted_config("batch_ensemble", [*NET, f"{section}.{part}"]), words)


def test_a_part_of_a_likelihood_and_of_an_object_of_some_methods_is_answered_too():
    refuses(lambda: load("likelihood.noise=0.1"), "expected likelihood as a whole")
    with pytest.raises(ValueError, match=r"expected method.prior as a whole.* of gaussian\(std\), empcov\(layer"):
        load("method.prior.layer=layers.0")


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("method.batch_ensemble.modulaton=sign", "did you mean 'method.batch_ensemble.modulation'"),
        ("method.modulaton.normal=1", "name one of them"),  # nothing is near
        ("method.forme.repulsion=1", "name one of them"),
    ],
)
def test_what_is_near_comes_from_the_method_that_is_converted(override, advice):
    with pytest.raises(ValueError, match=advice) as error:
        converted_config("batch_ensemble", [*NET, override])
    assert "training.…" not in str(error.value)
