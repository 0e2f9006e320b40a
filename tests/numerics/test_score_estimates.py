"""Scores: worked values, autograd, the definition by eigenfunctions, and samplers on targets whose answers are known."""

from functools import partial

import pytest
import torch
from torch import Tensor

import tiny
from dissensus.numerics import rbf_kernels as kernels
from thinning import often

PARTICLES = torch.tensor([[0, 0], [1, 0], [0, 2], [3, 1]], dtype=torch.float64)
ESTIMATORS = {name: partial(tiny.estimate_score, name) for name in kernels.SCORES}


def test_the_bandwidth_and_the_kernel_have_the_worked_values():
    squared = kernels.squared_distances(PARTICLES)
    h = kernels.median_bandwidth(squared)
    assert float(kernels.median(squared.flatten(), 0)) == pytest.approx(4.5, abs=1e-12)
    assert float(h) == pytest.approx(1.398004, abs=5e-7)
    assert kernels.rbf(squared, h)[0].tolist() == pytest.approx([1, 0.69932, 0.23916, 0.02797], abs=5e-6)


@pytest.mark.parametrize(("name", "expected"), [
    ("kde", [(0.28490, 0.18417), (-0.18713, 0.17647), (0.12525, -0.41929), (-0.29376, -0.09781)]),
    ("stein", [(1.52609, 0.35953), (-1.41530, 0.25012), (0.05545, -0.71787), (-0.16520, -0.14994)]),
    ("spectral_stein", [(1.47682, 0.35427), (-1.36686, 0.24966), (0.05869, -0.70948), (-0.17031, -0.14847)]),
])  # fmt: skip
def test_scores_have_the_worked_values(name, expected):
    found = ESTIMATORS[name](PARTICLES)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=5e-6)


def test_svgd_has_the_worked_values():
    """Of the target N(0, I), whose score is −w."""
    expected = [(-0.33587, -0.21711), (-0.28029, -0.21516), (-0.10771, -0.35664), (-0.70198, -0.23408)]
    found = tiny.svgd_direction(PARTICLES, -PARTICLES)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=5e-6)


def test_the_kde_score_is_the_autograd_of_the_log_density():
    z = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    h = kernels.median_bandwidth(kernels.squared_distances(z.detach()))
    log_q = torch.logsumexp(-torch.cdist(z, z.detach()).square() / (2 * h), dim=1)
    # cdist has no slope at distance zero, where the true one is zero
    (expected,) = torch.autograd.grad(log_q.sum(), z)
    torch.testing.assert_close(tiny.estimate_score("kde", z.detach()), expected, rtol=0, atol=1e-10)


def test_spectral_stein_is_the_sum_over_eigenfunctions():
    """φ_m, their slopes by autograd and β_m written out, at the particles themselves and elsewhere."""
    z = torch.randn(7, 2, dtype=torch.float64)
    h = float(kernels.median_bandwidth(kernels.squared_distances(z)))
    kernel = torch.exp(-(z[:, None] - z).square().sum(2) / (2 * h))
    values, vectors = torch.linalg.eigh(kernel + kernels.RIDGE * torch.eye(7, dtype=torch.float64))

    def eigenfunctions(x: Tensor) -> Tensor:  # (2,) -> (7,)
        return 7**0.5 / values * (torch.exp(-(x - z).square().sum(1) / (2 * h)) @ vectors)

    beta = -torch.stack([torch.func.jacrev(eigenfunctions)(point) for point in z]).mean(0)  # (7, 2)
    expected = torch.stack([eigenfunctions(point) @ beta for point in z])
    torch.testing.assert_close(tiny.estimate_score("spectral_stein", z), expected, rtol=0, atol=1e-8)
    elsewhere = torch.randn(4, 2, dtype=torch.float64)
    expected = torch.stack([eigenfunctions(point) @ beta for point in elsewhere])
    torch.testing.assert_close(kernels.spectral_stein_at(elsewhere, z), expected, rtol=0, atol=1e-8)


def test_stein_solves_its_linear_system():
    z = torch.randn(6, 3, dtype=torch.float64)
    kernel, h = kernels.kernel_and_bandwidth(kernels.squared_distances(z))
    slopes = -(kernel[:, :, None] * (z[:, None] - z[None])).sum(1) / h  # G
    got = (kernel + 0.01 * torch.eye(6, dtype=torch.float64)) @ tiny.estimate_score("stein", z)
    torch.testing.assert_close(got, slopes, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_scores_follow_the_particles(name):
    """Translation changes nothing, order and rotation are carried along, float32 agrees, one particle has score zero."""
    score, z = ESTIMATORS[name], torch.randn(8, 3, dtype=torch.float64)
    expected = score(z)
    torch.testing.assert_close(score(z + 50), expected, rtol=0, atol=1e-8)
    order = torch.randperm(8)
    torch.testing.assert_close(score(z[order]), expected[order], rtol=0, atol=1e-9)
    rotation = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    torch.testing.assert_close(score(z @ rotation), expected @ rotation, rtol=0, atol=1e-9)
    single = score(z.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), score(z.float().double()), rtol=1e-4, atol=1e-6)
    assert float(score(z[:1]).abs().max()) == 0.0


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_matrix_acts_on_particles_in_many_tensors_as_on_one(name):
    z = {"a": torch.randn(5, 2, 3, dtype=torch.float64), "b": torch.randn(5, dtype=torch.float64)}
    flat = torch.cat([z["a"].flatten(1), z["b"][:, None]], dim=1)
    found = kernels.apply_matrix(kernels.score_matrix(name, kernels.squared_distances(z)), z)
    joined = torch.cat([found["a"].flatten(1), found["b"][:, None]], dim=1)
    torch.testing.assert_close(joined, ESTIMATORS[name](flat), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_near_equal_particles_have_finite_scores(name):
    z = torch.randn(1, 3, dtype=torch.float64) + 1e-7 * torch.randn(4, 3, dtype=torch.float64)
    found = ESTIMATORS[name](z)
    assert bool(found.isfinite().all())
    # |z_i − z_j| / floor, and 1/η more for estimators that invert the kernel
    assert float(found.abs().max()) < 1e-6 / kernels.FLOOR * (1 if name == "kde" else 1 / kernels.RIDGE)


MEAN = torch.tensor([-0.68, 0.80], dtype=torch.float64)
COVARIANCE = 5 * torch.tensor([[0.22, 0.16], [0.16, 0.67]], dtype=torch.float64)
IDENTITY = torch.eye(2, dtype=torch.float64)


def direction(name: str, z: Tensor, target: Tensor, **keywords) -> Tensor:
    """The way particles go: towards the target's score and away from their own density."""
    return tiny.svgd_direction(z, target, **keywords) if name == "svgd" else target - ESTIMATORS[name](z, **keywords)


def settled_on_the_gaussian(name: str, particles: int, steps: int, **keywords) -> Tensor:
    """Particles from N((−1, 5), I/2) after so many steps. SVGD's direction has a 1/M in it, so it takes longer ones."""
    z = torch.tensor([-1.0, 5.0], dtype=torch.float64) + 0.5**0.5 * torch.randn(particles, 2, dtype=torch.float64)
    return go_on(z, name, steps, 1.0 if name == "svgd" else 0.1, **keywords)


def go_on(z: Tensor, name: str, steps: int, rate: float, **keywords) -> Tensor:
    precision = torch.linalg.inv(COVARIANCE)
    for _ in range(steps):
        z = z + rate * direction(name, z, -(z - MEAN) @ precision, **keywords)
    return z


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.matrix_norm(found - expected) / torch.linalg.matrix_norm(expected))


@pytest.mark.parametrize("name", often(["kde"], ["svgd", *(each for each in ESTIMATORS if each != "kde")]))
def test_a_hundred_particles_recover_a_gaussian(name):
    """kde settles at Σ − hI, since it is the smoothed density that matches; the others come near Σ itself."""
    z = settled_on_the_gaussian(name, particles=100, steps=500)
    torch.testing.assert_close(z.mean(0), MEAN, rtol=0, atol=0.01)
    covariance = torch.cov(z.T, correction=0)
    h = float(kernels.median_bandwidth(kernels.squared_distances(z)))
    if name == "kde":
        assert relative_error(covariance, COVARIANCE - h * IDENTITY) < 0.10
        assert relative_error(covariance, COVARIANCE) > 0.15  # and not Σ
    else:
        assert relative_error(covariance, COVARIANCE) < 0.15


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ESTIMATORS, "svgd"])
def test_laws_at_a_fixed_bandwidth_are_approached_as_particles_grow_in_number(name):
    """At h = 0.25 a hundred particles are too few for the laws that they keep under the median heuristic.

    Settled covariances fall short by (50, 100, 200 particles; Frobenius norm, divisor n; n − 1 takes a hundredth off)

        kde, of Σ − hI    21 %  13 %  7 %        stein, spectral stein, SVGD, of Σ    24 %  15 %  9 %

    whatever the seed (± 1 %) and however many the steps; a program of its own, written from the formulas with explicit
    differences, gives the same numbers. It is the estimate, not the flow: on independent draws from the very fixed point,
    N(m, Σ − hI), the kde score of 50, 100, 200, 400, 800 particles is 0.60, 0.73, 0.85, 0.92, 0.94 times the target's,
    since each particle's own kernel, 1, is in its density and has no slope. Against it stand 2π h n π(x) others: 14 in the
    middle for a hundred, 2 at two standard deviations. Repulsion is too weak by that much and the particles too close.
    """
    expected = COVARIANCE - 0.25 * IDENTITY if name == "kde" else COVARIANCE
    # Steps of 0.1 never come to rest where kernels so narrow are inverted: that flow is stiff.
    rate = {"kde": 0.1, "svgd": 1.0}.get(name, 0.02)
    errors = {}
    for particles in (50, 100, 200):
        white = torch.randn(particles, 2, dtype=torch.float64)
        white = (white - white.mean(0)) @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(white.T, correction=0))).T
        z = MEAN + white @ torch.linalg.cholesky(expected).T  # they start with the moments of the law, exactly
        assert relative_error(torch.cov(z.T, correction=0), expected) < 1e-10
        z = go_on(z, name, 300, rate, bandwidth=0.25)
        torch.testing.assert_close(z.mean(0), MEAN, rtol=0, atol=0.02)
        errors[particles] = relative_error(torch.cov(z.T, correction=0), expected)
    assert errors[200] < (0.10 if name == "kde" else 0.15)
    assert errors[100] == pytest.approx(0.128 if name == "kde" else 0.15, abs=0.01)
    assert errors[200] < 0.7 * errors[100] < 0.7 * 0.7 * errors[50]


def funnel(count: int) -> Tensor:
    """(count, 2) draws (x, y) from Neal's funnel: y ~ N(0, 3), x ~ N(0, e^{y/2})."""
    y = 3**0.5 * torch.randn(count, dtype=torch.float64)
    return torch.stack([torch.exp(y / 4) * torch.randn(count, dtype=torch.float64), y], dim=1)


def discrepancy(a: Tensor, b: Tensor) -> float:
    """Squared MMD with an RBF kernel of h = 0.5."""

    def mean_kernel(p: Tensor, q: Tensor) -> float:
        return float(kernels.rbf(kernels.squared_distances(p, q), 0.5).mean())

    return mean_kernel(a, a) + mean_kernel(b, b) - 2 * mean_kernel(a, b)


def settled_in_the_funnel(name: str, particles: int, steps: int) -> tuple[float, float]:
    """Squared MMD to 1,000 draws, at the start and after so many steps of Adam."""

    def funnel_score(z: Tensor) -> Tensor:
        x, y = z.unbind(1)
        precision = torch.exp(-y / 2)
        return torch.stack([-x * precision, -y / 3 + (x.square() * precision - 1) / 4], dim=1)

    reference = funnel(1000)
    z = torch.tensor([0.0, 3.0], dtype=torch.float64) + torch.randn(particles, 2, dtype=torch.float64)
    start, optimizer = discrepancy(z, reference), torch.optim.Adam([z], lr=0.1)
    for _ in range(steps):
        z.grad = -direction(name, z, funnel_score(z))
        optimizer.step()
    return start, discrepancy(z, reference)


@pytest.mark.parametrize("name", often(["stein"], ["kde", "svgd", "spectral_stein"]))
def test_particles_find_the_funnel(name):
    """100 independent draws have (1 − E k)/100 ≈ 0.009 on average; the Stein methods' particles are better than that,
    kde's narrower density is a little worse.
    """
    start, end = settled_in_the_funnel(name, particles=100, steps=200)
    assert start > 0.1
    assert end < (0.02 if name == "kde" else 0.003)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kde", "svgd"])
def test_particles_find_the_funnel_at_the_size_of_the_paper(name):
    """500 particles, 5,000 steps (D'Angelo & Fortuin, NeurIPS 2021).

    As many independent draws are (1 − E k)(1/500 + 1/1000) ≈ 0.0027 away on average; SVGD's particles come to 0.0007, kde's
    to 0.0075: its density is the narrower one at every size.
    """
    independent = sum(discrepancy(funnel(500), funnel(1000)) for _ in range(20)) / 20
    start, end = settled_in_the_funnel(name, particles=500, steps=5000)
    assert start > 0.1
    assert independent == pytest.approx(0.0027, abs=0.001)
    assert end < (0.01 if name == "kde" else 0.5 * independent)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("estimate", list(ESTIMATORS.values()))
def test_a_particle_that_is_not_finite_has_no_finite_score(estimate, value):
    z = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)
    z[1, 0] = value
    assert not estimate(z)[1].isfinite().all()
