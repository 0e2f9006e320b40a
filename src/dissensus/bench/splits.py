"""The predictions stage of a run: which splits there are, and what the members say about each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dissensus.bench.config import RunConfig
from dissensus.bench.loaders import StandardisedBatches
from dissensus.bench.names import listed
from dissensus.bench.records import write_counts, write_predictions
from dissensus.bench.sets import Rows, TaskData
from dissensus.evaluation.corrupted import Corruptions, corrupted_counts
from dissensus.evaluation.functions import Functions
from dissensus.evaluation.predictions import predictions

Loader = Callable[[Rows], StandardisedBatches]
CORRUPT = "corrupt"


def split_names(config: RunConfig) -> list[str]:
    """test, ood-SET, shift-SET and corrupt: each is a file of predictions."""
    names = ["test", *(f"ood-{Path(name).stem}" for name in listed(config.data.get("ood", [])))]
    names += [f"shift-{Path(name).stem}" for name in listed(config.data.get("shift", []))]
    return [*names, CORRUPT] if corruptions(config) is not None else names


def corruptions(config: RunConfig) -> Corruptions | None:
    """What [evaluation] says about corruptions; None where there are none."""
    names = config.evaluation.get("corrupt", "none")
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
    spec = corruptions(config)
    if split == CORRUPT and spec is not None:
        rows = data.test.first(config.evaluation.get("corrupt_rows"), seed=0)
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
    rows = {"test": {"": data.test}, "ood": data.ood, "shift": data.shift}[kind][name]
    picture = data.standardiser.inverse if data.images else None
    found = predictions(functions, loader(rows), name=split, labelled=kind != "ood", picture=picture)
    write_predictions(path, found)
