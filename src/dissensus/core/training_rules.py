"""Training rules: what a method may say of its training. Its optimisers, groups of parameters, priors, what precedes a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from dissensus.core.batch import Inputs
from dissensus.core.clock import Clock, Watchers
from dissensus.core.empcov import EmpCov
from dissensus.core.optimisation import Group, disjoint, optimizer_groups, plateau_linear
from dissensus.core.particles import Particles
from dissensus.core.prior import check_prior, negative_log_prior, norm_parameters
from dissensus.numerics.tree import Tensors


class TrainingRules(Clock):
    """Base class of `Posterior`: what optimisers and `fit` ask of a method. What is not final may be overridden by one."""

    optimizers: ClassVar[tuple[type[Optimizer], ...] | None] = None  # kinds that may train it; None: any
    train_samples: int = 1  # functions per member and batch in training, each with random numbers of its own
    capturable: bool = True  # whether a training step may be replayed from a CUDA graph: no choice in Python by step
    # What validation judges an epoch by: the networks in training, functions drawn as they would be at the end, or nothing:
    # `fit` does not go back to the best epoch where something is collected over many.
    judged_by: ClassVar[Literal["current", "draw"] | None] = "current"

    def __init__(self, particles: Particles, *, weight_prior_std: float | None, data_size: int | None) -> None:
        super().__init__()
        check_prior(weight_prior_std, data_size)
        self.particles = particles
        self.watchers = Watchers()
        # How members act on each other, by what the method defines: one alone on nobody. SVGD, which has both ways, sets it.
        ways = [each for each in ("couple", "mix") if getattr(type(self), each) is not getattr(TrainingRules, each)]
        self.acts: str | None = ways[0] if ways and particles.members > 1 else None
        self.weight_prior_std = weight_prior_std
        self.data_size = data_size
        self.first_layer_prior: EmpCov | None = None
        self._with_prior: frozenset[str] | None = None  # made when first asked for

    def before_step(self, x: Inputs, y: Tensor, weight: Tensor | None) -> None:
        """Called once for every batch whose gradients are to be found, by `fit`, `backward` and `loss`, on the host.

        For what a method counts in Python (sizes of batches, which step this is). Evaluation does not call it.
        """
        for watcher in self.watchers:
            watcher.before_step(x, y, weight)

    @property
    @final
    def goes_back(self) -> bool:
        """Whether `fit` may go back to the best epoch: nothing here is collected over many."""
        return self.judged_by is not None and all(watcher.goes_back for watcher in self.watchers)

    def couple(self, z: Any) -> Any:
        """Cotangents v of z (member axis first, no graph): adds Σ_i ⟨z_i, v_i⟩ to the objective."""
        raise TypeError(
            f"expected a method that couples its members, got {type(self).__name__}, which does not; define couple(z)"
        )

    def mix(self, gradients: Tensors) -> Tensors:
        """What goes to `.grad` in place of these gradients (by name, own ones (M, ...)); an affine function of them.

        For methods whose update is no gradient of a loss (SVGD). Affine, so that gradients of batches may be mixed and then
        added up, or added up and then mixed.
        """
        raise TypeError(
            f"expected a method that mixes gradients, got {type(self).__name__}, which does not; define mix(gradients)"
        )

    @property
    @final
    def mixes(self) -> bool:
        """Whether gradients are mixed over members before an optimiser sees them."""
        return self.acts == "mix"

    @property
    @final
    def coupled(self) -> bool:
        """Whether members act on each other's losses."""
        return self.acts == "couple"

    def groups(self) -> list[Group]:
        """All parameters, trained or not, in groups; where several hold one parameter, the last counts.

        A method adds its own at the end: `[*super().groups(), Group("scales", {…}, rate=1e-2, decay=False)]`.
        """
        named = {_of_member(name): parameter for name, parameter in self.named_parameters()}
        roots = {name: name.partition(".")[0] for name in named}
        network, noise = ({n: p for n, p in named.items() if roots[n] == root} for root in ("network", "likelihood"))
        latents = {n: p for n, p in named.items() if roots[n] == "latents"}
        others = {n: p for n, p in named.items() if roots[n] not in ("network", "likelihood", "latents")}
        first = None if self.first_layer_prior is None else self.first_layer_prior.parameter
        return [
            Group("network", network),
            Group("others", others, prior=False),
            Group("latents", latents, decay=False, prior=False),
            Group("first layer", {n: p for n, p in named.items() if n == first}, decay=False, prior=False),
            Group("likelihood", noise, decay=False, prior=False),
        ]

    @final
    def with_prior(self) -> frozenset[str]:
        """Names of members' parameters under the weight prior: those of groups that have it, but for norm layers."""
        if self._with_prior is None:
            names = {name for group in disjoint(self.groups()) if group.prior for name in group.parameters}
            norms = {f"network.{name}" for name in norm_parameters(self.particles.template.network)}
            self._with_prior = frozenset(names - norms)
        return self._with_prior

    @final
    def penalty(self, params: Tensors) -> Tensor | float:
        """() −log p(θ) / N of one member. Shared tensors count 1/M, so that in the sum over members they count once."""
        first = self._first_layer_penalty(params)
        if self.weight_prior_std is None or self.data_size is None:
            return first
        # Asked of the stored tensors: inside vmap and func transforms `params` do not know whether they are trained.
        own, shared, names = self.particles.own_parameters(), self.particles.shared_parameters(), self.with_prior()
        weights = {
            name: params[name] / self.particles.members**0.5 if name in shared else params[name]
            for name, stored in {**shared, **own}.items()
            if name in names and stored.requires_grad
        }
        return first + negative_log_prior(weights, self.weight_prior_std, self.data_size) if weights else first

    def _first_layer_penalty(self, params: Tensors) -> Tensor | float:
        if self.first_layer_prior is None:
            return 0.0
        once = self.first_layer_prior.parameter in self.particles.shared_parameters()
        return self.first_layer_prior(params) / (self.particles.members if once else 1)  # type: ignore[no-any-return]

    @final
    def use_first_layer_prior(self, prior: EmpCov) -> None:
        """Puts this prior on one layer's weights, in place of the isotropic one, from the next step on.

        Optimisers made afterwards, by `parameter_groups` or by `fit`, do not decay those weights.
        """
        if not isinstance(prior, EmpCov):
            raise TypeError(f"expected an EmpCov, got {type(prior).__name__}; build one from the training inputs")
        own, shared = self.particles.own_parameters(), self.particles.shared_parameters()
        prior.check_fits({name: t.shape for name, t in shared.items()} | {name: t.shape[1:] for name, t in own.items()})
        self.first_layer_prior = prior
        self._with_prior = None

    @final
    def parameter_groups(
        self, lr: float, weight_decay: float = 0.0, *, likelihood_lr: float | None = None
    ) -> list[dict[str, Any]]:
        """Parameter groups for an optimiser, from `groups`; empty ones are left out.

        Weight decay acts on groups that take it: not on weights that `use_first_layer_prior` gave another prior, nor on a
        learned noise. `likelihood_lr`: the noise's rate, `lr` where None.
        """
        rates = {} if likelihood_lr is None else {"likelihood": likelihood_lr}
        return optimizer_groups(self, self.groups(), lr=lr, weight_decay=weight_decay, rates=rates)

    def advice(
        self, *, optimizer: Optimizer | None = None, metrics: Mapping[str, float] | None = None
    ) -> dict[str, str]:
        """Name -> what a user should hear of this optimiser (`fit` logs it) or of an evaluation with these metrics."""
        return {}

    def default_optimizer(self) -> Optimizer:
        """What `fit` uses when none is given: AdamW with rate 1e-3, and 1e-2 for a noise that is learned.

        The noise starts far off, at 1, and has one number to find. Weight decay is 1e-4, none where the loss already has a
        weight prior.
        """
        if (choosy := next((each for each in self.watchers if each.optimizers is not None), None)) is not None:
            return choosy.default_optimizer()  # type: ignore[no-any-return]
        decay = 1e-4 if self.weight_prior_std is None else 0.0
        return torch.optim.AdamW(self.parameter_groups(1e-3, decay, likelihood_lr=1e-2), fused=True)

    def default_schedule(self, epochs: int) -> Callable[[int], float]:
        """epoch -> factor of the learning rate: constant for the first half, linear to 1 % at 90 %, constant again."""
        return lambda epoch: plateau_linear(epoch / max(epochs, 1))


def _of_member(name: str) -> str:
    """The name that members have for a posterior's parameter."""
    return name.removeprefix("particles.own.").removeprefix("particles.shared.")
