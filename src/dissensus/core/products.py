"""Small matrix products on Arm processors, where calling oneDNN costs more than the product.

There `F.linear` and every product with a transposed operand take at least 0.4 ms, for any size: 16 × 200 by 200 × 200 takes
0.43 ms with oneDNN and 0.06 ms without, sixteen stacked 50 × 50 by 50 × 50 take 7.9 and 0.2 ms (torch 2.13, aarch64, one
core). With a million weights per layer or more, oneDNN is faster by up to 15 %; convolutions need it.
"""

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

SMALL = 2**19  # most weights of a linear layer for which oneDNN is avoided


def on_arm() -> bool:
    return platform.machine().lower() in ("aarch64", "arm64")


def small_products(network: nn.Module) -> bool:
    """Whether to avoid oneDNN: on Arm, for networks that compute only small matrix products."""
    if not on_arm() or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    layers = list(network.modules())
    if any(isinstance(layer, nn.modules.conv._ConvNd | nn.RNNBase) for layer in layers):
        return False
    sizes = [layer.in_features * layer.out_features for layer in layers if isinstance(layer, nn.Linear)]
    return bool(sizes) and max(sizes) <= SMALL


@contextmanager
def without_onednn(wanted: bool = True) -> Iterator[None]:
    """Inside, if wanted, matrix products on the CPU run without oneDNN."""
    before = torch._C._get_mkldnn_enabled()  # torch.backends.mkldnn.flags would change other settings, too, and warn
    if not wanted or not before:
        yield
        return
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
