"""Standardises inputs or targets with statistics of the training data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dissensus.numerics.lengthscales import check_finite_rows
from dissensus.utils.arrays import tensor_of


@dataclass(frozen=True, eq=False)
class Standardiser:
    """Standardises data with the mean and standard deviation of the training data: z = (x − mean) / std.

    Build it with `Standardiser.of_rows(x)` or `Standardiser.of_channels(images)`; `standardiser(x)` applies it,
    `.inverse(z)` undoes it. Images of uint8 are first divided by 255. Constant columns or channels have std = 1: they become
    0, and `.inverse` restores them. If built from a DataFrame, it takes DataFrames with the same columns in the same order.
    """

    mean: Tensor  # (D,) of rows, (C, 1, 1) of images; float64
    std: Tensor  # like mean
    columns: tuple[str, ...] = ()  # column names, if built from a DataFrame

    @staticmethod
    def of_rows(x: Any) -> Standardiser:
        """Standardiser of the columns of x (N, D), with the population standard deviation (divisor N).

        x: a tensor, an array or a DataFrame of numbers. For categories and missing values use `TableEncoder`.
        """
        values = tensor_of(x, torch.float64).to(torch.float64)
        if values.ndim != 2 or len(values) == 0:
            raise ValueError(f"expected rows of shape (N, D), got {tuple(values.shape)}; reshape to a matrix first")
        check_finite_rows(values, what="rows")  # one NaN would make the mean and the whole column NaN
        # Compare the extremes: the deviation of a constant column is not exactly 0 in floating point.
        varies = values.amax(0) > values.amin(0)
        std = torch.where(varies, values.std(0, correction=0), 1.0)
        return Standardiser(values.mean(0), std, tuple(map(str, getattr(x, "columns", ()))))

    @staticmethod
    def of_channels(images: Tensor) -> Standardiser:
        """Standardiser of the channels of images (N, C, H, W) uint8, in units of x / 255.

        Computed from the histogram of each channel: exact, without a floating-point copy of the images.
        """
        images = tensor_of(images)
        if images.dtype != torch.uint8 or images.ndim != 4 or images.numel() == 0:
            got = f"{images.dtype} {tuple(images.shape)}"
            raise ValueError(f"expected uint8 images (N, C, H, W), got {got}; pass raw pixels")
        levels = torch.arange(256, dtype=torch.float64, device=images.device) / 255
        counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)])
        shares = counts.double() / counts.sum(1, keepdim=True)  # (C, 256)
        mean = shares @ levels
        variance = (shares * (levels - mean[:, None]).square()).sum(1)
        std = torch.where((counts > 0).sum(1) > 1, variance.sqrt(), 1.0)
        return Standardiser(mean[:, None, None], std[:, None, None])

    def __call__(self, x: Any) -> Tensor:
        """Standardised x, same shape. Floating tensors keep their dtype; other inputs become float32."""
        check_columns(self.columns, x)
        given = isinstance(x, Tensor) and x.is_floating_point()
        x = tensor_of(x, torch.float64)
        self._check_shape(x)
        # integers and numbers of frames may be too large for float32 to represent exactly
        values = x if given else x.to(torch.float64)
        if x.dtype == torch.uint8 and self.mean.ndim != 1:
            values = x.float() / 255
        z: Tensor = (values - self.mean.to(values)) / self.std.to(values)
        return z if given else z.float()

    def inverse(self, z: Tensor) -> Tensor:
        """Undoes the standardisation: z · std + mean, same shape and dtype as z, in the units of the training data."""
        z = tensor_of(z, torch.float64)
        self._check_shape(z)
        return z * self.std.to(z) + self.mean.to(z)

    def _check_shape(self, x: Tensor) -> None:
        """Raises if the number of columns differs: broadcasting would silently mix columns."""
        mean = self.mean
        pixels = mean.ndim == 3 and mean.shape[1:] == (1, 1)
        wanted = mean.shape[:1] if pixels else mean.shape
        found = x.shape[-3:-2] if pixels else x.shape[x.ndim - len(wanted) :]
        if found != wanted and not (x.ndim < 2 and wanted == (1,)):
            kind, fix = ("channels", "(B, C, H, W)") if pixels else ("columns", "those columns, one column as (N, 1)")
            size = f"{' × '.join(map(str, wanted))} {kind}"
            raise ValueError(f"expected {size} as in the training data, got shape {tuple(x.shape)}; pass {fix}")


def check_columns(names: Sequence[str], table: Any) -> None:
    """Raises if a DataFrame's columns or their order differ from the training rows."""
    found = list(map(str, getattr(table, "columns", names)))
    if names and found != list(names):
        wanted, got = (", ".join(each) for each in (names, found))
        raise ValueError(f"expected the columns {wanted} in this order, as in training, got {got}; pass table[columns]")
