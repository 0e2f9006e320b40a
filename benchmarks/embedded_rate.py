"""Learning rates of `embedded-width`, measured on digits that are neither trained nor tested on.

    python benchmarks/embedded_rate.py --csv benchmarks/results/embedded_rate.csv --jobs 16

The task takes the largest rate at which ensembles of either kind train.
"""

import argparse
import math
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rows import write_rows

from dissensus.bench.build import optimizer, posterior
from dissensus.bench.config import load_task
from dissensus.bench.loaders import StandardisedBatches
from dissensus.bench.provenance import provenance
from dissensus.bench.sets import task_data
from dissensus.bench.widths import Cell, cells, widths_of
from dissensus.core.errors import Diverged
from dissensus.predict import predict
from dissensus.train import fit

RATES = {"standard": (0.01, 0.03, 0.1), "ntk": (0.3, 1.0, 3.0)}
MEMBERS = 8
Row = dict[str, Any]


def measured(cell: Cell) -> Row:
    """Accuracy and NLL on held-out digits, and on the 2,000 trained on, at the cell's rate."""
    torch.set_num_threads(1)
    config = cell.config
    data = task_data({**config.data, "train": 4000, "validation": 2000})
    training, held = (
        StandardisedBatches(rows, data.standardiser, batch_size=500) for rows in (data.train, data.validation)
    )
    batches = StandardisedBatches(data.train, data.standardiser, batch_size=config.training["batch_size"], shuffle=True)
    torch.manual_seed(config.seed)
    found: Row = {
        "method": cell.method, "factor": cell.factor, "members": cell.members, "seed": config.seed,
        "parameterization": config.network["parameterization"], "rate": config.training["lr"],
    }  # fmt: skip
    ensemble = posterior(config, data)
    made, schedule = optimizer(ensemble, config.training)
    try:
        fit(ensemble, batches, epochs=config.training["epochs"], optimizer=made, scheduler=schedule, progress=False)
    except Diverged as error:
        return {**found, "diverged": error.step}
    for name, loader in (("", held), ("train_", training)):
        said, y = predict(ensemble, loader)
        found[f"{name}accuracy"] = float((said.mean.argmax(-1) == y).double().mean())
        found[f"{name}nll"] = float(-said.log_prob(y).mean())
        found[f"{name}member_accuracy"] = float((said.members.argmax(-1) == y).double().mean())
    return found


def asked(seeds: int) -> list[Cell]:
    """Cells of M members at every width, rate and parameterization."""
    found = []
    for form, rates in RATES.items():
        for rate in rates:
            task = load_task(
                "embedded-width",
                overrides=[
                    f"widths.members=[{MEMBERS}]", "widths.p=[]", f"widths.p_members={MEMBERS}", f"training.lr={rate}",
                    f"network.parameterization={form}",
                ],
            )  # fmt: skip
            widths = widths_of(task)
            assert widths is not None
            made = cells(task, replace(widths, factors=(0.25, 1.0, 4.0)), range(seeds))
            found += made
    return sorted(found, key=lambda cell: -math.prod((cell.factor, 1 + (cell.method == "deep_ensemble"))))


def main(path: Path, jobs: int, seeds: int) -> None:
    origin = {
        key: value for key, value in provenance(torch.device("cpu")).items() if key in ("commit", "torch", "device")
    }
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        rows = []
        for row in pool.imap_unordered(measured, asked(seeds)):
            print(row, flush=True)
            rows.append({**row, **origin})
    keys = ("parameterization", "rate", "method", "factor", "seed")
    write_rows(path, sorted(rows, key=lambda row: tuple(row[key] for key in keys)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    main(given.csv, given.jobs, given.seeds)
