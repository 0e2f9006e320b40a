"""Kernels of one wide network: its Gaussian process at initialisation and its tangent kernel in training.

As widths (channels) grow, a random network's outputs become a Gaussian process (NNGP; Neal 1996, Lee et al. 2018), and
gradient descent becomes kernel regression with the neural tangent kernel (Jacot et al. 2018; convolutions: Arora et al. 2019).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from dissensus.nets.blocks import NTKLinear, Residual
from dissensus.nets.mlp import MLP
from dissensus.theory import covariances
from dissensus.theory.activations import ACTIVATIONS, activation_of, is_expanded
from dissensus.theory.covariances import Positions, UnitMoments
from dissensus.theory.kernel_inputs import check_budget, check_kernels, checked_pair, variance_of
from dissensus.utils.checks import one_of

MEASURE = "measure the network with theory.empirical_ntk"
KNOWN = "Linear, Conv2d, Flatten, AvgPool2d, AdaptiveAvgPool2d(1), nets.Residual and activations"
READ = (nn.Sequential, MLP, nn.Linear, NTKLinear, nn.Conv2d, nn.Flatten, nn.AvgPool2d, nn.AdaptiveAvgPool2d, Residual)
TEMPORARIES = 8  # tensors of a covariance's size in memory at a time
CACHE = 2**23  # bytes of a block: more and they leave a processor's cache, fewer and starting operations takes longer


@dataclass(frozen=True)
class Kernels:
    """Kernels of one output of a wide network, (N1, N2) float64 each; outputs are independent of one another.

    `.nngp` is E f(x) f(x') at initialisation; `.ntk` is ⟨∂f(x)/∂θ, ∂f(x')/∂θ⟩, the kernel of training.
    """

    nngp: Tensor  # E f(x) f(x')
    ntk: Tensor  # ⟨∂f(x)/∂θ, ∂f(x')/∂θ⟩


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

    The network only describes the layers; the values of its weights do not matter. Biases have variance bias_variance and
    are trained; parameters with requires_grad=False are not trained.

    Args:
        network: an `nn.Sequential` or `nets.MLP` of Linear, Conv2d, Flatten, AvgPool2d, AdaptiveAvgPool2d(1),
            nets.Residual and known activations.
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
    expands = any(map(is_expanded, network.modules()))
    budget = memory if expands or first.is_cuda else min(memory, CACHE)
    rows = min(len(first), max(1, math.isqrt(budget // each)))
    columns = rows if second is first else max(1, budget // (each * rows))
    nngp, ntk = first.new_empty(2, len(first), len(second))
    for i in range(0, len(first), rows):
        for j in range(i if second is first else 0, len(second), columns):
            here, there = slice(i, i + rows), slice(j, j + columns)
            left = [variances[..., here] for variances in own]
            right = left if second is first and i == j else [variances[..., there] for variances in others]
            cross = covariances.input_covariance(first[here], second[there], layout)
            inputs = UnitMoments(cross, None, layout, left, right)
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
        units = UnitMoments(covariances.input_covariance(some, None, layout), None, layout, [], None)
        parts.append(_output_moments(_propagate(steps, units, law, width=x.shape[1])).first)
    return [torch.cat(each, -1) for each in zip(*parts, strict=True)]


def _output_moments(units: UnitMoments) -> UnitMoments:
    """The outputs' moments."""
    if not units.gaussian:
        raise ValueError("expected a network that ends in Linear or Conv2d, got another last layer; add a Linear")
    units = covariances.flat_mean(units) if units.flattened else units
    if units.layout != "vector":
        raise ValueError("expected a network with one vector of outputs, got images; end in Flatten and Linear")
    return units


def _check_described(network: nn.Module) -> None:
    """Raises if the network does more than its layers describe, or uses a weight twice."""
    for name, part in network.named_modules():
        written = not part.forward.__module__.startswith(("torch.", "dissensus.")) and isinstance(part, READ)
        if part._forward_hooks or part._forward_pre_hooks or is_parametrized(part) or written:
            got = f"hooks, a parametrization or another forward in {name or 'the network'!r}"
            raise ValueError(f"expected plain layers, got {got}; remove them, or {MEASURE}")
    held = [id(p) for _, p in network.named_parameters(remove_duplicate=False)]
    if len(held) != len(set(held)):
        raise ValueError(f"expected separate weights for each layer, got one in two places; {MEASURE}")


def _layers_in_order(network: nn.Module) -> Iterator[nn.Module]:
    """The network's layers in order, nested sequences opened."""
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
            moments = _weight_moments(layer, layer.in_features, law)
            units = covariances.after_weights(covariances.flat_mean(units), **moments)
            width = layer.out_features
        elif isinstance(layer, nn.Conv2d):
            moments = _weight_moments(layer, layer.weight[0].numel(), law)
            units = covariances.after_weights(covariances.patch_means(units, layer), **moments)
            width = layer.out_channels
        elif isinstance(layer, nn.Flatten):
            if units.layout != "vector":
                width *= units.cross.shape[0] * units.cross.shape[1]
                units = replace(units, flattened=True)
        elif isinstance(layer, nn.AvgPool2d | nn.AdaptiveAvgPool2d):
            units = covariances.after_pooling(units, layer)
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
    return {
        "variance": law.variance,
        "bias": law.bias if layer.bias is not None else 0.0,
        "weight_gradient": gradient,
        "bias_gradient": float(trained_bias),
    }


def _propagate_residual(layer: Residual, units: UnitMoments, law: _WeightLaw, width: int) -> UnitMoments:
    branch = _propagate(list(_layers_in_order(layer.branch)), units, law, width=width)
    if branch.weighted == units.weighted or not branch.gaussian:
        raise ValueError("expected a Residual whose branch ends in Linear or Conv2d, got another last layer; add one")
    if branch.cross.shape != units.cross.shape:
        got = f"{tuple(branch.cross.shape[:2])} from {tuple(units.cross.shape[:2])}"
        raise ValueError(f"expected a branch that keeps the image's size, got {got}; pad its convolutions")
    return replace(
        units,
        cross=units.cross + branch.cross,
        tangent=None if units.tangent is None or branch.tangent is None else units.tangent + branch.tangent,
        weighted=branch.weighted,
        activations=branch.activations,
    )


def _propagate_activation(layer: nn.Module, units: UnitMoments) -> UnitMoments:
    try:
        activation = activation_of(layer)
    except ValueError:
        advice = f"leave it out, or {MEASURE}. Known layers: {KNOWN}, which are {', '.join(ACTIVATIONS)}"
        raise ValueError(f"expected layers with a known kernel, got {type(layer).__name__}; {advice}") from None
    if not units.gaussian:
        raise ValueError(f"expected a Linear or Conv2d right before {type(layer).__name__}, got none; add one")
    return covariances.after_activation(units, activation)
