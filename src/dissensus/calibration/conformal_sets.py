"""Conformal: sets of classes and intervals that contain the truth with a guaranteed probability."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from dissensus.calibration.conformal_scores import CLASS_SCORES, class_scores, interval_ends
from dissensus.calibration.quantiles import add_tolerance, weighted_quantile
from dissensus.core.batch import Inputs
from dissensus.core.calibrated import Guarantee
from dissensus.core.predictive import CategoricalPredictive, Predictive

RowFunction = Callable[[Any], Tensor]  # inputs (B, ...) -> one number per row, (B,)


class Conformal(Guarantee):
    """Sets (`.set`) or intervals (`.interval`) with guaranteed coverage; made by `ds.conformal`, saved with the posterior.

    P(truth in the set) ≥ level over the randomness of a new row and the calibration rows, if these are exchangeable. For one
    given calibration, the coverage of new rows is a draw from about Beta(k, n + 1 − k), k = ⌈(n + 1) · level⌉.

    Public attributes: `level`, `score`, `rows` (number of calibration rows), `facts` (all settings).
    """

    kind = "conformal"
    scores: Tensor  # (n, P) of the calibration rows, group after group, sorted within each
    mass: Tensor  # (n, P) cumulative weights of the rows within their group
    sizes: Tensor  # (G,) rows in each group
    groups: Tensor  # (G,) the groups' numbers

    def __init__(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().__init__(facts, tensors)
        self.level = float(facts["level"])
        self.score = str(facts["score"])
        self.rows = len(self.scores)
        self.group_of: RowFunction | None = None  # files hold no functions: after loading, group numbers are passed
        self.weight_of: RowFunction | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # It moves with its posterior to another device, but keeps its precision, so that thresholds do not change.
        for name, tensor in self._buffers.items():
            self._buffers[name] = None if tensor is None else tensor.to(fn(tensor).device)
        return self

    def set(
        self,
        x: Inputs | Predictive,
        *,
        weight: Tensor | None = None,
        group: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """(B, K) boolean: the classes in each set. A set may be empty, if no class fits the input well enough.

        Args:
            x: one batch of inputs, or the posterior's `Predictive` for one.
            weight: (B,) ratio of the densities of shifted inputs and calibration inputs at x; required if the calibration
                rows had weights.
            group: (B,) integers, if groups were calibrated; required after loading, and with a `Predictive`.
            generator: generator for a randomised score; None is torch's global one.
        """
        if self.score not in CLASS_SCORES:
            raise TypeError(f"expected a classification for sets, got the score {self.score!r}; call .interval(x)")
        predictive, thresholds = self._resolve_inputs(x, weight, group)
        outputs = (self.facts["outputs"],)
        if not isinstance(predictive, CategoricalPredictive) or predictive.log_mean.shape[1:] != outputs:
            wanted = f"{self.facts['outputs']} classes per row"
            raise ValueError(f"expected {wanted}, got {predictive!r}; use its own posterior")
        return class_scores(predictive, self.facts, generator) <= add_tolerance(thresholds)

    def interval(
        self, x: Inputs | Predictive, *, weight: Tensor | None = None, group: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(lower, upper), each of the mean's shape: an interval for each output separately; arguments as in `set`.

        The ends are ∓∞ if there are too few calibration rows for finite ones, and equal if the interval is empty.
        """
        if self.score in CLASS_SCORES:
            raise TypeError(f"expected a regression for intervals, got the score {self.score!r}; call .set(x)")
        predictive, thresholds = self._resolve_inputs(x, weight, group)
        lower, upper, unit = interval_ends(predictive, self.score, self.level)  # (B, P)
        if lower.shape[1] != self.facts["outputs"]:
            wanted = f"{self.facts['outputs']} outputs per row"
            raise ValueError(f"expected {wanted}, got {predictive!r}; use its own posterior")
        lower, upper = lower - thresholds * unit, upper + thresholds * unit
        rounding = 16 * torch.finfo(predictive.mean.dtype).eps * torch.maximum(lower.abs(), upper.abs())
        # For equal inputs in another batch whose target is at an end.
        lower, upper = lower - rounding, upper + rounding
        middle = torch.where(lower > upper, 0.5 * (lower + upper), 0.0)
        ordered = torch.where(lower > upper, middle, lower), torch.where(lower > upper, middle, upper)
        mean = predictive.mean
        return ordered[0].reshape(mean.shape).to(mean.dtype), ordered[1].reshape(mean.shape).to(mean.dtype)

    def _resolve_inputs(
        self, x: Inputs | Predictive, weight: Tensor | None, group: Tensor | None
    ) -> tuple[Predictive, Tensor]:
        """(predictive, (B or 1, P or K) thresholds)."""
        posterior = self.posterior  # raises if its predictions have changed
        predictive = x if isinstance(x, Predictive) else posterior.predict(x)
        inputs = None if isinstance(x, Predictive) else posterior.transform_inputs(x)  # as in calibration
        rows, weighted = len(predictive), self.facts["weighted"]
        w = self._row_values("weight", weight, self.weight_of, inputs, rows) if weighted else torch.ones(1)
        by_group = self.facts["by"] == "group"
        g = self._row_values("group", group, self.group_of, inputs, len(predictive)) if by_group else None
        return predictive, self.thresholds(w.double(), g).to(predictive.defining_tensors()[0].device)

    def _row_values(self, name: str, given: Tensor | None, function: RowFunction | None, x: Any, rows: int) -> Tensor:
        found = given if given is not None or function is None or x is None else function(x)
        if found is None or found.shape != (rows,) or (name == "weight" and bool((found < 0).any())):
            got = "none" if found is None else f"{found.dtype} {tuple(found.shape)}, the least {float(found.min()):g}"
            least = ", at least 0" if name == "weight" else ""
            hint = f"calibration had one: pass {name}=, a tensor of shape ({rows},)"
            raise ValueError(f"expected a {name} for each of {rows} rows{least}, got {got}; {hint}")
        return found

    def thresholds(self, weight: Tensor, group: Tensor | None = None) -> Tensor:
        """(B, P), or (B, K) per class: the largest score in the set, for rows with these weights (B,) and groups (B,)."""
        weight = weight if self.facts["weighted"] else torch.ones(1, dtype=torch.float64)
        each = self._quantiles(weight)  # (G, B, P)
        if self.facts["by"] == "class":
            return each[..., 0].T
        if group is None:
            return each[0]
        same = group.to(each.device)[:, None] == self.groups  # (B, G)
        unseen = torch.full_like(each[:1], torch.inf)
        index = torch.where(same.any(1), same.int().argmax(1), len(each))
        rows = torch.arange(len(index), device=each.device)
        return torch.cat([each, unseen]).expand(-1, len(index), -1)[index, rows]

    def _quantiles(self, weight: Tensor) -> Tensor:
        """(G, B, P) thresholds of every group for rows with these weights (B,)."""
        sizes, weight = self.sizes.tolist(), weight.to(self.scores.device)
        parts = zip(torch.split(self.scores, sizes), torch.split(self.mass, sizes), strict=True)
        return torch.stack([weighted_quantile(scores, mass, self.level, weight) for scores, mass in parts])

    def __repr__(self) -> str:
        return f"Conformal({self.describe()})"

    def describe(self) -> str:
        """The guarantee in one sentence."""
        by = "" if self.facts["by"] is None else f", for every {self.facts['by']} separately"
        what = "sets" if self.score in CLASS_SCORES else "intervals"
        return f"{what} contain the truth with probability at least {self.level:g}{by} ({self.rows} calibration rows)"


class Coverage(NamedTuple):
    """Coverage and size of a conformal predictor's sets on labelled rows."""

    covered: Tensor  # (N,) share of outputs inside; 0 or 1 for a class
    size: Tensor  # (N,) number of classes in the set, or mean width


def measure_coverage(
    conformal: Conformal, predictive: Predictive, y: Tensor, generator: torch.Generator, **rows: Tensor | None
) -> Coverage:
    """`Coverage` for predictions of rows with targets y; `rows`: weight and group, if used."""
    if conformal.score in CLASS_SCORES:
        found = conformal.set(predictive, generator=generator, **rows)
        hit = found.gather(1, y.to(found.device)[:, None])[:, 0]
        return Coverage(hit.double(), found.sum(1).double())
    lower, upper = (end.double() for end in conformal.interval(predictive, **rows))
    inside = (lower <= y.to(lower.device)) & (y.to(lower.device) <= upper)
    rows_first = (len(y), -1)
    return Coverage(inside.double().reshape(rows_first).mean(1), (upper - lower).reshape(rows_first).mean(1))
