"""Layers that wait for what follows: on a GPU batch norm, an addition and ReLU become one kernel, second derivatives included.

Inside `fused()` the result of `F.batch_norm` is a `PendingTensor`, of which only the statistics are computed. ReLU makes it one
kernel, an addition waits for the ReLU after it, and anything else computes it first. Values and derivatives equal torch's
up to rounding (`kernels/triton_norm.py`); between the layers nothing is rounded to half precision. Without gradients and
with running statistics, batch norm becomes part of the convolution before it (`kernels/fused_conv.py`).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.kernels.fused_conv import PendingConvolution, lazy_convolution
from dissensus.kernels.layer_overrides import BatchNormArguments, LayerOverrides
from dissensus.kernels.lazy_tensor import PendingTensor, compute_pending, materialise
from dissensus.kernels.multi_tensor import can_run_kernels
from dissensus.utils.torch_modes import set_attributes, thread
from dissensus.utils.torch_private import BatchNorm, in_function_transform, version_of

LEAST = 2**15  # numbers in a tensor below which torch's own kernels are as fast
KINDS = (torch.float32, torch.bfloat16, torch.float64)
DEVICE = "cuda"  # "cpu" in tests that interpret the kernels


@contextmanager
def fuse_layers() -> Iterator[None]:
    """Inside, batch norm on a GPU is fused with the layers after it; not in compiled code or under function transforms."""
    if torch.compiler.is_compiling() or not thread.norms:
        yield
        return
    with set_attributes(thread, fusing=True), LayerOverrides(OVERRIDES):
        yield


def can_fuse_layers(templates: Iterable[nn.Module]) -> bool:
    """Whether kernels of fused layers may run for these networks, which a process must load first."""
    return any(isinstance(part, BatchNorm) for template in templates for part in template.modules())


def _read_unseen(function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """What is written there has no version."""
    vars(tensor).pop("again", None)
    compute_pending()
    return function(tensor, *args, **kwargs)


def lazy_batch_norm(otherwise: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """As `F.batch_norm`, but waiting if the kernels take this tensor; else `otherwise` of the same arguments."""
    arguments = BatchNormArguments(*args, **kwargs)
    input, running_mean, running_var, weight, bias, training, momentum, eps = arguments
    known = (running_mean is None) == (running_var is None) and (training or running_mean is not None)
    given = [each for each in (weight, bias, running_mean, running_var) if each is not None]
    packed = all(each.is_contiguous() and each.device == input.device for each in given)  # as the kernels read them
    usable = weight is not None and bias is not None and known and packed and (training or not torch.is_grad_enabled())
    fixed = usable and not training
    if fixed and isinstance(input, PendingConvolution) and input.result is None and can_run_kernels(input.device):
        return PendingNorm(input, weight, bias, running_mean, running_var, eps)  # type: ignore[arg-type]
    x = materialise(input)
    if not usable or not can_fuse(x):
        return otherwise(x, *arguments[1:])
    if not training:
        return PendingNorm(x, weight, bias, running_mean, running_var, eps)  # type: ignore[arg-type]
    with torch.no_grad():
        mean, rstd = _launch("statistics", x, running_mean, running_var, momentum, eps)
    for changed in (running_mean, running_var):
        if changed is not None:
            torch.autograd.graph.increment_version(changed)
    return PendingNorm(x, cast(Tensor, weight), cast(Tensor, bias), mean, rstd)


def can_fuse(x: Tensor) -> bool:
    """Whether the kernels can read x: on a GPU, not small, channels side by side in memory, not inside vmap."""
    if x.device.type != DEVICE or x.dtype not in KINDS or x.numel() < LEAST or x.numel() <= x.shape[1]:
        return False
    packed = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    packed = packed or (x.ndim == 2 and x.is_contiguous())
    packed = packed and not x.is_inference()  # it has no version, which tells whether it was changed
    return packed and not in_function_transform() and can_run_kernels(x.device)


OVERRIDES: dict[Any, Callable[..., Any]] = {
    F.batch_norm: lazy_batch_norm,
    torch.conv2d: lambda function, *args, **kwargs: lazy_convolution(*args, **kwargs),
    **dict.fromkeys((cast(Any, Tensor).data.__get__, Tensor.numpy, Tensor.untyped_storage), _read_unseen),
}


class PendingNorm(PendingTensor):
    """The result of a batch norm, perhaps with a tensor to be added to it."""

    parts: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # x, weight, bias, mean, and r or, with eps, the variance
    eps: float | None
    added: Tensor | None

    @staticmethod
    def __new__(
        cls, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, spread: Tensor, eps: float | None = None,
        added: Tensor | None = None,
    ) -> "PendingNorm":  # fmt: skip
        parts = (x, weight, bias, mean, spread)
        self = cast(PendingNorm, PendingTensor.__new__(cls, x.shape, x.dtype, x.device, (*parts, added)))
        self.parts, self.eps, self.added = parts, eps, added
        return self

    def compute_result(self, *, relu: bool) -> Tensor:
        x, weight, bias, mean, spread = self.parts
        if self.eps is None:
            found: Any = _FusedNorm.apply(x, weight, bias, self.added, mean, spread, relu)  # type: ignore[no-untyped-call]
            if self.added is None:
                given = (x, mean, spread, weight, bias)
                found.again = Recomputation(partial(_normalise, relu=relu), tuple(each.detach() for each in given))
            return cast(Tensor, found)
        if relu and self.can_fold:
            return cast(PendingConvolution, x).compute_norm_relu(self.added, mean, spread, weight, bias, self.eps)
        x, added = materialise(x), materialise(self.added)
        return cast(Tensor, _launch("normalise_rows", x, added, mean, spread, weight, bias, relu=relu, eps=self.eps))

    @property
    def can_fold(self) -> bool:
        """Whether it can become part of a convolution that has not run yet."""
        x = self.parts[0]
        return self.eps is not None and isinstance(x, PendingConvolution) and x.result is None

    def norm_and_shift(self) -> tuple[Tensor, Tensor]:
        """(the tensor without a shift of channels, the shift (C,)): for a kernel that adds both."""
        self.check_unchanged()
        x, weight, bias, mean, variance = self.parts
        return cast(PendingConvolution, x).norm_and_shift(mean, variance, weight, bias, self.eps)

    def fuse_addition(self, other: Any) -> PendingTensor | None:
        both = isinstance(other, PendingNorm) and other.result is None and other.added is None and other.can_fold
        if both and self.can_fold and self.added is None and other.facts == self.facts:
            return PendingNorm(*self.parts, self.eps, other)
        other, facts = materialise(other), self.facts
        fits = isinstance(other, Tensor) and (other.shape, other.dtype, other.device) == facts
        if self.added is not None or not fits or not can_fuse(other):
            return None
        return PendingNorm(*self.parts, self.eps, other)


class Recomputation(NamedTuple):
    """How a tensor is computed once more, by function(*tensors), so that a layer need not keep it until a second derivative.

    The first of the tensors has its shape, dtype and layout. They are kept for other layers anyway.
    """

    function: Callable[..., Tensor]
    tensors: tuple[Tensor | None, ...]

    @staticmethod
    def of_tensor(tensor: Tensor) -> "Recomputation | None":
        """That of a tensor that nobody has changed."""
        again: Recomputation | None = getattr(tensor, "again", None)
        return again if again is None or version_of(tensor) == 0 else None


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor, added: Tensor | None, m: Tensor, r: Tensor, relu: bool
    ) -> Tensor:
        y: Tensor = _launch("normalise_rows", x, added, m, r, w, b, relu=relu)
        ctx.relu, ctx.added = relu, added is not None
        ctx.save_for_backward(x, y if relu and ctx.added else None, m, r, w, b)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        g, saved = _match_layout(gradients[0], ctx.saved_tensors[0]), ctx.saved_tensors
        if torch.is_grad_enabled():
            by_x, by_added, sums = _FusedNormGradient.apply(g, *saved, ctx.relu)  # type: ignore[no-untyped-call]
            again = partial(_launch, "input_gradient", relu=ctx.relu)
            by_x.again = Recomputation(again, (g.detach(), *saved, sums.detach()))
        else:
            by_x, by_added, sums = _launch("gradients", g, *saved, relu=ctx.relu)
        by_w, by_b = sums.to(saved[4].dtype)
        return by_x, by_w, by_b, by_added if ctx.added else None, None, None, None


class _FusedNormGradient(torch.autograd.Function):
    """(J t, t, the sums) of `norm_launch.gradients`."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        *saved, ctx.relu = given
        by_x, by_added, sums = _launch("gradients", g, *saved, relu=ctx.relu)
        ctx.save_for_backward(g, *saved, sums)
        ctx.set_materialize_grads(False)
        return by_x, by_added.view_as(by_added) if by_added is g else by_added, sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (u, v, of_sums), (g, x, y, m, r, w, b, sums) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled() or of_sums is not None:
            raise NotImplementedError("batch norm has no third derivative")
        if u is None and v is None:
            return (None,) * 8
        u = torch.zeros_like(x) if u is None else _match_layout(u, x)
        v = None if v is None else _match_layout(v, x)
        by_g, by_x, by_w = _launch("second_gradients", u, v, g, x, y, m, r, w, b, sums, relu=ctx.relu)
        return by_g, by_x, None, None, None, by_w.to(w.dtype), None, None


def _launch(name: str, *given: Any, **how: Any) -> Any:
    """The function of this name in `kernels/norm_launch.py`, which imports Triton."""
    from dissensus.kernels import norm_launch

    return getattr(norm_launch, name)(*given, **how)


def _normalise(x: Tensor, *layer: Tensor, relu: bool) -> Tensor:
    return cast(Tensor, _launch("normalise_rows", x, None, *layer, relu=relu))


def _match_layout(g: Tensor, x: Tensor) -> Tensor:
    """The gradient in x's layout and dtype, as the kernels read it."""
    layout = torch.channels_last if x.ndim == 4 else torch.contiguous_format
    return g.to(x.dtype).contiguous(memory_format=layout)
