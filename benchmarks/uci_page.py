"""What docs/results/tracking.md shows of results/uci.csv: the table, and what stands out in it for better and for worse."""

from __future__ import annotations

import statistics
from itertools import product

from rows import Row, by_key, made_by, markdown, paired, summary

from dissensus.bench.report.comparisons import SIGNIFICANT, holm_p_values

PROTEIN = "protein-tertiary-structure"
SHORT = {PROTEIN: "protein", "naval-propulsion-plant": "naval", "wine-quality-red": "wine"}
ORDER = ("map", "swag", "tradi", "tradi-diagonal", "mc_dropout", "deep_ensemble")
TITLES = {"rmse": "RMSE", "gaussian_nll": "NLL of one Gaussian", "nll": "NLL of the mixture"}
FAR = 4  # times the distance of the quartiles
# Lakshminarayanan et al. 2017, table 1, deep ensembles: (value, error)
PAPER = {
    "bostonHousing": {"rmse": (3.28, 1.00), "gaussian_nll": (2.41, 0.25)},
    "concrete": {"rmse": (6.03, 0.58), "gaussian_nll": (3.06, 0.18)},
    "naval-propulsion-plant": {"rmse": (0.00, 0.00), "gaussian_nll": (-5.63, 0.05)},
    "power-plant": {"rmse": (4.11, 0.17), "gaussian_nll": (2.79, 0.04)},
    PROTEIN: {"rmse": (4.71, 0.06), "gaussian_nll": (2.83, 0.02)},
    "wine-quality-red": {"rmse": (0.64, 0.04), "gaussian_nll": (0.94, 0.12)},
}


def table(rows: list[Row]) -> str:
    """The mixture's NLL by set and method, mean ± standard deviation over splits; beside the paper, that of one Gaussian."""
    lines = []
    for name in dict.fromkeys(row["set"] for row in rows):
        mine = {method: [row for row in rows if (row["set"], row["method"]) == (name, method)] for method in ORDER}
        cells = [number(mine[method], "nll") for method in ORDER if method != "tradi-diagonal"]
        value, error = PAPER[name]["gaussian_nll"]
        gaussian = number(mine["deep_ensemble"], "gaussian_nll")
        lines.append([SHORT.get(name, name), *cells, gaussian, f"{value:.2f} ± {error:.2f}"])
    return markdown(
        ["NLL", *(m for m in ORDER if m != "tradi-diagonal"), "deep_ensemble, one Gaussian", "published"], lines
    )


def number(rows: list[Row], column: str) -> str:
    mean, deviation, _ = summary(row[column] for row in rows)
    return f"{mean:.2f} ± {deviation:.2f}"


def verdicts(rows: list[Row]) -> str:
    """On how many sets our deep ensemble's NLL is within one published error of the published one, or better."""
    reached = {}
    for name in dict.fromkeys(row["set"] for row in rows):
        mine = [row["gaussian_nll"] for row in rows if (row["set"], row["method"]) == (name, "deep_ensemble")]
        value, error = PAPER[name]["gaussian_nll"]
        reached[name] = bool(mine) and summary(mine)[0] <= value + error
    missed = ", ".join(name for name, yes in reached.items() if not yes)
    return (
        f"The deep ensemble's NLL is within one published error of the published one, or better, on {sum(reached.values())} of "
        f"{len(reached)} sets{f' (not on {missed})' if missed else ''}."
    )


def behind(rows: list[Row]) -> tuple[list[str], int]:
    """Methods worse than the single network beyond chance, set by set, and how many comparisons that is adjusted for."""
    found = {}
    for name in dict.fromkeys(row["set"] for row in rows):
        of = {method: [row for row in rows if (row["set"], row["method"]) == (name, method)] for method in ORDER}
        for method, column in product(ORDER[1:], TITLES):
            each = paired(of[method], of["map"], column, by="split")
            if each is not None:
                found[name, method, column] = each
    adjusted = dict(zip(found, holm_p_values([each.p_value for each in found.values()]), strict=True))
    worse: dict[tuple[str, str], list[str]] = {}  # by set and column
    for (name, method, column), each in found.items():
        if each.difference > 0 and adjusted[name, method, column] < SIGNIFICANT:
            worse.setdefault((name, TITLES[column]), []).append(f"{method} by {each.difference:.2g}")
    said = [f"- {name}, {title}: {', '.join(texts)}." for (name, title), texts in worse.items()]
    return said, len(found)


def far_splits(rows: list[Row]) -> list[str]:
    """Splits on which a number lies above the median of all splits by more than FAR times the distance of the quartiles."""
    found: dict[tuple[str, int], dict[str, None]] = {}
    for name in dict.fromkeys(row["set"] for row in rows):
        for method in ORDER:
            for column in TITLES:
                by_split = {
                    int(row["split"]): float(row[column])
                    for row in rows
                    if (row["set"], row["method"]) == (name, method)
                }
                if len(by_split) < 10:
                    continue
                low, middle, high = statistics.quantiles(by_split.values(), n=4)
                for split, value in by_split.items():
                    if value - middle > FAR * (high - low):
                        found.setdefault((name, split), {})[method] = None
    return [f"{name}, split {split} ({', '.join(methods)})" for (name, split), methods in found.items()]


def page(rows: list[Row]) -> str:
    """The table with a verdict, what stands out for the worse, and where it comes from."""
    counts = {name: len({row["split"] for row in several}) for name, several in by_key(rows, "set").items()}
    most = max(counts.values())
    fewer = ", ".join(f"{SHORT.get(name, name)} {count}" for name, count in counts.items() if count < most)
    command = "python benchmarks/uci.py --run --data FOLDER --jobs 16"
    what = f"{most} standard splits{f' ({fewer})' * bool(fewer)}, mean ± standard deviation"
    made = made_by(command, rows, what, "RMSE, tradi-diagonal and every split in `uci.csv`")
    parts = [table(rows), verdicts(rows)]
    worse, count = behind(rows)
    title = f"Behind map beyond chance (p < {SIGNIFICANT:g} over splits, by Holm for {count} comparisons)"
    parts += [f"{title}:", "\n".join(worse)] if worse else [f"{title}: none."]
    if far := far_splits(rows):
        parts.append(f"Splits more than {FAR} quartile distances above the median: {'; '.join(far)}.")
    return "\n\n".join([*parts, made])
