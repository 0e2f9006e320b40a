"""Corruptions: shapes, seeds, severities and bad input; the published files of corrupted images; implicit corruptions."""

from __future__ import annotations

import itertools
import pickle
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.data.corruptions import BENCHMARK, CORRUPTIONS, EXTRA, corrupt, read_cifar_c, scaled_constants
from refusals import refuses
from thinning import often, thinned

SEVERITIES = [1, 2, 3, 4, 5]
RANDOM = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "glass_blur", "motion_blur", "snow", "frost", "fog"),
    *("elastic_transform", "speckle_noise", "spatter"),
)
# Severities at which the published constants take a picture farther from itself in every step. They change course where
# frost hides less and dims more, glass blurs what it displaced, mud follows water, colour comes back. Elastic transform
# moves less and less from severity to severity, and bends more and more sharply.
GROWING = {
    "motion_blur": (1, 2, 3, 5), "frost": (1, 2, 3), "glass_blur": (3, 4), "spatter": (1, 2, 3), "saturate": (3, 4, 5),
}  # fmt: skip


def pictures(count: int = 4, channels: int = 3, height: int = 32, width: int = 32) -> torch.Tensor:
    """(count, channels, height, width) uint8: coloured waves and a block, different in every image."""
    y, x = torch.meshgrid(torch.linspace(0, 6, height), torch.linspace(0, 6, width), indexing="ij")
    number = torch.arange(count)[:, None, None, None]
    phase = number + torch.arange(channels)[:, None, None] * 2.1
    images = 120 + 80 * torch.sin(y * (1 + 0.1 * number) + phase) * torch.cos(x + phase)
    images[:, :, height // 3 : height // 2, width // 4 : width // 2] += 50
    return images.clamp(0, 255).to(torch.uint8)


def test_there_are_fifteen_and_four_names() -> None:
    assert len(BENCHMARK) == 15
    assert EXTRA == ("speckle_noise", "gaussian_blur", "spatter", "saturate")
    assert CORRUPTIONS == BENCHMARK + EXTRA
    assert len(set(CORRUPTIONS)) == 19


@pytest.mark.parametrize(("name", "channels"), thinned(list(CORRUPTIONS), [1, 3], every=2))
def test_every_corruption_keeps_shape_and_dtype_and_changes_the_image(name: str, channels: int) -> None:
    images = pictures(channels=channels)
    before, state = images.clone(), torch.get_rng_state()
    for severity in SEVERITIES:
        corrupted = corrupt(images, name, severity)
        assert corrupted.shape == images.shape
        assert corrupted.dtype == torch.uint8
        if name == "saturate" and channels == 1:
            assert torch.equal(corrupted, images)  # grey has nothing to saturate
        else:
            assert not torch.equal(corrupted, images)
    assert torch.equal(images, before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_an_image_is_corrupted_the_same_in_any_batch(name: str) -> None:
    images = pictures(7)
    for severity in (1, 5):  # water and mud in spatter
        whole = corrupt(images, name, severity, seed=5)
        parts = [corrupt(images[i:j], name, severity, seed=5, index=range(i, j)) for i, j in ((0, 1), (1, 5), (5, 7))]
        difference = (torch.cat(parts).int() - whole.int()).abs()
        # products of matrices may add in another order for another number of rows: a tie, one level
        assert difference.max() <= 1
        assert (difference > 0).float().mean() < 0.002
        order = torch.tensor([3, 0, 6])
        shuffled = corrupt(images[order], name, severity, seed=5, index=order)
        assert (shuffled.int() - whole[order].int()).abs().max() <= 1


def test_seed_and_index_draw_anew_where_there_is_anything_to_draw() -> None:
    images = pictures(1).expand(3, -1, -1, -1)
    for name in CORRUPTIONS:
        first, random = corrupt(images, name, 3, seed=0), name in RANDOM
        assert torch.equal(first, corrupt(images, name, 3, seed=0)), name
        assert torch.equal(first, corrupt(images, name, 3, seed=1)) != random, name
        assert torch.equal(first[0], first[1]) != random, name
        assert torch.equal(first, corrupt(images, name, 3, seed=0, index=[10, 11, 12])) != random, name


@pytest.mark.parametrize("name", ["gaussian_noise", "zoom_blur", "frost", "jpeg_compression"])
def test_floating_images_give_the_same_levels(name: str) -> None:
    images = pictures()
    for dtype in (torch.float16, torch.float32, torch.float64):
        floating = corrupt((images / 255).to(dtype), name, 2)
        assert floating.dtype == dtype
        assert torch.equal((floating.double() * 255).round().to(torch.uint8), corrupt(images, name, 2)), dtype


@pytest.mark.parametrize(("channels", "height", "width"), [(1, 28, 28), (3, 8, 8), (3, 64, 48), (1, 9, 33)])
def test_other_sizes_work(channels: int, height: int, width: int) -> None:
    images = pictures(2, channels, height, width)
    for name, severity in itertools.product(CORRUPTIONS, (2, 5)):
        assert corrupt(images, name, severity).shape == images.shape, name


@pytest.mark.parametrize("name", sorted(set(CORRUPTIONS) - {"elastic_transform"}))
def test_severity_grows(name: str) -> None:
    images = pictures(32)
    corrupted = [corrupt(images, name, severity).double() for severity in GROWING.get(name, SEVERITIES)]
    distance = [(each - images).square().mean().sqrt().item() for each in corrupted]
    assert distance[0] > 0.9
    assert all(later > 1.02 * earlier for earlier, later in itertools.pairwise(distance)), distance


def test_elastic_transform_moves_less_and_bends_more() -> None:
    y, x = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    ramp = (torch.stack([8 * x, 8 * y, 0 * x])).to(torch.uint8).expand(64, -1, -1, -1)  # colour tells the position
    bending = []
    for severity in (2, 3, 4, 5):
        position = corrupt(ramp, "elastic_transform", severity)[:, :2, 4:-4, 4:-4].double() / 8
        second = position[..., 2:] - 2 * position[..., 1:-1] + position[..., :-2]  # zero for every affine map
        bending.append(second.square().mean().sqrt().item())
    assert bending == sorted(bending)
    assert bending[-1] > 3 * bending[0]


def test_lengths_scale_with_the_side_and_whole_pixels_never_shrink() -> None:
    assert scaled_constants("motion_blur", 5, 32) == (9, 2.5)
    assert scaled_constants("motion_blur", 5, 64) == (18, 5)
    assert scaled_constants("gaussian_blur", 5, 28) == (28 / 32,)
    assert scaled_constants("defocus_blur", 4, 28) == (1, 0.2 * 28 / 32)
    assert scaled_constants("glass_blur", 1, 96) == pytest.approx((0.15, 3, 1))
    assert scaled_constants("jpeg_compression", 1, 224) == (80,)


def test_a_blur_scaled_with_the_image_looks_the_same() -> None:
    large = torch.nn.functional.interpolate(pictures(4).float(), scale_factor=4, mode="bicubic").clamp(0, 255)
    small = torch.nn.functional.avg_pool2d(large, 4)
    for name in ("gaussian_blur", "defocus_blur", "motion_blur"):
        blurred = [corrupt(images.to(torch.uint8), name, 5).float() for images in (large, small)]
        change = (blurred[1] - small)[..., 6:-6, 6:-6]
        error = (torch.nn.functional.avg_pool2d(blurred[0], 4) - blurred[1])[..., 6:-6, 6:-6]
        assert error.abs().mean() < 0.25 * change.abs().mean(), name


def test_a_greyscale_image_is_corrupted_like_its_copy_in_three_equal_channels() -> None:
    grey = pictures(3, channels=1)
    moving = ("defocus_blur", "motion_blur", "elastic_transform")
    for name in ("brightness", "contrast", "fog", "snow", "pixelate", *moving):
        one, three = corrupt(grey, name, 3), corrupt(grey.expand(-1, 3, -1, -1), name, 3)
        assert (one.int() - three.int()).abs().max() <= 1, name
    # coloured layers: the luma of the coloured result
    weights = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
    for name, severity in (("frost", 1), ("spatter", 1), ("spatter", 5)):
        one, three = corrupt(grey // 2, name, severity), corrupt((grey // 2).expand(-1, 3, -1, -1), name, severity)
        assert (one[:, 0] - (three * weights).sum(1)).abs().max() <= 1.1, name


def test_an_empty_batch_comes_back_empty() -> None:
    for name in CORRUPTIONS:
        assert corrupt(torch.zeros(0, 3, 32, 32, dtype=torch.uint8), name, 1).shape == (0, 3, 32, 32)


@pytest.mark.parametrize(("name", "level"), thinned(list(CORRUPTIONS), [0, 255], every=2))
def test_black_and_white_images_stay_finite(name: str, level: int) -> None:
    images = torch.full((3, 3, 32, 32), level, dtype=torch.uint8)
    for severity in SEVERITIES:
        assert corrupt(images / 255.0, name, severity).isfinite().all()
    blurs = ("defocus_blur", "gaussian_blur", "zoom_blur", "motion_blur")
    if name in (*blurs, "pixelate", "jpeg_compression", "contrast"):
        assert (corrupt(images, name, 5).int() - level).abs().max() <= 1  # a flat image stays flat


def test_errors_say_what_to_do() -> None:
    images = pictures(2)
    refuses(lambda: corrupt(images, "gausian_noise", 1), r"expected name of gaussian_noise, .*got 'gausian_noise'")
    for severity in (0, 6, 2.5, True, "3", None):
        with pytest.raises((TypeError, ValueError), match="expected severity"):
            corrupt(images, "fog", severity)  # type: ignore[arg-type]
    refuses(lambda: corrupt(images.permute(0, 2, 3, 1), "fog", 1), r"got \(2, 32, 32, 3\); move the channels")
    refuses(lambda: corrupt(images[0], "fog", 1), r"got \(3, 32, 32\)")
    refuses(lambda: corrupt(images[..., :7], "fog", 1), "at least 8 pixels a side")
    refuses(lambda: corrupt(images.long(), "fog", 1), r"got torch.int64; convert levels", TypeError)
    with pytest.raises(ValueError, match="from 0 to 255; corrupt before normalising"):
        corrupt(torch.tensor([0.0, 255.0]).repeat(1, 3, 32, 16), "fog", 1)
    refuses(lambda: corrupt(torch.full((1, 3, 32, 32), float("nan")), "fog", 1), r"in \[0, 1\], got values from nan")
    refuses(lambda: corrupt(images, "fog", 1, seed=torch.Generator()), "Generator", TypeError)
    with pytest.raises(ValueError, match=r"index as whole numbers of shape \(2,\), got torch.int64 of shape \(3,\)"):
        corrupt(images, "fog", 1, index=[0, 1, 2])
    with pytest.raises(ValueError, match=r"index as whole numbers .* got torch\.float32"):
        corrupt(images, "fog", 1, index=torch.tensor([0.0, 1.0]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_gives_the_levels_of_the_cpu() -> None:
    images = pictures(16)
    for name, severity in itertools.product(CORRUPTIONS, SEVERITIES):
        here, there = corrupt(images, name, severity), corrupt(images.cuda(), name, severity)
        assert there.device.type == "cuda"
        difference = (here.int() - there.cpu().int()).abs()
        assert (difference > 1).float().mean() < 1e-3, name
        assert (difference > 0).float().mean() < 0.02, name


# ------------------------------------------------------------------------------------------------- the published files
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder like the published one, its 150 MB of pixels a sparse file: pixel (0, 0) of row i holds i in base 256."""
    images = np.lib.format.open_memmap(tmp_path / "fog.npy", mode="w+", dtype=np.uint8, shape=(50_000, 32, 32, 3))
    for i in (0, 9_999, 10_000, 29_999, 49_999):
        images[i, 0, 0] = (i >> 16, i >> 8 & 255, i & 255)
        images[i, 31, 2, 1] = 7
    images.flush()
    np.save(tmp_path / "labels.npy", np.tile(np.arange(10_000) % 10, 5).astype(np.uint8))
    return tmp_path


def test_a_severity_is_ten_thousand_rows_with_channels_first(folder: Path) -> None:
    for severity, first, last in ((1, 0, 9_999), (2, 10_000, None), (3, None, 29_999), (5, None, 49_999)):
        images, labels = read_cifar_c(folder, "fog", severity)
        assert images.shape == (10_000, 3, 32, 32)
        assert images.dtype == torch.uint8
        assert labels.dtype == torch.int64
        assert labels.tolist() == [i % 10 for i in range(10_000)]
        for row, number in ((0, first), (9_999, last)):
            if number is not None:
                assert images[row, :, 0, 0].tolist() == [number >> 16, number >> 8 & 255, number & 255]
                assert images[row, 1, 31, 2] == 7


def test_without_severity_all_fifty_thousand_come(folder: Path) -> None:
    images, labels = read_cifar_c(str(folder), "fog")
    assert images.shape == (50_000, 3, 32, 32)
    assert labels.shape == (50_000,)
    assert images[29_999, :, 0, 0].tolist() == [0, 29_999 >> 8, 29_999 & 255]


def test_the_documentations_example_runs(folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "corruptions.md").read_text(encoding="utf-8")
    names: dict[str, object] = {"folder": folder}
    exec(re.findall(r"```\n(from dissensus.data.corruptions.*?)```", page, flags=re.DOTALL)[0], names)
    assert names["images"].shape == (10_000, 3, 32, 32)  # type: ignore[attr-defined]


def test_writing_into_the_images_leaves_the_file_alone(folder: Path) -> None:
    images, _ = read_cifar_c(folder, "fog", 1)
    images[0] = 200
    again, _ = read_cifar_c(folder, "fog", 1)
    assert again[0, 2, 5, 5] == 0


def test_a_missing_file_is_named(folder: Path) -> None:
    refuses(lambda: read_cifar_c(folder, "snow", 1), r"snow\.npy, got nothing there", FileNotFoundError)
    (folder / "labels.npy").unlink()
    refuses(lambda: read_cifar_c(folder, "fog", 1), r"labels\.npy", FileNotFoundError)


def test_a_wrong_shape_or_type_is_named(folder: Path) -> None:
    np.save(folder / "snow.npy", np.zeros((10, 32, 32, 3), np.uint8))
    told = r"expected uint8 of shape \(50000, 32, 32, 3\) in .*snow\.npy, got uint8 of shape"
    refuses(lambda: read_cifar_c(folder, "snow"), told)
    np.save(folder / "labels.npy", np.zeros(50_000))
    refuses(lambda: read_cifar_c(folder, "fog"), r"labels\.npy, got float64")


def test_pickles_and_damaged_files_are_refused(folder: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (folder / "sprung",)  # type: ignore[return-value]

    (folder / "frost.npy").write_bytes(pickle.dumps(Trap()))
    np.save(folder / "snow.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    with (folder / "fog.npy").open("rb") as whole:
        (folder / "contrast.npy").write_bytes(whole.read(1000))
    (folder / "pixelate.npy").write_bytes(b"")
    for name in ("frost", "snow", "contrast", "pixelate"):
        refuses(partial(read_cifar_c, folder, name), rf"expected a NumPy array file at .*{name}\.npy")
    assert not (folder / "sprung").exists()


def test_name_and_severity_are_checked(folder: Path) -> None:
    refuses(lambda: read_cifar_c(folder, "Fog"), r"expected name of .*fog.*, got 'Fog'")
    refuses(lambda: read_cifar_c(folder, "fog", 6), "expected severity")


# --------------------------------- implicit corruptions: the minimum where it is known, and a descent that never rises
def linear(**keywords):
    torch.manual_seed(0)
    return ds.NodeBNN(nn.Linear(6, 4).double(), data_size=10, mode="both", samples=12, prior_std=0.5, **keywords)


def test_of_linear_functions_it_is_the_ridge_regression():
    """With f_m(x) = A_m x + b_m: x_s = (ĀᵀĀ + λ)⁻¹ (Āᵀ (f_s(x) − b̄) + λ x)."""
    posterior, x = linear(), torch.randn(5, 6, dtype=torch.float64)
    drawn = posterior.draw()
    found = ds.attacks.implicit_corruptions(posterior, x, penalty=0.2, functions=3, steps=200, draw=drawn)
    members = [drawn.member(i) for i in range(12)]
    weights, biases = (torch.stack([getattr(m, key).detach() for m in members]) for key in ("weight", "bias"))
    mean, bias = weights.mean(0), biases.mean(0)
    assert found.functions.tolist() == [0, 4, 8]  # one of each of three of the four components
    for s, i in enumerate(found.functions.tolist()):
        aim = x @ weights[i].T + biases[i]
        right = mean.T @ (aim - bias).T + 0.2 * x.T
        expected = torch.linalg.solve(mean.T @ mean + 0.2 * torch.eye(6, dtype=torch.float64), right).T
        torch.testing.assert_close(found.inputs[s], expected, rtol=0, atol=1e-6)
        apart = (aim - expected @ mean.T - bias).square().sum(1)
        share = 1 - apart / (aim - x @ mean.T - bias).square().sum(1)
        torch.testing.assert_close(found.explained[s], share, rtol=0, atol=1e-6)


def conv():
    return ds.nets.LeNet(3, size=16)


MADE = [
    lambda: ds.NodeBNN(conv(), data_size=10, samples=4, prior_std=0.5),
    lambda: ds.DeepEnsemble([conv() for _ in range(2)]),
    lambda: ds.MCDropout(conv(), rate=0.3, samples=3),
]


@pytest.mark.parametrize("make", often(MADE[1:2], MADE[::2]))
def test_the_objective_falls_and_nothing_else_moves(make):
    torch.manual_seed(0)
    posterior, x = make(), torch.randn(3, 1, 16, 16)
    before, drawn = tiny.state(posterior), posterior.draw()

    def objective(found):
        aims = drawn(x)[found.functions]
        said = torch.stack([drawn(each).mean(0) for each in found.inputs])
        apart, moved = (t.flatten(2).square().sum(2) for t in (aims - said, found.inputs - x))
        return (apart + 1e-3 * moved).detach() / 2

    last = None
    for steps in (0, 3, 30):
        found = ds.attacks.implicit_corruptions(posterior, x, penalty=1e-3, steps=steps, draw=drawn)
        now = objective(found)
        assert last is None or bool((now < last).all())
        last = now
    assert found.inputs.shape == (drawn.members, *x.shape)
    assert bool((found.explained > 0.1).all())
    alone = ds.attacks.implicit_corruptions(posterior, x[1:2], penalty=1e-3, steps=30, draw=drawn, at_once=1)
    torch.testing.assert_close(alone.inputs[:, 0], found.inputs[:, 1], rtol=1e-3, atol=1e-4)  # every input by itself
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny.state(posterior).items())
    assert all(parameter.grad is None for parameter in posterior.parameters())


def test_a_single_function_is_its_own_mean():
    posterior, x = ds.MAP(conv()), torch.randn(2, 1, 16, 16)
    found = ds.attacks.implicit_corruptions(posterior, x, steps=5)
    assert torch.equal(found.inputs[0], x)
    assert torch.equal(found.explained, torch.ones(1, 2))


def test_wrong_arguments_are_refused():
    posterior, x = linear(), torch.randn(2, 6, dtype=torch.float64)
    for inputs, settings, message in (
        (x.long(), {}, r"expected one floating-point tensor of inputs, got torch\.int64"),
        (x, {"penalty": 0}, "expected penalty above 0, got 0"),
        (x, {"functions": 0}, "expected functions of at least 1, got 0"),
        (x, {"draw": "new"}, "expected draw of fixed, fresh, got 'new'"),
    ):
        refuses(partial(ds.attacks.implicit_corruptions, posterior, inputs, **settings), message)
