"""Selective prediction: the risk that is left when the least confident examples are refused.

Confidence is any score, higher = surer; loss is any per-example loss, for example 0/1 errors. Examples of equal
confidence are taken in random order, in expectation: each counts with the mean loss of its group, so the result does
not depend on how the examples happen to be stored.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dissensus.metrics.checks import same_shape


class RiskCoverage(NamedTuple):
    """Risk at every coverage, most confident examples first."""

    coverage: Tensor  # (N,) k/N for k = 1…N
    risk: Tensor  # (N,) mean loss of the k most confident


def risk_coverage(confidence: Tensor, loss: Tensor) -> RiskCoverage:
    """RiskCoverage (N,), (N,) of confidences and losses (any one shape)."""
    confidence, loss = (t.flatten() for t in same_shape(confidence=confidence, loss=loss))
    group, count = torch.unique(-confidence, return_inverse=True, return_counts=True)[1:]
    group_loss = loss.new_zeros(len(count)).index_add(0, group, loss) / count
    taken = torch.arange(1, len(loss) + 1, dtype=torch.float64, device=loss.device)
    return RiskCoverage(taken / len(loss), group_loss[group.sort().values].cumsum(0) / taken)


def aurc(confidence: Tensor, loss: Tensor) -> Tensor:
    """() area under the risk-coverage curve: mean over k of the risk of the k most confident (Geifman et al., 2019)."""
    return risk_coverage(confidence, loss).risk.mean()


def excess_aurc(confidence: Tensor, loss: Tensor) -> Tensor:
    """() AURC above the least possible one, of confidences that rank by the loss itself; zero for a perfect ranking.

    The least AURC is taken on the data, not from the large-N formula r + (1 − r) log(1 − r) for 0/1 losses.
    """
    return aurc(confidence, loss) - aurc(-loss.double(), loss)
