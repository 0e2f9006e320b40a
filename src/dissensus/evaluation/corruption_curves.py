"""Accuracy, likelihood and calibration on corrupted inputs, summed batch by batch; images are never stored.

Each severity is evaluated on all corruption types pooled, then severities are averaged: cA, cNLL and cECE (Hendrycks and
Dietterich, ICLR 2019; as in the CIFAR-C tables of Ovadia et al., NeurIPS 2019).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dissensus.core import batch as batches
from dissensus.core.predictive import CategoricalPredictive, Predictive
from dissensus.data.standardise import Standardiser
from dissensus.engine.prediction_loop import FixedDraw
from dissensus.evaluation.guarantees import CorruptedGuarantees, Promises
from dissensus.evaluation.loader_predictions import check_hard_labels, is_image
from dissensus.metrics.calibration import bin_sums, ece_from_sums
from dissensus.metrics.metric_inputs import labelled_rows

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
    """

    names: str | Sequence[str] = "all"
    severities: Sequence[int] = (1, 2, 3, 4, 5)
    seed: int = 0
    standardiser: Standardiser | None = None

    def __post_init__(self) -> None:
        if isinstance(self.names, str) and self.names not in ("all", "benchmark"):
            advice = f"pass a list with some of {', '.join(_corruption_module().CORRUPTIONS)}"
            raise ValueError(f'expected "all", "benchmark" or a list of corruptions, got {self.names!r}; {advice}')
        if not self.types or not self.severities:
            raise ValueError("expected at least one corruption and one severity, got none; pass None to leave them out")
        probe = torch.zeros(0, 1, 32, 32)
        for name in self.types:  # raise now rather than after the clean pass
            for severity in self.severities:
                _corruption_module().corrupt(probe, name, severity)

    @property
    def types(self) -> tuple[str, ...]:
        """The names of the corruptions, T of them, in order."""
        if not isinstance(self.names, str):
            return tuple(self.names)
        module = _corruption_module()
        known: dict[str, tuple[str, ...]] = {"all": module.CORRUPTIONS, "benchmark": module.BENCHMARK}
        return known[self.names]

    def apply(self, x: Tensor, name: str, severity: int, index: Tensor) -> Tensor:
        """Corrupts images x (B, C, H, W); returns them in the units of x.

        Args:
            x: images as the loader gives them.
            name: name of the corruption.
            severity: 1 to 5.
            index: (B,) positions of the images in the data set; they seed the noise.
        """
        if self.standardiser is None:
            found: Tensor = _corruption_module().corrupt(x, name, severity, seed=self.seed, index=index)
            return found
        pixels = self.standardiser.inverse(x)
        inside = pixels.clamp(0, 1)
        # Removes rounding errors; larger deviations raise.
        pixels = torch.where((pixels - inside).abs() < 1e-3, inside, pixels)
        return self.standardiser(_corruption_module().corrupt(pixels, name, severity, seed=self.seed, index=index))


def _corruption_module() -> ModuleType:
    """The module of corruptions, imported on first use."""
    from dissensus.data import corruptions

    return corruptions


def as_corruptions(value: str | Sequence[str] | Corruptions | None) -> Corruptions | None:
    """Converts the argument of `evaluate(corrupt=...)` to `Corruptions`."""
    return value if value is None or isinstance(value, Corruptions) else Corruptions(value)


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
        return {
            key: value for key, value in found.items() if not math.isnan(value)
        }  # the risk where nothing is accepted

    def by_severity(self) -> dict[str, Tensor]:
        """accuracy, nll and ece (S,) of each severity, types pooled."""
        total = self.counts.sum((0, 2)).double()  # (S,)
        pooled = (self.counts.sum(0), self.confidence.sum(0), self.correct.sum(0))  # (S, K) each
        accuracy, nll = self.correct.sum((0, 2)) / total, self.nll.sum(0) / total
        return {"accuracy": accuracy, "nll": nll, "ece": ece_from_sums(*pooled)}

    def by_type_and_severity(self) -> dict[str, Tensor]:
        """accuracy, nll and ece (T, S) of each type at each severity."""
        total = self.counts.sum(2).double()
        ece = ece_from_sums(self.counts, self.confidence, self.correct)
        return {"accuracy": self.correct.sum(2) / total, "nll": self.nll / total, "ece": ece}

    def arrays(self) -> dict[str, Tensor]:
        return {
            "corrupt/example_accuracy": self.example_accuracy,
            "corrupt/example_nll": self.example_nll,
            **{f"corrupt/{name}": table for name, table in self.by_type_and_severity().items()},
            **{f"corrupt/by_severity/{name}": values for name, values in self.by_severity().items()},
            **{f"corrupt/clean/{name}": self.clean[i] for i, name in enumerate(("accuracy", "nll", "ece"))},
        }


def corrupted_counts(
    functions: FixedDraw, loader: Iterable[Any], spec: Corruptions, *, tell: Callable[[int], object] | None = None
) -> CorruptedCounts:
    """CorruptedCounts of all inputs of a loader; after every batch, `tell` is called with the number of inputs done."""
    types, severities = spec.types, tuple(spec.severities)
    table = torch.zeros(len(types), len(severities), 1 + 3 * BINS, dtype=torch.float64)  # of `_Outcome.sums`
    clean = torch.zeros(1 + 3 * BINS, dtype=torch.float64)
    means, examples, seen = [], [], 0  # (3, B) and (3, T, S, B) of each batch
    promises = dict(functions.posterior.promises.items())
    promised = CorruptedGuarantees(promises)

    def work(batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Any, ...]:
        return _corrupt_batch(functions, spec, promises, *batch)

    for (_, y, _), (undamaged, sums, each, rows) in functions.run_batches(work, _indexed_images(functions, loader)):
        seen += len(y)
        clean += undamaged
        table += sums
        means.append(each.mean((1, 2)))
        examples.append(each.half())
        promised.merge(rows)
        if tell is not None:
            tell(seen)
    if not seen:
        raise ValueError("expected images to corrupt, got no batch; pass a loader that can be iterated more than once")
    nll, counts, confidence, correct = _split_sums(table)
    clean_nll, *bins = _split_sums(clean)
    total = bins[0].sum()
    _, example_accuracy, example_nll = torch.cat(means, dim=1)
    return CorruptedCounts(
        types=types,
        severities=severities,
        nll=nll,
        counts=counts,
        confidence=confidence,
        correct=correct,
        clean=torch.stack([bins[2].sum() / total, clean_nll / total, ece_from_sums(*bins)]),
        example_accuracy=example_accuracy,
        example_nll=example_nll,
        examples=torch.cat(examples, dim=-1),
        promised=promised.tables(),
    )


def _indexed_images(functions: FixedDraw, loader: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(images, labels, positions in the data set) of each batch."""
    first = 0
    for x, y, _ in functions.posterior.read(loader, anywhere=True):
        if not is_image(x):
            got = [tuple(t.shape) for t in batches.input_tensors(x)]
            raise ValueError(f"expected images (B, 1 or 3, H, W) to corrupt, got {got}; pass corrupt=None")
        check_hard_labels(y, functions)
        yield x, y, torch.arange(first, first + len(y))  # type: ignore[misc]
        first += len(y)


def _corrupt_batch(
    functions: FixedDraw, spec: Corruptions, promises: Promises, images: Tensor, y: Tensor, index: Tensor
) -> tuple[Any, ...]:
    """(sums (1 + 3K,) of clean images, sums (T, S, 1 + 3K), values (3, T, S, B), outcomes of promises) of a batch."""
    promised = CorruptedGuarantees(promises, seed=int(index[:1].sum()))  # from the first image's index
    images, y, index = (each.to(functions.device) for each in (images, y, index))
    clean = _outcome(functions.predict(images), y, functions.ignore_index).sums()
    shape = len(spec.types), len(spec.severities)
    sums = torch.zeros(*shape, len(clean), dtype=torch.float64)
    values = torch.zeros(3, *shape, len(y), dtype=torch.float64)
    for t, name in enumerate(spec.types):
        for s, severity in enumerate(spec.severities):
            damaged = spec.apply(images, name, severity, index)
            predictive = functions.predict(damaged)
            promised.add(t, s, predictive, damaged, y, functions.ignore_index)
            outcome = _outcome(predictive, y, functions.ignore_index)
            sums[t, s] = outcome.sums()
            values[:, t, s] = outcome.per_example(len(y))
    return clean, sums, values, promised.rows


def _split_sums(sums: Tensor) -> list[Tensor]:
    """nll (...), and counts, confidence and correctness (..., K) of the bins, from sums (..., 1 + 3K)."""
    return [each.clone() for each in (sums[..., 0], *sums[..., 1:].reshape(*sums.shape[:-1], 3, BINS).unbind(-2))]


@dataclass(frozen=True, eq=False)
class _Outcome:
    """One entry per labelled place (an example or a pixel), on the host."""

    confidence: Tensor  # (n,)
    correct: Tensor  # (n,) float64
    nll: Tensor  # (n,) float64
    example: Tensor  # (n,) index of its example

    def sums(self) -> Tensor:
        """(1 + 3K,) the summed nll, then counts, confidence and correctness of K bins."""
        return torch.cat([self.nll.sum()[None], *bin_sums(self.confidence, self.correct, BINS)])

    def per_example(self, examples: int) -> Tensor:
        """(3, B) mean confidence, accuracy and nll of each example."""
        values = torch.stack([self.confidence.double(), self.correct, self.nll])
        number = torch.bincount(self.example, minlength=examples).clamp(min=1)
        return torch.zeros(3, examples, dtype=torch.float64).index_add(1, self.example, values) / number


def _outcome(predictive: Predictive, y: Tensor, ignore_index: int | None) -> _Outcome:
    if not isinstance(predictive, CategoricalPredictive):
        raise ValueError("expected a classification to corrupt the inputs of, got a regression; pass corrupt=None")
    rows, labels = labelled_rows(predictive.log_mean, y, ignore_index, log=True)  # (n, C), (n,)
    example = torch.arange(len(y), device=y.device).reshape(-1, *[1] * (y.ndim - 1)).expand(y.shape)
    if ignore_index is not None:
        example = example[y != ignore_index]
    largest, prediction = rows.max(1)
    nll = -rows.gather(1, labels.unsqueeze(1)).squeeze(1)
    return _Outcome(
        confidence=largest.exp().cpu(),
        correct=(prediction == labels).double().cpu(),
        nll=nll.double().cpu(),
        example=example.flatten().cpu(),
    )
