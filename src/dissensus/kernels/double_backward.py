"""Convolutions and batch norm in forms whose second derivatives are fast; values and derivatives equal torch's.

Members compared by input gradients are differentiated twice: ∇_θ ⟨v, ∇_x f⟩. Two layers make this slow in torch. The
gradient of a convolution's weights is a convolution whose kernel is as large as the image, and batch norm takes about ninety
operations. (PReLU takes fewer as a product.) Below, t and u are gradients by a layer's output and by its input gradient.

A convolution y = w ∗ x has the input gradient w ∗ᵀ t. Its derivative by t is w ∗ u, and its derivative by w is the ordinary
weight gradient of a convolution of u: one kernel each.

Batch norm, of n values per channel: x̂ = (x − m) r, r = 1 / √(var + ε), ⟨·⟩ the mean over them. The input gradient is

    J t = w r (t − ⟨t⟩ − x̂ ⟨x̂ t⟩),

and J is symmetric: the derivative of Σ u · J t by t is J u. By x and by w it is

    −w r² (x̂ (cov(t, u) − 3 ⟨x̂ t⟩⟨x̂ u⟩) + ⟨x̂ u⟩ (t − ⟨t⟩) + ⟨x̂ t⟩ (u − ⟨u⟩)),    n r (cov(t, u) − ⟨x̂ t⟩⟨x̂ u⟩).

torch's kernel for J t also gives Σ x̂ t and Σ t, the gradients by weight and bias, and n r cov(t, u) with u in the place of x.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.kernels.fused_norm import Recomputation, lazy_batch_norm
from dissensus.kernels.layer_overrides import BatchNormArguments, LayerOverrides
from dissensus.kernels.lazy_tensor import materialise
from dissensus.utils.torch_modes import thread
from dissensus.utils.torch_private import will_run

aten = torch.ops.aten
SMALL = 2**15  # below this size of an input, on a CPU, the overhead of Python exceeds the gain
# Settings of convolutions in the order of their arguments
PLAIN = ("stride", "padding", "dilation", "groups")
TRANSPOSED = ("stride", "padding", "output_padding", "groups", "dilation")
DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0, "groups": 1}
SETTINGS: dict[Callable[..., Tensor], tuple[str, ...]] = {
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), PLAIN),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), TRANSPOSED),
}


@contextmanager
def fast_second_derivatives(*, of_any_size: bool = False) -> Iterator[None]:
    """Inside, layers use these forms for derivatives by inputs only; not in compiled code, nor without a graph.

    `of_any_size`: also for small layers on a CPU.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        yield
        return
    stage, small = _BackwardStage(), 0 if of_any_size else SMALL

    def use_form(form: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The form, but torch's own for a small input on a CPU."""

        def run(function: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if input.device.type == "cpu" and input.numel() < small:
                return function(input, *args, **kwargs)
            (input, *args), kwargs = materialise(((input, *args), kwargs))
            return form(function, input, *args, **kwargs)

        return run

    def normalise(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if thread.fusing:
            return lazy_batch_norm(batch_norm, *args, **kwargs)
        return use_form(lambda _, *a, **k: batch_norm(*a, **k))(function, *args, **kwargs)

    convolve = use_form(partial(double_backward_conv, stage))
    table = {torch.prelu: use_form(prelu_as_product), **dict.fromkeys(SETTINGS, convolve)}
    try:
        with LayerOverrides(table | ({F.batch_norm: normalise} if thread.norms else {})):
            yield
    finally:
        stage.by_inputs_alone = False


class _BackwardStage:
    """Tells a layer's backward pass, in any thread, whether the context is active, so that weights need no gradients."""

    by_inputs_alone = True


def double_backward_conv(
    stage: _BackwardStage,
    func: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *settings: Any,
    **named: Any,
) -> Tensor:
    """The same result as `func`, one of torch's convolutions."""
    given = DEFAULTS | dict(zip(SETTINGS[func], settings, strict=False)) | named
    unbatched = input.ndim != weight.ndim
    # "same" may pad the two sides differently.
    if unbatched or weight.is_complex() or isinstance(given["padding"], str):
        return func(input, weight, bias, *settings, **named)
    names = ("stride", "padding", "dilation", "output_padding")
    stride, padding, dilation, output_padding = (_per_axis(given[name], weight.ndim - 2) for name in names)
    how = (stride, padding, dilation, SETTINGS[func] is TRANSPOSED, output_padding, given["groups"])
    # If the kernel depends on the inputs, its gradient is differentiated, too, by the convolution's input.
    if not weight.is_leaf:
        vars(input).pop("again", None)
    x, w, *b = _cast_as_autocast(input, weight, *(() if bias is None else (bias,)))
    return _Convolution.apply(x, w, b[0] if b else None, stage, *how)  # type: ignore[no-untyped-call]


def _per_axis(value: Any, axes: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * axes if len(values) == 1 else values


def _cast_as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors cast as in mixed precision, before a function, so that the tensors it saves have one dtype."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or tensors[0].dtype == torch.float64:
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)


class _Convolution(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor | None, stage: _BackwardStage, *how: Any) -> Tensor:
        return torch.convolution(x, w, b, *how)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, b, ctx.stage, *ctx.how = inputs
        _save_tensor(ctx, x, w)
        ctx.bias = None if b is None else list(b.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (t,), (w, *_) = gradients, ctx.saved_tensors
        for_x, for_w, for_b = ctx.needs_input_grad[:3]
        if ctx.stage.by_inputs_alone:
            for_w, for_b = (_leads_to_inputs(ctx, i) for i in (1, 2))
        x = _saved_tensor(ctx, value=for_w)
        if not torch.is_grad_enabled():
            found = aten.convolution_backward(t, x, w, ctx.bias, *ctx.how, [for_x, for_w, for_b])
            return *found, *[None] * (1 + len(ctx.how))
        by_x = _ConvolutionGradient.apply(t, w, x, *ctx.how) if for_x else None  # type: ignore[no-untyped-call]
        by_w = by_b = None
        if for_w or for_b:
            _, by_w, by_b = aten.convolution_backward(t, x, w, ctx.bias, *ctx.how, [False, for_w, for_b])
        return by_x, by_w, by_b, *[None] * (1 + len(ctx.how))


def _leads_to_inputs(ctx: Any, i: int) -> bool:
    """Whether the i-th argument of a layer depends on the inputs that are differentiated by: a kernel may do so."""
    node = ctx.next_functions[i][0] if i < len(ctx.next_functions) else None
    if node is None or hasattr(node, "variable"):  # a leaf, so a weight: the derivative is by x only
        return False
    return will_run(node)


class _ConvolutionGradient(torch.autograd.Function):
    """w ∗ᵀ t, the gradient of a convolution by x; of x only the shape is used."""

    generate_vmap_rule = True

    @staticmethod
    def forward(t: Tensor, w: Tensor, x: Tensor, *how: Any) -> Tensor:
        return aten.convolution_backward(t, x, w, None, *how, [True, False, False])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        t, w, _, *ctx.how = inputs
        _save_tensor(ctx, t, w)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (u,), (w, *_) = gradients, ctx.saved_tensors
        by_w = None
        if ctx.needs_input_grad[1]:
            by_w = aten.convolution_backward(_saved_tensor(ctx), u, w, None, *ctx.how, [False, True, False])[1]
        return torch.convolution(u, w, None, *ctx.how), by_w, *[None] * (1 + len(ctx.how))


def _save_tensor(ctx: Any, tensor: Tensor, w: Tensor) -> None:
    """Keeps w and the tensor, or, if it can be computed again, what that takes: faster than memory fills up."""
    again = Recomputation.of_tensor(tensor)
    ctx.again = None if again is None else again.function
    ctx.save_for_backward(w, *((tensor,) if again is None else again.tensors))


def _saved_tensor(ctx: Any, *, value: bool = True) -> Tensor:
    """The tensor; unless its value is wanted, one of its shape, dtype and layout may do."""
    _, first, *others = ctx.saved_tensors
    if ctx.again is None or not value:
        return first
    if torch.is_grad_enabled():
        raise NotImplementedError("what a fused batch norm computes again has no derivatives")
    return ctx.again(first, *others)


def prelu_as_product(_: Callable[..., Tensor], input: Tensor, weight: Tensor) -> Tensor:
    """PReLU as a product: x if it is positive, else w x."""
    x, w = _cast_as_autocast(input, weight)
    channels = w if w.numel() == 1 or x.ndim < 2 else w.reshape(-1, *[1] * (x.ndim - 2))
    return x * torch.where(x > 0, 1.0, channels)


def batch_norm(*args: Any, **kwargs: Any) -> Tensor:
    """The same result as `F.batch_norm`; uses torch's form with running statistics (independent of x) or without weights."""
    x, mean, var, weight, bias, training, momentum, eps = arguments = BatchNormArguments(*args, **kwargs)
    if not training or weight is None or bias is None or x.numel() <= x.shape[1]:
        return F.batch_norm(*arguments)
    return _BatchNorm.apply(x, weight, bias, mean, var, momentum, eps)[0]  # type: ignore[no-untyped-call]


class _BatchNorm(torch.autograd.Function):
    """(y, m, r); running statistics are updated in place."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, b: Tensor, mean: Tensor | None, var: Tensor | None, momentum: float, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.native_batch_norm(x, w, b, mean, var, True, momentum, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:2], *output[1:])
        ctx.eps = inputs[-1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradients[0] is None:
            return (None,) * 7
        pull: Callable[..., Any] = _BatchNormGradient.apply if torch.is_grad_enabled() else _norm_kernel
        return *pull(gradients[0], *ctx.saved_tensors, ctx.eps), None, None, None, None


class _BatchNormGradient(torch.autograd.Function):
    """(J t, Σ x̂ t, Σ t): the gradients by x, weight and bias."""

    generate_vmap_rule = True

    @staticmethod
    def forward(t: Tensor, x: Tensor, w: Tensor, m: Tensor, r: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        return _norm_kernel(t, x, w, m, r, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:5], *output[1:])
        ctx.eps = inputs[-1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (u, *of_sums), (t, x, w, m, r, sum_xt, sum_t) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled() or any(each is not None for each in of_sums):
            raise NotImplementedError("batch norm has no third derivative")
        if u is None:
            return (None,) * 6
        n = x.numel() // x.shape[1]
        by_t, sum_xu, sum_u = _norm_kernel(u, x, w, m, r, ctx.eps)
        mean_u = sum_u / n
        q = _norm_kernel(t, u, w, mean_u, r, ctx.eps, (False, True, False))[1]  # n r cov(t, u)
        k, p = w * r.square() / n, r * sum_xt  # (C,)
        for_x = k * torch.addcmul(q, p, sum_xu, value=-3 / n)
        for_t, for_u = k * sum_xu, k * sum_xt
        rest = torch.addcmul(for_x * m, for_u, mean_u).addcmul(for_t, sum_t, value=1 / n)

        def channels(each: Tensor) -> Tensor:
            return each.reshape(-1, *[1] * (x.ndim - 2))

        # for_x uses m although it cancels far from 0: m is no more exact than that, and x − m would take one more pass.
        by_x = torch.addcmul(channels(rest), x, channels(for_x), value=-1)
        by_x = by_x.addcmul(t, channels(for_t), value=-1).addcmul(u, channels(for_u), value=-1)
        return by_t, by_x.to(x.dtype), torch.addcmul(q, p, sum_xu, value=-1 / n), None, None, None


def _norm_kernel(
    t: Tensor, x: Tensor, w: Tensor, m: Tensor, r: Tensor, eps: float, wanted: tuple[bool, ...] = (True, True, True)
) -> tuple[Tensor, Tensor, Tensor]:
    again = aten.native_batch_norm_backward
    return again(t, x, w, None, None, m, r, True, eps, list(wanted))
