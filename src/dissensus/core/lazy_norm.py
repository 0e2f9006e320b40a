"""Batch norm that waits for what follows, so that batch norm, an added tensor and ReLU become one kernel on a GPU.

Inside `fused()` the result of `F.batch_norm` is a `Pending` tensor, of which only the statistics are computed. ReLU makes it
one kernel, an addition waits for the ReLU after it, and anything else computes it first. Values and derivatives, second ones
included, equal torch's up to rounding (`numerics/norm_kernels.py`); between the layers nothing is rounded to half precision.
"""

import functools
import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

LEAST = 2**15  # numbers in a tensor below which torch's own kernels are as fast
KINDS = (torch.float32, torch.bfloat16, torch.float64)
RELUS = {F.relu: False, torch.relu: False, Tensor.relu: False, F.relu_: True, torch.relu_: True, Tensor.relu_: True}
SUMS = {
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), False),
    **dict.fromkeys((Tensor.add_, Tensor.__iadd__), True),
}
# Read from the input of batch norm, which has the same
FACTS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__, Tensor.is_complex),
}


@contextmanager
def fused() -> Iterator[None]:
    """Inside, batch norm on a GPU is fused with the layers after it; not in compiled code or under function transforms."""
    if torch.compiler.is_compiling() or not kernels_there() or not thread.norms:
        yield
        return
    before, thread.fusing = thread.fusing, True
    try:
        with _Waiting():
            yield
    finally:
        thread.fusing = before


class _Thread(threading.local):
    norms = True  # whether batch norm may take other forms: not if its statistics span several processes
    fusing = False  # whether `fused` is active


thread = _Thread()


@functools.cache
def kernels_there() -> bool:
    return importlib.util.find_spec("triton") is not None


class Unfused(RuntimeError):
    """The network reads a waiting tensor in a way that loses gradients; run it without `fused`."""


class _Waiting(TorchFunctionMode):
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        return waiting(*args, **(kwargs or {}))


def waiting(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    otherwise: Callable[..., Tensor] = F.batch_norm,
) -> Tensor:
    """As `F.batch_norm`, but waiting if the kernels take this tensor; else `otherwise` of the same arguments."""
    x = settled(input)
    known = (running_mean is None) == (running_var is None) and (training or running_mean is not None)
    if weight is None or bias is None or not known or not takes(x) or (not training and torch.is_grad_enabled()):
        return otherwise(x, running_mean, running_var, weight, bias, training, momentum, eps)
    if not training:
        mean, spread = cast(Tensor, running_mean), cast(Tensor, running_var)
        return Pending(x, weight, bias, mean, spread, eps)
    from dissensus.numerics import norm_kernels  # imports Triton

    with torch.no_grad():
        mean, rstd = norm_kernels.statistics(x, running_mean, running_var, momentum, eps)
    for changed in (running_mean, running_var):
        if changed is not None:
            torch.autograd.graph.increment_version(changed)
    return Pending(x, weight, bias, mean, rstd, None)


def takes(x: Tensor) -> bool:
    """Whether the kernels can read x: on a GPU, not small, channels side by side in memory, not inside vmap."""
    if x.device.type != DEVICE or x.dtype not in KINDS or x.numel() < LEAST or x.numel() <= x.shape[1]:
        return False
    packed = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return (packed or (x.ndim == 2 and x.is_contiguous())) and torch._C._functorch.peek_interpreter_stack() is None


DEVICE = "cuda"  # "cpu" in tests that interpret the kernels


class Pending(Tensor):
    """The result of a batch norm that is not yet computed, perhaps with a tensor to be added to it.

    The first use decides what is computed. A use outside of torch's Python functions (a scripted module, a custom
    `autograd.Function`) would lose gradients and raises `Unfused`.
    """

    parts: tuple[Tensor, ...]  # x, weight, bias, mean, r or the variance
    eps: float | None  # if the variance is given
    added: Tensor | None
    graph: bool
    found: Tensor | None

    @staticmethod
    def __new__(
        cls, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, spread: Tensor, eps: float | None,
        added: Tensor | None = None,
    ) -> "Pending":  # fmt: skip
        self: Pending = Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)  # type: ignore[attr-defined]
        self.parts, self.eps, self.added, self.found = (x, weight, bias, mean, spread), eps, added, None
        self.graph = torch.is_grad_enabled()
        return self

    def value(self) -> Tensor:
        """The tensor, computed at the first use."""
        if self.found is None:
            self.found = self.computed(relu=False)
        return self.found

    def computed(self, *, relu: bool) -> Tensor:
        if self.graph and not torch.is_grad_enabled():
            raise Unfused("a result of batch norm is read without gradients, as custom functions do")
        x, weight, bias, mean, spread = self.parts
        if self.eps is not None:
            from dissensus.numerics import norm_kernels

            return norm_kernels.normalised(x, self.added, mean, spread, weight, bias, relu=relu, eps=self.eps)
        found: Tensor = _Norm.apply(x, weight, bias, self.added, mean, spread, relu)  # type: ignore[no-untyped-call]
        return found

    def plus(self, other: Any) -> "Pending | None":
        """This one with a tensor added; None if that cannot be part of the kernel."""
        other, x = settled(other), self.parts[0]
        fits = isinstance(other, Tensor) and (other.shape, other.dtype, other.device) == (x.shape, x.dtype, x.device)
        if self.found is not None or self.added is not None or not fits or not takes(other):
            return None
        return Pending(*self.parts, self.eps, other)  # type: ignore[arg-type]

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in FACTS and isinstance(first, Pending):
            return func(first.parts[0], *args[1:], **kwargs)
        if func in RELUS and isinstance(first, Pending) and first.found is None:
            made = first.computed(relu=True)
            if RELUS[func] or kwargs.get("inplace") or True in args[1:2]:
                first.found = made  # other references to this tensor see the change
            return made
        if func in SUMS and len(args) == 2 and not kwargs:
            mine, other = args if isinstance(first, Pending) else reversed(args)
            if (sum := mine.plus(other)) is not None and (not SUMS[func] or mine is first):
                if SUMS[func]:
                    mine.parts, mine.added = sum.parts, sum.added
                    return mine
                return sum
        args, kwargs = settled((args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Unfused(f"{func} reads a result of batch norm past torch's Python functions")


def settled(tree: Any) -> Any:
    """The tree with waiting tensors computed."""
    return pytree.tree_map_only(Pending, Pending.value, tree)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor, added: Tensor | None, m: Tensor, r: Tensor, relu: bool
    ) -> Tensor:
        from dissensus.numerics import norm_kernels

        y = norm_kernels.normalised(x, added, m, r, w, b, relu=relu)
        ctx.relu, ctx.added = relu, added is not None
        ctx.save_for_backward(x, y if relu and ctx.added else None, m, r, w, b)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        g, saved = _like(gradients[0], ctx.saved_tensors[0]), ctx.saved_tensors
        if torch.is_grad_enabled():
            by_x, by_added, sums = _Pulled.apply(g, *saved, ctx.relu)  # type: ignore[no-untyped-call]
        else:
            by_x, by_added, sums = _first(g, *saved, ctx.relu)
        by_w, by_b = sums.to(saved[4].dtype)
        return by_x, by_w, by_b, by_added if ctx.added else None, None, None, None


class _Pulled(torch.autograd.Function):
    """(J t, t, the sums) of `norm_kernels.gradients`."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        by_x, by_added, sums = _first(g, *given)
        *saved, ctx.relu = given
        ctx.save_for_backward(g, *saved, sums)
        ctx.set_materialize_grads(False)
        return by_x, by_added.view_as(by_added) if by_added is g else by_added, sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        from dissensus.numerics import norm_kernels

        (u, v, of_sums), (g, x, y, m, r, w, b, sums) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled() or of_sums is not None:
            raise NotImplementedError("batch norm has no third derivative")
        if u is None and v is None:
            return (None,) * 8
        u = torch.zeros_like(x) if u is None else _like(u, x)
        v = None if v is None else _like(v, x)
        by_g, by_x, by_w = norm_kernels.second_gradients(u, v, g, x, y, m, r, w, b, sums, relu=ctx.relu)
        return by_g, by_x, None, None, None, by_w.to(w.dtype), None, None


def _first(g: Tensor, x: Tensor, y: Tensor | None, m: Tensor, r: Tensor, w: Tensor, b: Tensor, relu: bool) -> Any:
    from dissensus.numerics import norm_kernels

    return norm_kernels.gradients(g, x, y, m, r, w, b, relu=relu)


def _like(g: Tensor, x: Tensor) -> Tensor:
    """The gradient in x's layout and dtype, as the kernels read it."""
    layout = torch.channels_last if x.ndim == 4 else torch.contiguous_format
    return g.to(x.dtype).contiguous(memory_format=layout)
