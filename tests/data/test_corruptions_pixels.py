"""Each corruption as other programs make it, pixel by pixel, and random ones rightly distributed."""

from __future__ import annotations

import importlib
import io
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import pytest
import scipy.ndimage
import scipy.stats
import torch
from PIL import Image
from skimage.color import hsv2rgb, rgb2hsv
from skimage.filters import gaussian

from dissensus.data import corruption_effects as effects
from dissensus.data.corruption_effects import disk, jpeg_compression
from dissensus.data.corruptions import RECIPES, corrupt
from dissensus.data.image_arithmetic import Draws, box_matrix, gaussian_matrix, image_keys, zoom_matrix
from thinning import often, thinned

# -------------------------------------------------------------- without chance: Pillow, scikit-image, OpenCV and SciPy
SEVERITIES = [1, 2, 3, 4, 5]


def pictures(count: int, height: int = 32, width: int = 32, channels: int = 3) -> np.ndarray:
    """(count, height, width, channels) uint8: soft shapes, fine grain, flat black and flat white."""
    generator = np.random.default_rng(height * width * channels)
    fine = generator.normal(size=(count, height, width, channels))
    soft = scipy.ndimage.gaussian_filter(fine, (0, 3, 3, 0), mode="wrap")
    return np.uint8(np.clip(127 + 900 * soft + 12 * fine, 0, 255))


def ours(images: np.ndarray, name: str, severity: int) -> np.ndarray:
    return corrupt(torch.from_numpy(images).permute(0, 3, 1, 2), name, severity).permute(0, 2, 3, 1).numpy()


def assert_nearly_equal(name: str, severity: int, published: Callable[[np.ndarray], np.ndarray], share: float) -> None:
    """At most a share of the values differs, and those by one level: 255·x falls on a whole number, and the last bit of
    float64 decides where it is cut."""
    images = pictures(24)
    theirs = np.stack([np.uint8(np.clip(published(image / 255), 0, 1) * 255) for image in images])
    difference = np.abs(ours(images, name, severity).astype(int) - theirs)
    assert difference.max() <= 1
    assert (difference > 0).mean() <= share
    assert (theirs != images).mean() > 0.1


def constants(name: str, severity: int) -> tuple[float, ...]:
    return RECIPES[name][severity - 1].constants


def brightness(image: np.ndarray, amount: float) -> np.ndarray:
    hsv = rgb2hsv(image)
    hsv[..., 2] = np.clip(hsv[..., 2] + amount, 0, 1)
    return hsv2rgb(hsv)


def saturate(image: np.ndarray, gain: float, offset: float) -> np.ndarray:
    hsv = rgb2hsv(image)
    hsv[..., 1] = np.clip(hsv[..., 1] * gain + offset, 0, 1)
    return hsv2rgb(hsv)


def contrast(image: np.ndarray, factor: float) -> np.ndarray:
    mean = image.mean((0, 1))
    return (image - mean) * factor + mean


def opencv_disk(radius: float, softness: float) -> np.ndarray:
    reach = max(8, int(radius))
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    inside = np.float32(x**2 + y**2 <= radius**2)
    return cv2.GaussianBlur(inside / inside.sum(), ksize=(3, 3) if radius <= 8 else (5, 5), sigmaX=softness)


PUBLISHED = {  # by scikit-image, NumPy and OpenCV, and which share of values may be off by one
    "brightness": (brightness, 0.05),
    "saturate": (saturate, 0.05),
    "contrast": (contrast, 0.001),
    "defocus_blur": (lambda image, *constants: cv2.filter2D(image, -1, opencv_disk(*constants)), 0.005),
    "gaussian_blur": (lambda image, sigma: gaussian(image, sigma, channel_axis=-1), 0.05),
}


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_corruption_equals_that_of_other_programs(name: str, severity: int) -> None:
    published, share = PUBLISHED[name]
    assert_nearly_equal(name, severity, lambda image: published(image, *constants(name, severity)), share)


def test_the_disk_equals_opencvs_for_large_images_too() -> None:
    # where OpenCV's frame of 17×17 holds the disk and its rim; beyond, the frame mirrors part of the rim back
    for radius, softness in ((0.5, 0.6), (3, 0.1), (6, 0.5), (6.9, 1.0)):
        kernel, theirs = disk(radius, softness).numpy(), opencv_disk(radius, softness)
        np.testing.assert_allclose(np.pad(kernel, (len(theirs) - len(kernel)) // 2), theirs, atol=1e-7)
    kernel, theirs = disk(10, 0.5).numpy()[2:-2, 2:-2], opencv_disk(10, 0.5)
    np.testing.assert_allclose(kernel[4:-4, 4:-4], theirs[4:-4, 4:-4], atol=1e-7)


@pytest.mark.parametrize("severity", often([1, 5], [2, 3, 4]))
def test_zoom_blur_equals_scipy(severity: int) -> None:
    factors = np.arange(1, (1.06, 1.11, 1.16, 1.21, 1.26)[severity - 1], 0.01)
    assert len(factors) == constants("zoom_blur", severity)[0]  # 7, 12, 16, 21, 26: rounding lets two ends in

    def published(image: np.ndarray) -> np.ndarray:
        image = np.float32(image)
        total = np.zeros_like(image)
        for factor in factors:
            kept = int(np.ceil(32 / factor))
            start = (32 - kept) // 2
            middle = scipy.ndimage.zoom(image[start : start + kept, start : start + kept], (factor, factor, 1), order=1)
            trim = (len(middle) - 32) // 2
            total += middle[trim : trim + 32, trim : trim + 32]
        return (image + total) / (len(factors) + 1)

    assert_nearly_equal("zoom_blur", severity, published, share=0.05)


@pytest.mark.parametrize(
    ("severity", "channels", "side"), thinned(SEVERITIES, [1, 3], [(32, 32), (28, 28), (29, 45)], every=3)
)
def test_pixelate_equals_pillow_exactly(severity: int, channels: int, side: tuple[int, int]) -> None:
    (share,) = constants("pixelate", severity)
    images, (height, width) = pictures(6, *side, channels), side
    theirs = [pillow(image).resize((int(width * share), int(height * share)), Image.Resampling.BOX) for image in images]
    theirs = [np.array(small.resize((width, height), Image.Resampling.BOX)) for small in theirs]
    np.testing.assert_array_equal(ours(images, "pixelate", severity).squeeze(), theirs)


@pytest.mark.parametrize(
    ("quality", "channels", "side"),
    thinned([80, 65, 58, 50, 40, 7], [1, 3], [(32, 32), (28, 28), (27, 45), (8, 9)], every=4),
)
def test_jpeg_equals_pillows_encoder_and_decoder_exactly(quality: int, channels: int, side: tuple[int, int]) -> None:
    images = pictures(8, *side, channels)
    theirs = []
    for image in images:
        file = io.BytesIO()
        pillow(image).save(file, "JPEG", quality=quality)
        theirs.append(np.array(Image.open(file)))
    decoded = jpeg_compression(torch.from_numpy(images / 255).permute(0, 3, 1, 2), None, quality) * 255
    np.testing.assert_array_equal(decoded.round().permute(0, 2, 3, 1).squeeze().numpy(), theirs)


def pillow(image: np.ndarray) -> Image.Image:
    return Image.fromarray(image.squeeze())


def test_jpeg_severities_are_the_published_qualities() -> None:
    images = pictures(2)
    for severity, quality in zip(SEVERITIES, (80, 65, 58, 50, 40), strict=True):
        decoded = jpeg_compression(torch.from_numpy(images / 255).permute(0, 3, 1, 2), None, quality) * 255
        expected = decoded.round().permute(0, 2, 3, 1).numpy()
        np.testing.assert_array_equal(ours(images, "jpeg_compression", severity), expected)


def test_the_matrices_equal_scipy_and_pillow_on_unit_vectors() -> None:
    unit = np.eye(32)
    for sigma, truncate, mode in ((0.7, 4.0, "nearest"), (6.4, 3.0, "reflect"), (12.0, 3.0, "reflect")):
        theirs = scipy.ndimage.gaussian_filter1d(unit, sigma, axis=0, mode=mode, truncate=truncate)
        matrix = gaussian_matrix(32, sigma, truncate, mode == "reflect")
        np.testing.assert_allclose(matrix, theirs, atol=1e-14)
    theirs = scipy.ndimage.zoom(unit[6:25], (1.75, 1), order=1)[:32]  # the middle 19 pixels become 33
    np.testing.assert_allclose(zoom_matrix(32, 1.75), theirs, atol=1e-14)
    weights = box_matrix(32, 20).sum(1) / 2**22
    np.testing.assert_allclose(weights, 1, atol=1e-6)


# ------------------------------------------------------------------------------------- random: the same random numbers
@dataclass(frozen=True)
class Given(Draws):
    """Draws that were written down beforehand: stream -> array (B, *shape)."""

    numbers: tuple[np.ndarray, ...] = ()

    def uniform(self, stream: int, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.numbers[stream]).reshape(-1, *shape)

    normal = uniform


def given(*numbers: np.ndarray) -> Given:
    return Given(keys=torch.zeros(0, dtype=torch.int64), numbers=numbers)


@pytest.fixture(scope="module")
def reference() -> Iterator[types.ModuleType]:
    """imagecorruptions 1.1.2, an independent copy of the operations, made to run on today's NumPy and scikit-image."""
    with pytest.MonkeyPatch.context() as patch:
        stub = types.ModuleType("pkg_resources")
        stub.resource_filename = lambda name, path: str(Path(sys.modules[name].__file__).parent / path)  # type: ignore[attr-defined, arg-type]
        patch.setitem(sys.modules, "pkg_resources", stub)
        interpolation = types.ModuleType("scipy.ndimage.interpolation")
        interpolation.map_coordinates = scipy.ndimage.map_coordinates  # type: ignore[attr-defined]
        patch.setitem(sys.modules, "scipy.ndimage.interpolation", interpolation)
        patch.setattr(np, "float_", np.float64, raising=False)
        pytest.importorskip("imagecorruptions", reason="imagecorruptions is not installed: pip install -e .[test]")
        module = importlib.import_module("imagecorruptions.corruptions")

        def gaussian_of_old(image: np.ndarray, sigma: float, multichannel: bool = False) -> np.ndarray:
            return gaussian(image, sigma=sigma, channel_axis=-1 if multichannel else None)

        patch.setattr(module, "gaussian", gaussian_of_old)
        yield module


def scene(count: int, seed: int = 0, side: int = 32) -> np.ndarray:
    """(count, side, side, 3) uint8: smooth coloured pictures with some edges, over the whole range of levels."""
    fine = np.random.default_rng(seed).normal(size=(count, side, side, 3))
    smooth = scipy.ndimage.gaussian_filter(fine, (0, 3, 3, 0), mode="wrap") * 10 + 0.3 * np.sign(fine[:, :1, :1])
    return np.uint8(np.clip(127 + 90 * smooth + 12 * fine, 0, 255))


def to_unit(images: np.ndarray) -> torch.Tensor:
    """(B, 3, H, W) float64 of (B, H, W, 3) uint8."""
    return torch.from_numpy(images / 255).permute(0, 3, 1, 2)


def to_levels(images: torch.Tensor) -> np.ndarray:
    """(B, H, W, 3) levels before the cut to eight bits."""
    return (images.clamp(0, 1) * 255).permute(0, 2, 3, 1).numpy()


# ---- the same random numbers, the same image


def test_a_trail_equals_the_reference_motion_blur(reference: types.ModuleType) -> None:
    images, generator = scene(12), np.random.default_rng(1)
    for constants in (recipe.constants for recipe in RECIPES["motion_blur"]):
        angle = generator.uniform(-180, 180, 12)
        ours = to_levels(effects.trail(to_unit(images), torch.from_numpy(angle), *constants))
        pairs = zip(images.astype(float), angle, strict=True)
        theirs = [reference._motion_blur(image, *constants, a) for image, a in pairs]
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_plasma_equals_the_reference_diamond_square(
    reference: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    field = np.random.default_rng(2).uniform(-1, 1, (32, 32))
    places = []  # of the noise the reference asks for: middles, then pixels across, then pixels down
    for step in (32, 16, 8, 4, 2):
        half = step // 2
        places += [field[half::step, half::step], field[::step, half::step], field[half::step, ::step]]
    for decay in (3.0, 1.75):
        queue = iter(places)
        monkeypatch.setattr(np.random, "uniform", lambda low, high, shape, queue=queue: high * next(queue))
        theirs = reference.plasma_fractal(mapsize=32, wibbledecay=decay)
        ours = effects.plasma(torch.from_numpy(field)[None], decay)[0]
        np.testing.assert_allclose(ours, theirs, atol=1e-12)


def test_fog_equals_the_reference_fog(reference: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    image = scene(1)
    field = np.random.default_rng(3).uniform(-1, 1, (1, 32, 32))
    monkeypatch.setattr(
        reference,
        "plasma_fractal",
        lambda mapsize, wibbledecay: effects.plasma(torch.from_numpy(field), wibbledecay)[0].numpy(),
    )
    ours = to_levels(effects.fog(to_unit(image), given((field + 1) / 2), 1.5, 2))
    np.testing.assert_allclose(ours[0], reference.fog(image[0], severity=1), atol=1e-9)


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
def test_spatter_equals_the_reference_spatter(
    reference: types.ModuleType, monkeypatch: pytest.MonkeyPatch, severity: int
) -> None:
    constants = {  # the reference's own, for larger images: wide drops that fill every branch
        1: (0.65, 0.3, 4, 0.69, 0.6), 2: (0.65, 0.3, 3, 0.68, 0.6), 3: (0.65, 0.3, 2, 0.68, 0.5),
        4: (0.65, 0.3, 1, 0.65, 1.5), 5: (0.67, 0.4, 1, 0.65, 1.5),
    }[severity]  # fmt: skip
    images, field = scene(40), np.random.default_rng(severity).normal(size=(40, 32, 32))
    queue = iter(field)
    monkeypatch.setattr(np.random, "normal", lambda size, loc, scale: loc + scale * next(queue))
    theirs = np.stack([reference.spatter(Image.fromarray(image), severity) for image in images])
    operation = effects.spatter if severity <= 3 else effects.spatter_mud
    ours = to_levels(operation(to_unit(images), given(field), *constants))
    assert np.abs(ours - images).max() > 20  # there are drops
    difference = np.abs(ours - theirs)
    assert difference.max() <= 1  # a tie in the rounding of a mean of 3×3 pixels
    assert (difference > 1e-3).mean() < 1e-3


def test_canny_chamfer_distance_and_equalisation_equal_opencv() -> None:
    generator = np.random.default_rng(4)
    soft = scipy.ndimage.gaussian_filter(generator.normal(size=(60, 32, 40)), (0, 1.5, 1.5))
    images = np.uint8(np.clip(127 + 250 * soft, 0, 255))
    edges = effects.canny(torch.from_numpy(images).double(), 50, 150)
    theirs = np.stack([cv2.Canny(image, 50, 150) for image in images])
    assert 0.02 < (theirs > 0).mean() < 0.5
    np.testing.assert_array_equal(edges, theirs > 0)

    few = generator.uniform(size=(60, 32, 40)) < 0.003
    distance = effects.chamfer_distance(torch.from_numpy(few), limit=20)
    theirs = np.stack([np.minimum(cv2.distanceTransform(np.uint8(255 * ~one), cv2.DIST_L2, 5), 20) for one in few])
    np.testing.assert_allclose(distance, theirs, atol=1e-3)

    levels = np.uint8(theirs)
    spread = effects.equalise_histogram(torch.from_numpy(levels).double())
    np.testing.assert_array_equal(spread, [cv2.equalizeHist(one) for one in levels])


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
def test_glass_blur_equals_the_published_loop_over_pixels(severity: int) -> None:
    sigma, reach, rounds = RECIPES["glass_blur"][severity - 1].constants
    images = scene(6, seed=5)
    uniform = np.random.default_rng(severity).uniform(size=(6, rounds, 2, 32, 32))
    theirs = []
    for image, numbers in zip(images, uniform, strict=True):
        x = np.uint8(gaussian(image / 255, sigma=sigma, channel_axis=-1) * 255)
        for i in range(rounds):
            for h in range(32 - reach, reach, -1):
                for w in range(32 - reach, reach, -1):
                    down, right = (int(np.floor(u * 2 * reach)) - reach for u in numbers[i, :, h, w])
                    x[h, w], x[h + down, w + right] = x[h + down, w + right], x[h, w]  # views: not a swap
        theirs.append(np.clip(gaussian(x / 255, sigma=sigma, channel_axis=-1), 0, 1) * 255)
    ours = to_levels(effects.glass_blur(to_unit(images), given(uniform), sigma, reach, rounds))
    # the first cut to eight bits may fall on an exact tie: one level
    assert np.abs(ours - theirs).max() <= 1.001
    assert (np.abs(ours - theirs) > 1e-6).mean() < 0.05


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
def test_snow_equals_a_pipeline_of_scipy_opencv_and_the_reference_motion_blur(
    reference: types.ModuleType, severity: int
) -> None:
    mean, std, flake, threshold, radius, sigma, keep = RECIPES["snow"][severity - 1].constants
    images, generator = scene(8, seed=6), np.random.default_rng(severity)
    field, turn = generator.normal(size=(8, 32, 32)), generator.uniform(size=8)
    theirs = []
    for image, numbers, u in zip(np.float32(images) / 255, field, turn, strict=True):
        kept = int(np.ceil(32 / flake))
        start = (32 - kept) // 2
        layer = (mean + std * numbers)[start : start + kept, start : start + kept]
        layer = scipy.ndimage.zoom(layer, flake, order=1)
        trim = (len(layer) - 32) // 2
        layer = layer[trim : trim + 32, trim : trim + 32]
        layer[layer < threshold] = 0
        layer = np.float64(np.uint8(np.clip(layer, 0, 1) * 255))
        layer = np.round(reference._motion_blur(layer, radius, sigma, 90 * u - 135))[..., None] / 255
        grey = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[..., None]
        x = keep * image + (1 - keep) * np.maximum(image, grey * 1.5 + 0.5)
        theirs.append(np.clip(x + layer + np.rot90(layer, k=2), 0, 1) * 255)
    ours = to_levels(effects.snow(to_unit(images), given(field, turn), *RECIPES["snow"][severity - 1].constants))
    assert np.abs(ours - theirs).max() <= 2.001  # a tie in each of two roundings
    assert (np.abs(ours - theirs) > 1e-3).mean() < 0.005


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
def test_elastic_transform_equals_opencvs_affine_map_and_scipys_interpolation(severity: int) -> None:
    bend, smoothness, jolt = RECIPES["elastic_transform"][severity - 1].constants
    images, generator = scene(8, seed=7), np.random.default_rng(severity)
    corners, field = generator.uniform(size=(8, 3, 2)), generator.uniform(size=(8, 2, 32, 32))
    theirs = []
    y, x = np.mgrid[:32, :32]
    start = np.float32([[26, 26], [26, 6], [6, 6]])
    for image, corner, numbers in zip(np.float32(images) / 255, corners, field, strict=True):
        matrix = cv2.getAffineTransform(start, start + np.float32(jolt * (2 * corner - 1)))
        # not cv2.warpAffine, which before OpenCV 5 rounds positions to 1/32 of a pixel
        back = cv2.invertAffineTransform(matrix)
        u, v = back[:, :2] @ np.stack([x.ravel(), y.ravel()]) + back[:, 2:]
        channels = np.moveaxis(image, 2, 0)
        warped = [scipy.ndimage.map_coordinates(layer, (v, u), order=1, mode="mirror") for layer in channels]
        dx, dy = (bend * gaussian(2 * n - 1, smoothness, mode="reflect", truncate=3) for n in numbers)
        place = (y + dy, x + dx)
        reflected = {"order": 1, "mode": "reflect"}
        layers = [scipy.ndimage.map_coordinates(layer.reshape(32, 32), place, **reflected) for layer in warped]
        theirs.append(np.stack(layers, -1) * 255)
    ours = to_levels(effects.elastic_transform(to_unit(images), given(corners, field), bend, smoothness, jolt))
    np.testing.assert_allclose(ours, theirs, atol=0.01)  # float32 on both sides


# ---- the random numbers themselves


def test_uniform_and_normal_numbers_follow_their_laws_and_streams_are_independent() -> None:
    draws = Draws(image_keys(0, 1, torch.arange(200)))
    uniform, normal, other = draws.uniform(0, 1000), draws.normal(1, 1001), draws.normal(2, 1001)
    # Kolmogorov and Smirnov's distance of n numbers: beyond 1.95/√n in one case of a thousand
    assert scipy.stats.kstest(uniform.flatten().numpy(), "uniform").statistic < 1.95 / 200_000**0.5
    assert scipy.stats.kstest(normal.flatten().numpy(), "norm").statistic < 1.95 / 200_200**0.5
    assert 4.0 < normal.abs().max() < 6.8
    # streams, neighbouring images, the cosine against the sine of one pair
    for a, b in ((normal, other), (normal[:-1], normal[1:]), (normal[:, :500], normal[:, 501:])):
        product = a[:, :500] * b[:, :500]
        assert abs(product.mean()) < 4 / product.numel() ** 0.5


# ---- the right distribution, through the public function


def grey_image(level: int, count: int = 64) -> torch.Tensor:
    return torch.full((count, 3, 32, 32), level, dtype=torch.uint8)


@pytest.mark.parametrize("severity", [1, 5])
@pytest.mark.parametrize("name", ["gaussian_noise", "speckle_noise"])
def test_normal_noise_has_the_published_standard_deviation(name: str, severity: int) -> None:
    level = 127
    std = RECIPES[name][severity - 1].constants[0] * (255 if name == "gaussian_noise" else level)
    noisy = corrupt(grey_image(level), name, severity).double()
    n = noisy.numel()
    # ±5σ stays within 0 … 255: mean and variance are those of the corruption_effects, cut to whole levels
    assert abs(noisy.mean() - (level - 0.5)) < 4 * std / n**0.5
    variance = std**2 + 1 / 12
    assert abs(noisy.var() - variance) < 4 * variance * (2 / n) ** 0.5


def test_the_poisson_table_equals_scipy() -> None:
    for photons in (50, 500):
        table = effects.poisson_table(photons)
        rates = np.arange(256)[:, None] / 255 * photons
        np.testing.assert_allclose(table, scipy.stats.poisson.cdf(np.arange(table.shape[1]), rates), atol=1e-12)
        assert table[:, -1].min() > 1 - 1e-14


def test_shot_noise_counts_follow_poissons_law() -> None:
    for level, photons in ((100, 50), (255, 500)):
        draws = Draws(image_keys(level, 0, torch.arange(64)))
        counts = effects.shot_noise(grey_image(level) / 255.0, draws, photons) * photons
        rate = level / 255 * photons
        bins = np.unique(scipy.stats.poisson.ppf(np.linspace(0, 1, 12)[1:-1], rate))
        expected = counts.numel() * np.diff(scipy.stats.poisson.cdf([-1, *bins, 1e6], rate))
        observed, _ = np.histogram(counts.round(), [-0.5, *(bins + 0.5), 1e6])
        assert scipy.stats.chisquare(observed, expected).pvalue > 1e-3
    assert corrupt(grey_image(0), "shot_noise", 5).max() == 0


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
def test_impulse_noise_sets_the_published_share_half_to_black_half_to_white(severity: int) -> None:
    amount = RECIPES["impulse_noise"][severity - 1].constants[0]
    noisy = corrupt(grey_image(100), "impulse_noise", severity)
    for level in (0, 255):
        assert abs((noisy == level).double().mean() - amount / 2) < 4 * (amount / 2 / noisy.numel()) ** 0.5
    assert ((noisy == 100) | (noisy == 0) | (noisy == 255)).all()
    both = ((noisy[:, 0] != 100) & (noisy[:, 1] != 100)).double()  # channels are hit independently
    assert abs(both.mean() - amount**2) < 4 * amount / both.numel() ** 0.5


def test_motion_blur_points_in_every_published_direction() -> None:
    dot = torch.zeros(400, 3, 31, 31, dtype=torch.uint8)
    dot[:, :, 15, 15] = 255
    blurred = corrupt(dot, "motion_blur", 5)[:, 0].double()
    axis = torch.arange(31.0) - 15
    down, right = (blurred.sum(2) * axis).sum(1), (blurred.sum(1) * axis).sum(1)
    angle = torch.rad2deg(torch.atan2(-down, -right))  # a pixel looks ahead, so that the dot's trail lies behind it
    assert angle.abs().max() < 55  # 45° and what rounding to pixels adds
    # uniform on ±45°: deviation 45/√3, its error from the fourth moment, and two degrees for the rounding
    assert abs(angle.mean()) < 4 * 45 / 3**0.5 / 400**0.5
    assert abs(angle.std() - 45 / 3**0.5) < 4 * 45 / 3**0.5 * (0.8 / 4 / 400) ** 0.5 + 2


def test_procedural_frost_looks_like_the_published_photographs(reference: types.ModuleType) -> None:
    folder = Path(reference.__file__).parent / "frost"  # type: ignore[arg-type]
    generator = np.random.default_rng(0)
    crops = []
    for file in ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg"):
        photograph = cv2.resize(cv2.imread(str(folder / file)), (0, 0), fx=0.2, fy=0.2)[..., ::-1]
        for _ in range(100):
            i, j = (generator.integers(size - 32) for size in photograph.shape[:2])
            crops.append(photograph[i : i + 32, j : j + 32])
    theirs = texture_statistics(np.stack(crops).astype(float))
    made = effects.ice(Draws(image_keys(0, 0, torch.arange(500))), 32, 32).permute(0, 2, 3, 1).numpy() * 255
    ours = texture_statistics(made)
    # 500 crops whose means deviate by 40 levels: an error of 1.8 in a colour, 1.3 in the deviation
    np.testing.assert_allclose(ours[:4], theirs[:4], atol=7.2)
    np.testing.assert_allclose(ours[4], theirs[4], rtol=0.1)
    np.testing.assert_allclose(ours[5:], theirs[5:], atol=0.08)


def texture_statistics(crops: np.ndarray) -> np.ndarray:
    """Mean R, G, B, deviation of crop means, mean deviation within a crop, correlation at 1, 2, 4 and 8 pixels."""
    grey = crops.mean(-1)
    centred = grey - grey.mean((1, 2), keepdims=True)
    variance = (centred**2).mean((1, 2))
    lags = [((centred[:, :, :-k] * centred[:, :, k:]).mean((1, 2)) / variance).mean() for k in (1, 2, 4, 8)]
    return np.array([*crops.mean((0, 1, 2)), grey.mean((1, 2)).std(), np.sqrt(variance).mean(), *lags])
