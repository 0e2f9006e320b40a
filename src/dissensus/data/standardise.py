"""Shifting and scaling inputs or targets by what was measured on training data alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dissensus.numerics.arrays import tensor_of
from dissensus.numerics.lengthscales import check_finite_rows


@dataclass(frozen=True, eq=False)
class Standardiser:
    """z = (x − mean) / std, with mean and std measured on training data; uint8 values are pixels and read as x / 255.

    Columns (or channels) that never vary keep std = 1, so they become 0 and come back unchanged. Made by
    `Standardiser.of_rows(x)` or `Standardiser.of_channels(images)`; `standardiser(x)` applies it, `.inverse(z)` undoes
    it.
    """

    mean: Tensor  # (D,) of rows, (C, 1, 1) of images; float64
    std: Tensor  # like mean

    @staticmethod
    def of_rows(x: Any) -> Standardiser:
        """Standardiser of the columns of x (N, D), with the population standard deviation (divisor N).

        x: a tensor, an array or a DataFrame of numbers; for other columns and missing values see `TableEncoder`.
        """
        x = tensor_of(x, torch.float64)
        if x.ndim != 2 or len(x) == 0:
            raise ValueError(f"expected rows of shape (N, D), got {tuple(x.shape)}; reshape to a matrix first")
        values = _float(x, torch.float64)
        check_finite_rows(values, what="rows")  # one NaN would become the mean, and with it the whole column
        # by the extremes: the deviation of a constant column is not exactly 0 in floating point
        varies = values.amax(0) > values.amin(0)
        return Standardiser(values.mean(0), torch.where(varies, values.std(0, correction=0), 1.0))

    @staticmethod
    def of_channels(images: Tensor) -> Standardiser:
        """Standardiser of the channels of images (N, C, H, W) uint8, in units of x / 255.

        From the histogram of each channel: exact, and no floating-point copy of the images.
        """
        images = tensor_of(images)
        if images.dtype != torch.uint8 or images.ndim != 4 or images.numel() == 0:
            raise ValueError(
                f"expected uint8 images (N, C, H, W), got {images.dtype} {tuple(images.shape)}; pass raw pixels"
            )
        levels = torch.arange(256, dtype=torch.float64, device=images.device) / 255
        counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)])
        shares = counts.double() / counts.sum(1, keepdim=True)  # (C, 256)
        mean = shares @ levels
        variance = (shares * (levels - mean[:, None]).square()).sum(1)
        std = torch.where((counts > 0).sum(1) > 1, variance.sqrt(), 1.0)
        return Standardiser(mean[:, None, None], std[:, None, None])

    def __call__(self, x: Any) -> Tensor:
        """Standardised x, same shape; the dtype of a tensor of real numbers, else float32."""
        given = isinstance(x, Tensor) and x.is_floating_point()
        x = tensor_of(x, torch.float64)
        # whole numbers, and those of frames, may be larger than float32 can tell apart
        values = _float(x, torch.float32 if given or x.dtype == torch.uint8 else torch.float64)
        z = (values - self.mean.to(values)) / self.std.to(values)
        return z if given else z.float()

    def inverse(self, z: Tensor) -> Tensor:
        """x = z · std + mean, same shape and dtype as z, in the units of the training data."""
        z = tensor_of(z, torch.float64)
        return z * self.std.to(z) + self.mean.to(z)


def _float(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype == torch.uint8:
        return x.to(dtype) / 255
    return x if x.is_floating_point() and dtype == torch.float32 else x.to(dtype)
