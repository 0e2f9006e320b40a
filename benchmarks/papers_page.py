"""What docs/results/papers.md shows of results/papers: our numbers beside the published ones, and which differences come out.

`python benchmarks/papers.py --collect benchmarks/results/papers` makes both CSV files from the kept runs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import numpy as np
from rows import Row, markdown, origins_of, read_rows, summary

from dissensus.bench.report.published_numbers import PublishedNumber, published_numbers
from dissensus.bench.task.config import Task, load_task

RESULTS = Path(__file__).parent / "results" / "papers"
PAGE = Path(__file__).parents[1] / "docs" / "results" / "papers.md"
TASKS = {  # and the minutes of a method on an H200, until one of the task was run
    "cifar10-forde": 5.0,
    "cifar100-forde": 5.0,
    "cifar100-alpha": 5.0,
    "cifar100-node": 2.0,
    "cifar100-node-vgg": 2.0,
    "cifar10-single": 4.0,
    "cifar100-reliability": 2.0,
    "cifar10-embedded-narrow": 1.0,
    "cifar10-embedded-wide": 3.0,
    "cifar10-shift": 2.5,
    "imagenet-node": 40.0,
}
# key -> title, factor, digits, rounding of a published difference, in our units
COLUMNS: dict[str, tuple[str, float, int, float]] = {
    "accuracy": ("accuracy, %", 100, 1, 0.001),
    "nll": ("NLL", 1, 3, 0.01),
    "ece": ("ECE", 1, 3, 0.001),
    "corrupt/accuracy": ("cA, %", 100, 1, 0.001),
    "corrupt/nll": ("cNLL", 1, 2, 0.01),
    "corrupt/ece": ("cECE", 1, 2, 0.01),
    "corrupt/severity5/accuracy": ("accuracy at severity 5, %", 100, 1, 0.01),
    "corrupt/severity5/nll": ("NLL there", 1, 2, 0.02),
    "shift/cifar10_1/accuracy": ("CIFAR-10.1, %", 100, 1, 0.001),
    "shift/cifar10h/nll": ("CIFAR-10H, NLL", 1, 3, 0.01),
    "shift/imagenet_v2/accuracy": ("ImageNet-V2, %", 100, 1, 0.001),
    "ood/svhn/auroc": ("AUROC, SVHN, %", 100, 1, 0.001),
    "ood/svhn/aupr": ("AUPR, %", 100, 1, 0.001),
    "ood/svhn/fpr95": ("FPR95, %", 100, 1, 0.001),
}
CLEAN, JUDGED = ("accuracy", "nll"), ("corrupt/accuracy", "corrupt/nll")
COMPARED = (*CLEAN, *JUDGED)  # those with a value for each image
VERDICTS = ("agrees", "weaker", "does not come out")
RESAMPLES, CHUNK = 2000, 100


# ------------------------------------------------------------------------------------------- comparisons, from the kept files


def pairs(out: Path) -> list[Row]:
    """Every method against the task's baseline on the seeds both have: one row per measure."""
    found = []
    for folder in sorted({path.parent for path in out.glob("*/*.npz")}):
        size = next((size for size in ("smoke", "short", "paper") if folder.name.endswith(f"-{size}")), None)
        if size is None:
            continue  # runs with changed settings
        task = load(folder.name.removesuffix(f"-{size}"), size)
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
        _, correct = read_kept(path)
        with np.load(path, allow_pickle=False) as kept:
            nll = kept["clean/nll"].astype(np.float64)
            there = [name for name in ("accuracy", "nll") if f"corrupted/{name}" in kept]
            damaged = {f"corrupt/{name}": kept[f"corrupted/{name}"].astype(np.float64).mean(0) for name in there}
            found[int(path.stem.rpartition("-seed")[2])] = {"accuracy": correct, "nll": nll, **damaged}
    return found


def read_kept(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(N,) confidence of each clean image's answer, and whether it is right, of a kept run."""
    with np.load(path, allow_pickle=False) as kept:
        confidence = kept["clean/confidence"].astype(np.float64)
        return confidence, np.unpackbits(kept["clean/correct"])[: len(confidence)].astype(np.float64)


def figure_of(task: str) -> Path:
    return PAGE.parents[1] / "figures" / f"papers-{task}.png"


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
        yield PAGE, name, page(load(name), rows, compared)


def page(task: Task, rows: list[Row], compared: list[Row]) -> str:
    """The table of a task's size, published numbers beside ours, and what it says, how it was made and what was not run."""
    theirs = published_numbers(task.settings["reference"])
    mine = [row for row in rows if (row["task"], row["size"]) == (task.name, task.size)]
    compared = [row for row in compared if (row["task"], row["size"]) == (task.name, task.size)]
    keys = [key for key in COLUMNS if shows(key, theirs, mine)]
    judged = [key for key in JUDGED if key in keys] or list(CLEAN)
    theory = any(row.get("theory") for row in mine)
    lines, verdicts = [], []
    for method in task.methods:
        runs, numbers = [row for row in mine if row["method"] == method], theirs.get(method, {})
        if not runs:
            continue
        cells = [number_cell(key, [float(row[key]) for row in runs if row.get(key)], numbers.get(key)) for key in keys]
        minutes = f"{summary(minutes_of(row) for row in runs)[0]:.1f}"
        cells += [", ".join(dict.fromkeys(row.get("theory") or "–" for row in runs)) or "–"] * theory
        own = {row["metric"]: row for row in compared if row["method"] == method}
        found = [(COLUMNS[key][0].split(",")[0], *judge(key, own[key], task, method)) for key in judged if key in own]
        verdicts += [each for _, _, each in found if each]
        says = "; ".join(f"{name} {text}" for name, text, _ in found)
        lines.append([method, str(len(runs)), *cells, minutes, says])
    titles = [COLUMNS[key][0] for key in keys] + ["theory: members"] * theory
    table = markdown(["method", "seeds", *titles, "minutes", f"against {task.settings['baseline']}"], lines)
    table = re.sub(r" ?\| ?", "|", table)  # a bar between spaces would count as a word of the page
    return "\n\n".join([*([table] if lines else []), *remarks(task, rows, mine, verdicts)])


def remarks(task: Task, rows: list[Row], mine: list[Row], verdicts: list[str]) -> list[str]:
    """What stands below a table."""
    chosen = [f"Chosen on the held-out images: {found}."] if (found := chosen_method(task, mine)) else []
    counts = [f"{each}: {verdicts.count(each)}" for each in VERDICTS if each in verdicts]
    said = [f"Verdicts: {', '.join(counts)}."] * bool(counts)
    made = f"{task.settings['reference']['source']}."
    if mine:
        spent = sum(map(minutes_of, mine))
        command_line, origins = command(task, {int(row["seed"]) for row in mine}), origins_of(mine)
        made = f"*Ours/published. {made} `{command_line}`; {origins}; {spent:.0f} min of a GPU.*"
    left = [method for method in task.methods if not any(row["method"] == method for row in mine)]
    how = "the same command continues" if mine else f"`{command(task)}`"
    ask = f"Not run{published_text(task, left)}: {how}; a seed takes {expected_minutes(task, left, rows)} min of a GPU."
    figure = f"![{task.title}](../figures/{figure_of(task.name).name})"
    return [*chosen, *said, *([figure] if figure_of(task.name).is_file() else []), made, *([ask] if left else [])]


def shows(key: str, theirs: Mapping[str, Mapping[str, PublishedNumber]], mine: list[Row]) -> bool:
    """Whether a measure has a column: one that is published, and clean or foreign images wherever they were measured."""
    measured = "severity" not in key and any(row.get(key) for row in mine)
    return measured or any(key in row for row in theirs.values())


def chosen_method(task: Task, rows: list[Row]) -> str | None:
    """The swept method with the highest accuracy on corrupted held-out images; None unless all of them were run."""
    key, others = "validation/corrupt/accuracy", [each for each in task.methods if each != task.settings["baseline"]]
    means = {
        method: summary(found)[0]
        for method in others
        if (found := [float(row[key]) for row in rows if row["method"] == method and row.get(key)])
    }
    return max(means, key=means.__getitem__) if len(means) == len(others) else None


def command(task: Task, seeds: Collection[int] = (0,)) -> str:
    """What runs a task at the usual size with these seeds."""
    given = f" --seeds {' '.join(map(str, sorted(seeds)))}" * (set(seeds) != {0})
    return f"python benchmarks/papers.py --task {file_of(task)}{given} --data DIR"


def file_of(task: Task) -> str:
    """A shipped task's name; of another one its path from the repository's root."""
    return task.name if task.folder is None else f"benchmarks/{task.name}.toml"


def load(name: str, size: str = "short") -> Task:
    """A shipped task, or one of this folder."""
    own = Path(__file__).parent / f"{name}.toml"
    return load_task(str(own) if own.is_file() else name, size=size)


def published_text(task: Task, methods: list[str]) -> str:
    """ " (published accuracy/cA): map, lit 81.9/54.4": methods that were not run."""
    theirs = published_numbers(task.settings["reference"])
    known = [key for key in ("accuracy", "nll", *JUDGED) if any(key in theirs.get(method, {}) for method in methods)]
    keys = list(dict.fromkeys([known[0], known[-2 if len(known) > 3 else -1]])) if known else []
    numbers = {each: "/".join(published_cell(key, theirs[each]) for key in keys) for each in methods if each in theirs}
    shown = [f"{method} {numbers.get(method, '')}".strip() for method in methods]
    heading = f" (published {'/'.join(COLUMNS[key][0].split(',')[0] for key in keys)})" * bool(keys)
    return f"{heading}: {', '.join(shown)}"


def published_cell(key: str, numbers: Mapping[str, PublishedNumber]) -> str:
    _, factor, digits, _ = COLUMNS[key]
    return f"{factor * numbers[key].value:.{digits}f}" if key in numbers else "–"


def expected_minutes(task: Task, methods: list[str], rows: list[Row]) -> str:
    """About how long one seed of each takes: as its runs, or others of the task or of that method, or a guess."""
    times = {row["method"]: minutes_of(row) for row in rows if row["size"] == "short"}
    of_task = [minutes_of(row) for row in rows if (row["task"], row["size"]) == (task.name, task.size)]
    usual = summary(of_task)[0] if of_task else TASKS.get(task.name, 5.0)
    forde = task.name.startswith("cifar") and task.name.endswith(("forde", "alpha"))  # the same networks and epochs
    return f"about {sum(times.get(method, usual) if forde else usual for method in methods):.0f}"


def minutes_of(row: Row) -> float:
    """Of training, with what an earlier process did of it, and evaluation; a shared training counts for each method."""
    return (float(row["train_seconds"]) + float(row["evaluation_seconds"])) / 60


def number_cell(key: str, values: list[float], number: PublishedNumber | None) -> str:
    _, factor, digits, _ = COLUMNS[key]
    ours = f"{factor * summary(values)[0]:.{digits}f}" if values else "–"
    return ours if number is None else f"{ours}/{factor * number.value:.{digits}f}"


def judge(key: str, row: Row, task: Task, method: str) -> tuple[str, str]:
    """Our difference with its interval, the published one and the verdict; the verdict alone, "" if none is published."""
    _, factor, digits, rounding = COLUMNS[key]
    theirs = published_numbers(task.settings["reference"])
    base = str(task.settings["baseline"])
    ours, low, high = (float(row[name]) for name in ("difference", "lower", "upper"))
    digits += 1
    text = f"{factor * ours:+.{digits}f} ({factor * low:+.{digits}f} to {factor * high:+.{digits}f}"
    seeds, above = round(float(row["seeds"])), int(row["above"])
    text += f"; {above if ours > 0 else seeds - above}/{seeds} seeds)" if seeds > 1 else ")"
    if key not in theirs.get(method, {}) or key not in theirs.get(base, {}):
        return text, ""
    wanted = theirs[method][key].value - theirs[base][key].value
    found = verdict(wanted, ours, low, high, rounding)
    return f"{text}, published {factor * wanted:+.{digits}f}: {found}", found


def verdict(wanted: float, ours: float, low: float, high: float, rounding: float) -> str:
    """How our difference, with its interval, compares with a published difference known up to its rounding."""
    if abs(wanted) <= 1.5 * rounding:  # published as equal
        return "agrees" if low <= wanted + rounding and high >= wanted - rounding else "does not come out"
    sure = low > 0 if wanted > 0 else high < 0
    if not sure:
        return "does not come out"
    return "agrees" if abs(ours) >= abs(wanted) / 2 else "weaker"
