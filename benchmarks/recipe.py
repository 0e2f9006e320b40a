"""One recipe for networks that are trained already: NodeBNN at a rate from the network's own curvature, nothing tuned.

    python benchmarks/recipe.py --data FOLDER --train --jobs 4                      # VGG16 and WRN-16-2, by two recipes each
    python benchmarks/recipe.py --data FOLDER --seeds 5 --jobs 12 --csv benchmarks/results/recipe.csv
    python benchmarks/tables.py

FOLDER holds CIFAR-10 and resnet_cifar10/*.safetensors; --train writes its networks beside them, into recipe/. Every network has
the same recipe, in SETTINGS: rates of weights and latents stand in a fixed proportion and are multiplied by one number, so that
their `theory.sharpness` on one batch is SHARE of what momentum allows. A run that diverges all the same is counted, begun
again at half the rate, and its halvings are in the table. What is measured is what the task `pretrained` measures: temperatures
on 2,000 test images, all else on the other 8,000. Started again, it goes on where it was.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import traceback
from pathlib import Path
from typing import Any

import torch
from rows import Row, made_by, markdown, paired, read_rows, summary, write_rows
from safetensors.torch import load_file, save_file

import dissensus as ds
from dissensus.bench.run.jobs import run_all
from dissensus.bench.run.provenance import commit, device_name
from dissensus.bench.task.config import load_task
from dissensus.core.errors import Diverged
from dissensus.reporting.spread import holm
from dissensus.reporting.statistics import SIGNIFICANT

MOMENTUM, SHARE, HALVINGS = 0.9, 1.0, 4
SETTINGS: dict[str, Any] = {
    "mode": "in",
    "components": 8,
    "init_std": 0.1,
    "gamma": 10.0,
    "batch_norm": "trained",
    "latent_momentum": MOMENTUM,
    "train_samples": 4,
    "samples": 32,
}
EPOCHS, DECAY = 10, 1e-4
PUBLISHED = {f"resnet{depth}": {"name": "ResNet", "depth": depth} for depth in (20, 32, 56)}
OURS = {"vgg16": {"name": "VGG16"}, "wrn16-2": {"name": "WideResNet", "depth": 16, "width": 2}}
RECIPES: dict[str, tuple[Any, dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}),
    "adamw": (torch.optim.AdamW, {"lr": 2e-3, "weight_decay": 0.05}),
}
NETWORKS = PUBLISHED | {f"{name}-{recipe}": given for name, given in OURS.items() for recipe in RECIPES}
SHOWN = {"nll": "NLL", "calibrated/nll": "NLL at T", "ece": "ECE", "accuracy": "accuracy"}
KEPT = (*SHOWN, "calibrated/temperature", "calibrated/ece", "corrupt/nll", "corrupt/accuracy", "cost/train_seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "recipe.csv")
    parser.add_argument("--out", type=Path, default=Path("runs/recipe"))
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--size", default="paper")
    parser.add_argument("--set", action="append", default=[], help="as of `dissensus bench`")
    parser.add_argument("--train", action="store_true", help="train the networks that are not published, and stop")
    parser.add_argument("--epochs", type=int, default=40, help="of --train")
    parser.add_argument("--rows", type=int, default=128, help="training images that the curvature is measured on")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(given.jobs, torch.set_num_threads, (1,)) as pool:
        if given.train:
            new = [n for n in given.networks if n not in PUBLISHED and not located(given.data, n).exists()]
            for said in pool.imap_unordered(trained, [(name, given.data, given.epochs) for name in new]):
                print(said, flush=True)
            return
        rows = read_rows(given.csv)
        over = {(row["network"], row["method"], row["seed"]) for row in rows}
        jobs = [
            (name, method, seed, given)
            for seed in range(given.seeds)
            for name in given.networks
            for method in ("map", "node_bnn")
            if (name, method, str(seed)) not in over
        ]
        for found in pool.imap_unordered(done, jobs):
            if isinstance(found, str):
                print(found, flush=True)
                continue
            rows.append(found)
            write_rows(given.csv, rows)
            print({key: found[key] for key in ("network", "method", "seed", "nll", "rate", "halvings")}, flush=True)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def located(data: str, name: str) -> Path:
    return Path(data) / ("resnet_cifar10" if name in PUBLISHED else "recipe") / f"{name}.safetensors"


def built(name: str) -> torch.nn.Module:
    arguments = dict(NETWORKS[name])
    made: torch.nn.Module = getattr(ds.nets, arguments.pop("name"))(**arguments)
    return made


def images(data: str, where: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """All training images as the task gives them: less ImageNet's means, over its deviations."""
    train = ds.data.cifar10("train", folder=data)
    mean, std = (torch.tensor(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return ((train.images.float() / 255 - mean) / std).to(where), train.labels.to(where)


def trained(asked: tuple[str, str, int]) -> str:
    """Trains one network from scratch and saves its weights."""
    name, data, epochs = asked
    torch.manual_seed(0)
    x, y = images(data, device())
    loader = ds.data.Batches(
        x, y, batch_size=128, shuffle=True, seed=0, augment=ds.data.Augmentation(padding=4, flip=True)
    )
    posterior = ds.MAP(built(name)).to(device())
    kind, arguments = RECIPES[name.rpartition("-")[2]]
    optimizer = kind(posterior.parameters(), **arguments)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    history = ds.fit(posterior, loader, epochs=epochs, optimizer=optimizer, scheduler=schedule, progress=False)
    path = located(data, name)
    path.parent.mkdir(exist_ok=True)
    save_file({key: tensor.contiguous().cpu() for key, tensor in posterior.member(0).state_dict().items()}, path)
    return f"{path}: {len(history)} epochs"


def rate_of(name: str, data: str, seed: int, count: int) -> float:
    """The rate of weights, and of one component's latents, at which the sharpness is SHARE · (1 − MOMENTUM)."""
    torch.manual_seed(seed)
    network = built(name)
    network.load_state_dict(load_file(located(data, name)))
    posterior = ds.NodeBNN(network, data_size=50_000, latent_lr=1.0, **SETTINGS).to(device())
    x, y = images(data, torch.device("cpu"))
    rows = torch.randperm(len(y))[:count]
    optimizer = torch.optim.SGD(posterior.parameter_groups(1.0, DECAY), lr=1.0)
    return (
        SHARE * (1 - MOMENTUM) / ds.theory.sharpness(posterior, optimizer, x[rows].to(device()), y[rows].to(device()))
    )


def done(asked: tuple[str, str, int, argparse.Namespace]) -> Row | str:
    """One run of the task `pretrained`; where it failed, why."""
    name, method, seed, given = asked
    weights = located(given.data, name)
    common = [f"network.{key}={value}" for key, value in NETWORKS[name].items() if key != "name"]
    if name not in PUBLISHED:  # the task's network is a ResNet of a depth
        common = [f"network={{{', '.join(f'{key} = {value!r}' for key, value in NETWORKS[name].items())}}}"]
    common += [f"network.weights={weights.relative_to(given.data)}", "data.ood=[]", *given.set]
    try:
        rate, halvings = (rate_of(name, given.data, seed, given.rows), 0) if method == "node_bnn" else (0.0, 0)
        while True:
            own = []
            if method == "node_bnn":
                settings = SETTINGS | {"latent_lr": rate, "training.lr": rate, "training.epochs": EPOCHS}
                settings |= {"training.weight_decay": DECAY, "training.momentum": MOMENTUM}
                own = [f"method.{method}.{key}={value}" for key, value in settings.items()]
            task = load_task("pretrained", size=given.size, overrides=(*common, *own))
            out = given.out / name / f"halved{halvings}"
            try:
                _, (found,) = run_all(task, methods=[method], seeds=[seed], out=out, source=given.data)
                lost = found.metrics["nll"] > math.log(10)  # worse than a guess
            except Diverged:
                lost = True
            if not lost or method == "map":
                break
            if halvings == HALVINGS:
                return f"{name}, {method}, seed {seed} diverged at {rate:.2g}, after {halvings} halvings"
            rate, halvings = rate / 2, halvings + 1
    except Exception:
        return f"{name}, {method}, seed {seed} failed: {traceback.format_exc()}"
    numbers = {key: found.metrics[key] for key in KEPT if key in found.metrics}
    facts = {"commit": commit(), "torch": torch.__version__, "device": device_name(device())}
    return {"network": name, "method": method, "seed": seed, "rate": rate, "halvings": halvings, **numbers, **facts}


def page(rows: list[Row]) -> str:
    """Every network as it came, at its temperature and with the recipe; differences over seeds, by Holm."""
    lines, found = [], {}
    for name in dict.fromkeys(row["network"] for row in rows):
        mine = {m: [r for r in rows if (r["network"], r["method"]) == (name, m)] for m in ("map", "node_bnn")}
        if not all(mine.values()):
            continue
        scaled = [row | {"nll": row["calibrated/nll"]} for row in mine["map"]]
        found[name] = paired(mine["node_bnn"], scaled, "nll")
        cells = [f"{summary(row[key] for row in mine['map'])[0]:.4f}" for key in ("nll", "calibrated/nll")]
        cells += [f"{summary(row[key] for row in mine['node_bnn'])[0]:.4f}" for key in SHOWN]
        rates = sorted(float(row["rate"]) for row in mine["node_bnn"])
        lines.append(
            [name, *cells, f"{rates[0]:.2g} to {rates[-1]:.2g}", str(sum(int(r["halvings"]) for r in mine["node_bnn"]))]
        )
    known = {name: each for name, each in found.items() if each is not None}
    adjusted = dict(zip(known, holm([each.p_value for each in known.values()]), strict=True))
    for line in lines:
        if each := known.get(line[0]):
            text = f"{each.difference:+.4f} ({each.lower:+.4f} to {each.upper:+.4f})"
            line.append(f"**{text}**" if adjusted[line[0]] < SIGNIFICANT else text)
        else:
            line.append("–")
    heads = [
        "network",
        "NLL as it came",
        "at T",
        *(f"recipe: {title}" for title in SHOWN.values()),
        "rates",
        "divergences",
    ]
    table = markdown([*heads, "recipe's NLL less the original's at T"], lines)
    made = made_by("python benchmarks/recipe.py --data FOLDER --seeds 5", rows, "8,000 test images")
    bold = f"Bold: p < {SIGNIFICANT:g} over seeds, by Holm for the networks."
    made = made.replace(", mean ± standard deviation (95 % interval of the mean)", ", means over seeds")
    return f"{table}\n\n{bold}\n\n{made}"


if __name__ == "__main__":
    main()
