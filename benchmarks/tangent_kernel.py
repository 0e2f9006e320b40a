"""Times tangent kernels on a CPU: the empirical one of a 3×512 MLP, and analytic ones of infinitely wide networks.

    python benchmarks/tangent_kernel.py --threads 1 --csv benchmarks/results/tangent_kernel.csv
    python benchmarks/tangent_kernel.py --neural-tangents tangents/bin/python   # as make_kernel_vectors.py installs it
    python benchmarks/tangent_kernel.py --cases conv pool                       # some of the kernels
    python benchmarks/tangent_kernel.py --cases empirical --naive               # beside the whole Jacobian, on 50 inputs
    python benchmarks/tangent_kernel.py --resnet [DATA]                         # ResNet-20 on 100 images, on a GPU

Empirical: 500 inputs, 10 outputs, all blocks, float32. Analytic: NNGP and tangent kernel of one output, float64, which this
library always has; neural-tangents also in float32. Sides take turns, medians; neural-tangents (empirical: implementation 3)
runs jitted and warmed up in a process of its own, which waits while ours runs. On one thread seconds are the processor's, so
that what else the machine does falls on neither. "naive" makes the whole Jacobian and contracts it at once, which for 500
inputs is 19 GB, twice: it is compared on 50 inputs. Peak memory is the process' largest resident size above that before the
first call, each side in a fresh process; neural-tangents has compiled before.
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
from typing import Any

ROWS, FEW = 500, 50
LAW = "W_std=2**0.5, b_std=0.1, parameterization='ntk'"
CONVOLUTIONS = f"[each for _ in range(3) for each in (stax.Conv(64, (3, 3), padding='SAME', {LAW}), stax.Relu())]"
DENSE = f"[each for _ in range(3) for each in (stax.Dense(512, {LAW}), stax.Relu())]"
# case -> (network, inputs, their layers and the shape of the inputs)
CASES = {
    "empirical": ("784-512-512-512-10", ROWS, DENSE.replace(LAW, "") + ", stax.Dense(10)", (784,)),
    "dense": ("784-∞-∞-∞-1", ROWS, f"{DENSE}, stax.Dense(1, {LAW})", (784,)),
    "conv": ("3 convolutions, 16×16, flattened", 100, f"{CONVOLUTIONS}, stax.Flatten(), stax.Dense(1, {LAW})", (16, 16, 3)),
    "pool": ("3 convolutions, 16×16, mean", 8, f"{CONVOLUTIONS}, stax.GlobalAvgPool(), stax.Dense(1, {LAW})", (16, 16, 3)),
}  # fmt: skip
THEIRS = """
import sys, time, json
from pathlib import Path
import jax, neural_tangents as nt
from neural_tangents import stax
jax.config.update("jax_enable_x64", DTYPE == "float64")
init, f, analytic = stax.serial(LAYERS)
_, params = init(jax.random.PRNGKey(0), (1, *SHAPE))
x = jax.random.normal(jax.random.PRNGKey(1), (INPUTS, *SHAPE), dtype=DTYPE)
empirical = nt.empirical_ntk_fn(f, trace_axes=(), vmap_axes=0, implementation=3)
functions = [lambda x, params: tuple(analytic(x, None, ("nngp", "ntk"))), lambda x, params: empirical(x, None, params)]
kernel = jax.jit(functions[CASE == "empirical"]).lower(x, params).compile()
def high_water():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
Path("/proc/self/clear_refs").write_text("5")
before = high_water()
jax.block_until_ready(kernel(x, params))
print(json.dumps([(high_water() - before) / 2**20, f"neural-tangents {nt.__version__}, jax {jax.__version__}"]), flush=True)
for line in sys.stdin:
    start = time.CLOCK()
    jax.block_until_ready(kernel(x, params))
    print(time.CLOCK() - start, flush=True)
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
    parser.add_argument("--naive", action="store_true", help="also the whole Jacobian, of 50 inputs; a minute a call")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        print(json.dumps(peak(arguments.cases[0], arguments.peak, arguments.threads)))
        return
    if arguments.resnet is not None:
        rows = resnet(arguments.resnet)
    else:
        rows = [row for case in arguments.cases for row in timed(case, arguments)]
    if arguments.csv:
        from rows import write_rows

        write_rows(arguments.csv, rows)


def timed(case: str, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """The rows of one kernel, sides in turns."""
    import torch

    from dissensus.bench.run.run_folder import provenance

    network, inputs, layers, shape = CASES[case]
    clock = "process_time" if arguments.threads == 1 else "perf_counter"
    wanted = [name for name in calls(case, arguments.threads) if arguments.naive or not name.endswith("50 inputs")]
    sides = {name: timer(call, clock) for name, call in calls(case, arguments.threads).items() if name in wanted}
    peaks = dict.fromkeys(sides, (float("nan"), ""))
    for name in (each for each in wanted if each in ("ours", "naive, 50 inputs")):
        asked = [sys.executable, __file__, "--peak", name, "--cases", case, "--threads", str(arguments.threads)]
        peaks[name] = (json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout), "")
    theirs = []
    if arguments.neural_tangents:
        for dtype in ("float32",) if case == "empirical" else ("float64", "float32"):
            name = "neural-tangents 3" if case == "empirical" else f"neural-tangents, {dtype}"
            known = {
                "CASE": repr(case),
                "DTYPE": repr(dtype),
                "LAYERS": f"*{layers}",
                "SHAPE": repr(shape),
                "CLOCK": clock,
            }
            program = THEIRS.replace("INPUTS", str(inputs))
            for word, value in known.items():
                program = program.replace(word, value)
            asked_of = Theirs(arguments.neural_tangents, program, arguments.threads)
            theirs.append(asked_of)
            sides[name], peaks[name] = asked_of.seconds, asked_of.about
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(arguments.repeats):
        for name, side in sides.items():
            seconds[name].append(side())
    for each in theirs:
        each.end()
    rows = []
    for name, values in seconds.items():
        few, (held, versions) = name.endswith("50 inputs"), peaks[name]
        ours = median(seconds["ours, 50 inputs" if few else "ours"])
        middle, between = median(values), f"{min(values):.3f}–{max(values):.3f}"
        print(f"{network}: {name:>24}: {middle:6.3f} s ({between}), {middle / ours:5.2f} of ours, peak {held:.2f} GiB")
        rows.append(
            {"network": network, "inputs": FEW if few else inputs, "way": name.removesuffix(", 50 inputs"),
             "seconds": round(middle, 4), "ratio_to_ours": round(middle / ours, 3), "peak_gib": round(held, 3),
             "versions": versions, **provenance(torch.device("cpu"))}
        )  # fmt: skip
    return rows


class Theirs:
    """neural-tangents in a process of its own. `about`: (GiB of the first call, versions)."""

    def __init__(self, python: Path, program: str, threads: int) -> None:
        flags = f"--xla_cpu_multi_thread_eigen={str(threads > 1).lower()} intra_op_parallelism_threads={threads}"
        self.process: Any = subprocess.Popen(
            ["taskset", "-c", f"0-{threads - 1}", python, "-c", program],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        self.about: tuple[float, str] = tuple(json.loads(self.process.stdout.readline()))

    def seconds(self) -> float:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def calls(case: str, threads: int) -> dict[str, Callable[[], object]]:
    import torch
    from torch import nn
    from torch.func import functional_call, jacrev, vmap

    import dissensus as ds

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if case != "empirical":
        _, inputs, _, shape = CASES[case]
        x = torch.randn(inputs, *shape, dtype=torch.float64).movedim(-1, 1)
        wide: nn.Module = ds.nets.MLP(784, 1, hidden=(512, 512, 512))
        if case != "dense":
            end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 1)]
            end = end if case == "pool" else [nn.Flatten(), nn.Linear(64 * 16 * 16, 1)]
            layers = [each for n in (3, 64, 64) for each in (nn.Conv2d(n, 64, 3, padding=1), nn.ReLU())]
            wide = nn.Sequential(*layers, *end)
        return {"ours": lambda: ds.theory.kernel(wide, x, weight_variance=2.0, bias_variance=0.01)}
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


def timer(call: Callable[[], object], clock: str) -> Callable[[], float]:
    now = getattr(time, clock)

    def timed() -> float:
        start = now()
        call()
        return float(now() - start)

    return timed


def peak(case: str, name: str, threads: int) -> float:
    """GiB by which one call raises the process' largest resident size."""
    call = calls(case, threads)[name]
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
    from dissensus.bench.run.run_folder import provenance

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    x = torch.randn(100, 3, 32, 32)
    if folder:
        from dissensus.bench.rows.named_sets import SETS

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
