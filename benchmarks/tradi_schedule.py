"""Which schedule and which weight decay TRADI wants, by rows held out of a training set; test rows are not read.

    python benchmarks/tradi_schedule.py                        # schedules on the shipped digits: an hour of one core
    python benchmarks/tradi_schedule.py --data FOLDER          # weight decay and tails on MNIST, too
    python benchmarks/tables.py

The network is that of `mnist-ood`. A schedule is "plateau" (a hundredth of the rate at the end, what `fit` gives a single
network), "thirds" (a tenth after each third, the TRADI paper's) or the floor of a constant tail over the last quarter. What is
chosen by is the NLL of the sampled mixture; AUROC against foreign images (clothes, or letters for MNIST) chooses nothing.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rows import Row, grouped, made_by, made_on, markdown, read_rows, summary, write_rows
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import dissensus as ds
from dissensus import metrics
from dissensus.core.posterior import inference_context
from dissensus.data.splits import split_indices
from dissensus.training.fit import refresh
from dissensus.utils.parameter_groups import constant_tail, plateau_linear

HELD_OUT = {"digits": 1000, "mnist": 5000}


@dataclass(frozen=True)
class Case:
    set: str
    schedule: str
    epochs: int
    weight_decay: float
    optimizer: str
    seed: int

    @property
    def factor(self) -> Callable[[float], float]:
        if self.schedule == "plateau":
            return plateau_linear
        if self.schedule == "thirds":
            return lambda t: 0.1 ** int(3 * t + 1e-9)
        return lambda t: constant_tail(t, floor=float(self.schedule))


TAILS = ("0.05", "0.1", "0.2", "0.5", "1.0")
DIGITS = [
    *(
        Case("digits", schedule, 30, 1e-4, "adamw", seed)
        for seed in (0, 1)
        for schedule in ("plateau", "thirds", *TAILS)
    ),
    *(Case("digits", schedule, 100, 1e-4, "adamw", 0) for schedule in ("plateau", *TAILS)),
]
MNIST = [
    *(Case("mnist", "thirds", 30, decay, "adam", 0) for decay in (1e-2, 1e-3, 1e-4, 0.0)),
    *(Case("mnist", schedule, 30, 1e-3, "adam", 0) for schedule in ("0.1", "0.5")),
    Case("mnist", "0.5", 30, 1e-4, "adam", 0),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", default=None, help="folder of MNIST and notMNIST; without it the digits alone are run"
    )
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "tradi_schedule.csv")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = read_rows(given.csv)
    for case in [*DIGITS, *(MNIST if given.data else [])]:
        asked = {key: str(value) for key, value in asdict(case).items()}
        if not any(all(row[key] == value for key, value in asked.items()) for row in rows):
            rows.append({**asked, **measured(case, given.data)})
            write_rows(given.csv, rows)
    print(table(rows))


def measured(case: Case, data: str | None) -> Row:
    """What a run gives on the rows held out."""
    (x, y), (held_x, held_y), foreign = images(case.set, data)
    torch.manual_seed(case.seed)
    network = ds.nets.MLP(784, 10, hidden=(200, 200, 200), batch_norm=True, dropout=[0.0, 0.1, 0.1], init="he")
    posterior = ds.TRADI(network, samples=20)
    maker = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[case.optimizer]
    optimizer = maker(posterior.parameter_groups(1e-3, case.weight_decay))
    scheduler = LambdaLR(optimizer, lambda epoch: case.factor(epoch / case.epochs))
    loader = ds.data.Batches(x, y, batch_size=128, shuffle=True, seed=case.seed)
    ds.fit(
        posterior, loader, epochs=case.epochs, optimizer=optimizer, scheduler=scheduler, progress=False, device="cpu"
    )
    variance = sum(float(each.sum()) for each in posterior.filters.variance.values())
    square = sum(float(weight.detach().square().sum()) for weight in posterior.filters.weights.values())
    found: Row = {"sigma_over_w": math.sqrt(variance / square)}
    with inference_context(posterior):
        said = {"network": (posterior.current().predict(held_x), posterior.current().predict(foreign))}
    for covariance in ("shared", "diagonal"):
        posterior.covariance = covariance
        torch.manual_seed(1)
        refresh(posterior, loader)
        said[covariance] = (posterior.predict(held_x), posterior.predict(foreign))
    for name, (known, unknown) in said.items():
        found[f"{name}_nll"] = float(-known.log_prob(held_y).mean())
        found[f"{name}_ece"] = float(metrics.ece(known.mean, held_y))
        found[f"{name}_auroc"] = float(metrics.auroc(-known.confidence, -unknown.confidence))
    return found | made_on(posterior.device)


def images(name: str, data: str | None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """(training rows, rows held out of them, foreign inputs), inputs (N, 784) in [−1, 1]."""
    train = ds.data.digits()[0] if name == "digits" else ds.data.mnist("train", folder=data)
    foreign = ds.data.fashion() if name == "digits" else ds.data.notmnist(folder=data)
    used, held = split_indices(len(train.labels), validation=HELD_OUT[name], seed=0, labels=train.labels)
    x, y = unit(train.images), train.labels
    return (x[used], y[used]), (x[held], y[held]), unit(foreign.images)


def unit(x: Tensor) -> Tensor:
    return (x.float() / 255 * 2 - 1).flatten(1)


def table(rows: list[Row]) -> str:
    """MNIST: one line per decay and schedule; means over seeds."""
    columns = {"sigma_over_w": "σ/w", "network_nll": "NLL, network"}
    columns |= {"shared_nll": "NLL, TRADI", "shared_auroc": "AUROC, TRADI"}
    lines = []
    for (decay, schedule), several in grouped(
        (row for row in rows if row["set"] == "mnist"), ("weight_decay", "schedule")
    ).items():
        shown = schedule if schedule in ("plateau", "thirds") else f"tail at {float(schedule):g}"
        cells = [f"{summary(float(row[key]) for row in several)[0]:.3g}" for key in columns]
        lines.append([f"{float(decay):g}", shown, *cells])
    return markdown(["decay", "schedule", *columns.values()], lines)


def page(rows: list[Row]) -> str:
    what, more = "rows held out of the training set, one seed", "digits and longer runs in `tradi_schedule.csv`"
    return f"{table(rows)}\n\n{made_by('python benchmarks/tradi_schedule.py --data FOLDER', rows, what, more)}"


if __name__ == "__main__":
    main()
