"""Times NodeBNN against the plain network: a training step of L samples, and a prediction of K·T functions.

    python benchmarks/node_step.py                          # ResNet-20 and an MLP on the processor, a few minutes
    python benchmarks/node_step.py --device cuda --batch 128 --networks ResNet-20 WRN-28-10
    python benchmarks/node_step.py --threads 1 --cpu-time   # on a machine that others use as well
    python benchmarks/node_step.py --csv node.csv

A training step with L = 4 samples of B images stands beside a plain step (`ds.MAP`) on 4B images, which is what its forward
and backward passes compute apart from the latents; both are steps of the engine that `fit` chooses on that device. With frozen
batch norm it is also set beside a plain step whose batch norm is frozen. A prediction of 32 functions stands beside 32 passes
of the plain network. Sides take turns in one process, so that what else the machine does falls on all; the numbers are medians,
the last one of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rows import write_rows
from torch import Tensor, nn
from turns import in_turns

import dissensus as ds
from dissensus.bench.run.run_folder import provenance
from dissensus.core.batch import Batch
from dissensus.engine import build_step
from dissensus.utils.batch_norm_names import statistics_layers

SAMPLES = 4
FUNCTIONS = 32
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP 784-200-200-10": (lambda: ds.nets.MLP(784, 10, hidden=(200, 200)), (784,)),
    "ResNet-20": (lambda: ds.nets.ResNet(20), (3, 32, 32)),
    "ResNet-18": (lambda: ds.nets.ResNet(18), (3, 32, 32)),
    "VGG16": (lambda: ds.nets.VGG16(batch_norm=False), (3, 32, 32)),
    "WRN-28-10": (lambda: ds.nets.WideResNet(28, 10), (3, 32, 32)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS)[:2])
    parser.add_argument("--batch", type=int, default=32, help="B; the plain step has 4B images")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--engine", default=None, help='"auto" on a GPU, "loop" elsewhere')
    parser.add_argument(
        "--steps", type=int, default=1000, help="of the run that a step is one of; a long one is compiled"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="of this process, not of the clock; with --threads 1")
    parser.add_argument("--csv", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    engine = arguments.engine or ("auto" if device.type == "cuda" else "loop")
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    about = {**provenance(device), "clock": "process" if arguments.cpu_time else "wall"}
    print(f"commit {about['commit']}, torch {about['torch']}, {about['device']}, {about['threads']} threads")
    print(f"\n{'network':>20} {'what':>34} {'beside':>18} {'plain ms':>10} {'node ms':>10} {'ratio':>7}")
    rows: list[dict[str, Any]] = []
    for name in arguments.networks:
        for what, beside, plain, node, ratio in measured(
            name, arguments.batch, arguments.repeats, engine, device, clock, arguments.steps
        ):
            print(f"{name:>20} {what:>34} {beside:>18} {1e3 * plain:>10.2f} {1e3 * node:>10.2f} {ratio:>7.3f}")
            rows.append(
                {
                    "network": name,
                    "batch": arguments.batch,
                    "run": arguments.steps,
                    "what": what,
                    "beside": beside,
                    "plain_ms": round(1e3 * plain, 3),
                    "node_ms": round(1e3 * node, 3),
                    "ratio": round(ratio, 4),
                    **about,
                }
            )
    if arguments.csv:
        write_rows(arguments.csv, rows)


def measured(
    name: str, batch: int, repeats: int, engine: str, device: torch.device, clock: Callable[[], float], run: int
) -> list[tuple[str, str, float, float, float]]:
    """(what, beside what, plain seconds, node seconds, ratio), all sides in turns."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    x, y = torch.randn(batch, *shape, device=device), torch.randint(10, (batch,), device=device)
    many = x.repeat(SAMPLES, *[1] * len(shape)), y.repeat(SAMPLES)
    normed = bool(statistics_layers(make()))
    steps = {"plain": step(ds.MAP(make()), *many, engine, device, run)}
    pairs: list[tuple[str, str, str]] = []
    for kind in ("trained", "frozen") if normed else ("trained",):
        for mode in ("in", "out"):
            key = f"step, {mode}" + (f", batch norm {kind}" if normed else "")
            posterior = ds.NodeBNN(make(), data_size=50_000, mode=mode, batch_norm=kind)  # type: ignore[arg-type]
            steps[key] = step(posterior, x, y, engine, device, run)
            pairs.append((key, "plain", "a plain step"))
            if kind == "frozen":
                pairs.append((key, "plain, frozen", "a frozen one"))
    if normed:
        steps["plain, frozen"] = step(frozen(ds.MAP(make())), *many, engine, device, run)
    functions = {f"{FUNCTIONS} functions, {mode}": functions_of(make(), mode, x) for mode in ("in", "out")}
    functions["plain passes"] = passes(make().to(device), x)
    pairs += [(key, "plain passes", f"{FUNCTIONS} passes") for key in list(functions)[:2]]
    times = in_turns({**steps, **functions}, repeats, uncounted=3, clock=clock)
    found = []
    for key, plain, beside in pairs:
        ratios = [b / a for a, b in zip(times[plain], times[key], strict=True)]
        found.append((key, beside, median(times[plain]), median(times[key]), median(ratios)))
    return found


def step(
    posterior: ds.Posterior, x: Tensor, y: Tensor, engine: str, device: torch.device, steps: int = 1000
) -> Callable[[], object]:
    """One training step of so many by the engine, with SGD and momentum."""
    posterior = posterior.to(device).train()
    optimizer = torch.optim.SGD(posterior.parameter_groups(lr=1e-3), momentum=0.9)
    posterior.begin(steps, 1)
    posterior.before_step(Batch(x, y))
    run = build_step(engine, posterior, optimizer, Batch(x, y), count=steps)
    while run.ways:  # until nothing is left to prepare
        run(Batch(x, y))
    return lambda: run(Batch(x, y))


def frozen(posterior: ds.MAP) -> ds.MAP:
    template = posterior.particles.template
    template.always_eval = list(statistics_layers(template))
    return posterior


def functions_of(network: nn.Module, mode: Any, x: Tensor) -> Callable[[], object]:
    """All functions of one draw on the batch."""
    drawn = ds.NodeBNN(network, data_size=50_000, mode=mode, samples=FUNCTIONS).to(x.device).eval().draw()

    def run() -> Tensor:
        with torch.no_grad():
            outputs: Tensor = drawn(x)
        return outputs

    return run


def passes(network: nn.Module, x: Tensor) -> Callable[[], object]:
    """As many passes of the plain network."""
    network.eval()

    def run() -> Tensor:
        with torch.no_grad():
            return torch.stack([network(x) for _ in range(FUNCTIONS)])

    return run


if __name__ == "__main__":
    main()
