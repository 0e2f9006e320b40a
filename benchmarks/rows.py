"""Rows of a benchmark as CSV, and their means, intervals and tables."""

import csv
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """The rows there are; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """The file with these rows; columns that some of them lack are left empty there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def summary(values: Iterable[float]) -> tuple[float, float, float]:
    """(mean, standard deviation, standard error) of a few repetitions."""
    given = [float(value) for value in values]
    deviation = statistics.stdev(given) if len(given) > 1 else 0.0
    return statistics.fmean(given), deviation, deviation / math.sqrt(len(given))


# Student's t: the 97.5 % quantile for 1, 2, … degrees of freedom
STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)


def interval(values: Iterable[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of a few repetitions, by Student's t; the mean itself where there is one alone."""
    given = [float(value) for value in values]
    mean, _, error = summary(given)
    half = STUDENT[min(len(given), 1 + len(STUDENT)) - 2] * error if len(given) > 1 else 0.0
    return mean - half, mean + half


def made_by(command: str, rows: Sequence[Row], what: str) -> str:
    """A line for below a table: the command, how often, and what each row says of the program and the machine."""
    facts = ("commit", "torch", "device")
    commit, torch, device = (" and ".join(dict.fromkeys(row[key] for row in rows)) for key in facts)
    how = "mean ± standard deviation (95 % interval of the mean)"
    return f"*`{command}`; {what}, {how}; commit {commit}, torch {torch}, {device}.*"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows])
