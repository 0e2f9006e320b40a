"""Metrics of a segmentation, or of tokens: sums over pixels of each image; OOD pixels are ranked within images and pooled.

Pixels are never stored. Accuracy, likelihood, calibration and intersection over union are still exact, and so is ranking
within an image; pooled OOD ranking and risk–coverage are binned (`dissensus.metrics.ScoreHistogram`: 0.2 % relative width).
A few numbers per image are kept, by which methods are compared.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dissensus import metrics
from dissensus.calibration.conformal import CLASS_UNCERTAINTY
from dissensus.core import batch as batches
from dissensus.core.batch import Batch
from dissensus.core.predictive import SummaryPredictive
from dissensus.engine.prediction_loop import Answer, FixedDraw, Timer
from dissensus.evaluation import loader_predictions
from dissensus.evaluation.loader_predictions import Shapes
from dissensus.likelihoods.tokens import TokenPredictive, token_rows
from dissensus.metrics import CalibrationBins, ConfusionCounts, RiskHistogram, ScoreHistogram
from dissensus.metrics.classification import bin_sums, reliability_from_sums
from dissensus.metrics.metric_inputs import labelled_rows
from dissensus.metrics.ranking import RankedCounts, ranked_counts

MOST_CLASSES = 256  # of a confusion matrix, whose memory grows with their square
NUMBERS = 2**22  # of tokens' log-probabilities at once, where classes are more
RANKING = ("auroc", "aupr", "fpr95", "fpr95_in")  # pooled, too
OF_IMAGES = (*RANKING, "fpr95_nearest")  # the last by the rule of published tables


@dataclass
class PixelSums:
    """Sums over the pixels of a labelled set, and a few numbers per image."""

    confusion: ConfusionCounts | None = None
    bins: CalibrationBins = field(default_factory=CalibrationBins.empty)
    risk: RiskHistogram = field(default_factory=RiskHistogram.empty)
    nll: float = 0.0
    brier: float = 0.0
    member_nll: Tensor | None = None  # (M,) sums
    disagreement: float = 0.0  # summed over pixels
    pixels: int = 0
    seconds: float = 0.0
    # For every image with a labelled pixel. Lists, not tensors: small tensors that stay alive would fragment memory.
    images: list[dict[str, Any]] = field(default_factory=list)

    def update(self, predictive: Any, y: Tensor, ignore_index: int | None) -> None:
        """Adds one image: a predictive of classes (1, C, ...) and labels (1, ...)."""
        log_mean, mean = predictive.log_mean, predictive.mean
        # A calibration of the mean leaves a summary, which has no members to measure.
        members = log_mean[None] if isinstance(predictive, SummaryPredictive) else predictive.log_probs
        if self.member_nll is None:
            few = mean.shape[1] <= MOST_CLASSES
            self.confusion = ConfusionCounts.empty(mean.shape[1], mean.device) if few else None
            self.bins = CalibrationBins.empty(device=mean.device)
            self.risk = RiskHistogram.empty(device=mean.device)
            self.member_nll = torch.zeros(len(members), dtype=torch.float64, device=mean.device)
        rows, labels = labelled_rows(log_mean, y, ignore_index, log=True)  # (n, C), (n,)
        if not len(labels):
            return
        self.bins = self.bins.update(mean, y, ignore_index=ignore_index)
        wrong = rows.argmax(1) != labels
        self.risk = self.risk.update(metrics.max_probability_score(rows), wrong)
        nll = metrics.nll_values(rows, labels)
        self.pixels += len(labels)
        self.nll += float(nll.sum())
        self.brier += float(metrics.brier_values(rows.exp(), labels).sum())
        alone = [metrics.nll_values(member, y, ignore_index=ignore_index).sum() for member in members]
        self.member_nll += torch.stack(alone)
        if len(members) > 1:
            keep = torch.ones_like(y, dtype=torch.bool) if ignore_index is None else y != ignore_index
            counted = members.movedim(2, -1)[:, keep]  # (M, n, C)
            self.disagreement += float(metrics.disagreement(counted)) * len(labels)
        kept = {"correct": (~wrong).double().mean(), "nll": nll.mean()}
        if self.confusion is not None:
            seen = ConfusionCounts.empty(mean.shape[1], mean.device).update(mean, y, ignore_index=ignore_index)
            self.confusion, hits = self.confusion.merge(seen), seen.matrix.diagonal()
            union = seen.matrix.sum(0) + seen.matrix.sum(1) - hits
            kept |= {"intersection": hits, "union": union, "target": seen.matrix.sum(1)}
        self.images.append({name: value.tolist() for name, value in kept.items()})

    def add_sequence(self, predictive: Any, y: Tensor) -> "PixelSums":
        """Sums with one sequence added, like an image: predictions (1, T, C) and labels (1, T)."""
        (rows, labels, _), one = token_rows(predictive, y), PixelSums()
        members, _, classes = rows.log_probs.shape
        size = y.numel() if classes <= MOST_CLASSES else max(1, NUMBERS // (members * classes))
        for start in range(0, len(labels), size):
            one.update(rows[start : start + size], labels[start : start + size], None)
        if len(one.images) > 1:
            one.images = [{"correct": float(one.bins.correct.sum()) / one.pixels, "nll": one.nll / one.pixels}]
        return self.merge(one)

    def merge(self, other: "PixelSums") -> "PixelSums":
        """Sums of these images followed by the other's images."""
        if self.member_nll is None or other.member_nll is None:
            return replace(self if other.member_nll is None else other, seconds=self.seconds + other.seconds)
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        joined: list[Any] = [a if a is None else a.merge(b) if hasattr(a, "merge") else a + b for a, b in pairs]
        return PixelSums(*joined)

    def metrics(self, classes: Sequence[str] | None = None) -> dict[str, float]:
        """accuracy, nll, brier, calibration errors, aurc, miou and iou/CLASS of at most 256 classes, over labelled pixels."""
        if not self.pixels:
            raise ValueError("expected at least one labelled pixel, got none; check the data and ignore_index")
        found = self.confusion
        iou = [] if found is None else metrics.intersection_over_union(found.matrix).tolist()
        names = range(len(iou)) if classes is None or found is None else classes
        if len(names) != len(iou):
            raise ValueError(f"expected {len(iou)} class names, got {len(names)}; pass one name per output")
        sums = {"accuracy": float(self.bins.correct.sum()), "nll": self.nll, "brier": self.brier}
        return {
            **{name: value / self.pixels for name, value in sums.items()},
            "ece": float(self.bins.ece()),
            **{name: float(getattr(self.risk, name)()) for name in ("adaptive_ece", "smooth_ece", "aurc")},
            **({} if found is None else {"miou": float(found.miou())}),
            # A class that is neither present nor predicted has no IoU.
            **{f"iou/{name}": value for name, value in zip(names, iou, strict=True) if value == value},
        }

    def member_metrics(self) -> dict[str, float]:
        """members/nll, nll_best, diversity and disagreement; empty for a single member."""
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
        """Values per image, the reliability bins, risk by coverage and the confusion matrix."""
        bins, curve = reliability_from_sums(*self.bins), self.risk.risk_coverage()
        columns = {name: [each[name] for each in self.images] for name in self.images[0]}
        return {
            **{f"test/{name}": torch.tensor(values, dtype=torch.float64) for name, values in columns.items()},
            **{f"reliability/{name}": each.cpu() for name, each in bins._asdict().items()},
            **{f"risk_coverage/{name}": each.cpu() for name, each in curve._asdict().items()},
            **({} if self.confusion is None else {"confusion": self.confusion.matrix.cpu()}),
        }


def pixel_sums(functions: FixedDraw, loader: Iterable[Any], *, name: str = "test", like: Shapes | None = None) -> Any:
    """(PixelSums, shapes of one input or None if they differ, number of images) of a labelled loader."""
    sums, shapes, images, said = PixelSums(), set[Shapes](), 0, False

    def work(batch: Batch) -> PixelSums:
        part = PixelSums()  # of a batch by itself: sums are then added up in one order on any number of ranks
        loader_predictions.check_shapes(batch.x, like, name)
        functions.posterior.check_batch(batch)
        timer = Timer(functions.device)
        predictive: Any = functions.predict(batch.x)
        timer.stop()
        part.seconds = timer.seconds()
        y = batch.y.to(functions.device)
        for row in range(len(y)):  # one by one: the memory of scores grows with members × pixels
            if isinstance(predictive, TokenPredictive):
                part = part.add_sequence(predictive[row], y[row : row + 1])
            else:
                part.update(predictive[row], y[row : row + 1], functions.ignore_index)
        return part

    read = functions.posterior.read(loader, anywhere=True)
    for (x, _, weight), part in functions.run_batches(work, read, functions.device):
        said = loader_predictions.warn_of_weights(weight, name, said)
        shapes.add(loader_predictions.shapes_of(x))
        sums = sums.merge(part)
        images += batches.count_examples(x)
    return sums, shapes.pop() if len(shapes) == 1 else None, images


@dataclass
class PixelRanking:
    """How well one score separates OOD pixels from others: within each image, and over all images, binned."""

    histogram: ScoreHistogram
    images: list[list[float]] = field(default_factory=list)  # in the order of OF_IMAGES

    def update(self, score_in: Tensor, score_ood: Tensor) -> None:
        """Adds the pixels of one image. Without OOD pixels, or with nothing else, the image has no ranking."""
        self.histogram = self.histogram.update(score_in, score_ood)
        if len(score_in) and len(score_ood):
            counts: RankedCounts = ranked_counts(score_in, score_ood)[1]
            each = counts.auroc(), counts.aupr(), counts.fpr(), counts.swap_classes().fpr(), counts.fpr(rule="nearest")
            self.images.append(torch.stack(each).tolist())

    def merge(self, other: "PixelRanking") -> "PixelRanking":
        """Ranking of these images followed by the other's images."""
        return PixelRanking(self.histogram.merge(other.histogram), self.images + other.images)

    def numbers(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        """For every metric: (mean over images and pooled_… number, values (n,) of the images with a ranking)."""
        columns = zip(*self.images, strict=True)
        values = {name: torch.tensor(c, dtype=torch.float64) for name, c in zip(OF_IMAGES, columns, strict=True)}
        found = {name: float(value.mean()) for name, value in values.items()}
        return found | {f"pooled_{name}": float(getattr(self.histogram, name)().value) for name in RANKING}, values


def pixel_ood(
    functions: FixedDraw, loader: Iterable[Any], score: str, *, name: str, like: Shapes | None
) -> tuple[dict[str, PixelRanking], CalibrationBins]:
    """(score -> ranking, bins of OOD pixels, all wrong) of (x, mask); 1 is OOD, 0 is not, one other number is void."""
    scores = [each for each in CLASS_UNCERTAINTY if functions.members > 1 or each != "epistemic"]
    scores += [score] if score not in scores else []

    def empty() -> tuple[dict[str, PixelRanking], CalibrationBins]:
        nothing = {each: PixelRanking(ScoreHistogram.empty(device=functions.device)) for each in scores}
        return nothing, CalibrationBins.empty(device=functions.device)

    def work(batch: Batch) -> tuple[dict[str, PixelRanking], CalibrationBins, int]:
        x, mask, _ = batch
        rankings, bins = empty()
        loader_predictions.check_shapes(x, like, name)
        answer = functions.answer(x) if score == "energy" else Answer(functions.predict(x), None)
        size, classes, *place = answer.predictive.mean.shape
        expected = (size, *place)
        if mask.is_floating_point() or mask.shape != expected:
            got = f"{mask.dtype} {tuple(mask.shape)}; pass True or 1 at OOD pixels, False or 0 elsewhere"
            raise ValueError(f"expected a mask of shape {expected} in {name!r}, got {got}")
        mask = mask.to(functions.device)
        for row in range(len(mask)):
            predictive = answer.predictive[row]
            inside, outside = mask[row : row + 1] == 0, mask[row : row + 1] == 1
            confidence = predictive.confidence[outside]
            bins = bins.merge(CalibrationBins(*bin_sums(confidence, torch.zeros_like(confidence), len(bins.counts))))
            for each, ranking in rankings.items():
                if each == "energy" and answer.energy is not None:
                    value = answer.energy[:, row : row + 1].mean(0)
                else:
                    value = CLASS_UNCERTAINTY[each](predictive)
                ranking.update(value[inside], value[outside])
        return rankings, bins, classes

    (rankings, bins), voids = empty(), set[int]()
    read = functions.posterior.read(loader, anywhere=True)
    for (_, mask, _), (part, foreign, classes) in functions.run_batches(work, read, functions.device):
        voids |= set(torch.unique(mask).tolist()) - {0, 1}
        if len(voids) > 1 or voids & (set(range(classes)) - {functions.ignore_index}):
            advice = "pass 1 at OOD pixels, 0 elsewhere, the likelihood's ignore_index or 255 at void pixels"
            raise ValueError(f"expected masks of 0, 1 and one void number in {name!r}, got {sorted(voids)}; {advice}")
        rankings = {each: ranking.merge(part[each]) for each, ranking in rankings.items()}
        bins = bins.merge(foreign)
    if not rankings[score].images:
        raise ValueError(f"expected an image with both OOD and other pixels in {name!r}, got none; check its masks")
    return rankings, bins


def ranking_numbers(
    rankings: Mapping[str, PixelRanking], score: str, prefix: str
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """(metrics, values per image) under prefix/SCORE/NAME; those of the chosen score also under prefix/NAME."""
    found, arrays = dict[str, float](), dict[str, Tensor]()
    for by, ranking in rankings.items():
        numbers, of_images = ranking.numbers()
        for place in (prefix, f"{prefix}/{by}") if by == score else (f"{prefix}/{by}",):
            found |= {f"{place}/{key}": value for key, value in numbers.items()}
            arrays |= {f"{place}/{key}": values for key, values in of_images.items()}
    return found, arrays
