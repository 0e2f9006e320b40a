"""The memory that `fit` states before training, and what training and the draw after it take; CSV out.

    python benchmarks/training_memory.py --csv benchmarks/results/training_memory.csv
    OMP_NUM_THREADS=1 python benchmarks/training_memory.py --device cpu --csv benchmarks/results/training_memory_cpu.csv

`tensors`: MiB in use at most (`torch.cuda.max_memory_allocated`), from the time when ways to run members had been tried.
`reserved`: MiB that torch took from the device, at most in the epochs after the first: a CUDA graph keeps the memory of all
it computes. Both are above what was there before the posterior. Each case runs in a process of its own. On a CPU `tensors`
is the process's resident memory at most; what is loaded on first use is loaded before, by a run on two examples.
"""

import argparse
import ctypes
import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rows import made_on, write_rows
from torch import Tensor, nn

import dissensus as ds
from dissensus.data import Batches

STEPS = 20
HOST_STEPS = 3
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
    "SWAG, ResNet-18": (ds.SWAG, lambda: ds.nets.ResNet(18), (3, 32, 32), 1),
}


def vgg() -> nn.Module:
    """Six convolutions with batch norm, in three stages."""
    blocks: list[nn.Module] = []
    for before, after in ((3, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128)):
        blocks += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        blocks += [nn.MaxPool2d(2)] if before == after else []
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(2048, 10))


HOST_CASES: dict[str, Case] = {
    "MAP, MLP": (ds.MAP, lambda: ds.nets.MLP(784, 10, hidden=(1000, 1000)), (784,), 1),
    "MAP, ConvNet": (ds.MAP, lambda: ds.nets.ConvNet(3, 10, size=32), (3, 32, 32), 1),
    "MAP, ResNet-20": (ds.MAP, lambda: ds.nets.ResNet(20), (3, 32, 32), 1),
    "MAP, VGG": (ds.MAP, vgg, (3, 32, 32), 1),
    "deep ensemble, MLP": (ds.DeepEnsemble, lambda: ds.nets.MLP(784, 10, hidden=(1000, 1000)), (784,), 5),
    "deep ensemble, ConvNet": (ds.DeepEnsemble, lambda: ds.nets.ConvNet(3, 10, size=32), (3, 32, 32), 5),
    "deep ensemble, ResNet-20": (ds.DeepEnsemble, lambda: ds.nets.ResNet(20), (3, 32, 32), 5),
}


def resident(what: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at most since the last reset."""
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(what))


def measure_host(case: str, batch: int) -> list[object]:
    """The engine used; MiB stated for it, and taken."""
    method, make, shape, members = HOST_CASES[case]

    def train(rows: int, x: Tensor, y: Tensor) -> ds.History:
        networks = [make() for _ in range(members)]
        posterior = method(networks if members > 1 else networks[0])
        optimizer = torch.optim.SGD(posterior.parameters(), lr=1e-3, momentum=0.9)
        return ds.fit(
            posterior, Batches(x, y, batch_size=rows), epochs=1, optimizer=optimizer, progress=False, device="cpu"
        )

    torch.manual_seed(0)
    train(2, torch.randn(2, *shape), torch.randint(10, (2,)))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what that run has freed would be used again and not be seen
    x = torch.randn(HOST_STEPS * batch, *shape)
    y = torch.randint(10, (len(x),))
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    history = train(batch, x, y)
    if history.memory is None:
        raise ValueError("expected fit to state its memory")
    memory = history.memory
    stated = memory.bytes_in_loop if history.engine.startswith("loop") else memory.bytes_at_once
    return [history.engine, *(round(size / 2**20, 1) for size in (stated, resident("VmHWM") - before))]


def measure(case: str, batch: int) -> list[object]:
    """The engine used; MiB of tensors stated and reserved bytes stated, then both as taken."""
    torch.manual_seed(0)
    method, make, shape, members = CASES[case]
    x = torch.randn(STEPS * batch, *shape, device="cuda")
    y = torch.randint(10, (len(x),), device="cuda")
    networks = [make() for _ in range(members)]
    posterior = method(networks if members > 1 else networks[0]).cuda()
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
    found = [max(*tensors, torch.cuda.max_memory_allocated() - before[0]), torch.cuda.max_memory_reserved() - before[1]]
    memory = history.memory
    stated = memory.bytes_with_draw, memory.reserved_bytes + 2 * memory.drawn
    return [history.engine, *(round(size / 2**20, 1) for size in (*stated, *found))]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--case", choices=[*CASES, *HOST_CASES], help="run this one here and print its numbers")
    arguments.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments.add_argument("--batch", type=int, default=128)
    arguments.add_argument("--csv", type=Path)
    options = arguments.parse_args()
    if options.case:
        print(*(measure_host if options.device == "cpu" else measure)(options.case, options.batch), sep="\t")
        return
    kinds = ("tensors",) if options.device == "cpu" else ("tensors", "reserved")
    columns = ["engine", *(f"stated_{what}" for what in kinds), *kinds]
    rows = []
    for case in HOST_CASES if options.device == "cpu" else CASES:
        given = ["--case", case, "--batch", str(options.batch), "--device", options.device]
        command = [sys.executable, __file__, *given]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = dict(zip(columns, done.stdout.splitlines()[-1].split("\t"), strict=True))
        ratios = [float(found[f"stated_{what}"]) / float(found[what]) for what in kinds]
        rows.append({"case": case, "batch": options.batch, **found, **made_on(options.device)})
        print(case, found, "stated over taken:", *(f"{ratio:.2f}" for ratio in ratios), flush=True)
    if options.csv:
        write_rows(options.csv, rows)


if __name__ == "__main__":
    main()
