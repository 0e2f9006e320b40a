"""Isotonic regression: the increasing function nearest to some points, and its values between knots."""

import torch
from torch import Tensor


def isotonic_knots(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """((K,), (K,)) float64 knots of the non-decreasing function f that minimises Σ w (y − f(x))² over x, y, w (N,)."""
    # Pool adjacent violators (Ayer et al. 1955); between knots f is linear, outside constant, as in scikit-learn.
    kept = weight > 0
    x, y, weight = (tensor[kept].double().cpu() for tensor in (x, y, weight))
    points, where = torch.unique(x, return_inverse=True)  # ascending
    mass = torch.zeros_like(points).index_add(0, where, weight)
    mean = torch.zeros_like(points).index_add(0, where, weight * y) / mass
    blocks: list[tuple[float, float, int]] = []  # (mean, mass, points) of each, increasing
    for value, heavy in zip(mean.tolist(), mass.tolist(), strict=True):
        count = 1
        while blocks and blocks[-1][0] >= value:
            before, heavier, more = blocks.pop()
            value, count = (before * heavier + value * heavy) / (heavier + heavy), more + count
            heavy += heavier
        blocks.append((value, heavy, count))
    values, _, counts = (torch.tensor(each, dtype=torch.float64) for each in zip(*blocks, strict=True))
    ends = counts.long().cumsum(0)
    # A block is constant, so its first and last points are enough.
    first, last = torch.cat([ends.new_zeros(1), ends[:-1]]), ends - 1
    at = torch.stack([points[first], points[last]], 1).flatten()
    value = values.repeat_interleave(2)
    single = torch.stack([torch.ones_like(ends, dtype=torch.bool), first != last], 1).flatten()
    return at[single], value[single]


def pad_knots(knots: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """((C, K), (C, K)) knots of C functions; shorter ones repeat their last knot."""
    longest = max(len(at) for at, _ in knots)
    rows = [[torch.cat([each, each[-1:].expand(longest - len(each))]) for each in pair] for pair in knots]
    return torch.stack([at for at, _ in rows]), torch.stack([value for _, value in rows])


def between_knots(x: Tensor, at: Tensor, value: Tensor) -> Tensor:
    """f(x) (C, N), row by row: linear between knots (at, value), each (C, K), and constant outside of them."""
    if at.shape[1] == 1:
        return value.expand_as(x)
    if torch.compiler.is_compiling():  # ONNX has no searchsorted
        found = (at[:, None] <= x[:, :, None]).sum(2)
    else:
        found = torch.searchsorted(at, x.contiguous(), right=True)
    high = found.clamp(1, at.shape[1] - 1)
    x0, x1, y0, y1 = (each.gather(1, i) for each in (at, value) for i in (high - 1, high))
    share = torch.where(x1 > x0, (x - x0) / (x1 - x0), 1.0).clamp(0, 1)
    return torch.lerp(y0, y1, share)
