"""Triton kernels for activations times factors of their channels, and for batch norm with frozen statistics.

A backward pass needs the gradient times a factor, and the sum over positions of gradient times activation. For that torch
reads and writes memory of the activations' size six times; these kernels read it twice and write it once. They are used on a
GPU with triton, which every CUDA build of torch for Linux has; callers can compute the same without them.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dissensus.utils.torch_private import is_transformed

log = logging.getLogger("dissensus")

TYPES = (torch.float32, torch.float16, torch.bfloat16)
FEWEST = 128  # with fewer programs, most of a GPU would be idle
TILE = 4096  # numbers that a program processes at a time


_waiting, _wanting = set[object](), set[object]()  # runs that may be too short to load triton; those with a use for it


@contextmanager
def load_later() -> Iterator[None]:
    """Inside, the kernels run once somebody has loaded them, as `load_wanted` does; else their users do without."""
    _waiting.add(run := object())
    try:
        yield
    finally:
        _waiting.discard(run)


def load_wanted() -> None:
    """Loads the kernels if a run had a use for them: it is long enough."""
    if _wanting:
        find_triton()


class Layout(NamedTuple):
    """x as (examples, channels, places), or with channels innermost in memory as (examples, places, channels)."""

    examples: int
    channels: int
    places: int
    innermost: bool


def channel_layout(x: Tensor, *, channels_last: bool = False) -> Layout | None:
    """Memory layout of x (N, C, ...), or (N, ..., C) if `channels_last`; None if the kernels do not support it."""
    if not x.is_cuda or x.dtype not in TYPES or x.ndim < 3 or x.numel() == 0 or is_transformed(x):
        return None
    if _waiting and not find_triton.cache_info().currsize:
        _wanting.update(_waiting)
        return None
    if find_triton() is None or (x.dtype is torch.bfloat16 and not takes_bfloat16(x.device)):
        return None
    innermost, by_place = channels_last or not x.is_contiguous(), x if channels_last else x.movedim(1, -1)
    if innermost and not by_place.is_contiguous():
        return None
    found = Layout(len(x), by_place.shape[-1], by_place[0, ..., 0].numel(), innermost)
    programs = found.examples * (-(-found.channels // 128) if innermost else found.channels)
    return None if programs < FEWEST else found


def match_layout(g: Tensor, y: Tensor) -> Tensor:
    """g with the memory layout and dtype of y."""
    return g if g.stride() == y.stride() and g.dtype == y.dtype else torch.empty_like(y).copy_(g)


@cache
def find_triton() -> Any:
    """The kernels; None without triton, or if it cannot build them (no C compiler, an old GPU)."""
    try:
        from dissensus.kernels import triton_channels

        tried = torch.ones(64, device="cuda")  # one example of two channels and 32 positions
        triton_channels.times_program[(2,)](tried, tried, torch.empty_like(tried), 3, 32, 2, 1, 32, ROWS=32, WIDTH=1)
    except Exception as error:  # a compiler may raise anything
        log.info(
            "latents and frozen batch norm run without the library's fast kernels (%s)",
            str(error).strip().partition("\n")[0],
        )
        return None
    return triton_channels


@cache
def takes_bfloat16(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def multiply_channels(x: Tensor, factors: Tensor, at: Layout) -> Tensor:
    """x times factors (N, C)."""
    y = torch.empty_like(x)
    _launch("times", at, x, factors, y, factors.stride(0))
    return y


def multiply_backward(g: Tensor, y: Tensor, factors: Tensor, at: Layout) -> tuple[Tensor, Tensor]:
    """(g times factors, (Σ over positions of g y) / factors); the latter is (N, C), and 0 where the factor is 0."""
    for_x = torch.empty_like(g)
    for_factors = torch.empty(at.examples, at.channels, dtype=factors.dtype, device=g.device)
    _launch("times_backward", at, g, y, factors, for_x, for_factors, factors.stride(0))
    return for_x, for_factors


def normalise_channels(x: Tensor, m: Tensor, v: Tensor, weight: Tensor, bias: Tensor, eps: float, at: Layout) -> Tensor:
    """(x − m) / √(v + eps) · weight + bias, each (C,)."""
    y = torch.empty_like(x)
    _launch("normed", at, x, m, v, weight, bias, y, eps)
    return y


def normalise_backward(
    g: Tensor, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, eps: float, at: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for (x, weight, bias)."""
    for_x = torch.empty_like(g)
    sums = torch.empty(2, at.examples, at.channels, dtype=torch.float32, device=g.device)
    _launch("normed_backward", at, g, x, mean, var, weight, for_x, *sums, eps)
    for_weight, for_bias = sums.sum(1).to(weight.dtype)
    return for_x, for_weight, for_bias


def _launch(program: str, at: Layout, first: Tensor, *others: Any) -> None:
    """Runs the program over tiles of up to TILE numbers: several channels if these are innermost in memory, else one."""
    width = min(_next_power_of_two(at.channels), 128) if at.innermost else 1
    steps = (at.channels, 1) if at.innermost else (1, at.places)
    grid = (at.examples * -(-at.channels // width),)
    with torch.cuda.device(first.device):
        kernel = getattr(find_triton(), f"{program}_program")[grid]
        rows = min(_next_power_of_two(at.places), TILE // width)
        kernel(first, *others, at.places, at.channels, *steps, ROWS=rows, WIDTH=width)


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
