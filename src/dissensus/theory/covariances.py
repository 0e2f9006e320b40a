"""Second moments of a wide network's units, propagated layer by layer; for images with one entry per pair of positions.

A layout says which pairs of positions are stored: "vector" (none), "diagonal" (p with p, enough for a flattened image),
"pairs" (p with p', needed for pooling). The same linear maps act on the covariance of two inputs and of each with itself.
Positions are the first axes and inputs the last ones, so that sums over windows run over contiguous memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from dissensus.theory.activations import Activation

Positions = Literal["vector", "diagonal", "pairs"]


@dataclass(frozen=True)
class UnitMoments:
    """Moments of one layer's units for N1 and N2 inputs, or N inputs with themselves; the layout's positions are first."""

    cross: Tensor  # (…, N1, N2) E h(x) h(x'), averaged over units; (…, N) of inputs with themselves
    tangent: Tensor | None  # (…, N1, N2) inner products of gradients by all weights below; None is 0
    layout: Positions
    # (…, N1) and (…, N2) variances before each activation, by position. Units of inputs with themselves have no `second`:
    # they append theirs to `first`.
    first: list[Tensor]
    second: list[Tensor] | None
    gaussian: bool = False  # whether units are Gaussian, so that an activation may follow
    weighted: int = 0  # Linear and Conv2d layers below
    activations: int = 0  # activations below
    flattened: bool = False

    def apply_linear(self, function: Callable[[Tensor], Tensor]) -> UnitMoments:
        """The same linear map of both moments."""
        tangent = None if self.tangent is None else function(self.tangent)
        return replace(self, cross=function(self.cross), tangent=tangent)


def input_covariance(x1: Tensor, x2: Tensor | None, layout: Positions) -> Tensor:
    """Inner products over channels, divided by the number of channels; x2 = None: of each input with itself."""
    if x2 is None and layout != "pairs":
        return x1.square().mean(1).movedim(0, -1)
    if layout == "vector":
        return x1 @ x2.T / x1.shape[1]  # type: ignore[union-attr]
    if layout == "diagonal":
        left, right = (x.permute(2, 3, 0, 1).contiguous() for x in (x1, x2))  # type: ignore[union-attr]
        return left @ right.mT / x1.shape[1]  # (H, W, N1, N2)
    if x2 is None:
        return torch.einsum("nchw,ncij->hwijn", x1, x1).contiguous() / x1.shape[1]
    return torch.einsum("nchw,mcij->hwijnm", x1, x2).contiguous() / x1.shape[1]


def after_activation(units: UnitMoments, activation: Activation) -> UnitMoments:
    """Moments after an activation: K ← C, Θ ← D Θ."""
    after = replace(units, gaussian=False, activations=units.activations + 1)
    pairs, k = units.layout == "pairs", units.activations
    if units.second is None:
        own = _same_position(units.cross, units.layout).contiguous()
        units.first.append(own)
        a, b = (own[:, :, None, None], own) if pairs else (own, own)
        return replace(after, cross=activation.within_member(a, b, units.cross).value)
    a, b = units.first[k][..., None], units.second[k][..., None, :]
    if units.second is units.first:
        # Of an input with itself, so that rounding makes no angle between the two.
        _same_position(units.cross, units.layout).diagonal(dim1=-2, dim2=-1).copy_(units.first[k])
    moments = activation.within_member(a[:, :, None, None] if pairs else a, b, units.cross)
    tangent = None if units.tangent is None else moments.slope.mul_(units.tangent)
    return replace(after, cross=moments.value, tangent=tangent)


def after_weights(
    units: UnitMoments, *, variance: float, bias: float, weight_gradient: float, bias_gradient: float
) -> UnitMoments:
    """Moments after a layer of random weights: K ← σ_w² K + σ_b², Θ ← g_w K + g_b + σ_w² Θ."""
    cross, tangent = units.cross * variance, None
    if bias:
        cross += bias
    if units.second is not None:
        if units.tangent is None:
            tangent = units.cross * weight_gradient
        else:
            tangent = (units.tangent * variance).add_(units.cross, alpha=weight_gradient)
        if bias_gradient:
            tangent += bias_gradient
    return replace(units, cross=cross, tangent=tangent, gaussian=True, weighted=units.weighted + 1)


def patch_means(units: UnitMoments, layer: nn.Conv2d) -> UnitMoments:
    """Means over a convolution's window of zero-padded inputs: p and p' move together."""
    rows, columns = ((0, 2), (1, 3)) if units.layout == "pairs" else ((0,), (1,))
    padding = [int(each) for each in layer.padding]
    down, along = zip(layer.kernel_size, layer.stride, padding, layer.dilation, strict=True)

    def mean(moment: Tensor) -> Tensor:
        for axes, (size, *steps) in ((rows, down), (columns, along)):
            moment = _window_sum(moment, axes, 1 / size, size, *steps)
        return moment

    return units.apply_linear(mean)


def _window_sum(
    moment: Tensor, axes: Sequence[int], share: float, size: int, stride: int, padding: int, dilation: int
) -> Tensor:
    """`share` times the sum over a window along these axes, which move together; entries outside count 0."""
    length = moment.shape[axes[0]]
    count = (length + 2 * padding - dilation * (size - 1) - 1) // stride + 1
    parts = []  # (entries of the result, entries that are added to them): at·stride + offset, in bounds
    for offset in (dilation * i - padding for i in range(size)):
        low, high = max(0, -(offset // stride)), min(count, (length - 1 - offset) // stride + 1)
        if low < high:
            start = low * stride + offset
            parts.append((slice(low, high), slice(start, start + stride * (high - low - 1) + 1, stride)))
    whole = next((part for part in parts if part[0] == slice(0, count)), None)
    if whole is None:
        shape = [count if axis in axes else n for axis, n in enumerate(moment.shape)]
        total = moment.new_zeros(shape)
    else:
        parts.remove(whole)
        total = moment[_axis_slices(axes, whole[1])] * share
    for to, of in parts:
        total[_axis_slices(axes, to)].add_(moment[_axis_slices(axes, of)], alpha=share)
    return total


def _axis_slices(axes: Sequence[int], part: slice) -> tuple[slice, ...]:
    return tuple(part if axis in axes else slice(None) for axis in range(max(axes) + 1))


def after_pooling(units: UnitMoments, pool: nn.AvgPool2d | nn.AdaptiveAvgPool2d) -> UnitMoments:
    """Moments of averages over windows, of p and of p' each."""

    def pool_both(moment: Tensor) -> Tensor:
        if isinstance(pool, nn.AdaptiveAvgPool2d):  # over the whole image
            return moment.mean((0, 1, 2, 3), keepdim=True)
        for axes in ((0, 1), (2, 3)):
            images = moment.movedim(axes, (-2, -1))
            found: Tensor = pool(images.reshape(-1, 1, *images.shape[-2:]))
            moment = found.reshape(*images.shape[:-2], *found.shape[-2:]).movedim((-2, -1), axes)
        return moment.contiguous()

    return units.apply_linear(pool_both)


def flat_mean(units: UnitMoments) -> UnitMoments:
    """Moments of a flattened image's units: the mean over positions."""
    if units.layout == "vector":
        return units
    found = units.apply_linear(lambda moment: _same_position(moment, units.layout).mean((0, 1)))
    return replace(found, layout="vector", flattened=False)


def _same_position(moment: Tensor, layout: Positions) -> Tensor:
    """(H, W, …): position p with itself, a view."""
    if layout != "pairs":
        return moment
    return moment.diagonal(dim1=0, dim2=2).diagonal(dim1=0, dim2=1).movedim((-2, -1), (0, 1))
