"""The prediction stage of a run: its splits, and the members' predictions for each."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

from torch import Tensor

from dissensus import metrics
from dissensus.bench.names import name_list
from dissensus.bench.rows.dataset_rows import TaskRows
from dissensus.bench.rows.low_dimensional import GEOMETRIES, Geometry
from dissensus.bench.rows.named_sets import task_set
from dissensus.bench.rows.segmentation_rows import UNKNOWN
from dissensus.bench.rows.task_rows import TaskData
from dissensus.bench.run.pixel_splits import measure_pixels, write_measured
from dissensus.bench.run.records import write_attacked, write_counts, write_predictions
from dissensus.bench.task.config import RunConfig
from dissensus.core.predictive import RegressionPredictive
from dissensus.data import Batches
from dissensus.data.input_transforms import Standardiser
from dissensus.engine.prediction_loop import FixedDraw
from dissensus.evaluation.evaluate import check_attackable, checked_score
from dissensus.evaluation.loader_predictions import Predictions, predictions
from dissensus.evaluation.robustness_curves import AttackCurves, Corruptions, attacked_inputs, corrupted_counts

Loader = Callable[[TaskRows], Batches]
CORRUPT, CHOOSE, GRID, TRAIN = "corrupt", "validation-corrupt", "grid", "train"
CALIBRATION = "calibration"  # held-out test rows
ATTACK = "attack"


def split_names(config: RunConfig, load: Callable[[], TaskData]) -> list[str]:
    """test, calibration, ood-SET, shift-SET, grid, train, attack, corrupt and validation-corrupt: one file each.

    `load`: reads the data, which are needed to know the sets that come with a user's data set.
    """
    scenes = is_segmentation(config)  # their calibration rows are only used for a temperature
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


def is_segmentation(config: RunConfig) -> bool:
    return config.kind == "segmentation"


def corruptions(config: RunConfig, split: str = CORRUPT) -> Corruptions | None:
    """The corruptions of test rows, or of validation rows for a choice, in [evaluation]; None if there are none."""
    names = config.evaluation.get("corrupt" if split == CORRUPT else "choose", "none")
    if names in ("none", [], ""):
        return None
    severities = config.evaluation.get("severities", [1, 2, 3, 4, 5])
    return Corruptions(
        names if names in ("all", "benchmark") else name_list(names),
        [severities] if isinstance(severities, int) else severities,
    )


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


def split_writer(
    split: str, config: RunConfig, data: TaskData, functions: FixedDraw, loader: Loader, tell: Callable[[str], object]
) -> Callable[[Path], None]:
    """Runs the functions on one split now; returns a function that writes their predictions to a file."""
    spec = corruptions(config, split) if split in (CORRUPT, CHOOSE) else None
    if spec is not None:
        rows = data.test if split == CORRUPT else data.validation
        rows = rows.sample(config.evaluation.get("corrupt_rows"), seed=0)
        about = f"{len(spec.types)} corruptions × {len(spec.severities)} severities of {len(rows.y)} inputs"
        tell(about)
        spec = replace(spec, standardiser=data.standardiser)
        counts = corrupted_counts(functions, loader(rows), spec, tell=lambda done: tell(f"{about}: {done} done"))
        return lambda path: write_counts(path, counts)
    attacks = attack_curves(config) if split == ATTACK else None
    if attacks is not None:
        rows = data.test.sample(config.evaluation.get("attack_rows"), seed=0)
        about = f"{len(attacks.names)} attacks × {len(attacks.epsilons)} ε on {len(rows.y)} inputs"
        tell(about)
        bounds = (0.0, 1.0) if data.has_images else None
        found = attacked_inputs(
            functions,
            loader(rows),
            replace(attacks, standardiser=data.standardiser, bounds=bounds),
            tell=lambda done: tell(f"{about}: {done} done"),
        )
        return lambda path: write_attacked(path, found)
    tell(split)
    kind, _, name = split.partition("-")
    rows = grid_rows(config, data) if split == GRID else _rows_by_split(data)[kind][name]
    if is_segmentation(config):
        score = checked_score(config.evaluation.get("score"), "segmentation", functions.members)
        measured = measure_pixels(split, rows, data, functions, loader, score)
        return lambda path: write_measured(path, measured)
    picture = data.standardiser.inverse if data.has_images else None
    said = predictions(functions, loader(rows), name=split, labelled=kind not in ("ood", GRID), picture=picture)
    return lambda path: write_predictions(path, in_original_units(said, data.targets, rows.y))


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


def grid_rows(config: RunConfig, data: TaskData) -> TaskRows:
    """The inputs of the grid; their targets are placeholders and are not read."""
    inputs = geometry_of(config, data).inputs
    return TaskRows(inputs, data.train.y[:1].expand(len(inputs), *data.train.y.shape[1:]))


def _rows_by_split(data: TaskData) -> dict[str, dict[str, TaskRows]]:
    own = {"test": data.test, CALIBRATION: data.calibration, TRAIN: data.train}
    return {**{kind: {"": rows} for kind, rows in own.items()}, "ood": data.ood, "shift": data.shift}
