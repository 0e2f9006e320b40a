"""Lanes: CUDA streams for members, so that the small kernels of several run together."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from dissensus.core.particles import Lane


class Lanes:
    """A fixed number of streams that members take in turn."""

    def __init__(self, most: int = 10) -> None:
        self.most = most
        self.streams: list[torch.cuda.Stream] = []

    def for_members(self, count: int) -> tuple[Lane, Callable[[], None]]:
        """(lane, join): lane(i) is the context that member i runs in; join() makes the current stream wait for all."""
        while len(self.streams) < min(self.most, count):
            self.streams.append(torch.cuda.Stream())
        main = torch.cuda.current_stream()

        def lane(index: int) -> AbstractContextManager[object]:
            stream = self.streams[index % len(self.streams)]
            stream.wait_stream(main)  # what the member reads was written there
            return torch.cuda.stream(stream)

        def join() -> None:
            for stream in self.streams:
                main.wait_stream(stream)

        return lane, join
