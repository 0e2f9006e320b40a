"""Convergence of Markov chains and their effective sample size. Draws are (M chains, S draws, …).

Gelman et al., "Bayesian data analysis", 3rd edition, section 11.4; Geyer, "Practical Markov chain Monte Carlo", 1992.
Apply these functions to a network's outputs, not its weights: weights can be permuted without changing the network.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dissensus.metrics.metric_inputs import check_no_nan


def split_rhat(draws: Tensor) -> Tensor:
    """Split-R̂ (…) of draws (M, S, …): √(V̂ / W), with each chain cut in two; near 1 if all halves agree.

    W is the mean variance within halves of n draws, V̂ = (n − 1)/n W + (variance of their means). Above 1.01 to 1.1 the
    chains have not mixed. Chains that are constant at different values give infinity, at the same value 1.
    """
    within, total = _variances(_halves(draws))
    return torch.where(total == within, 1.0, total / within).sqrt()


def effective_sample_size(draws: Tensor) -> Tensor:
    """Effective sample size (…) of draws (M, S, …), between 1 and M · S: the independent draws that estimate a mean as well.

    M S / (1 + 2 Σ_t ρ_t), with autocorrelations ρ_t over all chains, each cut in two. They are summed in pairs ρ_2k + ρ_2k+1
    while these are positive, and made non-increasing (Geyer's initial monotone sequence). Disagreement between chains counts
    as correlation. Negatively correlated and constant draws give at most M S.
    """
    halves = _halves(draws)
    chains, n = halves.shape[:2]
    within, total = _variances(halves)
    spectrum = torch.fft.rfft(halves - halves.mean(1, keepdim=True), n=2 * n, dim=1)
    covariance = torch.fft.irfft(spectrum.abs().square(), n=2 * n, dim=1)[:, :n] / n  # (M, n, …)
    rho = 1 - (within - covariance.mean(0) * n / (n - 1)) / total  # (n, …)
    rho[0] = 1.0
    pairs = rho[: n // 2 * 2].unflatten(0, (-1, 2)).sum(1)  # (n / 2, …)
    pairs = torch.where((pairs > 0).cummin(0).values, pairs, 0.0).cummin(0).values
    time = (2 * pairs.sum(0) - 1).clamp(min=1)
    return torch.where(total > 0, chains * n / time, float(chains * n))


def _halves(draws: Tensor) -> Tensor:
    """(2 M, S / 2, …) both halves of every chain, in float64; the middle draw of an odd number is dropped."""
    if draws.ndim < 2 or draws.shape[1] < 4:
        raise ValueError(f"expected draws (M, S, …) with S ≥ 4, got {tuple(draws.shape)}; put the chains first")
    check_no_nan(draws, "draws")
    n = draws.shape[1] // 2
    return torch.cat([draws[:, :n], draws[:, -n:]]).detach().double()


def _variances(halves: Tensor) -> tuple[Tensor, Tensor]:
    """(W, V̂), (…) each."""
    n = halves.shape[1]
    within = halves.var(1).mean(0)
    return within, (n - 1) / n * within + halves.mean(1).var(0)
