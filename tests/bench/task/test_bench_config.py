"""Tasks: files, sizes, overrides; names that are not known."""

import pytest

from dissensus.bench.rows.named_sets import SETS
from dissensus.bench.rows.task_rows import task_data
from dissensus.bench.run import jobs
from dissensus.bench.run.build import check_complete, posterior
from dissensus.bench.run_grid import cells_of
from dissensus.bench.task.config import SIZES, load_task, merge_settings, read_task, run_config, task_names
from dissensus.bench.task.method_names import base_name
from refusals import refuses


def one_cell(task):
    """The first cell of a task over a grid; other tasks as they are."""
    return cells_of(task, task.methods)[0].task if "grid" in task.settings else task


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", task_names())
def test_every_shipped_task_resolves_at_every_size(name, size):
    task = one_cell(load_task(name, size=size))
    for method in task.methods:
        config = run_config(task, method, seed=1)
        assert (config.task, config.size, config.method, config.seed) == (name, size, method, 1)
        assert config.training["epochs"] >= (0 if "weights" in config.network else 1)
        assert config.data.get("validation", 1) > 0 or not config.training["keep_best"]
        assert "training" not in config.settings


def test_a_value_of_seed_in_the_data_is_the_seed_of_the_run():
    task = load_task("moons", overrides=["data.seed=seed"])
    assert [run_config(task, "map", seed).data["seed"] for seed in (0, 3)] == [0, 3]
    assert run_config(load_task("moons"), "map", 3).data == load_task("moons").settings["data"]


def test_choosing_by_validation_rows_needs_some():
    with pytest.raises(
        ValueError, match=r"training.keep_best, got data.validation = 0; hold some out, or set training"
    ):
        run_config(load_task("moons", overrides=["data.validation=0"]), "map", 0)
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
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
        (
            ("moons", {"overrides": ["training.keep_best=1"]}),
            "expected true or false for moons: training.keep_best, got 1",
        ),
        (("moons", {"overrides": ["training.epochs=true"]}), "expected a whole number for .*, got True"),
        (("moons", {"overrides": ["training.epochs"]}), "expected key=value"),
        (("moons", {"overrides": ["methods=map,deep_ensembel"]}), "did you mean 'deep_ensemble'"),
    ],
)
def test_unknown_names_and_wrong_values_are_one_clear_error(arguments, message):
    name, keywords = arguments
    with pytest.raises((ValueError, TypeError), match=message) as error:
        load_task(name, **keywords)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("methods = [", "expected TOML in .*mine.toml"),
        ('methods = ["map"]\ntraning = 3', "did you mean 'training'"),
        ('methods = ["map"]\n[data]\nname = "two_moons"', "expected network.name .* got ''"),
        ('methods = ["map"]\n[data]\nname = "two_moons"\n[network]\nname = "MPL"', "did you mean 'MLP'"),
        ('methods = []\n[data]\nname = "two_moons"\n[network]\nname = "MLP"', "expected methods"),
        ('[data]\nname = "two_moons"\n[network]\nname = "MLP"\n[method.mapp]\n', "did you mean 'map'"),
        ('[data]\nname = "two_moons"\n[network]\nname = "MLP"\n[size.tiny]\n', "expected a size"),
    ],
)
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
