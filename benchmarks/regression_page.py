"""What docs/results/tables.md shows of the rows of regression_tables.py: verdicts, differences, a table for each measure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import regression_sets
from regression_tables import CV, HISTOGRAM, LINEAR, OWN, SPLIT
from rows import Paired, Row, by_key, interval, markdown, origins_of, paired, summary

from dissensus.bench.report.comparisons import SIGNIFICANT, holm_p_values

SMALL = 1000  # rows: what CV+ is for
SHOWN = {
    "rmse": "RMSE",
    "interval_score": "interval score",
    "coverage90": "coverage, %",
}
PAIRS = (  # first model, second model
    (CV, SPLIT),
    (CV, HISTOGRAM),
    (CV, "gradient boosting (CV+)"),
    (SPLIT, "TabM (split)"),
)
COMPARED = ("rmse", "interval_score")
COLUMNS = (SPLIT, CV, "TabM (split)", "gradient boosting (CV+)", HISTOGRAM)  # the file has all models


def page(rows: list[Row]) -> str:
    """What docs/results/tables.md shows."""
    if not rows:
        return "Not measured yet."
    made = {f"scikit-learn {row['scikit-learn']}, MAPIE {row['mapie']}, TabM {row['tabm']}" for row in rows}
    origin = (
        f"*`python benchmarks/regression_tables.py --run`; 90 % intervals, one thread, {' and '.join(sorted(made))}; "
    )
    if any(row["device"].startswith("cuda") for row in rows):
        origin += "TabM ran on a GPU, its seconds are those of a step on one core times its steps; "
    parts = [coverage_sentence(rows), network_sentence(rows), verdicts(rows), sizes(rows)]
    parts += [*(measure_table(rows, key) for key in SHOWN), seconds_table(rows)]
    more = "other models, widths and every split in `regression_tables.csv`"
    return "\n\n".join([*parts, f"{origin}means over ten splits; {more}; {origins_of(rows)}.*"])


def tables_by_size(rows: Sequence[Row]) -> list[str]:
    return sorted({row["set"] for row in rows}, key=lambda name: int(by_key(rows, "set")[name][0]["table_rows"]))


def values(rows: Sequence[Row], name: str, model: str, key: str) -> list[float]:
    return [float(row[key]) for row in rows if (row["set"], row["model"]) == (name, model)]


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def measure_table(rows: list[Row], key: str) -> str:
    """Means over splits, a line for each table, a column for each model; the least error and score shown in bold."""
    models = [model for model in COLUMNS if any(row["model"] == model for row in rows)]
    lines = []
    for name in tables_by_size(rows):
        means = [statistics.fmean(values(rows, name, model, key)) for model in models]
        cells = [number(mean) for mean in means]
        if key == "coverage90":
            cells = [f"{100 * mean:.0f}" for mean in means]
        if key in COMPARED:
            cells = [f"**{c}**" if mean == min(means) else c for c, mean in zip(cells, means, strict=True)]
        lines.append([name, *cells])
    return markdown([SHOWN[key], *models], lines)


def seconds_table(rows: list[Row]) -> str:
    """Processor seconds of one fit: the least, the median and the most over tables."""
    models = [model for model in COLUMNS if any(row["model"] == model for row in rows)]
    each = {m: [statistics.fmean(values(rows, name, m, "seconds")) for name in tables_by_size(rows)] for m in models}
    kinds = {"least": min, "median": statistics.median, "most": max}
    lines = [[f"{kind} of all tables", *(f"{of(each[m]):.1f}" for m in models)] for kind, of in kinds.items()]
    return markdown(["seconds of one core", *models], lines)


def sizes(rows: list[Row]) -> str:
    """Where each table comes from, and how large it is."""
    lines = []
    for name in tables_by_size(rows):
        first = by_key(rows, "set")[name][0]
        counts = [f"{int(first[key]):,}" for key in ("table_rows", "rows", "columns", "categories")]
        lines.append([name, regression_sets.origin_of(name), *counts])
    return markdown(["table", "source", "rows", "training rows", "columns", "categories"], lines)


def measured_pairs(rows: Sequence[Row]) -> list[tuple[str, str]]:
    models = {row["model"] for row in rows}
    return [pair for pair in PAIRS if models.issuperset(pair)]


class Difference(NamedTuple):
    """One model beside another on one table, over its splits."""

    paired: Paired
    ratio: float  # of the means
    p_value: float  # adjusted

    @property
    def beyond_chance(self) -> bool:
        return self.p_value < SIGNIFICANT


def compare(rows: list[Row], first: str, second: str) -> dict[tuple[str, str], Difference]:
    """(measure, table) -> difference; Holm's adjustment is for all tables and both measures of this pair."""
    found = {}
    for column in ("rmse", "interval_score"):
        for name in tables_by_size(rows):
            mine, theirs = ([r for r in rows if (r["set"], r["model"]) == (name, m)] for m in (first, second))
            if (each := paired(mine, theirs, column, by="split")) is not None:
                ratio = summary(r[column] for r in mine)[0] / summary(r[column] for r in theirs)[0]
                found[column, name] = (each, ratio)
    adjusted = holm_p_values([each.p_value for each, _ in found.values()])
    return {key: Difference(*both, p) for (key, both), p in zip(found.items(), adjusted, strict=True)}


def verdicts(rows: list[Row]) -> str:
    """What the differences of two models come to over tables, with one line more for small tables where rows are held out."""
    small = {row["set"] for row in rows if int(row["table_rows"]) < SMALL}
    lines = []
    for first, second in measured_pairs(rows):
        found = compare(rows, first, second)
        for column in COMPARED:
            mine = {name: each for (key, name), each in found.items() if key == column}
            lines.append([f"{first} over {second}: {SHOWN[column]}", *told_apart(mine)])
            if second == SPLIT:
                few = {name: each for name, each in mine.items() if name in small}
                lines.append([f"… on tables under {SMALL:,} rows", *told_apart(few)])
    heads = ["", "average over tables, % (95 % interval)", "lower on", "lower beyond chance", "higher beyond chance"]
    return (
        f"{markdown(heads, lines)}\n\nNegative: the first is better. Beyond chance: p < {SIGNIFICANT:g} by "
        "Student's t over splits, by Holm for all tables and both measures of a pair; splits share rows, so the p-values are "
        "somewhat too small. In bold: the best model shown."
    )


def told_apart(found: dict[str, Difference]) -> list[str]:
    """The mean ratio, how often the first is lower, and where either is beyond chance."""
    logs = [float(np.log(each.ratio)) for each in found.values()]
    low, high = (percent(float(np.exp(end)), 1) for end in interval(logs))
    cells = [f"{percent(float(np.exp(statistics.fmean(logs))), 1)} ({low} to {high})"]
    cells.append(f"{sum(each < 0 for each in logs)} of {len(logs)}")
    for sign in (-1, 1):
        sure = [name for name, each in found.items() if each.beyond_chance and sign * (each.ratio - 1) > 0]
        cells.append(", ".join(sure) or "none")
    return cells


def percent(ratio: float, digits: int = 0) -> str:
    return f"{100 * ratio - 100:+.{digits}f}".replace("-", "−")


def coverage_sentence(rows: list[Row]) -> str:
    """The least and the most that intervals cover on a table."""
    parts = []
    for model in (CV, SPLIT, OWN):
        covered = {
            n: statistics.fmean(each) for n in tables_by_size(rows) if (each := values(rows, n, model, "coverage90"))
        }
        least, most = min(covered, key=covered.__getitem__), max(covered, key=covered.__getitem__)
        parts.append(f"{model} {100 * covered[least]:.1f} % ({least}) to {100 * covered[most]:.1f} % ({most})")
    return f"*Do 90 % intervals cover 90 %?* From the least to the most over tables: {'; '.join(parts)}."


def network_sentence(rows: list[Row]) -> str:
    """Tables from the best for networks to the worst, and rank correlations of that order with what a table is like."""
    from scipy.stats import spearmanr

    names = tables_by_size(rows)
    mean = {(n, m): statistics.fmean(values(rows, n, m, "rmse")) for n in names for m in (CV, HISTOGRAM, LINEAR)}
    facts = {n: {key: int(by_key(rows, "set")[n][0][key]) for key in ("rows", "columns", "categories")} for n in names}
    ratio = {n: mean[n, CV] / mean[n, HISTOGRAM] for n in names}
    kinds = {
        "the number of training rows": [facts[n]["rows"] for n in names],
        "the share of columns that are categories": [facts[n]["categories"] / facts[n]["columns"] for n in names],
        f"the error of {LINEAR} over that of {HISTOGRAM}": [mean[n, LINEAR] / mean[n, HISTOGRAM] for n in names],
    }
    found = {kind: spearmanr(list(ratio.values()), column) for kind, column in kinds.items()}
    adjusted = holm_p_values([float(each.pvalue) for each in found.values()])
    parts, sure = [], []
    for (kind, each), p_value in zip(found.items(), adjusted, strict=True):
        size = f"p = {p_value:.2f}" if p_value >= 0.01 else "p < 0.01"
        parts.append(f"{each.statistic:+.2f} with {kind} ({size})".replace("-", "−", 1))
        if p_value < SIGNIFICANT:
            sure.append(f"where {kind} is {'small' if each.statistic > 0 else 'large'}")
    return (
        f"*When do networks win?* Tables from the best for {CV} to the worst, by its RMSE over that of {HISTOGRAM}: "
        f"{', '.join(f'{n} ({ratio[n]:.2f})' for n in sorted(names, key=ratio.__getitem__))}. Rank correlation of this ratio "
        f"over {len(names)} tables (adjusted by Holm): {'; '.join(parts)}. Beyond chance, networks gain "
        f"{' and '.join(sure) or 'with none of the three: on a table like these, try both'}."
    )
