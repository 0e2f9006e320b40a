"""Selective prediction: the risk of the accepted examples if the least confident ones are refused.

Confidence is any score, higher = more certain; loss is any per-example loss, for example 0/1 errors. Each example counts
with the mean loss of all examples of equal confidence, which is the expectation over random orders. So the result does not
depend on the order of the examples.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dissensus.metrics.example_weights import checked_weights, group_sums
from dissensus.metrics.metric_inputs import same_shape


class RiskCoverage(NamedTuple):
    """Risk at every coverage, most confident examples first."""

    coverage: Tensor  # (N,) k/N for k = 1…N
    risk: Tensor  # (N,) mean loss of the k most confident examples


def risk_coverage(confidence: Tensor, loss: Tensor) -> RiskCoverage:
    """Risk–coverage curve: RiskCoverage (N,), (N,) from confidences and losses of one shape."""
    confidence, loss = (t.flatten() for t in same_shape(confidence=confidence, loss=loss))
    group, count = torch.unique(-confidence, return_inverse=True, return_counts=True)[1:]
    group_loss = loss.new_zeros(len(count)).index_add(0, group, loss) / count
    taken = torch.arange(1, len(loss) + 1, dtype=torch.float64, device=loss.device)
    return RiskCoverage(taken / len(loss), group_loss[group.sort().values].cumsum(0) / taken)


def aurc(confidence: Tensor, loss: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """() or (...) area under the risk-coverage curve: mean risk of the k most confident examples over k (Geifman et al., 2019).

    weights (..., N): how often each example counts, whole numbers; None counts each once. A group of w examples of equal
    confidence and mean loss l, after W examples of summed loss L, adds Σ_{j=1…w} (L + j l)/(W + j)
    = w l + (L − l W)(H_{W+w} − H_W), H the harmonic numbers.
    """
    confidence, loss = (t.flatten() for t in same_shape(confidence=confidence, loss=loss))
    counts = torch.ones_like(loss) if weights is None else checked_weights(weights, len(loss)).to(loss.device)
    if (counts != counts.round()).any():
        raise ValueError("expected whole numbers as weights, got others; pass how often each example counts")
    distinct, group = torch.unique(-confidence, return_inverse=True)
    taken, lost = (group_sums(each, group, len(distinct)) for each in (counts, counts * loss))  # (..., K) w, w l
    before, lost_before = taken.cumsum(-1) - taken, lost.cumsum(-1) - lost  # W, L
    total = counts.sum(-1)
    steps = torch.arange(1, int(total.max()) + 1, dtype=torch.float64, device=loss.device)
    harmonic = torch.cat([steps.new_zeros(1), (1 / steps).cumsum(0)])
    rise = harmonic[(before + taken).long()] - harmonic[before.long()]
    mean_loss = torch.where(taken > 0, lost / taken, 0.0)
    return (lost + (lost_before - mean_loss * before) * rise).sum(-1) / total


def excess_aurc(confidence: Tensor, loss: Tensor) -> Tensor:
    """() `aurc` minus that of a perfect ranking, by the loss itself; 0 is best.

    The perfect AURC is computed on the data, not from the large-N formula r + (1 − r) log(1 − r) for 0/1 losses.
    """
    return aurc(confidence, loss) - aurc(-loss.double(), loss)
