"""The linear toy model: its spectrum, its transition and the law of its best size."""

import pytest
import torch

from dissensus import theory


@pytest.mark.parametrize("p", [0.0, 0.084, 0.168, 0.5])
def test_the_largest_eigenvalue_is_that_of_random_matrices(p):
    generator = torch.Generator().manual_seed(0)
    found, overlap = theory.toy_spectrum(100, 1000, p=p, draws=20, generator=generator)
    assert found == pytest.approx(theory.largest_eigenvalue(100, 1000, p), rel=0.03)
    assert (overlap < 0.1) if p == 0 else (overlap > 0.6)


def test_the_transition_is_where_the_two_formulas_meet():
    point = theory.transition(100, 1000)
    assert point == pytest.approx(0.056, abs=1e-3)
    below, above = (theory.largest_eigenvalue(100, 1000, point + step) for step in (-1e-6, 1e-6))
    assert below == pytest.approx(above, abs=1e-4)
    assert theory.largest_eigenvalue(100, 1000, 1.0) == 100


def test_losses_are_those_of_descent_on_random_weights():
    """Gradient flow by small steps on drawn weights, for one draw of modulations."""
    members, width, t = 5, 40, torch.tensor([0.0, 1.5], dtype=torch.float64)
    found = theory.toy_losses(members, width, t, p=0.3, draws=1, generator=torch.Generator().manual_seed(4))
    generator = torch.Generator().manual_seed(4)
    u = 0.3 + (1 - 0.09) ** 0.5 * torch.randn(members, width, generator=generator, dtype=torch.float64)
    n = 20_000
    f = u @ torch.randn(width, n, generator=generator, dtype=torch.float64) / width**0.5
    a = u @ u.T / width
    left = torch.linalg.matrix_exp(-1.5 * a / torch.linalg.eigvalsh(a)[-1])
    for when, residual in ((0, f - 1), (1, left @ (f - 1))):
        single, joint = residual.square().mean(0), residual.mean(0).square()
        for expected, draws in ((found.individual[when], single), (found.ensemble[when], joint)):
            assert float(draws.mean()) == pytest.approx(float(expected), abs=4 * float(draws.std()) / n**0.5)


def test_the_best_size_grows_as_the_cube_root_of_the_width():
    assert theory.optimal_members(8000, 1.0) / theory.optimal_members(1000, 1.0) == pytest.approx(2)
    assert theory.optimal_members(1000, 1.0) == pytest.approx(6.3, abs=0.01)
    sizes, generator = range(1, 17), torch.Generator().manual_seed(0)
    times, best = torch.tensor([1.0], dtype=torch.float64), {}
    for width in (100, 1000):
        losses = [float(theory.toy_losses(m, width, times, draws=100, generator=generator).ensemble) for m in sizes]
        best[width] = sizes[losses.index(min(losses))]
    assert best[100] in (2, 3)
    assert best[1000] in (4, 5, 6)
    with pytest.raises(ValueError, match="expected time above 0, got 0"):
        theory.optimal_members(100, 0)


def test_losses_before_training_began_are_an_error():
    with pytest.raises(ValueError, match=r"expected times of at least 0, got -1.0"):
        theory.toy_losses(2, 4, torch.tensor([0.0, -1.0], dtype=torch.float64))
