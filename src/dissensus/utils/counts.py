"""Counts kept on a device, whose value is known on the host."""

from typing import Any

import torch
from torch import Tensor, nn

from dissensus.utils.torch_private import version_of


class HostCopy:
    """A tensor's values on the host. They are read again if the tensor is another one, or was written by others since."""

    def __init__(self) -> None:
        self.known: tuple[Tensor | None, int, Any] = (None, 0, None)

    def read(self, tensor: Tensor) -> Any:
        if self.known[0] is not tensor or self.known[1] != version_of(tensor):
            self.note(tensor, tensor.tolist())
        return self.known[2]

    def note(self, tensor: Tensor, values: Any) -> None:
        """These are the tensor's values now."""
        self.known = tensor, version_of(tensor), values


class Count(nn.Module):
    """A count kept as a tensor, which is saved with the state, and as an int, which is read without waiting for a device."""

    value: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros((), dtype=torch.int64))
        self._host = HostCopy()

    def __int__(self) -> int:
        return self._host.read(self.value)

    def add(self) -> int:
        """Adds one and returns the count."""
        number = int(self) + 1
        self._host.note(self.value.add_(1), number)
        return number

    def reset(self) -> None:
        self.value.zero_()
