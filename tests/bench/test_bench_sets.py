"""The data of tasks: splits, limits, loaders, augmentation."""

import numpy as np
import pytest
import torch

from dissensus.bench.loaders import StandardisedBatches, crop, flip
from dissensus.bench.sets import Rows, foreign, present, shifted, task_data


def test_a_task_holds_out_validation_rows_and_standardises_by_training_rows_alone():
    data = task_data({"name": "two_moons", "count": 100, "validation": 0.2, "ood": ["far_ring"], "ood_rows": 30})
    assert (len(data.train.y), len(data.validation.y), len(data.test.y), len(data.ood["far_ring"].y)) == (
        80,
        20,
        100,
        30,
    )
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


def test_the_gap_of_the_regression_is_between_its_clusters():
    x, y = shifted("gap", None)
    assert float(x.min()) >= 2.5
    assert float(x.max()) <= 4.5
    noise = (y - x * x.sin()).std()
    assert float(noise) == pytest.approx(0.25, abs=4 * 0.25 / 400**0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"name": "two_moons", "ood": ["fashion"]},
            r"shape \(2,\) in 'fashion', as in the training set, got \(1, 28, 28\)",
        ),
        ({"name": "digits", "ood": ["fashio"]}, "did you mean 'fashion'"),
        ({"name": "x_sin_x", "shift": ["gab"]}, "did you mean 'gap'"),
        ({"name": "digits", "train": 0}, "positive number of rows"),
        ({"name": "digits", "validation": 10_000}, "validation rows"),
    ],
)
def test_bad_data_settings_are_one_clear_error(settings, message):
    with pytest.raises(ValueError, match=message):
        task_data(settings)


def test_a_set_that_is_not_there_says_what_to_put_where(tmp_path):
    with pytest.raises(FileNotFoundError, match="data_batch_1"):
        task_data({"name": "cifar10"}, str(tmp_path))
    assert present("cifar10", str(tmp_path)) == "not found"
    assert present("digits", None) == "shipped"
    assert foreign("digits", None).x.shape == (2000, 1, 28, 28)


def test_crops_are_shifts_and_flips_are_mirrors():
    images = torch.arange(2 * 1 * 6 * 6).reshape(2, 1, 6, 6).float()
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    for image, source in zip(crop(images, pad=2), padded, strict=True):
        windows = [source[:, i : i + 6, j : j + 6] for i in range(5) for j in range(5)]
        assert any(torch.equal(image, window) for window in windows)
    many = flip(images[:1].expand(400, 1, 6, 6))
    mirrored = (many == images[:1].flip(3)).flatten(1).all(1)
    assert bool((mirrored | (many == images[:1]).flatten(1).all(1)).all())
    assert float(mirrored.double().mean()) == pytest.approx(0.5, abs=4 * 0.5 / 400**0.5)


def test_batches_repeat_with_torchs_generator_so_that_runs_can_go_on():
    data = task_data({"name": "digits", "train": 60, "validation": 10})
    loader = StandardisedBatches(data.train, data.standardiser, batch_size=16, shuffle=True, augment="crop")
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = [x for x, _ in loader]
    torch.set_rng_state(state)
    assert all(torch.equal(a, b) for a, b in zip(first, [x for x, _ in loader], strict=True))
    assert len(loader) == len(first)
    with pytest.raises(ValueError, match="did you mean 'crop'"):
        StandardisedBatches(data.train, data.standardiser, batch_size=4, augment="crob")


def test_rows_are_chosen_by_seed_and_kept_in_order():
    rows = Rows(torch.arange(20.0)[:, None], torch.arange(20))
    chosen = rows.first(5, seed=0).y
    assert chosen.tolist() == sorted(chosen.tolist())
    assert torch.equal(chosen, rows.first(5, seed=0).y)
    assert not torch.equal(chosen, rows.first(5, seed=1).y)
    assert rows.first(None, seed=0) is rows
