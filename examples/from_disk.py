"""An ensemble larger than memory: trained and saved a few members at a time, summarised from the disk.

`ds.summarise(folder, loader)` reads the members of a saved posterior one at a time and keeps the mean, the aleatoric and
the epistemic part, whose size does not depend on how many members there are. Summaries of several folders of as many
members each are joined the way members are, so no step holds more than one folder's.

    python examples/from_disk.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import dissensus as ds


def joined(summaries: list[ds.SummaryPredictive]) -> tuple[Tensor, Tensor]:
    """(mean (B, C), epistemic (B,)) of the mixture of equally large mixtures."""
    mean = torch.stack([each.mean for each in summaries]).mean(0)
    aleatoric = torch.stack([each.aleatoric for each in summaries]).mean(0)
    # I = H[p̄] − mean of the members' entropies
    return mean, torch.special.entr(mean).sum(1) - aleatoric


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None, help="where to keep the members; a temporary folder if none")
    parser.add_argument("--quick", action="store_true", help="a second's worth, to see that it runs")
    options = parser.parse_args()
    rows, epochs, groups, members = (500, 1, 2, 2) if options.quick else (3000, 3, 4, 4)

    torch.manual_seed(0)
    digits, test_digits = ds.data.digits()
    standardise = ds.data.Standardiser.of_channels(digits.images)
    test = ds.data.Batches(standardise(test_digits.images), test_digits.labels, batch_size=500)
    clothes_set = ds.data.fashion()
    clothes = ds.data.Batches(standardise(clothes_set.images), clothes_set.labels, batch_size=500)

    with tempfile.TemporaryDirectory() as temporary:
        folders = [(options.out or Path(temporary)) / f"group{group}" for group in range(groups)]
        for number, folder in enumerate(folders):
            images, labels = standardise(digits.images[:rows]), digits.labels[:rows]
            loader = ds.data.Batches(images, labels, batch_size=100, shuffle=True, seed=number)
            ensemble = ds.DeepEnsemble([ds.nets.MLP(28 * 28, 10, hidden=(100, 100)) for _ in range(members)])
            ds.fit(ensemble, loader, epochs=epochs, progress=False)
            ds.save(ensemble, folder)
            del ensemble

        known: list[ds.SummaryPredictive] = []
        foreign: list[ds.SummaryPredictive] = []
        print(
            f"{'members':>7}{'MiB on disk':>13}{'at a time':>11}{'accuracy':>10}{'nll':>8}{'epistemic':>11}{'clothes':>9}"
        )
        for folder in folders:
            summary = ds.summarise(folder, test)
            y = summary.targets
            known.append(summary)
            foreign.append(ds.summarise(folder, clothes))
            (mean, doubt), (_, doubt_foreign) = joined(known), joined(foreign)
            size = (folder / "posterior.safetensors").stat().st_size / 2**20
            print(
                f"{len(known) * members:7}{len(known) * size:13.1f}{size / members:11.2f}"
                f"{ds.metrics.accuracy(mean, y):10.4f}{ds.metrics.nll(mean.log(), y):8.4f}"
                f"{doubt.mean():11.4f}{doubt_foreign.mean():9.4f}"
            )


if __name__ == "__main__":
    main()
