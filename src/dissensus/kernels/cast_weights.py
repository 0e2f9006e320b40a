"""A member's weights in half precision, cast all at once, for the layers that mixed precision runs in half precision.

Autocast casts each weight at each use, and its gradient back: two small kernels a layer and member. Inside
`use_cast_weights` one kernel casts all of a member's weights, and gradients stay in half precision until they are copied to
where they are wanted.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dissensus.kernels.multi_copy import copy_all
from dissensus.utils.tensor_tree import Tensors
from dissensus.utils.torch_private import in_function_transform

DEVICE = "cuda"  # "cpu" in tests


class CastWeights:
    """Copies of weights in half precision; `gradients`: those by the copies, by the weight's name.

    Args:
        leaves: the weights, leaves that require gradients.
    """

    def __init__(self, leaves: Tensors, dtype: torch.dtype) -> None:
        large = {name: leaf for name, leaf in leaves.items() if leaf.ndim > 1 and leaf.dtype == torch.float32}
        made = {name: torch.empty_like(leaf, dtype=dtype, requires_grad=False) for name, leaf in large.items()}
        with torch.no_grad():
            copy_all(list(made.values()), list(large.values()))
        self.dtype = dtype
        self.gradients: dict[str, list[Tensor]] = {}
        self.wanted = False  # whether gradients are kept here, and not passed on to the weights
        self._known = {id(leaf): (leaf, leaf._version, name, made[name]) for name, leaf in large.items()}

    def cast_copy(self, weight: Tensor) -> Tensor:
        """The weight's copy, if autocast would make the same; else the weight."""
        leaf, version, name, made = self._known.get(id(weight), (None, 0, "", weight))
        transformed = in_function_transform()
        if leaf is None or leaf._version != version or transformed or not _casts_to(self.dtype):
            return weight
        found: Tensor = _CastWeight.apply(leaf, made, name, self)  # type: ignore[no-untyped-call]
        return found

    def merge_gradients(self, found: Tensors) -> Tensors:
        """Gradients by the weights, with those by their copies added; the latter alone stay in half precision."""
        for name, each in self.gradients.items():
            if name not in found and len(each) == 1:
                found[name] = each[0]
                continue
            for gradient in each:
                found[name] = found[name] + gradient if name in found else gradient.float()
        return found


class _CastWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, made: Tensor, name: str, halves: CastWeights) -> Tensor:
        ctx.name, ctx.halves, ctx.dtype = name, halves, leaf.dtype
        return made.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        (g,) = gradients
        if ctx.halves.wanted and not torch.is_grad_enabled():
            ctx.halves.gradients.setdefault(ctx.name, []).append(g)
            return None, None, None, None
        return g.to(ctx.dtype), None, None, None


class _Thread(threading.local):
    halves: CastWeights | None = None


_thread = _Thread()


@contextmanager
def use_cast_weights(leaves: Tensors, *, usable: bool) -> Iterator[CastWeights | None]:
    """Inside, `half` gives copies of these weights; if usable, on a GPU, in mixed precision."""
    dtype = torch.get_autocast_dtype(DEVICE)
    usable = usable and bool(leaves) and all(leaf.device.type == DEVICE for leaf in leaves.values())
    if not usable or not _casts_to(dtype) or torch.compiler.is_compiling():
        yield None
        return
    before, _thread.halves = _thread.halves, CastWeights(leaves, dtype)
    try:
        yield _thread.halves
    finally:
        _thread.halves = before


def cast_weight(weight: Tensor) -> Tensor:
    """The weight, or, where it would be cast to half precision, a copy of it that was cast before."""
    return weight if _thread.halves is None else _thread.halves.cast_copy(weight)


def _casts_to(dtype: torch.dtype) -> bool:
    return torch.is_autocast_enabled(DEVICE) and torch.get_autocast_dtype(DEVICE) == dtype
