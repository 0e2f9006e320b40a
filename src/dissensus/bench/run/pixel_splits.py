"""Splits of a segmentation: stores metrics, means per image and a few maps instead of pixels."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from dissensus.bench.rows.dataset_rows import TaskRows
from dissensus.bench.rows.segmentation_rows import UNKNOWN
from dissensus.bench.rows.task_rows import TaskData
from dissensus.core.predictive import ClassificationPredictive
from dissensus.data.segmentation import VOID
from dissensus.engine.prediction_loop import FixedDraw
from dissensus.evaluation.evaluate import complete_evaluation
from dissensus.evaluation.evaluation import Evaluation
from dissensus.evaluation.robustness_curves import CorruptedCounts
from dissensus.evaluation.segmentation import pixel_ood, pixel_sums, ranking_numbers
from dissensus.metrics import CalibrationBins
from dissensus.storage.atomic_files import read_tensors, write_tensors
from dissensus.utils.file_errors import damage_error

BINS = "bins/"  # sums by confidence of test pixels and of foreign ones, for the ECE of both
SHOWN = 3  # test images with maps
VOID_LABEL, UNKNOWN_LABEL = -1, -2  # in the maps of `dissensus.plots.segmentation_maps`


class MeasuredSplit(NamedTuple):
    """The metrics and arrays of one split, under the names of an Evaluation."""

    metrics: dict[str, float]
    arrays: dict[str, Tensor]


def write_measured(path: Path, measured: MeasuredSplit) -> None:
    write_tensors(path, measured.arrays, {"metrics": measured.metrics})


def read_measured(path: Path) -> MeasuredSplit:
    arrays, facts = read_tensors(path)
    if not isinstance(facts.get("metrics"), dict):
        raise damage_error(path, "without 'metrics'")
    return MeasuredSplit(facts["metrics"], arrays)


def measure_pixels(
    split: str,
    rows: TaskRows,
    data: TaskData,
    functions: FixedDraw,
    loader: Callable[[TaskRows], Iterable[Any]],
    score: str,
) -> MeasuredSplit:
    """The numbers of one split: "test" with the numbers of members, cost and maps, "ood-SET", "train" or "shift-SET"."""
    kind, _, name = split.partition("-")
    if kind == "ood":
        rankings, bins = pixel_ood(functions, loader(rows), score, name=name, like=None)
        metrics, arrays = ranking_numbers(rankings, score, f"ood/{name}")
        return MeasuredSplit(metrics, arrays | {f"{BINS}{name}": _stack_bins(bins)})
    sums, _, images = pixel_sums(functions, loader(rows), name=split)
    found = sums.metrics(data.classes)
    if split != "test":
        return MeasuredSplit({f"{split.replace('-', '/')}/{key}": value for key, value in found.items()}, {})
    cost = {"cost/predict_ms": 1000 * sums.seconds / images}
    arrays = sums.arrays() | scene_maps(data, functions, loader) | {f"{BINS}test": _stack_bins(sums.bins)}
    return MeasuredSplit(found | sums.member_metrics() | cost, arrays)


def _stack_bins(bins: CalibrationBins) -> Tensor:
    return torch.stack([each.double().cpu() for each in bins])  # (3, K)


def scene_maps(data: TaskData, functions: FixedDraw, loader: Callable[[TaskRows], Iterable[Any]]) -> dict[str, Tensor]:
    """scenes/…: some test images (K, 3, H, W), their truth, and predictions for every pixel, (K, H, W) each."""
    foreign = data.ood[UNKNOWN].y == 1 if UNKNOWN in data.ood else torch.zeros_like(data.test.y, dtype=torch.bool)
    chosen = rows_to_show(foreign)
    truth = torch.where(foreign, UNKNOWN_LABEL, torch.where(data.test.y == VOID, VOID_LABEL, data.test.y.short()))
    found: dict[str, list[Tensor]] = {"prediction": [], "confidence": [], "entropy": [], "epistemic": []}
    for x, _ in loader(data.test.select(chosen)):
        predictive = cast(ClassificationPredictive, functions.predict(x))
        confidence, prediction = predictive.mean.max(1)
        said = (prediction.to(torch.uint8), confidence.half(), predictive.total.half(), predictive.epistemic.half())
        for several, each in zip(found.values(), said, strict=True):
            several.append(each.cpu())
    said_of_all = {name: torch.cat(several) for name, several in found.items()}
    scenes = {"image": data.test.x[chosen], "truth": truth[chosen], **said_of_all}
    return {f"scenes/{name}": each for name, each in scenes.items()}


def image_facts(data: TaskData) -> dict[str, Any]:
    """The facts that maps of the user's images need, since the data may be missing then; empty without masks."""
    if data.kind != "segmentation":
        return {}
    scale = data.standardiser
    return {"classes": data.classes, "mean": scale.mean.tolist(), "std": scale.std.tolist()}


def rows_to_show(foreign: Tensor) -> Tensor:
    """(K,) rows to show: from each of K parts of the set the row with most foreign pixels; foreign (N, H, W) boolean."""
    counts = foreign.flatten(1).sum(1)
    parts = torch.arange(len(counts)).tensor_split(min(SHOWN, len(counts)))
    return torch.stack([part[counts[part].argmax()] for part in parts])


def evaluation_of_pixels(
    parts: Mapping[str, MeasuredSplit],
    *,
    corrupted: CorruptedCounts | None,
    score: str,
    parameters: int,
    temperature: float,
) -> Evaluation:
    """The Evaluation of the splits, "test" among them."""
    metrics = {key: value for part in parts.values() for key, value in part.metrics.items()}
    arrays = {key: value for part in parts.values() for key, value in part.arrays.items()}
    ood, shift = (
        tuple(split.removeprefix(f"{kind}-") for split in parts if split.startswith(f"{kind}-"))
        for kind in ("ood", "shift")
    )
    milliseconds = metrics.pop("cost/predict_ms")
    bins = {key.removeprefix(BINS): CalibrationBins(*arrays.pop(key)) for key in [*arrays] if key.startswith(BINS)}
    for name in ood:
        metrics[f"ood/{name}/ece_union"] = float(bins["test"].merge(bins[name]).ece())
    found = Evaluation("segmentation", metrics, arrays, score, ood, shift)
    return complete_evaluation(found, corrupted, {}, temperature, parameters, milliseconds)
