"""Context managers that change training modes and torch switches and restore them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from dissensus.utils.tensor_tree import all_submodules


class eval_mode:  # not a generator, which takes three times as long
    """Eval mode inside; afterwards every submodule's own mode is restored.

    `parts`: the result of `all_submodules`, for frequent callers: finding them takes as long as running a layer.
    """

    def __init__(self, *modules: nn.Module, parts: Sequence[nn.Module] | None = None) -> None:
        self.modules, self.parts = modules, parts

    def __enter__(self) -> None:
        self.parts = all_submodules(*self.modules, trees=False) if self.parts is None else self.parts
        self.modes = [part.training for part in self.parts]
        if any(self.modes):
            try:
                for module in self.modules:
                    module.eval()
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *_: object) -> None:
        for part, mode in zip(self.parts or (), self.modes, strict=True):
            if part.training != mode:  # setting a mode costs much more than reading it
                part.training = mode


@contextmanager
def plain_attention() -> Iterator[None]:
    """Inside, attention runs without torch's inference fast path, which supports neither vmap nor hooks."""
    # The switch acts on the whole process, so networks with attention run under the process lock (`core/member_runner.py`).
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
