"""Times the empirical tangent kernel of a 3×512 MLP on 500 inputs, 10 outputs, all blocks, float32, on two threads.

    python benchmarks/tangent_kernel.py --csv benchmarks/results/tangent_kernel.csv
    python benchmarks/tangent_kernel.py --neural-tangents tangents/bin/python   # as make_kernel_vectors.py installs it
    python benchmarks/tangent_kernel.py --resnet [DATA]                         # ResNet-20 on 100 images, on a GPU

Sides take turns, medians; neural-tangents (implementation 3, jitted, warmed up) runs in a process of its own, which waits while
ours runs. "naive" makes the whole Jacobian and contracts it at once, which for 500 inputs is 19 GB, twice: it is compared on 50
inputs. Peak memory is the process' largest resident size above that before the call, each side in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

ROWS, FEW = 500, 50
THEIRS = """
import os, sys, time, json
import jax, jax.numpy as np, neural_tangents as nt
from neural_tangents import stax
init, f, _ = stax.serial(*[layer for _ in range(3) for layer in (stax.Dense(512), stax.Relu())], stax.Dense(10))
_, params = init(jax.random.PRNGKey(0), (1, 784))
x = jax.random.normal(jax.random.PRNGKey(1), (ROWS, 784))
kernel = jax.jit(nt.empirical_ntk_fn(f, trace_axes=(), vmap_axes=0, implementation=3))
kernel(x, None, params).block_until_ready()
print("ready", flush=True)
for line in sys.stdin:
    start = time.perf_counter()
    kernel(x, None, params).block_until_ready()
    print(time.perf_counter() - start, flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="calls of each side")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--neural-tangents", type=Path, metavar="PYTHON", help="a Python that has it")
    parser.add_argument(
        "--resnet", nargs="?", const="", metavar="DATA", help="ResNet-20 on a GPU; DATA: folder of cifar10"
    )
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--peak", choices=("ours", "naive, 50 inputs"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        print(json.dumps(peak(arguments.peak, arguments.threads)))
        return
    rows = resnet(arguments.resnet) if arguments.resnet is not None else dense(arguments)
    if arguments.csv:
        from rows import write_rows

        write_rows(arguments.csv, rows)


def dense(arguments: argparse.Namespace) -> list[dict[str, object]]:
    from dissensus.bench.run.provenance import provenance

    sides = {name: timer(call) for name, call in calls(arguments.threads).items()}
    theirs = None
    if arguments.neural_tangents:
        one = {"XLA_FLAGS": f"--xla_cpu_multi_thread_eigen=true intra_op_parallelism_threads={arguments.threads}"}
        theirs = subprocess.Popen(
            ["taskset", "-c", f"0-{arguments.threads - 1}", arguments.neural_tangents, "-c", THEIRS.replace("ROWS", str(ROWS))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **one},
        )  # fmt: skip
        assert theirs.stdout is not None
        assert theirs.stdin is not None
        assert theirs.stdout.readline().strip() == "ready"

        def ask() -> float:
            theirs.stdin.write("go\n")
            theirs.stdin.flush()
            return float(theirs.stdout.readline())

        sides["neural-tangents 3"] = ask
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(arguments.repeats):
        for name, side in sides.items():
            seconds[name].append(side())
    if theirs is not None:
        theirs.stdin.close()
        theirs.wait()
    about = provenance(__import__("torch").device("cpu"))
    rows = []
    for name, values in seconds.items():
        few = name.endswith("50 inputs")
        ours = median(seconds["ours, 50 inputs" if few else "ours"])
        held = float("nan")
        if name in ("ours", "naive, 50 inputs"):
            asked = [sys.executable, __file__, "--peak", name, "--threads", str(arguments.threads)]
            held = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
        middle, between = median(values), f"{min(values):.3f}–{max(values):.3f}"
        print(f"{name:>18}: {middle:6.3f} s ({between}), {middle / ours:5.2f} of ours, peak {held:.2f} GiB")
        rows.append(
            {"network": "784-512-512-512-10", "inputs": FEW if few else ROWS, "way": name.split(",")[0],
             "seconds": round(middle, 4), "ratio_to_ours": round(middle / ours, 3), "peak_gib": round(held, 3), **about}
        )  # fmt: skip
    return rows


def calls(threads: int) -> dict[str, Callable[[], object]]:
    import torch
    from torch.func import functional_call, jacrev, vmap

    import dissensus as ds

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    network, x = ds.nets.MLP(784, 10, hidden=(512, 512, 512)), torch.randn(ROWS, 784)
    params = {name: p.detach() for name, p in network.named_parameters()}

    def naive() -> torch.Tensor:
        rows = vmap(jacrev(lambda p, x: functional_call(network, p, (x[None],))[0]), (None, 0))(params, x[:FEW])
        flat = torch.cat([each.flatten(2) for each in rows.values()], 2).flatten(0, 1)  # (N·O, P)
        return flat @ flat.T

    return {
        "ours": lambda: ds.theory.empirical_ntk(network, x, memory=2**30),
        "ours, 50 inputs": lambda: ds.theory.empirical_ntk(network, x[:FEW], memory=2**30),
        "naive, 50 inputs": naive,
    }


def timer(call: Callable[[], object]) -> Callable[[], float]:
    def timed() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return timed


def peak(name: str, threads: int) -> float:
    """GiB by which one call raises the process' largest resident size."""
    call = calls(threads)[name]
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = high_water()
    call()
    return (high_water() - before) / 2**20


def high_water() -> int:
    """KiB."""
    return next(
        int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )


def resnet(folder: str) -> list[dict[str, object]]:
    """ResNet-20's kernel of 100 images: CIFAR-10's where a folder holds them, else noise of their size."""
    import torch

    import dissensus as ds
    from dissensus.bench.run.provenance import provenance

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    x = torch.randn(100, 3, 32, 32)
    if folder:
        from dissensus.bench.rows.sources import SETS

        images = SETS["cifar10"].make(folder)[1].x[:100].float() / 255
        x = (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True)
    network, x = ds.nets.ResNet(20).eval().to(device), x.to(device)
    rows = []
    for method in ("jacobian", "products"):
        for memory in (2**30, 2**33):
            best = float("inf")
            for _ in range(3):
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                    torch.cuda.synchronize()
                held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
                start = time.perf_counter()
                theta = ds.theory.empirical_ntk(network, x, method=method, memory=memory)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                best = min(best, time.perf_counter() - start)
            peak_gib = (torch.cuda.max_memory_allocated() - held) / 2**30 if device.type == "cuda" else float("nan")
            flat = theta.permute(0, 2, 1, 3).reshape(1000, 1000).double()
            smallest = float(torch.linalg.eigvalsh(flat)[0] / flat.diagonal().mean())
            print(
                f"{method:>9}, {memory / 2**30:.0f} GiB allowed: {best:.2f} s, peak {peak_gib:.2f}, λ_min/mean {smallest:.1e}"
            )
            rows.append(
                {"network": "ResNet-20", "inputs": 100, "way": method, "budget_gib": memory / 2**30, "seconds": round(best, 3),
                 "peak_gib": round(peak_gib, 3), **provenance(device)}
            )  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
