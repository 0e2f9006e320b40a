"""The data of tasks: splits, limits, loaders, augmentation."""

import numpy as np
import pytest
import torch

from dissensus.bench.rows.dataset_rows import AUGMENTATIONS, TaskRows, standardised_batches
from dissensus.bench.rows.named_sets import FOREIGN, GAP, SHIFTED, set_location
from dissensus.bench.rows.task_rows import DataCache, task_data
from refusals import refuses
from uci_files import write_uci_files


def test_a_task_holds_out_validation_rows_and_standardises_by_training_rows_alone():
    data = task_data({"name": "two_moons", "count": 100, "validation": 0.2, "ood": ["far_ring"], "ood_rows": 30})
    assert (len(data.train.y), len(data.validation.y), len(data.test.y), len(data.ood["far_ring"].y)) == (
        80, 20, 100, 30,
    )  # fmt: skip
    seen = {tuple(row) for row in data.train.x.tolist()}
    assert not seen & {tuple(row) for row in [*data.validation.x.tolist(), *data.test.x.tolist()]}
    z = data.standardiser(data.train.x)
    assert torch.allclose(z.mean(0), torch.zeros(2), atol=1e-5)
    assert torch.allclose(z.std(0, correction=0), torch.ones(2), atol=1e-5)


def test_the_same_settings_give_the_same_rows():
    settings = {"name": "digits", "train": 100, "validation": 20, "test": 30, "ood": ["fashion"], "ood_rows": 10}
    first, second = task_data(settings), task_data(settings)
    for name in ("train", "validation", "test"):
        assert torch.equal(getattr(first, name).x, getattr(second, name).x)
    assert first.train.x.dtype == torch.uint8
    assert (len(first.train.y), len(first.validation.y), len(first.test.y)) == (80, 20, 30)
    assert len(first.ood["fashion"].y) == 10


def test_ones_own_images_are_read_from_npz_files(tmp_path):
    generator = np.random.default_rng(0)
    for name, count in (("train", 40), ("test", 10), ("odd", 6)):
        images = generator.integers(0, 256, (count, 8, 8), dtype=np.uint8)
        np.savez(tmp_path / f"{name}.npz", images=images, labels=np.arange(count) % 4)
    settings = {"name": "npz", "train_file": "train.npz", "test_file": "test.npz", "validation": 8}
    data = task_data(settings | {"ood": ["odd.npz"], "shift": "odd.npz"}, str(tmp_path))
    assert data.train.x.shape == (32, 1, 8, 8)
    assert data.classes == ("0", "1", "2", "3")
    assert data.ood["odd"].x.shape == data.shift["odd"].x.shape == (6, 1, 8, 8)


def write_images(folder, **files):
    """name=(side, labels): images of random pixels in .npz files."""
    generator = np.random.default_rng(0)
    for name, (side, labels) in files.items():
        images = generator.integers(0, 256, (len(labels), side, side), dtype=np.uint8)
        np.savez(folder / f"{name}.npz", images=images, labels=np.array(labels, dtype=np.int64))


FOUR = [0, 1, 2, 3] * 5


@pytest.mark.parametrize(("settings", "message"), [
    ({"test_file": "small.npz"}, r"expected inputs of shape \(1, 8, 8\) in 'small.npz'.* got \(1, 6, 6\)"),
    ({"test_file": "five.npz"}, r"expected labels from 0 to 3 in 'five.npz'.* got 4 in row 2; "),
    ({"shift": ["five.npz"]}, r"expected labels from 0 to 3 in 'five.npz'.* got 4 in row 2; "),
    ({"train_file": "negative.npz"}, r"expected labels from 0 to 3 in 'negative.npz'.* got -1 in row 20; "),
    ({"train_file": "empty.npz"}, "expected rows in 'empty.npz', got none"),
    ({"test_file": "missing.npz"}, r"expected 'missing.npz' at .*missing.npz or .*, got nothing there; "),
    ({"ood": ["missing.npz"]}, r"expected 'missing.npz' at .*missing.npz or .*, got nothing there; "),
])  # fmt: skip
def test_files_of_images_that_do_not_fit_are_named_before_anything_trains(tmp_path, settings, message):
    write_images(
        tmp_path, train=(8, FOUR), test=(8, FOUR), small=(6, FOUR), five=(8, [0, 1, 4]), negative=(8, [*FOUR, -1]),
        empty=(8, []),
    )  # fmt: skip
    files = {"name": "npz", "train_file": "train.npz", "test_file": "test.npz", "validation": 0.2}
    refuses(lambda: task_data(files | settings, str(tmp_path)), message, (ValueError, FileNotFoundError))


def test_a_task_may_say_how_many_classes_there_are_where_the_training_rows_lack_some(tmp_path):
    write_images(tmp_path, train=(8, FOUR), test=(8, [0, 4]))
    files = {"name": "npz", "train_file": "train.npz", "test_file": "test.npz", "validation": 0.2}
    assert task_data(files | {"classes": 5}, str(tmp_path)).classes == ("0", "1", "2", "3", "4")


def test_the_gap_of_the_regression_is_between_its_clusters():
    x, y, _ = SHIFTED["gap"](None, noise=0.25)
    assert float(x.min()) >= 2.5
    assert float(x.max()) <= 4.5
    assert float((y - x * x.sin()).std()) == pytest.approx(0.25, abs=4 * 0.25 / 400**0.5)


@pytest.mark.parametrize(("settings", "message"), [
    (
        {"name": "two_moons", "ood": ["fashion"]},
        r"shape \(2,\) in 'fashion', as in the training set, got \(1, 28, 28\)",
    ),
    ({"name": "digits", "ood": ["fashio"]}, "did you mean 'fashion'"),
    ({"name": "x_sin_x", "shift": ["gab"]}, "did you mean 'gap'"),
    ({"name": "digits", "validation": 10_000}, "validation rows"),
    ({"name": "digits", "standardise": "unti"}, "expected data.standardise of training, unit, imagenet, none"),
    (
        {"name": "two_moons", "standardise": "unit"},
        'expected images for data.standardise = "unit", got inputs of shape',
    ),
    ({"name": "two_moons", "targets": "standardised"}, "expected a regression"),
    ({"name": "cubic", "targets": "scaled"}, "expected data.targets of original"),
])  # fmt: skip
def test_bad_data_settings_are_one_clear_error(settings, message):
    refuses(lambda: task_data(settings), message)


def test_targets_are_standardised_by_training_rows_and_inputs_keep_their_precision(tmp_path):
    settings = {"name": "uci_regression", "set": "bostonHousing", "split": 1, "validation": 0.2}
    data = task_data(settings | {"targets": "standardised"}, write_uci_files(tmp_path))
    table = np.loadtxt(tmp_path / "bostonHousing" / "data" / "data.txt")
    rows = np.loadtxt(tmp_path / "bostonHousing" / "data" / "index_test_1.txt").astype(int)
    np.testing.assert_allclose(data.test.x, table[rows, :13], rtol=1e-12)
    np.testing.assert_allclose(data.test.y[:, 0], table[rows, 13], rtol=1e-12)
    assert (len(data.train.y), len(data.validation.y)) == (364, 91)
    assert float(data.targets.mean) == pytest.approx(float(data.train.y.mean()), rel=1e-12)
    loader = standardised_batches(data.train, data.standardiser, targets=data.targets, batch_size=364)
    x, y = next(iter(loader))
    assert x.dtype == y.dtype == torch.float32
    torch.testing.assert_close(y, ((data.train.y - data.train.y.mean()) / data.train.y.std(correction=0)).float())
    torch.testing.assert_close(x.double().std(0, correction=0), torch.ones(13, dtype=torch.float64), rtol=1e-6, atol=0)
    assert set_location("uci_regression", tmp_path) == str(tmp_path / "bostonHousing" / "data")
    assert set_location("uci_regression", tmp_path / "nowhere") == "not found"


def test_pixels_can_be_brought_to_plus_and_minus_one():
    data = task_data({"name": "digits", "train": 60, "validation": 10, "standardise": "unit"})
    x, _ = next(iter(standardised_batches(data.train, data.standardiser, batch_size=50)))
    assert (float(x.min()), float(x.max())) == (-1.0, 1.0)
    torch.testing.assert_close(x, data.train.x.float() / 127.5 - 1)


def test_nothing_is_held_out_where_validation_is_zero():
    data = task_data({"name": "cubic", "points": 20, "validation": 0})
    assert (len(data.train.y), len(data.validation.y), len(data.test.y)) == (20, 0, 200)


def test_data_are_read_again_only_where_settings_differ():
    load = DataCache()
    first, second = {"name": "cubic", "draw": 0}, {"name": "cubic", "draw": 1}
    kept = load(dict(first))
    assert load(dict(first)) is kept
    assert not torch.equal(load(second).train.x, kept.train.x)
    assert torch.equal(load(first).train.x, kept.train.x)


def test_toys_and_their_shifts_are_one_function_with_the_same_noise():
    settings = {"name": "gp_draw", "points": 30, "noise": 1e-3, "draw": 4, "validation": 0, "shift": ["gp_gap"]}
    data = task_data(settings)
    gap = data.shift["gp_gap"]
    assert len(data.train.y) == 30
    for rows in (data.train, data.test):
        assert bool(((rows.x <= GAP[0]) | (rows.x >= GAP[1])).all())
    assert bool(((gap.x > GAP[0]) & (gap.x < GAP[1])).all())
    # neighbours across the gap's ends: a function of lengthscale 1 and amplitude 1 moves by less than 5 |x − x'|
    x, y = (torch.cat([getattr(rows, axis) for rows in (data.train, data.test, gap)])[:, 0] for axis in "xy")
    order = x.argsort()
    assert bool((y[order].diff().abs() < 5 * x[order].diff() + 0.01).all())
    outside = task_data({"name": "cubic", "noise": 0.0, "shift": "outside"}).shift["outside"]
    assert bool(((outside.x.abs() >= 4) & (outside.x.abs() <= 6)).all())
    torch.testing.assert_close(outside.y, outside.x**3)


def test_a_set_that_is_not_there_says_what_to_put_where(tmp_path):
    refuses(lambda: task_data({"name": "cifar10"}, str(tmp_path)), "data_batch_1", FileNotFoundError)
    assert set_location("cifar10", str(tmp_path)) == "not found"
    assert set_location("digits", None) == "shipped"
    assert FOREIGN["digits"](None).x.shape == (2000, 1, 28, 28)


def test_batches_repeat_with_torchs_generator_so_that_runs_can_go_on():
    data = task_data({"name": "digits", "train": 60, "validation": 10})
    settings = {"batch_size": 16, "shuffle": True, "augment": AUGMENTATIONS["crop"]()}
    loader = standardised_batches(data.train, data.standardiser, **settings)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = [x for x, _ in loader]
    torch.set_rng_state(state)
    assert all(torch.equal(a, b) for a, b in zip(first, [x for x, _ in loader], strict=True))
    assert len(loader) == len(first)


def test_rows_are_chosen_by_seed_and_kept_in_order():
    rows = TaskRows(torch.arange(20.0)[:, None], torch.arange(20))
    chosen = rows.sample(5, seed=0).y
    assert chosen.tolist() == sorted(chosen.tolist())
    assert torch.equal(chosen, rows.sample(5, seed=0).y)
    assert not torch.equal(chosen, rows.sample(5, seed=1).y)
    assert rows.sample(None, seed=0) is rows


@pytest.mark.parametrize("key", ["ood", "shift"])
def test_two_sets_of_one_name_are_an_error_rather_than_one_set(key, tmp_path):
    (tmp_path / "other").mkdir()
    for folder in (tmp_path, tmp_path / "other"):
        images = np.random.default_rng(0).integers(0, 255, (12, 8, 8), dtype=np.uint8)
        np.savez(folder / "odd.npz", images=images, labels=np.arange(12) % 4)
    settings = {"name": "npz", "train_file": "odd.npz", "test_file": "odd.npz", "validation": 4}
    names = ["odd.npz", str(tmp_path / "other" / "odd.npz")]
    with pytest.raises(ValueError, match=f"expected different names in data.{key}, got 'odd' twice"):
        task_data(settings | {key: names}, str(tmp_path))
    assert list(getattr(task_data(settings | {key: ["odd.npz", "odd.npz"]}, str(tmp_path)), key)) == ["odd"]
