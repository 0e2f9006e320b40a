"""What taking turns costs: a prediction with and without its thread's turn, and eight threads against one.

    python benchmarks/threads.py --csv FILE

With and without alternate in one process; medians. Throughput is of `posterior.predict` on one batch of 32.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from unittest import mock

import torch
from rows import write_rows

import dissensus as ds
from dissensus.bench.run.run_folder import provenance
from dissensus.core import member_runner

NETWORKS = {
    "MLP 64-100-100-10": (lambda: ds.nets.MLP(64, 10, hidden=(100, 100)), (64,)),
    "small conv net": (lambda: ds.nets.ConvNet(1, 10), (1, 28, 28)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1, help="that torch computes with")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = [measured(name, arguments.repeats) | provenance(torch.device("cpu")) for name in NETWORKS]
    for row in rows:
        print({key: row[key] for key in ("network", "alone_ms", "in_turn_ms", "ratio", "one_thread", "eight_threads")})
    if arguments.csv:
        write_rows(arguments.csv, rows)


def measured(name: str, repeats: int) -> dict[str, object]:
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    posterior, x = ds.DeepEnsemble([make() for _ in range(5)]), torch.randn(32, *shape)
    times: dict[bool, list[float]] = {False: [], True: []}
    for i in range(2 * repeats + 10):
        in_turn = i % 2 == 0
        without = mock.patch.object(member_runner, "_lock_of", new=nobodys_turn)
        with nullcontext() if in_turn else without:
            start = time.perf_counter()
            posterior.predict(x)
            times[in_turn].append(time.perf_counter() - start)
    alone, in_turn_ms = (1e3 * median(times[kind][5:]) for kind in (False, True))
    return {
        "network": name,
        "members": 5,
        "batch": 32,
        "alone_ms": round(alone, 4),
        "in_turn_ms": round(in_turn_ms, 4),
        "ratio": round(in_turn_ms / alone, 4),
        "one_thread": round(per_second(posterior, x, 1, repeats), 1),
        "eight_threads": round(per_second(posterior, x, 8, repeats), 1),
    }


def nobodys_turn(network: torch.nn.Module) -> AbstractContextManager[None]:
    return nullcontext()


def per_second(posterior: ds.Posterior, x: torch.Tensor, threads: int, calls: int) -> float:
    """Predictions a second, all threads together."""
    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        list(pool.map(lambda _: posterior.predict(x), range(calls)))
        return calls / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
