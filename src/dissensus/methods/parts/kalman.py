"""Two scalar Kalman filters per weight, one for its mean and one for its variance, over the steps of an optimiser."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_not
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dissensus.kernels.multi_tensor import Chunks
from dissensus.numerics.flat_weights import Block, state_dtype
from dissensus.utils.counts import Count
from dissensus.utils.sharding import local_part
from dissensus.utils.tensor_tree import Tensors, TensorTree

Drift = Literal["gradient", "none"]


def kalman_step(p: float, state_noise: float, measurement_noise: float) -> tuple[float, float]:
    """(gain K, error variance P after the step) of a scalar filter with error variance p before the step."""
    predicted = p + state_noise
    gain = predicted / (predicted + measurement_noise)
    return gain, (1 - gain) * predicted


class WeightFilters(nn.Module):
    """Mean μ and variance s of every weight, in the shape of the weights and in at least float32.

    The gains do not depend on the data: one number for all weights, computed on the host in float64 from the step count.
    Everything else is computed for all weights at once, without synchronising with the device.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        state_noise: Sequence[float],
        measurement_noise: Sequence[float],
        drift: Drift,
    ) -> None:
        super().__init__()
        self.state_noise = state_noise
        self.measurement_noise = measurement_noise
        self.drift = drift
        self.weights = dict(weights)
        self.observed = Count()
        self.means = TensorTree()
        self.variances = TensorTree()
        dtype = state_dtype(list(weights.values()))
        for name, weight in weights.items():
            self.means.add_tensor(name, torch.zeros_like(weight, dtype=dtype).detach())
            self.variances.add_tensor(name, torch.zeros_like(weight, dtype=dtype).detach())
        self._cached: _FilterState | None = None
        self._named: list[Tensor] = []  # the tensors it was made of
        self._rates: dict[int, tuple[Tensor | None, int, float]] = {}
        self._clock = (0, 0.0, 0.0)  # step, P of the mean, P of the variance

    @property
    def mean(self) -> Tensors:
        """Name -> μ."""
        return dict(self.means.named_buffers())

    @property
    def variance(self) -> Tensors:
        """Name -> s."""
        return dict(self.variances.named_buffers())

    @torch.no_grad()
    def start(self, means: Mapping[str, Tensor], variances: Mapping[str, float]) -> None:
        """Sets μ and s and resets the step count."""
        for name, mean in self.mean.items():
            mean.copy_(means[name])
        for name, variance in self.variance.items():
            variance.fill_(variances[name])
        self.observed.reset()

    @torch.no_grad()
    def step(self, optimizer: Optimizer) -> None:
        """One step of both filters, after the optimiser's: w is the new weight, ∇L the gradient of that step."""
        weights = [local_part(weight) for weight in self.weights.values()]
        state, moved = self._filter_state(weights), self._group_gradients(optimizer)
        gain_mean, gain_variance = self._gains(self.observed.add())
        gains = (gain_mean, 1 - gain_variance, gain_variance * (1 - gain_mean) ** 2)
        # As torch's GradScaler does, `fit` leaves a flag with the optimiser that is 1 if it skipped the step.
        skipped = getattr(optimizer, "found_inf", None)
        if not state.step_fused(weights, moved, *gains, skipped=skipped):
            state.step(weights, moved, *gains)

    def _group_gradients(self, optimizer: Optimizer) -> list["_GroupGradients"]:
        """The weights of each parameter group that have gradients; none if there is no drift."""
        weights = list(self.weights.values())
        if all(weight.grad is None for weight in weights):
            raise ValueError("expected gradients in .grad, got none; call observe after the step, before zero_grad")
        place = {id(weight): index for index, weight in enumerate(weights)}
        moved = []
        for group in optimizer.param_groups:
            if held := [p for p in group["params"] if id(p) in place and p.grad is not None]:
                rate = self._rate(group["lr"])
                gradients = [local_part(p.grad) for p in held if p.grad is not None]
                rate = -rate if group.get("maximize") else rate
                moved.append(_GroupGradients(rate, [place[id(p)] for p in held], gradients))
        if not moved:
            raise ValueError("expected an optimizer of the network, got one of others; pass it posterior.parameters()")
        return moved if self.drift == "gradient" else []

    def _rate(self, rate: float | Tensor) -> float:
        """The learning rate as a number. A tensor (used by captured steps) is read only when it has changed."""
        if not isinstance(rate, Tensor):
            return float(rate)
        known, version, value = self._rates.get(id(rate), (None, -1, 0.0))
        if known is not rate or version != rate._version:
            value = float(rate)
            self._rates[id(rate)] = (rate, rate._version, value)
        return value

    def _gains(self, step: int) -> tuple[float, float]:
        """(K of the mean, K of the variance) at this step, counted from 1."""
        if self._clock[0] != step - 1:  # loaded from a file, or restarted
            self._clock = (0, 0.0, 0.0)
            for earlier in range(1, step):
                self._gains(earlier)
        _, p_mean, p_variance = self._clock
        gain_mean, p_mean = kalman_step(p_mean, self.state_noise[0], self.measurement_noise[0])
        gain_variance, p_variance = kalman_step(p_variance, self.state_noise[1], self.measurement_noise[1])
        self._clock = (step, p_mean, p_variance)
        return gain_mean, gain_variance

    @property
    def start_influence(self) -> float:
        """Π (1 − K): the share of μ that still comes from where it started."""
        share, p = 1.0, 0.0
        for _ in range(int(self.observed)):
            gain, p = kalman_step(p, self.state_noise[0], self.measurement_noise[0])
            share *= 1 - gain
            if share < 1e-12:
                return 0.0
        return share

    def _filter_state(self, weights: list[Tensor]) -> "_FilterState":
        """The filters' tensors, laid out in memory like the weights, so that copies between them are fused."""
        means, variances = self.means.parameters_and_buffers()[1], self.variances.parameters_and_buffers()[1]
        named = [*means.values(), *variances.values()]
        if self._cached is None or any(map(is_not, named, self._named)) or not self._cached.fits(weights):
            self._named = named
            dtype = next(iter(means.values())).dtype
            self._cached = _FilterState(
                [local_part(means[name]) for name in self.weights],
                [local_part(variances[name]) for name in self.weights],
                Block(weights, dtype),
                Block(weights, dtype),
            )
            cached = self._cached
            for buffers, block in ((cached.means, cached.mean), (cached.variances, cached.variance)):
                for buffer, view in zip(buffers, block.views, strict=True):
                    buffer.data = view.copy_(buffer)  # from now on the named tensor is this part of the block
        return self._cached


class _GroupGradients(NamedTuple):
    """One parameter group of an optimiser: its rate, which weights have gradients, and these."""

    rate: float
    at: list[int]
    gradients: list[Tensor]


@dataclass
class _FilterState:
    """The named tensors, and the blocks of memory they are parts of."""

    means: list[Tensor]
    variances: list[Tensor]
    mean: Block
    variance: Block
    chunks: list[Chunks] = field(default_factory=list)  # of each launch

    def fits(self, weights: list[Tensor]) -> bool:
        """Whether the memory layout of the weights and the storage of the named tensors are unchanged."""
        pairs = [*zip(self.means, self.mean.views, strict=True), *zip(self.variances, self.variance.views, strict=True)]
        return self.mean.has_layout_of(weights) and all(named.data_ptr() == view.data_ptr() for named, view in pairs)

    @functools.cached_property
    def work(self) -> Block:
        """As large as the means, for the plain form."""
        return Block(self.mean.views, self.mean.flat.dtype)

    def step(
        self, weights: list[Tensor], moved: list[_GroupGradients], gain: float, keep: float, spread: float
    ) -> None:
        """A step of the filters, by operations on whole blocks."""
        mean, variance, work = self.mean.flat, self.variance.flat, self.work.flat
        # Prediction: μ⁻ = μ − η∇L, s⁻ = s + (η∇L)²
        if moved:
            if sum(len(each.at) for each in moved) < len(weights):
                work.zero_()
            torch._foreach_copy_(
                [self.work.views[i] for each in moved for i in each.at], [g for each in moved for g in each.gradients]
            )
            # Non-finite gradients belong to a step that a gradient scaler skipped, so nothing moved. This is decided on the
            # device of the gradients, so that the host does not wait.
            total = work.sum()
            if work.device.type == "cpu":
                moved = moved if math.isfinite(total) else []
            else:
                work.masked_fill_(~total.isfinite(), 0.0)
        for rate, at, _ in moved:
            one = len(at) == len(weights)  # one rate for all: use one flat tensor
            means, variances, moves = (
                [block.flat] if one else [block.views[i] for i in at] for block in (self.mean, self.variance, self.work)
            )
            torch._foreach_add_(means, moves, alpha=-rate)
            torch._foreach_addcmul_(variances, moves, moves, rate**2)
        # μ ← (1 − K) μ⁻ + K w = μ⁻ + K (w − μ⁻)
        torch._foreach_copy_(self.work.views, weights)
        distance = work.sub_(mean)
        mean.add_(distance, alpha=gain)
        # eq. (4) of the paper measures the variance by z = w². Not here: E[w²] is s + μ², and subtracting μ² again gives
        # rounding errors as large as μ² and, while μ lags behind w, variances below 0. z = (w − μ)² with the new μ, as in the
        # authors' program, measures the same s and cannot be negative: s ← (1 − K) s⁻ + K (w − μ)². The distance from the
        # new μ is w − μ = (1 − K_μ)(w − μ⁻).
        variance.mul_(keep).addcmul_(distance, distance, value=spread)

    def step_fused(
        self,
        weights: list[Tensor],
        moved: list[_GroupGradients],
        *gains: float,
        skipped: Tensor | None = None,
        on: str = "cuda",
    ) -> bool:
        """The same by kernels that read and write everything once, one for each parameter group; False if it cannot.

        `skipped`: () above 0 if the step was skipped; None looks at the gradients.
        """
        if self.mean.flat.device.type != on or self.mean.flat.dtype != torch.float32:
            return False
        still = set(range(len(weights))).difference(*(each.at for each in moved))
        groups = [*moved, *([_GroupGradients(0.0, sorted(still), [])] if still else [])]
        self.chunks += [Chunks() for _ in groups[len(self.chunks) :]]
        for (_, at, gradients), chunks in zip(groups, self.chunks, strict=False):
            mine, means = [weights[i] for i in at], [self.mean.views[i] for i in at]
            places = [int(mean.storage_offset()) for mean in means]
            alike = [mean.stride() for mean in means] == [weight.stride() for weight in mine]
            if not (alike and chunks.find(mine, gradients or mine, rows=[places], on=on)):
                return False
        if skipped is None:
            skipped = torch.zeros((), device=self.mean.flat.device)
            for (_, _, gradients), chunks in zip(groups, self.chunks, strict=False):
                if gradients:
                    chunks.launch("look", skipped, KIND=gradients[0].dtype, ROW=1, SIZES=3)
        for (rate, at, gradients), chunks in zip(groups, self.chunks, strict=False):
            blocks, kind = (self.mean.flat, self.variance.flat), weights[at[0]].dtype
            drift = {"DRIFT": bool(gradients), "GRADIENT": gradients[0].dtype if gradients else kind}
            chunks.launch("filters", *blocks, skipped, rate, *gains, WEIGHT=kind, **drift)
        return True
