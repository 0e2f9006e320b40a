"""Leading eigenvectors: those of eigh, to rounding, also where eigenvalues are near, equal or zero."""

import pytest
import torch
from torch import Tensor

import dissensus as ds
from dissensus.numerics.eigen import eigenvectors_by_products, extreme_eigenvectors, leading_eigenvectors
from thinning import thinned


def symmetric(eigenvalues: Tensor) -> Tensor:
    basis = torch.linalg.qr(torch.randn(len(eigenvalues), len(eigenvalues), dtype=torch.float64)).Q
    return basis @ torch.diag(eigenvalues) @ basis.T


def projector(vectors: Tensor) -> Tensor:
    return vectors @ vectors.T


@pytest.mark.parametrize(("eigenvalues", "tolerance"), [
    (torch.logspace(0, -6, 16), 1e-9),
    (torch.linspace(1, 0.5, 16), 1e-12),
    (1 + 1e-6 * torch.arange(16.0).flip(0), 1e-8),  # differences of a millionth
    (torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0, *[1e-13] * 11]), 1e-12),
])  # fmt: skip
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_eigenvectors_equal_those_of_eigh(eigenvalues, tolerance, scale):
    """The error of an eigenspace is that of rounding over the gap to the next eigenvalue, as it is for eigh."""
    matrix = scale * symmetric(eigenvalues.double())
    values, vectors = leading_eigenvectors(matrix, 5)
    expected, theirs = torch.linalg.eigh(matrix)
    torch.testing.assert_close(values, expected.flip(0)[:5], rtol=1e-9, atol=1e-13 * scale)
    torch.testing.assert_close(projector(vectors), projector(theirs[:, -5:]), rtol=0, atol=tolerance)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-12)


def test_gram_matrices_of_random_slopes_equal_eigh():
    for members in (2, 3, 16, 20):
        slopes = torch.randn(members, 500, dtype=torch.float64)
        gram = slopes @ slopes.T
        values, vectors = leading_eigenvectors(gram, min(5, members))
        expected, theirs = torch.linalg.eigh(gram)
        kept = min(5, members)
        torch.testing.assert_close(values, expected.flip(0)[:kept], rtol=1e-12, atol=0)
        torch.testing.assert_close(projector(vectors), projector(theirs[:, -kept:]), rtol=0, atol=1e-10)


def test_equal_eigenvalues_give_a_basis_of_their_space():
    matrix = symmetric(torch.tensor([3.0, 3.0, 3.0, 1.0, 0.5, 0.1], dtype=torch.float64))
    values, vectors = leading_eigenvectors(matrix, 3)
    torch.testing.assert_close(values, torch.full((3,), 3.0, dtype=torch.float64), rtol=1e-12, atol=0)
    torch.testing.assert_close(matrix @ vectors, 3 * vectors, rtol=0, atol=1e-9)
    torch.testing.assert_close(projector(vectors), projector(torch.linalg.eigh(matrix)[1][:, -3:]), rtol=0, atol=1e-10)


def test_a_matrix_of_zeros_and_one_of_rank_one_give_nothing_beyond_their_rank():
    values, vectors = leading_eigenvectors(torch.zeros(4, 4, dtype=torch.float64), 2)
    assert not values.any()
    assert vectors.isfinite().all()
    v = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)
    values, vectors = leading_eigenvectors(torch.outer(v, v), 2)
    assert float(values[0]) == pytest.approx(9.0, abs=1e-12)
    assert abs(float(values[1])) < 1e-14 * 9
    assert vectors.isfinite().all()


@pytest.mark.parametrize(("size", "tail"), thinned([3, 5, 10, 20], [0.0, 1e-9], every=2))
def test_what_rounding_leaves_beyond_the_rank_is_nothing(size, tail):
    """One direction alone, or one that outweighs the others by 1e18: what is left after it is all rounding."""
    generator = torch.Generator().manual_seed(size)
    for _ in range(15):
        rows = torch.randn(size, 3, generator=generator, dtype=torch.float64)
        rows[:, 1:] *= tail
        values, vectors = leading_eigenvectors(rows @ rows.T, min(size, 4))
        assert values.isfinite().all()
        assert vectors.isfinite().all()
        assert float(values[0]) == pytest.approx(float(torch.linalg.eigvalsh(rows @ rows.T)[-1]), rel=1e-12)
        assert not values[1:].any()


@pytest.mark.parametrize("order", ["largest", "smallest"])
def test_both_ways_give_the_same_end_of_the_spectrum(order):
    matrix = symmetric(torch.linspace(0.01, 1, 12, dtype=torch.float64))
    values, vectors = extreme_eigenvectors(matrix, 4, order)
    others, theirs = eigenvectors_by_products(matrix, 4, order)
    everything = torch.linalg.eigvalsh(matrix)
    expected = everything[-4:] if order == "largest" else everything[:4]
    torch.testing.assert_close(values.sort().values, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(others.sort().values, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(projector(vectors), projector(theirs), rtol=0, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here")
def test_a_step_of_feature_repulsion_is_captured_and_trains_as_the_loop_does():
    torch.manual_seed(0)
    networks = [ds.nets.MLP(4, 3, hidden=(8, 6)) for _ in range(6)]
    x = torch.randn(60, 4, dtype=torch.float64)
    y = torch.arange(60) % 3

    def trained(engine: str) -> tuple[ds.Posterior, ds.History]:
        posterior = ds.FeatureRDE(networks, layer="layers.3", head="layers.4", projection=3).to("cuda", torch.float64)
        optimizer = torch.optim.SGD(posterior.parameters(), lr=2**-4)
        loader = ds.data.Batches(x.cuda(), y.cuda(), batch_size=20)
        history = ds.fit(posterior, loader, epochs=3, optimizer=optimizer, engine=engine, progress=False)
        return posterior, history

    (expected, _), (got, history) = trained("loop"), trained("captured")  # too short to be captured by itself
    assert "captured" in str(history.engine)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(got.state_dict()[name], tensor, rtol=1e-7, atol=1e-8, msg=name)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("order", ["largest", "smallest"])
def test_a_matrix_that_is_not_finite_has_eigenvectors_of_nan(value, order):
    matrix = torch.eye(4, dtype=torch.float64)
    matrix[1, 2] = matrix[2, 1] = value
    values, vectors = extreme_eigenvectors(matrix, 2, order)
    assert values.shape == (2,)
    assert vectors.shape == (4, 2)
    assert values.isnan().all()
    assert vectors.isnan().all()
