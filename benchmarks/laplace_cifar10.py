"""Last-layer Laplace on a pretrained CIFAR-10 ResNet-20, beside laplace-torch where it is installed; CSV out.

    python benchmarks/laplace_cifar10.py --data FOLDER --weights resnet20.npz --csv benchmarks/results/laplace_cifar10.csv

FOLDER holds CIFAR-10, the file the state dict of `ds.nets.ResNet(20)`, trained on pixels / 255 less the means .485 .456 .406
over .229 .224 .225. The features of all images are computed once, two minutes on a core, and kept where --cache says. Every
row is fitted to those of the 50,000 training images, or of 5,000 random ones in a `Subset`, another one for each seed, and
measured on those of the 10,000 test images: layers below the last one are the same for all.
"""

import argparse
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rows import made_on, write_rows
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import dissensus as ds
from dissensus.bench.run.build import load_weights
from dissensus.data.images import ImageSet
from dissensus.metrics import ece

MEAN, STD = (torch.tensor(v).view(3, 1, 1) for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
CASES: list[dict[str, Any]] = [
    {},
    {"structure": "kron"},
    {"prior_precision": 1.0},
    {"covariance": "joint"},
    {"covariance": "joint", "structure": "kron"},
]
FEW = 5000  # of the training images
Rows = tuple[Tensor, Tensor]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument("--weights", type=Path, required=True)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--cache", type=Path)
    arguments.add_argument("--csv", type=Path, required=True)
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    network = ds.nets.ResNet(20).eval()
    load_weights(network, chosen.weights)
    train, test = (cached_features(network, "cifar10", split, chosen.data, chosen.cache) for split in ("train", "test"))
    made = [{"program": "dissensus", "case": "map", **measured(network.linear(test[0]).softmax(1).detach(), test[1])}]
    for count in (len(train[1]), FEW):
        for seed in range(chosen.seeds):
            order = torch.randperm(len(train[1]), generator=torch.Generator().manual_seed(seed))
            data = TensorDataset(*train)
            loader = DataLoader(data if count == len(data) else Subset(data, order[:count].tolist()), batch_size=1000)
            found = [*ours(network.linear, loader, test, seed)]
            if find_spec("laplace") is not None and (count == FEW or seed == 0):
                found += theirs(network.linear, loader, test, seed)
            made += [{"rows": count, **row} for row in found]
    about = made_on("cpu")
    for row in made:
        print(row, flush=True)
    write_rows(chosen.csv, [row | about for row in made])


@torch.no_grad()
def features(network: nn.Module, images: ImageSet) -> Rows:
    """(what the last layer is given (N, 64), labels (N,))."""
    body = nn.Sequential(*(network.get_submodule(name) for name in ("conv1", "bn1")), nn.ReLU())
    body.extend(network.get_submodule(f"layer{i}") for i in (1, 2, 3))
    parts = [body((x.float() / 255 - MEAN) / STD).mean((2, 3)) for x in images.images.split(250)]
    return torch.cat(parts), images.labels


def cached_features(network: nn.Module, name: str, split: str, folder: Path, cache: Path | None) -> Rows:
    """`features` of a named set of images, computed once where there is a file to keep them."""
    known: dict[str, Rows] = torch.load(cache) if cache is not None and cache.exists() else {}
    if (key := f"{name}_{split}") not in known:
        known[key] = features(network, ds.data.image_set(name, split, folder=folder))
        if cache is not None:
            torch.save(known, cache)
    return known[key]


def ours(layer: nn.Module, loader: DataLoader[Any], test: Rows, seed: int) -> Iterator[dict[str, Any]]:
    few: list[dict[str, Any]] = [{"data_size": FEW}] if len(loader.sampler) == FEW else []  # type: ignore[arg-type]
    for case in [*CASES, *few]:
        torch.manual_seed(seed)
        posterior = ds.Laplace(layer, **case).fit_posthoc(loader)
        yield {
            "program": "dissensus",
            "case": ", ".join(f"{key}={value}" for key, value in case.items()) or "as it comes",
            "seed": seed,
            "precision": round(posterior.precision, 4),
            "evidence": round(float(posterior.log_marginal_likelihood()), 2),
            **measured(ds.predict(posterior, ds.data.Batches(*test, batch_size=1000)).mean, test[1]),
        }


def theirs(layer: nn.Module, loader: DataLoader[Any], test: Rows, seed: int) -> Iterator[dict[str, Any]]:
    from laplace import Laplace

    for structure in ("full", "kron"):
        fitted = Laplace(
            nn.Sequential(nn.Identity(), layer),
            "classification",
            subset_of_weights="last_layer",
            hessian_structure=structure,
        )
        fitted.fit(loader)
        for prior in ("1", "marglik"):
            if prior == "marglik":
                fitted.optimize_prior_precision(method="marglik")
            for link in ("probit", "mc"):
                torch.manual_seed(0)
                mean = torch.cat([fitted(x, link_approx=link, n_samples=300) for x in test[0].split(2000)]).detach()
                yield {
                    "program": "laplace-torch",
                    "case": f"{structure}, prior {prior}, {link}",
                    "seed": seed,
                    "precision": round(float(fitted.prior_precision), 4),
                    "evidence": round(float(fitted.log_marginal_likelihood()), 2),
                    **measured(mean, test[1]),
                }


def measured(mean: Tensor, y: Tensor) -> dict[str, float]:
    found = {
        "accuracy": (mean.argmax(1) == y).double().mean(),
        "nll": -mean.gather(1, y[:, None]).log().mean(),
        "ece": ece(mean, y),
    }
    return {key: round(float(value), 4) for key, value in found.items()}


if __name__ == "__main__":
    main()
