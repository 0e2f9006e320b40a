"""HMC: the posterior of a small network as nearly as it can be had, to measure other methods against.

Izmailov, Vikram, Hoffman & Wilson, "What are Bayesian neural network posteriors really like?", ICML 2021.
"""

import copy
import logging
from collections.abc import Iterable
from typing import Any, Self, Unpack

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dissensus.core import seam, weights
from dissensus.core.batch import Batch
from dissensus.core.inputs import check_loader
from dissensus.core.likelihood import Likelihood
from dissensus.core.member import PREFIX
from dissensus.core.particles import Particles
from dissensus.core.prior import PriorKeywords
from dissensus.core.weights import Weights
from dissensus.methods.map import MAP
from dissensus.methods.parts.networks import Networks
from dissensus.methods.parts.sampling import SamplingPosterior
from dissensus.numerics.checks import number, share, whole
from dissensus.numerics.hamiltonian import Chains, sample_chains
from dissensus.numerics.randomness import chain_generators, next_seed
from dissensus.numerics.tree import Tensors

log = logging.getLogger("dissensus")

LOW = 0.4  # acceptance that a chain should not stay below, whatever its target


class HMC(SamplingPosterior):
    """Samples of exp(−(N · mean loss − log p(θ)) / T) by Hamiltonian Monte Carlo over the whole training set, in float64.

    `fit_posthoc(loader)` runs the chains from where the networks are; `fit` trains the networks as MAP does and calls it
    at its end. Networks run in eval mode: dropout is off, batch norm has the statistics it was trained with. Look at
    `ds.convergence` before believing it.

    Args:
        networks: one module, held and not copied, or a list of M, each with a chain of its own that does not depend on
            the others.
        samples: functions kept of each chain.
        every: trajectories from one that is kept to the next.
        warmup: trajectories before, which choose the step size.
        leapfrog: gradients of a trajectory.
        target_acceptance: by which dual averaging chooses the step size.
        posterior_temperature: T; below 1 samples a sharper ("cold") posterior.
        budget: floating-point operations that chains may cost, 6 for each weight and example of a gradient; where they
            would cost more, an error says how much.
        seed: None takes one from torch's generator.
        first_chain: the number of the first chain; a chain's random numbers depend on the seed and its number alone.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`; data_size is required. Without a prior a chain
            need not have anything to converge to.

    Public attribute: `chains`, with `acceptance` and `step_size` of each, where they ran in this process.
    """

    name = "hmc"
    needed = ("data_size",)
    untrained = (
        *SamplingPosterior.untrained,
        *("every", "warmup", "leapfrog", "target_acceptance", "posterior_temperature", "budget", "seed", "first_chain"),
    )
    random = False
    own_statistics = False  # the energy is that of the networks' own

    def __init__(
        self,
        networks: Networks,
        *,
        samples: int = 200,
        every: int = 1,
        warmup: int = 200,
        leapfrog: int = 50,
        target_acceptance: float = 0.8,
        posterior_temperature: float = 1.0,
        budget: float = 1e14,
        seed: int | None = None,
        first_chain: int = 0,
        likelihood: Likelihood | None = None,
        **prior: Unpack[PriorKeywords],
    ) -> None:
        super().__init__(networks, samples=samples, likelihood=likelihood, **prior)
        self.every = whole("every", every)
        self.warmup = whole("warmup", warmup, hint="the step size is chosen there")
        self.leapfrog = whole("leapfrog", leapfrog)
        self.target_acceptance = share("target_acceptance", target_acceptance)
        self.posterior_temperature = number("posterior_temperature", posterior_temperature, above=0)
        self.budget = number("budget", budget, above=0)
        self.seed = None if seed is None else whole("seed", seed, least=0)
        self.first_chain = whole("first_chain", first_chain, least=0)
        self.chains: Chains | None = None

    def fit_posthoc(self, loader: Iterable[Any]) -> Self:
        """This, with a stored draw: the chains' samples for the loader's data, gone through once and kept in memory.

        A loader with a part of the data stands for all of them: its mean loss counts `data_size` times.
        """
        check_loader(loader := self.whole(loader))
        self.check_network()
        if self.prior is None:
            log.warning("a chain without a prior may drift without end; pass weight_prior_std= or prior=")
        batch = whole_batch([self.take(each) for each in self.read(loader)])
        energy = Potential(self, batch)
        self._check_budget(energy.start.shape[1], batch.size)
        if not torch.equal(*(energy(energy.start)[0] for _ in range(2))):
            raise ValueError(
                "expected a network that says the same twice in eval mode, got one that draws random numbers; take that out"
            )
        seed = next_seed() if self.seed is None else self.seed
        numbers = range(self.first_chain, self.first_chain + self.particles.members)
        self.chains = sample_chains(
            energy,
            energy.start,
            samples=self.samples,
            every=self.every,
            warmup=self.warmup,
            leapfrog=self.leapfrog,
            target_acceptance=self.target_acceptance,
            generators=chain_generators(seed, numbers, self.device),
        )
        for chain, acceptance in enumerate(self.chains.acceptance.tolist(), start=self.first_chain):
            log.log(
                logging.WARNING if acceptance < min(LOW, self.target_acceptance / 2) else logging.INFO,
                "chain %d accepts %.0f %% of its trajectories; where that is little, more warm-up may help",
                *(chain, 100 * acceptance),
            )
        dtypes = {name: each.dtype for name, each in sampled(self.particles).stored.items()}
        found = {name: rows.to(dtypes[name]) for name, rows in energy.tensors(self.chains.draws).items()}
        self.stored = self._families(
            {name: rows.clone(memory_format=torch.contiguous_format) for name, rows in found.items()}
        )
        self.uncalibrate("fit_posthoc")
        return self

    def store_draw(self, loader: Iterable[Any]) -> None:
        self.fit_posthoc(loader)

    def sample(self, samples: int, generator: torch.Generator | None = None) -> Tensors:
        raise ValueError("expected chains that ran, got none; call fit_posthoc(loader) with the training data")

    def sampled_names(self) -> list[str]:
        return list(sampled(self.particles).stored)

    def _check_budget(self, parameters: int, examples: int) -> None:
        gradients = (self.warmup + self.samples * self.every) * self.leapfrog
        cost = 6.0 * gradients * self.particles.members * examples * parameters
        if cost > self.budget:
            raise ValueError(
                f"expected chains of at most {self.budget:.0e} operations, got about {cost:.0e}: {self.particles.members} "
                f"chains × {gradients:,} gradients × {examples:,} examples × {parameters:,} weights × 6; take a smaller "
                "network, fewer data or samples, or raise budget"
            )


class Potential:
    """(M, P) -> ((M,) energies, (M, P) gradients) of M networks' trained tensors; in float64, on a copy in eval mode."""

    def __init__(self, posterior: HMC, batch: Batch) -> None:
        prior, particles = copy.deepcopy(posterior.prior), copy.deepcopy(posterior.particles)
        self.posterior = MAP(particles, prior=prior, data_size=posterior.data_size).double().eval()
        self.batch = batch.map(lambda each: each.double() if each.is_floating_point() else each)
        self.weights = sampled(particles)
        assert posterior.data_size is not None  # it is needed
        self.scale = posterior.data_size / posterior.posterior_temperature
        self.start = self.weights.flat(torch.float64)

    @torch.no_grad()
    def __call__(self, position: Tensor) -> tuple[Tensor, Tensor]:
        for rows, part in zip(self.weights.rows().values(), self.tensors(position).values(), strict=True):
            rows.copy_(part)
        with torch.enable_grad():
            found = seam.find(self.posterior, self.batch)
        network = weights.parameters(self.posterior.particles).stored
        names = {name: f"{PREFIX}{name}" if name in network else name for name in self.weights.stored}
        gradients = self.weights.lifted({name: found.gradients[full] for name, full in names.items()})
        flat = torch.cat([rows.reshape(len(position), -1) for rows in gradients.values()], dim=1)
        return self.scale * found.losses, self.scale * flat

    def tensors(self, flat: Tensor) -> Tensors:
        """Name -> (M, …, *shape) of (M, …, P)."""
        one = self.weights.one()
        parts = torch.split(flat, [each.numel() for each in one.values()], dim=-1)
        return {n: part.reshape(*flat.shape[:-1], *one[n].shape) for n, part in zip(one, parts, strict=True)}


def sampled(particles: Particles) -> Weights:
    """The trained parameters of networks and likelihood."""
    found = weights.parameters(particles).joined(weights.of_likelihood(particles))
    return found.only(lambda _, parameter: parameter.requires_grad)


def whole_batch(parts: list[Batch]) -> Batch:
    """All examples of these batches in one."""
    if not parts:
        raise ValueError("expected at least one batch from the loader, got none; pass the training data")
    if len(parts) == 1:
        return parts[0]
    return Batch(*pytree.tree_map(lambda *each: torch.cat(each) if isinstance(each[0], Tensor) else each[0], *parts))
