"""The public function: shapes, seeds, greyscale, other sizes, severities and what it says about bad input."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from dissensus.data.corruptions import BENCHMARK, CORRUPTIONS, EXTRA, corrupt, scaled_constants
from refusals import refuses
from thinning import thinned

SEVERITIES = [1, 2, 3, 4, 5]
RANDOM = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "glass_blur", "motion_blur", "snow", "frost", "fog"),
    *("elastic_transform", "speckle_noise", "spatter"),
)
# Severities at which the published constants take a picture farther from itself in every step. They change course where
# frost hides less and dims more, glass blurs what it displaced, mud follows water, colour comes back. Elastic transform
# moves less and less from severity to severity, and bends more and more sharply.
GROWING = {
    "motion_blur": (1, 2, 3, 5),
    "frost": (1, 2, 3),
    "glass_blur": (3, 4),
    "spatter": (1, 2, 3),
    "saturate": (3, 4, 5),
}


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
    for severity in (1, 3, 5):
        whole = corrupt(images, name, severity, seed=5)
        parts = [corrupt(images[i:j], name, severity, seed=5, index=range(i, j)) for i, j in ((0, 1), (1, 5), (5, 7))]
        difference = (torch.cat(parts).int() - whole.int()).abs()
        # products of matrices may add in another order for another number of rows: a tie, one level
        assert difference.max() <= 1
        assert (difference > 0).float().mean() < 0.002
        order = torch.tensor([3, 0, 6])
        shuffled = corrupt(images[order], name, severity, seed=5, index=order)
        assert (shuffled.int() - whole[order].int()).abs().max() <= 1


@pytest.mark.parametrize("name", RANDOM)
def test_seed_index_and_severity_draw_anew(name: str) -> None:
    images = pictures(1).expand(3, -1, -1, -1)
    first = corrupt(images, name, 3, seed=0)
    assert torch.equal(first, corrupt(images, name, 3, seed=0))
    assert not torch.equal(first, corrupt(images, name, 3, seed=1))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, corrupt(images, name, 3, seed=0, index=[10, 11, 12]))


@pytest.mark.parametrize("name", sorted(set(CORRUPTIONS) - set(RANDOM)))
def test_the_others_do_not_depend_on_the_seed(name: str) -> None:
    images = pictures(2)
    assert torch.equal(corrupt(images, name, 3, seed=0), corrupt(images, name, 3, seed=1, index=[8, 9]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["gaussian_noise", "zoom_blur", "frost", "jpeg_compression"])
def test_floating_images_give_the_same_levels(name: str, dtype: torch.dtype) -> None:
    images = pictures()
    floating = corrupt((images / 255).to(dtype), name, 2)
    assert floating.dtype == dtype
    assert torch.equal((floating.double() * 255).round().to(torch.uint8), corrupt(images, name, 2))


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize(("channels", "height", "width"), [(1, 28, 28), (3, 8, 8), (3, 64, 48), (1, 9, 33)])
def test_other_sizes_work(name: str, channels: int, height: int, width: int) -> None:
    images = pictures(2, channels, height, width)
    for severity in (2, 5):
        assert corrupt(images, name, severity).shape == images.shape


@pytest.mark.parametrize("name", sorted(set(CORRUPTIONS) - {"elastic_transform"}))
def test_severity_grows(name: str) -> None:
    images = pictures(32)
    distance = [
        (corrupt(images, name, severity).double() - images).square().mean().sqrt().item()
        for severity in GROWING.get(name, SEVERITIES)
    ]
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
    for name in (
        "brightness",
        "contrast",
        "defocus_blur",
        "fog",
        "snow",
        "pixelate",
        "motion_blur",
        "elastic_transform",
    ):
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
        floating = corrupt(images / 255.0, name, severity)
        assert floating.isfinite().all()
    if name in (
        "defocus_blur",
        "gaussian_blur",
        "zoom_blur",
        "motion_blur",
        "pixelate",
        "jpeg_compression",
        "contrast",
    ):
        assert (corrupt(images, name, 5).int() - level).abs().max() <= 1  # a flat image stays flat


def test_the_documentations_first_example_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "corruptions.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    exec(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0], names)
    assert len(names["everything"]) == 95  # type: ignore[arg-type]


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
    with pytest.raises(TypeError, match="Generator"):
        corrupt(images, "fog", 1, seed=torch.Generator())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"index as whole numbers of shape \(2,\), got torch.int64 of shape \(3,\)"):
        corrupt(images, "fog", 1, index=[0, 1, 2])
    with pytest.raises(ValueError, match=r"index as whole numbers .* got torch\.float32"):
        corrupt(images, "fog", 1, index=torch.tensor([0.0, 1.0]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_gpu_gives_the_levels_of_the_cpu(name: str) -> None:
    images = pictures(16)
    for severity in SEVERITIES:
        here, there = corrupt(images, name, severity), corrupt(images.cuda(), name, severity)
        assert there.device.type == "cuda"
        difference = (here.int() - there.cpu().int()).abs()
        assert (difference > 1).float().mean() < 1e-3
        assert (difference > 0).float().mean() < 0.02
