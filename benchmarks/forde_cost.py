"""What FoRDE's repulsion costs: its training step and a deep ensemble's of the same networks, in turns in one process; CSV out.

    python benchmarks/forde_cost.py --csv benchmarks/results/forde_cost_cpu.csv

Each round times all steps in turn, in an order that alternates; a ratio is the median of the rounds' ratios to the deep
ensemble, with their quartiles. `every=2` repels at each second step, `examples=32` on 32 examples of the batch.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rows import Row, made_on, write_rows
from torch import nn
from turns import in_turns

import dissensus as ds
from dissensus.core.batch import Batch
from dissensus.engine import build_step

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: ds.nets.MLP(784, 10, hidden=(200, 200, 200)), (784,)),
    "conv": (lambda: ds.nets.ConvNet(1, 10), (1, 28, 28)),
}
METHODS: dict[str, Callable[..., ds.Posterior]] = {
    "deep_ensemble": ds.DeepEnsemble,
    "forde": ds.FoRDE,
    "forde, every=2": partial(ds.FoRDE, every=2),
    "forde, examples=32": partial(ds.FoRDE, examples=32),
    "lit": partial(ds.LIT, strength=0.01),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument(
        "--engine", default="auto", help="as of ds.fit; the same for all methods makes ratios comparable"
    )
    parser.add_argument("--members", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--steps", type=int, default=4, help="steps per timing; even, so that every=2 repels in half of them"
    )
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", type=Path, default=None)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    # Five methods are compiled in one process, by several shapes and flags; beyond the limit torch would run the rest eagerly.
    torch._dynamo.config.recompile_limit = 100
    rows = [row for case in given.cases.split(",") for row in measured(case, given)]
    for row in rows:
        print(f"{row['case']:5s} {row['method']:20s} {row['ms']:8.2f} ms  {row['ratio']:.2f} ({row['ran']})")
    if given.csv is not None:
        write_rows(given.csv, rows)


def measured(case: str, given: argparse.Namespace) -> list[Row]:
    """A row per method: median milliseconds of a step, and its ratio to the deep ensemble's."""
    device = torch.device(given.device)
    runs = {name: stepper(case, method, device, given) for name, method in METHODS.items()}
    times = in_turns({name: run for name, (run, _) in runs.items()}, given.rounds)
    rows = []
    for name, found in times.items():
        ratios = [a / b for a, b in zip(found, times["deep_ensemble"], strict=True)]
        lower, middle, upper = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "case": case,
                "method": name,
                "members": given.members,
                "batch": given.batch,
                "ms": round(1e3 * statistics.median(found) / given.steps, 3),
                "ratio": round(middle, 3),
                "lower": round(lower, 3),
                "upper": round(upper, 3),
                "rounds": given.rounds,
                "ran": runs[name][1],
                "threads": torch.get_num_threads(),
                **made_on(device),
            }
        )
    return rows


def stepper(
    case: str, method: Callable[..., ds.Posterior], device: torch.device, given: argparse.Namespace
) -> tuple[Callable[[], None], str]:
    """Some training steps as `fit` makes them, warmed up, and how they ran."""
    build, shape = CASES[case]
    torch.manual_seed(0)
    x, y = torch.randn(given.batch, *shape, device=device), torch.randint(10, (given.batch,), device=device)
    posterior = method([build() for _ in range(given.members)]).to(device).train()
    posterior.begin(steps_per_epoch=500, epochs=30)
    # A small rate: gradients stay of ordinary size on one batch for thousands of steps.
    optimizer = torch.optim.SGD(posterior.parameters(), lr=1e-5, momentum=0.9)
    step = build_step(given.engine, posterior, optimizer, Batch(x, y), count=15_000, precision=None)

    def run() -> None:
        for _ in range(given.steps):
            posterior.before_step(Batch(x, y))  # as fit does; `every` is decided there
            step(Batch(x, y))

    for _ in range(2):  # captures and allocations are made
        run()
    while step.ways:  # until nothing is left to prepare
        run()
    return run, str(step.plan)


if __name__ == "__main__":
    main()
