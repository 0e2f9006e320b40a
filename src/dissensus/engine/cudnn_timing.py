"""cuDNN's algorithms of convolutions, chosen by timing for shapes that stay the same."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def timed_convolutions(device: torch.device) -> Iterator[None]:
    """Inside, cuDNN times its algorithms for every convolution of a shape that it meets for the first time.

    It keeps the choice, also for graphs and for steps outside. Only on a GPU, and only if the user does not want
    deterministic results: two runs may choose algorithms that round differently.
    """
    cudnn, before = torch.backends.cudnn, torch.backends.cudnn.benchmark
    wanted = device.type == "cuda" and not (cudnn.deterministic or torch.are_deterministic_algorithms_enabled())
    cudnn.benchmark = before or wanted
    try:
        yield
    finally:
        cudnn.benchmark = before
