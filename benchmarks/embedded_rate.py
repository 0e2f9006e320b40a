"""Learning rates of `embedded-width`, by accuracy on digits that are neither trained nor tested on.

    python benchmarks/embedded_rate.py --csv benchmarks/results/embedded_rate.csv --jobs 2

The task has one rate for independent ensembles, one for embedded ones (that of γ = M in the transition, too) and one for γ = 1,
each the best of those at which none diverges.
"""

import argparse
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rows import write_rows

from dissensus.bench.rows.loaders import StandardisedBatches
from dissensus.bench.rows.sets import task_data
from dissensus.bench.run.build import optimizer, posterior
from dissensus.bench.run.provenance import provenance
from dissensus.bench.task.config import load_task
from dissensus.bench.width.grid import Cell, cells, widths_of
from dissensus.core.errors import Diverged
from dissensus.predict import predict
from dissensus.train import fit

RATES = (0.3, 1.0, 3.0, 10.0)
TRANSITION = (1.0, 3.0)  # at γ = 1; γ = M has the rate of the main grid
FACTORS, MEMBERS = (0.25, 1.0, 4.0), 8
Row = dict[str, Any]


def measured(cell: Cell) -> Row:
    """Accuracy and NLL on 2,000 held-out digits, and on the 2,000 trained on, at the cell's rate."""
    torch.set_num_threads(1)
    config = cell.config
    data = task_data({**config.data, "train": 4000, "validation": 2000})
    batches = StandardisedBatches(data.train, data.standardiser, batch_size=config.training["batch_size"], shuffle=True)
    found: Row = {
        "method": cell.method, "factor": cell.factor, "members": cell.members, "p": "" if cell.p is None else cell.p,
        "gamma": cell.gamma, "rate": config.training["lr"], "seed": config.seed, "diverged": "",
    }  # fmt: skip
    torch.manual_seed(config.seed)
    ensemble = posterior(config, data)
    made, schedule = optimizer(ensemble, config.training)
    try:
        fit(ensemble, batches, epochs=config.training["epochs"], optimizer=made, scheduler=schedule, progress=False)
    except Diverged as error:
        return {**found, "diverged": error.step}
    for name, rows in (("", data.validation), ("train_", data.train)):
        said, y = predict(ensemble, StandardisedBatches(rows, data.standardiser, batch_size=500))
        found[f"{name}accuracy"] = round(float((said.mean.argmax(-1) == y).double().mean()), 5)
        found[f"{name}nll"] = round(float(-said.log_prob(y).mean()), 5)
        found[f"{name}member_accuracy"] = round(float((said.members.argmax(-1) == y).double().mean()), 5)
    return found


def asked(seeds: int) -> list[Cell]:
    """Ensembles of eight at three widths, and those of the transition, at every rate; the transition has one seed."""
    task = load_task("embedded-width")
    widths = widths_of(task)
    assert widths is not None
    few = replace(widths, factors=FACTORS, members=(MEMBERS,))
    return [
        replace(cell, config=replace(cell.config, training={**cell.config.training, "lr": rate}))
        for cell in cells(task, few, range(seeds))
        for rate in (RATES if cell.p is None else TRANSITION)
        if cell.p is None or (cell.gamma == "1" and cell.config.seed == 0)
    ]


def main(path: Path, jobs: int, seeds: int) -> None:
    origin = {
        key: value for key, value in provenance(torch.device("cpu")).items() if key in ("commit", "torch", "device")
    }
    rows = []
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for row in pool.imap_unordered(measured, asked(seeds)):
            print(row, flush=True)
            rows.append({**row, **origin})
    keys = ("method", "p", "gamma", "factor", "members", "rate", "seed")
    write_rows(path, sorted(rows, key=lambda row: tuple(str(row[key]) for key in keys)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    main(given.csv, given.jobs, given.seeds)
