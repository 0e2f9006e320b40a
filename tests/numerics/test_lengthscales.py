"""Lengthscales: principal components against an exact decomposition, both forms between the end points, large D, streams."""

import pytest
import torch
from torch import Tensor

from dissensus.numerics import lengthscales
from dissensus.numerics.lengthscales import Lengthscales, pca_lengthscales
from refusals import refuses


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


def test_bad_input_is_a_clear_error():
    x = inputs()
    refuses(lambda: pca_lengthscales(x, 1.5), r"expected alpha of at least 0 and of at most 1, got 1\.5")
    refuses(lambda: pca_lengthscales(x, "pca"), "expected alpha as a number, got 'pca'", TypeError)
    for array in (x.numpy(), [x.numpy()]):
        with pytest.raises(TypeError, match=r"got ndarray; .* convert arrays with torch\.from_numpy"):
            pca_lengthscales(array)
    with pytest.raises(
        ValueError, match=r"expected batches of 6 numbers per input, .* got a batch of shape \(300, 5\)"
    ):
        pca_lengthscales([x, x[:, :5]])
    refuses(lambda: pca_lengthscales(x, form="slides"), "expected form of poster, paper, got 'slides'")
    refuses(lambda: pca_lengthscales(x, rank=0), "expected rank of at least 1, got 0")
    refuses(lambda: pca_lengthscales(x, passes=0), "expected passes of at least 1, got 0")
    refuses(lambda: pca_lengthscales(x[:1]), "expected at least two inputs, got 1")
    refuses(lambda: pca_lengthscales(torch.ones(5, 3)), "expected inputs that vary, got equal rows")
    refuses(lambda: pca_lengthscales(torch.full((5, 3), torch.nan)), "expected finite inputs")
    with pytest.raises(
        ValueError,
        match=r"expected inputs as a tensor \(N, ...\) or batches of such tensors, got a tensor of shape \(5,\)",
    ):
        pca_lengthscales(torch.ones(5))
    refuses(lambda: pca_lengthscales(iter([])), "expected training inputs, got none")
    refuses(lambda: Lengthscales(torch.eye(3), torch.ones(2)), r"expected eigenvectors \(D, R\) and precision \(R,\)")


def test_they_are_shown_in_one_line():
    shown = repr(pca_lengthscales(torch.randn(50, 784), rank=20))
    assert shown.startswith("Lengthscales(dimension=784, rank=20, precision ")
    assert len(shown) < 120


def test_the_input_that_is_not_finite_is_named():
    x = torch.randn(20, 2, 3)
    x[13, 1, 2] = float("nan")
    for inputs in (x, list(x.split(5))):
        with pytest.raises(ValueError, match="expected finite inputs, got nan in row 13, column 5; remove such rows"):
            pca_lengthscales(inputs)
