"""The prediction stage of a run: its splits, and the members' predictions for each.

Splits of a segmentation store metrics, means per image and a few maps instead of pixels.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from dissensus import metrics
from dissensus.bench.rows.dataset_rows import TaskRows, find_file
from dissensus.bench.rows.named_sets import GEOMETRIES, UNKNOWN, Geometry, task_set
from dissensus.bench.rows.task_rows import TaskData
from dissensus.bench.run.run_folder import write_attacked, write_counts, write_predictions
from dissensus.bench.setting_checks import name_list
from dissensus.bench.task.config import RunConfig
from dissensus.core.predictive import ClassificationPredictive, RegressionPredictive
from dissensus.data.input_transforms import Standardiser
from dissensus.data.segmentation import VOID
from dissensus.engine.prediction_loop import FixedDraw
from dissensus.evaluation.evaluate import check_attackable, checked_score, complete_evaluation
from dissensus.evaluation.evaluation import Evaluation
from dissensus.evaluation.loader_predictions import Predictions, predictions
from dissensus.evaluation.robustness_curves import (
    AttackCurves,
    CorruptedCounts,
    Corruptions,
    attacked_inputs,
    corrupted_counts,
)
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
    found: dict[str, list[Tensor]] = {"prediction": [], "confidence": [], "total": [], "epistemic": []}
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
    storage: Mapping[str, float],
    temperature: float,
) -> Evaluation:
    """The Evaluation of the splits, "test" among them."""
    metrics = {key: value for part in parts.values() for key, value in part.metrics.items()}
    arrays = {key: value for part in parts.values() for key, value in part.arrays.items()}
    sets = [split.partition("-") for split in parts]
    ood, shift = (tuple(name for kind, dash, name in sets if dash and kind == wanted) for wanted in ("ood", "shift"))
    milliseconds = metrics.pop("cost/predict_ms")
    bins = {key.removeprefix(BINS): CalibrationBins(*arrays.pop(key)) for key in [*arrays] if key.startswith(BINS)}
    for name in ood:
        metrics[f"ood/{name}/ece_union"] = float(bins["test"].merge(bins[name]).ece())
    found = Evaluation("segmentation", metrics, arrays, score, ood, shift)
    return complete_evaluation(found, corrupted, {}, temperature, storage, milliseconds)


CORRUPT, CHOOSE, GRID, TRAIN = "corrupt", "validation-corrupt", "grid", "train"
CALIBRATION = "calibration"  # held-out test rows
ATTACK = "attack"


def split_names(config: RunConfig, load: Callable[[], TaskData]) -> list[str]:
    """test, calibration, ood-SET, shift-SET, grid, train, attack, corrupt and validation-corrupt: one file each.

    `load`: reads the data, which are needed to know the sets that come with a user's data set.
    """
    scenes = config.kind == "segmentation"  # their calibration rows are only used for a temperature
    names = ["test"] + [CALIBRATION] * (config.data.get("calibration", 0) != 0 and not scenes)
    if task_set(config.data["name"]).is_user_data:
        data = load()
        names += [*(f"ood-{name}" for name in data.ood), *(f"shift-{name}" for name in data.shift)]
    else:
        names += [*(f"ood-{Path(name).stem}" for name in name_list(config.data.get("ood", [])))]
        names += [f"ood-{UNKNOWN}"] * bool(config.data.get("unknown"))
        names += [f"shift-{Path(name).stem}" for name in name_list(config.data.get("shift", []))]
    if config.data["name"] in GEOMETRIES:
        names.append(GRID)
    if config.evaluation.get("train_rows", False) or config.data.get("label_noise", 0) != 0:
        names.append(TRAIN)
    if attack_curves(config) is not None:
        names.append(ATTACK)
    return [*names, *(split for split in (CORRUPT, CHOOSE) if corruptions(config, split) is not None)]


def corruptions(config: RunConfig, split: str = CORRUPT) -> Corruptions | None:
    """The corruptions of test rows, or of validation rows for a choice, in [evaluation]; None if there are none."""
    names = config.evaluation.get("corrupt" if split == CORRUPT else "choose", "none")
    if names in ("none", [], ""):
        return None
    severities = config.evaluation.get("severities", [1, 2, 3, 4, 5])
    types = names if names in ("all", "benchmark") else name_list(names)
    return Corruptions(types, [severities] if isinstance(severities, int) else severities)


def attack_curves(config: RunConfig) -> AttackCurves | None:
    """The attacks on test rows in [evaluation]; None if there are none."""
    given = config.evaluation
    if given.get("attack", "none") in ("none", [], ""):
        return None
    check_attackable(config.kind)
    return AttackCurves(
        given.get("epsilons", []),
        name_list(given["attack"]),
        norm=str(given.get("attack_norm", "inf")),  # type: ignore[arg-type]
        steps=given.get("attack_steps", 10),
        fool_steps=given.get("fool_steps", 0),
    )


def split_writer(split: str, run: Any, functions: FixedDraw, tell: Callable[[str], object]) -> Callable[[Path], None]:
    """Runs the functions of a `Run` on one split now; returns a function that writes their predictions to a file."""
    config, data, loader = run.config, run.data, run.loader
    spec = corruptions(config, split) if split in (CORRUPT, CHOOSE) else None
    if spec is not None:
        rows = data.test if split == CORRUPT else data.validation
        if split == CORRUPT and (place := config.evaluation.get("corrupt_files")):
            spec = replace(spec, files=find_file(place, run.folders, "evaluation.corrupt_files = "))
        else:
            rows = rows.sample(config.evaluation.get("corrupt_rows"), seed=0)
        about = f"{len(spec.types)} corruptions × {len(spec.severities)} severities of {len(rows.y)} inputs"
        tell(about)
        spec = replace(spec, standardiser=data.standardiser)
        counts = corrupted_counts(functions, tell_progress(loader(rows), about, tell), spec)
        return lambda path: write_counts(path, counts)
    attacks = attack_curves(config) if split == ATTACK else None
    if attacks is not None:
        rows = data.test.sample(config.evaluation.get("attack_rows"), seed=0)
        about = f"{len(attacks.names)} attacks × {len(attacks.epsilons)} ε on {len(rows.y)} inputs"
        tell(about)
        bounds = (0.0, 1.0) if data.has_images else None
        asked = replace(attacks, standardiser=data.standardiser, bounds=bounds)
        found = attacked_inputs(functions, tell_progress(loader(rows), about, tell), asked)
        return lambda path: write_attacked(path, found)
    tell(split)
    rows = _split_rows(split, config, data)
    if config.kind == "segmentation":
        score = checked_score(config.evaluation.get("score"), "segmentation", functions.members)
        measured = measure_pixels(split, rows, data, functions, loader, score)
        return lambda path: write_tensors(path, measured.arrays, {"metrics": measured.metrics})
    picture = data.standardiser.inverse if data.has_images else None
    labelled = split != GRID and not split.startswith("ood-")
    said = predictions(functions, loader(rows), name=split, labelled=labelled, picture=picture)
    return lambda path: write_predictions(path, in_original_units(said, data.targets, rows.y))


def tell_progress(loader: Iterable[Any], about: str, tell: Callable[[str], object]) -> Iterator[Any]:
    """The loader's batches (x, y); after each, `tell` is called with the number of inputs done."""
    done = 0
    for batch in loader:
        yield batch
        tell(f"{about}: {(done := done + len(batch[1]))} done")


def in_original_units(predictions: Predictions, targets: Standardiser | None, y: Tensor) -> Predictions:
    """Predictions in original units, in float64 (means m·sd + mean, variances v·sd²), with the original targets y (N, D)."""
    if targets is None:
        return predictions
    means, variances = cast(RegressionPredictive, predictions.predictive).defining_tensors()
    shape = {"location": targets.mean, "scale": targets.std}
    means, variances, _ = metrics.unstandardise(means.double(), variances.double(), **shape)
    return replace(predictions, predictive=RegressionPredictive(means, variances), targets=y.double())


def geometry_of(config: RunConfig, data: TaskData) -> Geometry:
    """The geometry of a run's data, which has one."""
    return GEOMETRIES[config.data["name"]](data.train.x)


def _split_rows(split: str, config: RunConfig, data: TaskData) -> TaskRows:
    if split == GRID:
        inputs = geometry_of(config, data).inputs  # with targets that are placeholders and are not read
        return TaskRows(inputs, data.train.y[:1].expand(len(inputs), *data.train.y.shape[1:]))
    own = {"test": data.test, CALIBRATION: data.calibration, TRAIN: data.train}
    others = {"ood": data.ood, "shift": data.shift}
    kind, _, name = split.partition("-")
    return others[kind][name] if kind in others else own[split]
