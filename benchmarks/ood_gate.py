"""What `ds.ood_gate` refuses of SVHN and CIFAR-100 by each score, and sets that are never empty; CSV out.

    python benchmarks/ood_gate.py --data FOLDER --weights resnet20.npz --csv benchmarks/results/ood_gate.csv

FOLDER and weights as of laplace_cifar10.py. A gate is fitted to 5,000 test images of CIFAR-10 at 5 % false alarms and measured
on the other 5,000. Energy, largest logit and nearest neighbour are no scores of the library: the same threshold, computed here.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from laplace_cifar10 import Rows, cached_features
from rows import made_on, write_rows
from torch import Tensor, nn

import dissensus as ds
from dissensus.bench.run.build import load_weights

FALSE_ALARM, HELD, NEIGHBOURS = 0.05, 5000, 50
SCORES = ("max_probability", "total", "epistemic")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "weights", "csv"):
        arguments.add_argument(f"--{name}", type=Path, required=True)
    arguments.add_argument("--cache", type=Path)
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = ds.nets.ResNet(20).eval()
    load_weights(network, chosen.weights)
    named = {"train": ("cifar10", "train"), "test": ("cifar10", "test")}
    named |= {name: (name, "test") for name in ("svhn", "cifar100")}
    sets = {key: cached_features(network, *value, chosen.data, chosen.cache) for key, value in named.items()}
    about = made_on("cpu")
    made = [*gates(network.linear, sets), *others(network.linear, sets), *set_sizes(network.linear, sets["test"])]
    for row in made:
        print(row, flush=True)
    write_rows(chosen.csv, [row | about for row in made])


def gates(layer: nn.Module, sets: dict[str, Rows]) -> Iterator[dict[str, Any]]:
    """Shares that the library's gates refuse."""
    held = ds.data.Batches(*(each[:HELD] for each in sets["test"]), batch_size=1000)
    laplace = ds.Laplace(layer).fit_posthoc(ds.data.Batches(*sets["train"], batch_size=1000))
    for name, posterior in (("network alone", ds.MAP(layer)), ("Laplace", laplace)):
        for score in SCORES if name == "Laplace" else SCORES[:2]:
            gate = ds.ood_gate(posterior, held, false_alarm=FALSE_ALARM, score=score)  # type: ignore[arg-type]
            yield {"method": name, "score": score, **refused(sets, lambda x, gate=gate: ~gate(x).accept)}


def others(layer: nn.Module, sets: dict[str, Rows]) -> Iterator[dict[str, Any]]:
    """The same of scores that a prediction does not have: of logits (Liu et al. 2020) and features (Sun et al. 2022)."""
    known = nn.functional.normalize(sets["train"][0][::5])

    def nearest(x: Tensor) -> Tensor:
        return -(nn.functional.normalize(x) @ known.T).topk(NEIGHBOURS).values[:, -1]

    scores = {
        "largest logit": lambda x: -layer(x).amax(1),
        "energy": lambda x: -layer(x).logsumexp(1),
        "nearest neighbour": nearest,
    }
    for name, score in scores.items():
        with torch.no_grad():
            limit = score(sets["test"][0][:HELD]).sort().values[int((HELD + 1) * (1 - FALSE_ALARM))]
            found = refused(sets, lambda x, score=score, limit=limit: score(x) >= limit)
        yield {"method": "network alone", "score": name, **found}


def refused(sets: dict[str, Rows], refuses: Any) -> dict[str, float]:
    given = {"false_alarms": sets["test"][0][HELD:], "svhn": sets["svhn"][0], "cifar100": sets["cifar100"][0]}
    return {name: round(float(refuses(x).double().mean()), 4) for name, x in given.items()}


def set_sizes(layer: nn.Module, test: Rows) -> Iterator[dict[str, Any]]:
    """Coverage and size of sets at 90 %, with empty ones and without."""
    held, new = ([tuple(each[part] for each in test)] for part in (slice(HELD), slice(HELD, None)))
    for never in (False, True):
        posterior = ds.MAP(layer)
        ds.conformal(posterior, held, never_empty=never)
        found = ds.evaluate(posterior, new).metrics
        sizes = {key: round(found.get(f"conformal/{key}", 0.0), 4) for key in ("coverage", "size", "empty")}
        yield {"method": "network alone", "score": f"lac, never_empty={never}", **sizes}


if __name__ == "__main__":
    main()
