"""Rows of a benchmark in a CSV that grows: what is in it is not done again."""

import csv
import math
import platform
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from dissensus.bench.provenance import commit, device_name

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """The rows there are; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Adds rows at the end, with a header if the file is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        if new:
            writer.writeheader()
        writer.writerows(rows)


def origin(device: torch.device) -> Row:
    """Where numbers come from: columns of every row."""
    return {
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
    }


def summary(values: Iterable[float]) -> tuple[float, float, float]:
    """(mean, standard deviation, standard error) of a few repetitions."""
    given = [float(value) for value in values]
    deviation = statistics.stdev(given) if len(given) > 1 else 0.0
    return statistics.fmean(given), deviation, deviation / math.sqrt(len(given))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows])
