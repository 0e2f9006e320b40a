"""Prediction over whole loaders (with members, summarised, or batch by batch) and of large images, with one draw."""

import logging
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from dissensus.core.divergence import Diverged
from dissensus.core.likelihood import Likelihood
from dissensus.core.posterior import Posterior, expect_posterior
from dissensus.core.predictive import Predictive, RunningSummary, SummaryPredictive
from dissensus.engine.loader import Loader
from dissensus.engine.memory import format_bytes
from dissensus.engine.prediction_loop import PredictionPrecision, predict_loader
from dissensus.utils.arrays import tensor_of
from dissensus.utils.checks import integer, number, suggest_keywords

log = logging.getLogger("dissensus")


@suggest_keywords
def predict(
    posterior: Posterior, loader: Iterable[Any], *, precision: PredictionPrecision = "float32", compiled: bool = False
) -> Predictive:
    """Predicts all inputs of a loader and keeps every member, as `posterior.predict` does for one batch.

    One draw of functions is used for all batches, in eval mode and without gradients. Memory grows with M times the
    number of inputs N; `summarise` and `predict_batches` need less.

    Args:
        posterior: a trained posterior.
        loader: batches (x, y) or (x, y, weight); weights are ignored. Or the data (x, y) themselves, of N rows. Up to 16
            small batches are read before they are predicted.
        precision: "bf16" runs the network in mixed precision.
        compiled: whether to compile the drawn functions first (torch.compile); falls back if that fails.

    Returns:
        A `Predictive` for N inputs with their `targets` (N, ...), on the posterior's device, in the loader's order.

    Raises:
        Diverged: a member predicts NaN.
    """
    return _predict_all(posterior, loader, precision=precision, compiled=compiled, keep_members=True)


@suggest_keywords
def summarise(
    posterior: Posterior | str | os.PathLike[str],
    loader: Iterable[Any],
    *,
    precision: PredictionPrecision = "float32",
    compiled: bool = False,
    network: nn.Module | None = None,
    likelihood: Likelihood | None = None,
    method: type[Posterior] | None = None,
) -> SummaryPredictive:
    """Predicts all inputs of a loader in memory that does not grow with M.

    The summary has mean, aleatoric and epistemic uncertainty, but no members. Members that run in a loop are added one
    at a time; on a GPU a batch of few outputs, such as classes, is predicted by all of them at once.

    Args:
        posterior: a trained posterior, or a folder written by `save`: members are then read from disk and run one at a
            time, and the loader must yield the same batches in the same order each time.
        loader: batches (x, y) or (x, y, weight); weights are ignored.
        precision, compiled: as in `predict`; a folder is never compiled.
        network, likelihood, method: as in `load`; used only with a folder.

    Returns:
        A `SummaryPredictive` for N inputs with their `targets` (N, ...), in the loader's order.
    """
    if not isinstance(posterior, Posterior):
        # It imports all methods, which `import dissensus` avoids.
        from dissensus.storage.folder import read_members

        members = read_members(Path(posterior), network, likelihood=likelihood, method=method)
        return _summarise_stored(members, Loader(loader, raw=True), precision)
    found = _predict_all(posterior, loader, precision=precision, compiled=compiled, keep_members=False)
    return cast(SummaryPredictive, found)


def predict_batches(
    posterior: Posterior, loader: Iterable[Any], *, precision: PredictionPrecision = "float32", compiled: bool = False
) -> Iterator[tuple[Predictive, Tensor]]:
    """Predicts one batch after the other and keeps none, so the data may be larger than memory.

    Arguments as in `predict`. One draw is used for all batches. Between two batches, training modes and random state are
    those of the caller. On a GPU, values that are not finite are reported one batch late, with the next batch or at the end.

    Yields:
        (predictive, targets): a `Predictive` for the batch's B inputs with every member, and its targets (B, ...).
    """
    data = Loader.complete(loader, expect_posterior(posterior))
    found = predict_loader(posterior, data, precision=precision, compiled=compiled, keeps_weights=False)
    return ((predictive, batch.y) for batch, predictive in found)


class ImagePrediction(NamedTuple):
    """The result of `predict_image` for one image, without its members."""

    mean: Tensor  # (C, H, W) class probabilities
    total: Tensor  # (H, W) entropy of the mean, in nats
    epistemic: Tensor  # (H, W) mutual information: the part of the entropy due to the members' disagreement, in nats

    @property
    def aleatoric(self) -> Tensor:
        """(H, W) the members' mean entropy, in nats."""
        return self.total - self.epistemic


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
    """
    image = tensor_of(image)
    if image.ndim != 3:
        raise ValueError(f"expected one image (channels, H, W), got {tuple(image.shape)}; pass images one by one")
    size = image.shape[1:]
    sides = size if tile is None else (tile, tile) if isinstance(tile, int) else tile
    rows, columns = (_tiles(*each, overlap) for each in zip(size, sides, strict=True))
    places = [(row, column) for row in rows for column in columns]
    cuts = [image[None, :, row, column] for (row, *_), (column, *_) in places]
    loader = Loader([(cut, torch.zeros(1)) for cut in cuts])
    found: tuple[Tensor, ...] = ()
    posterior = expect_posterior(posterior)
    parts = predict_loader(posterior, loader, precision=precision, keep_members=False, one_at_a_time=True)
    for cut, ((_, *rows_kept), (_, *columns_kept)), (_, summary) in zip(cuts, places, parts, strict=True):
        new = (summary.mean, summary.total, summary.epistemic)
        if summary.mean.shape[2:] != cut.shape[2:]:
            wanted, got = f"logits (B, C, {cut.shape[2]}, {cut.shape[3]})", tuple(summary.mean.shape)
            raise ValueError(f"expected {wanted} for images of that size, got {got}; predict_image segments")
        if not found:
            found = tuple(image.new_empty(*each.shape[1:-2], *size, dtype=each.dtype) for each in new)
        in_image, in_tile = zip(rows_kept, columns_kept, strict=True)
        for whole_map, part in zip(found, new, strict=True):
            whole_map[..., *in_image] = part[0][..., *in_tile]
    return ImagePrediction(*found)


def _tiles(length: int, side: int, overlap: int) -> list[tuple[slice, slice, slice]]:
    """(what a tile covers, what is kept of it, in the image and in the tile) along one axis."""
    if integer("tile", side) >= length:
        return [(slice(0, length),) * 3]
    number("overlap", overlap, below=side, hint="tiles must be larger than their overlap")
    step = side - integer("overlap", overlap, least=0)
    starts = [start for start in range(0, length, step) if start == 0 or start + overlap < length]
    covered = [slice(start, min(start + side, length)) for start in starts]
    ends = [*(tile.stop - overlap // 2 for tile in covered[:-1]), length]
    kept = zip(starts, covered, [0, *ends[:-1]], ends, strict=True)
    return [(tile, slice(first, end), slice(first - start, end - start)) for start, tile, first, end in kept]


def _predict_all(posterior: Posterior, loader: Iterable[Any], *, keep_members: bool, **settings: Any) -> Predictive:
    data = Loader.complete(loader, expect_posterior(posterior))
    parts: list[Predictive] = []
    targets: list[Tensor] = []
    for batch, part in predict_loader(posterior, data, keep_members=keep_members, **settings):
        if not parts:
            _log_memory(part, data, keep_members=keep_members)
        parts.append(part)
        targets.append(batch.y)
    found = Predictive.cat(parts)
    found.targets = posterior.likelihood.cat_targets(targets)
    return found


def _summarise_stored(
    members: Iterable[Posterior], loader: Loader, precision: PredictionPrecision
) -> SummaryPredictive:
    running: list[RunningSummary] = []
    targets: list[Tensor] = []
    lens = None
    for index, member in enumerate(members):
        seen, lens = 0, member.current_correction()
        try:
            for (_, y, _), predictive in predict_loader(member, loader, precision=precision, as_mixture=False):
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
    found = SummaryPredictive.cat(cast(list[SummaryPredictive], seen_whole))
    found.targets = member.likelihood.cat_targets(targets)
    return found


def _log_memory(predictive: Predictive, loader: Loader, *, keep_members: bool) -> None:
    """Logs the size of the result in bytes, with all members or only mean, aleatoric and epistemic."""
    described = predictive.defining_tensors()
    members, inputs = described[0].shape[:2]
    outputs = sum(math.prod(tensor.shape[2:]) for tensor in described)
    if (count := loader.length) is not None:
        inputs = inputs if loader.rows is None else min(inputs, loader.rows)  # which may be those of several batches
        numbers = inputs * count * (members * outputs if keep_members else outputs)
        size = format_bytes(numbers * described[0].element_size())
        log.info("the prediction of about %d inputs will take %s", inputs * count, size)
