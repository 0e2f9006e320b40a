"""Predictives: the mixture over members, with its uncertainty split into aleatoric and epistemic."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from dissensus.utils.arrays import tensor_of
from dissensus.utils.checks import ListedAttributes, fraction, integer, number
from dissensus.utils.example_table import html_table, predictive_frame


class Predictive(ListedAttributes, ABC):
    """A posterior's prediction for B inputs, with its uncertainty; always `total = aleatoric + epistemic`.

    `len(predictive)` is B, `predictive[i]` is the prediction for some inputs, `Predictive.cat` joins batches. Base class
    of `ClassificationPredictive`, `MultiLabelPredictive` and `RegressionPredictive`, which keep all M members, and of
    `SummaryPredictive`. `targets` are those of the loader, if `ds.predict` or `ds.summarise` has read one; else None.
    `ignore_index` is the likelihood's: `log_prob` is 0 at such labels.
    """

    kind: ClassVar[str] = "other"  # what is predicted: "classification", "multilabel", "regression" or "tokens"
    targets: Tensor | None = None
    ignore_index: int | None = None
    _attribute_hints: ClassVar = {"members": "use member_means or log_probs", "probs": "use mean"}

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """(B, C, ...) probabilities or (B, D) means."""

    @property
    @abstractmethod
    def member_means(self) -> Tensor:
        """(M, B, C, ...) each member's probabilities, or (M, B, D) each member's mean."""

    @property
    def log_probs(self) -> Tensor:
        """(M, B, C, ...) each member's log-probabilities."""
        raise TypeError("expected a classification for log_probs, got a regression; use .member_means")

    @property
    @abstractmethod
    def aleatoric(self) -> Tensor:
        """Uncertainty within members: their mean entropy (B, ...) in nats, or mean noise variance (B, D)."""

    @property
    @abstractmethod
    def epistemic(self) -> Tensor:
        """Disagreement between members: mutual information (B, ...) in nats, or variance of the means (B, D)."""

    @property
    def total(self) -> Tensor:
        """aleatoric + epistemic: entropy of the mean in nats, or variance of the mixture."""
        return self.aleatoric + self.epistemic

    @abstractmethod
    def log_prob(self, y: Tensor) -> Tensor:
        """(B, ...) log-probability or log-density of y under the mixture; y in the form that the likelihood takes."""

    @abstractmethod
    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """(lower, upper), each of the mean's shape: the central interval with probability `level`, between 0 and 1.

        It has no coverage guarantee, even if `ds.conformal` was fitted: see `posterior.promises["conformal"]`.
        """

    @abstractmethod
    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """(n, B, ...) n draws of y from the mixture; `generator` must be on the predictive's device."""

    @abstractmethod
    def defining_tensors(self) -> tuple[Tensor, ...]:
        """The tensors that define this predictive, member axis first; they are stored and concatenated."""

    @abstractmethod
    def apply_temperature(self, temperature: float) -> Predictive:
        """A copy with each member's logits divided by the temperature, or its noise std multiplied by it."""

    @property
    def confidence(self) -> Tensor:
        """(B, ...) largest probability."""
        raise TypeError("expected a classification for a confidence, got a regression; use .total, a variance, instead")

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """One predictive for the inputs of all parts, in order."""
        if not parts:
            raise ValueError("expected at least one batch from the loader, got none; pass a loader with data")
        parts = parts[0].pad_parts(parts)
        if len(shapes := {tuple(tensor.shape[2:] for tensor in part.defining_tensors()) for part in parts}) > 1:
            found = sorted(tuple(each[0]) for each in shapes)
            raise ValueError(f"expected outputs of one shape, got {found}; pad the batches, or use ds.predict_batches")
        columns = zip(*(part.defining_tensors() for part in parts), strict=True)
        return parts[0]._like(torch.cat(each, dim=1) for each in columns)

    def _like(self, tensors: Iterable[Tensor]) -> Self:
        """A predictive of this kind, defined by other tensors."""
        return type(self)(*tensors).mark(self)

    def mark(self, like: Predictive) -> Self:
        """This predictive, with another's `ignore_index`."""
        self.ignore_index = like.ignore_index
        return self

    def pad_parts(self, parts: Sequence[Self]) -> Sequence[Self]:
        """Parts of one shape, for `cat`; as they are, unless outputs have positions that may be ignored."""
        return parts

    def to(self, target: torch.device | str | torch.dtype) -> Predictive:
        """A copy on another device or in another precision."""
        return self._like(tensor.to(target) for tensor in self.defining_tensors())

    def __getitem__(self, index: int | slice | Tensor) -> Predictive:
        """The predictive for some of the inputs; an int selects one and keeps the batch axis."""
        if isinstance(index, int):
            at = range(len(self))[index]
            index = slice(at, at + 1)
        return self._like(tensor[:, index] for tensor in self.defining_tensors())

    def __len__(self) -> int:
        return int(self.defining_tensors()[0].shape[1])

    def to_dataframe(self, targets: Tensor | None = None, *, classes: Sequence[str] = (), posterior: Any = None) -> Any:
        """A pandas.DataFrame with a row per input: truth, prediction, confidence or interval, and parts of the uncertainty.

        Args:
            targets: of the inputs; None takes `.targets`. Pixels count as means over an image, without ignored ones.
            posterior: the one that predicted: names the classes, and adds its conformal sets or intervals and its gates.
        """
        return predictive_frame(self, targets, classes, posterior)

    def plot(self, x: Tensor | None = None, *, seen: Any = None, classes: Sequence[str] = ()) -> Any:
        """A matplotlib figure of the prediction over its inputs x, on a line, in a plane, or for images.

        Args:
            x: the inputs of the prediction. (B,) or (B, 1): a regression with 90 % bands. (B, 2): total uncertainty over
                the plane. Images (B, channels, H, W): the first eight with their predictions, as maps for segmentations.
                None: the index of each input; segmentations are drawn without their images.
            seen: (inputs, targets) to draw as dots, such as the training data, or the targets of x: for images the truth.
            classes: names of the classes.
        """
        from dissensus.plots.charts import notebook_figure  # loads matplotlib
        from dissensus.plots.prediction_figures import predictive_figure

        return notebook_figure(predictive_figure(self, x, seen, classes))

    def _repr_html_(self) -> str:
        return html_table(self)

    def __repr__(self) -> str:
        shape = tuple(self.defining_tensors()[0].shape)
        return f"{type(self).__name__}(members={shape[0]}, inputs={shape[1]}, outputs={shape[2:]})"


class CategoricalPredictive(Predictive):
    """Base class: everything that follows from the mixture's log-probabilities, without the members."""

    kind = "classification"
    log_mean: Tensor  # (B, C, ...) log p̄
    class_axis: ClassVar[int] = 1  # of log_mean
    member_axis: ClassVar[int] = 2  # of log_probs, with members in front

    @property
    def mean(self) -> Tensor:
        return self.log_mean.exp()

    @property
    def confidence(self) -> Tensor:
        return self.mean.amax(self.class_axis)

    def log_prob(self, y: Tensor) -> Tensor:
        y = tensor_of(y)
        soft, axis = y.is_floating_point(), self.class_axis
        expected = self.log_mean.shape if soft else self.log_mean.select(axis, 0).shape
        if y.shape != expected:  # gather would accept a shorter y
            raise ValueError(f"expected targets of shape {tuple(expected)}, got {tuple(y.shape)}; pass one per input")
        if soft:  # (B, C, ...)
            return torch.where(y > 0, y * self.log_mean, 0.0).sum(axis)
        if self.ignore_index is None:
            return self.log_mean.gather(axis, y.long().unsqueeze(axis)).squeeze(axis)
        counted = y != self.ignore_index
        return self.log_mean.gather(axis, y.long().where(counted, 0).unsqueeze(axis)).squeeze(axis).where(counted, 0.0)

    def credible_set(self, level: float = 0.9) -> Tensor:
        """(B, C, ...) boolean: the fewest classes whose probabilities sum to at least `level`; not conformal: no guarantee."""
        number("level", level, above=0, most=1, hint="pass for example 0.9")
        ordered, order = self.mean.sort(dim=self.class_axis, descending=True)
        before = ordered.cumsum(self.class_axis) - ordered  # total probability of the likelier classes
        return torch.zeros_like(before, dtype=torch.bool).scatter(self.class_axis, order, before < level)

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """(n, B, ...) class indices."""
        rows = self.mean.movedim(self.class_axis, -1)  # (B, ..., C)
        integer("n", n)
        flat = torch.multinomial(rows.reshape(-1, rows.shape[-1]), n, replacement=True, generator=generator)
        return flat.T.reshape(n, *rows.shape[:-1])


class ClassificationPredictive(CategoricalPredictive):
    """A mixture of categorical distributions from members' log-probabilities (M, B, C) or (M, B, C, H, W).

    `mean` (B, C, ...) are probabilities, `log_mean` their logarithms, `confidence` (B, ...) the largest one;
    `member_means` (M, B, C, ...) are the members' probabilities, computed from the stored `log_probs` at each call;
    `aleatoric` is the members' mean entropy and `epistemic` their mutual information with the label, (B, ...) in nats.

    Args:
        log_probabilities: normalised over axis 2.
    """

    def __init__(self, log_probabilities: Tensor) -> None:
        self._log_probs = log_probabilities

    @cached_property
    def log_mean(self) -> Tensor:  # type: ignore[override]
        # log p̄ = log (1/M) Σ_m p_m
        each, count = self._log_probs, self._log_probs.shape[0]
        return each.logsumexp(0) - math.log(count) if count > 1 else each[0]

    @property
    def member_means(self) -> Tensor:
        return self._log_probs.exp()

    @property
    def log_probs(self) -> Tensor:
        return self._log_probs

    @cached_property
    def aleatoric(self) -> Tensor:
        # (1/M) Σ_m H[p_m]; 0 log 0 = 0
        each = entropy_terms(self._log_probs.exp()).sum(self.member_axis)
        return each.mean(0) if len(each) > 1 else each[0]  # whose mean takes as long as a layer

    @cached_property
    def epistemic(self) -> Tensor:
        if self._log_probs.shape[0] == 1:
            return self.aleatoric * 0  # NaN where that is
        # I = (1/M) Σ_m KL(p_m ‖ p̄) = H[p̄] − (1/M) Σ_m H[p_m]; the KL form is less prone to negative values by rounding.
        ratio = torch.where(self._log_probs == -math.inf, 0.0, self._log_probs - self.log_mean)
        return (self._log_probs.exp() * ratio).sum(self.member_axis).mean(0).clamp(min=0)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """(lower, upper) of the mean's shape: central quantiles over members of each class probability, without a guarantee."""
        tail = tail_probability(level)
        ordered = self._log_probs.exp().sort(dim=0).values  # torch.quantile refuses more than 2²⁴ entries
        return _linear_quantile(ordered, tail), _linear_quantile(ordered, 1 - tail)

    def defining_tensors(self) -> tuple[Tensor, ...]:
        return (self._log_probs,)

    def apply_temperature(self, temperature: float) -> ClassificationPredictive:
        return self._like([(self._log_probs / temperature).log_softmax(self.member_axis)])

    def summary_like(self, log_mean: Tensor, aleatoric: Tensor) -> ClassificationSummary:
        """The summary of a mixture of this kind: log p̄ (B, C, ...) and the members' mean entropy (B, ...)."""
        epistemic = (entropy_terms(log_mean.exp()).sum(self.class_axis) - aleatoric).clamp(min=0)
        return ClassificationSummary(log_mean[None], aleatoric[None], epistemic[None]).mark(self)


class RegressionPredictive(Predictive):
    """A mixture of Gaussians from members' means and variances (M, B, D).

    `mean` (B, D) of the `member_means` (M, B, D); `aleatoric` is the mean of the variances and `epistemic` the variance
    of the means, (B, D). `interval`, `quantile` and `cdf` are those of the mixture, for each output separately.

    Args:
        means, variances: (M, B, D) or (M, B), in the units of y and y².
    """

    kind = "regression"

    def __init__(self, means: Tensor, variances: Tensor) -> None:
        self._means, self.variances = means, variances

    @property
    def mean(self) -> Tensor:
        return self._means.mean(0)

    @property
    def member_means(self) -> Tensor:
        return self._means

    @property
    def aleatoric(self) -> Tensor:
        return self.variances.mean(0)

    @property
    def epistemic(self) -> Tensor:
        # Law of total variance: Var y = E[Var(y | member)] + Var(E[y | member])
        return self._means.var(0, correction=0)

    def log_prob(self, y: Tensor) -> Tensor:
        """(B,) log-density of the mixture; the outputs of one member are independent."""
        squares = (match_targets(y, self._means.shape[1:]) - self._means) ** 2
        each = -0.5 * (squares / self.variances + self.variances.log() + math.log(2 * math.pi))
        each = each.flatten(2).sum(2) if each.ndim > 2 else each  # (M, B)
        return each.logsumexp(0) - math.log(len(each))

    def cdf(self, y: Tensor) -> Tensor:
        """(B, D) P(Y ≤ y), for each output separately."""
        y = match_targets(y, self._means.shape[1:])
        below: Tensor = torch.special.ndtr((y - self._means) / self.variances.sqrt())  # (M, B, D)
        return below.mean(0)

    def quantile(self, q: float) -> Tensor:
        """(B, D) y with P(Y ≤ y) = q, for each output, by bisection to machine precision; q strictly between 0 and 1."""
        q = float(fraction("q", q, hint="pass for example 0.9"))
        reach = -torch.special.ndtri(torch.tensor(min(q, 1 - q), dtype=torch.float64))  # in standard deviations
        spread = self.variances.sqrt() * float(reach)
        # Every member's own quantile lies inside this bracket, so the mixture's does.
        lower, upper = (self._means - spread).amin(0), (self._means + spread).amax(0)
        for _ in range(80 if lower.dtype == torch.float64 else 40):
            middle = 0.5 * (lower + upper)
            below = self.cdf(middle) < q
            lower, upper = torch.where(below, middle, lower), torch.where(below, upper, middle)
        return 0.5 * (lower + upper)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """(lower, upper) of the mean's shape: the central interval of the mixture, for each output, without a guarantee."""
        tail = tail_probability(level)
        return self.quantile(tail), self.quantile(1 - tail)

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """(n, B, D) draws, each from one member chosen at random per input."""
        chosen = choose_members(self._means, n, generator)
        mean, std = self._means[chosen], self.variances[chosen].sqrt()  # (n, B, D)
        return mean + std * torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)

    def defining_tensors(self) -> tuple[Tensor, ...]:
        return self._means, self.variances

    def apply_temperature(self, temperature: float) -> RegressionPredictive:
        return RegressionPredictive(self._means, self.variances * temperature**2)


def choose_members(members: Tensor, n: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Indices (n, B), (B,) into the first two axes of members (M, B, ...): one member at random for each draw and input."""
    count, inputs = members.shape[:2]
    who = torch.randint(count, (integer("n", n), inputs), generator=generator, device=members.device)
    return who, torch.arange(inputs, device=members.device)


def as_column(y: Tensor, shape: Sequence[int]) -> Tensor:
    """Targets (B,) as a column (B, 1) where that is the shape of the means; others as they are."""
    return y[:, None] if tuple(shape) == (*y.shape, 1) and y.ndim == 1 else y


def match_targets(y: Tensor, shape: Sequence[int]) -> Tensor:
    """y as a tensor of the means' shape, since (B,) and (B, 1) would broadcast to (B, B). One number is for all."""
    y = as_column(tensor_of(y), shape)
    if y.ndim and tuple(y.shape) != tuple(shape):
        raise ValueError(f"expected targets of shape {tuple(shape)}, got {tuple(y.shape)}; reshape them")
    return y


def _linear_quantile(ordered: Tensor, q: float) -> Tensor:
    """The q-quantile along the sorted first axis, linear between order statistics."""
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return torch.lerp(ordered[low], ordered[high], position - low)


def tail_probability(level: float) -> float:
    """Probability on each side of a central interval."""
    return (1 - float(fraction("level", level, hint="pass for example 0.9"))) / 2


class SummaryPredictive(Predictive):
    """A prediction without its members: mean, aleatoric and epistemic; made by `summarise` and calibrations of the mean.

    It offers everything that a `Predictive` does, except what needs single members: `member_means` and `log_probs`
    raise, and for classes also `interval` and `apply_temperature`. A regression is treated as the Gaussian with the
    mixture's mean and variance.

    Args:
        centre: (1, B, ...), log of the mean probabilities, or the mean.
        aleatoric, epistemic: (1, B, ...).
    """

    def __init__(self, centre: Tensor, aleatoric: Tensor, epistemic: Tensor) -> None:
        self._described: tuple[Tensor, ...] = (centre, aleatoric, epistemic)

    @property
    def member_means(self) -> Tensor:
        raise TypeError(
            "expected a predictive with its members, got a summary; use ds.predict instead of ds.summarise, and a "
            "calibration of the members (temperature, vector) instead of one of their mean (isotonic, histogram)"
        )

    @property
    def log_probs(self) -> Tensor:
        return self.member_means  # raises

    @property
    def aleatoric(self) -> Tensor:
        return self._described[1][0]

    @property
    def epistemic(self) -> Tensor:
        return self._described[2][0]

    def defining_tensors(self) -> tuple[Tensor, ...]:
        return self._described

    def __repr__(self) -> str:
        return f"{type(self).__name__}(inputs={len(self)}, outputs={tuple(self._described[0].shape[2:])})"


class ClassificationSummary(SummaryPredictive, CategoricalPredictive):
    """log p̄ (1, B, C, ...), aleatoric and epistemic (1, B, ...) in nats."""

    def __init__(self, centre: Tensor, aleatoric: Tensor, epistemic: Tensor) -> None:
        super().__init__(centre, aleatoric, epistemic)
        self.log_mean = centre[0]

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        return ClassificationPredictive(self.log_probs).interval(level)

    def apply_temperature(self, temperature: float) -> Predictive:
        return ClassificationPredictive(self.log_probs).apply_temperature(temperature)


class RegressionSummary(SummaryPredictive):
    """Mean, aleatoric and epistemic variance (1, B, D): the Gaussian with the mixture's mean and variance."""

    kind = "regression"

    @property
    def mean(self) -> Tensor:
        return self._described[0][0]

    def _gaussian(self) -> RegressionPredictive:
        return RegressionPredictive(self.mean[None], self.total[None])

    def log_prob(self, y: Tensor) -> Tensor:
        """(B,) log-density of the Gaussian with the mixture's mean and variance, not of the mixture."""
        return self._gaussian().log_prob(y)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        return self._gaussian().interval(level)

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        return self._gaussian().sample(n, generator=generator)

    def apply_temperature(self, temperature: float) -> RegressionSummary:
        mean, aleatoric, epistemic = self._described
        return RegressionSummary(mean, aleatoric * temperature**2, epistemic)


class RunningSummary:
    """A summary updated with one member after the other, in the memory of a few members."""

    def __init__(self, predictives: Iterable[Predictive] = ()) -> None:
        self.count = 0
        self._sums: tuple[Tensor, ...] = ()
        self._kind: ClassificationPredictive | None = None  # without inputs; None for regressions
        for predictive in predictives:
            self.add(predictive)

    def add(self, predictive: Predictive) -> None:
        """Adds the members of one more predictive for the same inputs."""
        new = RunningSummary()
        if isinstance(predictive, ClassificationPredictive):
            new.count, new._kind = len(predictive.log_probs), predictive._like([torch.empty(1, 0, 0, 0)])
            log_sum = predictive.log_mean + math.log(new.count)  # (B, C, ...)
            new._sums = log_sum, predictive.aleatoric * new.count  # (B, ...)
        elif isinstance(predictive, RegressionPredictive):
            new.count = len(predictive.member_means)
            new._sums = predictive.mean, predictive.epistemic * new.count, predictive.aleatoric * new.count
        else:
            kind = type(predictive).__name__
            raise TypeError(f"expected a classification or regression to summarise, got {kind}; use ds.predict")
        self.merge(new)

    def merge(self, other: RunningSummary) -> None:
        """Takes in what another one has taken in, for the same inputs."""
        if self.count and self._kind is not None:
            self._sums = torch.logaddexp(self._sums[0], other._sums[0]), self._sums[1] + other._sums[1]
        elif self.count:
            # Chan, Golub & LeVeque 1979: means and scatters of two groups merged without cancellation.
            (mean, scatter, noise), total = other._sums, self.count + other.count
            shift = mean - self._sums[0]
            mean = self._sums[0] + shift * (other.count / total)
            scatter = self._sums[1] + scatter + shift**2 * (self.count * other.count / total)
            self._sums = mean, scatter, self._sums[2] + noise
        else:
            self._sums, self._kind = other._sums, other._kind
        self.count += other.count

    def summary(self) -> SummaryPredictive:
        """The summary of all members so far."""
        if self._kind is not None:
            return self._kind.summary_like(self._sums[0] - math.log(self.count), self._sums[1] / self.count)
        mean, scatter, noise = self._sums
        return RegressionSummary(mean[None], (noise / self.count)[None], (scatter / self.count)[None])


def entropy_terms(p: Tensor) -> Tensor:
    """−p log p, with 0 log 0 = 0; in a traced graph by operations that every exporter knows (torch 2.11: no ONNX `entr`)."""
    if torch.compiler.is_compiling():
        return -p * p.clamp_min(torch.finfo(p.dtype).tiny).log()
    return torch.special.entr(p)
