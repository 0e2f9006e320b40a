"""The toys follow the laws they are named after; wrong labels on purpose are as many as asked for."""

import math

import numpy as np
import pytest
import torch
from sklearn.datasets import make_moons

import dissensus as ds
from refusals import refuses

SEEDED = [
    ds.data.two_moons, ds.data.five_blobs, ds.data.donuts, ds.data.x_sin_x, ds.data.cubic, ds.data.gaussian_process,
]  # fmt: skip
FLOAT64 = torch.float64


@pytest.mark.parametrize("make", SEEDED)
def test_a_seed_means_the_same_points_in_every_dtype_and_leaves_the_global_generator_alone(make):
    before = torch.random.get_rng_state()
    x, y = make(seed=3)
    again, other, double = make(seed=3), make(seed=4), make(seed=3, dtype=FLOAT64)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert x.dtype == torch.float32
    assert torch.equal(x, again[0])
    assert torch.equal(y, again[1])
    assert not torch.equal(x, other[0])
    assert double[0].dtype == FLOAT64
    assert torch.equal(double[0].float(), x)
    assert torch.equal(double[1].to(y.dtype), y)


@pytest.mark.parametrize("count", [40, 41])
def test_moons_without_noise_are_those_of_scikit_learn(count):
    x, y = ds.data.two_moons(count, noise=0.0, dtype=FLOAT64)
    reference, labels = make_moons(count, shuffle=False, noise=None)
    by_class_and_place = np.lexsort((x[:, 1], x[:, 0], y))  # ours come in random order
    same = np.lexsort((reference[:, 1], reference[:, 0], labels))
    np.testing.assert_allclose(x.numpy()[by_class_and_place], reference[same], atol=1e-14)
    np.testing.assert_array_equal(y.numpy()[by_class_and_place], labels[same])


def test_noise_of_the_moons_has_the_stated_deviation():
    x, _ = ds.data.two_moons(4000, noise=0.1, dtype=FLOAT64)
    noise = x - ds.data.two_moons(4000, noise=0.0, dtype=FLOAT64)[0]
    assert abs(float(noise.std()) - 0.1) < 4 * 0.1 / (2 * 8000) ** 0.5


@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_blobs_sit_on_a_ring_that_starts_at_the_top(scale):
    x, y = ds.data.five_blobs(2000, scale=scale, dtype=FLOAT64)
    assert y.bincount().tolist() == [2000] * 5
    for k in range(5):
        angle = math.pi / 2 + 2 * math.pi * k / 5
        centre = 5 * scale * torch.tensor([math.cos(angle), math.sin(angle)], dtype=FLOAT64)
        torch.testing.assert_close(x[y == k].mean(0), centre, rtol=0, atol=4 * scale / 2000**0.5)
        assert abs(float(x[y == k].std(0).mean()) - scale) < 4 * scale / (2 * 4000) ** 0.5


def test_blobs_have_forty_points_a_class():
    x, y = ds.data.five_blobs()
    assert x.shape == (200, 2)
    assert y.bincount().tolist() == [40] * 5


def test_donuts_have_their_radii_and_cover_all_angles():
    x, y = ds.data.donuts(4001, radii=(2.0, 5.0), std=0.3, dtype=FLOAT64)
    assert y.bincount().tolist() == [2000, 2001]
    for label, radius in enumerate((2.0, 5.0)):
        distance = x[y == label].norm(dim=1)
        assert abs(float(distance.mean()) - radius) < 4 * 0.3 / 2000**0.5
        assert abs(float(distance.std()) - 0.3) < 4 * 0.3 / 4000**0.5
        assert float(x[y == label].mean(0).norm()) < 4 * radius / 2000**0.5


def test_the_far_ring_has_a_ring_and_a_middle():
    x = ds.data.far_ring(dtype=FLOAT64)
    assert x.shape == (250, 2)
    assert (x[:200].norm(dim=1) > 10).all()
    assert (x[200:].norm(dim=1) < 5).all()


def test_x_sin_x_has_a_gap_and_noise_of_a_quarter():
    x, y = ds.data.x_sin_x(3000, dtype=FLOAT64)
    left, right = x[:3000], x[3000:]
    assert left.min() >= 1.5
    assert left.max() <= 2.5
    assert right.min() >= 4.5
    assert right.max() <= 6.0
    assert abs(float(left.mean()) - 2.0) < 4 / (12 * 3000) ** 0.5
    assert abs(float(right.mean()) - 5.25) < 4 * 1.5 / (12 * 3000) ** 0.5
    assert abs(float((y - x * torch.sin(x)).std()) - 0.25) < 4 * 0.25 / 12000**0.5
    assert ds.data.x_sin_x()[0].shape == (90, 1)


def test_cubic_gap_is_a_cubic_on_two_grids_with_noise_of_two():
    x, y = ds.data.cubic_gap(dtype=FLOAT64)
    assert x.shape == y.shape == (402, 1)
    assert (float(x[0]), float(x[200]), float(x[201]), float(x[-1])) == (-3.0, -1.0, 1.0, 3.0)
    torch.testing.assert_close(x[1:201] - x[:200], torch.full((200, 1), 0.01, dtype=FLOAT64), rtol=0, atol=1e-12)
    torch.testing.assert_close(ds.data.cubic_gap(noise=0.0, dtype=FLOAT64)[1], x**3, rtol=0, atol=0)
    assert torch.equal(y, ds.data.cubic_gap(dtype=FLOAT64)[1])
    assert not torch.equal(y, ds.data.cubic_gap(seed=1, dtype=FLOAT64)[1])
    x, y = ds.data.cubic_gap(5000, dtype=FLOAT64)
    assert float((y - x**3).std()) == pytest.approx(2.0, abs=4 * 2 / (2 * 10_000) ** 0.5)


def test_cubic_is_a_cubic_with_noise_of_three():
    x, y = ds.data.cubic(5000, dtype=FLOAT64)
    assert x.abs().max() <= 4
    noise = y - x**3
    assert abs(float(noise.mean())) < 4 * 3 / 5000**0.5
    assert abs(float(noise.std()) - 3) < 4 * 3 / 10000**0.5
    assert ds.data.cubic()[1].shape == (20, 1)


def test_whitened_draws_of_the_gaussian_process_are_standard_normal():
    """With K the stated covariance, L⁻¹ y is N(0, I): 500 draws of 6 points, moments within 4 standard errors."""
    whitened = []
    for seed in range(500):
        x, y = ds.data.gaussian_process(6, lengthscale=0.7, amplitude=2.0, noise=0.5, seed=seed, dtype=FLOAT64)
        gap = x.numpy() - x.numpy().T
        covariance = 4.0 * np.exp(-(gap**2) / (2 * 0.49)) + 0.25 * np.eye(6)
        whitened.append(np.linalg.solve(np.linalg.cholesky(covariance), y.numpy())[:, 0])
    z = np.array(whitened)  # (500, 6)
    assert abs(z.mean()) < 4 / 3000**0.5
    second = z.T @ z / 500
    assert np.abs(np.diag(second) - 1).max() < 4 * (2 / 500) ** 0.5
    assert np.abs(second - np.diag(np.diag(second))).max() < 4 / 500**0.5


def test_the_same_seed_without_noise_gives_the_function_itself():
    x, y = ds.data.gaussian_process(400, noise=0.3, seed=2, dtype=FLOAT64)
    same, function = ds.data.gaussian_process(400, noise=0.0, seed=2, dtype=FLOAT64)
    assert torch.equal(x, same)
    assert abs(float((y - function).std()) - 0.3) < 4 * 0.3 / 800**0.5
    order = x[:, 0].argsort()
    steps, gaps = function[order].diff(dim=0).abs(), x[order].diff(dim=0)
    assert (steps < 5 * gaps + 1e-3).all()  # smooth: slopes are N(0, 1); the constant is for the jitter of 1e-9


def test_three_clusters_are_given_in_quadratic_features():
    x, y = ds.data.three_clusters(dtype=FLOAT64)
    assert x.shape == (400, 2)
    assert y.shape == (400, 1)
    assert torch.equal(x[:, 1], x[:, 0] ** 2)
    assert 3.5 < float(x[:, 0].max()) <= 3.6
    grid = torch.linspace(-10, 10, 5, dtype=FLOAT64)[:, None]
    assert ds.data.quadratic_features(grid).tolist() == [[-5, 25], [-2.5, 6.25], [0, 0], [2.5, 6.25], [5, 25]]
    refuses(lambda: ds.data.quadratic_features(grid[:, 0]), "shape \\(N, 1\\)")


@pytest.mark.parametrize("make", [*SEEDED, ds.data.far_ring])
def test_a_count_of_zero_is_refused(make):
    refuses(lambda: make(0), "of at least 1, got 0")


def test_a_hill_is_the_same_from_both_sides():
    x, y = ds.data.hill(4, dtype=torch.float64)
    torch.testing.assert_close(x, -x.flip(0), rtol=0, atol=1e-12)
    assert torch.equal(y, y.flip(0))
    assert x.shape == (15, 1)
    assert [int((y == value).sum()) for value in (1, -1)] == [7, 8]
    assert not torch.equal(ds.data.hill(4, noise=0.1, seed=1)[1], ds.data.hill(4, noise=0.1, seed=2)[1])


# -------------------------------------------------------------------------------------------------------- wrong labels
def test_exactly_the_share_is_wrong_and_every_other_class_as_likely():
    labels = torch.arange(10).repeat(2000)
    state = torch.get_rng_state()
    noisy = ds.data.noisy_labels(labels, 0.4, classes=10, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    wrong = noisy != labels
    assert int(wrong.sum()) == 8000
    steps = torch.bincount((noisy - labels)[wrong] % 10, minlength=10)
    assert steps[0] == 0
    expected = 8000 / 9
    assert ((steps[1:] - expected).abs() < 5 * expected**0.5).all()  # five standard errors, nine classes
    assert torch.equal(noisy, ds.data.noisy_labels(labels, 0.4, classes=10, seed=3))
    assert not torch.equal(noisy, ds.data.noisy_labels(labels, 0.4, classes=10, seed=4))


def test_less_noise_is_a_part_of_more():
    labels = torch.arange(300) % 3
    some, more = (ds.data.noisy_labels(labels, share, classes=3) for share in (0.2, 0.5))
    wrong = some != labels
    assert torch.equal(some[wrong], more[wrong])
    assert torch.equal(ds.data.noisy_labels(labels, 0.0, classes=3), labels)
    assert (ds.data.noisy_labels(labels, 1.0, classes=3) != labels).all()


def test_wrong_rows_are_not_those_that_are_held_out_with_the_same_seed():
    labels = torch.arange(4000) % 4
    wrong = ds.data.noisy_labels(labels, 0.25, classes=4, seed=0) != labels
    for known in (None, labels):
        _, held = ds.data.split_indices(4000, validation=0.25, seed=0, labels=known)
        assert abs(float(wrong[held].double().mean()) - 0.25) < 5 * (0.25 * 0.75 / 1000) ** 0.5


@pytest.mark.parametrize(("labels", "share", "message"), [
    (torch.arange(4), 1.5, "expected share of at least 0 and of at most 1, got 1.5"),
    (torch.arange(4), 0.5, "expected labels .N,. from 0 to 2"),
    (torch.ones(4), 0.5, "expected labels .N,. from 0 to 2"),
])  # fmt: skip
def test_what_is_no_label_or_no_share_is_an_error(labels, share, message):
    refuses(lambda: ds.data.noisy_labels(labels, share, classes=3), message)
