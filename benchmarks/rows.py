"""Rows of a benchmark as CSV, and their means, intervals and tables."""

import csv
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dissensus.bench.report.comparisons import spread_of
from dissensus.bench.run.run_folder import commit, device_name

Row = dict[str, Any]
FACTS = ("commit", "torch", "device")  # in each row


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


def grouped(rows: Iterable[Row], keys: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    """The rows by their values of these columns."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def by_key(rows: Iterable[Row], key: str) -> dict[Any, list[Row]]:
    """The rows by their value of one column."""
    return {value: several for (value,), several in grouped(rows, [key]).items()}


def summary(values: Iterable[float]) -> tuple[float, float, float]:
    """(mean, standard deviation, standard error) of a few repetitions."""
    given = [float(value) for value in values]
    deviation = statistics.stdev(given) if len(given) > 1 else 0.0
    return statistics.fmean(given), deviation, deviation / math.sqrt(len(given))


def interval(values: Iterable[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of a few repetitions, by Student's t; the mean itself where they are all the same."""
    given = [float(value) for value in values]
    mean, half = statistics.fmean(given), spread_of(given, 0.0).half_width() if len(set(given)) > 1 else 0.0
    return mean - half, mean + half


class Paired(NamedTuple):
    """A mean difference over repetitions that two methods share, with its 95 % interval and p-value by Student's t."""

    difference: float
    lower: float
    upper: float
    p_value: float
    above: int  # repetitions with a difference above zero
    count: int


def paired(first: Sequence[Row], second: Sequence[Row], column: str, by: str = "seed") -> Paired | None:
    """The first rows' column minus the second's, on the seeds (or splits) both have; None for fewer than two."""
    theirs = {row[by]: float(row[column]) for row in second if row.get(column)}
    each = [float(row[column]) - theirs[row[by]] for row in first if row.get(column) and row[by] in theirs]
    if len(each) < 2:
        return None
    mean, found = statistics.fmean(each), spread_of(each, 0.0)
    half = found.half_width()
    return Paired(mean, mean - half, mean + half, found.p_value(mean), sum(d > 0 for d in each), len(each))


def seeds_of(rows: Sequence[Row], names: Mapping[str, str], by: str = "seed") -> str:
    """ "3 seeds", and where methods have different ones, whose are others: "seeds 0, 1, 2 (Deep ensemble: 0, 1)"."""
    each = {name: [int(row[by]) for row in several] for name, several in by_key(rows, "method").items()}
    every = sorted({number for several in each.values() for number in several})
    fewer = {name: sorted(several) for name, several in each.items() if sorted(several) != every}
    if not fewer:
        return f"{len(every)} {by}{'s' * (len(every) > 1)}"
    others = "; ".join(
        f"{names.get(name, name)}: {', '.join(map(str, several))} only" for name, several in fewer.items()
    )
    return f"{by}s {', '.join(map(str, every))} ({others})"


def made_on(device: torch.device | str) -> Row:
    """The facts of rows that are measured now."""
    return {"commit": commit(), "torch": torch.__version__, "device": device_name(torch.device(device))}


def training_time(rows: Sequence[Row]) -> str:
    """ "; 12 min of training", if the rows have it, else ""."""
    minutes = sum(float(row.get("cost/train_seconds") or 0) for row in rows) / 60
    return f"; {max(minutes, 1):.0f} min of training" if minutes else ""


def origins_of(rows: Sequence[Row]) -> str:
    """The rows' facts as they occur together: "commits a, b: torch 2, cpu; commit b: torch 2, cuda"."""
    every = []
    for (version, device), several in grouped(rows, FACTS[1:]).items():
        commits = list(dict.fromkeys(row["commit"] for row in several))
        every.append(f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}: torch {version}, {device}")
    return f"{'; '.join(every)}{training_time(rows)}"


def made_by(command: str, rows: Sequence[Row], what: str, more: str = "") -> str:
    """A line for below a table: the command, how often, what each row says of the program and the machine, and the file."""
    return f"*`{command}`; {what}; {origins_of(rows)}{f'; {more}' if more else ''}.*"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows])
