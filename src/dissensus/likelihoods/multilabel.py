"""MultiLabel: the likelihood of several labels per example, each present or not, and its predictive."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from dissensus.core.likelihood import Likelihood, full_precision
from dissensus.core.predictive import ClassificationPredictive, Predictive, choose_members, match_targets


class MultiLabel(Likelihood):
    """The likelihood of several labels per example, each present or not: independent Bernoulli, given logits (B, L).

    Targets (B, L) are 0 or 1, in any dtype, or numbers between, as mixup makes them. log p(y) is the sum over the L labels.
    """

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        return -binary_cross_entropy_with_logits(outputs, y.to(outputs.dtype), reduction="none").sum(1)  # (B,)

    def curvature(self, outputs: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return outputs.sigmoid() * (-outputs).sigmoid(), None

    def describe(self, outputs: Tensor) -> tuple[Tensor, ...]:
        return (full_precision(outputs),)

    def predictive(self, *described: Tensor) -> Predictive:
        return MultiLabelPredictive(*described)

    def check(self, output_shape: torch.Size, y: Tensor) -> None:
        if len(output_shape) != 2 or y.shape != output_shape:
            got = f"{tuple(output_shape)} and {tuple(y.shape)}; pass a 0 or 1 for every label"
            raise ValueError(f"expected logits and targets of one shape (B, L), got {got}")
        if y.device.type == "cpu" and y.numel() and not bool(((y >= 0) & (y <= 1)).all()):
            raise ValueError("expected targets from 0 to 1, got others; pass 1 for labels that are present, else 0")


class MultiLabelPredictive(Predictive):
    """A mixture over members of L independent labels, each present or not, from members' logits (M, B, L).

    `mean` (B, L) are the labels' probabilities, `member_means` (M, B, L) those of each member, `confidence` (B, L) that of the
    likelier answer. Labels are independent within a member, not in the mixture: `log_prob` (B,) is log (1/M) Σ_m Π_l p_m(y_l).
    `aleatoric`, `epistemic` and `total` (B,) are sums over labels, in nats, of what `per_label` has for each.

    Args:
        logits: (M, B, L).
    """

    kind = "multilabel"

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    @cached_property
    def per_label(self) -> ClassificationPredictive:
        """The labels as L classifications into absent (0) and present (1), with probabilities (B, 2, L)."""
        return ClassificationPredictive(torch.stack([logsigmoid(-self._logits), logsigmoid(self._logits)], 2))

    @property
    def mean(self) -> Tensor:
        return self.per_label.mean[:, 1]

    @property
    def member_means(self) -> Tensor:
        return self._logits.sigmoid()

    @property
    def confidence(self) -> Tensor:
        return self.per_label.confidence

    @property
    def aleatoric(self) -> Tensor:
        return self.per_label.aleatoric.sum(1)

    @property
    def epistemic(self) -> Tensor:
        return self.per_label.epistemic.sum(1)

    def member_log_prob(self, y: Tensor) -> Tensor:
        """(M, B) log-probability of y (B, L) under each member."""
        y = match_targets(y, self._logits.shape[1:]).to(self._logits.dtype)
        return torch.lerp(logsigmoid(-self._logits), logsigmoid(self._logits), y).sum(2)

    def log_prob(self, y: Tensor) -> Tensor:
        return self.member_log_prob(y).logsumexp(0) - math.log(len(self._logits))

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        lower, upper = self.per_label.interval(level)
        return lower[:, 1], upper[:, 1]

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """(n, B, L) labels 0 or 1, each row from one member chosen at random."""
        return torch.bernoulli(self.member_means[choose_members(self._logits, n, generator)], generator=generator)

    def defining_tensors(self) -> tuple[Tensor, ...]:
        return (self._logits,)

    def apply_temperature(self, temperature: float) -> MultiLabelPredictive:
        return self._like([self._logits / temperature])
