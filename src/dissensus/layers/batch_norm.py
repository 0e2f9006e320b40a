"""Batch norm whose statistics are re-estimated, for sampled or averaged weights, or frozen, in one pass over activations."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.member import Member
from dissensus.core.particles import Particles, Rows
from dissensus.kernels import channel_launch as kernels
from dissensus.layers.conversion import ConvertedLayer, convert_layer
from dissensus.utils.batch_norm_names import statistics_layers, statistics_names
from dissensus.utils.tensor_tree import Tensors
from dissensus.utils.torch_modes import eval_mode, set_attributes
from dissensus.utils.torch_private import axes_check_of, is_transformed


@torch.no_grad()
def refresh_statistics(
    particles: Particles, loader: Iterable[Any], device: torch.device, faster: Callable[[Any], Any] | None = None
) -> None:
    """Sets the members' running statistics to the mean of their batch statistics over the loader, weighted by batch size.

    Over batches b of n_b examples: running_mean = Σ_b n_b mean_b / Σ_b n_b, and likewise for the (unbiased) variances. A
    layer that runs several times in a forward pass has several terms per batch. Dropout is off, momenta and modes are
    restored, and layers that the caller put in eval mode keep their statistics. Without layers the loader is not read.
    `faster`: makes a function of a batch that does the same in less time.
    """
    own = set(particles.own_buffers())
    known, fixed = statistics_layers(particles.template), particles.template.always_eval
    layers = {name: each for name, each in known.items() if name not in fixed and f"{name}.running_mean" in own}
    if not layers:
        return
    names = [name for name in statistics_names(particles.template) if name.rpartition(".")[0] in layers]
    seen = dict.fromkeys(names, 0)  # examples that have passed the layer
    calls, known_calls = dict[nn.Module, int](), dict[Any, dict[nn.Module, int]]()  # of the last batch, and by shape
    function, found = partial(_statistics, particles, names, [*layers.values()], calls), False
    run: Any = function if faster is None else faster(function)
    with statistics_mode(particles, layers):
        for batch in (batches.Batch.from_tuple(given) for given in loader):
            if batch.size == 0:
                continue
            found, x = True, batches.move_to_device(batch.x, device)
            shapes = tuple(each.shape for each in batches.input_tensors(x))
            calls.clear()
            with batches.UnchangedInputs(x), batches.SmallBatchGuard(x):
                after, before = dict(zip(names, run(x), strict=True)), particles.own_buffers()
            mine = known_calls[shapes] = {**calls} or known_calls[shapes]  # a graph runs no Python
            for name, new in after.items():
                seen[name] += (count := mine[layers[name.rpartition(".")[0]]] * batch.size)
                if 0 < count < seen[name] and new.is_floating_point():  # the first batch overwrites what was there
                    after[name] = before[name].lerp(new, count / seen[name])
            particles.write_buffers(after)
    if not found:
        raise ValueError("expected at least one batch to estimate batch statistics from, got none; pass a loader")


def _statistics(
    particles: Particles, names: list[str], layers: list[nn.Module], calls: dict[nn.Module, int], x: batches.Inputs
) -> tuple[Tensor, ...]:
    """Buffers (M, ...) of these names after each member has run on a batch, means over the `calls` of their layer."""
    shared, common = particles.shared_parameters(), particles.shared_buffers()

    def count(layer: nn.Module, _: Any) -> None:
        calls[layer] += 1
        layer.momentum = 1 / calls[layer]  # type: ignore[assignment]

    def one(row: Rows) -> Tensors:
        calls.update(dict.fromkeys(layers, 0))
        params, buffers = {**shared, **row.own}, {**common, **row.buffers}
        _, after = particles.call(lambda member: batches.call_network(member.network, x), params, buffers)
        return {name: after[name] for name in names}

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(count))
        found: Tensors = particles.run(one, particles.rows(), particles.members)
    return tuple(found[name] for name in names)


@contextmanager
def statistics_mode(particles: Particles, layers: dict[str, nn.Module]) -> Iterator[None]:
    """Only these layers in training mode; modes and momenta are restored afterwards."""
    with eval_mode(particles.template), ExitStack() as momenta:
        for part in (particles.template, *layers.values()):  # the template alone, which then returns its buffers
            part.training = True
        for layer in layers.values():
            momenta.enter_context(set_attributes(layer, momentum=layer.momentum))
        yield


NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class FrozenNorm(ConvertedLayer):
    """A batch norm that uses one kernel each way in eval mode on a GPU with gradients; otherwise torch's forward."""

    def forward(self, input: Tensor) -> Tensor:
        layer: Any = self
        tensors = (layer.running_mean, layer.running_var, layer.weight, layer.bias)
        wanted = torch.is_grad_enabled() and not self.training and not torch.compiler.is_compiling()
        usable = wanted and kernels.channel_layout(input) is not None and all(each is not None for each in tensors)
        if not usable or is_transformed(*tensors) or input.shape[1] != len(layer.weight):  # a kernel reads that many
            return super().forward(input)
        axes_check_of(layer)(input)
        return _NormaliseFunction.apply(input, *tensors, layer.eps)  # type: ignore[no-untyped-call]


def freeze_norms(member: Member) -> None:
    """Freezes the statistics of the member's norm layers in training; torch's batch norms are converted."""
    layers = statistics_layers(member)
    member.always_eval = sorted({*member.always_eval, *layers})
    for layer in layers.values():
        if type(layer) in NORMS and "forward" not in vars(layer):
            convert_layer(layer, FrozenNorm)


class _NormaliseFunction(torch.autograd.Function):
    """y = (x − μ) / √(σ² + ε) · w + b, with μ and σ² constant."""

    @staticmethod
    def forward(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        at = kernels.channel_layout(x)
        assert at is not None
        return kernels.normalise_channels(x, mean, var, weight, bias, eps, at)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, mean, var, weight, _, eps = inputs
        ctx.save_for_backward(x, mean, var, weight)
        ctx.eps = eps

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, mean, var, weight) = gradients, ctx.saved_tensors
        at = kernels.channel_layout(x)
        if at is not None and not torch.is_grad_enabled():
            for_x, *others = kernels.normalise_backward(kernels.match_layout(g, x), x, mean, var, weight, ctx.eps, at)
            return for_x, None, None, *others, None
        shape = (-1, *[1] * (x.ndim - 2))  # written out, for second derivatives
        inverse = torch.rsqrt(var + ctx.eps).reshape(shape)
        places = [axis for axis in range(x.ndim) if axis != 1]
        for_weight = (g * (x - mean.reshape(shape)) * inverse).sum(places)
        return g * weight.reshape(shape) * inverse, None, None, for_weight, g.sum(places), None
