"""torchmetrics classes over the plain functions; their states are sums, so they sync over processes.

`update` takes what the plain function of the same name takes, one batch at a time; `compute` equals the plain function
of all batches together. AUROC, AUPR and FPR95 are binned (`streaming.ScoreHistogram`). Imported on first use of one of
the classes: torchmetrics takes seconds to import, and is an extra (pip install 'dissensus[torchmetrics]').
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from dissensus.metrics import checks, proper, regression, streaming


class _Sums(Metric):
    """Base: float64 or integer states that start at zero and are summed over processes."""

    full_state_update = False
    is_differentiable = False

    def add_sum(self, name: str, *shape: int, dtype: torch.dtype = torch.float64) -> None:
        self.add_state(name, torch.zeros(shape, dtype=dtype), dist_reduce_fx="sum")


class _MeanOfValues(_Sums):
    """Base: mean of per-example values."""

    total: Tensor
    count: Tensor
    higher_is_better: bool | None = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_sum("total")
        self.add_sum("count", dtype=torch.int64)

    def add(self, values: Tensor) -> None:
        self.total += values.sum()
        self.count += values.numel()

    def compute(self) -> Tensor:
        """() mean of everything seen."""
        return self.total / checks.not_empty(self.count[self.count > 0]).squeeze()


class _ClassMean(_MeanOfValues):
    """Base: mean of per-example values of class predictions, void places left out."""

    def __init__(self, *, ignore_index: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ignore_index = ignore_index


class Accuracy(_ClassMean):
    """() `accuracy` of everything seen."""

    higher_is_better = True

    def update(self, probabilities: Tensor, y: Tensor) -> None:
        self.add(proper.accuracy_values(probabilities, y, ignore_index=self.ignore_index))


class NLL(_ClassMean):
    """() `nll` of everything seen."""

    def update(self, log_probabilities: Tensor, y: Tensor) -> None:
        self.add(proper.nll_values(log_probabilities, y, ignore_index=self.ignore_index))


class Brier(_ClassMean):
    """() `brier` of everything seen."""

    def update(self, probabilities: Tensor, y: Tensor) -> None:
        self.add(proper.brier_values(probabilities, y, ignore_index=self.ignore_index))


class ECE(_Sums):
    """() `ece` of everything seen."""

    higher_is_better = False
    counts: Tensor
    confidence: Tensor
    correct: Tensor

    def __init__(self, *, bins: int = 15, ignore_index: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ignore_index = ignore_index
        self.add_sum("counts", bins, dtype=torch.int64)
        self.add_sum("confidence", bins)
        self.add_sum("correct", bins)

    def update(self, probabilities: Tensor, y: Tensor) -> None:
        state = streaming.CalibrationBins(self.counts, self.confidence, self.correct)
        self.counts, self.confidence, self.correct = state.update(probabilities, y, ignore_index=self.ignore_index)

    def compute(self) -> Tensor:
        return streaming.CalibrationBins(self.counts, self.confidence, self.correct).ece()


class MIoU(_Sums):
    """() `miou` of everything seen."""

    higher_is_better = True
    matrix: Tensor

    def __init__(self, *, classes: int, ignore_index: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ignore_index = ignore_index
        self.add_sum("matrix", classes, classes, dtype=torch.int64)

    def update(self, probabilities: Tensor, y: Tensor) -> None:
        state = streaming.ConfusionCounts(self.matrix).update(probabilities, y, ignore_index=self.ignore_index)
        self.matrix = state.matrix

    def compute(self) -> Tensor:
        return streaming.ConfusionCounts(self.matrix).miou()


class _Ranking(_Sums):
    """Base: a histogram of scores."""

    in_counts: Tensor
    ood_counts: Tensor

    def __init__(self, *, bits: int = 18, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        bins = len(streaming.ScoreHistogram.empty(bits).in_counts)
        self.add_sum("in_counts", bins, dtype=torch.int64)
        self.add_sum("ood_counts", bins, dtype=torch.int64)

    def update(self, score_in: Tensor, score_ood: Tensor) -> None:
        self.in_counts, self.ood_counts = self.histogram.update(score_in, score_ood)

    @property
    def histogram(self) -> streaming.ScoreHistogram:
        """ScoreHistogram seen by this process; its metrics carry bounds."""
        return streaming.ScoreHistogram(self.in_counts, self.ood_counts)


class AUROC(_Ranking):
    """() binned `auroc` of everything seen."""

    higher_is_better = True

    def compute(self) -> Tensor:
        return self.histogram.auroc().value


class AUPR(_Ranking):
    """() binned `aupr` of everything seen."""

    higher_is_better = True

    def compute(self) -> Tensor:
        return self.histogram.aupr().value


class FPR95(_Ranking):
    """() binned `fpr95` of everything seen."""

    higher_is_better = False

    def compute(self) -> Tensor:
        return self.histogram.fpr95().value


class RMSE(_MeanOfValues):
    """() `rmse` of everything seen."""

    def update(self, mean: Tensor, y: Tensor) -> None:
        mean, y = checks.same_shape(mean=mean, y=y)
        self.add((mean - y).square())

    def compute(self) -> Tensor:
        return super().compute().sqrt()


class GaussianNLL(_MeanOfValues):
    """() `gaussian_nll` of everything seen."""

    def update(self, mean: Tensor, variance: Tensor, y: Tensor) -> None:
        self.add(regression.gaussian_nll_values(mean, variance, y))


class MixtureNLL(_MeanOfValues):
    """() `mixture_nll` of everything seen."""

    def update(self, means: Tensor, variances: Tensor, y: Tensor) -> None:
        self.add(regression.mixture_nll_values(means, variances, y))


class CRPS(_MeanOfValues):
    """() `crps_mixture` of everything seen."""

    def update(self, means: Tensor, variances: Tensor, y: Tensor) -> None:
        self.add(regression.crps_mixture_values(means, variances, y))


class IntervalCoverage(_MeanOfValues):
    """() `interval_coverage` of everything seen."""

    higher_is_better = None  # best at the interval's level

    def update(self, lower: Tensor, upper: Tensor, y: Tensor) -> None:
        self.add(regression.interval_coverage_values(lower, upper, y))


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
        states = [getattr(self, name) for name in self.names]
        if not len(states[0]):
            raise ValueError("expected at least one update, got none; call update with a batch first")
        joined = [dim_zero_cat(state) for state in states]
        return self.function(*(t.movedim(0, self.axis) if t.ndim > self.axis else t for t in joined), **self.settings)
