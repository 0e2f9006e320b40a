"""torchmetrics classes over the plain functions; their states are sums, so they sync over processes.

`update` takes what the plain function of the same name takes, one batch at a time; `compute` equals the plain function
of all batches together. AUROC, AUPR and FPR95 are binned (`streaming.ScoreHistogram`). Imported on first use of one of
the classes: torchmetrics takes seconds to import, and is an extra (pip install 'dissensus[torchmetrics]').
"""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from dissensus.metrics import checks, proper, regression, streaming


class _Sums(Metric):
    """Base: states are the tensors of a tuple of sums, added over processes; `number` is what is read of them.

    Where `values` is a plain function of per-example values, `update` takes its tensors and adds the values up.
    """

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
            cls.update = _adding(values)

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
        """() of everything seen."""
        return type(self)._number(self.state)


class _Mean(NamedTuple):
    """Sum and number of per-example values."""

    total: Tensor
    count: Tensor  # type: ignore[assignment]  # tuple.count goes

    def mean(self) -> Tensor:
        return self.total / checks.not_empty(self.count[self.count > 0]).squeeze()

    def root(self) -> Tensor:
        return self.mean().sqrt()


def _adding(values: Callable[..., Tensor]) -> Callable[..., None]:
    """An `update` that takes the function's tensors; the metric's attributes are the function's keywords."""
    taken = inspect.signature(values).parameters.values()
    settings = [each.name for each in taken if each.kind is each.KEYWORD_ONLY]

    def update(self: _Sums, *tensors: Tensor, **named: Tensor) -> None:
        found = values(*tensors, **named, **{name: getattr(self, name) for name in settings})
        self.state = _Mean(self.state.total + found.sum(), self.state.count + found.numel())

    # A MetricCollection hands each metric those keywords that the signature of its `update` names.
    me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    tensors = [each for each in taken if each.name not in settings]
    update.__signature__ = inspect.Signature([me, *tensors])  # type: ignore[attr-defined]
    return update


class _MeanOfValues(_Sums, number=_Mean.mean):
    """Base: mean of per-example values."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(_Mean(torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)), **kwargs)


class _ClassMean(_MeanOfValues):
    """Base: mean of per-example values of class predictions, void places left out."""

    def __init__(self, *, ignore_index: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ignore_index = ignore_index


class Accuracy(_ClassMean, values=proper.accuracy_values, higher_is_better=True):
    """() `accuracy` of everything seen."""


class NLL(_ClassMean, values=proper.nll_values):
    """() `nll` of everything seen."""


class Brier(_ClassMean, values=proper.brier_values):
    """() `brier` of everything seen."""


class RMSE(_MeanOfValues, values=regression.squared_errors, number=_Mean.root):
    """() `rmse` of everything seen."""


class GaussianNLL(_MeanOfValues, values=regression.gaussian_nll_values):
    """() `gaussian_nll` of everything seen."""


class MixtureNLL(_MeanOfValues, values=regression.mixture_nll_values):
    """() `mixture_nll` of everything seen."""


class CRPS(_MeanOfValues, values=regression.crps_mixture_values):
    """() `crps_mixture` of everything seen."""


class IntervalCoverage(_MeanOfValues, values=regression.interval_coverage_values, higher_is_better=None):
    """() `interval_coverage` of everything seen; best at the interval's level."""


class ECE(_Sums, number=streaming.CalibrationBins.ece):
    """() `ece` of everything seen."""

    def __init__(self, *, bins: int = 15, ignore_index: int | None = None, **kwargs: Any) -> None:
        super().__init__(streaming.CalibrationBins.empty(bins), **kwargs)
        self.ignore_index = ignore_index

    def update(self, probabilities: Tensor, y: Tensor) -> None:
        self.state = self.state.update(probabilities, y, ignore_index=self.ignore_index)


class MIoU(_Sums, number=streaming.ConfusionCounts.miou, higher_is_better=True):
    """() `miou` of everything seen."""

    def __init__(self, *, classes: int, ignore_index: int | None = None, **kwargs: Any) -> None:
        super().__init__(streaming.ConfusionCounts.empty(classes), **kwargs)
        self.ignore_index = ignore_index

    def update(self, probabilities: Tensor, y: Tensor) -> None:
        self.state = self.state.update(probabilities, y, ignore_index=self.ignore_index)


class _Ranking(_Sums):
    """Base: a histogram of scores."""

    def __init__(self, *, bits: int = 18, **kwargs: Any) -> None:
        super().__init__(streaming.ScoreHistogram.empty(bits), **kwargs)

    def update(self, score_in: Tensor, score_ood: Tensor) -> None:
        self.state = self.state.update(score_in, score_ood)

    @property
    def histogram(self) -> streaming.ScoreHistogram:
        """ScoreHistogram seen by this process; its metrics carry bounds."""
        return streaming.ScoreHistogram(*self.state)


class AUROC(_Ranking, number=lambda histogram: histogram.auroc().value, higher_is_better=True):
    """() binned `auroc` of everything seen."""


class AUPR(_Ranking, number=lambda histogram: histogram.aupr().value, higher_is_better=True):
    """() binned `aupr` of everything seen."""


class FPR95(_Ranking, number=lambda histogram: histogram.fpr95().value):
    """() binned `fpr95` of everything seen."""


class Gathered(Metric):
    """Any plain function as a class: keeps every example it is given and applies the function to all of them.

    For what no sums can give: `Gathered(metrics.adaptive_ece)`, `Gathered(metrics.aurc)`, and, with examples on the second
    axis, functions of members (M, N, ...): `Gathered(metrics.disagreement, arguments=1, axis=1)`. `arguments`: how many
    tensors the function takes; `settings`: its keywords.
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
        """One batch of what the function takes."""
        if len(tensors) != len(self.names):
            raise ValueError(f"expected {len(self.names)} tensors, got {len(tensors)}; say how many with arguments=")
        for name, tensor in zip(self.names, tensors, strict=True):
            # Examples first, as torchmetrics joins them; labels (N,) among members (M, N, ...) are so already.
            getattr(self, name).append(tensor.movedim(self.axis, 0) if tensor.ndim > self.axis else tensor)

    def compute(self) -> Any:
        """The function of everything seen."""
        joined = [dim_zero_cat(getattr(self, name)) for name in self.names]
        return self.function(*(t.movedim(0, self.axis) if t.ndim > self.axis else t for t in joined), **self.settings)
