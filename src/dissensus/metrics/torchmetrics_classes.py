"""torchmetrics classes built on the plain functions; their states are sums, so they synchronise over processes.

`update` takes a batch of the arguments of the plain function of the same name, probabilities also for NLL; `compute` equals the
plain function of all batches. AUROC, AUPR and FPR95 are binned (`streaming.ScoreHistogram`). This file is imported on first use
of a class: torchmetrics is an extra, and takes seconds to import.
"""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from dissensus.metrics import classification, metric_inputs, regression, streaming
from dissensus.utils.arrays import tensor_of


class _Sums(Metric):
    """Base class whose states are sums; `number` computes the metric, `values` the numbers that `update` sums."""

    full_state_update = False
    is_differentiable = False
    update: Callable[..., None]
    _number: ClassVar[Callable[[Any], Tensor]]

    def __init_subclass__(
        cls,
        *,
        number: Callable[[Any], Tensor] | None = None,
        values: Callable[..., Tensor] | None = None,
        higher_is_better: bool | None = False,
    ) -> None:
        super().__init_subclass__()
        cls.higher_is_better = higher_is_better
        if number is not None:
            cls._number = staticmethod(number)
        if values is not None:
            cls.update = _mean_update(values)

    def __init__(self, empty: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._kind = type(empty)
        for name, zeros in empty._asdict().items():
            self.add_state(name, zeros, dist_reduce_fx="sum")

    @property
    def state(self) -> Any:
        """The sums seen by this process."""
        return self._kind(*(getattr(self, name) for name in self._kind._fields))

    @state.setter
    def state(self, new: Any) -> None:
        for name, tensor in new._asdict().items():
            setattr(self, name, tensor)

    def compute(self) -> Tensor:
        """() The metric of all batches."""
        return type(self)._number(self.state)

    def _keep_apart(self, *settings: object) -> None:
        """Stops a MetricCollection from sharing these states with those of a metric that equal them on the first batch."""
        self.add_state("_".join(map(str, (type(self).__name__, *settings))), torch.zeros(()), dist_reduce_fx="sum")


class _Mean(NamedTuple):
    total: Tensor
    count: Tensor  # type: ignore[assignment]  # tuple.count goes

    def mean(self) -> Tensor:
        return self.total / metric_inputs.nonempty_values(self.count[self.count > 0]).squeeze()

    def root(self) -> Tensor:
        return self.mean().sqrt()


def _mean_update(values: Callable[..., Tensor]) -> Callable[..., None]:
    """An `update` that takes the function's tensors; the function's keywords come from the metric's attributes."""
    taken = inspect.signature(values).parameters.values()
    settings = [each.name for each in taken if each.kind is each.KEYWORD_ONLY]

    def update(self: _Sums, *tensors: Tensor, **named: Tensor) -> None:
        found = values(*tensors, **named, **{name: getattr(self, name) for name in settings})
        self.state = _Mean(self.state.total + found.sum(), self.state.count + found.numel())

    # A MetricCollection passes each metric the keywords in the signature of its `update`.
    me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    tensors = [each for each in taken if each.name not in settings]
    update.__signature__ = inspect.Signature([me, *tensors])  # type: ignore[attr-defined]
    return update


class _MeanOfValues(_Sums, number=_Mean.mean):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(_Mean(torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)), **kwargs)
        self._keep_apart()


class _ClassMean(_MeanOfValues):
    """Base: mean of per-example values of class predictions, without void places."""

    def __init__(self, *, ignore_index: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ignore_index = ignore_index
        self._keep_apart(ignore_index)


class Accuracy(_ClassMean, values=classification.accuracy_values, higher_is_better=True):
    """torchmetrics class of `accuracy`: compute() gives () over all batches."""


def _nll_values(probabilities: Tensor, y: Tensor, *, ignore_index: int | None = None) -> Tensor:
    """(n,) −log p(y) per example, of probabilities or their logarithms: the lowest of two or more is at most −log 2."""
    values = tensor_of(probabilities, torch.float64)
    log = bool((values < -metric_inputs.TOLERANCE).any())
    return classification.nll_values(values if log else values.clamp(min=0).log(), y, ignore_index=ignore_index)


class NLL(_ClassMean, values=_nll_values):
    """torchmetrics class of `nll`: compute() gives () over all batches; `update` takes probabilities or their logarithms."""


class Brier(_ClassMean, values=classification.brier_values):
    """torchmetrics class of `brier`: compute() gives () over all batches."""


class RMSE(_MeanOfValues, values=regression.squared_errors, number=_Mean.root):
    """torchmetrics class of `rmse`: compute() gives () over all batches."""


class GaussianNLL(_MeanOfValues, values=regression.gaussian_nll_values):
    """torchmetrics class of `gaussian_nll`: compute() gives () over all batches."""


class MixtureNLL(_MeanOfValues, values=regression.mixture_nll_values):
    """torchmetrics class of `mixture_nll`: compute() gives () over all batches."""


class CRPS(_MeanOfValues, values=regression.crps_mixture_values):
    """torchmetrics class of `crps_mixture`: compute() gives () over all batches."""


class IntervalCoverage(_MeanOfValues, values=regression.interval_coverage_values, higher_is_better=None):
    """torchmetrics class of `interval_coverage`: compute() gives () over all batches; best at the interval's level."""


class _LabelledCounts(_Sums):
    """Base: counts of class predictions, without void places."""

    def __init__(self, empty: Any, ignore_index: int | None, **kwargs: Any) -> None:
        super().__init__(empty, **kwargs)
        self.ignore_index = ignore_index
        self._keep_apart(ignore_index)

    def update(self, probabilities: Tensor, y: Tensor) -> None:
        self.state = self.state.update(probabilities, y, ignore_index=self.ignore_index)


class ECE(_LabelledCounts, number=streaming.CalibrationBins.ece):
    """torchmetrics class of `ece`: compute() gives () over all batches."""

    def __init__(self, *, bins: int = 15, ignore_index: int | None = None, **kwargs: Any) -> None:
        super().__init__(streaming.CalibrationBins.empty(bins), ignore_index, **kwargs)


class MIoU(_LabelledCounts, number=streaming.ConfusionCounts.miou, higher_is_better=True):
    """torchmetrics class of `miou`: compute() gives () over all batches."""

    def __init__(self, *, classes: int, ignore_index: int | None = None, **kwargs: Any) -> None:
        super().__init__(streaming.ConfusionCounts.empty(classes), ignore_index, **kwargs)


class _Ranking(_Sums):
    def __init__(self, *, bits: int = 18, **kwargs: Any) -> None:
        super().__init__(streaming.ScoreHistogram.empty(bits), **kwargs)

    def update(self, score_in: Tensor, score_ood: Tensor) -> None:
        self.state = self.state.update(score_in, score_ood)

    @property
    def histogram(self) -> streaming.ScoreHistogram:
        """The ScoreHistogram of this process; its metrics have error bounds."""
        return streaming.ScoreHistogram(*self.state)


class AUROC(_Ranking, number=lambda histogram: histogram.auroc().value, higher_is_better=True):
    """torchmetrics class of `auroc`, binned: compute() gives () over all batches."""


class AUPR(_Ranking, number=lambda histogram: histogram.aupr().value, higher_is_better=True):
    """torchmetrics class of `aupr`, binned: compute() gives () over all batches."""


class FPR95(_Ranking, number=lambda histogram: histogram.fpr95().value):
    """torchmetrics class of `fpr95`, binned: compute() gives () over all batches."""


class Gathered(Metric):
    """Turns any plain function into a torchmetrics class, which stores all examples and applies the function to them.

    For metrics that sums cannot give: `Gathered(metrics.adaptive_ece)`, `Gathered(metrics.aurc)`; for functions of members
    (M, N, ...), whose examples lie on the second axis, `Gathered(metrics.disagreement, arguments=1, axis=1)`.

    Args:
        function: the plain function.
        arguments: number of tensors the function takes.
        axis: axis of the examples.
        settings: keywords of the function.
    """

    full_state_update = False
    is_differentiable = False

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        arguments: int = 2,
        axis: int = 0,
        settings: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.function, self.axis, self.settings = function, axis, settings or {}
        self.names = [f"argument{i}" for i in range(arguments)]
        for name in self.names:
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, *tensors: Tensor) -> None:
        """Adds one batch of the function's arguments."""
        if len(tensors) != len(self.names):
            raise ValueError(f"expected {len(self.names)} tensors, got {len(tensors)}; pass their number as arguments=")
        for name, tensor in zip(self.names, tensors, strict=True):
            # torchmetrics concatenates along the first axis, so examples go first; labels (N,) beside members are so already.
            getattr(self, name).append(tensor.movedim(self.axis, 0) if tensor.ndim > self.axis else tensor)

    def compute(self) -> Any:
        """The function applied to all examples."""
        joined = [dim_zero_cat(getattr(self, name)) for name in self.names]
        return self.function(*(t.movedim(0, self.axis) if t.ndim > self.axis else t for t in joined), **self.settings)
