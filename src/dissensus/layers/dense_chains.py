"""Dense modulated layers with ReLUs between them, all members and layers of a run in one function.

One layer after the other, factors cost nine passes over the activations beside a plain network's. Two facts save most of them.
With h = relu(s ∘ z) and the next layer's a = r ∘ h, both factors act on one gradient, r ∘ s ∘ ∂L/∂a where h > 0. And relu is
positively homogeneous, s z relu'(s z) = relu(s z), so that ∂L/∂s follows from ∂L/∂r, which sums over the batch:

    s ∘ ∂L/∂s = r ∘ ∂L/∂r,    ∂L/∂r = Σ_b h ∘ ∂L/∂a

So z need not be kept, and s and the ReLU overwrite it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.layers.conversion import ConvertedLayer, convert_layer
from dissensus.layers.factored import ModulatedLayer
from dissensus.utils.torch_private import has_hooks, has_memory, is_transformed, run_outside_vmap, unwrap_innermost_vmap

Given = Sequence[Tensor | None]  # x, then W, b, r, s of every layer; b and s may be None


class ChainedLayers(ConvertedLayer):
    """An `nn.Sequential` that runs modulated layers and the ReLUs between them at once while members are vectorised."""

    added = ("members_at_once",)
    members_at_once: bool = False

    def forward(self, input: Tensor) -> Tensor:
        parts: list[Any] = list(self)  # type: ignore[call-overload]  # an `nn.Sequential`, whose parts may occur twice
        for run in split_into_runs(parts) if self.members_at_once and _can_chain(input) else ([part] for part in parts):
            found = _run_all_members(input, run[::2]) if len(run) > 1 else None
            if found is None:
                for part in run:
                    input = part(input)
            else:
                input = found
        return input


def chain_layers(network: nn.Module) -> None:
    """Makes every `nn.Sequential` of the network with such layers a `ChainedLayers` one, in place."""
    for part in list(network.modules()):
        if type(part) is nn.Sequential and any(len(run) > 1 for run in split_into_runs(list(part))):
            vars(convert_layer(part, ChainedLayers))["members_at_once"] = False  # by which vectorising code finds it


def split_into_runs(parts: Sequence[nn.Module]) -> Iterator[list[nn.Module]]:
    """The parts in order, in lists: modulated layer, ReLU, modulated layer, … as long as it lasts; all others alone."""
    left = list(parts)
    while left:
        length = 1
        if _is_modulated_linear(left[0]):
            while len(left) > length + 1 and type(left[length]) is nn.ReLU and _is_modulated_linear(left[length + 1]):
                length += 2
        if any(map(has_hooks, left[:length])):
            length = 1
        yield left[:length]
        del left[:length]


def _is_modulated_linear(part: Any) -> bool:
    return isinstance(part, ModulatedLayer) and part.plain_class is nn.Linear and part.r is not None


def _can_chain(input: Tensor) -> bool:
    plain = input.ndim == 2 and not torch.is_autocast_enabled(input.device.type)
    return plain and not torch.compiler.is_compiling()


def _run_all_members(input: Tensor, layers: Sequence[Any]) -> Tensor | None:
    """The layers' outputs, computed for all members of the vmap around it; None if there is none, or others around it."""
    parts = (each for layer in layers for each in (layer.weight, layer.bias, layer.r, layer.s))
    unwrapped = unwrap_innermost_vmap(input, *parts)
    if unwrapped is None:
        return None
    pairs, level = unwrapped
    given, axes = zip(*pairs, strict=True)
    factors = [axis for i in (3, 4) for each, axis in zip(given[i::4], axes[i::4], strict=True) if each is not None]
    tensors = [each for each in given if each is not None]
    # Weights common to all members, factors of their own, and no gradient transform or second vmap.
    usual = set(axes[1::4]) == {None} and None not in factors and not is_transformed(*tensors)
    if not usual or len({each.dtype for each in tensors}) > 1:
        return None
    stacked = (each if axis is None else each.movedim(axis, 0) for each, axis in pairs)
    return run_outside_vmap(lambda: _Chain.apply(*stacked), level)  # type: ignore[no-untyped-call]


def run_one_member(*given: Tensor | None) -> Tensor:
    """(B, O) the same, layer by layer: x (B, I), W (O, I), b and s (O,), r (I,)."""
    h: Any = given[0]
    for k, (weight, bias, r, s) in enumerate(_layer_tensors(given)):
        h = F.linear((h.relu() if k else h) * r, weight, bias)
        h = h if s is None else h * s
    return h


def _layer_tensors(given: Given) -> list[tuple[Any, Any, Any, Any]]:
    """(W, b, r, s) of every layer."""
    return list(zip(given[1::4], given[2::4], given[3::4], given[4::4], strict=True))


class _Chain(torch.autograd.Function):
    """(M, B, O) from x (M, B, I) or (B, I), W (O, I), b (O,) or (M, O), r (M, I), s (M, O)."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor | None) -> Tensor:
        h: Any = given[0]
        layers, kept = _layer_tensors(given), []
        for weight, bias, r, s in layers:
            a = h * r[:, None]
            kept += [h, a]
            z = (a.flatten(0, 1) @ weight.T).view(*a.shape[:2], -1)
            last = len(kept) == 2 * len(layers)
            across: Any = s if s is None else s[:, None]
            if bias is not None and (last or s is None):
                z += bias if bias.ndim == 1 else bias[:, None]
            elif bias is not None:
                torch.addcmul((s * bias)[:, None], z, across, out=z)  # s ∘ z + s ∘ b
            elif s is not None and not last:
                z *= across
            h = z.relu_() if not last else z if s is None else z * across
        ctx.save_for_backward(*given, *kept, None if s is None else z)
        return h

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.needs_input_grad)
        given, (*kept, z) = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        # A gradient without memory is a row of many at once, by vmap or is_grads_batched=True.
        if torch.is_grad_enabled() or not has_memory(gradients[0]):
            return _recomputed_gradients(ctx.needs_input_grad, given, gradients[0])
        return _explicit_gradients(ctx.needs_input_grad, given, kept, z, gradients[0])


def _explicit_gradients(
    wanted: Sequence[bool], given: Given, kept: list[Tensor], z: Tensor, g: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients by what is wanted of x and the layers' tensors, from g (M, B, O) by the outputs."""
    layers = _layer_tensors(given)
    found: list[Tensor | None] = [None] * len(wanted)
    if (s := layers[-1][3]) is not None:
        found[-1] = (g * z).sum(1) if wanted[-1] else None
        g = g * s[:, None]
    for k in reversed(range(len(layers))):
        at = 1 + 4 * k
        (weight, bias, r, _), (h, a) = layers[k], kept[2 * k : 2 * k + 2]
        before: Any = layers[k - 1][3] if k else None  # s of the layer before
        flat = g.flatten(0, 1)
        if wanted[at]:
            found[at] = flat.T @ a.flatten(0, 1)
        if wanted[at + 1]:
            found[at + 1] = flat.sum(0) if bias.ndim == 1 else g.sum(1)
        if not (wanted[at + 2] or any(wanted[:at])):
            break
        by_a = (flat @ weight).view_as(a)
        if wanted[at + 2] or (k and wanted[at - 1]):
            found[at + 2] = by_r = (by_a * h).sum(1)
        if k and wanted[at - 1]:
            # Where s = 0 the ReLU is at 0, whose derivative torch has as 0.
            found[at - 1] = torch.where(before == 0, 0.0, r * by_r / before)
        if not any(wanted[:at]):
            break
        g = by_a.mul_((r if before is None else r * before)[:, None])
        if k:
            g = torch.ops.aten.threshold_backward.grad_input(g, h, 0, grad_input=g)
        else:
            found[0] = g if h.ndim == 3 else g.sum(0)
    return tuple(found)


def _recomputed_gradients(wanted: Sequence[bool], given: Given, g: Tensor) -> tuple[Tensor | None, ...]:
    """The same from a second run, for second derivatives and several g at once."""
    with torch.enable_grad():  # views, since a tensor may also have had a part in x
        views = [each if each is None else each.view_as(each) for each in given]
    # One member's x and weights have two axes, its bias and factors one.
    alone = [2 if at == 0 or at % 4 == 1 else 1 for at in range(len(views))]
    own = [None if t is None or t.ndim == axes else 0 for t, axes in zip(views, alone, strict=True)]
    with torch.enable_grad():
        outputs = torch.func.vmap(run_one_member, tuple(own))(*views)
    chosen = [each for each, want in zip(views, wanted, strict=True) if want and each is not None]
    found = iter(torch.autograd.grad(outputs, chosen, g, create_graph=torch.is_grad_enabled()))
    return tuple(next(found) if want else None for want in wanted)
