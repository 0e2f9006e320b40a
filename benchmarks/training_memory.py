"""The memory that `fit` states before training on a GPU, and what training then takes; CSV out.

    python benchmarks/training_memory.py --csv benchmarks/results/training_memory.csv

`tensors`: MiB in use at most (`torch.cuda.max_memory_allocated`), from the time when ways to run members had been tried.
`reserved`: MiB that torch took from the device, at most in the epochs after the first: a CUDA graph keeps the memory of all
it computes. Both are above what was there before the posterior. Each case runs in a process of its own.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rows import made_on, write_rows
from torch import nn

import dissensus as ds
from dissensus.data import Batches

STEPS = 20
Case = tuple[Callable[[list[nn.Module]], ds.Posterior], Callable[[], nn.Module], tuple[int, ...], int]
CASES: dict[str, Case] = {
    # method, network, shape of one input, members
    "deep ensemble, ResNet-18": (ds.DeepEnsemble, lambda: ds.nets.ResNet(18), (3, 32, 32), 10),
    "FoRDE, ResNet-18": (lambda nets: ds.FoRDE(nets, data_size=50_000), lambda: ds.nets.ResNet(18), (3, 32, 32), 10),
    "deep ensemble, MLP": (ds.DeepEnsemble, lambda: ds.nets.MLP(784, 10, hidden=(200, 200, 200)), (784,), 20),
    "FoRDE, MLP": (
        lambda nets: ds.FoRDE(nets, data_size=50_000),
        lambda: ds.nets.MLP(784, 10, hidden=(200, 200, 200)),
        (784,),
        20,
    ),
}


def measure(case: str, batch: int) -> list[object]:
    """The engine used; MiB of tensors stated and reserved bytes stated, then both as taken."""
    torch.manual_seed(0)
    method, make, shape, members = CASES[case]
    x = torch.randn(STEPS * batch, *shape, device="cuda")
    y = torch.randint(10, (len(x),), device="cuda")
    posterior = method([make() for _ in range(members)]).cuda()
    weights = sum(t.numel() * t.element_size() for t in (*posterior.parameters(), *posterior.buffers()))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() - weights, torch.cuda.memory_reserved() - weights
    tensors = []

    def note(epoch: ds.Epoch) -> None:
        tensors.append(torch.cuda.max_memory_allocated() - before[0])
        torch.cuda.reset_peak_memory_stats()

    optimizer = torch.optim.SGD(posterior.parameters(), lr=1e-3, momentum=0.9)
    history = ds.fit(
        posterior, Batches(x, y, batch_size=batch), epochs=4, optimizer=optimizer, callback=note, progress=False
    )
    if history.memory is None:
        raise ValueError("expected fit to state its memory")
    found = [max(tensors), torch.cuda.max_memory_reserved() - before[1]]
    return [
        history.engine,
        *(round(size / 2**20, 1) for size in (history.memory.bytes_at_once, history.memory.reserved_bytes, *found)),
    ]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--case", choices=list(CASES), help="run this one here and print its numbers")
    arguments.add_argument("--batch", type=int, default=128)
    arguments.add_argument("--csv", type=Path)
    options = arguments.parse_args()
    if options.case:
        print(*measure(options.case, options.batch), sep="\t")
        return
    columns = ["engine", "stated_tensors", "stated_reserved", "tensors", "reserved"]
    rows = []
    for case in CASES:
        command = [sys.executable, __file__, "--case", case, "--batch", str(options.batch)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = dict(zip(columns, done.stdout.splitlines()[-1].split("\t"), strict=True))
        ratios = [float(found[f"stated_{what}"]) / float(found[what]) for what in ("tensors", "reserved")]
        rows.append({"case": case, "batch": options.batch, **found, **made_on("cuda")})
        print(case, found, "stated over taken: {:.2f}, {:.2f}".format(*ratios), flush=True)
    if options.csv:
        write_rows(options.csv, rows)


if __name__ == "__main__":
    main()
