"""The engine's runner of members, in place of the plain one: layers and products in the form that is fastest."""

import threading
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from dissensus.core.modes import plain_attention
from dissensus.core.running import Lane, Rows, Runner, loop
from dissensus.engine.products import small_products, without_onednn
from dissensus.engine.stacking import StackedLinear, has_own_convolution


class FastRunner(Runner):
    """Own convolutions one after the other, own linear layers stacked, small products past oneDNN, members in lanes."""

    def __init__(self, template: nn.Module, own: Set[int]) -> None:
        super().__init__(template, own)
        self.how = "loop" if has_own_convolution(template, own) else "vectorised"
        self.linear = StackedLinear(template, own=own)
        self.small_products = small_products(template)
        self.lanes: tuple[int, Lane, Callable[[], None]] | None = None  # in use by the thread of this id

    def running(self) -> AbstractContextManager[object]:
        return without_onednn(self.small_products)

    @contextmanager
    def vectorising(self, device: torch.device) -> Iterator[None]:
        """The context of vmap over members: layers in forms that vmap can handle and that are fast."""
        with plain_attention(self.attention), self.linear.on(device):
            yield

    def one_by_one(self, one: Callable[[Rows], Any], rows: Rows, count: int) -> Any:
        lanes = self.lanes
        mine = lanes[1:] if lanes is not None and lanes[0] == threading.get_ident() else ()
        return loop(one, rows, count, *mine)


@contextmanager
def in_lanes(runner: Runner, lane: Lane, join: Callable[[], None]) -> Iterator[None]:
    """Inside, member i of a loop runs in lane(i), a CUDA stream for example; join() waits for all.

    Runners other than `FastRunner` ignore lanes.
    """
    if not isinstance(runner, FastRunner):
        yield
        return
    runner.lanes = (threading.get_ident(), lane, join)
    try:
        yield
    finally:
        runner.lanes = None
