"""The data inside the package is what it says it is."""

import hashlib
from importlib.resources import files

import numpy as np
import torch

from dissensus.data import digits, fashion
from dissensus.data.toy import regression_points

EMBEDDED = files("dissensus.data") / "embedded"


def test_the_embedded_files_stay_small_and_carry_their_licences():
    sizes = {file.name: len(file.read_bytes()) for file in EMBEDDED.iterdir()}
    assert sum(sizes.values()) < 2_500_000
    licences = (EMBEDDED / "LICENSES.md").read_text(encoding="utf-8")
    for name in set(sizes) - {"LICENSES.md"}:
        assert name in licences
        assert hashlib.sha256((EMBEDDED / name).read_bytes()).hexdigest() in licences


def test_digits_have_a_thousand_train_and_two_hundred_test_images_of_each_class():
    train, test = digits()
    assert train.images.shape == (10_000, 1, 28, 28)
    assert test.images.shape == (2_000, 1, 28, 28)
    assert train.labels.bincount().tolist() == [1000] * 10
    assert test.labels.bincount().tolist() == [200] * 10
    assert train.classes == tuple("0123456789")


def test_the_first_rows_are_the_well_known_first_rows_of_the_originals():
    """MNIST begins 5, 0, 4, 1, 9 and its test file 7, 2, 1, 0; Fashion-MNIST's test file 9, 2, 1: all first of their class."""
    train, test = digits()
    assert train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert test.labels[:4].tolist() == [7, 2, 1, 0]
    assert [fashion().classes[label] for label in fashion().labels[:3]] == ["Ankle boot", "Pullover", "Trouser"]


def test_rows_of_the_originals_are_kept_ascending_and_once():
    for name, prefixes in (("digits.npz", ("train_", "test_")), ("fashion.npz", ("",))):
        with (EMBEDDED / name).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            for prefix in prefixes:
                rows = arrays[f"{prefix}rows"].astype(int)
                assert (np.diff(rows) > 0).all()
                assert rows[-1] < (60_000 if prefix == "train_" else 10_000)


def test_no_test_digit_is_also_a_train_digit():
    train, test = digits()
    seen = {image.numpy().tobytes() for image in train.images}
    assert not any(image.numpy().tobytes() in seen for image in test.images)


def test_pixels_have_the_mean_and_deviation_known_of_mnist():
    """0.1307 and 0.3081; image means scatter by about 0.04, so the mean of 10,000 by 4 · 0.04 / 100 = 0.0016 (and balancing
    the classes moves it by less than 0.001)."""
    pixels = digits()[0].images.double() / 255
    assert abs(float(pixels.mean()) - 0.1307) < 0.0026
    assert abs(float(pixels.std()) - 0.3081) < 0.0026


def test_labels_belong_to_their_images():
    """The nearest class mean, in plain pixels, is right for 82.0 % of MNIST's test file; 4 σ of 2,000 draws are 3.4 %."""
    train, test = digits()
    x, t = train.images.flatten(1).double(), test.images.flatten(1).double()
    means = torch.stack([x[train.labels == label].mean(0) for label in range(10)])
    accuracy = float((torch.cdist(t, means).argmin(1) == test.labels).double().mean())
    assert abs(accuracy - 0.820) < 0.034


def test_fashion_is_a_hundred_images_of_each_class():
    clothes = fashion()
    assert clothes.images.shape == (1000, 1, 28, 28)
    assert clothes.labels.bincount().tolist() == [100] * 10
    assert clothes.name == "fashion_mnist"


def test_regression_points_lie_in_three_clusters():
    points = regression_points()
    assert points.shape == (400, 2)
    assert points.dtype == torch.float64
    x, y = points.T
    inside = [((x >= low) & (x <= low + 2.4)).sum() for low in (-7.2, -1.2, 4.8)]
    assert sum(inside) == 400
    assert min(inside) > 100
    assert -0.61 < float(y.min()) < float(y.max()) < 0.91
