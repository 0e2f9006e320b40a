"""Embedded ensembles: M members that share weights and differ by their own factors (after a talk on Embedded Ensembles).

    Δu_α = −μ_u ∂L_α/∂u_α,    Δw = −μ_w (γ(M)/M) Σ_α ∂L_α/∂w

If the members' tangent kernels do not overlap (Θ_αβ = 0, α ≠ β), γ = M trains M independent networks. If they do, γ = 1
trains them as one.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from torch import Tensor, nn, optim

from dissensus.core.batch import Batch
from dissensus.core.drawn_functions import DrawnFunctions, MemberFunctions
from dissensus.core.likelihood import Classification, Likelihood
from dissensus.core.member import Member, empty_copy, tensors_by_name
from dissensus.core.particles import Particles
from dissensus.core.posterior import Posterior
from dissensus.layers.conversion import fold_layers, restore_plain_layers
from dissensus.layers.conversion_report import ConversionReport
from dissensus.layers.dense_chains import chain_layers
from dissensus.numerics.annealing import scale_gradient
from dissensus.utils.checks import number, one_of
from dissensus.utils.parameter_groups import Group
from dissensus.utils.tensor_tree import Tensors

log = logging.getLogger("dissensus")

RegimeName = Literal["auto", "independent", "collective"]
# Optimisers (by the name of the class or a base class) that divide by the size of the gradient or take its sign.
# fmt: off
SCALE_FREE = frozenset((
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LAMB", "Lamb", "Lion", "Muon", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SparseAdam",
))
# fmt: on
FEW = 1.5  # with fewer effective members, an ensemble of four or more may be one model


class EmbeddedPosterior(Posterior):
    """Base class: members share weights, whose gradient is γ/M times the sum over members; γ does not scale decay or prior."""

    account: ConversionReport
    gamma: float
    regime: RegimeName | float
    modulation_lr: float | None = None

    def __init__(
        self, particles: Particles, *, factors: Sequence[str], account: ConversionReport, **prior: Any
    ) -> None:
        super().__init__(particles, **prior)
        self.account = account
        self._factors = tuple(factors)
        log.info("%s, %d members of shared weights\n%s", type(self).__name__, particles.members, account)

    @property
    def modulations(self) -> dict[str, Tensor]:
        """Name ("layers.0.r" on inputs, "layers.0.s" on outputs) -> factors (M, n); not copies."""
        own = {**self.particles.own_parameters(), **self.particles.own_buffers()}
        return {name: own[f"network.{name}"] for name in self._factors}

    def member_loss(self, params: Tensors, buffers: Tensors, batch: Batch) -> tuple[Tensor, Any, Tensors]:
        # The gradient is scaled, not the rate, so that γ does not change weight decay and prior.
        factor = self.gamma / self.particles.total_members
        used = params
        if factor != 1:
            shared = self.particles.shared_parameters()
            used = {name: scale_gradient(p, factor) if name in shared else p for name, p in params.items()}
        value, after = self.particles.call(Member.nll, used, buffers, batch)
        return value + self.penalty(params), (), after

    def groups(self) -> list[Group]:
        trained = {f"network.{n}": p for n, p in self.modulations.items() if isinstance(p, nn.Parameter)}
        rate, drawn = self.modulation_lr, "pulls modulations towards 0"
        mine = Group("modulations", trained, rate=rate, decay=False, decayed=drawn, prior=False)
        *others, noise = super().groups()
        return [*others, mine, noise]

    @property
    def remedy(self) -> str:
        """Advice for members that differ too little."""
        raise NotImplementedError

    def draw(self) -> DrawnFunctions:
        return MemberFunctions(self.particles, ordinary=fold_layers)

    def plain_network(self) -> nn.Module:
        return restore_plain_layers(self.particles.member(0))


def gamma_note(posterior: Posterior, optimizer: optim.Optimizer) -> str | None:
    """A warning if γ of an embedded ensemble has no effect with this optimiser, else None."""
    kinds = (kind.__name__ for kind in type(optimizer).__mro__)
    if not isinstance(posterior, EmbeddedPosterior) or SCALE_FREE.isdisjoint(kinds):
        return None
    return (
        f"γ = {posterior.gamma:g} has almost no effect with {type(optimizer).__name__}, which divides gradients by their "
        "size; use SGD"
    )


def collapse_note(posterior: Posterior, metrics: Mapping[str, float]) -> dict[str, str]:
    """{"collapse": a warning} if the metrics of an embedded ensemble look like those of one model; else {}."""
    members, effective = posterior.particles.members, metrics.get("members/effective_members", FEW)
    if not isinstance(posterior, EmbeddedPosterior) or members < 4 or effective >= FEW:
        return {}
    # Even independent networks count as only 1.2 of 8 if all of them fail on the same hard examples.
    return {
        "collapse": f"{members} members count as {effective:.2f}: nearly one model, unless a DeepEnsemble on the same data "
        f"also counts as few because all networks fail on the same examples; {posterior.remedy}"
    }


def embed(
    network: nn.Module, factors: Mapping[str, Tensor], own: set[int], likelihood: Likelihood | None, members: int
) -> Particles:
    """M members of a cut network: `factors` (M, n) and the tensors with ids in `own` are each member's own.

    All other tensors are shared. They are never copied: members are built from one network, not from M copies.
    """
    chain_layers(network)
    member = Member(network, likelihood or Classification())
    rows: dict[str, Sequence[Tensor] | Tensor] = {}
    mine: set[str] = set()
    for name, tensor in tensors_by_name(member).items():
        factor = factors.get(name.removeprefix("network."))
        if factor is not None:
            rows[name] = nn.Parameter(factor) if isinstance(tensor, nn.Parameter) else factor
        else:
            rows[name] = [tensor] * members
        if factor is not None or id(tensor) in own or name.startswith("likelihood."):
            mine.add(name)
    kept = member.state_dict()
    particles = Particles.split(empty_copy(member), rows, own=mine.__contains__, kept=kept, members=members)
    return particles.train(particles.training)


def resolve_gamma(regime: RegimeName | float, members: int, collectivity: float) -> float:
    """γ of a regime: M, 1, the number itself, or for "auto" a choice by the collectivity ρ of the modulations.

    In the wide limit the kernel of the members' mean is at most 1 + (M − 1)ρ times that of their differences (the
    individual kernel dilutes it). Up to a factor of two, "auto" takes γ = M (M networks). Beyond it, γ = M would only force
    a lower rate, and γ = 1 trains the mean like one network. So the transition is at ρ ~ 1/M.
    """
    if not isinstance(regime, str):
        return float(number("regime", regime, above=0, hint="it is γ: M for independent members, 1 for a collective"))
    one_of("regime", regime, get_args(RegimeName), hint="name one of them, or pass γ as a number")
    if regime == "auto":
        return float(members) if (members - 1) * collectivity <= 1 else 1.0
    return float(members) if regime == "independent" else 1.0
