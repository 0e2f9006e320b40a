"""Trained networks made Bayesian: runs the task `pretrained` for several networks, many runs at a time.

    python benchmarks/pretrained.py --data FOLDER --train --workers 4      # VGG16 and WRN-16-2, by two recipes each
    python benchmarks/pretrained.py --data FOLDER --try --workers 12 --pack tried.tar.gz
    python benchmarks/pretrained.py --data FOLDER --seeds 5 --workers 12 --pack runs.tar.gz
    python benchmarks/pretrained_page.py tried.tar.gz runs.tar.gz && python benchmarks/tables.py

FOLDER holds CIFAR-10, CIFAR-100 and SVHN as `ds.data` reads them, and resnet_cifar10/resnet20.safetensors and its like; --train
writes its networks into recipe/ beside them. NodeBNN has the same settings for all networks, `NodeBNN.of_trained_settings`.
They were chosen by --try on the first network, by the likelihood at the best temperature on the 2,000 held-out test images:
nothing is chosen on the 8,000 images that everything is measured on. All networks run the original and the recipe, those of
BESIDES other methods of the task. Started again, it goes on where it was; after --minutes it stops. The packed file has
settings, metrics and numbers by example of each run that is finished.
"""

from __future__ import annotations

import argparse
import gc
import io
import multiprocessing
import os
import tarfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save, save_file

import dissensus as ds
from dissensus.bench.run.jobs import run_all
from dissensus.bench.task.config import load_task
from dissensus.storage.atomic_files import temporary_name

PUBLISHED = {f"resnet{depth}": {"name": "ResNet", "depth": depth} for depth in (20, 32, 56)}
OURS = {"vgg16": {"name": "VGG16"}, "wrn16-2": {"name": "WideResNet", "depth": 16, "width": 2}}
RECIPES: dict[str, tuple[Any, dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}),
    "adamw": (torch.optim.AdamW, {"lr": 2e-3, "weight_decay": 0.05}),
}
NETWORKS = PUBLISHED | {f"{name}-{recipe}": given for name, given in OURS.items() for recipe in RECIPES}
RECIPE = ("map", "map-scaled", "node_bnn")  # of all networks; of the others besides these:
BESIDES = {"resnet20": None, "resnet56": ("map-tuned", "mc_dropout", "laplace", "node_bnn-untrained")}
LESS = ("evaluation.corrupt=none", "data.ood=[]")  # what networks with the recipe alone are not asked
# What --try tries beside the recipe: settings of NodeBNN, and of its training behind "training.".
TRIED: dict[str, dict[str, Any]] = {
    "recipe": {"samples": 32},  # as it is
    "samples2": {"train_samples": 2},
    "samples4": {"train_samples": 4},
    "five": {"training.epochs": 5},
    "cold": {"posterior_temperature": 1.0},
    "wide": {"init_std": 0.15},
    "frozen": {"batch_norm": "frozen"},
    "out": {"mode": "out"},
    "few": {"components": 4},
}
KEPT = ("test/nll", "test/correct", "test/confidence", "calibrated/nll", "calibrated/correct", "calibrated/confidence")
PACKED = ("config.toml", "training.json", "log.jsonl", "metrics.json")


class Job(NamedTuple):
    """One run."""

    network: str
    method: str
    seed: int
    overrides: tuple[str, ...]
    out: Path
    given: argparse.Namespace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of the sets")
    parser.add_argument("--out", type=Path, default=Path("runs/pretrained"))
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--methods", nargs="+", default=None, help="the task's by default")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--size", default="paper")
    parser.add_argument("--set", action="append", default=[], help="as of `dissensus bench`")
    parser.add_argument("--train", action="store_true", help="train the networks that are not published, and stop")
    parser.add_argument("--epochs", type=int, default=30, help="of --train")
    parser.add_argument(
        "--try", action="store_true", dest="tries", help="run what the recipe was chosen from, and stop"
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="then it stops, and packs what is finished")
    parser.add_argument("--pack", type=Path, default=None)
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes
    with multiprocessing.get_context("spawn").Pool(given.workers, torch.set_num_threads, (1,)) as pool:
        if given.train:
            new = [n for n in given.networks if n not in PUBLISHED and not located(given.data, n).exists()]
            for said in pool.imap_unordered(trained, [(name, given.data, given.epochs) for name in new]):
                print(said, flush=True)
            return
        waiting = [pool.apply_async(done, (job,)) for job in (tries(given) if given.tries else runs(given))]
        packed = time.monotonic()
        while waiting and time.monotonic() < end:
            time.sleep(0.5)
            for result in [each for each in waiting if each.ready()]:
                waiting.remove(result)
                print(result.get(), flush=True)
            if given.pack is not None and time.monotonic() - packed > 60:
                pack(given.out, given.pack)
                packed = time.monotonic()
        pool.terminate()
    if waiting:
        print(f"{len(waiting)} runs not finished in time", flush=True)
    if given.pack is not None:
        pack(given.out, given.pack)


def runs(given: argparse.Namespace) -> list[Job]:
    """The runs that make the tables: the recipe's of all networks first."""
    methods = given.methods or load_task("pretrained", size=given.size).methods
    first = [(name, method) for name in given.networks for method in methods if method in RECIPE]
    besides = [
        (name, method)
        for name in given.networks
        for method in (methods if BESIDES.get(name, ()) is None else BESIDES.get(name, ()))
        if method in methods and method not in RECIPE
    ]
    return [
        Job(name, method, seed, (*given.set, *(() if name in BESIDES else LESS)), given.out / name, given)
        for some in (first, besides)
        for seed in range(given.seeds)
        for name, method in some
    ]


def tries(given: argparse.Namespace) -> list[Job]:
    """The runs that the recipe was chosen by: test and held-out images alone."""
    found = []
    for name, settings in TRIED.items():
        method = f"node_bnn-try-{name}"
        own = [f"method.{method}.{key}={value}" for key, value in settings.items()]
        overrides = (*LESS, *given.set, *own)
        found.append(Job(given.networks[0], method, 0, overrides, given.out / "tried", given))
    return found


def located(data: str, name: str) -> Path:
    return Path(data) / ("resnet_cifar10" if name in PUBLISHED else "recipe") / f"{name}.safetensors"


def trained(asked: tuple[str, str, int]) -> str:
    """Trains one network from scratch and saves its weights."""
    name, data, epochs = asked
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train = ds.data.cifar10("train", folder=data)
    mean, std = (torch.tensor(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    x, y = ((train.images.float() / 255 - mean) / std).to(device), train.labels.to(device)
    augment = ds.data.Augmentation(padding=4, flip=True)
    loader = ds.data.Batches(x, y, batch_size=128, shuffle=True, seed=0, augment=augment)
    arguments = dict(NETWORKS[name])
    posterior = ds.MAP(getattr(ds.nets, arguments.pop("name"))(**arguments)).to(device)
    kind, settings = RECIPES[name.rpartition("-")[2]]
    optimizer = kind(posterior.parameters(), **settings)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    engine = "loop+captured" if device.type == "cuda" else "auto"
    ds.fit(posterior, loader, epochs=epochs, optimizer=optimizer, scheduler=schedule, engine=engine, progress=False)
    path = located(data, name)
    path.parent.mkdir(exist_ok=True)
    save_file({key: tensor.contiguous().cpu() for key, tensor in posterior.member(0).state_dict().items()}, path)
    return f"{path}: {epochs} epochs"


def done(job: Job) -> str:
    """Trains and evaluates one run; what it says, or why it failed: the others go on."""
    start, name = time.perf_counter(), f"{job.network}/{job.method}-seed{job.seed}"
    try:
        task = load_task("pretrained", size=job.given.size, overrides=job.overrides)
        weights = str(located(job.given.data, job.network).relative_to(job.given.data))
        task = replace(task, settings=task.settings | {"network": {**NETWORKS[job.network], "weights": weights}})
        _, (found,) = run_all(task, methods=[job.method], seeds=[job.seed], out=job.out, source=job.given.data)
    except Exception:
        return f"{name} failed: {traceback.format_exc()}"
    finally:
        gc.collect()
        torch.cuda.empty_cache()  # the process goes on; captured graphs of this run are over
    shown = ("accuracy", "nll", "ece", "calibrated/nll", "calibration/nll_scaled", "cost/train_seconds")
    numbers = "  ".join(f"{key} {found.metrics[key]:.4f}" for key in shown if key in found.metrics)
    return f"{name}: {numbers}  ({time.perf_counter() - start:.0f} s)"


def pack(out: Path, path: Path) -> None:
    """Writes the finished runs below a folder into one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = temporary_name(path)
    with tarfile.open(partial, "w:gz", compresslevel=1) as archive:
        for metrics in sorted(out.glob("*/*/metrics.json")):
            folder = metrics.parent
            for name in PACKED:
                archive.add(folder / name, folder.relative_to(out) / name)
            arrays = load_file(folder / "arrays.safetensors")
            content = save({k: v.float() if v.is_floating_point() else v for k, v in arrays.items() if k in KEPT})
            entry = tarfile.TarInfo(str(folder.relative_to(out) / "arrays.safetensors"))
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    os.replace(partial, path)


if __name__ == "__main__":
    main()
