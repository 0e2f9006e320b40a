"""A pretrained network made Bayesian: runs the task `pretrained` for ResNets of several depths, many runs at a time.

    python benchmarks/pretrained.py --data FOLDER --out runs/pretrained --depths 20 56 --workers 10 --pack runs.tar.gz

FOLDER holds CIFAR-10, CIFAR-100 and SVHN as `ds.data` reads them, and resnet_cifar10/resnet20.safetensors and its like.
Settings are those of pretrained_chosen.json. With --explore they are chosen anew: several are tried, on the first depth, for
NodeBNN (8 components), for its untrained noise, for the plain fine-tune and for MC dropout, and those with the best
likelihood at the best temperature on the 2,000 held-out test images are taken. Nothing is chosen on the 8,000 images that
everything is measured on. Started again, it goes on where it was; after --minutes it stops. The packed file has the settings,
metrics and numbers by example of each run that is finished; benchmarks/pretrained_page.py makes CSV files of it.

With nine workers on one H200, five epochs of NodeBNN took a ResNet-20 65 to 90 s, ten took 150 s.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import multiprocessing
import os
import tarfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save

from dissensus.bench.run.jobs import run_all
from dissensus.bench.task.config import load_task
from dissensus.storage.atomic import temporary_name

CRITERION = "calibration/nll_scaled"
# What is tried, by method: settings of the method, and of its training behind "training.".
TRIED: dict[str, dict[str, dict[str, Any]]] = {
    "node_bnn": {
        "as-it-comes": {},
        "rate2": {"training.lr": 3e-3},
        "rate3": {"training.lr": 1e-2},
        "hot10": {"training.lr": 3e-3, "gamma": 10.0},
        "hot40": {"training.lr": 3e-3, "gamma": 40.0},
        "wide15": {"training.lr": 3e-3, "gamma": 10.0, "init_std": 0.15},
        "wide20": {"training.lr": 3e-3, "gamma": 10.0, "init_std": 0.2},
        "spread": {"training.lr": 3e-3, "gamma": 10.0, "init_spread": 0.15},
        "quick": {"training.lr": 3e-3, "gamma": 10.0, "latent_lr": 0.05},
        "statistics": {"training.lr": 1e-2, "gamma": 10.0, "batch_norm": "trained"},
        "long": {"training.lr": 3e-3, "gamma": 10.0, "training.epochs": 10},
        "long-wide": {"training.lr": 1e-2, "gamma": 10.0, "training.epochs": 10, "init_std": 0.15},
    },
    "node_bnn-untrained": {
        "std05": {"init_std": 0.05},
        "std10": {"init_std": 0.1},
        "std15": {"init_std": 0.15},
    },
    "map-tuned": {
        "as-it-comes": {},
        "rate2": {"training.lr": 1e-2},
        "rate3": {"training.lr": 3e-2},
    },
    "mc_dropout": {
        "as-it-comes": {},
        "rate2": {"training.lr": 1e-2},
        "more": {"training.lr": 1e-2, "rate": 0.1},
    },
}
FIRST = ("map", "map-scaled", "laplace")  # they take seconds, and no setting of theirs is chosen
NODES = [f"node_bnn-{mode}{k}" for mode in ("out", "in") for k in (16, 4, 8, 32)]
ORDER = (*FIRST, NODES[0], "map-tuned", "map-tuned4", *NODES[1:], "node_bnn-untrained", "mc_dropout")
CHOSEN = Path(__file__).parent / "pretrained_chosen.json"
Chosen = dict[str, dict[str, Any]]  # method -> settings, as in TRIED
KEPT = ("test/nll", "test/correct", "test/confidence", "calibrated/nll", "calibrated/correct", "calibrated/confidence")
PACKED = ("config.toml", "training.json", "log.jsonl", "metrics.json")


class Job(NamedTuple):
    """One run."""

    out: Path
    method: str
    seed: int
    size: str
    overrides: tuple[str, ...]
    data: str | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=None, help="folder of the sets; DISSENSUS_DATA by default")
    parser.add_argument("--out", type=Path, default=Path("runs/pretrained"))
    parser.add_argument("--depths", type=int, nargs="+", default=[20, 56])
    parser.add_argument("--methods", nargs="+", default=None, help="the task's by default, in this order")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--size", default="paper")
    parser.add_argument("--set", action="append", default=[], help="as of `dissensus bench`")
    parser.add_argument("--explore", action="store_true", help="choose settings on the held-out images first")
    parser.add_argument("--chosen", type=Path, default=CHOSEN, help="settings, read, or written after --explore")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="then it stops, and packs what is finished")
    parser.add_argument("--pack", type=Path, default=None)
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes
    methods = given.methods or load_task("pretrained", size=given.size).methods
    methods = [*(each for each in ORDER if each in methods), *(each for each in methods if each not in ORDER)]
    chosen: Chosen = {}
    if given.explore:
        finish([*explored(given), *runs(given, [each for each in methods if each in FIRST], {})], given, end)
        chosen = choice(given.out / "explore")
        given.chosen.write_text(json.dumps(chosen, indent=2) + "\n")
    elif given.chosen.is_file():
        chosen = json.loads(given.chosen.read_text())
    print("settings:", chosen, flush=True)
    finish(runs(given, methods, chosen), given, end)


def runs(given: argparse.Namespace, methods: Sequence[str], chosen: Chosen) -> list[Job]:
    """The runs that make the table."""
    return [
        Job(
            given.out / str(depth),
            method,
            seed,
            given.size,
            (*of_depth(depth), *own(method, chosen), *given.set),
            given.data,
        )
        for seed in range(given.seeds)
        for depth in given.depths
        for method in methods
    ]


def own(method: str, chosen: Chosen) -> list[str]:
    """Overrides that give a method its chosen settings; a run is told nothing that does not matter to it."""
    settings = chosen.get("node_bnn" if method in NODES else method, {})
    return [f"method.{method}.{key}={value}" for key, value in settings.items()]


def explored(given: argparse.Namespace) -> Iterator[Job]:
    """The runs that settings are chosen by, longest first: test and held-out images alone."""
    shared = (*of_depth(given.depths[0]), "evaluation.corrupt=none", "data.ood=[]", *given.set)
    for base, tries in TRIED.items():
        for name, settings in reversed(tries.items()):
            method = f"{base}-try-{name}"
            # A variant of a variant starts from the method alone: what it should have of the variant is said again.
            base_epochs = {"map-tuned": tuned_epochs(given.size), "node_bnn-untrained": 0}.get(base)
            said = {} if base_epochs is None else {"training.epochs": base_epochs}
            said |= {"components": 8} if base == "node_bnn" else {"training.keep_best": "false"}
            overrides = [f"method.{method}.{key}={value}" for key, value in (said | settings).items()]
            yield Job(given.out / "explore", method, 0, given.size, (*shared, *overrides), given.data)


def tuned_epochs(size: str) -> int:
    return int(load_task("pretrained", size=size).settings["method"]["map-tuned"]["training"]["epochs"])


def of_depth(depth: int) -> tuple[str, ...]:
    return f"network.depth={depth}", f"network.weights=resnet_cifar10/resnet{depth}.safetensors"


def choice(folder: Path) -> Chosen:
    """The settings of the best try of each; of those there are, if time ran out."""
    found: Chosen = {}
    for base, candidates in TRIED.items():
        scores = {}
        for name in candidates:
            path = folder / f"{base}-try-{name}-seed0" / "metrics.json"
            if path.is_file():
                scores[name] = json.loads(path.read_text())["metrics"][CRITERION]
        if scores:
            best = min(scores, key=scores.__getitem__)
            print(base, "->", best, {name: round(score, 4) for name, score in scores.items()}, flush=True)
            found[base] = dict(candidates[best])
    epochs = found.get("node_bnn", {}).get("training.epochs")
    if "map-tuned" in found:
        found["map-tuned4"] = dict(found["map-tuned"])
    if epochs is not None:  # the others have as many epochs, or as many passes
        for method, times in (("map-tuned", 1), ("map-tuned4", 4), ("mc_dropout", 1)):
            found.setdefault(method, {})["training.epochs"] = times * epochs
    return found


def finish(jobs: Sequence[Job], given: argparse.Namespace, end: float) -> None:
    """Does the jobs, several at a time, until the time is over; packs what is finished now and then."""
    context, packed = multiprocessing.get_context("spawn"), time.monotonic()
    with context.Pool(given.workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        waiting = [pool.apply_async(done, (job,)) for job in jobs]
        while waiting and time.monotonic() < end:
            time.sleep(0.5)
            for result in [each for each in waiting if each.ready()]:
                waiting.remove(result)
                print(result.get(), flush=True)
            if given.pack is not None and time.monotonic() - packed > 30:
                pack(given.out, given.pack)
                packed = time.monotonic()
        pool.terminate()
    if waiting:
        print(f"{len(waiting)} runs not finished in time", flush=True)
    if given.pack is not None:
        pack(given.out, given.pack)


def done(job: Job) -> str:
    """Trains and evaluates one run; what it says, or why it failed: the others go on."""
    start, name = time.perf_counter(), f"{job.out.name}/{job.method}-seed{job.seed}"
    try:
        task = load_task("pretrained", size=job.size, overrides=job.overrides)
        _, (found,) = run_all(task, methods=[job.method], seeds=[job.seed], out=job.out, source=job.data)
    except Exception:
        return f"{name} failed: {traceback.format_exc()}"
    finally:
        gc.collect()
        torch.cuda.empty_cache()  # the process goes on; captured graphs of this run are over
    shown = ("accuracy", "nll", "ece", "calibrated/nll", "cost/train_seconds")
    numbers = "  ".join(f"{key} {found.metrics[key]:.4f}" for key in shown)
    return f"{name}: {numbers}  ({time.perf_counter() - start:.0f} s)"


def pack(out: Path, path: Path) -> None:
    """Writes the finished runs below a folder into one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = temporary_name(path)
    with tarfile.open(partial, "w:gz") as archive:
        for metrics in sorted(out.glob("*/*/metrics.json")):
            folder = metrics.parent
            for name in PACKED:
                archive.add(folder / name, folder.relative_to(out) / name)
            arrays = load_file(folder / "arrays.safetensors")
            kept = {k: v.float() if v.is_floating_point() else v for k, v in arrays.items() if k in KEPT}
            kept |= {k: v.float() for k, v in arrays.items() if k.startswith("corrupt/example")}
            content = save(kept)
            entry = tarfile.TarInfo(str(folder.relative_to(out) / "arrays.safetensors"))
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    os.replace(partial, path)


if __name__ == "__main__":
    main()
