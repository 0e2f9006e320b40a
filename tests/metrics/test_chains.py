"""R̂ and effective sample sizes of synthetic draws, against closed forms."""

import pytest
import torch

from dissensus import metrics


def autoregressive(rho, chains=4, count=5000, seed=0):
    """(chains, count) of x_t = ρ x_{t−1} + √(1 − ρ²) ξ_t, stationary."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, chains, generator=generator, dtype=torch.float64)
    rows = [noise[0]]
    for each in noise[1:]:
        rows.append(rho * rows[-1] + (1 - rho**2) ** 0.5 * each)
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_the_effective_size_of_an_autoregression_is_its_closed_form(rho):
    """n (1 − ρ) / (1 + ρ): estimated within 20 %, about three standard errors at ρ = 0.9."""
    found = float(metrics.effective_sample_size(autoregressive(rho)))
    assert found == pytest.approx(20000 * (1 - rho) / (1 + rho), rel=0.2)


def test_alternating_draws_count_as_their_number_at_most():
    assert float(metrics.effective_sample_size(autoregressive(-0.8))) == 20000


def test_rhat_is_one_for_chains_that_mix_and_large_for_chains_in_two_modes():
    good = autoregressive(0.5)
    assert float(metrics.split_rhat(good)) < 1.005
    modes = torch.tensor([-1.0, -1.0, 1.0, 1.0], dtype=torch.float64)[:, None]
    # Means ±m and variance 1 within: √(1 + m² · 8/7), of 8 halves.
    for apart in (0.5, 3.0):
        expected = (1 + apart**2 * 8 / 7) ** 0.5
        assert float(metrics.split_rhat(good + apart * modes)) == pytest.approx(expected, rel=0.02)
    assert float(metrics.split_rhat(good + 0.5 * modes)) > 1.1
    assert float(metrics.effective_sample_size(good + 3 * modes)) < 20


def test_a_chain_that_drifts_is_seen_by_its_halves():
    drift = autoregressive(0.0) + torch.linspace(0, 3, 5000, dtype=torch.float64)
    assert float(metrics.split_rhat(drift)) > 1.1


def test_draws_keep_their_other_axes_and_constants_count_as_converged():
    draws = torch.stack([autoregressive(0.2), torch.ones(4, 5000)], dim=-1)
    assert metrics.split_rhat(draws).shape == metrics.effective_sample_size(draws).shape == (2,)
    assert float(metrics.split_rhat(draws)[1]) == 1
    assert float(metrics.effective_sample_size(draws)[1]) == 20000
    stuck = torch.arange(4.0)[:, None].expand(4, 10)
    assert float(metrics.split_rhat(stuck)) == float("inf")
    assert float(metrics.effective_sample_size(stuck)) < 10


def test_too_few_draws_are_refused():
    with pytest.raises(ValueError, match="S ≥ 4"):
        metrics.split_rhat(torch.randn(4, 3))
