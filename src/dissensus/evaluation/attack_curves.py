"""Metrics on attacked inputs at several ε, and on noise optimised to look like each class."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from dissensus import attacks, metrics
from dissensus.attacks import implicit_corruptions
from dissensus.attacks.gradient_attacks import Ball, Bounds, Draw, Norm
from dissensus.core import batch as batches
from dissensus.core.drawn_functions import FunctionPartition
from dissensus.core.loader import map_batches
from dissensus.core.posterior import Posterior
from dissensus.core.predictive import CategoricalPredictive, SummaryPredictive
from dissensus.data.standardise import Standardiser
from dissensus.engine.prediction_loop import FixedDraw
from dissensus.evaluation.loader_predictions import check_hard_labels
from dissensus.methods.map import MAP
from dissensus.metrics.calibration import confidence_ece
from dissensus.utils.checks import integer, one_of

ATTACKS = ("fgsm", "pgd", "transfer")
VALUES = ("accuracy", "nll", "confidence", "entropy", "mutual_information")  # per example
CURVES = ("accuracy", "nll", "ece", "entropy", "mutual_information")  # per ε


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
        where: dict[str, Any] = {"norm": self.norm, "bounds": self.bounds, "draw": draw}
        where["standardiser"] = self.standardiser
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
        for key in ("confidence", "entropy", "mutual_information"):
            if self.fooling:
                found[f"fool/{key}"] = float(self.fooling[key].mean())
        return found

    def arrays(self) -> dict[str, Tensor]:
        """attack/epsilons (1 + E,), attack/NAME/METRIC (1 + E,), attack/NAME/example_… (N,), examples/fooling/…."""
        found = {"attack/epsilons": torch.tensor([0.0, *self.epsilons], dtype=torch.float64)}
        for name, values in zip(self.names, self.values, strict=True):
            found |= {f"attack/{name}/{key}": curve for key, curve in self.curves(name).items()}
            means = values[1:].mean(0)  # (5, N)
            found |= {f"attack/{name}/example_{key}": means[i].clone() for i, key in enumerate(VALUES[:2])}
        return found | {f"examples/fooling/{key}": value for key, value in self.fooling.items()}


def attacked_inputs(
    functions: FixedDraw, loader: Iterable[Any], spec: AttackCurves, *, tell: Callable[[int], object] | None = None
) -> AttackedInputs:
    """AttackedInputs of a loader; after every batch, `tell` is called with the number of inputs done."""
    posterior, member = functions.posterior, MAP(functions.drawn.member(0), likelihood=functions.posterior.likelihood)
    member.recalibrate(*copy.deepcopy(posterior.current_correction()))
    sources: dict[str, tuple[Posterior, Draw]] = dict.fromkeys(ATTACKS, (posterior, functions.drawn))
    sources["transfer"] = (member, "fixed")
    rows, seen = [], 0

    def labelled_batches() -> Iterator[tuple[batches.Inputs, Tensor]]:
        for x, y, _ in posterior.read(loader, anywhere=True):
            check_hard_labels(y, functions)
            if functions.ignore_index is not None:
                kept = y != functions.ignore_index
                x, y = batches.map_tensors(x, lambda tensor, kept=kept: tensor[kept]), y[kept]  # type: ignore[misc]
            if len(y):
                yield x, y

    def work(batch: tuple[batches.Inputs, Tensor]) -> Tensor:
        images, y = cast(Tensor, batch[0]), batch[1]
        clean = example_values(functions, images, y)
        table = [
            [
                clean,
                *(example_values(functions, spec.apply(name, e, *sources[name], images, y), y) for e in spec.epsilons),
            ]
            for name in spec.names
        ]
        return torch.stack([torch.stack(each) for each in table])  # (attacks, 1 + E, 5, B)

    # Gradients are of all functions together, whose parts would have to exchange graphs.
    for batch, values in map_batches(posterior, work, labelled_batches(), FunctionPartition(functions.drawn)):
        images, y = batch
        rows.append(values)
        seen += len(y)
        if tell is not None:
            tell(seen)
    if not rows:
        raise ValueError("expected inputs to attack, got no batch; pass a loader that can be iterated more than once")
    fooling = fooling_inputs(functions, spec, images) if spec.fool_steps else {}
    return AttackedInputs(tuple(spec.names), tuple(map(float, spec.epsilons)), torch.cat(rows, 3), fooling)


def example_values(functions: FixedDraw, x: batches.Inputs, y: Tensor) -> Tensor:
    """(5, B) VALUES of inputs x."""
    predictive = cast(CategoricalPredictive, functions.predict(x).to("cpu"))
    summary = isinstance(predictive, SummaryPredictive)  # of a calibrated mean; it keeps the mutual information
    information = predictive.epistemic.double() if summary else metrics.mutual_information_score(predictive.log_probs)
    log_mean, y = predictive.log_mean, y.cpu()
    return torch.stack(
        [
            metrics.accuracy_values(log_mean.exp(), y),
            metrics.nll_values(log_mean, y),
            predictive.confidence.double(),
            metrics.entropy_score(log_mean),
            information,
        ]
    )


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
    reached, nll, _, entropy, information = example_values(functions, found, target)
    return {
        "inputs": (found if spec.standardiser is None else spec.standardiser.inverse(found)).cpu(),
        "target": target,
        "reached": reached.clone(),
        "confidence": (-nll).exp(),  # in the target
        "entropy": entropy.clone(),
        "mutual_information": information.clone(),
    }


FUNCTIONS, STEPS = 5, 60  # functions to search changes for, and steps of the search
PICTURES = 3  # inputs shown with their changes


def implicit_changes(
    posterior: Posterior, x: Tensor, standardiser: Standardiser, *, penalty: float
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """(metrics, arrays) of the implicit corruptions of standardised inputs x; empty for a single function.

    implicit/distance: root mean square change per input value, in units before standardisation. implicit/explained: share
    of the functions' deviation from their mean. Arrays hold both for every input (B,), and images to draw.
    """
    found = implicit_corruptions(posterior, x, penalty=penalty, functions=FUNCTIONS, steps=STEPS)
    if len(found.functions) == 1:
        return {}, {}
    before, after = standardiser.inverse(x), standardiser.inverse(found.inputs.cpu())  # (B, ...), (S, B, ...)
    moved = (after - before).flatten(2).square().mean(2).sqrt()  # (S, B)
    examples = {"distance": moved.mean(0), "explained": found.explained.mean(0).cpu()}  # (B,)
    drawn = {"original": before[:PICTURES], "inputs": after[:, :PICTURES].movedim(0, 1)}  # (n, ...), (n, S, ...)
    return (
        {f"implicit/{key}": float(value.mean()) for key, value in examples.items()},
        {f"implicit/{key}": value.contiguous() for key, value in (examples | drawn).items()},
    )
