"""Embedded ensembles: M members that share weights and differ by their own factors (after a talk on Embedded Ensembles).

    Δu_α = −μ_u ∂L_α/∂u_α,    Δw = −μ_w (γ(M)/M) Σ_α ∂L_α/∂w

If members' tangent kernels do not overlap (Θ_αβ = 0, α ≠ β), γ = M trains M independent networks; else γ = 1 trains one.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack, final, get_args

from torch import Tensor, nn, optim

from dissensus.core.batch import Batch
from dissensus.core.drawn_functions import DrawnFunctions, MemberFunctions
from dissensus.core.likelihood import Classification, Likelihood
from dissensus.core.member import Member, empty_copy, tensors_by_name
from dissensus.core.particles import Particles
from dissensus.core.posterior import Posterior
from dissensus.core.prior import PriorKeywords
from dissensus.layers import conversion
from dissensus.layers.call_order import call_order, end_layers, trace_calls
from dissensus.layers.factored import ModulatedLayer, features, modulate_layer
from dissensus.layers.modulation import Modulation
from dissensus.numerics.annealing import scale_gradient
from dissensus.utils.batch_norm_names import norm_parameters, statistics_names
from dissensus.utils.checks import fraction, integer, number, one_of
from dissensus.utils.parameter_groups import Group
from dissensus.utils.tensor_tree import Tensors

log = logging.getLogger("dissensus")

RegimeName = Literal["auto", "independent", "collective"]
# Optimisers (by the name of the class or a base class) that divide by the size of the gradient or take its sign.
SCALE_FREE = frozenset((
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LAMB", "Lamb", "Lion", "Muon", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SparseAdam",
))  # fmt: skip
FEW = 1.5  # with fewer effective members, an ensemble of four or more may be one model


class EmbeddedPosterior(Posterior):
    """Base class: members share weights, whose gradient is γ/M times the sum over members; γ does not scale decay or prior."""

    account: conversion.ConversionReport
    gamma: float
    regime: RegimeName | float
    modulation_lr: float | None = None

    def __init__(
        self, particles: Particles, *, factors: Sequence[str], account: conversion.ConversionReport, **prior: Any
    ) -> None:
        super().__init__(particles, **prior)
        self.account, self._factors = account, tuple(factors)
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
        return MemberFunctions(self.particles, ordinary=conversion.fold_layers)

    def plain_network(self) -> nn.Module:
        return conversion.restore_plain_layers(self.particles.member(0))


def gamma_note(posterior: Posterior, optimizer: optim.Optimizer) -> str | None:
    """A warning if γ of an embedded ensemble has no effect with this optimiser, else None."""
    kinds = (kind.__name__ for kind in type(optimizer).__mro__)
    if not isinstance(posterior, EmbeddedPosterior) or SCALE_FREE.isdisjoint(kinds):
        return None
    why = f"{type(optimizer).__name__}, which divides gradients by their size"
    return f"γ = {posterior.gamma:g} has almost no effect with {why}; use SGD"


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
    """M members of a cut network: `factors` (M, n) and tensors with ids in `own` are their own; others are never copied."""
    member = Member(network, likelihood or Classification())
    held, varied = tensors_by_name(member), {f"network.{name}": factor for name, factor in factors.items()}
    rows: dict[str, Sequence[Tensor] | Tensor] = {name: [tensor] * members for name, tensor in held.items()}
    rows |= {n: nn.Parameter(f) if isinstance(held[n], nn.Parameter) else f for n, f in varied.items()}
    mine = {n for n, each in held.items() if n in varied or id(each) in own or n.startswith("likelihood.")}
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


@final
class BatchEnsemble(EmbeddedPosterior):
    """M members that share the weights of one network and cost little more than it does.

    y_α = s_α ∘ (W (r_α ∘ x) + b) for member α. Each member has its own norm layers (affine parameters and statistics) and
    output bias, since a shared one adds 1 to all Θ_αβ. Batch norm after s leaves its sign. `.account` lists changed layers.

    Args:
        network: one network.
        members: M.
        modulation: the distribution of r and s, required. `Modulation.sign()` makes independent members;
            `Modulation.normal(1, σ)` with a small σ stays close to a pretrained network, and members stay similar.
        regime: γ, the factor on the shared weights' mean gradient: "independent" (M), "collective" (1), "auto" or a number.
        form: "wen" has r and s at every layer; "talk" leaves out the first r and the last s.
        modulation_lr: learning rate of r and s in `parameter_groups`; None uses that of the weights.
        layers: name patterns of the layers that get factors ("encoder.*"); None is all.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """

    name = "batch_ensemble"
    needed = ("modulation",)

    def __init__(
        self,
        network: nn.Module,
        *,
        members: int = 4,
        modulation: Modulation | None = None,
        regime: RegimeName | float = "auto",
        form: Literal["wen", "talk"] = "wen",
        modulation_lr: float | None = None,
        layers: Sequence[str] | None = None,
        likelihood: Likelihood | None = None,
        **prior: Unpack[PriorKeywords],
    ) -> None:
        integer("members", members)
        if not isinstance(modulation, Modulation):
            near = "or Modulation.normal(1, 0.1) to start close to a pretrained network"
            advice = f"pass Modulation.sign() for independent members, {near}"
            raise TypeError(f"expected a modulation, got {modulation!r}; {advice}")
        one_of("form", form, ("wen", "talk"))
        if modulation_lr is not None:
            number("modulation_lr", modulation_lr, least=0, hint="None takes the weights' rate")
        gamma = resolve_gamma(regime, members, modulation.collectivity)
        network, account, last = modulated_network(network, form=form, layers=layers)
        sizes = {name: factor for name, factor in network.named_parameters() if _is_factor(network, name)}
        factors = {n: modulation.sample((members, len(r)), dtype=r.dtype, device=r.device) for n, r in sizes.items()}
        particles = embed(network, factors, own_tensors(network, account, last), likelihood, members)
        super().__init__(particles, factors=list(factors), account=account, **prior)
        self.modulation, self.regime, self.gamma, self.form = modulation, regime, gamma, form
        self.modulation_lr = modulation_lr
        self.layers = None if layers is None else list(layers)

    @property
    def remedy(self) -> str:
        expect = "ds.theory.regime(posterior) predicts the regime"
        if self.modulation.collectivity == 0 and self.gamma == self.particles.members:
            return f"modulations already have mean 0 and γ = M: try fewer members or wider layers; {expect}"
        return (
            "members differ more with modulations of mean 0, such as Modulation.sign(), wide layers, few members "
            f'and regime="independent"; {expect}'
        )


def modulated_network(
    module: nn.Module, *, form: Literal["wen", "talk"], layers: Sequence[str] | None
) -> tuple[nn.Module, conversion.ConversionReport, list[str]]:
    """(a copy of the module with neutral r and s, the account, the output layers); "talk" leaves out first r and last s."""
    # First and last of all linear and convolutional layers, cut or not, but for those that are read and not called.
    network, found, account = conversion.convertible_copy(module, layers=layers)
    names = [name for name, part in network.named_modules() if isinstance(part, conversion.CONVERTIBLE)]
    names = [name for name in names if "reads its weight" not in account.left.get(name, "")]
    followed = trace_calls(network, names)
    first, last = end_layers(names, followed)
    for name, layer in found.items():
        wen = form == "wen"
        inputs, outputs = wen or name not in first, wen or name not in last
        cut_layer = modulate_layer(layer, inputs=inputs, outputs=outputs, trained=True)
        account.converted[name] = f"{cut_layer.report_entry()}{conversion.note_direct_reads(name, cut_layer, followed)}"
    return network, account, last


def own_tensors(network: nn.Module, account: conversion.ConversionReport, output_layers: Sequence[str]) -> set[int]:
    """Ids of the tensors besides r and s that each member has, added to the account: norm layers and the output bias."""
    norms = norm_parameters(network)
    statistics = set(statistics_names(network))
    tensors = {**dict(network.named_parameters(remove_duplicate=False)), **dict(network.named_buffers())}
    layers = {name.rpartition(".")[0] for name in norms | statistics}
    for layer in (name for name, _ in network.named_modules() if name in layers):
        parts = {"affine": norms, "statistics": statistics}
        held = [part for part, names in parts.items() if any(each.rpartition(".")[0] == layer for each in names)]
        account.converted[layer] = f"own {' and '.join(held)}"
    own = {id(tensors[name]) for name in {*norms, *statistics}}
    for last in output_layers:
        bias = network.get_submodule(last).bias
        if isinstance(bias, Tensor):
            account.converted[last] = "; ".join([*filter(None, [account.converted.get(last)]), "own bias"])
            own.add(id(bias))
    return own


def _is_factor(network: nn.Module, name: str) -> bool:
    layer, _, leaf = name.rpartition(".")
    return leaf in ("r", "s") and isinstance(network.get_submodule(layer), ModulatedLayer)


@final
class DropoutEnsemble(EmbeddedPosterior):
    """One network with M fixed dropout masks, one per member, the same for all inputs and steps.

    Masks are not trained. They act on the inputs of linear and convolutional layers (whole channels before
    convolutions), but not on the network's own inputs and outputs. Kept units are scaled by 1/(1 − rate), as in dropout.
    Each member has its own batch statistics; all else is shared. The network is copied; `.account` lists converted layers.

    Args:
        network: one network.
        members: M.
        rate: probability that a unit is dropped. 1 − rate is the collectivity, so members always learn as a collective.
        regime: γ, the factor on the shared weights' mean gradient: "independent" (M), "collective" or "auto" (1), or a number.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """

    name = "dropout_ensemble"

    def __init__(
        self,
        network: nn.Module,
        *,
        members: int = 4,
        rate: float = 0.1,
        regime: RegimeName | float = "auto",
        likelihood: Likelihood | None = None,
        **prior: Unpack[PriorKeywords],
    ) -> None:
        integer("members", members)
        keep = 1 - fraction("rate", rate, hint="it is the share of units dropped, usually 0.1")
        gamma = 1.0 if regime == "auto" else resolve_gamma(regime, members, keep)
        network, found, account = conversion.convertible_copy(network)
        followed = trace_calls(network, list(found))
        stems = end_layers(list(found), followed)[0]
        rest = [name for name in call_order(list(found), followed) if name not in stems]
        if not rest:
            got = ", ".join(stems) or "one"
            raise ValueError(f"expected at least two linear or convolutional layers, got only {got}; pass more")
        for name in stems:
            account.left[name] = "a first layer: network inputs are not dropped"
        law = Modulation.bernoulli(keep, 1 / keep)
        masks = {}
        for name in rest:
            layer = modulate_layer(found[name], inputs=True, outputs=False, trained=False)
            weight: Tensor = layer.weight
            size = features(layer)[0]
            masks[f"{name}.r"] = law.sample((members, size), dtype=weight.dtype, device=weight.device)
            what = f"masks of {size} {'channels' if weight.ndim > 2 else 'units'}"
            account.converted[name] = f"{what}{conversion.note_direct_reads(name, layer, followed)}"
        buffers = dict(network.named_buffers())
        own = {id(buffers[name]) for name in statistics_names(network)}
        particles = embed(network, masks, own, likelihood, members)
        super().__init__(particles, factors=list(masks), account=account, **prior)
        self.rate, self.regime, self.gamma = rate, regime, gamma

    @property
    def remedy(self) -> str:
        return (
            "members with masks on shared weights always learn as a collective: a larger rate makes them differ more, "
            "BatchEnsemble with Modulation.sign() makes them independent"
        )
