"""The corruptions without chance: against Pillow, scikit-image, OpenCV and SciPy, pixel by pixel."""

from __future__ import annotations

import io
from collections.abc import Callable

import cv2
import numpy as np
import pytest
import scipy.ndimage
import torch
from PIL import Image
from skimage.color import hsv2rgb, rgb2hsv
from skimage.filters import gaussian

from dissensus.data.corruption_effects import disk, jpeg_compression
from dissensus.data.corruptions import RECIPES, corrupt
from dissensus.data.image_arithmetic import box_matrix, gaussian_matrix, zoom_matrix
from thinning import often

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


@pytest.mark.parametrize("severity", SEVERITIES)
def test_brightness_equals_scikit_images_hsv(severity: int) -> None:
    (amount,) = constants("brightness", severity)

    def published(image: np.ndarray) -> np.ndarray:
        hsv = rgb2hsv(image)
        hsv[..., 2] = np.clip(hsv[..., 2] + amount, 0, 1)
        return hsv2rgb(hsv)

    assert_nearly_equal("brightness", severity, published, share=0.05)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_saturate_equals_scikit_images_hsv(severity: int) -> None:
    gain, offset = constants("saturate", severity)

    def published(image: np.ndarray) -> np.ndarray:
        hsv = rgb2hsv(image)
        hsv[..., 1] = np.clip(hsv[..., 1] * gain + offset, 0, 1)
        return hsv2rgb(hsv)

    assert_nearly_equal("saturate", severity, published, share=0.05)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_contrast_equals_the_formula_in_numpy(severity: int) -> None:
    (factor,) = constants("contrast", severity)

    def published(image: np.ndarray) -> np.ndarray:
        mean = image.mean((0, 1))
        return (image - mean) * factor + mean

    assert_nearly_equal("contrast", severity, published, share=0.001)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_defocus_blur_equals_opencv(severity: int) -> None:
    radius, softness = constants("defocus_blur", severity)
    kernel = opencv_disk(radius, softness)
    assert_nearly_equal("defocus_blur", severity, lambda image: cv2.filter2D(image, -1, kernel), share=0.005)


def opencv_disk(radius: float, softness: float) -> np.ndarray:
    reach = max(8, int(radius))
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    inside = np.float32(x**2 + y**2 <= radius**2)
    return cv2.GaussianBlur(inside / inside.sum(), ksize=(3, 3) if radius <= 8 else (5, 5), sigmaX=softness)


def test_the_disk_equals_opencvs_for_large_images_too() -> None:
    # where OpenCV's frame of 17×17 holds the disk and its rim; beyond, the frame mirrors part of the rim back
    for radius, softness in ((0.5, 0.6), (3, 0.1), (6, 0.5), (6.9, 1.0)):
        kernel, theirs = disk(radius, softness).numpy(), opencv_disk(radius, softness)
        np.testing.assert_allclose(np.pad(kernel, (len(theirs) - len(kernel)) // 2), theirs, atol=1e-7)
    kernel, theirs = disk(10, 0.5).numpy()[2:-2, 2:-2], opencv_disk(10, 0.5)
    np.testing.assert_allclose(kernel[4:-4, 4:-4], theirs[4:-4, 4:-4], atol=1e-7)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_gaussian_blur_equals_scikit_image(severity: int) -> None:
    (sigma,) = constants("gaussian_blur", severity)
    assert_nearly_equal("gaussian_blur", severity, lambda image: gaussian(image, sigma, channel_axis=-1), share=0.05)


@pytest.mark.parametrize("severity", often([1, 5], [2, 3, 4]))
def test_zoom_blur_equals_scipy(severity: int) -> None:
    stop = (1.06, 1.11, 1.16, 1.21, 1.26)[severity - 1]
    factors = np.arange(1, stop, 0.01)
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


@pytest.mark.parametrize("side", [(32, 32), (28, 28), (29, 45)])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("severity", SEVERITIES)
def test_pixelate_equals_pillow_exactly(severity: int, channels: int, side: tuple[int, int]) -> None:
    (share,) = constants("pixelate", severity)
    images, (height, width) = pictures(6, *side, channels), side
    theirs = [pillow(image).resize((int(width * share), int(height * share)), Image.Resampling.BOX) for image in images]
    theirs = [np.array(small.resize((width, height), Image.Resampling.BOX)) for small in theirs]
    np.testing.assert_array_equal(ours(images, "pixelate", severity).squeeze(), theirs)


@pytest.mark.parametrize("side", [(32, 32), (28, 28), (27, 45), (8, 9)])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("quality", [80, 65, 58, 50, 40, 7])
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
