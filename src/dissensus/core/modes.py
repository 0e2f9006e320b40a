"""Context managers that change training modes and torch switches and restore them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def eval_mode(*modules: nn.Module, parts: Sequence[nn.Module] | None = None) -> Iterator[None]:
    """Eval mode inside; afterwards every submodule's own mode is restored.

    `parts`: the result of `all_parts`, for frequent callers: finding them takes as long as running a layer.
    """
    modes = [(part, part.training) for part in (all_parts(*modules) if parts is None else parts)]
    try:
        if any(mode for _, mode in modes):
            for module in modules:
                module.eval()
        yield
    finally:
        for part, mode in modes:
            if part.training != mode:  # setting a mode costs much more than reading it
                part.training = mode


def all_parts(*modules: nn.Module) -> list[nn.Module]:
    """These modules and their submodules, each once."""
    return list({id(part): part for module in modules for part in module.modules()}.values())


@contextmanager
def plain_attention(wanted: bool = True) -> Iterator[None]:
    """Inside, if wanted, attention runs without torch's inference fast path, which supports neither vmap nor hooks.

    The switch acts on the whole process, so networks with attention run under the process lock (`core.turns`).
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
