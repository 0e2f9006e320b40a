"""This library against the plain Python loop over members, interleaved in one process; CSV out.

    python benchmarks/speed.py --cases mlp,resnet18 --csv benchmarks/results/speed.csv

Training: epochs of `ds.fit` (the whole step: forward, backward, optimiser, data) alternate with as many steps of a loop
over the same members, each with its own optimiser, eager, in the same precision. Prediction likewise, in float32 and in bf16;
`--no-train` measures prediction alone.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from rows import FACTS, Row, made_on, read_rows, write_rows
from torch import Tensor, nn

import dissensus as ds
from dissensus.data import Batches

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def mlp() -> nn.Module:
    return ds.nets.MLP(784, 10, hidden=(200, 200, 200))


def resnet18() -> nn.Module:
    return ds.nets.ResNet(18)


def conv() -> nn.Module:
    return ds.nets.ConvNet(1, 10)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    # network, shape of one input, members, batch
    "mlp": (mlp, (784,), 20, 128),
    "mlp16": (mlp, (784,), 20, 16),
    "conv": (conv, (1, 28, 28), 5, 128),
    "resnet18": (resnet18, (3, 32, 32), 10, 128),
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--cases", default="mlp,resnet18" if CUDA else "mlp16,mlp,conv")
    arguments.add_argument(
        "--engines", default="auto", help='comma-separated values of fit(engine=), e.g. "auto,vectorised"'
    )
    arguments.add_argument("--members", default="", help="comma-separated M to scale over, instead of the case's own")
    arguments.add_argument("--batches", default="", help="comma-separated batch sizes to scale over")
    arguments.add_argument("--steps", type=int, default=0, help="steps per epoch; 0 chooses")
    arguments.add_argument("--epochs", type=int, default=6)
    arguments.add_argument(
        "--planned", type=int, default=0, help="epochs that fit is told of; it is stopped after --epochs of them"
    )
    arguments.add_argument("--precision", default="auto")
    arguments.add_argument("--no-predict", action="store_true")
    arguments.add_argument("--predicted", type=int, default=0, help="batches to predict; 0 is one epoch's")
    arguments.add_argument("--no-train", action="store_true", help="predict with networks that are not trained")
    arguments.add_argument("--csv", type=Path)
    options = arguments.parse_args()
    rows = []
    for case in options.cases.split(","):
        make, shape, members, batch = CASES[case]
        for m in [int(v) for v in options.members.split(",") if v] or [members]:
            for b in [int(v) for v in options.batches.split(",") if v] or [batch]:
                for engine in options.engines.split(","):
                    for row in measure(case, make, shape, m, b, engine, options):
                        rows.append(row)
                        print("  ".join(f"{k}={v}" for k, v in row.items() if k not in FACTS), flush=True)
    if options.csv:
        write_rows(options.csv, replaced([*read_rows(options.csv), *rows]))


def replaced(rows: list[Row]) -> list[Row]:
    """The rows, of several with the same case only the last, in the place of the first."""
    return list({tuple(str(row[key]) for key in CASE): row for row in rows}.values())


CASE = ("case", "members", "batch", "engine", "what")


def measure(
    case: str,
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    members: int,
    batch: int,
    engine: str,
    options: argparse.Namespace,
) -> Iterator[dict[str, object]]:
    """Rows of one case."""
    torch.manual_seed(0)
    steps = options.steps or (50 if CUDA else 10)
    x = torch.randn(steps * batch, *shape, device=DEVICE)
    y = torch.randint(10, (steps * batch,), device=DEVICE)
    networks = [make().to(DEVICE) for _ in range(members)]
    posterior = ds.DeepEnsemble(networks).to(DEVICE)
    loader = Batches(x, y, batch_size=batch, shuffle=True)
    precision = torch.bfloat16 if options.precision == "bf16" or (options.precision == "auto" and CUDA) else None
    if CUDA:
        for network in networks:
            network.to(memory_format=torch.channels_last)
    common: dict[str, object] = {"case": case, "members": members, "batch": batch, "engine": engine}
    ran = ""
    if not options.no_train:
        for row in trained(common, networks, posterior, loader, steps, precision, options):
            ran = str(row["ran"])
            yield row
    if not options.no_predict:
        rows = torch.arange((options.predicted or steps) * batch, device=DEVICE) % len(x)
        ordered = Batches(x[rows], y[rows], batch_size=batch)
        yield from predicted({**common, "ran": ran or "not trained"}, networks, posterior, ordered)


def trained(
    common: dict[str, object],
    networks: list[nn.Module],
    posterior: ds.Posterior,
    loader: Batches,
    steps: int,
    precision: torch.dtype | None,
    options: argparse.Namespace,
) -> Iterator[dict[str, object]]:
    """Rows of a training step and an epoch."""
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.01, momentum=0.9, nesterov=True) for n in networks]
    loop_steps = max(2, min(steps, 10))
    loop_times: list[float] = []

    def loop_chunk(epoch: ds.Epoch | None = None) -> bool:
        """Some steps of the loop; True once fit has done enough epochs."""
        start = clock()
        for batch_x, batch_y in list(loader)[:loop_steps]:
            for network, optimizer in zip(networks, optimizers, strict=True):
                optimizer.zero_grad()
                with torch.autocast(DEVICE.type, dtype=precision, enabled=precision is not None):
                    loss = F.cross_entropy(network(batch_x), batch_y)
                loss.backward()
                optimizer.step()
        loop_times.append((clock() - start) / loop_steps)
        return epoch is not None and epoch.epoch >= options.epochs

    loop_chunk()
    loop_times.clear()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    history = ds.fit(
        posterior,
        loader,
        epochs=max(options.epochs, options.planned),
        optimizer=optimizer,
        engine=str(common["engine"]),
        precision=options.precision,
        callback=loop_chunk,
        progress=False,
    )
    epochs = [epoch.seconds / steps for epoch in history.epochs]
    ours, loop = median(epochs[1:]), median(loop_times[1:])
    setting_up = epochs[0] * steps - ours * steps
    peak = torch.cuda.max_memory_allocated() / 2**30 if CUDA else float("nan")
    common = {**common, "ran": history.engine}
    yield {
        **common,
        "what": f"training step of a run of {steps * options.planned}" if options.planned else "training step",
        "ms": round(1e3 * ours, 3),
        "loop_ms": round(1e3 * loop, 3),
        "ratio": round(loop / ours, 2),
        "spread": spread(epochs[1:]),
        "set_up_s": round(setting_up, 1),
        "peak_gib": round(peak, 2),
        "expected_gib": round(history.memory.bytes_at_once / 2**30, 2) if history.memory else "",
        **made_on(DEVICE),
    }
    yield {
        **common,
        "what": f"epoch of {steps} steps",
        "ms": round(1e3 * ours * steps, 1),
        "loop_ms": round(1e3 * loop * steps, 1),
        "ratio": round(loop / ours, 2),
        **dict.fromkeys(("spread", "set_up_s", "peak_gib", "expected_gib"), ""),
        **made_on(DEVICE),
    }


def predicted(
    common: dict[str, object], networks: list[nn.Module], posterior: ds.Posterior, ordered: Batches
) -> Iterator[dict[str, object]]:
    """Rows of predictions in float32 and in bf16."""
    for network in networks:
        network.eval()

    def ours_predicts(kind: str) -> Tensor:
        return ds.predict(posterior, ordered, precision=kind).mean

    def loop_predicts(kind: str) -> Tensor:
        half, means = kind == "bf16", []
        with torch.no_grad(), torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=half):
            for inputs, _ in ordered:
                each = [network(inputs).float().softmax(1) for network in networks]
                means.append(torch.stack(each).mean(0))
        return torch.cat(means)

    ways = [(who, kind) for who in (ours_predicts, loop_predicts) for kind in ("float32", "bf16")]
    times: dict[tuple[Callable[[str], Tensor], str], list[float]] = {way: [] for way in ways}
    for _ in range(6):
        for who, kind in ways:
            start = clock()
            who(kind)
            times[who, kind].append(clock() - start)
    found = {way: median(each[1:]) for way, each in times.items()}
    compared = {  # what, how it is predicted here and in the loop
        f"prediction of {len(ordered.y)}": ("float32", "float32"),
        f"prediction of {len(ordered.y)} in bf16, loop in float32": ("bf16", "float32"),
        f"prediction of {len(ordered.y)} in bf16, loop in bf16": ("bf16", "bf16"),
    }
    for what, (here, there) in compared.items():
        ours, loop = found[ours_predicts, here], found[loop_predicts, there]
        yield {
            **common,
            "what": what,
            "ms": round(1e3 * ours, 3),
            "loop_ms": round(1e3 * loop, 3),
            "ratio": round(loop / ours, 2),
            "spread": spread(times[ours_predicts, here][1:]),
            "set_up_s": "",
            "peak_gib": "",
            "expected_gib": "",
            **made_on(DEVICE),
        }


def clock() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def spread(values: list[float]) -> float:
    """Largest over smallest."""
    return round(max(values) / min(values), 2)


if __name__ == "__main__":
    main()
