"""What TRADI's tracking adds to a training step: the same step with and without it, alternating in one process; CSV out.

    python benchmarks/tradi_overhead.py --csv benchmarks/results/tradi_overhead.csv

On a CPU the MLP of the TRADI paper at batch 128, on a GPU a ResNet-18 on 32×32 images too. Each round times both steps in
turn, in an order that alternates; the ratio is that of the medians, its interval from pairs of rounds.
"""

import argparse
import functools
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from rows import made_on, write_rows
from torch import nn
from turns import in_turns

import dissensus as ds
from dissensus.core.batch import Batch
from dissensus.engine import build_step
from dissensus.methods import MAP, SWAG, TRADI

Build = Callable[[], nn.Module]
CASES: dict[str, tuple[Build, tuple[int, ...], int]] = {
    # network, shape of one input, batch
    "mlp": (lambda: ds.nets.MLP(784, 10, hidden=(200, 200, 200), batch_norm=True), (784,), 128),
    "resnet18": (lambda: ds.nets.ResNet(18), (3, 32, 32), 128),
}

Method = Callable[..., ds.Posterior]
METHODS: dict[str, Method] = {
    "tradi": TRADI,
    "swag": SWAG,  # no snapshot falls into the steps that are timed
    "swag, a snapshot at every step": functools.partial(SWAG, start=0, every=1),
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--cases", default="", help="comma-separated, of mlp and resnet18; the device's by default")
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--engine", default="auto", help="as of ds.fit")
    arguments.add_argument("--rounds", type=int, default=60)
    arguments.add_argument("--steps", type=int, default=10, help="steps per timing")
    arguments.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    arguments.add_argument("--csv", type=Path, default=None)
    given = arguments.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    cases = given.cases.split(",") if given.cases else ["mlp", "resnet18"] if device.type == "cuda" else ["mlp"]
    rows = []
    for case in cases:
        for name, method in METHODS.items():
            row = measure(case, name, method, device, given.engine, given.rounds, given.steps)
            rows.append(row)
            print(
                f"{case:9s} {name:6s} plain {row['plain_ms']:.3f} ms, tracked {row['tracked_ms']:.3f} ms: "
                f"+{100 * (row['ratio'] - 1):.1f} % (quartiles {100 * (row['lower'] - 1):.1f} to "
                f"{100 * (row['upper'] - 1):.1f} %)  {row['plain_engine']}"
            )
    if given.csv is not None:
        write_rows(given.csv, rows)


def measure(
    case: str, name: str, method: Method, device: torch.device, engine: str, rounds: int, steps: int
) -> dict[str, object]:
    """One row: medians in milliseconds and their ratio."""
    build, shape, size = CASES[case]
    torch.manual_seed(0)
    x = torch.randn(size, *shape, device=device)
    y = torch.randint(10, (size,), device=device)
    precision = torch.bfloat16 if device.type == "cuda" else None

    def stepper(wrap: Callable[..., ds.Posterior]) -> tuple[Callable[[], None], str]:
        posterior = wrap(build()).to(device).train()
        posterior.begin(steps_per_epoch=500, epochs=30)
        # A small rate: gradients stay of ordinary size on one batch for thousands of steps.
        optimizer = torch.optim.Adam(posterior.parameters(), lr=1e-5, fused=True)
        step = build_step(engine, posterior, optimizer, Batch(x, y), count=15_000, precision=precision)

        def run() -> None:
            for _ in range(steps):
                step(Batch(x, y))

        for _ in range(3):  # captures and allocations are made
            run()
        while step.ways:  # until nothing is left to prepare
            run()
        return run, str(step.plan)

    (plain, plan), (tracked, _) = stepper(MAP), stepper(method)
    times = in_turns({"plain": plain, "tracked": tracked}, rounds)
    ratios = sorted(b / a for a, b in zip(times["plain"], times["tracked"], strict=True))
    lower, middle, upper = statistics.quantiles(ratios, n=4)
    return {
        "case": case,
        "method": name,
        "batch": size,
        "plain_ms": 1e3 * statistics.median(times["plain"]) / steps,
        "tracked_ms": 1e3 * statistics.median(times["tracked"]) / steps,
        "ratio": middle,
        "lower": lower,
        "upper": upper,
        "rounds": rounds,
        "plain_engine": plan,
        "threads": torch.get_num_threads(),
        **made_on(device),
    }


if __name__ == "__main__":
    main()
