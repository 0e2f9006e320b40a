"""Agreement and total variation against sums by hand and closed forms."""

import math

import pytest
import torch

from dissensus import metrics


def test_agreement_and_total_variation_are_sums_by_hand():
    p = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.5, 0.4], [0.3, 0.3, 0.4]])
    q = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.3, 0.3, 0.4]])
    assert float(metrics.agreement(p, q)) == pytest.approx(2 / 3)
    torch.testing.assert_close(
        metrics.total_variation_values(p, q), torch.tensor([0.2, 0.2, 0.0], dtype=torch.float64), rtol=0, atol=1e-7
    )
    assert float(metrics.total_variation(p, q)) == pytest.approx(0.4 / 3)
    assert float(metrics.total_variation(p, p)) == 0
    assert float(metrics.total_variation(torch.eye(3), torch.eye(3).roll(1, 0))) == 1


def test_segmentations_count_every_pixel():
    p = torch.randn(2, 3, 4, 5).softmax(1)
    q = torch.randn(2, 3, 4, 5).softmax(1)
    flat = [each.movedim(1, -1).reshape(-1, 3) for each in (p, q)]
    assert float(metrics.total_variation(p, q)) == pytest.approx(float(metrics.total_variation(*flat)))
    assert float(metrics.agreement(p, q)) == pytest.approx(float(metrics.agreement(*flat)))


@pytest.mark.parametrize("apart", [0.0, 0.5, 3.0, 40.0])
def test_two_gaussians_have_the_total_variation_of_the_closed_form(apart):
    """2 Φ(d / 2σ) − 1 of N(0, σ²) and N(d, σ²)."""
    sigma = 0.7
    means, variances = torch.zeros(1, 2, 1), torch.full((1, 2, 1), sigma**2)
    expected = math.erf(apart / (2 * sigma) / math.sqrt(2))
    found = metrics.mixture_total_variation(means, variances, means + apart, variances)
    assert float(found) == pytest.approx(expected, abs=1e-4)


def test_one_of_two_modes_is_half_the_distribution():
    both = torch.tensor([-5.0, 5.0]).view(2, 1, 1), torch.ones(2, 1, 1)
    one = torch.full((1, 1, 1), 5.0), torch.ones(1, 1, 1)
    assert float(metrics.mixture_total_variation(*both, *one)) == pytest.approx(0.5, abs=1e-4)


def test_narrow_members_far_apart_are_not_stepped_over():
    means = torch.tensor([-500.0, 500.0]).view(2, 1, 1)
    narrow = torch.full((2, 1, 1), 0.01)
    assert float(metrics.mixture_total_variation(means, narrow, means[1:], narrow[1:])) == pytest.approx(0.5, abs=1e-4)


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match="same shape"):
        metrics.agreement(torch.ones(2, 1), torch.ones(3, 1))
    with pytest.raises(ValueError, match="same N inputs"):
        metrics.mixture_total_variation(*[torch.ones(1, 2, 1)] * 2, *[torch.ones(1, 3, 1)] * 2)
