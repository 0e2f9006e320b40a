"""Times the nineteen corruptions at five severities, and draws them all on one sheet.

    python benchmarks/corruptions.py                # 10,000 made-up images, 32×32 in colour
    python benchmarks/corruptions.py --data DIR     # the CIFAR-10 test set, DIR/cifar-10-batches-bin/test_batch.bin
    python benchmarks/corruptions.py --device cuda --csv corruptions.csv
    python benchmarks/corruptions.py --images 0 --sheet docs/figures/corruptions.png

DIR defaults to the environment variable DISSENSUS_DATA.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from rows import made_on, write_rows
from torch import Tensor

from dissensus.bench.run.run_folder import device_name
from dissensus.data.corruptions import CORRUPTIONS, EXTRA, corrupt

SEVERITIES = (1, 2, 3, 4, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("DISSENSUS_DATA"), help="folder of CIFAR-10 files")
    parser.add_argument("--images", type=int, default=10_000, help="how many images to time; 0 for no timing")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--csv", type=Path, help="write the seconds here, one row for each type and severity")
    parser.add_argument("--sheet", type=Path, help="write the contact sheet here (PNG)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.images:
        images = cifar_test_images(Path(arguments.data)) if arguments.data else made_up_images(arguments.images)
        images = images[: arguments.images].to(arguments.device)
        seconds = timed(images)
        print(table(seconds, images))
        if arguments.csv:
            write_csv(seconds, images, arguments.csv)
    if arguments.sheet:
        figure = contact_sheet(scene())
        figure.savefig(arguments.sheet, dpi=100)
        plt.close(figure)


def timed(images: Tensor) -> dict[tuple[str, int], float]:
    """Seconds for each (type, severity) on all images, after one run on a few that is not counted."""
    seconds = {}
    for name in CORRUPTIONS:
        for severity in SEVERITIES:
            corrupt(images[:8], name, severity)
            finish(images)
            start = time.perf_counter()
            corrupt(images, name, severity)
            finish(images)
            seconds[name, severity] = time.perf_counter() - start
    return seconds


def finish(images: Tensor) -> None:
    if images.device.type == "cuda":
        torch.cuda.synchronize()


def table(seconds: dict[tuple[str, int], float], images: Tensor) -> str:
    """A row for each type: seconds at severities 1 … 5 and their sum."""
    heads = "".join(f"{head:>8}" for head in (*SEVERITIES, "sum"))
    lines = [f"{tuple(images.shape)} on {device_name(images.device)}", f"{'seconds':18}{heads}"]
    for name in CORRUPTIONS:
        row = [seconds[name, severity] for severity in SEVERITIES]
        lines.append(f"{name:18}" + "".join(f"{value:8.2f}" for value in [*row, sum(row)]))
    return "\n".join([*lines, f"{'all':18}{sum(seconds.values()):48.1f}"])


def write_csv(seconds: dict[tuple[str, int], float], images: Tensor, path: Path) -> None:
    about = {"images": len(images), "threads": torch.get_num_threads(), **made_on(images.device)}
    found = [{"type": name, "severity": level, "seconds": f"{value:.4f}"} for (name, level), value in seconds.items()]
    write_rows(path, [row | about for row in found])


def cifar_test_images(folder: Path) -> Tensor:
    """(10000, 3, 32, 32) uint8: the CIFAR-10 test set in its binary layout, a label and 3,072 pixels a row."""
    path = folder / "cifar-10-batches-bin" / "test_batch.bin"
    rows = np.fromfile(path, dtype=np.uint8).reshape(-1, 3073)
    return torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32))


def made_up_images(count: int) -> Tensor:
    """(count, 3, 32, 32) uint8: the scene, shifted sideways and shaded, each image differently."""
    generator = torch.Generator().manual_seed(0)
    shift = torch.randint(32, (count,), generator=generator)
    column = (torch.arange(32) + shift[:, None]) % 32  # (count, 32)
    images = scene()[:, :, column].permute(2, 0, 1, 3).float()
    return (images * (0.5 + 0.5 * torch.rand(count, 1, 1, 1, generator=generator))).to(torch.uint8)


def scene() -> Tensor:
    """(3, 32, 32) uint8: a house and a tree on a hill, drawn at eight times the size and averaged."""
    y, x = np.mgrid[:256, :256] / 8.0
    picture = np.empty((256, 256, 3))
    picture[:] = np.stack([70 + 4 * y, 130 + 3.5 * y, 225 + 0 * y], axis=-1)  # sky
    hill = y > 22 + 2.5 * np.sin(x / 5)
    tree = ((x - 24.5) ** 2 + (y - 13.5) ** 2 < 28) | ((x - 22) ** 2 + (y - 16) ** 2 < 14)
    for where, colour in (
        ((x - 5.5) ** 2 + (y - 5.5) ** 2 < 10, (250, 215, 60)),  # sun
        (hill, (70, 150, 60)),
        ((abs(x - 24.5) < 1) & (y > 17) & (y < 25.5), (110, 70, 40)),  # trunk
        (tree, (35, 105, 45)),
        ((abs(x - 11.5) < 6) & (y > 16) & (y < 27), (225, 200, 165)),  # walls
        ((y > 9.5) & (y < 16.5) & (abs(x - 11.5) < y - 9.5 + 0.5), (180, 55, 45)),  # roof
        ((abs(x - 9) < 1.6) & (y > 18.5) & (y < 22), (60, 90, 140)),  # window
        ((abs(x - 14.5) < 1.4) & (y > 20.5) & (y < 27), (100, 60, 50)),  # door
    ):
        picture[where] = colour
    picture += 8 * np.sin(3 * x + 5 * np.sin(2 * y))[..., None] * hill[..., None]  # grass
    small = picture.reshape(32, 8, 32, 8, 3).mean((1, 3))
    return torch.from_numpy(np.uint8(np.clip(small, 0, 255))).permute(2, 0, 1)


def contact_sheet(image: Tensor) -> Figure:
    """All types at all severities of one image (3, H, W), two types a line, severity growing to the right."""
    height, width = image.shape[1:]
    pitch = width + 2
    lines = (len(CORRUPTIONS) + 2) // 2
    figure, axes = plt.subplots(lines, 2, figsize=(10.8, 0.93 * lines))
    figure.subplots_adjust(left=0.1, right=0.995, bottom=0.005, top=0.97, wspace=0.26, hspace=0.06)
    for axis, name in zip(axes.T.flatten(), (*CORRUPTIONS, "clean"), strict=True):
        versions = [image] if name == "clean" else [corrupt(image[None], name, s)[0] for s in SEVERITIES]
        strip = np.full((height, 5 * pitch - 2, 3), 255, dtype=np.uint8)
        for i, version in enumerate(versions):
            strip[:, i * pitch : i * pitch + width] = version.permute(1, 2, 0).numpy()
        axis.imshow(strip, interpolation="nearest")
        label = name.replace("_", "\n") + ("\n(extra)" if name in EXTRA else "")
        axis.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=10)
        axis.set_xticks([])
        axis.set_yticks([])
        axis.spines[:].set_visible(False)
    for axis in axes[0]:
        places = [i * pitch + width / 2 for i in range(5)]
        axis.set_xticks(places, [f"severity {severity}" for severity in SEVERITIES], fontsize=8)
        axis.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0, pad=1)
    return figure


if __name__ == "__main__":
    main()
