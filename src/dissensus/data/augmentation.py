"""Augmentation of images, or of images and masks, one batch at a time on the batch's device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.data.segmentation import VOID
from dissensus.utils.checks import integer, number


class Streams:
    """One random generator per device, all from one seed; with None each device's global generator."""

    seed: int | None
    _generators: dict[torch.device, torch.Generator]

    def state_dict(self) -> dict[str, Tensor]:
        """Device -> state of its generator; empty without a seed."""
        return {str(device): generator.get_state() for device, generator in self._generators.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores the state of another `Streams` that has a seed."""
        self._generators = {}
        for device, stream in state.items() if self.seed is not None else ():
            self._generators[torch.device(device)] = torch.Generator(device)
            self._generators[torch.device(device)].set_state(stream.cpu())

    def _generator(self, device: torch.device) -> torch.Generator | None:
        if self.seed is not None and device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators.get(device)


class Augmentation(Streams):
    """Random crops, flips and cutout for training images: (B, C, H, W) -> the same shape. Each image is changed separately.

    Args:
        padding: pixels of zeros added on each side before a crop of the original size.
        flip: flips images left–right with probability ½.
        cutout: side, in pixels, of a square set to zero, its centre uniform (DeVries & Taylor 2017); 0 leaves it out.
        seed: seed of a separate generator; None uses the device's global generator.
    """

    def __init__(self, *, padding: int = 4, flip: bool = True, cutout: int = 0, seed: int | None = None) -> None:
        self.padding, self.cutout = integer("padding", padding, least=0), integer("cutout", cutout, least=0)
        self.flip, self.seed = flip, seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, images: Tensor) -> Tensor:
        batch, _, height, width = images.shape
        rows, columns = (torch.arange(side, device=images.device)[None] for side in (height, width))  # (1, H), (1, W)
        if self.flip:
            flipped = self._integers(2, batch, images.device).bool()
            columns = torch.where(flipped[:, None], columns.flip(1), columns)
        if self.padding:
            images = F.pad(images, [self.padding] * 4)
            rows = rows + self._integers(2 * self.padding + 1, batch, images.device)[:, None]
            columns = columns + self._integers(2 * self.padding + 1, batch, images.device)[:, None]
        # One gather for crop and flip together: image b at (rows[b, i], columns[b, j]).
        index = torch.arange(batch, device=images.device)[:, None, None]
        out = images.movedim(1, -1)[index, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)  # (B, C, H, W)
        if self.cutout:
            inside = []  # the square: (B, H) and (B, W)
            for side in (height, width):
                start = self._integers(side, batch, images.device)[:, None] - self.cutout // 2
                place = torch.arange(side, device=images.device) - start
                inside.append((place >= 0) & (place < self.cutout))
            out = torch.where(inside[0][:, None, :, None] & inside[1][:, None, None, :], 0, out)
        return out

    def _integers(self, high: int, count: int, device: torch.device) -> Tensor:
        return torch.randint(high, (count,), generator=self._generator(device), device=device)


class SegmentationAugmentation(Streams):
    """Random flips, scalings and crops applied alike to images (B, C, H, W) and their masks (B, H, W).

    Images must be floating point. They are interpolated bilinearly; masks take the nearest pixel, so labels are never
    blended. Pixels outside the image become 0, and VOID in the mask. `Batches(images, masks, augment=...)` applies it.

    Args:
        flip: flips left–right with probability ½.
        scale: bounds (low, high) of the scale factor, drawn for each image.
        crop: (height, width) of the output in pixels; None keeps the size.
        seed: seed of a separate generator; None uses the device's global generator.
    """

    joint = True  # takes inputs and targets

    def __init__(
        self,
        *,
        flip: bool = True,
        scale: tuple[float, float] = (1.0, 1.6),
        crop: tuple[int, int] | None = None,
        seed: int | None = None,
    ) -> None:
        low = number("scale", scale[0], above=0)
        self.flip, self.scale, self.seed = flip, (low, number("scale", scale[1], least=low)), seed
        self.crop = None if crop is None else (integer("crop", crop[0]), integer("crop", crop[1]))
        self._generators = {}

    def __call__(self, images: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        size = images.shape[2:]
        draws = torch.rand(4, len(images), generator=self._generator(images.device), device=images.device)
        factor = self.scale[0] + (self.scale[1] - self.scale[0]) * draws[0]
        places = []  # centres of the new rows and columns, in pixels from the image's edge: (B, h), (B, w)
        for axis, (old, new) in enumerate(zip(size, self.crop or size, strict=True)):
            # The window spans new / factor pixels of the image. It lies inside the image, or the image inside it.
            start = draws[1 + axis] * (old - new / factor)
            places.append(start[:, None] + (torch.arange(new, device=images.device) + 0.5) / factor[:, None])
        if self.flip:
            places[1] = torch.where(draws[3, :, None] < 0.5, size[1] - places[1], places[1])
        (rows, columns), (height, width) = places, size
        inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
        # grid_sample's coordinates run from −1 to 1 between the edges of an image.
        x, y = (2 * columns / width - 1)[:, None, :], (2 * rows / height - 1)[:, :, None]
        grid = torch.stack([x.expand_as(inside), y.expand_as(inside)], dim=-1)  # (B, h, w, 2)
        seen = F.grid_sample(images, grid.to(images.dtype), padding_mode="border", align_corners=False)
        i, j = rows.long().clamp(0, height - 1), columns.long().clamp(0, width - 1)
        labels = masks[torch.arange(len(masks), device=masks.device)[:, None, None], i[:, :, None], j[:, None, :]]
        return torch.where(inside[:, None], seen, 0), torch.where(inside, labels, VOID)
