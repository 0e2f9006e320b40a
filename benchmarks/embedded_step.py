"""Times a training step of a BatchEnsemble of M members against a plain step of one network at batch M·B.

    python benchmarks/embedded_step.py                          # an MLP of width 512, a ResNet-20, about two minutes
    python benchmarks/embedded_step.py --device cuda --csv benchmarks/results/embedded_step_h200.csv
    python benchmarks/embedded_step.py --cases mlp --repeats 100 --threads 2

Both see M·B examples' worth of work, train with SGD and momentum and take turns in one process, so that what else the machine
does falls on both; numbers are medians, on one thread of a CPU those of its time. The plain step is what one would write by
hand: zero_grad, forward, cross-entropy, backward, step; where the ensemble's is compiled, so are its forward and backward. On
a GPU the ensemble runs as "auto" chooses, and the plain step is captured in a CUDA graph as well wherever the ensemble's is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from rows import write_rows
from torch import Tensor, nn
from turns import in_turns

import dissensus as ds
from dissensus.bench.run.run_folder import provenance
from dissensus.core.batch import Batch
from dissensus.engine import build_step

# name -> (network, shape of an example, B of each member, engine on a CPU)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, str]] = {
    "mlp": (lambda: ds.nets.MLP(64, 10, hidden=(512, 512, 512)), (64,), 128, "vectorised+compiled"),
    "mlp, 784 inputs": (lambda: ds.nets.MLP(784, 10, hidden=(512, 512, 512)), (784,), 128, "vectorised+compiled"),
    "mlp, eager": (lambda: ds.nets.MLP(64, 10, hidden=(512, 512, 512)), (64,), 128, "vectorised"),
    "resnet20": (lambda: ds.nets.ResNet(20), (3, 32, 32), 32, "loop"),
    "resnet20, batches of 16": (lambda: ds.nets.ResNet(20), (3, 32, 32), 16, "loop"),
    "resnet20, activations": (lambda: ds.nets.ResNet(20), (3, 32, 32), 32, "vectorised"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=30, help="timed steps of each side")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--csv", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    about = provenance(device)
    print(f"commit {about['commit']}, torch {about['torch']}, {about['device']}, {about['threads']} threads")
    print(f"\n{'case':>24} {'batch':>6} {'plain ms':>9} {'ensemble ms':>12} {'ensemble / plain':>17}  engine")
    rows = []
    for name in arguments.cases:
        batch = CASES[name][2]
        plain, ensemble, engine = timed(name, arguments.members, arguments.repeats, device)
        print(f"{name:>24} {batch:>6} {1e3 * plain:>9.2f} {1e3 * ensemble:>12.2f} {ensemble / plain:>17.2f}  {engine}")
        rows.append(
            {
                "case": name,
                "members": arguments.members,
                "batch": batch,
                "engine": engine,
                "plain_ms": round(1e3 * plain, 3),
                "ensemble_ms": round(1e3 * ensemble, 3),
                "ratio": round(ensemble / plain, 3),
                **about,
            }
        )
        if arguments.csv:
            write_rows(arguments.csv, rows)


def timed(name: str, members: int, repeats: int, device: torch.device) -> tuple[float, float, str]:
    """(seconds of a plain step at batch M·B, of the ensemble's at batch B, its engine), medians, taken in turns."""
    make, shape, batch, engine = CASES[name]
    torch.manual_seed(0)
    x, y = torch.randn(members * batch, *shape, device=device), torch.randint(10, (members * batch,), device=device)
    posterior = ds.BatchEnsemble(make(), members=members, modulation=ds.Modulation.sign()).to(device).train()
    groups = posterior.parameter_groups(1e-3)
    optimizer = torch.optim.SGD(groups, lr=1e-3, momentum=0.9, fused=True)
    few, labels = x[:batch], y[:batch]
    chosen = engine if device.type == "cpu" else "auto"
    step = build_step(chosen, posterior, optimizer, Batch(few, labels), count=10**6)

    def ensemble() -> None:
        posterior.before_step(Batch(few, labels))
        step(Batch(few, labels))

    while step.ways:  # until nothing is left to prepare
        ensemble()
    plan = step.plan
    plain = plain_step(make().to(device).train(), x, y, compiled=plan.compiled, captured=plan.captured)
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    now = time.process_time if alone else time.perf_counter
    # What compiles or captures is not counted.
    times = in_turns({"plain": plain, "ensemble": ensemble}, repeats, uncounted=8, clock=now)
    return median(times["plain"]), median(times["ensemble"]), str(plan)


def plain_step(network: nn.Module, x: Tensor, y: Tensor, *, compiled: bool, captured: bool) -> Callable[[], None]:
    """One step of the network as one would write it."""
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9, fused=True)
    forward = torch.compile(network, dynamic=False) if compiled else network

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(forward(x), y).backward()
        optimizer.step()

    if not captured:
        return step
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


if __name__ == "__main__":
    main()
