"""Augmentation of small images, a whole batch at a time on the device it lies on: crop, flip, cutout."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.numerics.checks import whole


class Augmentation:
    """(B, C, H, W) -> the same shape: each image cropped from a zero-padded copy, flipped with probability ½, cut out.

    Args:
        padding: pixels added on each side before a crop of the old size.
        flip: whether images are flipped left–right.
        cutout: side of a square set to zero at a random place, its centre anywhere in the image (DeVries & Taylor
            2017).
        seed: of a stream of its own; None takes the device's global generator.
    """

    def __init__(self, *, padding: int = 4, flip: bool = True, cutout: int = 0, seed: int | None = None) -> None:
        self.padding, self.cutout = whole("padding", padding, least=0), whole("cutout", cutout, least=0)
        self.flip, self.seed = flip, seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, images: Tensor) -> Tensor:
        batch, _, height, width = images.shape
        rows = torch.arange(height, device=images.device).expand(batch, height)
        columns = torch.arange(width, device=images.device).expand(batch, width)
        if self.flip:
            flipped = self._integers(2, batch, images.device).bool()
            columns = torch.where(flipped[:, None], width - 1 - columns, columns)
        if self.padding:
            images = F.pad(images, [self.padding] * 4)
            rows = rows + self._integers(2 * self.padding + 1, batch, images.device)[:, None]
            columns = columns + self._integers(2 * self.padding + 1, batch, images.device)[:, None]
        # One gather for crop and flip together: image b at (rows[b, i], columns[b, j]).
        index = torch.arange(batch, device=images.device)[:, None, None]
        out = images.movedim(1, -1)[index, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)  # (B, C, H, W)
        if self.cutout:
            out = torch.where(self._hole(batch, height, width, images.device), 0, out)
        return out

    def state_dict(self) -> dict[str, Tensor]:
        """Device -> where its stream stands; none without a seed."""
        return {str(device): generator.get_state() for device, generator in self._generators.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Goes on where another with a seed stood."""
        self._generators = {}
        for device, stream in state.items() if self.seed is not None else ():
            self._generators[torch.device(device)] = torch.Generator(device)
            self._generators[torch.device(device)].set_state(stream.cpu())

    def _hole(self, batch: int, height: int, width: int, device: torch.device) -> Tensor:
        """(B, 1, H, W): where the square is."""
        top = self._integers(height, batch, device)[:, None] - self.cutout // 2
        left = self._integers(width, batch, device)[:, None] - self.cutout // 2
        i, j = torch.arange(height, device=device), torch.arange(width, device=device)
        inside_rows = (i >= top) & (i < top + self.cutout)  # (B, H)
        inside_columns = (j >= left) & (j < left + self.cutout)
        return (inside_rows[:, :, None] & inside_columns[:, None, :])[:, None]

    def _integers(self, high: int, count: int, device: torch.device) -> Tensor:
        generator = None
        if self.seed is not None:
            if device not in self._generators:
                self._generators[device] = torch.Generator(device).manual_seed(self.seed)
            generator = self._generators[device]
        return torch.randint(high, (count,), generator=generator, device=device)
