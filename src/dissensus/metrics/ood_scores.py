"""Scores for out-of-distribution detection: higher = more OOD.

They are computed from log-probabilities. If the largest probability rounds to 1, −log max p is computed from the other
classes as −log(1 − Σ_{c ≠ max} p_c), which is accurate down to 1e-300: confident inputs do not tie.
"""

import math

import torch
from torch import Tensor

from dissensus.metrics.checks import distributions, no_nan
from dissensus.metrics.diversity import mixture_log_probabilities
from dissensus.numerics.checks import number


def max_probability_score(log_probabilities: Tensor) -> Tensor:
    """OOD score −log max p, (N,) or (N, H, W) in float64, of log-probabilities (N, C) or (N, C, H, W)."""
    shape = log_probabilities.shape
    return _surprise(distributions(log_probabilities, class_axis=1, log=True))[0].reshape(shape[0], *shape[2:])


def entropy_score(log_probabilities: Tensor) -> Tensor:
    """Entropy −Σ_c p_c log p_c in nats, (N,) or (N, H, W) in float64, of log-probabilities (N, C) or (N, C, H, W)."""
    shape = log_probabilities.shape
    rows = distributions(log_probabilities, class_axis=1, log=True)
    surprise, others = _surprise(rows)
    entropy: Tensor = torch.special.entr(others.double().exp()).sum(1) + surprise * (-surprise).exp()
    return entropy.reshape(shape[0], *shape[2:])


def mutual_information_score(member_log_probabilities: Tensor) -> Tensor:
    """Mutual information (1/M) Σₘ KL(pₘ ‖ mixture) in nats, (N,) or (N, H, W) in float64, of members (M, N, C, …).

    It is the part of the mixture's entropy due to disagreement between members; between 0 and log M.
    """
    shape = member_log_probabilities.shape
    rows = distributions(member_log_probabilities, class_axis=2, log=True).double()  # (M, n, C)
    mixture = mixture_log_probabilities(rows)  # (n, C)
    p, q = rows.exp(), mixture.exp()
    # p log(p/q) − p + q is never negative; the added −p + q has mean zero over members.
    terms = torch.where(p > 0, p * (rows - mixture) - p + q, q)
    return terms.sum(2).mean(0).clamp_min(0).reshape(shape[1], *shape[3:])


def energy_score(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Energy −T log Σ_c exp(logit_c / T), (N,) or (N, H, W) in float64, of logits (N, C, …) (Liu et al., 2020)."""
    number("temperature", temperature, above=0, hint="the usual value is 1")
    no_nan(logits, "logits", class_axis=1)
    return -temperature * torch.logsumexp(logits.detach().double() / temperature, dim=1)


def _surprise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(n,) −log max p in float64, and (n, C) the log-probabilities with the largest one set to −inf."""
    largest, index = rows.max(1, keepdim=True)
    others = rows.scatter(1, index, -math.inf)
    log_rest = torch.logsumexp(others, dim=1).double()  # log Σ_{c ≠ max} p_c
    direct = -largest.squeeze(1).double()
    return torch.where(log_rest < math.log(0.5), -torch.log1p(-log_rest.exp()), direct), others
