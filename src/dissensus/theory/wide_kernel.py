"""Kernels of one wide network: its Gaussian process at initialisation and its tangent kernel in training.

As widths (channels) grow, a random network's outputs become a Gaussian process (NNGP; Neal 1996, Lee et al. 2018), and
gradient descent becomes kernel regression with the neural tangent kernel (Jacot et al. 2018; convolutions: Arora et al. 2019).

Second moments of units are propagated layer by layer; for images with one entry per pair of positions. A layout says which
pairs are stored: "vector" (none), "diagonal" (p with p, enough for a flattened image), "pairs" (p with p', needed for
pooling). Positions are the first axes and inputs the last ones, so that sums over windows run over contiguous memory.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from dissensus.core.predictive import RegressionSummary
from dissensus.nets.blocks import NTKLinear, Residual
from dissensus.nets.mlp import MLP
from dissensus.theory.activations import ACTIVATIONS, Activation, activation_of, is_expanded
from dissensus.theory.kernel_inputs import check_budget, check_kernels, checked_pair, variance_of
from dissensus.utils.checks import number, one_of
from dissensus.utils.torch_private import convolve, forward_hooks_of

Positions = Literal["vector", "diagonal", "pairs"]


@dataclass(frozen=True)
class UnitMoments:
    """Moments of one layer's units for N1 and N2 inputs, or N inputs with themselves; the layout's positions are first."""

    cross: Tensor  # (…, N1, N2) E h(x) h(x'), averaged over units; (…, N) of inputs with themselves
    tangent: Tensor | None  # (…, N1, N2) inner products of gradients by all weights below; None is 0
    layout: Positions
    # (…, N1), (…, N2) variances before each activation. Inputs with themselves append to `first` and have no `second`.
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
        total = moment.new_zeros([count if axis in axes else n for axis, n in enumerate(moment.shape)])
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


MEASURE = "measure the network with theory.empirical_ntk"
KNOWN = "Linear, Conv2d, Flatten, AvgPool2d, AdaptiveAvgPool2d(1), nets.Residual and activations"
READ = (nn.Sequential, MLP, nn.Linear, NTKLinear, nn.Conv2d, nn.Flatten, nn.AvgPool2d, nn.AdaptiveAvgPool2d, Residual)
TEMPORARIES = 8  # tensors of a covariance's size in memory at a time
CACHE = 2**23  # bytes of a block: more and they leave a processor's cache, fewer and starting operations takes longer


@dataclass(frozen=True)
class Kernels:
    """Kernels of one output of a wide network, (N1, N2) float64 each; outputs are independent of one another."""

    nngp: Tensor  # E f(x) f(x') at initialisation
    ntk: Tensor  # ⟨∂f(x)/∂θ, ∂f(x')/∂θ⟩, the kernel of training


@dataclass(frozen=True)
class _WeightLaw:
    variance: float
    bias: float
    standard: bool


def kernel(
    network: nn.Module,
    x1: Tensor,
    x2: Tensor | None = None,
    *,
    weight_variance: float,
    bias_variance: float = 0.0,
    parameterization: Literal["ntk", "standard"] = "ntk",
    memory: int = 2**31,
) -> Kernels:
    """Computes the NNGP and tangent kernels (N1, N2) of a network at infinite width.

    Values of weights do not matter. Biases are trained, too, but no parameters with requires_grad=False.

    Args:
        network: a Sequential or `nets.MLP` of Linear, Conv2d, Flatten, AvgPool2d, AdaptiveAvgPool2d(1), Residual, activations.
        x1, x2: inputs (N1, …) and (N2, …), as the network takes them; x2 = None means x1.
        weight_variance: σ_w²; 2 keeps the size of signals through ReLU layers.
        bias_variance: σ_b².
        parameterization: "ntk" for layers Wx/√fan_in + b with W ~ N(0, weight_variance); "standard" for W ~ N(0,
            weight_variance/fan_in), whose tangent kernel grows with the network's widths.
        memory: most bytes for covariances of image positions; larger requests are computed in blocks of inputs.
    """
    one_of("parameterization", parameterization, ("ntk", "standard"))
    variances = variance_of("weight_variance", weight_variance), variance_of("bias_variance", bias_variance)
    law = _WeightLaw(*variances, parameterization == "standard")
    _check_described(network)
    steps = list(_layers_in_order(network))
    first, second = (x.to(torch.float64) for x in checked_pair(x1, x2))
    if steps and isinstance(steps[0], nn.Flatten):
        first, second = (x.reshape(len(x), -1) for x in (first, second))
    if x2 is None:
        second = first
    pools = any(isinstance(m, nn.AvgPool2d | nn.AdaptiveAvgPool2d) for m in network.modules())
    layout: Positions = "vector" if first.ndim == 2 else "pairs" if pools else "diagonal"
    if first.ndim not in (2, 4):
        raise ValueError(f"expected inputs (N, D) or (N, C, H, W), got {tuple(first.shape)}; flatten others first")
    positions = first[0, 0].numel() if layout != "vector" else 1
    each = 8 * TEMPORARIES * (positions**2 if layout == "pairs" else positions)
    check_budget(each, memory, "covariances of all positions of one pair of inputs", "use smaller images")
    own = _own_variances(steps, first, law, layout, max(1, memory // each))
    others = own if second is first else _own_variances(steps, second, law, layout, max(1, memory // each))
    # Blocks that stay in a processor's cache, except where activations expand functions for every block.
    budget = memory if first.is_cuda or any(map(is_expanded, network.modules())) else min(memory, CACHE)
    rows = min(len(first), max(1, math.isqrt(budget // each)))
    columns = rows if second is first else max(1, budget // (each * rows))
    nngp, ntk = first.new_empty(2, len(first), len(second))
    for i in range(0, len(first), rows):
        for j in range(i if second is first else 0, len(second), columns):
            here, there = slice(i, i + rows), slice(j, j + columns)
            left = [variances[..., here] for variances in own]
            right = left if second is first and i == j else [variances[..., there] for variances in others]
            inputs = UnitMoments(input_covariance(first[here], second[there], layout), None, layout, left, right)
            units = _output_moments(_propagate(steps, inputs, law, width=first.shape[1]))
            nngp[here, there], ntk[here, there] = units.cross, 0.0 if units.tangent is None else units.tangent
            if second is first and i != j:
                nngp[there, here], ntk[there, here] = nngp[here, there].T, ntk[here, there].T
    check_kernels(nngp, ntk)
    return Kernels(nngp, ntk)


def _own_variances(steps: list[nn.Module], x: Tensor, law: _WeightLaw, layout: Positions, count: int) -> list[Tensor]:
    """(…, N) variances of all inputs before every activation, `count` inputs at a time."""
    parts = []
    for some in x.split(count):  # type: ignore[no-untyped-call]
        units = UnitMoments(input_covariance(some, None, layout), None, layout, [], None)
        parts.append(_output_moments(_propagate(steps, units, law, width=x.shape[1])).first)
    return [torch.cat(each, -1) for each in zip(*parts, strict=True)]


def _output_moments(units: UnitMoments) -> UnitMoments:
    if not units.gaussian:
        raise ValueError("expected a network that ends in Linear or Conv2d, got another last layer; add a Linear")
    units = flat_mean(units) if units.flattened else units
    if units.layout != "vector":
        raise ValueError("expected a network with one vector of outputs, got images; end in Flatten and Linear")
    return units


def _check_described(network: nn.Module) -> None:
    """Raises if the network does more than its layers describe, or uses a weight twice."""
    if not isinstance(network, nn.Module):
        got = f"the class {network.__name__}" if isinstance(network, type) else repr(network)
        raise TypeError(f"expected a network, got {got}; pass an nn.Sequential of {KNOWN}")
    for name, part in network.named_modules():
        written = not part.forward.__module__.startswith(("torch.", "dissensus.")) and isinstance(part, READ)
        if any(forward_hooks_of(part)) or is_parametrized(part) or written:
            got = f"hooks, a parametrization or another forward in {name or 'the network'!r}"
            raise ValueError(f"expected plain layers, got {got}; remove them, or {MEASURE}")
    held = [id(p) for _, p in network.named_parameters(remove_duplicate=False)]
    if len(held) != len(set(held)):
        raise ValueError(f"expected separate weights for each layer, got one in two places; {MEASURE}")


def _layers_in_order(network: nn.Module) -> Iterator[nn.Module]:
    if isinstance(network, MLP):
        yield nn.Flatten()
        network = network.layers
    if isinstance(network, nn.Sequential):
        for child in network:
            yield from _layers_in_order(child)
    elif not isinstance(network, nn.Identity):
        yield network


def _propagate(steps: list[nn.Module], units: UnitMoments, law: _WeightLaw, *, width: int) -> UnitMoments:
    for layer in steps:
        for broken, requirement in _requirements(layer, units, law, width):
            if broken:
                raise ValueError(f"expected {requirement}")
        if isinstance(layer, nn.Linear | NTKLinear):
            units = after_weights(flat_mean(units), **_weight_moments(layer, layer.in_features, law))
            width = layer.out_features
        elif isinstance(layer, nn.Conv2d):
            units = after_weights(patch_means(units, layer), **_weight_moments(layer, layer.weight[0].numel(), law))
            width = layer.out_channels
        elif isinstance(layer, nn.Flatten):
            if units.layout != "vector":
                width *= units.cross.shape[0] * units.cross.shape[1]
                units = replace(units, flattened=True)
        elif isinstance(layer, nn.AvgPool2d | nn.AdaptiveAvgPool2d):
            units = after_pooling(units, layer)
        elif isinstance(layer, Residual):
            units = _propagate_residual(layer, units, law, width)
        else:
            units = _propagate_activation(layer, units)
    return units


def _requirements(layer: nn.Module, units: UnitMoments, law: _WeightLaw, width: int) -> list[tuple[bool, str]]:
    """(whether it is violated, the requirement) for every requirement of a layer."""
    vectors = units.layout == "vector" or units.flattened
    images = (vectors, f"images (N, C, H, W) for a {type(layer).__name__}, got vectors; put it before Flatten")
    if isinstance(layer, nn.Linear | NTKLinear):
        mixed, other = law.standard and isinstance(layer, NTKLinear), layer.in_features != width
        return [
            (not vectors, "Flatten between images and a Linear, got none; a Linear acts on the last axis"),
            (mixed, "parameterization='ntk' for a network of NTKLinear layers, got 'standard'; pass that"),
            (other, f"inputs of width {layer.in_features}, got {width}; the first Linear takes those"),
        ]
    if isinstance(layer, nn.Conv2d):
        other = layer.in_channels != width
        special = layer.groups != 1 or layer.padding_mode != "zeros" or isinstance(layer.padding, str)
        return [
            images,
            (other, f"images of {layer.in_channels} channels, got {width}; the Conv2d takes those"),
            (special, f"a Conv2d with groups=1 and zeros padded, a number of them, got {layer}; write it so"),
        ]
    if isinstance(layer, nn.Flatten):
        other = layer.start_dim != 1 or layer.end_dim != -1
        return [(other, f"Flatten from axis 1 to the last, got {layer}; keep the batch axis alone")]
    if isinstance(layer, nn.AvgPool2d | nn.AdaptiveAvgPool2d):
        local = isinstance(layer, nn.AdaptiveAvgPool2d) and layer.output_size not in (1, (1, 1))
        return [images, (local, f"global average pooling, AdaptiveAvgPool2d(1), got {layer}; use AvgPool2d")]
    if isinstance(layer, Residual):
        return [(not units.weighted, "a Linear or Conv2d before a Residual, got inputs; inputs are not random")]
    return []


def _weight_moments(layer: nn.Linear | NTKLinear | nn.Conv2d, fan_in: int, law: _WeightLaw) -> dict[str, float]:
    trained_bias = layer.bias is not None and layer.bias.requires_grad
    gradient = float(fan_in if law.standard else 1) if layer.weight.requires_grad else 0.0
    moments = {"variance": law.variance, "bias": law.bias if layer.bias is not None else 0.0}
    return moments | {"weight_gradient": gradient, "bias_gradient": float(trained_bias)}


def _propagate_residual(layer: Residual, units: UnitMoments, law: _WeightLaw, width: int) -> UnitMoments:
    branch = _propagate(list(_layers_in_order(layer.branch)), units, law, width=width)
    if branch.weighted == units.weighted or not branch.gaussian:
        raise ValueError("expected a Residual whose branch ends in Linear or Conv2d, got another last layer; add one")
    if branch.cross.shape != units.cross.shape:
        got = f"{tuple(branch.cross.shape[:2])} from {tuple(units.cross.shape[:2])}"
        raise ValueError(f"expected a branch that keeps the image's size, got {got}; pad its convolutions")
    both = replace(units, weighted=branch.weighted, activations=branch.activations, cross=units.cross + branch.cross)
    tangent = None if units.tangent is None or branch.tangent is None else units.tangent + branch.tangent
    return replace(both, tangent=tangent)


def _propagate_activation(layer: nn.Module, units: UnitMoments) -> UnitMoments:
    try:
        activation = activation_of(layer)
    except ValueError:
        if next(layer.children(), None) is not None:
            got = f"{type(layer).__name__}, whose forward it cannot read"
            advice = f"write it as an nn.Sequential of {KNOWN}, or {MEASURE}"
            raise ValueError(f"expected an nn.Sequential or nets.MLP, got {got}; {advice}") from None
        advice = f"leave it out, or {MEASURE}. Known layers: {KNOWN}, which are {', '.join(ACTIVATIONS)}"
        raise ValueError(f"expected layers with a known kernel, got {type(layer).__name__}; {advice}") from None
    if not units.gaussian:
        raise ValueError(f"expected a Linear or Conv2d right before {type(layer).__name__}, got none; add one")
    return after_activation(units, activation)


class ScaledLinear(nn.Linear):
    """Linear layer in NTK form: W x/√fan_in + b."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight / self.in_features**0.5, self.bias)


class ScaledConv2d(nn.Conv2d):
    """Convolution in NTK form: W ∗ x/√fan_in + b."""

    def forward(self, x: Tensor) -> Tensor:
        return convolve(self, x, self.weight / self.weight[0].numel() ** 0.5, self.bias)


def random_network(
    network: nn.Module,
    *,
    weight_variance: float,
    bias_variance: float = 0.0,
    parameterization: Literal["ntk", "standard"] = "ntk",
    generator: torch.Generator | None = None,
) -> nn.Module:
    """A copy of the network with new random weights, in NTK form unless parameterization="standard".

    As it gets wider, its `empirical_ntk` tends to `kernel(network, …).ntk`. Arguments as in `kernel`.
    """
    one_of("parameterization", parameterization, ("ntk", "standard"))
    weight, bias = variance_of("weight_variance", weight_variance), variance_of("bias_variance", bias_variance)
    drawn = copy.deepcopy(network)
    for layer in drawn.modules():
        if not isinstance(layer, nn.Linear | nn.Conv2d | NTKLinear):
            continue
        if isinstance(layer, NTKLinear) and parameterization != "ntk":
            raise ValueError("expected parameterization='ntk' for NTKLinear layers, got another; pass 'ntk'")
        scale = 1.0 if parameterization == "ntk" else layer.weight[0].numel() ** -0.5
        if parameterization == "ntk" and not isinstance(layer, NTKLinear):
            # The tensors and attributes stay; only the forward changes.
            layer.__class__ = ScaledLinear if isinstance(layer, nn.Linear) else ScaledConv2d
        with torch.no_grad():
            layer.weight.normal_(0, weight**0.5 * scale, generator=generator)
            if layer.bias is not None:
                layer.bias.normal_(0, bias**0.5, generator=generator)
    return drawn


def gp_predict(
    kernel: Callable[..., Kernels],
    x: Tensor,
    y: Tensor,
    points: Tensor,
    *,
    noise: float,
    kind: Literal["nngp", "ntk"] = "nngp",
    jitter: float = 0.0,
) -> RegressionSummary:
    """Predicts with an infinitely wide network by kernel regression: a `SummaryPredictive` at the points.

    Args:
        kernel: a function (x1, x2) -> `Kernels`, such as functools.partial(ds.theory.kernel, network, weight_variance=2.0).
        x, y: training inputs (B, …) and targets (B,) or (B, D).
        points: inputs (n, …) to predict at.
        noise: standard deviation σ of the targets' noise, in their units.
        kind: "nngp" for the Bayesian posterior of a wide network, A = K(·, X)(K + σ²I)⁻¹; "ntk" for wide networks trained by
            gradient descent (σ as a ridge), A = Θ(·, X)(Θ + σ²I)⁻¹, where epistemic is the variance over initialisations.
        jitter: added to the kernel's diagonal.

    Raises:
        ValueError: the kernel cannot be factorised; the message suggests a jitter.
    """
    one_of("kind", kind, ("nngp", "ntk"))
    number("noise", noise, least=0, hint="it is a standard deviation")
    if len(y) != len(x) or y.ndim not in (1, 2):
        raise ValueError(f"expected {len(x)} targets, (N,) or (N, D), got {tuple(y.shape)}; pass one target per input")
    targets = (y if y.ndim == 2 else y[:, None]).to(torch.float64)
    train, towards, own = kernel(x, None), kernel(points, x), kernel(points, None)
    solved, cross = (train.nngp, towards.nngp) if kind == "nngp" else (train.ntk, towards.ntk)
    answers = torch.cholesky_solve(cross.T, _cholesky(solved, noise**2 + jitter)).T  # A (n, B)
    mean = answers @ targets
    variance = own.nngp.diagonal() - (answers * towards.nngp).sum(1)
    if kind == "ntk":
        # K** − A K(X, ·) − (A K(X, ·))ᵀ + A K(X, X) Aᵀ
        variance += ((answers @ train.nngp - towards.nngp) * answers).sum(1)
    epistemic = variance.clamp(min=0)[:, None].expand_as(mean)
    return RegressionSummary(mean[None], torch.full_like(mean, noise**2)[None], epistemic[None].clone())


def _cholesky(matrix: Tensor, ridge: float) -> Tensor:
    """The lower Cholesky factor of matrix + ridge·I; the error suggests a sufficient jitter."""
    shifted = matrix + ridge * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    factor: Tensor
    factor, trouble = torch.linalg.cholesky_ex(shifted)
    smallest = float(torch.linalg.eigvalsh(shifted)[0])
    scale = float(matrix.diagonal().mean())
    if int(trouble) or smallest <= 1e-14 * scale:
        suggested = 1e-8 * scale + max(0.0, -smallest)
        got = f"a smallest eigenvalue of {smallest:.2g} with {ridge:.2g} on the diagonal"
        advice = f"pass jitter={suggested:.1g}, a noise above 0, or inputs that differ"
        raise ValueError(f"expected a positive definite kernel, got {got}; {advice}")
    return factor
