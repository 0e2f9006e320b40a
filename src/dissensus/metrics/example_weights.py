"""Example weights: how often each example counts. Weights of 1 give the unweighted metric.

Leading axes are resamples: a bootstrap is a metric with a table of weights (R, N), without a loop.
"""

from torch import Tensor


def checked_weights(weights: Tensor, count: int, name: str = "weights") -> Tensor:
    """Checked weights (..., N) in float64: one per example, non-negative, with a positive sum."""
    if weights.ndim == 0 or weights.shape[-1] != count:
        raise ValueError(f"expected {name} (..., {count}), got {tuple(weights.shape)}; pass one weight per example")
    weights = weights.detach().double()
    total = weights.sum(-1)
    if not (weights.amin() >= 0) or not ((total > 0) & total.isfinite()).all():
        raise ValueError(f"expected {name} of at least zero with a positive sum, got others; pass counts")
    return weights


def group_sums(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """(..., K) sums of values (..., n) by group (n,)."""
    return values.new_zeros(*values.shape[:-1], groups).scatter_add_(-1, group.expand_as(values), values)
