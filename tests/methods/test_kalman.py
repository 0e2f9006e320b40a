"""The scalar filter: its gains against published numbers, a closed form and the Bayesian answer."""

import pytest
import torch
from torch import nn

from dissensus.methods.tradi import WeightFilters, kalman_step


def gains(steps: int) -> tuple[float, float]:
    p_mean = p_variance = k_mean = k_variance = 0.0
    for _ in range(steps):
        k_mean, p_mean = kalman_step(p_mean, 1e-4, 10.0)
        k_variance, p_variance = kalman_step(p_variance, 5e-5, 10.0)
    return k_mean, k_variance


def test_the_gains_are_those_of_the_paper():
    assert gains(1) == pytest.approx((1.0e-5, 5.0e-6), rel=1e-4)
    assert gains(100) == pytest.approx((9.67e-4, 4.92e-4), rel=1e-3)
    assert gains(20_000) == pytest.approx((3.1573e-3, 2.2336e-3), rel=1e-4)
    # stationary: P⁻ = P⁻R/(P⁻ + R) + Q, so K solves K² R = Q (1 − K)
    for k, q in zip(gains(20_000), (1e-4, 5e-5), strict=True):
        assert k**2 * 10.0 == pytest.approx(q * (1 - k), rel=1e-10)


def test_the_filter_is_bayes_rule_for_a_random_walk():
    """Mean and error variance equal those of the Gaussian conditional on all measurements, by linear algebra."""
    q, r, steps = 0.3, 2.0, 6
    measured = torch.randn(steps, dtype=torch.float64)
    walk = q * torch.minimum(torch.arange(1, steps + 1)[:, None], torch.arange(1, steps + 1)[None]).double()  # x_0 = 0
    gain = torch.linalg.solve(walk + r * torch.eye(steps), walk[:, -1])
    mean, p = 0.0, 0.0
    for z in measured.tolist():
        k, p = kalman_step(p, q, r)
        mean = (1 - k) * mean + k * z
    assert mean == pytest.approx(float(gain @ measured), rel=1e-12)
    assert p == pytest.approx(float(walk[-1, -1] - gain @ walk[:, -1]), rel=1e-12)


def test_named_tensors_are_parts_of_one_block_and_stay_readable():
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    filters = WeightFilters(
        dict(module.named_parameters()), state_noise=(0.1, 0.1), measurement_noise=(1.0, 1.0), drift="none"
    )
    filters.start(dict(module.named_parameters()), dict.fromkeys(filters.weights, 0.0))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    filters.step(optimizer)
    with torch.no_grad():
        module[0].bias.add_(1.0)
    before = filters.mean["0.bias"].clone()
    filters.step(optimizer)
    gain = kalman_step(kalman_step(0.0, 0.1, 1.0)[1], 0.1, 1.0)[0]
    torch.testing.assert_close(filters.mean["0.bias"], before + gain)
    assert len({tensor.untyped_storage().data_ptr() for tensor in filters.mean.values()}) == 1
    filters.double()
    filters.step(optimizer)
    assert filters.mean["0.bias"].dtype == torch.float64
