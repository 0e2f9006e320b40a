"""What training steps and predictions cost on a GPU, as ratios in one process; CSV out.

    python benchmarks/gpu.py --csv benchmarks/results/gpu_h200.csv

steps: ten ResNet-18 (or `--members`) on batches of 128 in bf16: a loop over the networks as plain torch runs them, a deep
ensemble, FoRDE and LIT, in runs too short to compile; compiled: in runs long enough. Rounds of a few steps alternate;
medians, with the spread
(largest over smallest). `reserved`: GiB that torch took from the device for the method, weights included.
watching: one network; TRADI and SWAG beside the same step unwatched.
prediction: ten ResNet-18 over batches of 128; loops as plain torch runs them; the largest error of a probability against
float32 in the same column as the time.
kernels: where the device's time goes, by torch's profiler: milliseconds of kernels in a step of one network, of ten, and in
the prediction of a batch by ten; kernels of several streams run at the same time, each then more slowly.
gradients: the deviation of gradients from those of torch's own layers, ‖a − b‖ / ‖b‖.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rows import Row, read_rows, write_rows
from torch import Tensor, nn
from turns import in_turns

import dissensus as ds
from dissensus.bench.run.run_folder import commit, device_name
from dissensus.core.batch import Batch
from dissensus.core.gradients import Gradients, Strategy, compute_gradients
from dissensus.data import Batches
from dissensus.engine import build_step
from dissensus.engine.fast_optimisers import use_channels_last
from dissensus.engine.strategies import LoopStrategy, make_strategy
from dissensus.engine.training_step import autocast

DEVICE = torch.device("cuda")
SHORT, LONG = 3000, 100_000  # steps of a run: too few to compile, and enough
Stepper = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", default=",".join(SECTIONS))
    parser.add_argument("--members", type=int, default=10)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--images", default="10000,50000", help="predicted; of more than 20000 not in all ways")
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("expected a CUDA device, got none; run this on a machine with a GPU")
    facts = {"commit": commit(), "torch": torch.__version__, "device": device_name(DEVICE)}
    rows: list[Row] = []
    for what in given.what.split(","):
        torch.manual_seed(0)
        for row in SECTIONS[what](given):
            rows.append({"what": what, "members": given.members, "batch": given.batch, **row, **facts})
            print("  ".join(f"{key} {value}" for key, value in row.items() if value != ""), flush=True)
        torch.cuda.empty_cache()
        if given.csv is not None:
            write_rows(given.csv, [*others(given), *(dict.fromkeys(COLUMNS, "") | row for row in rows)])


def others(given: argparse.Namespace) -> list[Row]:
    """Rows of the file that are not measured now."""
    known = read_rows(given.csv) if given.csv.exists() else []
    return [row for row in known if row["what"] not in given.what.split(",")]


COLUMNS = (
    "what", "members", "batch", "name", "run", "ran", "ms", "ratio", "spread", "set_up_s", "reserved_gib", "error",
)  # fmt: skip


def steps(given: argparse.Namespace) -> Iterator[Row]:
    """Whole training steps of runs too short to compile, with ratios to the deep ensemble."""
    networks, batch = [ds.nets.ResNet(18) for _ in range(given.members)], images(given.batch)
    runs: dict[str, Stepper] = {"loop over networks": loop(networks, batch)}
    made: dict[str, Row] = {"loop over networks": {"ran": "eager"}}
    for name, method in METHODS.items():
        runs[name], made[name] = stepper(method(copy.deepcopy(networks)), batch, SHORT)
    yield from compared(runs, made, "deep ensemble", given.rounds, 10, "short")


def compiled(given: argparse.Namespace) -> Iterator[Row]:
    """The same of long runs, for which `auto` compiles if it pays, beside the short deep ensemble."""
    networks, batch = [ds.nets.ResNet(18) for _ in range(given.members)], images(given.batch)
    runs, made = {}, {}
    for name, length in (("deep ensemble, short", SHORT), ("deep ensemble", LONG), ("FoRDE", LONG)):
        method = METHODS[name.partition(",")[0]]
        runs[name], made[name] = stepper(method(copy.deepcopy(networks)), batch, length)
    yield from compared(runs, made, "deep ensemble, short", given.rounds, 10, "long")


def watching(given: argparse.Namespace) -> Iterator[Row]:
    """Steps of one network, plain and watched."""
    network, batch = ds.nets.ResNet(18), images(given.batch)
    runs, made = {}, {}
    for method in (ds.MAP, ds.TRADI, ds.SWAG):
        runs[method.__name__], made[method.__name__] = stepper(method(copy.deepcopy(network)), batch, SHORT)
    yield from compared(runs, made, "MAP", 3 * given.rounds, 20, "short")


def prediction(given: argparse.Namespace) -> Iterator[Row]:
    """Predictions of data sets, each call with all that it sets up; ratios to the float32 loop, larger is faster."""
    networks = [ds.nets.ResNet(18).to(DEVICE).eval() for _ in range(given.members)]
    posterior = ds.DeepEnsemble(networks).to(DEVICE)
    x, y, _ = images(max(map(int, given.images.split(","))))
    x = x.contiguous()  # as data sets come
    ds.fit(posterior, Batches(x[:1280], y[:1280], batch_size=128), epochs=3, progress=False)
    for i, network in enumerate(networks):
        network.load_state_dict(posterior.member(i).state_dict())

    def by_loop(loader: Batches, precision: torch.dtype | None) -> Tensor:
        with torch.no_grad(), autocast(DEVICE, precision):
            means = [torch.stack([n(part).float().softmax(1) for n in networks]).mean(0) for part, _ in loader]
        return torch.cat(means)

    for count in map(int, given.images.split(",")):
        loader = Batches(x[:count], y[:count], batch_size=given.batch)
        runs: dict[str, Callable[[], Tensor]] = {
            "loop over networks, float32": partial(by_loop, loader, None),
            "loop over networks, bf16": partial(by_loop, loader, torch.bfloat16),
            "predict, float32": lambda loader=loader: ds.predict(posterior, loader).mean,
            "predict, bf16": lambda loader=loader: ds.predict(posterior, loader, precision="bf16").mean,
            "summarise, bf16": lambda loader=loader: ds.summarise(posterior, loader, precision="bf16").mean,
        }
        if count > 20_000:
            runs = {name: runs[name] for name in ("loop over networks, float32", "predict, bf16")}
        reference = runs["loop over networks, float32"]()
        errors = {name: f"{float((run() - reference).abs().max()):.1e}" for name, run in runs.items()}
        times = seconds(runs, given.rounds if count <= 20_000 else 1, 1)
        base = statistics.median(times["loop over networks, float32"])
        for name, found in times.items():
            row = timing(found, base)
            row["ratio"] = round(base / statistics.median(found), 2)
            yield {"name": name, "run": f"{count} images", **row, "error": errors[name]}


def kernels(given: argparse.Namespace) -> Iterator[Row]:
    """Milliseconds of kernels by what they do, and of the time in which any runs."""
    batch = images(given.batch)
    networks = [ds.nets.ResNet(18) for _ in range(given.members)]
    one, _ = stepper(ds.MAP(ds.nets.ResNet(18)), batch, SHORT)
    yield from profiled("a step of one network", one, 5)
    posterior = ds.DeepEnsemble(networks).to(DEVICE)
    all_of_them, _ = stepper(posterior, batch, SHORT)
    yield from profiled(f"a step of {given.members}", all_of_them, 5)
    x, y, _ = images(40 * given.batch)
    loader = Batches(x.contiguous(), y, batch_size=given.batch)
    yield from profiled(
        f"a batch predicted by {given.members}, bf16", lambda: ds.predict(posterior, loader, precision="bf16"), 1, of=40
    )


GROUPS = {  # the first word that occurs in a kernel's name
    "convolutions": ("xmma", "convol", "cask_plugin", "nhwcAddPadding", "narrow"),
    "batch norm, addition, ReLU": (
        "moments",
        "combine_moments",
        "normalise_rows",
        "gradient_parts",
        "gradients",
        "sum_parts",
        "batch_norm",
    ),
    "optimiser, copies, casts of all weights": ("multi_tensor",),
    "others": ("",),
}


def profiled(run: str, call: Stepper, count: int, of: int = 1) -> Iterator[Row]:
    """A row for each group of kernels of `count` calls, each of `of` batches, and one for the time of all."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(count):
            call()
        torch.cuda.synchronize()
    events = [each for each in found.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    sums: dict[str, float] = dict.fromkeys(GROUPS, 0.0)
    busy, end = 0.0, 0.0
    for event in sorted(events, key=lambda each: each.time_range.start):
        first, last = event.time_range.start, event.time_range.end  # microseconds
        sums[next(name for name, words in GROUPS.items() if any(word in event.name for word in words))] += last - first
        busy, end = busy + max(0.0, last - max(first, end)), max(end, last)
    for name, total in {**sums, "any": busy}.items():
        yield {"name": name, "run": run, "ms": round(total / 1e3 / count / of, 3)}


def gradients(given: argparse.Namespace) -> Iterator[Row]:
    """How far gradients of this library's layers are from those of torch's, in the same precision."""
    networks = [ds.nets.ResNet(18) for _ in range(3)]
    for name, method in {"deep ensemble": ds.DeepEnsemble, "FoRDE": ds.FoRDE}.items():
        for dtype, precision in ((torch.float64, None), (torch.float32, None), (torch.float32, torch.bfloat16)):
            posterior = method(copy.deepcopy(networks)).to(DEVICE, dtype).train()  # type: ignore[attr-defined]
            use_channels_last(posterior.particles)
            batch = images(32, dtype)
            # Without TF32, whose own rounding is 1e-3.
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                ours = found(posterior, batch, make_strategy("streamed"), precision)
                posterior._forms = nullcontext
                theirs = found(posterior, batch, LoopStrategy(streamed=True, compiled=False).run, precision)
                exact = found(posterior, batch, LoopStrategy(streamed=True, compiled=False).run, None)
            kind = "bf16" if precision else str(dtype).removeprefix("torch.")
            yield {"name": name, "run": kind, "ran": "from torch's layers", "error": deviation(ours, theirs)}
            if precision:
                yield {
                    "name": name,
                    "run": "bf16",
                    "ran": "torch's layers from float32",
                    "error": deviation(theirs, exact),
                }
                yield {"name": name, "run": "bf16", "ran": "from float32", "error": deviation(ours, exact)}


METHODS: dict[str, Callable[..., ds.Posterior]] = {
    "deep ensemble": ds.DeepEnsemble,
    "FoRDE": ds.FoRDE,
    "LIT": lambda networks: ds.LIT(networks, strength=0.1),
}
SECTIONS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "steps": steps, "compiled": compiled, "watching": watching, "prediction": prediction, "kernels": kernels,
    "gradients": gradients,
}  # fmt: skip


def images(count: int, dtype: torch.dtype = torch.float32) -> Batch:
    x = torch.randn(count, 3, 32, 32, device=DEVICE, dtype=dtype).contiguous(memory_format=torch.channels_last)
    return Batch(x, torch.randint(10, (count,), device=DEVICE))


def loop(networks: list[nn.Module], batch: Batch) -> Stepper:
    """A step of every network, as plain torch runs it."""
    networks = [copy.deepcopy(network).to(DEVICE, memory_format=torch.channels_last) for network in networks]
    optimizers = [torch.optim.SGD(n.parameters(), lr=1e-4, momentum=0.9, nesterov=True) for n in networks]

    def step() -> None:
        for network, optimizer in zip(networks, optimizers, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = F.cross_entropy(network(batch.x), batch.y)
            loss.backward()
            optimizer.step()

    return step


def stepper(posterior: ds.Posterior, batch: Batch, length: int) -> tuple[Stepper, Row]:
    """(a training step as `fit` makes it, how it runs, its memory and the seconds before it was ready)."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, start = torch.cuda.memory_reserved(), time.perf_counter()
    posterior.to(DEVICE).train()
    posterior.begin(steps_per_epoch=length // 10, epochs=10)
    optimizer = torch.optim.SGD(posterior.parameters(), lr=1e-4, momentum=0.9, nesterov=True)
    step = build_step("auto", posterior, optimizer, batch, count=length, precision=torch.bfloat16)

    def run() -> None:
        posterior.before_step(batch)
        step(batch)

    for _ in range(8):  # plain steps, the capture, the first replays
        run()
    while step.ways:  # until nothing is left to prepare
        run()
    torch.cuda.synchronize()
    ready = time.perf_counter() - start
    torch.cuda.empty_cache()
    taken = (torch.cuda.memory_reserved() - before) / 2**30
    return run, {"ran": str(step.plan), "set_up_s": round(ready, 1), "reserved_gib": round(taken, 2)}


def seconds(runs: dict[str, Stepper], rounds: int, count: int) -> dict[str, list[float]]:
    """Of each run, `count` of them at a time, in turns; the first round is not counted."""

    def several(run: Stepper) -> Stepper:
        return lambda: [run() for _ in range(count)]

    times = in_turns({name: several(run) for name, run in runs.items()}, rounds, uncounted=1)
    return {name: [each / count for each in found] for name, found in times.items()}


def compared(
    runs: dict[str, Stepper], made: dict[str, Row], base: str, rounds: int, count: int, run: str
) -> Iterator[Row]:
    times = seconds(runs, rounds, count)
    for name, found in times.items():
        yield {"name": name, "run": run, **made[name], **timing(found, statistics.median(times[base]))}


def timing(seconds: list[float], base: float) -> Row:
    middle = statistics.median(seconds)
    spread = round(max(seconds) / min(seconds), 2)
    return {"ms": round(1e3 * middle, 3), "ratio": round(middle / base, 3), "spread": spread}


def found(posterior: ds.Posterior, batch: Batch, run: Strategy, precision: torch.dtype | None) -> Gradients:
    with autocast(DEVICE, precision):
        return compute_gradients(posterior, batch, run)


def deviation(ours: Gradients, theirs: Gradients) -> str:
    pairs = [(ours.gradients[name].double(), theirs.gradients[name].double()) for name in theirs.gradients]
    apart = sum(float((a - b).square().sum()) for a, b in pairs)
    return f"{(apart / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5:.1e}"


if __name__ == "__main__":
    main()
