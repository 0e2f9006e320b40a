"""Times one training step of a deep ensemble against a plain Python loop over the same members.

    python benchmarks/ensemble_step.py                     # 20 MLPs of two sizes, batches of 16 and 128, about half a minute
    python benchmarks/ensemble_step.py --csv step.csv
    python benchmarks/ensemble_step.py --threads 1 --repeats 10

Both sides start from the same members and train on the same batch with SGD and momentum: a step of the loop is
zero_grad, cross-entropy, backward and the step of each member's own optimiser; a step of the ensemble is zero_grad,
`backward` and one optimiser. They take turns in one process, so that what else the machine does falls on both; the
numbers are medians.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from rows import write_rows
from torch import Tensor, nn
from turns import in_turns

import dissensus as ds
from dissensus.bench.run.provenance import provenance

NETWORKS = {"784-200-200-200-10": (784, (200, 200, 200)), "64-100-100-10": (64, (100, 100))}
BATCHES = (16, 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=30, help="timed steps of each side")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--csv", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    about = provenance(torch.device("cpu"))
    print(f"commit {about['commit']}, torch {about['torch']}, {about['device']}, {about['threads']} threads")
    print(f"\n{'network':>20} {'batch':>6} {'loop ms':>9} {'ensemble ms':>12} {'loop / ensemble':>16}")
    rows = []
    for name in NETWORKS:
        for batch in BATCHES:
            loop, ensemble = timed(name, batch, arguments.members, arguments.repeats)
            print(f"{name:>20} {batch:>6} {1e3 * loop:>9.2f} {1e3 * ensemble:>12.2f} {loop / ensemble:>16.2f}")
            rows.append(
                {
                    "network": name,
                    "members": arguments.members,
                    "batch": batch,
                    "loop_ms": round(1e3 * loop, 3),
                    "ensemble_ms": round(1e3 * ensemble, 3),
                    "ratio": round(loop / ensemble, 3),
                    **about,
                }
            )
    if arguments.csv:
        write_rows(arguments.csv, rows)


def timed(name: str, batch: int, members: int, repeats: int) -> tuple[float, float]:
    """Median seconds of a step: (of the loop, of the ensemble), taken in turns; three of each are not counted."""
    inputs, hidden = NETWORKS[name]
    torch.manual_seed(0)
    networks: list[nn.Module] = [ds.nets.MLP(inputs, 10, hidden=hidden) for _ in range(members)]
    x, y = torch.randn(batch, inputs), torch.randint(10, (batch,))
    sides = {"loop": loop_step(networks, x, y), "ensemble": ensemble_step(ds.DeepEnsemble(networks), x, y)}
    times = in_turns(sides, repeats, uncounted=3)
    return median(times["loop"]), median(times["ensemble"])


def loop_step(networks: list[nn.Module], x: Tensor, y: Tensor) -> Callable[[], None]:
    """One step of every member, one after the other, each with an optimiser of its own."""
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9) for network in networks]

    def step() -> None:
        for network, optimizer in zip(networks, optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return step


def ensemble_step(posterior: ds.Posterior, x: Tensor, y: Tensor) -> Callable[[], None]:
    """One step of all members with one optimiser on the stacked tensors."""
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        posterior.backward(x, y)
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
