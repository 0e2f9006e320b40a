"""Training rules: what a method may say of its training. Its optimisers, groups of parameters, priors, what precedes a step."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, Unpack, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from dissensus.core.batch import Batch
from dissensus.core.clock import Clock, Watchers
from dissensus.core.member import PREFIX
from dissensus.core.optimisation import Group, disjoint, optimizer_groups, plateau_linear
from dissensus.core.particles import Particles
from dissensus.core.prior import GaussianPrior, Prior, PriorKeywords, prior_of, spelled_out, under
from dissensus.numerics.annealing import with_gradient_times
from dissensus.numerics.flat import wide
from dissensus.numerics.tree import Tensors


class TrainingRules(Clock):
    """Base class of `Posterior`: what optimisers and `fit` ask of a method. Methods override what is not final."""

    needed: ClassVar[tuple[str, ...]] = ()  # required keywords, despite their None default
    optimizers: ClassVar[tuple[type[Optimizer], ...] | None] = None  # kinds that may train it; None: any
    capturable: bool = True  # whether a training step may be replayed from a CUDA graph: no choice in Python by step
    prior: Prior | None
    _with_prior: frozenset[str] | None  # made when first asked for
    # What validation judges an epoch by: the networks in training, functions drawn as they would be at the end, or nothing:
    # `fit` does not go back to the best epoch where something is collected over many.
    judged_by: ClassVar[Literal["current", "draw"] | None] = "current"

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.__signature__ = spelled_out(cls.__init__)  # type: ignore[attr-defined]

    def __init__(self, particles: Particles, **prior: Unpack[PriorKeywords]) -> None:
        super().__init__()
        self.particles = particles
        self.watchers = Watchers()  # posteriors that watch this one train (`ds.track`)
        # How members act on each other, by what the method defines: one alone on nobody. SVGD, which has both ways, sets it.
        ways = [each for each in ("couple", "mix") if getattr(type(self), each) is not getattr(TrainingRules, each)]
        self.acts: str | None = ways[0] if ways and particles.members > 1 else None
        self.data_size: int | None = None
        if unknown := prior.keys() - PriorKeywords.__annotations__:
            raise TypeError(f"expected a keyword of {type(self).__name__}, got {min(unknown)!r}; its help names them")
        self.use_prior(prior_of(**prior), prior.get("data_size"))
        if self.data_size is None and "data_size" in self.needed:
            raise ValueError("expected data_size, got none; pass data_size=len(training_set)")

    def before_step(self, batch: Batch) -> None:
        """Called once for every batch whose gradients are to be found, by `fit`, `backward` and `loss`, on the host.

        For what a method counts in Python (sizes of batches, which step this is). Evaluation does not call it.
        """
        for watcher in self.watchers:
            watcher.before_step(batch)

    @property
    @final
    def goes_back(self) -> bool:
        """Whether `fit` may go back to the best epoch: nothing here is collected over many."""
        return self.judged_by is not None and all(watcher.goes_back for watcher in self.watchers)

    def couple(self, z: Any) -> Any:
        """Cotangents v of z (member axis first, no graph): adds Σ_i ⟨z_i, v_i⟩ to the objective."""
        raise NotImplementedError

    def mix(self, gradients: Tensors) -> Tensors:
        """What goes to `.grad` in place of these gradients (by name, own ones (M, ...)); an affine function of them.

        For methods whose update is no gradient of a loss (SVGD). Affine, so that gradients of batches may be mixed and then
        added up, or added up and then mixed.
        """
        raise NotImplementedError

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
        prior = self.prior
        covered = {n: p for n, p in network.items() if prior is not None and prior.covers(n.removeprefix(PREFIX))}
        return [
            Group("network", network),
            Group("others", others, prior=False),
            Group("under the prior", covered, decay=False),
            Group("latents", latents, decay=False, prior=False),
            Group("likelihood", noise, decay=False, prior=False),
        ]

    @final
    def with_prior(self) -> list[str]:
        """Names of members' trained parameters under the prior: what it covers of groups that have one."""
        if self._with_prior is None:
            names = {name for group in disjoint(self.groups()) if group.prior for name in group.parameters}
            plain = under(self.prior, self.particles.template.network, (name.removeprefix(PREFIX) for name in names))
            self._with_prior = frozenset(PREFIX + name for name in plain)
        # Asked of the stored tensors: inside vmap and func transforms, those of a member do not know whether they are trained.
        stored = {**self.particles.shared_parameters(), **self.particles.own_parameters()}
        return [name for name, each in stored.items() if name in self._with_prior and each.requires_grad]

    @final
    def penalty(self, params: Tensors) -> Tensor | float:
        """() −log p(θ) / N of one member. Shared tensors get 1/M of its gradient: in the sum over members they count once."""
        if self.prior is None or self.data_size is None:
            return 0.0
        weights, shared = {}, self.particles.shared_parameters()
        for name in self.with_prior():
            # Sums of squares leave the range of float16 and the digits of bfloat16 long before the weights do.
            full = wide(params[name])
            once = name in shared and self.particles.everywhere > 1
            weights[name.removeprefix(PREFIX)] = (
                with_gradient_times(full, 1 / self.particles.everywhere) if once else full
            )
        if not weights:
            return 0.0
        if (log_prob := self.prior.log_prob(weights)).shape:
            raise ValueError(
                f"expected log_prob as one number, got shape {tuple(log_prob.shape)}; sum over all tensors"
            )
        return -log_prob / self.data_size

    @final
    def use_prior(self, prior: Prior | Callable[[Tensors], Tensor] | None, data_size: int | None = None) -> None:
        """Puts this prior in place of the present one, from the next step on; None trains without.

        Optimisers made afterwards do not decay the weights that the prior covers.

        Args:
            prior: a `Prior`, or a function of one member's tensors by name that returns log p(θ), ().
            data_size: N, where the posterior does not know it yet.
        """
        size = self.data_size if data_size is None else data_size
        if (made := prior_of(prior, data_size=size)) is not None:
            own, shared = self.particles.own_parameters(), self.particles.shared_parameters()
            shapes = {name: t.shape for name, t in shared.items()} | {name: t.shape[1:] for name, t in own.items()}
            made.check_fits({n.removeprefix(PREFIX): s for n, s in shapes.items() if n.startswith(PREFIX)})
        self.prior, self.data_size = made, size
        self._with_prior = None

    @final
    def prior_config(self) -> dict[str, Any]:
        """What `config` holds of the prior: a Gaussian's deviation, and a note of any other."""
        std = self.prior.std if type(self.prior) is GaussianPrior else None
        noted = {} if self.prior is None or std is not None else {"prior": self.prior.config()}
        return {"weight_prior_std": std, "data_size": self.data_size, **noted}

    @final
    def parameter_groups(
        self, lr: float, weight_decay: float = 0.0, *, likelihood_lr: float | None = None
    ) -> list[dict[str, Any]]:
        """Parameter groups for an optimiser, from `groups`; empty ones are left out.

            torch.optim.SGD(posterior.parameter_groups(0.1, 5e-4), lr=0.1, momentum=0.9)

        Args:
            lr: rate of the weights; groups with a rate of their own (modulations, latents) keep theirs.
            weight_decay: acts on groups that take it: not on weights under a prior, nor on a learned noise.
            likelihood_lr: rate of a learned noise; None is `lr`.
        """
        rates = {} if likelihood_lr is None else {"likelihood": likelihood_lr}
        return optimizer_groups(self, self.groups(), lr=lr, weight_decay=weight_decay, rates=rates)

    def default_optimizer(self) -> Optimizer:
        """What `fit` uses when none is given: AdamW with rate 1e-3, and 1e-2 for a noise that is learned.

        The noise starts far off, at 1, and is a single number. Weight decay is 1e-4, none on weights under a prior.
        """
        if (choosy := next((each for each in self.watchers if each.optimizers is not None), None)) is not None:
            return choosy.default_optimizer()  # type: ignore[no-any-return]
        return torch.optim.AdamW(self.parameter_groups(1e-3, 1e-4, likelihood_lr=1e-2), fused=True)

    def default_schedule(self, epochs: int) -> Callable[[int], float]:
        """epoch -> factor of the learning rate: constant for the first half, linear to 1 % at 90 %, constant again.

        A run watched by recorders takes the first one's schedule, which keeps the weights moving while they are
        recorded.
        """
        for watcher in self.watchers:
            if watcher.recorders:
                return watcher.default_schedule(epochs)  # type: ignore[no-any-return]
        return lambda epoch: plateau_linear(epoch / max(epochs, 1))


def _of_member(name: str) -> str:
    """The name that members have for a posterior's parameter."""
    return name.removeprefix("particles.own.").removeprefix("particles.shared.")
