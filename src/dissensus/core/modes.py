"""Training modes and switches: leave the world as found."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def eval_mode(*modules: nn.Module, parts: Sequence[nn.Module] | None = None) -> Iterator[None]:
    """Eval mode inside; every submodule's own mode is put back afterwards.

    `parts`: what `all_parts` found, for those who ask often: finding them costs as much as a layer of a network.
    """
    modes = [(part, part.training) for part in (all_parts(*modules) if parts is None else parts)]
    try:
        if any(mode for _, mode in modes):
            for module in modules:
                module.eval()
        yield
    finally:
        for part, mode in modes:
            if part.training != mode:  # setting one costs much more than a look
                part.training = mode


def all_parts(*modules: nn.Module) -> list[nn.Module]:
    """These modules and their submodules, each once."""
    return list({id(part): part for module in modules for part in module.modules()}.values())


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
