"""Prediction over whole loaders (with members, summarised, or batch by batch) and of large images, with one draw."""

import logging
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.errors import Diverged
from dissensus.core.likelihood import Likelihood
from dissensus.core.posterior import Posterior, expect_posterior
from dissensus.core.predictive import Predictive
from dissensus.core.processes import complete_loader
from dissensus.core.summary import RunningSummary, SummaryPredictive
from dissensus.engine.memory import format_bytes
from dissensus.engine.precision import PredictionPrecision
from dissensus.engine.prediction_loop import predict_loader
from dissensus.utils.arrays import tensor_of
from dissensus.utils.checks import integer, number

log = logging.getLogger("dissensus")


def predict(
    posterior: Posterior, loader: Iterable[Any], *, precision: PredictionPrecision = "float32", compiled: bool = False
) -> tuple[Predictive, Tensor]:
    """Predicts all inputs of a loader and keeps every member; returns (predictive, targets).

    One draw of functions is used for all batches, in eval mode and without gradients. Memory grows with M times the
    number of inputs N; `summarise` and `predict_batches` need less.

    Args:
        posterior: a trained posterior.
        loader: batches (x, y) or (x, y, weight); weights are ignored. Or the data (x, y) themselves, of N rows.
        precision: "bf16" runs the network in mixed precision.
        compiled: whether to compile the drawn functions first (torch.compile); falls back if that fails.

    Returns:
        A `Predictive` for N inputs and the targets (N, ...), both on the posterior's device, in the loader's order.

    Raises:
        Diverged: a member predicts NaN.
    """
    loader = _as_loader(posterior, loader)
    parts: list[Predictive] = []
    targets: list[Tensor] = []
    found = _predict_and_correct(posterior, loader, precision=precision, compiled=compiled, keeps_weights=True)
    for predictive, y in found:
        if not parts:
            _log_memory(predictive, loader, keep_members=True)
        parts.append(predictive)
        targets.append(y)
    return Predictive.cat(parts), torch.cat(targets)


def summarise(
    posterior: Posterior | str | os.PathLike[str],
    loader: Iterable[Any],
    *,
    precision: PredictionPrecision = "float32",
    compiled: bool = False,
    network: nn.Module | None = None,
    likelihood: Likelihood | None = None,
    method: type[Posterior] | None = None,
) -> tuple[SummaryPredictive, Tensor]:
    """Predicts all inputs of a loader in memory that does not grow with M; returns (summary, targets).

    The summary has mean, aleatoric and epistemic uncertainty, but no members. Members that run in a loop are added one
    at a time; on a GPU a batch of few outputs, such as classes, is predicted by all of them at once.

    Args:
        posterior: a trained posterior, or a folder written by `save`: members are then read from disk and run one at a
            time, and the loader must yield the same batches in the same order each time.
        loader: batches (x, y) or (x, y, weight); weights are ignored.
        precision, compiled: as in `predict`; a folder is never compiled.
        network, likelihood, method: as in `load`; used only with a folder.

    Returns:
        A `SummaryPredictive` for N inputs and the targets (N, ...), in the loader's order.
    """
    loader = _as_loader(posterior, loader)
    if not isinstance(posterior, Posterior):
        # It imports all methods, which `import dissensus` avoids.
        from dissensus.storage.member_streaming import read_members

        members = read_members(Path(posterior), network, likelihood=likelihood, method=method)
        return _summarise_stored(members, loader, precision)
    lens = posterior.current_correction()
    parts: list[SummaryPredictive] = []
    targets: list[Tensor] = []
    for part, y in predict_loader(posterior, loader, lens, precision=precision, compiled=compiled):
        if not parts:
            _log_memory(part, loader, keep_members=False)
        parts.append(cast(SummaryPredictive, lens.correct_mixture(part)))
        targets.append(y)
    return SummaryPredictive.cat(parts), torch.cat(targets)


def predict_batches(
    posterior: Posterior, loader: Iterable[Any], *, precision: PredictionPrecision = "float32", compiled: bool = False
) -> Iterator[tuple[Predictive, Tensor]]:
    """Predicts one batch after the other and keeps none, so the data may be larger than memory.

    Arguments as in `predict`. One draw is used for all batches. Between two batches, training modes and random state are
    those of the caller. On a GPU, values that are not finite are reported one batch late, with the next batch or at the end.

    Yields:
        (predictive, targets): a `Predictive` for the batch's B inputs with every member, and its targets (B, ...).
    """
    return _predict_and_correct(posterior, _as_loader(posterior, loader), precision=precision, compiled=compiled)


def _predict_and_correct(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    precision: PredictionPrecision,
    compiled: bool,
    keeps_weights: bool = False,
) -> Iterator[tuple[Predictive, Tensor]]:
    lens = expect_posterior(posterior).current_correction()
    settings: dict[str, Any] = {"precision": precision, "compiled": compiled, "keep_members": True}
    settings["keeps_weights"] = keeps_weights
    for predictive, y in predict_loader(posterior, loader, lens, **settings):
        yield lens.correct_mixture(predictive), y


class ImagePrediction(NamedTuple):
    """The result of `predict_image` for one image, without its members."""

    mean: Tensor  # (C, H, W) class probabilities
    entropy: Tensor  # (H, W) entropy of the mean, in nats
    mutual_information: Tensor  # (H, W) the part of the entropy due to the members' disagreement, in nats


def predict_image(
    posterior: Posterior,
    image: Tensor,
    *,
    tile: int | tuple[int, int] | None = None,
    overlap: int = 64,
    precision: PredictionPrecision = "float32",
) -> ImagePrediction:
    """Segments one image, in tiles if it is large, in memory that does not grow with M.

    Functions run one after the other, and only sums are kept.

    Args:
        posterior: a trained posterior of a segmentation network.
        image: (channels, H, W), as the network takes it.
        tile: size of the tiles, a number or (height, width), for an image that does not fit into memory; None uses none.
        overlap: pixels that neighbouring tiles share; each tile keeps the half of them farther from its edge. The result
            equals that of the whole image if half the overlap is at least the network's receptive field to one side and
            tile − overlap is a multiple of its stride. Layers that pool over the whole image (PSPNet) see only a tile.
        precision: "bf16" runs the network in mixed precision; likelihoods stay in float32.

    Returns:
        An `ImagePrediction`: mean (C, H, W), entropy (H, W) and mutual information (H, W).
    """
    image = tensor_of(image)
    if image.ndim != 3:
        raise ValueError(f"expected one image (channels, H, W), got {tuple(image.shape)}; pass images one by one")
    size = image.shape[1:]
    sides = size if tile is None else (tile, tile) if isinstance(tile, int) else tile
    rows, columns = (_tiles(*each, overlap) for each in zip(size, sides, strict=True))
    places = [(row, column) for row in rows for column in columns]
    cuts = [(slice(row.start, row.stop), slice(column.start, column.stop)) for (row, _), (column, _) in places]
    loader = [(image[None, :, row, column], torch.zeros(1)) for row, column in cuts]
    found: tuple[Tensor, ...] = ()
    lens = expect_posterior(posterior).current_correction()
    parts = predict_loader(posterior, loader, lens, precision=precision, compiled=False, one_at_a_time=True)
    for ((row, kept_rows), (column, kept_columns)), (moments, _) in zip(places, parts, strict=True):
        summary = lens.correct_mixture(moments)
        new = (summary.mean, summary.total, summary.epistemic)
        if summary.mean.shape[2:] != (len(row), len(column)):
            wanted, got = f"logits (B, C, {len(row)}, {len(column)})", tuple(summary.mean.shape)
            raise ValueError(f"expected {wanted} for images of that size, got {got}; predict_image segments")
        if not found:
            found = tuple(image.new_empty(*each.shape[1:-2], *size, dtype=each.dtype) for each in new)
        inside = (..., _kept_slice(kept_rows, row), _kept_slice(kept_columns, column))
        for whole_map, part in zip(found, new, strict=True):
            whole_map[..., kept_rows.start : kept_rows.stop, kept_columns.start : kept_columns.stop] = part[0][inside]
    return ImagePrediction(*found)


def _tiles(length: int, side: int, overlap: int) -> list[tuple[range, range]]:
    """(range that a tile covers, range that is kept of it) along one axis."""
    if integer("tile", side) >= length:
        return [(range(length), range(length))]
    number("overlap", overlap, below=side, hint="tiles must be larger than their overlap")
    step = side - integer("overlap", overlap, least=0)
    starts = [start for start in range(0, length, step) if start == 0 or start + overlap < length]
    covered = [range(start, min(start + side, length)) for start in starts]
    ends = [*(tile.stop - overlap // 2 for tile in covered[:-1]), length]
    return [(tile, range(start, end)) for tile, start, end in zip(covered, [0, *ends[:-1]], ends, strict=True)]


def _kept_slice(kept: range, tile: range) -> slice:
    return slice(kept.start - tile.start, kept.stop - tile.start)


def _as_loader(posterior: Any, given: Any) -> Iterable[Any]:
    from dissensus.data.batches import as_loader  # imports all of `data`, which `import dissensus` avoids

    loader: Iterable[Any] = as_loader(given, raw=getattr(posterior, "inputs", as_loader) is not None)
    return cast(Iterable[Any], complete_loader(posterior, loader)) if isinstance(posterior, Posterior) else loader


def _summarise_stored(
    members: Iterable[Posterior], loader: Iterable[Any], precision: PredictionPrecision
) -> tuple[SummaryPredictive, Tensor]:
    running: list[RunningSummary] = []
    targets: list[Tensor] = []
    lens = None
    for index, member in enumerate(members):
        seen, lens = 0, member.current_correction()
        try:
            parts = predict_loader(member, loader, lens, precision=precision, compiled=False, keep_members=True)
            for predictive, y in parts:
                if index == 0:
                    running.append(RunningSummary())
                    targets.append(y)
                if seen == len(targets) or not torch.equal(y, targets[seen]):
                    seen = -1
                    break
                running[seen].add(predictive)
                seen += 1
        except Diverged as error:  # with the member's index among all
            raise Diverged([index + i for i in error.members], error.step, error.what) from None
        if seen != len(targets):  # other batches, or none: the first member has exhausted a generator
            hint = "use a loader that does not shuffle and can be read again"
            raise ValueError(f"expected the same batches for every member, got others; {hint}")
    seen_whole = [lens.correct_mixture(each.summary()) for each in running] if lens is not None else []
    return SummaryPredictive.cat(cast(list[SummaryPredictive], seen_whole)), torch.cat(targets)


def _log_memory(predictive: Predictive, loader: Iterable[Any], *, keep_members: bool) -> None:
    """Logs the size of the result in bytes, with all members or only mean, aleatoric and epistemic."""
    described = predictive.defining_tensors()
    members, inputs = described[0].shape[:2]
    outputs = sum(math.prod(tensor.shape[2:]) for tensor in described)
    if (count := batches.count_batches(loader)) is not None:
        numbers = inputs * count * (members * outputs if keep_members else outputs)
        size = format_bytes(numbers * described[0].element_size())
        log.info("the prediction of about %d inputs will take %s", inputs * count, size)
