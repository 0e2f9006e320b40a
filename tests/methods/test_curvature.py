"""Curvature of a last layer against brute force: second derivatives, determinants, and known cases."""

import math

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.methods.parts import last_layer as curvatures
from dissensus.methods.parts.last_layer import Curvature, CurvatureSums, eigendecompose

N, D, C = 32, 4, 3


def rows(seed=0, classes=C):
    generator = torch.Generator().manual_seed(seed)
    like = {"dtype": torch.float64, "generator": generator}
    return torch.randn(N, D, **like), torch.randn(classes, D, **like), torch.rand(N, **like)


def gathered(structure, likelihood, phi, outputs, weight):
    sums = CurvatureSums(structure, outputs.shape[1], phi.shape[1], phi.device)
    half = len(phi) // 2
    for part in (slice(None, half), slice(half, None)):
        sums.add(phi[part], *likelihood.curvature(outputs[part]), weight[part])
    return sums


def brute_force(likelihood, phi, mean, y, weight):
    """(P, P) second derivatives of −Σ w log p(y | W φ) in W, by automatic differentiation."""

    def nll(flat):
        return -(weight * likelihood.log_prob(phi @ flat.reshape(mean.shape).T, y)).sum()

    return torch.func.hessian(nll)(mean.flatten())


def test_the_full_matrix_is_the_hessian_of_a_classification():
    phi, mean, weight = rows()
    y = torch.arange(N) % C
    found = gathered("full", ds.Classification(), phi, phi @ mean.T, weight).sums[0]
    expected = brute_force(ds.Classification(), phi, mean, y, weight)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_the_full_matrix_is_the_hessian_of_a_regression():
    phi, mean, weight = rows()
    y = torch.randn(N, C, dtype=torch.float64)
    found = gathered("full", ds.Regression(0.4), phi, phi @ mean.T, weight).sums[0]
    torch.testing.assert_close(found, brute_force(ds.Regression(0.4), phi, mean, y, weight), rtol=0, atol=1e-10)


def test_the_full_matrix_is_the_mean_hessian_of_a_heteroscedastic_regression():
    phi, mean, weight = rows(classes=2)
    likelihood = ds.HeteroscedasticRegression()
    centre, variance = likelihood.describe(phi @ mean.T)
    # The Hessian is linear in y − mean and in its square: two points one deviation off have both moments of y.
    both = [brute_force(likelihood, phi, mean, centre + sign * variance.sqrt(), weight) for sign in (-1.0, 1.0)]
    found = gathered("full", likelihood, phi, phi @ mean.T, weight).sums[0]
    torch.testing.assert_close(found, sum(both) / 2, rtol=0, atol=1e-10)


def test_rows_are_taken_in_small_pieces_with_the_same_result(monkeypatch):
    phi, mean, weight = rows()
    for structure in ("full", "kron"):
        whole = gathered(structure, ds.Classification(), phi, phi @ mean.T, weight).sums
        monkeypatch.setattr(curvatures, "CHUNK", 5 * C * D)
        pieces = gathered(structure, ds.Classification(), phi, phi @ mean.T, weight).sums
        monkeypatch.undo()
        for a, b in zip(whole, pieces, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.parametrize("likelihood", [ds.Classification(), ds.Regression(0.4)], ids=["classification", "regression"])
def test_whole_hessians_give_what_their_parts_do(structure, likelihood, monkeypatch):
    phi, mean, weight = rows()
    outputs = phi @ mean.T
    parts = gathered(structure, likelihood, phi, outputs, weight)
    a, u = likelihood.curvature(outputs)
    monkeypatch.setattr(curvatures, "CHUNK", 5 * C * D)
    whole = CurvatureSums(structure, C, D, phi.device)
    whole.add(phi, torch.diag_embed(a) - (0 if u is None else u[:, :, None] * u[:, None]), None, weight)
    for found, expected in zip(whole.sums, parts.sums, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", ["one example", "equal outputs", "regression"])
def test_the_kronecker_product_is_exact_where_the_hessians_are_all_one(case):
    phi, mean, weight = rows()
    if case == "one example":
        phi, weight = phi[:1], weight[:1]
    outputs = torch.zeros(len(phi), C, dtype=torch.float64) + 0.3 if case == "equal outputs" else phi @ mean.T
    likelihood = ds.Regression(0.7) if case == "regression" else ds.Classification()
    full = gathered("full", likelihood, phi, outputs, weight)
    kron = gathered("kron", likelihood, phi, outputs, weight)
    product = torch.kron(*kron.sums) / kron.weight
    torch.testing.assert_close(product, full.sums[0], rtol=0, atol=1e-12)
    two = [Curvature.from_sums(each, mean, layer=0) for each in (full, kron)]
    torch.testing.assert_close(*(each.eigenvalues.flatten().sort()[0] for each in two), rtol=0, atol=1e-10)
    torch.testing.assert_close(*(each.variance() for each in two), rtol=0, atol=1e-10)
    torch.testing.assert_close(*(each.log_marginal_likelihood(torch.tensor(2.0)) for each in two), rtol=0, atol=1e-10)


@pytest.fixture(params=["full", "kron"])
def curvature(request):
    """A curvature, and the matrix it is one of."""
    phi, mean, weight = rows()
    sums = gathered(request.param, ds.Classification(), phi, phi @ mean.T, 5 * weight)
    sums.log_likelihood.fill_(-12.0)
    matrix = sums.sums[0] if request.param == "full" else torch.kron(*sums.sums) / sums.weight
    return Curvature.from_sums(sums, mean, layer=0), matrix.clone()


def test_the_evidence_is_that_of_the_determinants(curvature):
    found, matrix = curvature
    for precision in (0.1, 1.0, 30.0):
        size = C * D
        determinant = torch.linalg.slogdet(matrix + precision * torch.eye(size, dtype=torch.float64))[1]
        prior = 0.5 * size * math.log(precision / (2 * math.pi)) - 0.5 * precision * found.mean.square().sum()
        expected = -12.0 + prior + 0.5 * size * math.log(2 * math.pi) - 0.5 * determinant
        torch.testing.assert_close(
            found.log_marginal_likelihood(torch.tensor(precision, dtype=torch.float64)), expected, rtol=0, atol=1e-10
        )


def test_the_gradient_of_the_evidence_is_the_one_that_is_solved_for(curvature):
    found, _ = curvature
    precision = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(found.log_marginal_likelihood(precision), precision)
    gamma = (found.eigenvalues / (found.eigenvalues + 0.8)).sum()
    expected = 0.5 * (gamma / 0.8 - found.mean.square().sum())
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-10)


def test_the_best_precision_has_the_largest_evidence(curvature):
    found, _ = curvature
    best = torch.tensor(found.best_precision(), dtype=torch.float64, requires_grad=True)
    evidence = found.log_marginal_likelihood(best)
    (gradient,) = torch.autograd.grad(evidence, best)
    assert abs(float(gradient)) < 1e-9
    everywhere = [found.log_marginal_likelihood(p) for p in torch.logspace(-6, 6, 400, dtype=torch.float64)]
    assert float(evidence.detach()) >= max(map(float, everywhere))


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_the_best_precision_is_found_far_away_too(curvature, scale):
    found, _ = curvature
    before = found.best_precision()
    found.mean.mul_(scale**-0.5)
    found.eigenvalues.mul_(scale)  # all in other units
    assert found.best_precision() == pytest.approx(before * scale, rel=1e-9)


@pytest.mark.parametrize("what", ["mean", "eigenvalues"])
def test_a_prior_that_nothing_is_known_of_is_a_clear_error(curvature, what):
    found, _ = curvature
    getattr(found, what).zero_()
    with pytest.raises(ValueError, match=r"expected finite non-zero weights and curvature, .* pass prior_precision="):
        found.best_precision()


def covariance_of(function, shape):
    """(P, P) of a function that is linear in standard normal noise (S, C, D)."""
    size = math.prod(shape)
    root = function(torch.eye(size, dtype=torch.float64).reshape(size, *shape)).flatten(1)
    return root.T @ root


def test_samples_have_the_covariance_of_the_posterior(curvature):
    found, matrix = curvature
    found.precision.fill_(0.6)
    expected = torch.linalg.inv(matrix + 0.6 * torch.eye(C * D, dtype=torch.float64))
    torch.testing.assert_close(covariance_of(found.sample_joint, (C, D)), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(found.variance().flatten(), expected.diagonal(), rtol=0, atol=1e-10)
    blocks = torch.block_diag(*(expected[c * D : (c + 1) * D, c * D : (c + 1) * D] for c in range(C)))
    torch.testing.assert_close(covariance_of(found.sample_rows, (C, D)), blocks, rtol=0, atol=1e-10)


def test_it_stays_in_float64(curvature):
    found, _ = curvature
    before = tiny.state(found)
    posterior = nn.ModuleDict({"curvature": found}).half().float()
    assert all(t.dtype == torch.float64 for t in posterior["curvature"].buffers() if t.is_floating_point())
    assert tiny.largest_difference(before, tiny.state(found)) == 0
    assert posterior.to("meta")["curvature"].mean.device.type == "meta"


@pytest.mark.parametrize(
    ("structure", "classes", "features", "words"),
    [("full", 1000, 2049, 'structure="kron"'), ("kron", 10, 20_000, "a narrower layer")],
)
def test_a_matrix_that_is_too_large_is_refused_before_it_is_made(structure, classes, features, words):
    with pytest.raises(ValueError, match=f"expected at most 11,585 rows in a {structure} curvature.*{words}"):
        CurvatureSums(structure, classes, features, torch.device("cpu"))


def test_eigenvalues_below_zero_by_rounding_are_zero():
    values, vectors = eigendecompose(torch.tensor([[1.0, 1.0], [1.0, 1.0 - 1e-12]], dtype=torch.float64))
    assert float(values.min()) == 0.0
    assert vectors.is_contiguous()
