"""Memory of a prediction over a million inputs that are never all in memory: a curve per way of predicting.

    python benchmarks/memory.py --csv benchmarks/results/memory.csv --figure docs/figures/memory.png

Each way runs in a process of its own; resident memory is read after every batch.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from rows import made_on, write_rows
from torch import Tensor

import dissensus as ds
from dissensus.metrics.streaming import CalibrationBins

WAYS = ("batches", "summarise", "predict")
BATCH = 2000


class Generated:
    """Batches made when they are asked for."""

    def __init__(self, inputs: int) -> None:
        self.inputs = inputs
        self.seen = 0
        self.curve: list[tuple[int, float]] = []

    def __len__(self) -> int:
        return self.inputs // BATCH

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for i in range(len(self)):
            if i % max(1, len(self) // 50) == 0:
                self.curve.append((i * BATCH, resident()))
            yield torch.randn(BATCH, 64, generator=generator), torch.randint(10, (BATCH,), generator=generator)
        self.curve.append((self.inputs, resident()))


def resident() -> float:
    """MiB of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def run(way: str, inputs: int, members: int) -> list[tuple[int, float]]:
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([ds.nets.MLP(64, 10, hidden=(64, 64)) for _ in range(members)])
    ds.predict(posterior, Generated(10 * BATCH))  # what is loaded on first use is not counted
    loader = Generated(inputs)
    if way == "batches":
        bins = CalibrationBins.empty()
        for predictive, y in ds.predict_batches(posterior, loader):
            bins = bins.update(predictive.mean, y)
        print(f"ECE of {inputs} inputs: {float(bins.ece()):.4f}", file=sys.stderr)
    elif way == "summarise":
        ds.summarise(posterior, loader)
    else:
        ds.predict(posterior, loader)
    return loader.curve


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--inputs", type=int, default=1_000_000)
    arguments.add_argument("--members", type=int, default=10)
    arguments.add_argument("--way", choices=WAYS, help="run this one here and print its curve")
    arguments.add_argument("--csv", type=Path)
    arguments.add_argument("--figure", type=Path)
    options = arguments.parse_args()
    if options.way:
        for seen, size in run(options.way, options.inputs, options.members):
            print(seen, f"{size:.1f}")
        return
    curves: dict[str, list[tuple[int, float]]] = {}
    for way in WAYS:
        given = ["--way", way, "--inputs", str(options.inputs), "--members", str(options.members)]
        lines = subprocess.run(
            [sys.executable, __file__, *given], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        curves[way] = [(int(line.split()[0]), float(line.split()[1])) for line in lines]
        start = curves[way][0][1]
        print(f"{way:>10}: {start:.0f} MiB at the start, {curves[way][-1][1] - start:+.0f} MiB at the end", flush=True)
    if options.csv:
        about = {"members": options.members, **made_on("cpu")}
        points = [(way, seen, size) for way, curve in curves.items() for seen, size in curve]
        write_rows(options.csv, [{"way": way, "inputs": seen, "mib": size, **about} for way, seen, size in points])
    if options.figure:
        figure(curves, options.members).savefig(options.figure, dpi=110)


def figure(curves: dict[str, list[tuple[int, float]]], members: int):
    """Resident memory over inputs seen."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    picture, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    names = {
        "batches": "predict_batches + streaming metrics",
        "summarise": "summarise",
        "predict": "predict (members kept)",
    }
    for way, curve in curves.items():
        axis.plot([seen / 1e6 for seen, _ in curve], [size - curve[0][1] for _, size in curve], label=names[way])
    axis.set(
        xlabel="inputs seen (millions)", ylabel="memory above the start (MiB)", title=f"Prediction with M = {members}"
    )
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    return picture


if __name__ == "__main__":
    main()
