"""Training modes and random streams: leave the world as found."""

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
        for module in modules:
            module.eval()
        yield
    finally:
        for part, mode in modes:
            part.training = mode


@contextmanager
def same_random_state(device: torch.device) -> Iterator[None]:
    """torch's random streams (the host's and the device's) are put back afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


@contextmanager
def plain_attention() -> Iterator[None]:
    """Attention without torch's inference fast path, which vmap does not see through: it has no derivative there."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
