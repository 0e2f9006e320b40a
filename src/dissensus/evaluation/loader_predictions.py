"""Predictions for a whole loader: the members' outputs, the targets, and a few inputs to look at."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dissensus.core import batch as batches
from dissensus.core.batch import Batch, Inputs
from dissensus.core.predictive import CategoricalPredictive, ClassificationPredictive, Predictive, SummaryPredictive
from dissensus.engine.loader import with_placeholder_targets
from dissensus.engine.prediction_loop import Answer, FixedDraw
from dissensus.evaluation.evaluation import PredictionKind
from dissensus.evaluation.guarantees import RowValues, guarantee_outcomes, join_outcomes
from dissensus.metrics import disagreement, max_probability_score

log = logging.getLogger("dissensus")

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions of one draw for all inputs of a loader, on the host."""

    predictive: Any  # Predictive of the kind that the MetricFunctions take
    targets: Tensor  # (N,) classes, (N, C) soft or several labels, or (N, D) values; (0,) for a set without labels
    energy: Tensor | None  # (M, N)
    examples: dict[str, Tensor]  # from Extremes.arrays; empty if inputs are not images
    shapes: Shapes | None  # of one input; None if it differs between batches, as for padded sequences
    milliseconds: float  # per input, in the loader's batches
    networks: int = 1  # number of networks; members are their functions, network by network
    row_outcomes: RowValues = field(default_factory=dict)  # outcomes of the posterior's promises for each row

    @property
    def members(self) -> int:
        """Number of members; 1 if a calibration of their mean left only a summary."""
        single = isinstance(self.predictive, SummaryPredictive)
        return 1 if single else int(self.predictive.defining_tensors()[0].shape[0])

    @property
    def labels(self) -> Tensor:
        """(N,) the true classes of a classification; of soft labels the likeliest."""
        return hard_labels(self.targets)

    def network_metrics(self) -> dict[str, float]:
        """Metrics of single networks, each with the mixture of its functions; empty for one network or one function each."""
        if not 1 < self.networks < self.members:
            return {}
        tensors = self.predictive.defining_tensors()
        parts = zip(*(tensor.double().chunk(self.networks) for tensor in tensors), strict=True)
        mixtures = [self.predictive._like(part) for part in parts]
        log_probs = torch.stack([mixture.log_prob(self.targets) for mixture in mixtures])
        found = {"networks/count": float(self.networks), "networks/nll": -float(log_probs.mean())}
        if isinstance(self.predictive, ClassificationPredictive):
            found["networks/disagreement"] = float(disagreement(torch.stack([m.mean.log() for m in mixtures])))
        return found


class MetricFunctions(NamedTuple):
    """The metric functions of one kind of predictions."""

    kind: PredictionKind
    metrics: Callable[[Predictions], dict[str, float]]
    arrays: Callable[[Predictions], dict[str, Tensor]]
    scores: Callable[[Predictions], dict[str, Tensor]]  # (N,) float64, higher = more foreign
    members: Callable[[Predictions], dict[str, float]]  # empty for a single member


def predictions(
    functions: FixedDraw,
    loader: Iterable[Any],
    *,
    name: str = "test",
    labelled: bool = True,
    like: Shapes | None = None,
    picture: Callable[[Tensor], Tensor] | None = None,
) -> Predictions:
    """Predictions for all inputs of a loader of (x, y), in its order.

    `labelled`: whether y belongs to the functions' task; if not, as for OOD inputs, y is not read and the loader may give x
    alone. `like`: required shapes of inputs. `picture`: turns inputs into images to show; None shows them unchanged.
    """
    found = _Collection(functions, labelled, picture)
    given = loader if labelled else map(with_placeholder_targets, loader)

    def check(batch: Batch) -> None:
        check_shapes(batch.x, like, name)
        if labelled:
            functions.posterior.check_batch(batch)

    def shown_tensors(batch: Batch) -> list[Tensor]:
        images = [batch.x] if isinstance(batch.x, Tensor) and is_image(batch.x) else []
        return [batch.y, *images] if labelled else []

    said, seconds = False, list[tuple[float, int]]()
    for batch, answer, tensors, taken in functions.answers(given, check, shown_tensors):
        said = warn_of_weights(batch.weight, name, said)
        seconds.append((taken, batch.size))
        found.add(batch, answer, tensors)
    if not found.answers:
        raise ValueError(f"expected batches in {name!r}, got none; is it empty, or a generator that is used up?")
    energies = [answer.energy for answer in found.answers if answer.energy is not None]
    timed = seconds[1:] or seconds  # the first batch includes one-time setup
    return Predictions(
        predictive=Predictive.cat([answer.predictive for answer in found.answers]),
        targets=torch.cat(found.targets),
        energy=torch.cat(energies, 1) if energies else None,
        examples=found.extremes.arrays(),
        shapes=found.shapes.pop() if len(found.shapes) == 1 else None,
        milliseconds=1000 * sum(s for s, _ in timed) / sum(n for _, n in timed),
        networks=functions.drawn.networks,
        row_outcomes=join_outcomes(found.outcomes),
    )


class _Collection:
    """What is kept of the batches of a loader: answers, targets, outcomes of promises, a few inputs to look at."""

    def __init__(self, functions: FixedDraw, labelled: bool, picture: Callable[[Tensor], Tensor] | None = None) -> None:
        self.labelled, self.picture = labelled, picture
        self.ignored = functions.ignore_index if labelled else None
        self.promises = dict(functions.posterior.promises.items())
        self.generator = torch.Generator().manual_seed(0)
        self.answers: list[Answer] = []
        self.targets: list[Tensor] = []
        self.outcomes: list[RowValues] = []
        self.extremes, self.shapes, self.seen = Extremes(), set[Shapes](), 0

    def add(self, batch: Batch, answer: Answer, tensors: list[Tensor]) -> None:
        """Adds a batch; `tensors`: its targets, and its inputs if they are images, on the host; none without labels."""
        x, y, weight = batch
        y, *images = tensors or [y]
        self.shapes.add(shapes_of(x))
        if self.ignored is not None and not y.is_floating_point():
            counted = y != self.ignored
            answer = select_rows(answer, counted)
            x, y = batches.map_tensors(batches.move_to_device(x, counted.device), itemgetter(counted)), y[counted]
            images = [each[counted] for each in images]
            weight = None if weight is None else weight.cpu()[counted]
        index = torch.arange(self.seen, self.seen + len(answer.predictive))  # in the arrays test/…
        self.seen += len(index)
        if images and len(self.shapes) == 1 and isinstance(answer.predictive, CategoricalPredictive) and len(index):
            log_mean = answer.predictive.log_mean
            shown = images[0] if self.picture is None else self.picture(images[0])
            self.extremes.update(max_probability_score(log_mean), log_mean.argmax(1) == hard_labels(y), index, shown)
        if self.promises:
            true = None if not self.labelled else hard_labels(y) if answer.predictive.kind == "classification" else y
            rows = guarantee_outcomes(self.promises, answer.predictive, self.generator, y=true, x=x, weight=weight)
            self.outcomes.append(rows)
        self.answers.append(answer)
        self.targets.append(y if self.labelled else torch.empty(0))


def warn_of_weights(weight: Tensor | None, name: str, said: bool) -> bool:
    """Warns once if weights are not 1, because metrics ignore them; returns whether the warning was given."""
    if weight is None or said or not bool((weight != 1).any()):
        return said
    hint = "remove examples that should not count"
    log.warning("the weights in %r are ignored: metrics count every example once; %s", name, hint)
    return True


def shapes_of(x: Inputs) -> Shapes:
    """The shapes of one input."""
    return tuple(tuple(tensor.shape[1:]) for tensor in batches.input_tensors(x))


def check_shapes(x: Inputs, like: Shapes | None, name: str) -> None:
    """Raises if the shapes of one input differ from those of a test set whose inputs all have one shape."""
    if like is not None and (shapes := shapes_of(x)) != like:
        got = f"{_shapes_text(shapes)}; resize them or convert their channels first"
        raise ValueError(f"expected inputs of shape {_shapes_text(like)} in {name!r}, as in the test set, got {got}")


def hard_labels(y: Tensor) -> Tensor:
    """(N,) class indices: y itself, or the likeliest class of soft labels (N, C)."""
    return y.argmax(1) if y.is_floating_point() and y.ndim > 1 else y


def is_image(x: Inputs) -> bool:
    """Whether inputs are images (B, 1 or 3, H, W)."""
    return isinstance(x, Tensor) and x.ndim == 4 and x.shape[1] in (1, 3)


def select_rows(answer: Answer, keep: Tensor) -> Answer:
    """The answer for some of the inputs; keep: (B,) boolean."""
    return Answer(answer.predictive[keep], None if answer.energy is None else answer.energy[:, keep])


def _shapes_text(shapes: Shapes) -> str:
    return " and ".join(map(str, shapes)) if shapes else "()"


GROUPS = ("most", "least", "mistakes")


@dataclass
class Extremes:
    """Keeps `count` inputs of each group over all batches; other inputs are not stored."""

    count: int = 8
    # rank, index, inputs; first is best
    best_by_group: dict[str, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def update(self, score: Tensor, correct: Tensor, index: Tensor, inputs: Tensor) -> None:
        """Adds a batch. score (B,): higher = less certain; correct (B,) boolean; index (B,) positions; inputs (B, ...)."""
        every = torch.ones_like(correct)
        for group, rank, among in (("most", -score, every), ("least", score, every), ("mistakes", -score, ~correct)):
            found = (rank[among], index[among], inputs[among])
            if group in self.best_by_group:
                found = tuple(torch.cat(pair) for pair in zip(self.best_by_group[group], found, strict=True))  # type: ignore[assignment]
            best = torch.argsort(found[0], descending=True, stable=True)[: self.count]
            self.best_by_group[group] = (found[0][best], found[1][best], found[2][best])

    def arrays(self) -> dict[str, Tensor]:
        """`examples/GROUP/index` (K,) and `examples/GROUP/inputs` (K, ...) of every group."""
        return {
            f"examples/{group}/{name}": tensor
            for group, (_, index, inputs) in self.best_by_group.items()
            for name, tensor in (("index", index), ("inputs", inputs))
        }
