"""The last layer of a network, found by running it: the linear layer whose output is the network's output."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.batch import Batch, Inputs
from dissensus.core.likelihood import Likelihood, expand_weight
from dissensus.core.regression import Regression
from dissensus.methods.parts.last_layer_curvature import CurvatureSums
from dissensus.utils.checks import one_of

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class LastLayer:
    """A linear layer and its name: outputs = W features + b, at every position for a 1×1 convolution."""

    name: str
    layer: nn.Module
    parameters: dict[str, Tensor]  # name in the network -> the layer's weight and, if any, its bias

    @property
    def channels(self) -> int:
        """The axis of features and outputs that the layer mixes."""
        return 1 if isinstance(self.layer, CONVOLUTIONS) else -1

    def matrix(self, tensors: dict[str, Tensor]) -> Tensor:
        """(..., C, D) weights and biases side by side in float64, from tensors named like `parameters`."""
        weight, *bias = (tensors[name].double() for name in self.parameters)
        front = weight.ndim - next(iter(self.parameters.values())).ndim
        parts = [weight.flatten(front + 1), *(each[..., None] for each in bias)]
        return torch.cat(parts, dim=-1)

    def tensors(self, matrix: Tensor) -> dict[str, Tensor]:
        """The inverse of `matrix`: copies in the shapes and dtypes of the layer's parameters."""
        (weight, kernel), *bias = self.parameters.items()
        inputs = kernel.shape[1]
        found = {weight: matrix[..., :inputs].reshape(*matrix.shape[:-1], inputs, *kernel.shape[2:])}
        found |= {name: matrix[..., inputs] for name, _ in bias}
        copies = {name: t.to(kernel.dtype, copy=True) for name, t in found.items()}
        return {name: t.clone(memory_format=torch.contiguous_format) for name, t in copies.items()}

    def rows(self, tensor: Tensor) -> Tensor:
        """(n, C) one row per position, in float64, from a tensor with the layer's channel axis."""
        moved = tensor.movedim(self.channels, -1).double()
        return moved.reshape(-1, moved.shape[-1])

    def inputs(self, features: Tensor) -> Tensor:
        """(n, D) features by rows, with a 1 for the bias."""
        found = self.rows(features)
        return torch.cat([found, torch.ones_like(found[:, :1])], dim=1) if len(self.parameters) == 2 else found


def last_layer(network: nn.Module, x: Inputs, name: str | None = None) -> LastLayer:
    """The layer of that name, or the last linear layer called for x; raises if the network's outputs are not its outputs."""
    layers = dict(network.named_modules())
    if name is not None and name not in layers:
        one_of("layer", name, [each for each in layers if _is_linear(layers[each])])
    called: list[str] = []

    def note(each: str) -> None:
        # A module that contains a called layer does not count as a layer, even if it has weights (a vision transformer has a
        # class token). `check_outputs` finds out if it changes the layer's outputs.
        around = any(inner != each and inner.startswith(f"{each}." if each else "") for inner in called)
        # A parametrised layer contains called modules, too.
        if not around or isinstance(layers[each], (nn.Linear, *CONVOLUTIONS)):
            called.append(each)

    watched = [each for each, layer in layers.items() if (_multiplies_weights(layer) if name is None else each == name)]
    handles = [layers[each].register_forward_hook(lambda *_, each=each: note(each)) for each in watched]
    try:
        batches.call_network(network, x)
    finally:
        for handle in handles:
            handle.remove()
    found = called[-1] if called else name or ""
    if fault := _why_not_last(network, found, called):
        raise ValueError(f"expected outputs linear in the last layer's weights, got {fault}, or name another: layer=")
    under = f"{found}." if found else ""
    own = {f"{under}{key}": p for key, p in layers[found].named_parameters(recurse=False)}
    return LastLayer(found, layers[found], own)


@contextmanager
def record_calls(last: LastLayer) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Context in which copies of (features, outputs) of every call of the layer are appended to the list."""
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...], keywords: dict[str, Tensor], outputs: Tensor) -> None:
        features = [*args, *keywords.values()][0]
        seen.append((features.clone(), outputs.clone()))  # the network may write into both afterwards

    handle = last.layer.register_forward_hook(keep, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def add_batch_curvature(
    gathered: CurvatureSums, network: nn.Module, likelihood: Likelihood, last: LastLayer, batch: Batch
) -> None:
    """Adds the curvature of one batch for one network to the sums."""
    x, y, weight = batch
    with record_calls(last) as seen, batches.UnchangedInputs(x):
        outputs = batches.call_network(network, x)
    if len(seen) != 1:  # the layer was found with the first batch
        got = f"'{last.name}' called {len(seen)} times"
        raise ValueError(f"expected a last layer that is called once per batch, got {got}; use separate layers")
    features, made = seen[0]
    if not bool(outputs.isfinite().all()):
        raise ValueError("expected finite outputs, got NaN or infinity; check the network's weights")
    check_outputs(last, made, outputs)
    if last.channels == -1 and made.ndim > 2 and type(likelihood).curvature is not Regression.curvature:
        got = f"{tuple(made.shape)}; for outputs at several positions, use a 1×1 convolution"
        raise ValueError(f"expected outputs (B, C) of the last layer '{last.name}', got {got}")
    counted = likelihood.target_mask(y)
    log_prob = likelihood.log_prob(outputs.double(), y)
    w = torch.ones_like(log_prob) if weight is None else expand_weight(weight, log_prob)
    if counted is not None:
        w = w * counted
    gathered.log_likelihood += (w * log_prob).sum()
    positions = made.select(last.channels, 0)  # (B, ...)
    w = w.reshape(*w.shape, *[1] * (positions.ndim - w.ndim)).expand_as(positions)
    a, u = likelihood.curvature(outputs.double(), y)
    more = a.shape[outputs.ndim :]  # (C,) of whole Hessians, () of diagonals
    hessian = last.rows(a.reshape(*made.shape, *more)).reshape(positions.numel(), *more, -1)
    outer = None if u is None else last.rows(u.reshape(made.shape))
    gathered.add(last.inputs(features), hessian, outer, w.reshape(-1).double())


def check_outputs(last: LastLayer, made: Tensor, outputs: Tensor) -> None:
    """Raises if the network's outputs differ from the layer's (axes of length one may be dropped)."""
    same = made.shape == outputs.shape or made.squeeze(last.channels).shape == outputs.shape
    if not same or not torch.equal(made.reshape(outputs.shape), outputs):
        got = "others; remove what changes them (a softmax belongs to the likelihood), or name the right layer: layer="
        raise ValueError(f"expected a network that returns the outputs of its last layer '{last.name}', got {got}")


def _multiplies_weights(layer: nn.Module) -> bool:
    """Whether a layer multiplies by its own weights: the last such layer called must be linear."""
    return isinstance(layer, nn.Linear) or any(p.ndim > 1 for p in layer.parameters(recurse=False))


def _is_linear(layer: nn.Module) -> bool:
    """Whether this is a linear layer or a 1×1 convolution, and not a subclass with another forward."""
    if isinstance(layer, CONVOLUTIONS):
        ones = {*layer.kernel_size, *layer.stride, layer.groups} == {1}
        padded = not isinstance(layer.padding, str) and set(layer.padding) != {0}
        return ones and not padded and type(layer).forward in {kind.forward for kind in CONVOLUTIONS}
    return isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward


def _why_not_last(network: nn.Module, name: str, called: list[str]) -> str | None:
    """Why this layer cannot be the last one, and the remedy; None if it can."""
    layer, times = network.get_submodule(name), called.count(name)
    if times == 0:
        return f"{f'{name!r} never' if name else 'no layer with weights'} called; call a linear layer as a module, last"
    if not _is_linear(layer):
        return f"'{name}', a {layer}; put an nn.Linear or a 1×1 convolution last"
    if times > 1:
        return f"'{name}' called {times} times; give the network a last layer of its own"
    if [key for key, _ in layer.named_parameters(recurse=False)] not in (["weight"], ["weight", "bias"]):
        return f"'{name}' with parametrised weights; remove the parametrisation first"
    mine = {id(parameter) for parameter in layer.parameters(recurse=False)}
    for other, parameter in network.named_parameters(remove_duplicate=False):
        if id(parameter) in mine and other.rpartition(".")[0] != name:
            return f"'{name}' tied to {other}; untie them"
    return None
