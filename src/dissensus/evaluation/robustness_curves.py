"""Metrics on corrupted inputs, on attacked inputs at several ε, and on noise optimised to look like each class.

Corrupted images are never stored. Each severity is evaluated on all corruption types pooled, then severities are averaged:
cA, cNLL and cECE (Hendrycks and Dietterich, ICLR 2019; as in the CIFAR-C tables of Ovadia et al., NeurIPS 2019).
"""

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from dissensus import attacks, metrics
from dissensus.attacks import implicit_corruptions
from dissensus.attacks.gradient_attacks import Ball, Bounds, Draw, Norm
from dissensus.calibration.conformal import epistemic_uncertainty
from dissensus.core import batch as batches
from dissensus.core.posterior import Posterior
from dissensus.core.predictive import CategoricalPredictive, Predictive
from dissensus.data import corruptions
from dissensus.data.input_transforms import Standardiser
from dissensus.engine.prediction_loop import FixedDraw
from dissensus.evaluation.guarantees import ANSWERS, Promises, RowValues, guarantee_outcomes, guarantee_tables
from dissensus.evaluation.loader_predictions import hard_labels, is_image
from dissensus.methods.map import MAP
from dissensus.metrics.classification import bin_sums, confidence_ece, ece_from_sums
from dissensus.metrics.metric_inputs import labelled_rows
from dissensus.utils.checks import integer, one_of

BINS = 15


@dataclass(frozen=True)
class Corruptions:
    """The corruptions that `evaluate(corrupt=...)` applies to test images.

    Args:
        names: "all" (19 types), "benchmark" (the 15 main ones) or a list of names of
            `dissensus.data.corruptions.CORRUPTIONS`.
        severities: numbers from 1 to 5.
        seed: seed of the random corruptions; image i gets the same noise in every batch.
        standardiser: corruptions act on pixels, uint8 or in [0, 1]. If the loader gives standardised images, pass their
            standardiser: images are converted back to pixels, corrupted and standardised again.
        files: a folder of the published CIFAR-10-C or -100-C, used instead for all floating test images in their order.
    """

    names: str | Sequence[str] = "all"
    severities: Sequence[int] = (1, 2, 3, 4, 5)
    seed: int = 0
    standardiser: Standardiser | None = None
    files: Path | None = None

    def __post_init__(self) -> None:
        if isinstance(self.names, str) and self.names not in ("all", "benchmark"):
            advice = f"pass a list with some of {', '.join(corruptions.CORRUPTIONS)}"
            raise ValueError(f'expected "all", "benchmark" or a list of corruptions, got {self.names!r}; {advice}')
        if not self.types or not self.severities:
            raise ValueError("expected at least one corruption and one severity, got none; pass None to leave them out")
        probe = torch.zeros(0, 1, 32, 32)
        for name in self.types:  # raise now rather than after the clean pass
            for severity in self.severities:
                corruptions.corrupt(probe, name, severity)

    @property
    def types(self) -> tuple[str, ...]:
        """The names of the corruptions, T of them, in order."""
        known = {"all": corruptions.CORRUPTIONS, "benchmark": corruptions.BENCHMARK}
        return known[self.names] if isinstance(self.names, str) else tuple(self.names)

    def apply(self, x: Tensor, name: str, severity: int, index: Tensor) -> Tensor:
        """Corrupts images x (B, C, H, W) of the loader, in their units; index: (B,) their positions, which seed the noise."""
        if self.files is not None:
            x = corruptions.read_cifar_c(self.files, name, severity)[0][index.cpu()].to(x.device).to(x.dtype) / 255
            return x if self.standardiser is None else self.standardiser(x)
        if self.standardiser is None:
            return corruptions.corrupt(x, name, severity, seed=self.seed, index=index)
        pixels = self.standardiser.inverse(x)
        inside = pixels.clamp(0, 1)
        # Removes rounding errors; larger deviations raise.
        pixels = torch.where((pixels - inside).abs() < 1e-3, inside, pixels)
        return self.standardiser(corruptions.corrupt(pixels, name, severity, seed=self.seed, index=index))


@dataclass(frozen=True, eq=False)
class CorruptedCounts:
    """Sums over the loader for T types and S severities, from which all metrics are computed."""

    types: tuple[str, ...]
    severities: tuple[int, ...]
    nll: Tensor  # (T, S) sums
    counts: Tensor  # (T, S, K) examples per confidence bin
    confidence: Tensor  # (T, S, K) sums
    correct: Tensor  # (T, S, K) sums
    clean: Tensor  # (3,) accuracy, nll and ece of the clean inputs: severity 0 of the curves
    example_accuracy: Tensor  # (N,) mean over types and severities, for intervals and tests
    example_nll: Tensor  # (N,)
    examples: Tensor  # (3, T, S, N) float16: confidence, accuracy and nll of each example
    promised: dict[str, Tensor] = field(default_factory=dict)  # NAME/coverage, size, accepted, refused, risk (T, S)

    def metrics(self) -> dict[str, float]:
        """corrupt/accuracy, nll and ece: overall, per type and per severity."""
        by_severity = self.by_severity() | {name: table.nanmean(0) for name, table in self.promised.items()}
        found = {f"corrupt/{name}": float(values.nanmean()) for name, values in by_severity.items()}
        for name, values in by_severity.items():
            for severity, value in zip(self.severities, values.tolist(), strict=True):
                found[f"corrupt/severity{severity}/{name}"] = value
        for name, table in (self.by_type_and_severity() | self.promised).items():
            for kind, value in zip(self.types, table.nanmean(1).tolist(), strict=True):
                found[f"corrupt/{kind}/{name}"] = value
        # NaN: the risk where nothing is accepted
        return {key: value for key, value in found.items() if not math.isnan(value)}

    def by_severity(self) -> dict[str, Tensor]:
        """accuracy, nll and ece (S,) of each severity, types pooled."""
        return _rates(*(sums.sum(0) for sums in (self.nll, self.counts, self.confidence, self.correct)))

    def by_type_and_severity(self) -> dict[str, Tensor]:
        """accuracy, nll and ece (T, S) of each type at each severity."""
        return _rates(self.nll, self.counts, self.confidence, self.correct)

    def arrays(self) -> dict[str, Tensor]:
        return {
            "corrupt/example_accuracy": self.example_accuracy,
            "corrupt/example_nll": self.example_nll,
            **{f"corrupt/{name}": table for name, table in self.by_type_and_severity().items()},
            **{f"corrupt/by_severity/{name}": values for name, values in self.by_severity().items()},
            **{f"corrupt/clean/{name}": self.clean[i] for i, name in enumerate(("accuracy", "nll", "ece"))},
        }


def corrupted_counts(functions: FixedDraw, loader: Iterable[Any], spec: Corruptions) -> CorruptedCounts:
    """CorruptedCounts of all inputs of a loader."""
    types, severities = spec.types, tuple(spec.severities)
    table = torch.zeros(len(types), len(severities), 1 + 3 * BINS, dtype=torch.float64)  # of `_outcome`
    clean = torch.zeros(1 + 3 * BINS, dtype=torch.float64)
    means, examples, promised, seen = [], [], [], 0  # (3, B), (3, T, S, B) and outcomes of promises of each batch
    promises = dict(functions.posterior.promises.items())

    def work(batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Any, ...]:
        return _corrupt_batch(functions, spec, promises, *batch)

    for (_, y, _), (undamaged, sums, each, rows) in functions.run_batches(work, _indexed_images(functions, loader)):
        seen += len(y)
        clean += undamaged
        table += sums
        means.append(each.mean((1, 2)))
        examples.append(each.half())
        promised.append(rows)
    if not seen:
        raise ValueError("expected images to corrupt, got no batch; pass a loader that can be iterated more than once")
    if spec.files is not None and seen != (wanted := len(corruptions.read_cifar_c(spec.files, types[0], 1)[1])):
        raise ValueError(f"expected all {wanted:,} test images of {spec.files}, got {seen}; pass them in their order")
    _, example_accuracy, example_nll = torch.cat(means, dim=1)
    nll, counts, confidence, correct = _split_sums(table)
    sums = (nll, counts, confidence, correct, torch.stack([*_rates(*_split_sums(clean)).values()]))
    each, promised_tables = torch.cat(examples, dim=-1), guarantee_tables(promises, promised)
    return CorruptedCounts(types, severities, *sums, example_accuracy, example_nll, each, promised_tables)


def _indexed_images(functions: FixedDraw, loader: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(images, labels, positions in the data set) of each batch."""
    first = 0
    for x, y, _ in functions.posterior.read(loader, anywhere=True):
        if not is_image(x):
            got = [tuple(t.shape) for t in batches.input_tensors(x)]
            raise ValueError(f"expected images (B, 1 or 3, H, W) to corrupt, got {got}; pass corrupt=None")
        yield x, hard_labels(y), torch.arange(first, first + len(y))  # type: ignore[misc]
        first += len(y)


def _corrupt_batch(
    functions: FixedDraw, spec: Corruptions, promises: Promises, images: Tensor, y: Tensor, index: Tensor
) -> tuple[Any, ...]:
    """(sums (1 + 3K,) of clean images, sums (T, S, 1 + 3K), values (3, T, S, B), outcomes of promises) of a batch."""
    generator = torch.Generator().manual_seed(int(index[:1].sum()))  # of randomised sets: from the first image's index
    images, y, index = (each.to(functions.device) for each in (images, y, index))
    counted = torch.ones_like(y, dtype=torch.bool) if functions.ignore_index is None else y != functions.ignore_index
    clean, _ = _outcome(functions.predict(images), y, functions.ignore_index)
    promised: dict[tuple[int, int], RowValues] = {}
    shape = len(spec.types), len(spec.severities)
    sums = torch.zeros(*shape, len(clean), dtype=torch.float64)
    values = torch.zeros(3, *shape, len(y), dtype=torch.float64)
    for t, name in enumerate(spec.types):
        for s, severity in enumerate(spec.severities):
            damaged = spec.apply(images, name, severity, index)
            predictive = functions.predict(damaged)
            if promises and y.ndim == 1:
                kept = {"y": y[counted], "x": damaged[counted]}
                outcomes = guarantee_outcomes(promises, predictive[counted], generator, **kept)
                promised[t, s] = {k: value.cpu() for k, value in outcomes.items() if not k.endswith(ANSWERS)}
            sums[t, s], values[:, t, s] = _outcome(predictive, y, functions.ignore_index)
    return clean, sums, values, promised


def _split_sums(sums: Tensor) -> list[Tensor]:
    """nll (...), and counts, confidence and correctness (..., K) of the bins, from sums (..., 1 + 3K)."""
    return [each.clone() for each in (sums[..., 0], *sums[..., 1:].reshape(*sums.shape[:-1], 3, BINS).unbind(-2))]


def _rates(nll: Tensor, counts: Tensor, confidence: Tensor, correct: Tensor) -> dict[str, Tensor]:
    """accuracy, nll and ece (...) from sums (...) and (..., K)."""
    total = counts.sum(-1).double()
    ece = ece_from_sums(counts, confidence, correct)
    return {"accuracy": correct.sum(-1) / total, "nll": nll / total, "ece": ece}


def _outcome(predictive: Predictive, y: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor]:
    """Sums (1 + 3K,) of nll and of K bins, and means (3, B) of confidence, accuracy and nll of each example."""
    if not isinstance(predictive, CategoricalPredictive):
        got = type(predictive).__name__
        raise ValueError(f"expected a classification to corrupt the inputs of, got a {got}; pass corrupt=None")
    rows, labels = labelled_rows(predictive.log_mean, y, ignore_index, log=True)  # (n, C), (n,)
    places = torch.arange(len(y), device=y.device).reshape(-1, *[1] * (y.ndim - 1)).expand(y.shape)
    example = (places if ignore_index is None else places[y != ignore_index]).flatten().cpu()  # (n,)
    largest, prediction = rows.max(1)
    nll = -rows.gather(1, labels.unsqueeze(1)).squeeze(1).double().cpu()
    confidence, correct = largest.exp().cpu(), (prediction == labels).double().cpu()
    sums = torch.cat([nll.sum()[None], *bin_sums(confidence, correct, BINS)])
    values, number = torch.stack([confidence.double(), correct, nll]), torch.bincount(example, minlength=len(y))
    means = torch.zeros(3, len(y), dtype=torch.float64).index_add(1, example, values) / number.clamp(min=1)
    return sums, means


ATTACKS = ("fgsm", "pgd", "transfer")
VALUES = ("accuracy", "nll", "confidence", "total", "epistemic")  # per example
CURVES = ("accuracy", "nll", "ece", "total", "epistemic")  # per ε


@dataclass(frozen=True)
class AttackCurves:
    """The attacks that `evaluate(attack=...)` runs on its test inputs.

    Args:
        epsilons: radii ε > 0 in ascending order, in the units of the bounds.
        names: any of "fgsm", "pgd" and "transfer". "transfer" attacks the first member with PGD and measures the mixture;
            for a single network it equals "pgd".
        norm, bounds, standardiser: as in `ds.attacks.pgd`.
        steps: steps of PGD, each of size 2.5 ε / steps.
        fool_steps: steps of `ds.attacks.fool` from noise towards every class; 0 leaves it out.
    """

    epsilons: Sequence[float]
    names: Sequence[str] = ATTACKS
    norm: Norm = "inf"
    steps: int = 10
    fool_steps: int = 0
    bounds: Bounds = (0.0, 1.0)
    standardiser: Standardiser | None = None

    def __post_init__(self) -> None:
        for name in self.names:
            one_of("an attack", name, ATTACKS)
        for epsilon in self.epsilons:  # raise now rather than after the clean pass
            Ball.around_inputs(torch.zeros(0, 1), epsilon, norm=self.norm, bounds=self.bounds, standardiser=None)
        integer("steps", self.steps)
        integer("fool_steps", self.fool_steps, least=0)
        if not self.names or not self.epsilons or [0, *self.epsilons] != sorted({0, *self.epsilons}):
            got = f"{[*self.names]} at {[*self.epsilons]}"
            raise ValueError(f"expected attacks and ascending epsilons above 0, got {got}; 0 is always measured")

    def apply(self, name: str, epsilon: float, posterior: Posterior, draw: Draw, x: Tensor, y: Tensor) -> Tensor:
        """The inputs after one attack on this posterior."""
        where: Any = {"norm": self.norm, "bounds": self.bounds, "standardiser": self.standardiser, "draw": draw}
        if name == "fgsm":
            return attacks.fgsm(posterior, x, y, epsilon, **where).inputs
        return attacks.pgd(posterior, x, y, epsilon, steps=self.steps, **where).inputs


@dataclass(frozen=True, eq=False)
class AttackedInputs:
    """Predictions for N inputs under each attack and ε, ε = 0 first, and for fooling inputs."""

    names: tuple[str, ...]
    epsilons: tuple[float, ...]  # E, without 0
    values: Tensor  # (attacks, 1 + E, 5, N) float64, in the order of VALUES
    fooling: dict[str, Tensor]  # inputs (C, ...), target, reached, confidence, …; may be empty

    def curves(self, name: str) -> dict[str, Tensor]:
        """Metric -> (1 + E,) under this attack."""
        found = self.values[self.names.index(name)]  # (1 + E, 5, N)
        means = dict(zip(VALUES, found.mean(2).unbind(1), strict=True))
        ece = [confidence_ece(confidence, correct) for correct, _, confidence, _, _ in found]
        return {key: torch.stack(ece) if key == "ece" else means[key] for key in CURVES}

    def metrics(self) -> dict[str, float]:
        """attack/NAME/METRIC (mean over ε > 0), attack/NAME/ε/METRIC (each ε) and fool/METRIC (mean over classes)."""
        found = {}
        for name in self.names:
            for key, values in self.curves(name).items():
                found[f"attack/{name}/{key}"] = float(values[1:].mean())
                for epsilon, value in zip(self.epsilons, values[1:].tolist(), strict=True):
                    found[f"attack/{name}/{epsilon:g}/{key}"] = value
        fooled = ("confidence", "total", "epistemic") if self.fooling else ()
        return found | {f"fool/{key}": float(self.fooling[key].mean()) for key in fooled}

    def arrays(self) -> dict[str, Tensor]:
        """attack/epsilons (1 + E,), attack/NAME/METRIC (1 + E,), attack/NAME/example_… (N,), examples/fooling/…."""
        found = {"attack/epsilons": torch.tensor([0.0, *self.epsilons], dtype=torch.float64)}
        for name, values in zip(self.names, self.values, strict=True):
            found |= {f"attack/{name}/{key}": curve for key, curve in self.curves(name).items()}
            means = values[1:].mean(0)  # (5, N)
            found |= {f"attack/{name}/example_{key}": means[i].clone() for i, key in enumerate(VALUES[:2])}
        return found | {f"examples/fooling/{key}": value for key, value in self.fooling.items()}


def attacked_inputs(functions: FixedDraw, loader: Iterable[Any], spec: AttackCurves) -> AttackedInputs:
    """AttackedInputs of a loader."""
    posterior, member = functions.posterior, MAP(functions.drawn.member(0), likelihood=functions.posterior.likelihood)
    member.recalibrate(*copy.deepcopy(posterior.current_correction()))
    sources: dict[str, tuple[Posterior, Draw]] = dict.fromkeys(ATTACKS, (posterior, functions.drawn))
    sources["transfer"] = (member, "fixed")
    rows = []

    def labelled_batches() -> Iterator[tuple[batches.Inputs, Tensor]]:
        for x, y, _ in posterior.read(loader, anywhere=True):
            y = hard_labels(y)
            if functions.ignore_index is not None:
                kept = y != functions.ignore_index
                x, y = batches.map_tensors(x, lambda tensor, kept=kept: tensor[kept]), y[kept]  # type: ignore[misc]
            if len(y):
                yield x, y

    def work(batch: tuple[batches.Inputs, Tensor]) -> Tensor:
        images, y = cast(Tensor, batch[0]), batch[1]
        clean = example_values(functions, images, y)
        table = []
        for name in spec.names:
            attacked = (spec.apply(name, epsilon, *sources[name], images, y) for epsilon in spec.epsilons)
            table.append(torch.stack([clean, *(example_values(functions, each, y) for each in attacked)]))
        return torch.stack(table)  # (attacks, 1 + E, 5, B)

    # Gradients are of all functions together, whose parts would have to exchange graphs.
    for batch, values in functions.run_batches(work, labelled_batches(), whole=True):
        images = batch[0]
        rows.append(values)
    if not rows:
        raise ValueError("expected inputs to attack, got no batch; pass a loader that can be iterated more than once")
    fooling = fooling_inputs(functions, spec, images) if spec.fool_steps else {}
    return AttackedInputs(tuple(spec.names), tuple(map(float, spec.epsilons)), torch.cat(rows, 3), fooling)


def example_values(functions: FixedDraw, x: batches.Inputs, y: Tensor) -> Tensor:
    """(5, B) VALUES of inputs x."""
    predictive = cast(CategoricalPredictive, functions.predict(x).to("cpu"))
    log_mean, y = predictive.log_mean, y.cpu()
    scores = metrics.accuracy_values(log_mean.exp(), y), metrics.nll_values(log_mean, y)
    uncertainty = predictive.confidence.double(), metrics.total_uncertainty(log_mean), epistemic_uncertainty(predictive)
    return torch.stack([*scores, *uncertainty])


def fooling_inputs(functions: FixedDraw, spec: AttackCurves, like: Tensor) -> dict[str, Tensor]:
    """Fooling inputs for every class and their predictions; they start from the same noise for every posterior."""
    generator, classes = torch.Generator().manual_seed(0), functions.posterior.output_shape(like)[1]
    start = torch.empty(classes, *like.shape[1:])
    if spec.bounds is None:
        start.normal_(generator=generator)
    else:
        start.uniform_(*spec.bounds, generator=generator)
        start = start if spec.standardiser is None else spec.standardiser(start)
    where: dict[str, Any] = {"bounds": spec.bounds, "standardiser": spec.standardiser, "draw": functions.drawn}
    target = torch.arange(classes)
    found = attacks.fool(functions.posterior, start.to(like), target, steps=spec.fool_steps, **where).inputs
    reached, nll, _, total, epistemic = example_values(functions, found, target)
    inputs = (found if spec.standardiser is None else spec.standardiser.inverse(found)).cpu()
    uncertainty = {"total": total.clone(), "epistemic": epistemic.clone()}
    confidence = (-nll).exp()  # in the target
    return {"inputs": inputs, "target": target, "reached": reached.clone(), "confidence": confidence, **uncertainty}


FUNCTIONS, STEPS = 5, 60  # functions to search changes for, and steps of the search
PICTURES = 3  # inputs shown with their changes


def implicit_changes(
    posterior: Posterior, x: Tensor, standardiser: Standardiser, *, penalty: float
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """(metrics, arrays) of the implicit corruptions of x: distance in original units, explained share; {} for one function."""
    found = implicit_corruptions(posterior, x, penalty=penalty, functions=FUNCTIONS, steps=STEPS)
    if len(found.functions) == 1:
        return {}, {}
    before, after = standardiser.inverse(x), standardiser.inverse(found.inputs.cpu())  # (B, ...), (S, B, ...)
    moved = (after - before).flatten(2).square().mean(2).sqrt()  # (S, B)
    examples = {"distance": moved.mean(0), "explained": found.explained.mean(0).cpu()}  # (B,)
    drawn = {"original": before[:PICTURES], "inputs": after[:, :PICTURES].movedim(0, 1)}  # (n, ...), (n, S, ...)
    arrays = {f"implicit/{key}": value.contiguous() for key, value in (examples | drawn).items()}
    return {f"implicit/{key}": float(value.mean()) for key, value in examples.items()}, arrays
