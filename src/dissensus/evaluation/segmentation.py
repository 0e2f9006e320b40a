"""The numbers of a segmentation: sums over pixels, batch by batch; OOD pixels ranked image by image.

Pixels are never stored. Accuracy, likelihood, calibration and intersection over union lose nothing by that; pooled OOD
ranking is binned (`dissensus.metrics.ScoreHistogram`: 0.2 % relative width), ranking within an image is exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dissensus import metrics
from dissensus.core import batch as batches
from dissensus.core.predictive import ClassificationPredictive
from dissensus.evaluation.functions import Answer, Functions
from dissensus.evaluation.predictions import Shapes, check_hard, checked_shapes, now, unweighted
from dissensus.metrics import CalibrationBins, ConfusionCounts, ScoreHistogram
from dissensus.metrics.checks import labelled


@dataclass
class PixelSums:
    """What is known of the pixels of a labelled set: sums only."""

    confusion: ConfusionCounts | None = None
    bins: CalibrationBins = field(default_factory=CalibrationBins.empty)
    nll: float = 0.0
    brier: float = 0.0
    member_nll: Tensor | None = None  # (M,) sums
    disagreement: float = 0.0  # summed over pixels
    pixels: int = 0
    seconds: float = 0.0
    images: list[dict[str, Tensor]] = field(default_factory=list)  # per-image means, for intervals

    def update(self, predictive: ClassificationPredictive, y: Tensor, ignore_index: int | None) -> None:
        log_mean, members = predictive.log_mean, predictive.members
        mean = predictive.mean
        if self.confusion is None:
            self.confusion = ConfusionCounts.empty(mean.shape[1], mean.device)
            self.bins = CalibrationBins.empty(device=mean.device)
            self.member_nll = torch.zeros(len(members), dtype=torch.float64)
        self.confusion = self.confusion.update(mean, y, ignore_index=ignore_index)
        self.bins = self.bins.update(mean, y, ignore_index=ignore_index)
        rows, labels = labelled(log_mean, y, ignore_index, log=True)
        if not len(labels):
            return
        self.pixels += len(labels)
        self.nll += float(metrics.nll_values(rows, labels).sum())
        self.brier += float(metrics.brier_values(rows.exp(), labels).sum())
        keep = torch.ones_like(y, dtype=torch.bool) if ignore_index is None else y != ignore_index
        for m, member in enumerate(members):
            self.member_nll[m] += float(metrics.nll_values(member, y, ignore_index=ignore_index).sum())  # type: ignore[index]
        if len(members) > 1:
            counted = members.movedim(2, -1)[:, keep]  # (M, n, C)
            self.disagreement += float(metrics.disagreement(counted)) * len(labels)
        safe = torch.where(keep, y, 0)
        per_pixel = {
            "correct": (mean.argmax(1) == safe).double(),
            "nll": -log_mean.gather(1, safe.unsqueeze(1)).squeeze(1).double(),
        }
        number = keep.flatten(1).sum(1)
        shown = number > 0
        self.images.append(
            {name: ((value * keep).flatten(1).sum(1)[shown] / number[shown]).cpu() for name, value in per_pixel.items()}
        )

    def metrics(self) -> dict[str, float]:
        """accuracy, nll, brier, ece and miou, pooled over all pixels that count."""
        if self.confusion is None or not self.pixels:
            raise ValueError("expected at least one labelled pixel, got none; check the data and ignore_index")
        return {
            "accuracy": float(self.confusion.accuracy()),
            "nll": self.nll / self.pixels,
            "brier": self.brier / self.pixels,
            "ece": float(self.bins.ece()),
            "miou": float(self.confusion.miou()),
        }

    def member_metrics(self) -> dict[str, float]:
        """members/nll, nll_best, diversity and disagreement; nothing for a single member."""
        if self.member_nll is None or len(self.member_nll) == 1:
            return {}
        nll = self.member_nll / self.pixels
        return {
            "members/count": float(len(nll)),
            "members/nll": float(nll.mean()),
            "members/nll_best": float(nll.min()),
            "members/diversity": float(nll.mean()) - self.nll / self.pixels,  # Jensen's gap, as in ensemble_gain
            "members/disagreement": self.disagreement / self.pixels,
        }

    def arrays(self) -> dict[str, Tensor]:
        """Per-image means, the reliability bins and the confusion matrix."""
        counts, confidence, correct = (tensor.cpu() for tensor in self.bins)
        edges = torch.arange(len(counts) + 1, dtype=torch.float64) / len(counts)
        return {
            **{f"test/{name}": torch.cat([each[name] for each in self.images]) for name in self.images[0]},
            "reliability/counts": counts,
            "reliability/confidence": confidence / counts,
            "reliability/accuracy": correct / counts,
            "reliability/edges": edges,
            "confusion": self.confusion.matrix.cpu() if self.confusion is not None else torch.zeros(0, 0),
        }


def pixel_sums(functions: Functions, loader: Iterable[Any], *, name: str = "test", like: Shapes | None = None) -> Any:
    """(PixelSums, shapes of one input, None where they differ, images seen) of a labelled loader."""
    sums, shapes, images, said = PixelSums(), set[Shapes](), 0, False
    for batch in batches.each(loader, anywhere=True):
        x, y, weight = batch
        said = unweighted(weight, name, said)
        shapes.add(checked_shapes(x, like, name))
        functions.posterior.check_batch(batch)
        check_hard(y, functions)
        start = now(functions.device)
        predictive: Any = functions.predict(x)
        sums.seconds += now(functions.device) - start
        sums.update(predictive, y.to(functions.device), functions.ignore_index)
        images += batches.size(x)
    return sums, shapes.pop() if len(shapes) == 1 else None, images


def pixel_ood(
    functions: Functions, loader: Iterable[Any], score: str, *, name: str, like: Shapes | None
) -> dict[str, float]:
    """OOD metrics of a loader of (x, mask): mask (B, H, W) is boolean, or 1 at OOD pixels, 0 elsewhere.

    One other number may mark void pixels: the likelihood's ignore_index, or one that is no class. auroc, aupr and fpr95 are
    means over images of the ranking within each; pooled_auroc, pooled_aupr and pooled_fpr95 rank all images' pixels together.
    """
    histogram = ScoreHistogram.empty(device=functions.device)
    total, images, voids = torch.zeros(3, dtype=torch.float64), 0, set[int]()
    for x, mask, _ in batches.each(loader, anywhere=True):
        checked_shapes(x, like, name)
        answer = functions.answer(x) if score == "energy" else Answer(functions.predict(x), None)
        value = pixel_score(answer, score)
        if mask.is_floating_point() or mask.shape != value.shape:
            raise ValueError(
                f"expected a mask of shape {tuple(value.shape)} in {name!r}, got {mask.dtype} of shape {tuple(mask.shape)}; "
                "pass True or 1 at OOD pixels, False or 0 elsewhere, another number at void ones"
            )
        voids |= set(torch.unique(mask).tolist()) - {0, 1}
        if len(voids) > 1 or voids & (set(range(answer.predictive.members.shape[2])) - {functions.ignore_index}):
            raise ValueError(
                f"expected masks of 0, 1 and one void number in {name!r}, got {sorted(voids)}, as in class labels; pass 1 at "
                "OOD pixels, 0 elsewhere, the likelihood's ignore_index or 255 at void ones"
            )
        mask = mask.to(value.device)
        ood, void = mask == 1, (mask != 0) & (mask != 1)
        histogram = histogram.update(value[~ood & ~void], value[ood])
        both = (ood.flatten(1).any(1)) & ((~ood & ~void).flatten(1).any(1))
        if both.any():
            found = metrics.per_image_ood(value[both], ood[both], void=void[both])
            total += found.images * torch.stack([found.auroc, found.aupr, found.fpr95]).cpu()
            images += found.images
    if not images:
        raise ValueError(f"expected an image with both OOD and other pixels in {name!r}, got none; check its masks")
    auroc, aupr, fpr95 = (total / images).tolist()
    return {
        "auroc": auroc,
        "aupr": aupr,
        "fpr95": fpr95,
        "pooled_auroc": float(histogram.auroc().value),
        "pooled_aupr": float(histogram.aupr().value),
        "pooled_fpr95": float(histogram.fpr95().value),
    }


def pixel_score(answer: Answer, score: str) -> Tensor:
    """(B, H, W) how foreign every pixel is."""
    predictive: Any = answer.predictive
    if score == "energy" and answer.energy is not None:
        return answer.energy.mean(0)
    if score == "mutual_information":
        return metrics.mutual_information_score(predictive.members)
    return {"max_probability": metrics.max_probability_score, "entropy": metrics.entropy_score}[score](
        predictive.log_mean
    )
