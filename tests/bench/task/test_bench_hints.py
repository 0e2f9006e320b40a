"""Errors about --set: what the methods that run have, and forms that work."""

import re

import pytest

import dissensus as ds
from dissensus.bench.run.convert import converted_config
from dissensus.bench.task.config import load_task, run_config
from dissensus.bench.task.hints import check_read
from dissensus.bench.task.objects import written

NET = ["network.name=MLP", "network.inputs=4", "network.outputs=3", "network.hidden=[6]"]


def load(*overrides, methods=None):
    return load_task("moons", size="smoke", overrides=overrides, methods=methods)


@pytest.mark.parametrize(
    ("override", "methods", "owners"),
    [
        ("method.gamma=3", ["map", "deep_ensemble"], "node_bnn"),
        ("method.modulation=sign", ["map"], "batch_ensemble"),
        ("method.members=4", ["map"], "deep_ensemble, .*"),  # a method of the task has it, but does not run
        ("method.gamma=3", None, "node_bnn"),
    ],
)
def test_a_setting_that_no_running_method_has_is_an_error_that_names_those_there_are(override, methods, owners):
    running = ", ".join(methods or ["map", "deep_ensemble", "mc_dropout"])
    key = override.removeprefix("method.").partition("=")[0]
    words = (
        rf"the methods that run \({running}\) of data_size, .*weight_prior_std, got '{key}', which is one of {owners};"
    )
    with pytest.raises(ValueError, match=words):
        load(override, methods=methods)


def test_a_setting_for_all_goes_to_methods_that_run_and_are_not_the_tasks():
    task = load("method.gamma=3", methods=["map", "node_bnn"])
    assert run_config(task, "node_bnn", 0).settings["gamma"] == 3
    assert run_config(task, "map", 0).settings == {}
    assert load("method.gamma=3", "methods=map,node_bnn").settings["method"]["node_bnn"] == {"gamma": 3}


def test_a_setting_for_all_makes_no_variant_that_no_table_makes():
    task = load("method.samples=3", methods=["mc_dropout-other"])
    with pytest.raises(ValueError, match=r"expected a table \[method.mc_dropout-other\]"):
        run_config(task, "mc_dropout-other", 0)


@pytest.mark.parametrize(
    "override", ["method.node_bnn.gamma=3", "method.node_bnn.training.lr=0.1", "method.map-a.data_size=3"]
)
def test_a_setting_of_a_method_that_does_not_run_is_an_error(override):
    with pytest.raises(ValueError, match=r"expected a setting of the methods that run \(map\), got 'method"):
        check_read([override], ["map"])
    check_read([override, "method.gamma=3", "training.epochs=1"], ["node_bnn-hot", "map-a"])


def offered(error) -> str:
    return re.search(r"write --set '(.*)'", str(error.value))[1]


@pytest.mark.parametrize("section", ["method", "method.batch_ensemble"])
@pytest.mark.parametrize(
    ("before", "part", "form", "expected"),
    [
        ([], "modulation.normal=[1,0.1]", "{normal=[1,0.1]}", ds.Modulation.normal(1, 0.1)),
        ([], "modulation.std=0.1", "{normal={mean=…, std=0.1}}", ds.Modulation.normal(1, 0.1)),
        (["modulation=sign"], "modulation.std=0.1", "{normal={mean=…, std=0.1}}", ds.Modulation.normal(1, 0.1)),
    ],
)
def test_a_part_of_an_object_is_answered_by_the_form_that_works(section, before, part, form, expected):
    sets = [*NET, *(f"{section}.{each}" for each in before)]
    with pytest.raises(ValueError, match="as a whole, got") as error:
        converted_config("batch_ensemble", [*sets, f"{section}.{part}"])
    assert offered(error) == f"{section}.modulation={form}"
    config = converted_config("batch_ensemble", [*sets, offered(error).replace("…", "1")])
    assert written("modulation", config.settings["modulation"]).made() == expected


def test_a_part_of_a_likelihood_and_words_are_answered_too():
    with pytest.raises(ValueError, match="as a whole") as error:
        load("likelihood.noise=0.1")
    assert written("likelihood", load(offered(error)).settings["likelihood"]).made().noise == 0.1
    with pytest.raises(ValueError, match="as a whole") as error:
        load("method.prior.layer=layers.0")
    assert load(offered(error)).settings["method"]["map"]["prior"] == {"empcov": {"layer": "layers.0"}}
    with pytest.raises(ValueError, match=r"expected modulation of .*, got 'nomal'; did you mean 'normal'"):
        converted_config("batch_ensemble", [*NET, "method.modulation.nomal=1"])


@pytest.mark.parametrize("override", ["method.modulaton.normal=1", "method.regime.gamma=1", "method.forme.repulsion=1"])
def test_what_is_near_comes_from_the_method_that_is_converted(override):
    with pytest.raises(ValueError, match=r"did you mean '(network|method.batch_ensemble|likelihood)") as error:
        converted_config("batch_ensemble", [*NET, override])
    assert "training.…" not in str(error.value)
