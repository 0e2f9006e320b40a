"""Predicts, before training, whether the members of an embedded ensemble act as M independent networks or as one.

With γ = M the members' mean learns 1 + κ times as fast as their differences, where κ = (M − 1) Θ_o/Θ_d of shared weights.
κ ≤ ½ is the independent regime, κ ≥ 2 the collective one; values between are neither. Members count as independent only if
their outputs, too, have a correlation of at most ½/(M − 1) and ¼, and if the law of their factors agrees: `regime="auto"`
takes γ = M up to (M − 1)ρ = 1, and never for masks.

κ averages signed overlaps, which cancel; at a finite width the interference between members does not cancel. Random factors
of N nodes overlap by ±1/√N, so the other members together interfere with a share Σ cos² ≈ (M − 1)/N: the `crowding` of the
narrowest hidden layer. Above 0.075 (fewer than about 13 nodes per other member), members are not called independent. The limit
was set on the cells of the task `embedded-width` and tested on other data (docs/reference/details/embedded.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from torch import Tensor

from dissensus.core import batch as batches
from dissensus.core.batch import Batch, Inputs
from dissensus.core.posterior import Posterior
from dissensus.layers.conversion import CONVERTIBLE
from dissensus.layers.factored import ModulatedLayer
from dissensus.theory.kernel_inputs import check_examples
from dissensus.theory.stability import MemberOutputs, correlation_of, largest_rate, overlap
from dissensus.theory.wide_limit import ONES, Link, chain, wide_limit

RegimeKind = Literal["independent", "between", "collective"]
FEW, MANY = 0.5, 2.0  # members are independent up to the first κ, collective from the second
CROWDED = 0.075  # (M − 1)/N above which members are not independent


@dataclass(frozen=True)
class Regime:
    """The predicted regime of an embedded ensemble, made by `regime`; `str()` describes it in a sentence."""

    members: int
    gamma: float
    kind: RegimeKind | None  # None: unknown
    correlation: float | None  # of outputs in the wide limit, for random weights without biases; None: unknown
    overlap: float | None  # Θ_αβ/Θ_αα of shared weights: measured if inputs are given, else in the wide limit
    measured: bool
    rate: float | None  # largest stable learning rate of SGD on the inputs; None without inputs, or if it needs targets
    measured_correlation: float | None = None  # of the current members over the inputs, not centred
    remedy: str = ""  # a change that would make members independent, "" if none is known
    crowding: float = 0.0  # (M − 1)/N of the narrowest hidden layer
    crowded: bool = False  # whether members would be independent without the crowding

    @property
    def effective_members(self) -> float | None:
        """Effective number of members for random weights: M / (1 + max((M − 1) correlation, crowding)).

        None if the correlation is unknown.
        """
        if self.correlation is None:
            return None
        return self.members / (1 + max((self.members - 1) * self.correlation, self.crowding))

    @property
    def advice(self) -> str:
        """A suggested change, or "" if γ suits the members or the regime is unclear."""
        if self.members == 1:
            return ""
        if self.kind == "collective" and self.gamma > 1 + 1e-9:
            other = f", or {self.remedy}" if self.remedy else ""
            return f'γ = {self.gamma:g} only lowers the largest stable rate; pass regime="collective"{other}'
        if self.kind == "independent" and self.gamma < self.members / 2:
            slower = self.members / self.gamma
            return f'γ = {self.gamma:g} trains shared weights {slower:g} times slower; pass regime="independent"'
        if self.crowded:
            ratio = f"(M − 1)/N = {_two_decimals(self.crowding)} in the narrowest layer"
            return f"members crowd ({ratio}, more than {CROWDED:g}); pass fewer, or widen it"
        return ""

    def __str__(self) -> str:
        stable = "" if self.rate is None else f"; SGD is stable up to a learning rate of {self.rate:.3g}"
        if self.members == 1:
            return f"1 member with γ = {self.gamma:g} is one network{stable}"
        kinds = {"between": "between independent and collective", None: "of unknown regime (pass inputs to measure it)"}
        said = f"{self.members} members with γ = {self.gamma:g} are {kinds.get(self.kind, self.kind)}: correlation "
        if self.correlation is None:
            said += "unknown for random weights"
        else:
            said += f"{_two_decimals(self.correlation)} predicted for random weights without biases "
            said += f"({self.effective_members:.1f} effective)"
        if self.measured_correlation is not None:
            said += f", {_two_decimals(self.measured_correlation)} measured for these members on the inputs"
        if self.overlap is not None:
            where = "measured" if self.measured else "in the wide limit"
            said += f"; kernels between members {_two_decimals(self.overlap)} of those within, {where}"
        said += stable
        return f"{said}; {self.advice}" if self.advice else said


def regime(posterior: Posterior, x: Inputs | None = None, y: Tensor | None = None) -> Regime:
    """Predicts the `Regime` of an embedded ensemble from its current modulations; with inputs x its kernel is measured.

    The predicted correlation is that of random weights, for a chain of layers with ReLU and without biases; None if
    images, residuals or other activations leave it open. The measured correlation is that of the current members on x.

    Args:
        posterior: a `BatchEnsemble` or `DropoutEnsemble`.
        x: inputs (B, …); None predicts without measuring.
        y: targets of x, needed for the rate only if your own likelihood's `curvature` has no closed form.

    Returns:
        A `Regime`. Its rate is 2B/λ_max of the kernel over members × examples, for full batches x and SGD without
        momentum; for classification it is a bound; None without x. Momentum β raises the limit by a factor 1 + β for a
        quadratic; in training this is not guaranteed (docs/theory.md).
    """
    modulations: dict[str, Tensor] | None = getattr(posterior, "modulations", None)
    if modulations is None:
        got = type(posterior).__name__
        raise TypeError(f"expected an embedded ensemble, got {got}; pass a BatchEnsemble or a DropoutEnsemble")
    embedded: Any = posterior
    members, gamma = posterior.particles.members, float(embedded.gamma)
    correlation, between = wide_limit(posterior, modulations) if members > 1 else (0.0, 0.0)
    crowding = crowding_of(members, chain(posterior, modulations)) if members > 1 else 0.0
    rate = found = None
    if x is not None:
        check_examples(x)
        batches.check_finite(x, anywhere=True)
        posterior.check_inputs(x)
        outputs = MemberOutputs(posterior, x)
        if y is not None:
            posterior.check_batch(Batch.from_tuple((x, y)))
        rate = largest_rate(outputs, y)
        if members > 1:
            measured, found = overlap(outputs), correlation_of(outputs)
            between = None if math.isnan(measured) else measured
    law = getattr(posterior, "modulation", None)
    bound = math.inf if law is None else (members - 1) * law.collectivity
    kind = regime_kind(members, between, correlation, bound) if members > 1 else "independent"
    crowded = kind == "independent" and crowding > CROWDED
    facts = (correlation, between, x is not None, rate, found, remedy_of(posterior), crowding, crowded)
    return Regime(members, gamma, "between" if crowded else kind, *facts)


def regime_kind(members: int, overlap: float | None, correlation: float | None, bound: float) -> RegimeKind | None:
    """The regime as in the module's docstring; None if the overlap is unknown. `bound`: (M − 1)ρ of the factors' law."""
    if overlap is None:
        return None
    if (members - 1) * overlap >= MANY:
        return "collective"
    apart = correlation is None or max(members - 1, 2) * correlation <= FEW
    return "independent" if (members - 1) * overlap <= FEW and apart and bound <= 1 else "between"


def crowding_of(members: int, links: Sequence[Link]) -> float:
    """(M − 1)/N of the narrowest hidden layer whose nodes have factors; 0 if none has."""
    factors = [each for before, after in pairwise(links) for each in (before.s, after.r)]
    widths = [each.shape[1] for each in factors if each is not ONES]
    return (members - 1) / min(widths) if widths else 0.0


def remedy_of(posterior: Posterior) -> str:
    """A change that would make members independent."""
    law = getattr(posterior, "modulation", None)
    if law is None:
        return "a larger rate"
    if law.collectivity > 0:
        return "modulations with a mean of 0, such as Modulation.sign()"
    layers = [part for part in posterior.particles.template.network.modules() if isinstance(part, CONVERTIBLE)]
    if not all(isinstance(part, ModulatedLayer) for part in layers):
        return "convert the last layers too (layers=)"
    return "fewer members, or wider layers"


def _two_decimals(value: float) -> str:
    """The value with two decimals, without −0.00."""
    return f"{round(value, 2) + 0.0:.2f}"
