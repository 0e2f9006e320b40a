"""UCI regression by the usual protocol, on top of `dissensus bench uci`: recipes, then all splits, then a table.

    python benchmarks/uci.py --choose --data FOLDER --jobs 16    # writes results/uci_recipes.csv
    python benchmarks/uci.py --run --data FOLDER --jobs 16       # writes results/uci.csv
    python benchmarks/uci.py                                     # prints the table of that file

FOLDER holds the sets as `ds.data.uci_regression` reads them. Runs lie in --out; started again, both stages go on where they
were.

Network: one hidden layer of 50 ReLU units (100 for the protein set), mean and variance out, batch 100, Adam. The rest of the
recipe is chosen for each set on rows held out of the training rows of a few splits, never on test rows, by the NLL of the
Gaussian with the mixture's mean and variance: epochs and rate, then weight decay by the deep ensemble, then the rate of SWAG's
tail by SWAG, the dropout rate by MC dropout, TRADI's memory and the rate of its tail by TRADI. `--choose --only tradi` chooses
the last two anew and leaves the rest of the recipes as they are. Lakshminarayanan et al. 2017 trained 40 epochs at 0.1
throughout, with adversarial examples; their numbers stand beside ours.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
from rows import FACTS, Row, grouped, read_rows, summary, write_rows
from uci_page import PROTEIN, table, verdicts

from dissensus.bench.run.jobs import run_all
from dissensus.bench.task.config import Task, load_task
from dissensus.data import REGRESSION_SETS

RESULTS = Path(__file__).parent / "results"
SPLITS = {name: 5 if name == PROTEIN else 20 for name in REGRESSION_SETS}
METHODS = {  # what one process trains
    "map": ("map", "swag", "tradi", "tradi-diagonal"),
    "mc_dropout": ("mc_dropout",),
    "deep_ensemble": ("deep_ensemble",),
}
METRICS = ("rmse", "gaussian_nll", "nll", "crps", "coverage90", "width90", "cost/train_seconds")


@dataclass(frozen=True)
class Recipe:
    """What is chosen for a set."""

    epochs: int = 40
    rate: float = 0.01
    weight_decay: float = 0.0
    tail_factor: float = 0.1  # of the rate, in the constant tail
    dropout: float = 0.05
    memory: float = 0.1  # of TRADI, as a share of the run
    tradi_tail: float = 0.1  # as tail_factor, for TRADI

    @property
    def slug(self) -> str:
        return "-".join(f"{value:g}" for value in asdict(self).values())


@dataclass(frozen=True)
class Job:
    """Some methods on one split of a set; inner: the share of the training rows that is measured on instead of test rows."""

    name: str
    split: int
    methods: tuple[str, ...]
    recipe: Recipe
    folder: Path
    data: str | None
    inner: float = 0.0

    @property
    def cost(self) -> float:
        """Steps of single networks, roughly: long jobs are started first."""
        return steps(self.name, self.recipe) * (2.5 if "deep_ensemble" in self.methods else 1.5)


@dataclass(frozen=True)
class Tried:
    """What is tried for a set, and on which splits."""

    epochs: tuple[int, ...]
    rate: tuple[float, ...]
    weight_decay: tuple[float, ...] = (0.0, 1e-4, 1e-3, 1e-2)
    tail_factor: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0)
    dropout: tuple[float, ...] = (0.005, 0.02, 0.05, 0.1)
    memory: tuple[float, ...] = (0.1, 0.03, 0.01, 0.003)
    tradi_tail: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0)
    splits: tuple[int, ...] = (0, 1, 2, 3, 4)


LARGE = Tried(epochs=(40,), rate=(0.001, 0.003, 0.01), weight_decay=(0.0, 1e-4), splits=(0, 1))
TRIED = {
    "bostonHousing": Tried(epochs=(40, 100), rate=(0.003, 0.01, 0.03, 0.1)),
    "concrete": Tried(epochs=(40, 100, 250), rate=(0.003, 0.01, 0.03, 0.1)),
    "wine-quality-red": Tried(epochs=(40, 100), rate=(0.001, 0.003, 0.01, 0.03)),
    "power-plant": LARGE,
    "naval-propulsion-plant": LARGE,
    PROTEIN: Tried(
        (40,), (0.003, 0.01), (0.0,), tail_factor=(0.1, 0.5), dropout=(0.01, 0.05), memory=(0.03, 0.003), splits=(0,)
    ),
}
STAGES: tuple[dict[str, tuple[str, ...]], ...] = (  # method that judges -> what is chosen by it; one after the other
    {"deep_ensemble": ("epochs", "rate")},
    {"deep_ensemble": ("weight_decay",)},
    {"swag": ("tail_factor",), "mc_dropout": ("dropout",), "tradi": ("memory", "tradi_tail")},
)
INNER = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choose", action="store_true", help="choose recipes on rows of the training sets")
    parser.add_argument(
        "--only", default=None, help="choose again only what this method judges, from the recipes there are"
    )
    parser.add_argument("--run", action="store_true", help="train and measure all splits with the chosen recipes")
    parser.add_argument("--data", default=None, help="folder of the sets; DISSENSUS_DATA by default")
    parser.add_argument("--sets", default=",".join(SPLITS))
    parser.add_argument("--splits", type=int, default=20, help="the first so many splits of each set")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--size", default="paper", help="of the task: how many samples methods draw")
    parser.add_argument("--out", type=Path, default=Path("runs/uci"))
    parser.add_argument("--recipes", type=Path, default=RESULTS / "uci_recipes.csv")
    parser.add_argument("--csv", type=Path, default=RESULTS / "uci.csv")
    given = parser.parse_args()
    names = given.sets.split(",")
    if given.choose:
        kept = [row for row in read_rows(given.recipes) if row["set"] not in names or spared(row, given.only)]
        write_rows(given.recipes, [*kept, *choose(names, given)])
    if given.run:
        jobs = list(test_jobs(names, given))
        kept = [row for row in read_rows(given.csv) if row["set"] not in names]
        write_rows(given.csv, [*kept, *(row for rows in measured(jobs, given) for row in rows)])
    rows = read_rows(given.csv)
    print(f"{table(rows)}\n\n{verdicts(rows)}")


# ------------------------------------------------------------------------------------------- recipes


def choose(names: Iterable[str], given: argparse.Namespace) -> list[Row]:
    """Every recipe tried with its scores on held-out training rows, the chosen one of each set last."""
    found = chosen(given.recipes) if given.only else {}
    best = {name: found.get(name, Recipe()) for name in names}
    tried: list[Row] = []
    for stage in STAGES:
        stage = {method: fields for method, fields in stage.items() if given.only in (None, method)}
        jobs = [
            Job(name, split, (method,), recipe, given.out / "choose" / name / recipe.slug, given.data, INNER)
            for method, fields in stage.items()
            for name in names
            for recipe in varied(best[name], name, fields)
            for split in TRIED[name].splits
        ]
        rows = [row for several in measured(jobs, given) for row in several]
        for method, fields in stage.items():
            for name in names:
                mine = [row for row in rows if (row["set"], row["method"]) == (name, method)]
                means = [mean_over_splits(several) for several in grouped(mine, fields).values()]
                tried += [{"set": name, "stage": " and ".join(fields), "method": method, **row} for row in means]
                winner = min(means, key=lambda row: float(row["gaussian_nll"]))
                best[name] = replace(best[name], **{field: winner[field] for field in fields})
    return [*tried, *({"set": name, "stage": "chosen", **asdict(recipe)} for name, recipe in best.items())]


def spared(row: Row, only: str | None) -> bool:
    """Whether a row of the recipes stays where only what one method judges is chosen again."""
    return only is not None and row["stage"] != "chosen" and row["method"] != only


def varied(recipe: Recipe, name: str, fields: tuple[str, ...]) -> list[Recipe]:
    """The recipe with every combination of the values to be tried for these fields."""
    values = product(*(getattr(TRIED[name], field) for field in fields))
    return [replace(recipe, **dict(zip(fields, each, strict=True))) for each in values]


def mean_over_splits(rows: list[Row]) -> Row:
    """One row: the recipe, scores averaged over splits, and where they come from."""
    recipe = {key: rows[0][key] for key in asdict(Recipe())}
    scores = {metric: summary(row[metric] for row in rows)[0] for metric in ("rmse", "gaussian_nll", "nll")}
    return {**recipe, "splits": len(rows), **scores, **{key: rows[0][key] for key in FACTS}}


def chosen(path: Path) -> dict[str, Recipe]:
    """Set -> recipe, as `--choose` wrote them; what older files do not have is as in Recipe."""
    return {
        row["set"]: Recipe(**{key: type(value)(row.get(key) or value) for key, value in asdict(Recipe()).items()})
        for row in read_rows(path)
        if row["stage"] == "chosen"
    }


# ------------------------------------------------------------------------------------------- runs


def test_jobs(names: Iterable[str], given: argparse.Namespace) -> Iterator[Job]:
    recipes = chosen(given.recipes)
    for name in names:
        if name not in recipes:
            raise SystemExit(f"expected a recipe for {name} in {given.recipes}, got none; run with --choose first")
        for split in range(min(given.splits, SPLITS[name])):
            for methods in METHODS.values():
                yield Job(name, split, methods, recipes[name], given.out / "test" / name, given.data)


def measured(jobs: list[Job], given: argparse.Namespace) -> list[list[Row]]:
    """Rows of every job, in the order given."""
    order = sorted(range(len(jobs)), key=lambda i: -jobs[i].cost)
    rows: dict[int, list[Row]] = {}
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn"), initializer=on_one_core) as pool:
        futures = {i: pool.submit(rows_of, jobs[i], given.size) for i in order}
        for done, (i, future) in enumerate(futures.items(), start=1):
            rows[i] = future.result()
            job = jobs[i]
            said = ", ".join(f"{r['method']} {r['gaussian_nll']:.3f}" for r in rows[i])
            print(f"[{done}/{len(jobs)}] {job.name} {job.split} ({job.recipe.slug}): {said}", flush=True)
    return [rows[i] for i in range(len(jobs))]


def on_one_core() -> None:
    """Such small networks are slower on a GPU and on several threads."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)


def rows_of(job: Job, size: str) -> list[Row]:
    """A row per method of a job; runs that are done are read."""
    runs, evaluations = run_all(
        task_of(job, size), methods=job.methods, seeds=[job.split], out=job.folder, source=job.data
    )
    rows: list[Row] = []
    for run, evaluation in zip(runs, evaluations, strict=True):
        origin = {key: run.provenance[key] for key in ("commit", "dissensus", "torch", "device")}
        numbers = {key: evaluation.metrics[key] for key in METRICS}
        about = {"set": job.name, "split": job.split, "method": run.config.method, **asdict(job.recipe)}
        rows.append({**about, **numbers, **origin})
    return rows


def task_of(job: Job, size: str) -> Task:
    """The bench's task with the recipe."""
    recipe = job.recipe
    # TRADI's memory of 317 steps, or the recipe's share of the run where that is less: the gain K = √(Q/R) is one over it.
    memory = min(317.0, max(2.0, recipe.memory * steps(job.name, recipe)))
    return load_task(
        "uci",
        size=size,
        overrides=[
            f"data.set={job.name}",
            f"data.inner={job.inner}",
            f"network.hidden=[{100 if job.name == PROTEIN else 50}]",
            f"training.epochs={recipe.epochs}",
            f"training.lr={recipe.rate}",
            f"training.weight_decay={recipe.weight_decay}",
            f"training.tail_factor={recipe.tail_factor}",
            f"method.mc_dropout.rate={recipe.dropout}",
            f"method.tradi.training.tail_factor={recipe.tradi_tail}",
            f"method.tradi.state_noise=[{10 / memory**2}, {5 / memory**2}]",
            "method.tradi-diagonal.covariance=diagonal",
        ],
    )


def steps(name: str, recipe: Recipe) -> int:
    """Steps of a run: batches of 100 of nine tenths of the rows."""
    return math.ceil(0.9 * REGRESSION_SETS[name][0] / 100) * recipe.epochs


if __name__ == "__main__":
    main()
