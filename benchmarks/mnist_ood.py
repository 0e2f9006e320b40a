"""MNIST against notMNIST, the table of the TRADI paper: runs `dissensus bench mnist-ood`, writes its numbers as CSV.

    python benchmarks/mnist_ood.py --data FOLDER --seeds 3 --csv benchmarks/results/mnist_ood.csv

FOLDER holds MNIST and notMNIST as `ds.data.mnist` and `ds.data.notmnist` read them. The network, the recipe and the paper's
numbers stand in the task. Runs lie in --out; started again, it goes on where it was.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from finished import finished
from rows import Row, by_key, made_by, markdown, read_rows, seeds_of, summary, write_rows

from dissensus.bench.report.measures import measures
from dissensus.bench.report.published_numbers import published_numbers, reference_sentences
from dissensus.bench.report.results import Results
from dissensus.bench.run.jobs import bench
from dissensus.bench.task.config import load_task, read_task
from dissensus.evaluation.evaluation import Evaluation

COLUMNS = {  # metric -> (column, factor, digits)
    "accuracy": ("accuracy %", 100, 2),
    "nll": ("NLL", 1, 4),
    "ood/notmnist/auroc": ("AUROC %", 100, 2),
    "ood/notmnist/aupr_adjusted": ("AUPR %, adjusted", 100, 2),
    "ood/notmnist/fpr95": ("FPR95 %", 100, 2),
    "ood/notmnist/fpr95_in": ("FPR95 %, ID positive", 100, 2),
    "ece": ("ECE", 1, 4),
    "ood/notmnist/ece_union": ("ECE, union", 1, 3),
    "cost/train_seconds": ("training, s", 1, 1),
}
NAMES = {
    "map": "MCP",
    "gaussian_perturbation": "Gaussian perturbation",
    "mc_dropout": "MC dropout",
    "deep_ensemble": "Deep ensemble",
    "swag": "SWAG",
    "swa": "SWA",
    "tradi": "TRADI",
    "tradi-layer": "TRADI (layer)",
    "tradi-diagonal": "TRADI (diagonal)",
}


SHOWN = ("nll", "ood/notmnist/auroc", "ood/notmnist/fpr95")  # the others are in the file
CHANCE = "within chance"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=None, help="folder of the sets; DISSENSUS_DATA by default")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--size", default="paper")
    parser.add_argument("--set", action="append", default=[], help="as of `dissensus bench`")
    parser.add_argument("--out", type=Path, default=Path("runs/mnist-ood"))
    parser.add_argument(
        "--finished", action="store_true", help="train nothing: take the runs in --out that are finished"
    )
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "mnist_ood.csv")
    given = parser.parse_args()
    if given.finished:
        results = finished(given.out)
    else:
        task = load_task("mnist-ood", size=given.size, overrides=given.set)
        results, _ = bench(
            task, seeds=given.seeds, out=given.out, source=given.data, tell=lambda text: print(text, flush=True)
        )
    rows = [
        origin | {key: evaluation.metrics[key] for key in [*COLUMNS, "ood/notmnist/aupr"]}
        for origin, evaluation in results.iterate_evaluations()
    ]
    write_rows(given.csv, rows)
    print(table(read_rows(given.csv)))


def table(rows: list[Row]) -> str:
    """Mean ± standard deviation over seeds, and the paper's number in brackets."""
    paper = published_numbers(read_task("mnist-ood")["reference"])
    lines = []
    for method, mine in by_key(rows, "method").items():
        cells = [NAMES.get(method, method)]
        for key in SHOWN:
            _, factor, digits = COLUMNS[key]
            mean, deviation, _ = summary(factor * float(row[key]) for row in mine)
            number = paper.get(method, {}).get(key)
            published = "" if number is None else f" [{factor * number.value:.{min(digits, 3)}f}]"
            cells.append(f"{mean:.{digits}f} ± {deviation:.{digits}f}{published}")
        lines.append(cells)
    return markdown(["method", *(COLUMNS[key][0] for key in SHOWN)], lines)


def page(rows: list[Row]) -> str:
    """The table, what it says, every ordering that is not the paper's, and where all of it comes from."""
    seeds = len({row["seed"] for row in rows})
    made = made_by(
        f"python benchmarks/mnist_ood.py --data FOLDER --seeds {seeds}",
        rows,
        f"{seeds_of(rows, NAMES)}, mean ± standard deviation, the paper's numbers in square brackets",
        "all columns in `mnist_ood.csv`",
    )
    said = " ".join([*seed_by_seed(rows), *against_paper(rows)])
    count, *flips = orderings(rows)
    listed = "\n".join(f"- {each}" for each in flips if CHANCE not in each)
    if within := sum(CHANCE in each for each in flips):
        count += f" {within} of these differences are within chance (Holm, over seeds)."
    return "\n\n".join(each for each in (table(rows), said, count, listed, made) if each)


def seed_by_seed(rows: list[Row]) -> list[str]:
    """Who is ahead of whom on how many seeds."""
    by_seed = {(row["method"], row["seed"]): row for row in rows}
    said = []
    for better, worse in (
        ("deep_ensemble", "map"),
        ("tradi", "map"),
        ("tradi", "tradi-diagonal"),
        ("tradi", "tradi-layer"),
    ):
        seeds = [seed for method, seed in by_seed if method == better and (worse, seed) in by_seed]
        if not seeds:
            continue
        each = [(by_seed[better, seed], by_seed[worse, seed]) for seed in seeds]
        auroc = sum(float(a["ood/notmnist/auroc"]) > float(b["ood/notmnist/auroc"]) for a, b in each)
        flagged = sum(float(a["ood/notmnist/fpr95"]) < float(b["ood/notmnist/fpr95"]) for a, b in each)
        said.append(f"{NAMES[better]} is ahead of {NAMES[worse]} on {auroc} and {flagged} of {len(each)} seeds")
    said = [f"In AUROC and FPR95, {'; '.join(said)}."] if said else []
    return said


def against_paper(rows: list[Row]) -> list[str]:
    """Our NLL over the paper's."""
    paper = published_numbers(read_task("mnist-ood")["reference"])
    ours, theirs = {}, {}
    for method, mine in by_key(rows, "method").items():
        number = paper.get(method, {}).get("nll")
        if number is not None:
            name = NAMES.get(method, method)
            ours[name] = summary(row["nll"] for row in mine)[0]
            theirs[name] = number.value
    if not ours:
        return []
    ratios = ", ".join(f"{name} {ours[name] / theirs[name]:.2f}" for name in sorted(ours, key=ours.__getitem__))
    return [f"Our NLL over the paper's: {ratios}."]


def orderings(rows: list[Row]) -> list[str]:
    """How many orderings of two methods are not the paper's, and each of them."""
    methods: dict[str, list[Evaluation]] = {}
    origins: dict[str, list[Row]] = {}
    for row in rows:
        name, found = NAMES.get(row["method"], row["method"]), {key: float(row[key]) for key in COLUMNS}
        methods.setdefault(name, []).append(Evaluation("classification", found, {}, "max_probability", ("notmnist",)))
        origins.setdefault(name, []).append({"seed": row["seed"]})
    reference = {NAMES.get(method, method): row for method, row in read_task("mnist-ood")["reference"].items()}
    results = Results("", "", methods, origins, reference=reference, holm=True)
    return reference_sentences(results, measures(next(iter(methods.values()))[0])) or [""]


if __name__ == "__main__":
    main()
