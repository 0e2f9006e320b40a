"""FoRDE's gradients with second derivatives written out (`core/twice.py`) and with torch's own, beside a deep ensemble's.

    python benchmarks/second_derivatives.py --case enet --members 5 --batch 8
    python benchmarks/second_derivatives.py --case resnet18 --members 10 --batch 128 --csv FILE

Milliseconds for the gradients of one batch, the median of replays of a CUDA graph where there is a GPU, each with the peak of
memory. Rows of the file with the same case are replaced. `--kernels`: which kernels take the time of one member.
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from rows import Row, read_rows, write_rows
from torch import Tensor, nn

import dissensus as ds
from dissensus.bench.run.provenance import commit, device_name
from dissensus.core import seam
from dissensus.core.batch import Batch
from dissensus.core.twice import differentiated_twice
from dissensus.engine.eager import autocast
from dissensus.engine.plan import timed
from dissensus.engine.strategies import strategy

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "enet": (lambda: ds.nets.ENet(11), (3, 180, 240)),
    "resnet18": (lambda: ds.nets.ResNet(18), (3, 32, 32)),
    "resnet20": (lambda: ds.nets.ResNet(20), (3, 32, 32)),
}
FORMS = {"written": differentiated_twice, "torch's own": nullcontext}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="resnet18")
    parser.add_argument("--members", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--csv", type=Path, help="file to write to")
    given = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    make, shape = CASES[given.case]
    networks = [make() for _ in range(given.members)]
    batch = Batch(torch.randn(given.batch, *shape), labels(given.batch, shape)).to(device)
    if on_gpu:
        batch = batch._replace(x=batch.x.contiguous(memory_format=torch.channels_last))
    layout = torch.channels_last if on_gpu else torch.contiguous_format
    ensemble, forde = (
        method([network.to(memory_format=layout) for network in networks]).to(device).train()
        for method in (ds.DeepEnsemble, ds.FoRDE)
    )
    kind, precision = ("streamed", torch.bfloat16) if on_gpu else ("loop", None)
    base = None
    about = {"case": given.case, "members": given.members, "batch": given.batch}
    facts = {"commit": commit(), "torch": torch.__version__, "device": device_name(device)}
    rows: list[Row] = []
    for name, posterior in {"deep ensemble": ensemble, **dict.fromkeys(FORMS, forde)}.items():
        if name in FORMS:
            forde._forms = FORMS[name]
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        run = strategy(kind)  # type: ignore[arg-type]
        with autocast(device, precision):
            seconds = timed(run, posterior, batch, captured=on_gpu)
        if seconds is None:
            print(f"{name:14s} failed")
            continue
        base = base or seconds
        peak = f"{torch.cuda.max_memory_allocated() / 2**30:6.1f} GiB" if on_gpu else ""
        print(f"{name:14s} {1e3 * seconds:8.1f} ms  {seconds / base:5.2f}  {peak}")
        memory = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else ""
        rows.append(
            about | {"form": name, "ms": 1e3 * seconds, "ratio": seconds / base, "peak_gib": memory, "seed": 0} | facts
        )
        if given.kernels:
            with autocast(device, precision), torch.profiler.profile() as profile:
                seam.find(posterior, batch, strategy("loop"))
            key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
            print(profile.key_averages().table(sort_by=key, row_limit=15, max_name_column_width=60))
    if given.csv is not None:
        key = [str(value) for value in about.values()]
        others = [row for row in read_rows(given.csv) if [row[name] for name in about] != key]
        write_rows(given.csv, [*others, *rows])


def labels(count: int, shape: tuple[int, ...]) -> Tensor:
    """(B,) classes, or (B, H, W) for large images, which are segmented."""
    return torch.randint(10, (count, *shape[1:]) if shape[1] > 32 else (count,))


if __name__ == "__main__":
    main()
