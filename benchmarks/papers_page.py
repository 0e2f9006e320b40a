"""What docs/results/papers.md shows of results/papers: our numbers beside the published ones, and which differences come out.

`python benchmarks/papers.py --collect benchmarks/results/papers` makes both CSV files from the kept runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rows import Row, markdown, origins_of, read_rows, summary

from dissensus.bench.report.published_numbers import PublishedNumber, published_numbers
from dissensus.bench.task.config import Task, load_task

RESULTS = Path(__file__).parent / "results" / "papers"
PAGE = Path(__file__).parents[1] / "docs" / "results" / "papers.md"
TASKS = ("cifar10-forde", "cifar100-forde", "cifar100-alpha")
# key -> title, factor, digits, rounding of a published difference, in our units
COLUMNS: dict[str, tuple[str, float, int, float]] = {
    "accuracy": ("accuracy, %", 100, 1, 0.001),
    "nll": ("NLL", 1, 3, 0.01),
    "ece": ("ECE", 1, 3, 0.001),
    "corrupt/accuracy": ("cA, %", 100, 1, 0.001),
    "corrupt/nll": ("cNLL", 1, 2, 0.01),
    "corrupt/ece": ("cECE", 1, 2, 0.01),
}
JUDGED = ("corrupt/accuracy", "corrupt/nll")
COMPARED = ("accuracy", "nll", *JUDGED)  # those with a value for each image
RESAMPLES, CHUNK = 2000, 100


# ------------------------------------------------------------------------------------------- comparisons, from the kept files


def pairs(out: Path) -> list[Row]:
    """Every method against the task's baseline on the seeds both have: one row per measure."""
    found = []
    for folder in sorted({path.parent for path in out.glob("*/*.npz")}):
        size = next((size for size in ("smoke", "short", "paper") if folder.name.endswith(f"-{size}")), None)
        if size is None:
            continue  # runs with changed settings
        task = load_task(folder.name.removesuffix(f"-{size}"), size=size)
        base = per_seed(folder, str(task.settings["baseline"]))
        for method in task.methods:
            other = per_seed(folder, method)
            common = sorted(base.keys() & other.keys())
            if not common or method == task.settings["baseline"]:
                continue
            for key in COMPARED[: 2 + 2 * ("corrupt" in task.settings["evaluation"])]:
                each = np.stack([other[seed][key] - base[seed][key] for seed in common])  # (seeds, images)
                found.append({"task": task.name, "size": size, "method": method, "metric": key} | bootstrap(each))
    return found


def per_seed(folder: Path, method: str) -> dict[int, dict[str, np.ndarray]]:
    """Seed -> measure -> (N,) one value per image."""
    found = {}
    for path in folder.glob(f"{method}-seed*.npz"):
        with np.load(path, allow_pickle=False) as kept:
            nll = kept["clean/nll"].astype(np.float64)
            correct = np.unpackbits(kept["clean/correct"])[: len(nll)].astype(np.float64)
            there = [name for name in ("accuracy", "nll") if f"corrupted/{name}" in kept]
            damaged = {f"corrupt/{name}": kept[f"corrupted/{name}"].astype(np.float64).mean(0) for name in there}
            found[int(path.stem.rpartition("-seed")[2])] = {"accuracy": correct, "nll": nll, **damaged}
    return found


def bootstrap(differences: np.ndarray) -> Row:
    """Mean difference and 95 % interval of differences (seeds, images).

    An image is a cluster: it is drawn with its values of all seeds and corruptions. Seeds are strata: none is drawn.
    """
    by_image, rng = differences.mean(0), np.random.default_rng(0)
    drawn = [
        by_image[rng.integers(0, len(by_image), (CHUNK, len(by_image)))].mean(1) for _ in range(RESAMPLES // CHUNK)
    ]
    lower, upper = np.quantile(np.concatenate(drawn), (0.025, 0.975))
    each = differences.mean(1)
    facts = {"difference": by_image.mean(), "lower": lower, "upper": upper, "seeds": len(each)}
    return {**{name: round(float(value), 6) for name, value in facts.items()}, "above": int((each > 0).sum())}


# ------------------------------------------------------------------------------------------- the page, from the CSV files


def pages() -> Iterator[tuple[Path, str, str]]:
    rows, compared = (read_rows(RESULTS / name) for name in ("papers.csv", "pairs.csv"))
    for name in TASKS:
        yield PAGE, name, page(load_task(name), rows, compared)


def page(task: Task, rows: list[Row], compared: list[Row]) -> str:
    """The table of a task's size, and a line about how it was made."""
    theirs = published_numbers(task.settings["reference"])
    mine = [row for row in rows if (row["task"], row["size"]) == (task.name, task.size)]
    compared = [row for row in compared if (row["task"], row["size"]) == (task.name, task.size)]
    keys = [key for key in COLUMNS if any(key in row for row in theirs.values())]
    judged = [key for key in JUDGED if key in keys]
    lines = []
    for method in task.methods:
        if not (runs := [row for row in mine if row["method"] == method]):
            continue
        numbers = theirs.get(method, {})
        cells = [number_cell(key, [float(row[key]) for row in runs], numbers.get(key)) for key in keys]
        minutes = f"{summary(float(row['seconds']) / 60 for row in runs)[0]:.1f}"
        own = {row["metric"]: row for row in compared if row["method"] == method}
        says = "; ".join(
            f"{COLUMNS[key][0].split(',')[0]} {judge(key, own[key], task, method)}" for key in judged if own
        )
        lines.append([method, str(len(runs)), *cells, minutes, says])
    header = ["method", "seeds", *(COLUMNS[key][0] for key in keys), "minutes", f"against {task.settings['baseline']}"]
    left = [method for method in task.methods if not any(row["method"] == method for row in mine)]
    made = f"*Ours, mean over seeds (published). {task.settings['reference']['source']}."
    spent = sum(float(row["seconds"]) for row in mine) / 60
    made += f" `{command(task, task.methods)}`{f'; {origins_of(mine)}; {spent:.0f} min of a GPU' if mine else ''}.*"
    if chosen := chosen_method(task, mine):
        made = f"Chosen on the held-out images: {chosen}.\n\n{made}"
    asked = f"\n\nNot run: `{command(task, left)}`; {expected_minutes(left, rows)} min of a GPU" if left else ""
    return f"{markdown(header, lines)}\n\n{made}{asked}" if lines else f"{task.settings['reference']['source']}.{asked}"


def chosen_method(task: Task, rows: list[Row]) -> str | None:
    """The swept method with the highest accuracy on corrupted held-out images; None unless all of them were run."""
    key, others = "validation/corrupt/accuracy", [each for each in task.methods if each != task.settings["baseline"]]
    means = {
        method: summary(found)[0]
        for method in others
        if (found := [float(row[key]) for row in rows if row["method"] == method and row.get(key)])
    }
    return max(means, key=means.__getitem__) if len(means) == len(others) else None


def command(task: Task, methods: list[str]) -> str:
    chosen = "" if methods == task.methods else f" --methods {' '.join(methods)}"
    return f"python benchmarks/papers.py --task {task.name} --size {task.size}{chosen} --seeds 0 1 2 --data DIR"


def expected_minutes(methods: list[str], rows: list[Row]) -> str:
    """About how long three seeds of each take: what its runs on other data took, or runs of all methods if there are none."""
    times = {row["method"]: float(row["seconds"]) / 60 for row in rows if row["size"] == "short"}
    usual = summary(times.values())[0]
    return f"about {3 * sum(times.get(method, usual) for method in methods):.0f}"


def number_cell(key: str, values: list[float], number: PublishedNumber | None) -> str:
    _, factor, digits, _ = COLUMNS[key]
    ours = f"{factor * summary(values)[0]:.{digits}f}"
    return ours if number is None else f"{ours} ({factor * number.value:.{digits}f})"


def judge(key: str, row: Row, task: Task, method: str) -> str:
    """Our difference with its interval, the published one and the verdict."""
    _, factor, digits, rounding = COLUMNS[key]
    theirs = published_numbers(task.settings["reference"])
    base = str(task.settings["baseline"])
    ours, low, high = (float(row[name]) for name in ("difference", "lower", "upper"))
    digits += 1
    text = f"{factor * ours:+.{digits}f} ({factor * low:+.{digits}f} to {factor * high:+.{digits}f}"
    seeds, above = round(float(row["seeds"])), int(row["above"])
    several = f"; {above if ours > 0 else seeds - above} of {seeds} seeds {'above' if ours > 0 else 'below'} 0"
    text += f"{several * (seeds > 1)})"
    if key not in theirs.get(method, {}) or key not in theirs.get(base, {}):
        return text
    wanted = theirs[method][key].value - theirs[base][key].value
    return f"{text}, published {factor * wanted:+.{digits}f}: {verdict(wanted, ours, low, high, rounding)}"


def verdict(wanted: float, ours: float, low: float, high: float, rounding: float) -> str:
    """How our difference, with its interval, compares with a published difference known up to its rounding."""
    if abs(wanted) <= 1.5 * rounding:  # published as equal
        return "agrees" if low <= wanted + rounding and high >= wanted - rounding else "does not come out"
    sure = low > 0 if wanted > 0 else high < 0
    if not sure:
        return "does not come out"
    return "agrees" if abs(ours) >= abs(wanted) / 2 else "weaker"
