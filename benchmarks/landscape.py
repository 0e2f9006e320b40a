"""The loss around a ResNet-56 with and without skips, on CIFAR-10: filter-normalised random directions, CSV and PNG out.

    python benchmarks/landscape.py train --data FOLDER --out runs/landscape       # the one without skips; goes on where it was
    python benchmarks/landscape.py draw --data FOLDER --out runs/landscape --weights resnet56.npz

FOLDER holds CIFAR-10 as `ds.data` reads it; resnet56.npz (or .safetensors, .th) is the state dict of `ds.nets.ResNet(56)`,
trained on pixels / 255 less the means .485 .456 .406 over .229 .224 .225, as this trains the other one. Losses are means over
the first --rows training images as they are, at the statistics of batch norm that training left, as in Li et al. (NeurIPS
2018). A network whose CSV is there is not measured again. Training has 60 epochs of 391 steps. Both CSV files together are
results/landscape.csv, the figure is docs/figures/landscape.png.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from rows import Row, by_key, made_on, markdown, read_rows, write_rows
from safetensors.torch import save_file
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import dissensus as ds
from dissensus.bench.report.report_figures import write_png
from dissensus.bench.run.build import load_weights
from dissensus.data.images import ImageSet
from dissensus.plots.charts import surface_figure

MEAN, STD = (torch.tensor(v).view(3, 1, 1) for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WARM = 2  # epochs of a rising rate: without skips the first steps at the full one may lose the network


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("train", "draw"):
        each = commands.add_parser(name)
        each.add_argument("--data", default=None, help="folder of the sets; DISSENSUS_DATA by default")
        each.add_argument("--out", type=Path, default=Path("runs/landscape"))
        each.add_argument("--depth", type=int, default=56)
        each.add_argument("--seed", type=int, default=0)
        each.add_argument("--rows", type=int, default={"train": 50_000, "draw": 2000}[name], help="training images")
    commands.choices["train"].add_argument("--epochs", type=int, default=60)
    draw = commands.choices["draw"]
    draw.add_argument("--weights", type=Path, required=True, help="of the network with skips")
    draw.add_argument("--points", type=int, default=41)
    draw.add_argument("--reach", type=float, default=1.0)
    draw.add_argument("--together", type=int, default=1, help="points that run at once")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    {"train": train, "draw": drawn}[given.command](given)


def batches(images: ImageSet, rows: int, *, size: int, augmented: bool) -> ds.data.Batches:
    """The first rows on the device, standardised as the published networks' were."""
    mean, std, crop = MEAN.to(DEVICE), STD.to(DEVICE), ds.data.Augmentation(seed=0)

    def prepared(x: Tensor) -> Tensor:
        return ((crop(x) if augmented else x).float() / 255 - mean) / std

    x, y = images.images[:rows].to(DEVICE), images.labels[:rows].to(DEVICE)
    order = {"shuffle": True, "seed": 0} if augmented else {}
    return ds.data.Batches(x, y, batch_size=size, augment=prepared, **order)


def without_skips(given: argparse.Namespace) -> Path:
    return given.out / f"resnet{given.depth}-without-skips.safetensors"


def train(given: argparse.Namespace) -> None:
    """SGD with momentum, weight decay 5e-4 and a cosine from 0.1 to 0, after two epochs of warming up."""
    if (path := without_skips(given)).exists():
        print(f"{path} is there already")
        return
    torch.manual_seed(given.seed)
    network = ds.nets.ResNet(given.depth, skip=False).to(DEVICE)
    posterior = ds.MAP(network)
    loader = batches(ds.data.cifar10("train", folder=given.data), given.rows, size=128, augmented=True)
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)

    def rate(epoch: int) -> float:
        cosine = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * epoch / given.epochs)).item())
        return min((epoch + 1) / (WARM + 1), 1.0) * cosine

    start = time.time()
    history = ds.fit(
        posterior,
        loader,
        epochs=given.epochs,
        optimizer=optimizer,
        scheduler=LambdaLR(optimizer, rate),
        clip=5.0,
        progress=False,
        callback=lambda epoch: print(f"{epoch.epoch}: loss {epoch.loss:.4f}, {time.time() - start:.0f} s", flush=True),
        checkpoint=given.out / "checkpoint.pt",
        checkpoint_seconds=20,
    )
    test = batches(ds.data.cifar10("test", folder=given.data), 10_000, size=1000, augmented=False)
    print(f"{history.engine}; test accuracy {ds.evaluate(posterior, test).metrics['accuracy']:.4f}")
    save_file({name: tensor.cpu().contiguous() for name, tensor in network.state_dict().items()}, path)


def drawn(given: argparse.Namespace) -> None:
    """One CSV for each network, and both in one figure."""
    loader = batches(ds.data.cifar10("train", folder=given.data), given.rows, size=1000, augmented=False)
    files = {"with skips": given.weights, "without skips": without_skips(given)}
    shown = {}
    for name, weights in files.items():
        if not weights.exists():
            print(f"{name}: no {weights}; train it first")
            continue
        table = given.out / f"landscape-{name.replace(' ', '-')}.csv"
        if not table.exists():
            start, network = time.time(), ds.nets.ResNet(given.depth, skip=name == "with skips")
            load_weights(network, weights)
            posterior = ds.MAP(network.to(DEVICE).eval())
            asked = {"points": given.points, "reach": given.reach, "seed": given.seed, "together": given.together}
            surface = ds.landscape.directions(posterior, loader, **asked)
            origin = {"depth": given.depth, "rows": given.rows, "seed": given.seed, **made_on(DEVICE)}
            places = [(i, j) for i in range(given.points) for j in range(given.points)]
            write_rows(
                table,
                [
                    {"network": name, "a": f"{surface.first[i]:.4g}", "b": f"{surface.second[j]:.4g}"}
                    | {"loss": f"{surface.loss[i, j]:.5g}", "accuracy": f"{surface.accuracy[i, j]:.4g}"}
                    | origin
                    for i, j in places
                ],
            )
            print(f"{name}: {len(places)} points in {time.time() - start:.0f} s")
        found = read_rows(table)
        side = round(len(found) ** 0.5)
        x, y, loss = (
            torch.tensor([float(row[key]) for row in found]).reshape(side, side) for key in ("a", "b", "loss")
        )
        middle = float(loss[side // 2, side // 2])
        print(f"{name}: loss {middle:.4f} in the middle, {float(loss.median()):.3g} at the median point")
        shown[f"ResNet-{given.depth} {name}"] = (x, y, loss, {"": (0.0, 0.0)})
    labels = {"xlabel": "first random direction, in filter norms", "ylabel": "second"}
    if shown:
        write_png(surface_figure(shown, **labels, highest=30.0), given.out / "landscape.png")


def page(rows: list[Row]) -> str:
    """What docs/results/particles.md says of the figure."""
    lines = []
    for name, mine in by_key(rows, "network").items():
        middle = min(mine, key=lambda row: abs(float(row["a"])) + abs(float(row["b"])))
        low = sum(float(row["loss"]) < 1 for row in mine) / len(mine)
        cells = [f"{float(middle['loss']):.4f}", f"{100 * float(middle['accuracy']):.1f} %", f"{100 * low:.0f} %"]
        lines.append([f"ResNet-{mine[0]['depth']} {name}", *cells])
    first = rows[0]
    facts = f"the first {first['rows']} training images, seed {first['seed']}; commit {first['commit']}, torch {first['torch']}"
    table = markdown(["network", "loss in the middle", "accuracy there", "of the plane below 1 nat"], lines)
    return f"{table}\n\n*`python benchmarks/landscape.py draw`; {facts}, {first['device']}.*"


if __name__ == "__main__":
    main()
