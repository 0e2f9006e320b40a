"""Tasks: files, sizes, overrides and errors about them, variants of methods."""

import pytest

from dissensus.bench.report.html_report import write_report
from dissensus.bench.rows.named_sets import SETS
from dissensus.bench.rows.task_rows import task_data
from dissensus.bench.run import jobs
from dissensus.bench.run.build import check_complete, posterior
from dissensus.bench.run.convert import converted_config
from dissensus.bench.run.jobs import bench, report_runs
from dissensus.bench.run_grid import cells_of
from dissensus.bench.task.config import SIZES, load_task, merge_settings, read_task, run_config, task_names
from dissensus.bench.task.objects import base_name, check_methods, check_overrides_read, variants_of
from refusals import refuses

pytestmark = pytest.mark.usefixtures("unreported")


def one_cell(task):
    """The first cell of a task over a grid; other tasks as they are."""
    return cells_of(task, task.methods)[0].task if "grid" in task.settings else task


@pytest.mark.parametrize("name", task_names())
def test_every_shipped_task_resolves_at_every_size(name):
    tasks = {size: one_cell(load_task(name, size=size)) for size in SIZES}
    for size, method in ((size, method) for size, task in tasks.items() for method in task.methods):
        config = run_config(tasks[size], method, seed=1)
        assert (config.task, config.size, config.method, config.seed) == (name, size, method, 1)
        assert config.training["epochs"] >= (0 if "weights" in config.network else 1)
        assert config.data.get("validation", 1) > 0 or not config.training["keep_best"]
        assert "training" not in config.settings


def test_a_method_with_another_kind_of_network_takes_none_of_the_tasks_settings_for_its_own():
    task = load_task("cifar100-reliability")
    assert run_config(task, "map-resnet110", 0).network == {"name": "ResNet", "depth": 110}
    assert run_config(task, "map-lenet", 0).network == {"name": "LeNet"}


def test_a_value_of_seed_in_the_data_is_the_seed_of_the_run():
    task = load_task("moons", overrides=["data.seed=seed"])
    assert [run_config(task, "map", seed).data["seed"] for seed in (0, 3)] == [0, 3]
    assert run_config(load_task("moons"), "map", 3).data == load_task("moons").settings["data"]


def test_choosing_by_validation_rows_needs_some():
    told = r"training.keep_best, got data.validation = 0; hold some out, or set training"
    refuses(lambda: run_config(load_task("moons", overrides=["data.validation=0"]), "map", 0), told)
    settled = load_task("moons", overrides=["data.validation=0", "training.keep_best=false"])
    assert run_config(settled, "map", 0).data["validation"] == 0


@pytest.mark.parametrize(
    "name", [name for name in task_names() if isinstance(SETS[read_task(name)["data"]["name"]].location, str)]
)
def test_every_task_with_data_of_its_own_builds_all_its_methods(name):
    task = one_cell(load_task(name, size="smoke"))
    data = task_data(run_config(task, task.methods[0], 0).data)
    for method in task.methods:
        assert posterior(run_config(task, method, 0), data).name == base_name(method)


def test_a_size_overrides_and_the_command_line_overrides_that():
    assert load_task("moons").settings["training"]["epochs"] == 60
    assert load_task("moons", size="smoke").settings["training"]["epochs"] == 3
    task = load_task("moons", size="smoke", overrides=["training.epochs=7", "network.hidden=[4]", "data.noise=1"])
    assert task.settings["training"]["epochs"] == 7
    assert task.settings["network"]["hidden"] == [4]
    assert task.settings["training"]["batch_size"] == 64  # the rest stays


def test_method_keys_go_to_one_method_or_to_all_that_have_them():
    one = load_task("moons", overrides=["method.deep_ensemble.members=3"]).settings["method"]
    assert one["deep_ensemble"]["members"] == 3
    every = load_task("moons", overrides=["method.samples=7"]).settings["method"]
    assert every["mc_dropout"]["samples"] == 7
    assert "samples" not in every["deep_ensemble"]
    own = load_task("moons", overrides=["method.map.training.lr=0.5"])
    assert run_config(own, "map", 0).training["lr"] == 0.5
    assert run_config(own, "deep_ensemble", 0).training["lr"] == 0.01


def test_a_task_of_ones_own_is_read_from_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('methods = ["map"]\n[data]\nname = "two_moons"\n[network]\nname = "MLP"\n[training]\nepochs = 1\n')
    task = load_task(str(path))
    assert task.name == "mine"
    assert task.methods == ["map"]


@pytest.mark.parametrize(("arguments", "message"), [
    (("mons", {}), "expected a task of .*, got 'mons'; did you mean 'moons'"),
    (("moons", {"size": "long"}), "expected a size of .*, got 'long'"),
    (("moons", {"overrides": ["training.epoch=3"]}), r"key of \[training\].*'training.epochs'"),
    (("moons", {"overrides": ["trainin.epochs=3"]}), "did you mean 'training.epochs'"),
    (("moons", {"overrides": ["network.hiden=3"]}), "did you mean 'network.hidden'"),
    (("moons", {"overrides": ["method.deep_ensemble.member=3"]}), "did you mean 'method.deep_ensemble.members'"),
    (("moons", {"overrides": ["method.member=3"]}), "did you mean 'members'"),
    (("moons", {"overrides": ["data.name=two_moon"]}), "did you mean 'two_moons'"),
    (
        ("moons", {"overrides": ["training.epochs=many"]}),
        "expected a whole number for moons: training.epochs, got 'many'",
    ),
    (("moons", {"overrides": ["training.keep_best=1"]}), "expected true or false for moons: training.keep_best, got 1"),
    (("moons", {"overrides": ["training.epochs=true"]}), "expected a whole number for .*, got True"),
    (("moons", {"overrides": ["training.epochs"]}), "expected key=value"),
    (("moons", {"overrides": ["methods=map,deep_ensembel"]}), "did you mean 'deep_ensemble'"),
])  # fmt: skip
def test_unknown_names_and_wrong_values_are_one_clear_error(arguments, message):
    name, keywords = arguments
    with pytest.raises((ValueError, TypeError), match=message) as error:
        load_task(name, **keywords)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("text", "message"), [
    ("methods = [", "expected TOML in .*mine.toml"),
    ('methods = ["map"]\ntraning = 3', "did you mean 'training'"),
    ('methods = ["map"]\n[data]\nname = "two_moons"', "expected network.name .* got ''"),
    ('methods = ["map"]\n[data]\nname = "two_moons"\n[network]\nname = "MPL"', "did you mean 'MLP'"),
    ('methods = []\n[data]\nname = "two_moons"\n[network]\nname = "MLP"', "expected methods"),
    ('[data]\nname = "two_moons"\n[network]\nname = "MLP"\n[method.mapp]\n', "did you mean 'map'"),
    ('[data]\nname = "two_moons"\n[network]\nname = "MLP"\n[size.tiny]\n', "expected a size"),
])  # fmt: skip
def test_a_task_file_that_is_wrong_is_one_clear_error(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    refuses(lambda: load_task(str(path)), message)


def test_a_setting_a_method_must_have_is_asked_for():
    task = load_task("moons", size="smoke")
    refuses(lambda: check_complete(run_config(task, "lit", 0)), "expected the setting strength of lit, got none")


def test_a_setting_that_one_method_lacks_is_an_error_before_anything_is_written(tmp_path):
    task = load_task("moons", size="smoke")
    with pytest.raises(ValueError, match="expected the setting strength of lit, got none"):
        jobs.bench(task, methods=["map", "lit"], out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("method", "members"), [("map", 1), ("deep_ensemble", 5), ("svgd", 5), ("swag", 1)])
def test_a_method_gets_as_many_networks_as_it_takes_and_the_size_of_the_data(method, members):
    task = load_task("moons", size="smoke", overrides=["method.deep_ensemble.members=5"])
    data = task_data(task.settings["data"])
    built = posterior(run_config(task, method, 0), data)
    assert built.particles.members == members
    assert built.data_size == (len(data.train.y) if method == "svgd" else None)  # svgd cannot do without


def test_merging_leaves_the_originals_alone():
    base, over = {"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}
    assert merge_settings(base, over) == {"a": {"b": 3, "c": 2}}
    assert base == {"a": {"b": 1, "c": 2}}
    assert over == {"a": {"b": 3}}


def test_every_data_set_says_what_it_is():
    assert all(
        source.description and source.kind in ("classification", "regression", "segmentation", None)
        for source in SETS.values()
    )


def test_an_augmentation_is_written_as_other_objects_are():
    scaled = load_task("camvid-ood", overrides=["training.augment={segmentation={scale=[1.0, 2.0]}}"])
    assert scaled.settings["training"]["augment"] == {"segmentation": {"scale": [1.0, 2.0]}}
    with pytest.raises(ValueError, match=r"expected augment of none, crop, flip_crop.*got 'crob'.*crop"):
        load_task("digits", overrides=["training.augment=crob"])
    with pytest.raises(ValueError, match="expected scale"):
        load_task("camvid-ood", overrides=["training.augment={segmentation={scale=[-1.0, 2.0]}}"])


# -------------------------------------------------------------------------------------------------- errors about --set
NET = ["network.name=MLP", "network.inputs=4", "network.outputs=3", "network.hidden=[6]"]


def load(*overrides, methods=None):
    return load_task("moons", size="smoke", overrides=overrides, methods=methods)


@pytest.mark.parametrize(("override", "methods", "owners"), [
    ("method.init_spread=3", ["map", "deep_ensemble"], "node_bnn"),
    ("method.modulation=sign", ["map"], "batch_ensemble, rank_one_bnn"),
    ("method.members=4", ["map"], "deep_ensemble, .*"),  # a method of the task has it, but does not run
    ("method.init_spread=3", None, "node_bnn"),
])  # fmt: skip
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


@pytest.mark.parametrize(("override", "advice"), [
    ("method.batch_ensemble.modulaton=sign", "did you mean 'method.batch_ensemble.modulation'"),
    ("method.modulaton.normal=1", "name one of them"),  # nothing is near
    ("method.forme.repulsion=1", "name one of them"),
])  # fmt: skip
def test_what_is_near_comes_from_the_method_that_is_converted(override, advice):
    with pytest.raises(ValueError, match=advice) as error:
        converted_config("batch_ensemble", [*NET, override])
    assert "training.…" not in str(error.value)


# ------------------------------------------------------------------------------------------------------------ variants

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


@pytest.mark.parametrize(("override", "samples"), [
    ("method.tradi-diagonal.samples=5", (4, 5)),
    ("method.tradi.samples=5", (5, 5)),  # the variant has none of its own
    ("method.samples=5", (5, 5)),
])  # fmt: skip
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
    write_report(again, tmp_path / "results.csv")
    assert "\nmine,short,tradi-diagonal,0," in (tmp_path / "results.csv").read_text()


@pytest.mark.parametrize(("overrides", "message"), [
    (["method.trady-diagonal.samples=5"], "got 'trady'; did you mean 'tradi'"),
    (["method.tradi-diagonal.sample=5"], "did you mean 'method.tradi-diagonal.samples'"),
    (["methods=tradi-diag"], r"expected a table \[method.tradi-diag\].*known variants are tradi-diagonal"),
    (["method.tradi-a/b.samples=3"], "expected letters, digits"),
])  # fmt: skip
def test_a_variant_that_is_not_known_is_one_clear_error(task_file, overrides, message):
    refuses(lambda: load_task(task_file, overrides=overrides), message)


def test_a_variant_is_a_method_only_with_a_table():
    assert base_name("forde-log_prob") == "forde"
    check_methods(["forde-log_prob"], {"method": {"forde-log_prob": {"gradient": "log_prob"}}})
    refuses(lambda: check_methods(["forde-log_prob"], {}), "expected a table")
