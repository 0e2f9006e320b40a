"""Second moments of a wide network's units, propagated layer by layer; for images with one entry per pair of positions.

A layout says which pairs of positions are stored: "vector" (none), "diagonal" (p with p, enough for a flattened image),
"pairs" (p with p', needed for pooling). The same linear maps act on the covariance of two inputs and of each with itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.theory.activations import Activation

Positions = Literal["vector", "diagonal", "pairs"]


@dataclass(frozen=True)
class Units:
    """Moments of one layer's units for N1 and N2 inputs; the last axes are the layout's positions."""

    cross: Tensor  # (N1, N2, …) E h(x) h(x'), averaged over units
    first: Tensor  # (N1, …) the same of x with itself
    second: Tensor  # (N2, …)
    tangent: Tensor  # (N1, N2, …) inner products of gradients with respect to all weights below
    layout: Positions
    gaussian: bool  # whether units are Gaussian, so that an activation may follow
    weighted: int = 0  # Linear and Conv2d layers below
    flattened: bool = False

    def changed(self, cross: Tensor, tangent: Tensor, own: Callable[[Tensor], Tensor], **others: Any) -> Units:
        """A copy with these moments of two inputs; `own` computes those of each input with itself."""
        first = own(self.first)
        second = first if self.second is self.first else own(self.second)
        return replace(self, cross=cross, first=first, second=second, tangent=tangent, **others)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Units:
        """The same linear map of every moment."""
        return self.changed(function(self.cross), function(self.tangent), function)


def of_inputs(x1: Tensor, x2: Tensor, layout: Positions) -> Units:
    """Moments of the inputs: inner products over channels, divided by the number of channels."""
    if layout == "vector":
        cross = x1 @ x2.T / x1.shape[1]
        first, second = (x.square().mean(1) for x in (x1, x2))
    elif layout == "diagonal":
        cross = torch.einsum("nchw,mchw->nmhw", x1, x2) / x1.shape[1]
        first, second = (x.square().mean(1) for x in (x1, x2))
    else:
        cross = torch.einsum("nchw,mcij->nmhwij", x1, x2) / x1.shape[1]
        first, second = (torch.einsum("nchw,ncij->nhwij", x, x) / x.shape[1] for x in (x1, x2))
    return Units(cross, first, first if x2 is x1 else second, torch.zeros_like(cross), layout, gaussian=False)


def activated(units: Units, activation: Activation) -> Units:
    """Moments after an activation: K ← C, Θ ← D Θ."""
    (a, _), (_, b) = (_variances(each, units.layout) for each in (units.first, units.second))
    moments = activation.within(a[:, None], b[None], units.cross)

    def own(moment: Tensor) -> Tensor:
        return activation.within(*_variances(moment, units.layout), moment).value

    return units.changed(moments.value, moments.slope * units.tangent, own, gaussian=False)


def behind_weights(
    units: Units, *, variance: float, bias: float, weight_gradient: float, bias_gradient: float
) -> Units:
    """Moments after a layer of random weights: K ← σ_w² K + σ_b², Θ ← g_w K + g_b + σ_w² Θ."""
    return units.changed(
        variance * units.cross + bias,
        weight_gradient * units.cross + bias_gradient + variance * units.tangent,
        lambda moment: variance * moment + bias,
        gaussian=True,
        weighted=units.weighted + 1,
    )


def patches(units: Units, layer: nn.Conv2d) -> Units:
    """Means over a convolution's window of zero-padded inputs: p and p' move together."""
    height, width = layer.kernel_size
    (dy, dx), (sy, sx) = layer.dilation, layer.stride
    py, px = (int(each) for each in layer.padding)

    def diagonal(moment: Tensor) -> Tensor:
        flat = moment.reshape(-1, 1, *moment.shape[-2:])
        window = torch.full((1, 1, height, width), 1 / (height * width), dtype=moment.dtype, device=moment.device)
        found = F.conv2d(flat, window, stride=layer.stride, padding=(py, px), dilation=layer.dilation)
        return found.reshape(*moment.shape[:-2], *found.shape[-2:])

    def pairs(moment: Tensor) -> Tensor:
        padded = F.pad(moment, (px, px, py, py) * 2)
        rows = (padded.shape[-2] - dy * (height - 1) - 1) // sy + 1
        columns = (padded.shape[-1] - dx * (width - 1) - 1) // sx + 1
        total = moment.new_zeros(*moment.shape[:-4], rows, columns, rows, columns)
        for i in range(height):
            for j in range(width):
                down = slice(i * dy, i * dy + sy * (rows - 1) + 1, sy)
                along = slice(j * dx, j * dx + sx * (columns - 1) + 1, sx)
                total += padded[..., down, along, down, along]
        return total / (height * width)

    return units.mapped(pairs if units.layout == "pairs" else diagonal)


def pooled(units: Units, pool: Callable[[Tensor], Tensor]) -> Units:
    """Moments of averages over windows, of p and of p' each; `pool` averages (B, 1, H, W) images."""

    def both(moment: Tensor) -> Tensor:
        for _ in range(2):  # the last two axes, then, after a transpose, the first two
            images = moment.reshape(-1, 1, *moment.shape[-2:])
            found = pool(images)
            moment = found.reshape(*moment.shape[:-2], *found.shape[-2:])
            moment = moment.movedim((-2, -1), (-4, -3))
        return moment

    return units.mapped(both)


def flat_mean(units: Units) -> Units:
    """Moments of a flattened image's units: the mean over positions."""
    if units.layout == "vector":
        return units
    found = units.mapped(lambda moment: _same_position(moment, units.layout).mean((-2, -1)))
    return replace(found, layout="vector", flattened=False)


def _same_position(moment: Tensor, layout: Positions) -> Tensor:
    """(…, H, W): position p with itself."""
    if layout != "pairs":
        return moment
    height, width = moment.shape[-2:]
    flat = moment.reshape(*moment.shape[:-4], height * width, height * width)
    return flat.diagonal(dim1=-2, dim2=-1).reshape(*moment.shape[:-4], height, width)


def _variances(moment: Tensor, layout: Positions) -> tuple[Tensor, Tensor]:
    """Variances of both positions of a pair, broadcast against (N, …)."""
    own = _same_position(moment, layout)
    return (own[..., None, None], own[..., None, None, :, :]) if layout == "pairs" else (own, own)
