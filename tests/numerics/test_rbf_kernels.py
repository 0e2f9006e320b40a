"""Kernels and their lengthscales: worked values, brute force over pairs, exact decompositions, and laws."""

import math

import pytest
import torch
from torch import Tensor

from dissensus.numerics import lengthscales, rbf_kernels as kernels
from dissensus.numerics.lengthscales import Lengthscales, pca_lengthscales
from forde_density import batch_log_density, input_gradient_log_density
from refusals import refuses

# Three members, two examples, two dimensions; worked out by hand from the definitions.
GRADIENTS = torch.tensor([[[1, 0], [3, 4]], [[0, 2], [0, 5]], [[-1, 1], [4, 3]]], dtype=torch.float64)
ROTATED = Lengthscales(
    torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64), torch.tensor([4.0, 0.25], dtype=torch.float64)
)
REFERENCE = [0.297070, 0.289230, 0.382218]


def brute_force(gradients: Tensor, precision: Tensor, bandwidth: str) -> Tensor:
    """(M,) r_i by loops over members and examples; precision (D, D)."""
    members, size, _ = gradients.shape
    s = gradients / gradients.norm(dim=2, keepdim=True)
    q = torch.zeros(members, members, size, dtype=torch.float64)
    for i in range(members):
        for j in range(members):
            for b in range(size):
                d = s[i, b] - s[j, b]
                q[i, j, b] = d @ precision @ d
    r = []
    for i in range(members):
        total = 0.0
        for j in range(members):
            for b in range(size):
                over = q[:, j, b] if bandwidth == "reference" else q[:, :, b].flatten()
                middle = float(torch.quantile(over, 0.5))
                sharpness = 2 if bandwidth == "algorithm" else 1
                total += math.exp(-sharpness * float(q[i, j, b]) * math.log(members) / middle) / size
        r.append(math.log(total))
    return torch.tensor(r, dtype=torch.float64)


def test_reference_bandwidth_gives_the_worked_values_and_gradients():
    gradients = GRADIENTS.clone().requires_grad_()
    r = input_gradient_log_density(gradients)
    assert r.tolist() == pytest.approx(REFERENCE, abs=5e-7)
    total = r.sum() / 2
    assert float(total.detach()) == pytest.approx(0.484259, abs=5e-7)
    (slope,) = torch.autograd.grad(total, gradients)
    expected = [
        [[0, 0.017187], [0.043534, -0.032650]],
        [[-0.048477, 0], [0.002553, 0]],
        [[0.085564, 0.085564], [-0.062469, 0.083293]],
    ]
    torch.testing.assert_close(slope, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=5e-7)


def test_sample_bandwidth_gives_the_worked_values():
    r = input_gradient_log_density(GRADIENTS, bandwidth="sample")
    assert r.tolist() == pytest.approx([0.166616, 0.165922, 0.288309], abs=5e-7)
    assert float(r.sum() / 2) == pytest.approx(0.310424, abs=5e-7)


def test_lengthscales_give_the_worked_values():
    r = input_gradient_log_density(GRADIENTS, ROTATED)
    assert r.tolist() == pytest.approx([0.510826, 0.277168, 0.306725], abs=5e-7)
    r = input_gradient_log_density(GRADIENTS, ROTATED, "sample")
    assert r.tolist() == pytest.approx([0.310791, 0.175348, 0.201149], abs=5e-7)


@pytest.mark.parametrize("bandwidth", kernels.BANDWIDTHS)
@pytest.mark.parametrize("members", [2, 5, 6])
def test_every_bandwidth_equals_brute_force(bandwidth, members):
    gradients = torch.randn(members, 3, 4, dtype=torch.float64)
    vectors = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
    scales = Lengthscales(vectors, torch.tensor([3.0, 1.0, 0.5, 0.1], dtype=torch.float64))
    precision = vectors @ torch.diag(scales.precision) @ vectors.T
    r = input_gradient_log_density(gradients, scales, bandwidth)
    torch.testing.assert_close(r, brute_force(gradients, precision, bandwidth), rtol=0, atol=1e-10)
    r = input_gradient_log_density(gradients, None, bandwidth)
    torch.testing.assert_close(
        r, brute_force(gradients, torch.eye(4, dtype=torch.float64), bandwidth), rtol=0, atol=1e-10
    )


def test_the_density_lies_between_zero_and_log_m():
    r = input_gradient_log_density(torch.randn(7, 5, 3))
    assert bool((r > 0).all())
    assert bool((r < math.log(7)).all())
    equal = torch.randn(1, 5, 3).expand(7, 5, 3)
    assert input_gradient_log_density(equal).tolist() == pytest.approx([math.log(7)] * 7)


def test_two_members_have_a_kernel_of_one_quarter_with_the_reference_bandwidth():
    """The median of {0, q} is q/2, so κ = exp(−2 log 2)."""
    r = input_gradient_log_density(torch.randn(2, 4, 3, dtype=torch.float64))
    assert r.tolist() == pytest.approx([math.log(1.25)] * 2, abs=1e-12)


def test_one_member_feels_nothing():
    gradients = torch.randn(1, 4, 3, requires_grad=True)
    r = input_gradient_log_density(gradients)
    assert r.tolist() == [0.0]
    assert float(torch.autograd.grad(r.sum(), gradients)[0].abs().max()) == 0.0


def test_norms_of_gradients_do_not_matter():
    gradients = torch.randn(4, 3, 5, dtype=torch.float64)
    scaled = gradients * torch.rand(4, 3, 1, dtype=torch.float64).add(0.1)
    expected = input_gradient_log_density(gradients)
    torch.testing.assert_close(input_gradient_log_density(scaled), expected, rtol=0, atol=1e-12)


def test_the_scale_of_all_lengthscales_does_not_matter():
    gradients = torch.randn(4, 3, 2, dtype=torch.float64)
    larger = Lengthscales(ROTATED.eigenvectors, 100 * ROTATED.precision)
    expected = input_gradient_log_density(gradients, ROTATED)
    torch.testing.assert_close(input_gradient_log_density(gradients, larger), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("spread", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("bandwidth", kernels.BANDWIDTHS)
def test_the_unit_of_the_inputs_does_not_matter(bandwidth, rank, spread):
    """Principal components of 1e-5 x are 1e-10 of those of x, and the bandwidth's floor is as much lower.

    Members 1e-4 apart are well below the floor, those 1 apart well above.
    """
    x = torch.randn(50, 4, dtype=torch.float64) * torch.tensor([3.0, 1.0, 0.5, 0.2], dtype=torch.float64)
    gradients = torch.randn(1, 5, 4, dtype=torch.float64) + spread * torch.randn(3, 5, 4, dtype=torch.float64)
    values, slopes = [], []
    for scale in (1.0, 1e-5):
        scales = pca_lengthscales(scale * x, rank=rank)
        g = gradients.clone().requires_grad_()
        r = input_gradient_log_density(g, scales, bandwidth)
        values.append(r.detach())
        slopes.append(torch.autograd.grad(r.sum(), g)[0])
    torch.testing.assert_close(values[1], values[0], rtol=1e-6, atol=0)
    assert float(slopes[0].norm()) > 1e-3
    assert float((slopes[1] - slopes[0]).norm() / slopes[0].norm()) < 1e-6


def test_the_mean_precision_is_that_of_the_matrix():
    vectors = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
    precision = torch.tensor([4.0, 2.0], dtype=torch.float64)
    matrix = vectors[:, :2] @ torch.diag(precision) @ vectors[:, :2].T + 0.3 * vectors[:, 2:] @ vectors[:, 2:].T
    found = Lengthscales(vectors[:, :2], precision, 0.3).mean_precision
    assert float(found) == pytest.approx(float(matrix.trace()) / 5, rel=1e-12)
    assert float(ROTATED.mean_precision) == pytest.approx(4.25 / 2)


@pytest.mark.parametrize("bandwidth", kernels.BANDWIDTHS)
def test_the_force_in_a_dimension_is_proportional_to_its_precision(bandwidth):
    """Trinh et al. 2024: for Σ = diag(Σ_dd) the force along d is ∝ 1/Σ_dd times the distance along d."""
    s = torch.randn(2, 1, 5, dtype=torch.float64)
    variances = torch.tensor([0.1, 0.5, 1.0, 2.0, 10.0], dtype=torch.float64)
    scales = Lengthscales(torch.eye(5, dtype=torch.float64), 1 / variances)
    s.requires_grad_()
    (slope,) = torch.autograd.grad(batch_log_density(scales.scale(s), bandwidth)[0], s)
    distance = (s[0] - s[1]).detach()[0]
    ratio = -slope[0, 0] * variances / distance  # the same number in every dimension
    torch.testing.assert_close(ratio, ratio[0].expand(5), rtol=1e-10, atol=0)
    assert float(ratio[0]) > 0  # away from the other member: the density falls along the distance


def test_the_order_of_members_does_not_matter():
    gradients = torch.randn(5, 3, 4, dtype=torch.float64)
    order = torch.tensor([3, 0, 4, 1, 2])
    for bandwidth in kernels.BANDWIDTHS:
        expected = input_gradient_log_density(gradients, bandwidth=bandwidth)[order]
        got = input_gradient_log_density(gradients[order], bandwidth=bandwidth)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_float32_and_float64_agree_also_for_members_close_together():
    base = torch.randn(1, 6, 20, dtype=torch.float64)
    for spread in (1.0, 1e-3):
        gradients = (base + spread * torch.randn(4, 6, 20, dtype=torch.float64)).float()

        def slope(g: Tensor) -> Tensor:
            return torch.func.grad(lambda g: input_gradient_log_density(g).sum())(g)

        single, double = gradients, gradients.double()
        torch.testing.assert_close(slope(single).double(), slope(double), rtol=1e-4, atol=1e-6)
        assert slope(single).dtype == torch.float32
        r = input_gradient_log_density(single)
        torch.testing.assert_close(r.double(), input_gradient_log_density(double), rtol=1e-4, atol=0)


def test_autocast_does_not_change_the_kernel():
    gradients = torch.randn(4, 6, 20)
    expected = input_gradient_log_density(gradients)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(input_gradient_log_density(gradients), expected)
        z = torch.randn(5, 300)
        inside = kernels.squared_distances(z)
    assert torch.equal(inside, kernels.squared_distances(z))


@pytest.mark.parametrize("distance", [1e-3, 1e-6, 1e-9, 0.0])
def test_near_equal_members_do_not_explode(distance):
    """Without a floor the force is 1/distance; with one it is at most √(2/(e·floor)) and falls to zero."""
    base = torch.nn.functional.normalize(torch.randn(1, 2, 3, dtype=torch.float64), dim=2)
    s = torch.cat([base, base + distance * torch.tensor([1.0, 0, 0], dtype=torch.float64)]).requires_grad_()
    (slope,) = torch.autograd.grad(batch_log_density(s).sum(), s)
    assert bool(slope.isfinite().all())
    # the largest slope of −log(1 + exp(−d²/h)) is below that of −log exp(−d²/h) at d² = h/2
    assert float(slope.norm(dim=2).max()) < (2 / (math.e * kernels.FLOOR)) ** 0.5
    if distance == 0.0:
        assert float(slope.abs().max()) == 0.0


def test_gradients_that_are_exactly_zero_feel_no_force():
    """As heads initialised at zero give. One zero gradient among others has no direction to turn into either."""
    for gradients in (torch.zeros(3, 2, 4), torch.cat([torch.zeros(1, 2, 4), torch.randn(2, 2, 4)])):
        gradients.requires_grad_()
        r = input_gradient_log_density(gradients)
        (slope,) = torch.autograd.grad(r.sum(), gradients)
        assert bool(r.isfinite().all())
        assert float(slope[0].abs().max()) == 0.0
        assert bool(slope.isfinite().all())


def test_a_weight_of_two_is_the_example_twice():
    gradients = torch.randn(3, 4, 5, dtype=torch.float64)
    weight = torch.tensor([1.0, 2.0, 1.0, 0.0], dtype=torch.float64)
    weighted = input_gradient_log_density(gradients, weight=weight)
    repeated = input_gradient_log_density(gradients[:, [0, 1, 1, 2]])
    torch.testing.assert_close(weighted, repeated, rtol=0, atol=1e-12)
    assert bool(input_gradient_log_density(gradients, weight=0 * weight).isfinite().all())


def test_squared_distances_equal_differences_over_a_tree():
    z = {"a": torch.randn(5, 3, 2, dtype=torch.float64), "b": (100 + torch.randn(5, dtype=torch.float64),)}
    flat = torch.cat([z["a"].flatten(1), z["b"][0][:, None]], dim=1)
    expected = (flat[:, None] - flat[None]).square().sum(2)
    found = kernels.squared_distances(z)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert float(found.diagonal().abs().max()) == 0.0
    other = torch.randn(4, 6, dtype=torch.float64)
    expected = torch.cdist(z["a"].flatten(1), other).square()
    torch.testing.assert_close(kernels.squared_distances(z["a"], other), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_the_median_is_that_of_numpy(count):
    values = torch.randn(3, count, dtype=torch.float64)
    torch.testing.assert_close(kernels.median(values, 1), values.quantile(0.5, dim=1, keepdim=True), rtol=0, atol=1e-12)


def test_bad_input_is_a_clear_error():
    told = "expected bandwidth of reference, sample, algorithm, got 'median'"
    refuses(lambda: input_gradient_log_density(GRADIENTS, bandwidth="median"), told)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_not_taken_for_one_without_direction(value):
    gradients = torch.tensor([[1.0, 2.0], [0.0, 0.0], [value, 1.0]], dtype=torch.float64)
    found = kernels.directions(gradients)
    assert found[:2].isfinite().all()
    assert (found[1] == 0).all()
    assert found[2].isnan().any()


@pytest.mark.parametrize("bandwidth", kernels.BANDWIDTHS)
@pytest.mark.parametrize("scaled", ["identity", "whole", "rank"])
@pytest.mark.parametrize("weighed", [False, True])
def test_the_force_is_the_derivative_of_the_log_density(bandwidth, scaled, weighed):
    g = torch.randn(4, 6, 5, dtype=torch.float64) * torch.logspace(-3, 3, 6)[:, None]
    g[1, 2] = 0.0  # exerts and feels no force
    g[3, 4] = g[2, 4] * (1 + 1e-9)  # nearly the same direction
    inputs = torch.randn(50, 5, dtype=torch.float64) * torch.arange(1, 6)
    rank = {"whole": None, "rank": 2}.get(scaled)
    scales = None if scaled == "identity" else pca_lengthscales(inputs, 0.7, rank=rank)
    weight = torch.tensor([1.0, 2.0, 0.5, 0.0, 1.0, 3.0]) if weighed else None

    def total(gradients):
        return input_gradient_log_density(gradients, scales, bandwidth, weight=weight).sum()

    wanted = torch.func.grad(total)(g)
    found = kernels.input_gradient_force(g, scales, bandwidth, weight=weight)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def inputs(rows: int = 300, dimension: int = 6) -> Tensor:
    """Correlated rows far from the origin."""
    mixing = torch.randn(dimension, dimension, dtype=torch.float64)
    return 20 + torch.randn(rows, dimension, dtype=torch.float64) @ mixing


def precision_matrix(scales: Lengthscales) -> Tensor:
    """(D, D) Σ⁻¹ in full."""
    u, identity = scales.eigenvectors, torch.eye(scales.dimension, dtype=scales.eigenvectors.dtype)
    return u @ torch.diag(scales.precision) @ u.T + scales.remainder * (identity - u @ u.T)


def test_alpha_one_is_the_covariance():
    x = inputs()
    torch.testing.assert_close(precision_matrix(pca_lengthscales(x)), torch.cov(x.T), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.4, 1.0])
def test_both_forms_of_the_mixture(alpha):
    x = inputs()
    covariance, identity = torch.cov(x.T), torch.eye(6, dtype=torch.float64)
    poster = precision_matrix(pca_lengthscales(x, alpha))
    torch.testing.assert_close(poster, (1 - alpha) * identity + alpha * covariance, rtol=1e-9, atol=1e-9)
    paper = torch.linalg.inv(precision_matrix(pca_lengthscales(x, alpha, form="paper")))
    expected = alpha * torch.linalg.inv(covariance) + (1 - alpha) * identity
    torch.testing.assert_close(paper, expected, rtol=1e-9, atol=1e-9)


def test_directions_without_variance_have_no_precision():
    x = inputs()
    x[:, 5] = 1.0
    for form in ("poster", "paper"):
        assert float(pca_lengthscales(x, form=form).precision.min()) == pytest.approx(0, abs=1e-10)
        assert bool((pca_lengthscales(x, 0.0, form=form).precision == 1).all())
    assert float(pca_lengthscales(x, 0.5, form="poster").precision.min()) == pytest.approx(0.5, abs=1e-9)
    assert float(pca_lengthscales(x, 0.5, form="paper").precision.min()) == pytest.approx(0, abs=1e-9)


def test_scaled_vectors_have_the_distances_of_the_precision_matrix():
    x = inputs()
    for scales in (pca_lengthscales(x, 0.3), pca_lengthscales(x, 0.3, rank=2)):
        a, b = torch.randn(2, 6, dtype=torch.float64)
        expected = (a - b) @ precision_matrix(scales) @ (a - b)
        found = (scales.scale(a) - scales.scale(b)).square().sum()
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


def test_truncation_keeps_the_largest_and_spreads_the_rest():
    x = inputs()
    full, cut = pca_lengthscales(x), pca_lengthscales(x, rank=2)
    assert cut.eigenvectors.shape == (6, 2)
    torch.testing.assert_close(cut.precision, full.precision[:2])
    assert float(cut.remainder) == pytest.approx(float(full.precision[2:].mean()), rel=1e-10)
    # the total variance is kept
    assert float(precision_matrix(cut).trace()) == pytest.approx(float(torch.cov(x.T).trace()), rel=1e-10)


def test_images_streams_and_loaders_give_the_same():
    x = torch.randn(50, 2, 3, 4)
    y = torch.zeros(50)
    expected = precision_matrix(pca_lengthscales(x))
    for source in (x.split(7), [(part, y) for part in x.split(7)], (part for part in x.split(7))):
        torch.testing.assert_close(precision_matrix(pca_lengthscales(source)), expected, rtol=1e-4, atol=1e-6)
    assert pca_lengthscales(x).eigenvectors.dtype == torch.float32
    pixels = torch.randint(256, (40, 1, 3, 3), dtype=torch.uint8)
    assert pca_lengthscales(pixels).precision.dtype == torch.float32


@pytest.mark.parametrize("stream", [False, True])
def test_large_inputs_are_decomposed_without_the_covariance(monkeypatch, stream):
    """60 dimensions treated as too many: four directions stand out by far and are found, by several passes or by one."""
    monkeypatch.setattr(lengthscales, "LARGEST_EXACT", 10)
    spread = torch.cat([torch.tensor([50.0, 30.0, 20.0, 10.0]), 0.1 * torch.ones(56)]).double()
    rotation = torch.linalg.qr(torch.randn(60, 60, dtype=torch.float64)).Q
    x = 5 + (torch.randn(400, 60, dtype=torch.float64) * spread) @ rotation.T
    values, vectors = torch.linalg.eigh(torch.cov(x.T))
    before = torch.get_rng_state()
    found = pca_lengthscales((part for part in x.split(64)) if stream else x, rank=4)
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(found.precision, values.flip(0)[:4], rtol=1e-3, atol=0)
    overlap = (found.eigenvectors * vectors.flip(1)[:, :4]).sum(0).abs()
    assert float(overlap.min()) > 0.999
    # what one pass misses of the large values is counted among the small ones
    assert float(found.remainder) == pytest.approx(float(values[:56].mean()), rel=1.0 if stream else 0.05)
    trace = found.precision.sum() + 56 * found.remainder
    assert float(trace) == pytest.approx(float(values.sum()), rel=1e-10)


def test_fewer_rows_than_directions_are_enough(monkeypatch):
    monkeypatch.setattr(lengthscales, "LARGEST_EXACT", 10)
    x = torch.randn(8, 60, dtype=torch.float64)
    found = pca_lengthscales(x)
    assert found.eigenvectors.shape[1] == 7  # the rank of eight centred rows
    torch.testing.assert_close(precision_matrix(found), torch.cov(x.T), rtol=1e-8, atol=1e-8)


def test_lengthscales_without_meaning_are_a_clear_error():
    x = inputs()
    refuses(lambda: pca_lengthscales(x, 1.5), r"expected alpha of at least 0 and of at most 1, got 1\.5")
    refuses(lambda: pca_lengthscales(x, "pca"), "expected alpha as a number, got 'pca'", TypeError)
    for array in (x.numpy(), [x.numpy()]):
        told = r"got ndarray; .* convert arrays with torch\.from_numpy"
        refuses(lambda array=array: pca_lengthscales(array), told, TypeError)
    told = r"expected batches of 6 numbers per input, .* got a batch of shape \(300, 5\)"
    refuses(lambda: pca_lengthscales([x, x[:, :5]]), told)
    refuses(lambda: pca_lengthscales(x, form="slides"), "expected form of poster, paper, got 'slides'")
    refuses(lambda: pca_lengthscales(x, rank=0), "expected rank of at least 1, got 0")
    refuses(lambda: pca_lengthscales(x, passes=0), "expected passes of at least 1, got 0")
    refuses(lambda: pca_lengthscales(x[:1]), "expected at least two inputs, got 1")
    refuses(lambda: pca_lengthscales(torch.ones(5, 3)), "expected inputs that vary, got equal rows")
    refuses(lambda: pca_lengthscales(torch.full((5, 3), torch.nan)), "expected finite inputs")
    told = r"expected inputs as a tensor \(N, ...\) or batches of such tensors, got a tensor of shape \(5,\)"
    refuses(lambda: pca_lengthscales(torch.ones(5)), told)
    refuses(lambda: pca_lengthscales(iter([])), "expected training inputs, got none")
    refuses(lambda: Lengthscales(torch.eye(3), torch.ones(2)), r"expected eigenvectors \(D, R\) and precision \(R,\)")


def test_they_are_shown_in_one_line():
    shown = repr(pca_lengthscales(torch.randn(50, 784), rank=20))
    assert shown.startswith("Lengthscales(dimension=784, rank=20, precision ")
    assert len(shown) < 120


def test_the_input_that_is_not_finite_is_named():
    x = torch.randn(20, 2, 3)
    x[13, 1, 2] = float("nan")
    told = "expected finite inputs, got nan in row 13, column 5; remove such rows"
    for inputs in (x, list(x.split(5))):
        refuses(lambda inputs=inputs: pca_lengthscales(inputs), told)
