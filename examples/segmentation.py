"""Which pixels are unknown? Segmentation with void labels in training and an object nobody labelled in testing.

Training pictures hold a bright and a dark square; pixels on their edges are void (255) and count nowhere: not in the loss,
not in the metrics. Test pictures also hold a striped square. No class fits it, and the doubt finds its pixels: the edges are
aleatoric, since all members are unsure of them alike; the stripes are epistemic too.

    python examples/segmentation.py --out segmentation.png
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dissensus as ds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VOID, SIDE = 255, 32


def pictures(n: int, *, strange: bool, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(images (n, 1, S, S), labels (n, S, S) with void edges, masks (n, S, S) of where stripes are, or would be)."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    quarters = torch.rand(n, 4, generator=generator).argsort(1)[:, :3]  # of the bright, the dark, the striped square
    corners = SIDE // 2 * torch.stack([quarters // 2, quarters % 2], 2)  # (n, 3, 2)
    centres = (corners + 6 + 4 * torch.rand(n, 3, 2, generator=generator))[..., None, None]
    inside = torch.maximum((rows - centres[:, :, 0]).abs(), (columns - centres[:, :, 1]).abs()) < 5  # (n, 3, S, S)
    bright, dark, striped = inside.unbind(1)
    labels = bright + 2 * dark
    near = F.max_pool2d(F.one_hot(labels).movedim(3, 1).float(), 3, stride=1, padding=1)  # (n, 3, S, S)
    stripes = torch.where(rows % 4 < 2, 1.0, -1.0)
    shade = torch.where(striped & strange, stripes, bright.float() - dark.float())
    images = shade + 0.4 * torch.randn(shade.shape, generator=generator)
    return images[:, None], labels.masked_fill(near.sum(1) > 1, VOID), striped


def network() -> nn.Module:
    """(B, 1, S, S) -> (B, 3, S, S)."""
    first = (nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
    second = (nn.Conv2d(12, 12, 3, padding=2, dilation=2), nn.BatchNorm2d(12), nn.ReLU())
    return nn.Sequential(*first, *second, nn.Conv2d(12, 3, 1))


def panels(columns: dict[str, Tensor]) -> Figure:
    """One column per name, of three pictures each, with its own colours and bar."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(4, len(columns), figsize=(9, 6), layout="constrained", height_ratios=(1, 1, 1, 0.08))
    colours = ("grey", "viridis", "viridis", "magma", "magma")
    for (name, pictures), places, colour in zip(columns.items(), axes.T, colours, strict=True):
        low, high = pictures.nan_to_num().aminmax()
        for place, picture in zip(places, pictures, strict=False):
            shown = place.imshow(picture.numpy(), cmap=colour, vmin=low.item(), vmax=high.item())
            place.set(xticks=[], yticks=[])
        places[0].set_title(name, fontsize=10)
        figure.colorbar(shown, cax=places[3], orientation="horizontal", label="nats" if colour == "magma" else "")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("segmentation.png"), help="the figure to write")
    parser.add_argument("--quick", action="store_true", help="a second's worth, to see that it runs")
    options = parser.parse_args()
    epochs, members, n = (6, 2, 60) if options.quick else (8, 4, 100)

    torch.manual_seed(0)
    images, labels, _ = pictures(n, strange=False, seed=0)
    ensemble = ds.DeepEnsemble([network() for _ in range(members)], likelihood=ds.Classification(ignore_index=VOID))
    loader = ds.data.Batches(images, labels, batch_size=10, shuffle=True, seed=0)
    optimizer = torch.optim.Adam(ensemble.parameters(), lr=0.01)
    ds.fit(ensemble, loader, epochs=epochs, optimizer=optimizer, progress=False)

    images, labels, striped = pictures(40, strange=True, seed=1)
    predictive = ensemble.predict(images)  # (40, 3, S, S)
    known = (labels != VOID) & ~striped  # stripes have no right answer
    miou = ds.metrics.miou(predictive.mean, labels.masked_fill(~known, VOID), ignore_index=VOID)
    print(f"mIoU of what is known {miou:.3f}\n\n{'':12}{'AUROC':>8}{'stripes':>10}{'edges':>10}{'known':>10}")
    parts = {"aleatoric": predictive.aleatoric, "epistemic": predictive.epistemic}
    for name, part in parts.items():
        means = "".join(f"{part[where].mean():10.4f}" for where in (striped, labels == VOID, known))
        print(f"{name:12}{ds.metrics.auroc(part[known], part[striped]):8.3f}{means}")

    label = labels.float().masked_fill(labels == VOID, torch.nan)
    columns = {"picture": images[:, 0], "label, void white": label, "prediction": predictive.mean.argmax(1)} | parts
    panels({name: values[:3] for name, values in columns.items()}).savefig(options.out, dpi=150)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
