"""Between whole levels 0 … 255 and fractions in [0, 1]."""

import torch
from torch import Tensor


def from_levels(levels: Tensor) -> Tensor:
    """levels / 255, correctly rounded: 255 times the result, truncated, gives the level back."""
    return quotient(levels, 255.0)


def quotient(numbers: Tensor, divisor: float) -> Tensor:
    """numbers / divisor, correctly rounded on every device.

    CUDA divides by a Python number by multiplying with its reciprocal: for a ninth of all k, 255·(k/255) then truncates
    to k − 1.
    """
    return numbers / torch.full((), divisor, dtype=numbers.dtype, device=numbers.device)
