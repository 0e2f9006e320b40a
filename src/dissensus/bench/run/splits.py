"""The predictions stage of a run: which splits there are, and what the members say about each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

from torch import Tensor

from dissensus import metrics
from dissensus.bench.names import listed
from dissensus.bench.rows.geometry import GEOMETRIES, Geometry
from dissensus.bench.rows.sets import TaskData
from dissensus.bench.rows.sources import TaskRows
from dissensus.bench.run.records import write_counts, write_predictions
from dissensus.bench.task.config import RunConfig
from dissensus.core.predictive import RegressionPredictive
from dissensus.data import Batches
from dissensus.data.standardise import Standardiser
from dissensus.evaluation.corrupted import Corruptions, corrupted_counts
from dissensus.evaluation.functions import Functions
from dissensus.evaluation.predictions import Predictions, predictions

Loader = Callable[[TaskRows], Batches]
CORRUPT, CHOOSE, GRID, TRAIN = "corrupt", "validation-corrupt", "grid", "train"
CALIBRATION = "calibration"  # held-out test rows


def split_names(config: RunConfig) -> list[str]:
    """test, calibration, ood-SET, shift-SET, grid, train, corrupt and validation-corrupt: each is a file of predictions."""
    names = ["test"] + [CALIBRATION] * (config.data.get("calibration", 0) != 0)
    names += [*(f"ood-{Path(name).stem}" for name in listed(config.data.get("ood", [])))]
    names += [f"shift-{Path(name).stem}" for name in listed(config.data.get("shift", []))]
    if config.data["name"] in GEOMETRIES:
        names.append(GRID)
    if config.evaluation.get("train_rows", False) or config.data.get("label_noise", 0) != 0:
        names.append(TRAIN)
    return [*names, *(split for split in (CORRUPT, CHOOSE) if corruptions(config, split) is not None)]


def corruptions(config: RunConfig, split: str = CORRUPT) -> Corruptions | None:
    """What [evaluation] says about corruptions of test rows, or of validation rows to choose by; None where it says none."""
    names = config.evaluation.get("corrupt" if split == CORRUPT else "choose", "none")
    if names in ("none", [], ""):
        return None
    severities = config.evaluation.get("severities", [1, 2, 3, 4, 5])
    return Corruptions(
        names if names in ("all", "benchmark") else listed(names),
        [severities] if isinstance(severities, int) else severities,
    )


def write_split(
    path: Path,
    split: str,
    config: RunConfig,
    data: TaskData,
    functions: Functions,
    loader: Loader,
    tell: Callable[[str], object],
) -> None:
    """Writes what the functions say about one split."""
    spec = corruptions(config, split) if split in (CORRUPT, CHOOSE) else None
    if spec is not None:
        rows = data.test if split == CORRUPT else data.validation
        rows = rows.first(config.evaluation.get("corrupt_rows"), seed=0)
        about = f"{len(spec.types)} corruptions × {len(spec.severities)} severities of {len(rows.y)} inputs"
        tell(about)
        counts = corrupted_counts(
            functions,
            loader(rows),
            replace(spec, standardiser=data.standardiser),
            tell=lambda done: tell(f"{about}: {done} done"),
        )
        write_counts(path, counts)
        return
    tell(split)
    kind, _, name = split.partition("-")
    rows = grid_rows(config, data) if split == GRID else _labelled_or_foreign(data)[kind][name]
    picture = data.standardiser.inverse if data.images else None
    found = predictions(functions, loader(rows), name=split, labelled=kind not in ("ood", GRID), picture=picture)
    write_predictions(path, in_original_units(found, data.targets, rows.y))


def in_original_units(predictions: Predictions, targets: Standardiser | None, y: Tensor) -> Predictions:
    """The predictions with means m·sd + mean and variances v·sd², in float64, and the original targets y (N, D)."""
    if targets is None:
        return predictions
    means, variances = cast(RegressionPredictive, predictions.predictive).described()
    means, variances, _ = metrics.unstandardise(
        means.double(), variances.double(), location=targets.mean, scale=targets.std
    )
    return replace(predictions, predictive=RegressionPredictive(means, variances), targets=y.double())


def geometry_of(config: RunConfig, data: TaskData) -> Geometry:
    """The geometry of a run's data, which has one."""
    return GEOMETRIES[config.data["name"]](data.train.x)


def grid_rows(config: RunConfig, data: TaskData) -> TaskRows:
    """The inputs of the grid; there are no targets, and what stands for them is not read."""
    inputs = geometry_of(config, data).inputs
    return TaskRows(inputs, data.train.y[:1].expand(len(inputs), *data.train.y.shape[1:]))


def _labelled_or_foreign(data: TaskData) -> dict[str, dict[str, TaskRows]]:
    own = {"test": data.test, CALIBRATION: data.calibration, TRAIN: data.train}
    return {**{kind: {"": rows} for kind, rows in own.items()}, "ood": data.ood, "shift": data.shift}
