"""Training modes and switches: leave the world as found."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def eval_mode(*modules: nn.Module) -> Iterator[None]:
    """Eval mode inside; every submodule's own mode is put back afterwards."""
    every = {id(part): part for module in modules for part in module.modules()}
    modes = [(part, part.training) for part in every.values()]
    try:
        if any(mode for _, mode in modes):
            for module in modules:
                module.eval()
        yield
    finally:
        for part, mode in modes:
            if part.training != mode:  # setting one costs much more than a look
                part.training = mode


@contextmanager
def plain_attention(wanted: bool = True) -> Iterator[None]:
    """Inside, if wanted, attention runs without torch's inference fast path, which has no vmap and calls no hooks.

    The switch is one of the whole process: networks with attention run under the lock of the process (`core.turns`).
    """
    if not wanted:
        yield
        return
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
