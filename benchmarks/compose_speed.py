"""What SWAG of five networks costs per step: against a deep ensemble of five, and against five runs of SWAG; CSV out.

    python benchmarks/compose_speed.py --csv benchmarks/results/compose_speed_cpu.csv
    python benchmarks/compose_speed.py --device cuda --csv benchmarks/results/compose_speed_h200.csv

The same networks on the same batch with the same optimiser, in turns in one process, in an order that alternates. A timing is
40 steps, one of which takes a snapshot: the share that 40 snapshots have in a run of 1,600 steps. The five runs take their 40
steps one after the other. Ratios are medians of the rounds' ratios, with their quartiles.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from rows import Row, made_on, markdown, read_rows, write_rows
from torch import nn
from turns import in_turns

import dissensus as ds
from dissensus.core.batch import Batch
from dissensus.engine import build_step

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    # network, shape of one input, title
    "mlp": (lambda: ds.nets.MLP(784, 10, hidden=(200, 200, 200)), (784,), "MLP 784-200-200-200-10"),
    "resnet18": (lambda: ds.nets.ResNet(18), (3, 32, 32), "ResNet-18"),
}
STEPS, SNAPSHOTS = 40, 40  # of a timing; of a run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="comma-separated; mlp, and resnet18 on a GPU, by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--members", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    parser.add_argument("--csv", type=Path, default=None)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    cases = given.cases.split(",") if given.cases else ["mlp", "resnet18"] if device.type == "cuda" else ["mlp"]
    rows = [measured(case, device, given) for case in cases]
    if given.csv is not None:
        write_rows(given.csv, rows)
        rows = read_rows(given.csv)
    print(table(rows))


def measured(case: str, device: torch.device, given: argparse.Namespace) -> Row:
    """Medians in milliseconds of a step of all networks, and ratios of rounds."""
    make, shape, _ = CASES[case]
    torch.manual_seed(0)
    x = torch.randn(given.batch, *shape, device=device)
    y = torch.randint(10, (given.batch,), device=device)
    networks = [make() for _ in range(given.members)]
    ensemble, plan = stepper(ds.DeepEnsemble(networks), x, y)
    together, ran = stepper(ds.SWAG(networks, start=0, every=STEPS), x, y, engine=plan)  # members run alike in both
    apart = [stepper(ds.SWAG(network, start=0, every=STEPS), x, y) for network in networks]
    sides = {"ensemble": ensemble, "together": together, "apart": lambda: [run() for run, _ in apart]}
    times = in_turns(sides, given.rounds)
    ratios = {
        "over_ensemble": [a / b for a, b in zip(times["together"], times["ensemble"], strict=True)],
        "apart_over_together": [a / b for a, b in zip(times["apart"], times["together"], strict=True)],
    }
    row: Row = {"case": case, "members": given.members, "batch": given.batch}
    row |= {f"{name}_ms": round(1e3 * statistics.median(found) / STEPS, 3) for name, found in times.items()}
    for name, found in ratios.items():
        lower, middle, upper = (round(value, 3) for value in statistics.quantiles(found, n=4))
        row |= {name: middle, f"{name}_lower": lower, f"{name}_upper": upper}
    return row | {
        "rounds": given.rounds,
        "steps": STEPS,
        "ran": ran,
        "ran_apart": apart[0][1],
        "threads": torch.get_num_threads(),
        **made_on(device),
    }


def stepper(
    posterior: ds.Posterior, x: torch.Tensor, y: torch.Tensor, engine: str = "auto"
) -> tuple[Callable[[], None], str]:
    """Some training steps as `fit` makes them, warmed up, and how they ran."""
    posterior.to(x.device).train()
    posterior.begin(steps_per_epoch=STEPS, epochs=SNAPSHOTS)
    # A small rate: gradients stay of ordinary size on one batch for thousands of steps.
    optimizer = torch.optim.Adam(posterior.parameters(), lr=1e-5, fused=True)
    precision = torch.bfloat16 if x.device.type == "cuda" else None
    step = build_step(engine, posterior, optimizer, Batch(x, y), count=STEPS * SNAPSHOTS, precision=precision)

    def run() -> None:
        for _ in range(STEPS):
            posterior.before_step(Batch(x, y))
            step(Batch(x, y))

    run()  # captures and allocations are made
    while step.ways:  # until nothing is left to prepare
        run()
    return run, str(step.plan)


def table(rows: list[Row]) -> str:
    """One line per network and device."""

    def ratio(row: Row, name: str) -> str:
        return f"{float(row[name]):.2f} ({float(row[f'{name}_lower']):.2f} to {float(row[f'{name}_upper']):.2f})"

    lines = [
        [
            row["device"],
            f"{row['members']} × {CASES[row['case']][2]}, batch {row['batch']}",
            *(f"{float(row[f'{name}_ms']):.3g}" for name in ("ensemble", "together", "apart")),
            ratio(row, "over_ensemble"),
            ratio(row, "apart_over_together"),
        ]
        for row in rows
    ]
    sides = ["deep ensemble, ms per step", "SWAG of all", "one SWAG after the other"]
    return markdown(["device", "networks", *sides, "SWAG over ensemble", "gain over runs apart"], lines)


def page(rows: list[Row]) -> str:
    """The table and where it comes from."""
    facts = "; ".join(
        dict.fromkeys(f"commit {row['commit']}, torch {row['torch']}, {row['threads']} thread(s)" for row in rows)
    )
    made = (
        f"*`python benchmarks/compose_speed.py --csv FILE`; medians of rounds in turns and their quartiles; {facts}.*"
    )
    return f"{table(rows)}\n\n{made}"


if __name__ == "__main__":
    main()
