"""Learning rates of `embedded-width`, by accuracy on digits that are neither trained nor tested on.

    python benchmarks/embedded_rate.py independent --csv benchmarks/results/embedded_rate.csv --jobs 2
    python benchmarks/embedded_rate.py embedded --csv benchmarks/results/embedded_rate.csv --jobs 2
    python benchmarks/embedded_rate.py transition --csv benchmarks/results/embedded_rate.csv --jobs 2

Independent networks have one rate. Embedded ensembles have `base` / (1 + √(M/N))² and a rate of modulations; one of each for
all, the best of those at which no corner of the grid diverges. Either γ of the transition has a rate for each p.
Rows that are in the file stay and are not measured again.
"""

import argparse
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rows import made_on, read_rows, write_rows

from dissensus.bench.rows.dataset_rows import standardised_batches
from dissensus.bench.rows.task_rows import task_data
from dissensus.bench.run.build import optimizer, posterior
from dissensus.bench.task.config import load_task
from dissensus.bench.width_axis import EMBEDDED, INDEPENDENT, WidthCell, width_cells
from dissensus.core.divergence import Diverged
from dissensus.predict import predict
from dissensus.theory import largest_eigenvalue
from dissensus.training.fit import fit

RATES = (0.3, 1.0, 3.0, 10.0)
FACTORS, MEMBERS = [0.25, 1.0, 4.0], 8
CORNERS = ((0.25, 1), (0.25, 8), (0.25, 32), (1.0, 8), (4.0, 8), (4.0, 32))  # factor, members
BASES, MODULATIONS = (1.0, 3.0, 10.0), (0.03, 0.1, 0.3)
KEYS = ("method", "p", "gamma", "factor", "members", "base", "rate", "modulation_lr", "seed")
Row = dict[str, Any]
Trial = tuple[WidthCell, float | None]  # a cell at its rate, and what the rule made that rate of


def facts(asked: Trial) -> Row:
    """What a row is known by."""
    cell, base = asked
    config = cell.config
    return {
        "method": cell.method, "factor": cell.factor, "members": cell.members, "p": "" if cell.p is None else cell.p,
        "gamma": cell.gamma, "base": "" if base is None else base, "rate": round(config.training["lr"], 5),
        "modulation_lr": config.settings.get("modulation_lr", ""), "seed": config.seed,
    }  # fmt: skip


def measured(asked: Trial) -> Row:
    """Accuracy and NLL on 2,000 held-out digits, and on the 2,000 trained on, at the cell's rate."""
    torch.set_num_threads(1)
    config = asked[0].config
    data = task_data({**config.data, "train": 4000, "validation": 2000})
    batches = standardised_batches(
        data.train, data.standardiser, batch_size=config.training["batch_size"], shuffle=True
    )
    found: Row = {**facts(asked), "diverged": ""}
    torch.manual_seed(config.seed)
    ensemble = posterior(config, data)
    made, schedule = optimizer(ensemble, config.training)
    try:
        fit(ensemble, batches, epochs=config.training["epochs"], optimizer=made, scheduler=schedule, progress=False)
    except Diverged as error:
        return {**found, "diverged": error.step}
    for name, rows in (("", data.validation), ("train_", data.train)):
        said, y = predict(ensemble, standardised_batches(rows, data.standardiser, batch_size=500))
        found[f"{name}accuracy"] = round(float((said.mean.argmax(-1) == y).double().mean()), 5)
        found[f"{name}nll"] = round(float(-said.log_prob(y).mean()), 5)
        found[f"{name}member_accuracy"] = round(float((said.log_probs.argmax(-1) == y).double().mean()), 5)
    return found


def independent(seeds: int) -> list[Trial]:
    """Ensembles of eight at three widths, at every rate."""
    found = grid(seeds, factors=FACTORS, members=[MEMBERS], p=[], p_rates={}, p_members=MEMBERS)
    return [(at(cell, rate), None) for cell in found if cell.method == INDEPENDENT for rate in RATES]


def embedded(seeds: int, bases: Sequence[float] = BASES) -> list[Trial]:
    """Corners of the grid, at every base of the rule and every rate of modulations."""
    found = grid(seeds, factors=FACTORS, members=[1, 8, 32], p=[], p_rates={})
    return [
        (at(cell, base / largest_eigenvalue(cell.members, cell.units, p=0.0), own), base)
        for cell in found
        if cell.method == EMBEDDED and (cell.factor, cell.members) in CORNERS
        for own in MODULATIONS
        for base in bases
    ]


def transition(seeds: int) -> list[Trial]:
    """Both γ at every p, at every rate, with the task's rate of modulations; γ = 1 at higher ones, too.

    A rate of γ = 1 moves shared weights as one M times smaller does at γ = M.
    """
    found = grid(seeds, factors=[1.0], members=[MEMBERS])
    higher = {"M": RATES, "1": (*RATES, 30.0)}
    return [(at(cell, rate), None) for cell in found if cell.p is not None for rate in higher[cell.gamma]]


PARTS: dict[str, Callable[..., list[Trial]]] = {
    "independent": independent,
    "embedded": embedded,
    "transition": transition,
}


def grid(seeds: int, **changed: list[float] | int) -> list[WidthCell]:
    task = load_task("embedded-width", overrides=[f"widths.{key}={value}" for key, value in changed.items()])
    return width_cells(task, range(seeds))


def at(cell: WidthCell, rate: float, modulation_lr: float | None = None) -> WidthCell:
    """The cell at a learning rate, and at one of its modulations where that is given."""
    settings = (
        cell.config.settings if modulation_lr is None else {**cell.config.settings, "modulation_lr": modulation_lr}
    )
    return replace(cell, config=replace(cell.config, settings=settings, training={**cell.config.training, "lr": rate}))


def main(trials: Sequence[Trial], path: Path, jobs: int) -> None:
    origin = made_on("cpu")
    rows = {key_of(row): row for row in read_rows(path)}
    left = [trial for trial in trials if key_of(facts(trial)) not in rows]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for row in pool.imap_unordered(measured, left):
            print(row, flush=True)
            rows[key_of(row)] = {**row, **origin}
            write_rows(path, [rows[key] for key in sorted(rows)])


def key_of(row: Row) -> tuple[str, ...]:
    return tuple(str(row.get(key, "")) for key in KEYS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--bases", type=float, nargs="+", default=BASES, help="of embedded ensembles")
    given = parser.parse_args()
    options = {"bases": given.bases} if given.part == "embedded" else {}
    main(PARTS[given.part](given.seeds, **options), given.csv, given.jobs)
