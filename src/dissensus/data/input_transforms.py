"""Transforms from raw inputs to the network's tensors: saved with a posterior and applied by `predict`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.data.images import eight_bits
from dissensus.data.table_encoding import NumberColumn, TableEncoder, _numbers as numbers_in, table_columns
from dissensus.numerics.lengthscales import check_finite_rows
from dissensus.utils.arrays import as_tensor, tensor_of
from dissensus.utils.checks import integer, number


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
        std = torch.where(values.amax(0) > values.amin(0), values.std(0, correction=0), 1.0)
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


class InputTransform(ABC):
    """Base class: raw inputs -> tensor (B, ...). Refuses inputs that were visibly transformed before."""

    kind: ClassVar[str]  # its name in files
    traceable = True  # whether `transform` consists of tensor operations only

    @abstractmethod
    def raw(self, x: Any) -> Tensor:
        """Raw inputs as one tensor (B, ...); a single example gets its batch axis."""

    @abstractmethod
    def transform(self, raw: Tensor) -> Tensor:
        """The network's inputs, from the result of `raw`."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Its arguments as JSON."""

    def __call__(self, x: Any) -> Tensor:
        return self.transform(self.raw(x))


class ImageInputs(InputTransform):
    """Turns raw uint8 images into the network's inputs: (pixels / 255 − mean) / std, (B, C, H, W) in float32.

    Takes tensors, arrays and PIL images: one, a batch or a list, channels first or last. Floats are refused.

    Args:
        mean, std: of each of C channels, in units of pixels / 255; one number for images with one channel.
        resize: length of the shorter side before the crop, in pixels; bilinear with antialiasing. None keeps the size.
        crop: (height, width) of the central crop in pixels, or one number for both. None keeps the whole image.
    """

    kind = "image"

    def __init__(
        self,
        mean: float | Sequence[float],
        std: float | Sequence[float],
        *,
        resize: int | None = None,
        crop: int | Sequence[int] | None = None,
    ) -> None:
        means, stds = (np.atleast_1d(np.asarray(each)).tolist() for each in (mean, std))
        if len(means) != len(stds) or not means:
            raise ValueError(f"expected one mean and std per channel, got {len(means)} and {len(stds)}; pass C of each")
        self.mean = [float(number("every mean", each)) for each in means]
        self.std = [float(number("every std", each, above=0)) for each in stds]
        self.resize = None if resize is None else integer("resize", resize)
        sides = (crop, crop) if isinstance(crop, int) else crop
        self.crop = None if sides is None else tuple(integer("crop", side) for side in sides)

    @staticmethod
    def of(standardiser: Standardiser, **keywords: Any) -> ImageInputs:
        """From the `Standardiser.of_channels` that was applied to the training images."""
        return ImageInputs(standardiser.mean.flatten().tolist(), standardiser.std.flatten().tolist(), **keywords)

    @property
    def standardiser(self) -> Standardiser:
        """The standardiser of pixels / 255, applied after resizing and cropping."""
        mean, std = (torch.tensor(each, dtype=torch.float64)[:, None, None] for each in (self.mean, self.std))
        return Standardiser(mean, std)

    def __call__(self, x: Any) -> Tensor:
        if isinstance(x, list | tuple) and self.crop is not None:  # images of any size: cropping makes them equal
            return torch.cat([self(each) for each in x])
        return super().__call__(x)

    def raw(self, x: Any) -> Tensor:
        if isinstance(x, list | tuple):
            images = [self.raw(each) for each in x]
            if len({each.shape[1:] for each in images}) != 1:
                raise ValueError(f"expected images of one size, got several among {len(images)}; pass them one by one")
            return torch.cat(images)
        if hasattr(x, "convert") and hasattr(x, "getbands"):  # PIL
            mode = {1: "L", 3: "RGB", 4: "RGBA"}.get(len(self.mean), x.mode)
            x = np.asarray(eight_bits(x, mode, "a PIL image"))
        pixels = as_tensor(x)
        if not isinstance(pixels, Tensor) or pixels.dtype != torch.uint8:
            what = pixels.dtype if isinstance(pixels, Tensor) else type(x).__name__
            fix = "this posterior transforms raw pixels itself: pass those, or set posterior.inputs = None"
            raise TypeError(f"expected raw pixels, uint8 from 0 to 255, got {what}; {fix}")
        return self._channels_first(pixels)

    def _channels_first(self, pixels: Tensor) -> Tensor:
        """Pixels as (B, C, H, W). The batch axis may be missing, channels may be last, and a single channel may be missing."""
        channels, shape = len(self.mean), tuple(pixels.shape)
        if channels == 1 and (pixels.ndim == 2 or (pixels.ndim == 3 and 1 not in (shape[0], shape[2]))):
            pixels = pixels.unsqueeze(-3)  # (H, W) or (B, H, W)
        pixels = pixels if pixels.ndim == 4 else pixels[None]
        first, last = pixels.ndim == 4 and pixels.shape[1] == channels, pixels.ndim == 4 and pixels.shape[3] == channels
        if first == last:
            why = "channels first or last" if first else f"{channels} channels, first or last"
            got = f"{shape}{', which fits both' if first else ''}"
            raise ValueError(f"expected images with {why}, got {got}; pass (B, {channels}, H, W)")
        return pixels if first else pixels.movedim(-1, 1)

    def transform(self, raw: Tensor) -> Tensor:
        pixels = raw.to(torch.float32)
        if self.resize is not None and min(pixels.shape[2:]) != self.resize:
            height, width = pixels.shape[2:]
            sides = [round(side * self.resize / min(height, width)) for side in (height, width)]
            # Not rounded to whole levels: a program that rounds differently would differ by a whole level.
            pixels = F.interpolate(pixels, size=sides, mode="bilinear", antialias=True, align_corners=False)
        if self.crop is not None:
            tops = [(have - want) // 2 for have, want in zip(pixels.shape[2:], self.crop, strict=True)]
            if min(tops) < 0:
                got = tuple(pixels.shape[2:])
                raise ValueError(f"expected images of at least {self.crop}, got {got}; enlarge them, or use resize=")
            pixels = pixels[:, :, tops[0] : tops[0] + self.crop[0], tops[1] : tops[1] + self.crop[1]]
        mean, std = (torch.tensor(each, device=raw.device)[:, None, None] for each in (self.mean, self.std))
        return (pixels / 255 - mean) / std

    def config(self) -> dict[str, Any]:
        crop = None if self.crop is None else list(self.crop)
        return {"mean": self.mean, "std": self.std, "resize": self.resize, "crop": crop}


class RowInputs(InputTransform):
    """Standardises raw rows (B, D): (x − mean) / std in float64. Takes tensors, arrays, DataFrames and a single row (D,)."""

    kind = "rows"

    def __init__(self, mean: Sequence[float], std: Sequence[float], columns: Sequence[str] = ()) -> None:
        self.mean, self.std = [float(each) for each in mean], [float(each) for each in std]
        self.columns = list(columns)  # names, if the training rows were a DataFrame

    @staticmethod
    def of(standardiser: Standardiser) -> RowInputs:
        """From the `Standardiser.of_rows` that was applied to the training rows."""
        return RowInputs(standardiser.mean.tolist(), standardiser.std.tolist(), standardiser.columns)

    def raw(self, x: Any) -> Tensor:
        check_columns(self.columns, x)
        rows = as_tensor(np.asarray(x) if isinstance(x, list | tuple) else x, torch.float64)
        if isinstance(rows, Tensor) and rows.ndim == 1:
            rows = rows[None]
        if not isinstance(rows, Tensor) or rows.ndim != 2 or rows.shape[1] != len(self.mean):
            shape = tuple(rows.shape) if isinstance(rows, Tensor) else type(x).__name__
            raise ValueError(f"expected rows (B, {len(self.mean)}) as in training, got {shape}; pass those columns")
        rows = rows.to(torch.float64)
        _check_raw(rows, self.transform(rows))
        return rows

    def transform(self, raw: Tensor) -> Tensor:
        mean, std = (torch.tensor(each, dtype=torch.float64, device=raw.device) for each in (self.mean, self.std))
        return (raw.to(torch.float64) - mean) / std

    def config(self) -> dict[str, Any]:
        return {"mean": self.mean, "std": self.std, "columns": self.columns}


class TableInputs(InputTransform):
    """Encodes raw tables with a `TableEncoder`; also takes one row as a dict {column: value}."""

    kind = "table"

    def __init__(self, encoder: TableEncoder | Mapping[str, Any]) -> None:
        self.encoder = encoder if isinstance(encoder, TableEncoder) else TableEncoder.of_config(encoder)
        # Text cannot be a tensor: with categories the encoder runs before the graph.
        self.traceable = all(isinstance(column, NumberColumn) for column in self.encoder.columns)

    def raw(self, x: Any) -> Tensor:
        """Numbers (B, columns) in float64, NaN if missing; for tables with categories the encoder's output."""
        if isinstance(x, Mapping) and all(np.ndim(value) == 0 for value in x.values()):
            x = {name: [value] for name, value in x.items()}
        elif not hasattr(x, "columns") and np.ndim(x) == 1:
            x = np.asarray(x)[None]
        encoded = self.encoder(x, dtype=torch.float64)  # raises if the columns differ from those of training
        if not self.traceable:
            return encoded
        names, columns = table_columns(x)
        given = dict(zip(names or range(len(columns)), columns, strict=True))
        found = [numbers_in(column.name, given[column.name]) for column in self.encoder.columns]
        raw = torch.from_numpy(np.stack(found, 1))
        if not self.encoder.named:  # an array may have been encoded before
            _check_raw(raw.nan_to_num(0.0), encoded)
        return raw

    def transform(self, raw: Tensor) -> Tensor:
        if not self.traceable:
            return raw
        columns = cast(tuple[NumberColumn, ...], self.encoder.columns)
        pairs = zip(columns, raw.to(torch.float64).unbind(1), strict=True)
        return torch.cat([column.scale(values) for column, values in pairs], 1)

    def config(self) -> dict[str, Any]:
        return {"encoder": self.encoder.config()}


def _check_raw(rows: Tensor, scaled: Tensor) -> None:
    """Raises if raw rows look standardised already, because `scaled` would be far off the training rows."""
    if not len(rows):
        return
    as_given, off = rows.square().mean(0).sqrt(), scaled.square().mean(0).sqrt().amax()  # (D,), ()
    if bool((as_given < 4).all()) and float(off) > (5 if len(rows) >= 8 else 10):
        got = f"rows {float(off):.3g} deviations off the training rows, which look standardised already"
        fix = "pass them as they were measured, or set posterior.inputs = None"
        raise ValueError(f"expected raw rows, got {got}; this posterior standardises rows itself: {fix}")


KINDS: dict[str, type[InputTransform]] = {each.kind: each for each in (ImageInputs, RowInputs, TableInputs)}


def as_input_transform(given: Any) -> InputTransform:
    """The `InputTransform` of a `Standardiser` or a `TableEncoder`; an `InputTransform` is returned as it is."""
    if isinstance(given, TableEncoder):
        return TableInputs(given)
    if isinstance(given, Standardiser):
        return ImageInputs.of(given) if given.mean.ndim == 3 else RowInputs.of(given)
    if not isinstance(given, InputTransform):
        wanted = "a Standardiser, a TableEncoder or ds.data.ImageInputs as inputs"
        raise TypeError(f"expected {wanted}, got {type(given).__name__}; files hold no code: pass one of these")
    return given
