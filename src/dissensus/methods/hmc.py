"""HMC: a near-exact posterior of a small network, as a reference for other methods.

Izmailov, Vikram, Hoffman & Wilson, "What are Bayesian neural network posteriors really like?", ICML 2021.
"""

import copy
import logging
from collections.abc import Iterable
from typing import Any, Self, Unpack, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dissensus.core import weights
from dissensus.core.batch import Batch
from dissensus.core.gradients import compute_gradients
from dissensus.core.likelihood import Likelihood
from dissensus.core.loader import Loader
from dissensus.core.member import PREFIX
from dissensus.core.networks import Networks
from dissensus.core.particles import Particles
from dissensus.core.prior import PriorKeywords
from dissensus.core.weights import Weights
from dissensus.methods.map import MAP
from dissensus.methods.parts.sampling_posterior import SamplingPosterior
from dissensus.numerics.hamiltonian import Chains, sample_chains
from dissensus.numerics.randomness import chain_generators, next_seed
from dissensus.utils.checks import fraction, integer, number
from dissensus.utils.tensor_tree import Tensors

log = logging.getLogger("dissensus")

LOW = 0.4  # a chain with a lower acceptance rate is reported, whatever its target


@final
class HMC(SamplingPosterior):
    """Near-exact posterior samples of a small network, by Hamiltonian Monte Carlo on the whole training set in float64.

    The target is exp(−(N · mean loss − log p(θ)) / T).
    `fit_posthoc(loader)` runs the chains from the present weights; `fit` first trains the networks as MAP does and then
    calls it. Networks run in eval mode: dropout is off, batch norm uses its running statistics. Check `ds.convergence`
    before you use the samples.

    Args:
        networks: one module, not copied, or a list of M; each network has its own independent chain.
        samples: functions kept from each chain.
        every: number of trajectories per kept sample.
        warmup: trajectories before the first sample; they choose the step size.
        leapfrog: leapfrog steps (gradients) per trajectory.
        target_acceptance: acceptance rate that dual averaging aims for when it chooses the step size.
        posterior_temperature: T; below 1 samples a sharper ("cold") posterior.
        budget: most floating-point operations the chains may take, at 6 per weight, example and gradient; raises if
            they would take more.
        seed: None takes one from torch's generator.
        first_chain: number of the first chain; a chain's random numbers depend only on the seed and its number.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`; data_size is required. Without a prior there
            may be no distribution to converge to.

    Public attribute: `chains`, with `acceptance` and `step_size` of each chain that ran in this process.
    """

    name = "hmc"
    needed = ("data_size",)
    draw_only_settings = (
        *SamplingPosterior.draw_only_settings,
        *("every", "warmup", "leapfrog", "target_acceptance", "posterior_temperature", "budget", "seed", "first_chain"),
    )
    random = False
    own_statistics = False  # the energy is computed with the networks' own statistics

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
        self.every = integer("every", every)
        self.warmup = integer("warmup", warmup, hint="it chooses the step size")
        self.leapfrog = integer("leapfrog", leapfrog)
        self.target_acceptance = fraction("target_acceptance", target_acceptance)
        self.posterior_temperature = number("posterior_temperature", posterior_temperature, above=0)
        self.budget = number("budget", budget, above=0)
        self.seed = None if seed is None else integer("seed", seed, least=0)
        self.first_chain = integer("first_chain", first_chain, least=0)
        self.chains: Chains | None = None

    def fit_posthoc(self, loader: Iterable[Any]) -> Self:
        """Runs the chains on the loader's data, stores their samples as a draw, and returns the posterior.

        The loader is read once and its batches are kept in memory. If it holds only part of the data, its mean loss
        still counts `data_size` times.
        """
        loader = Loader.complete(loader, self)
        self.check_network()
        if self.prior is None:
            log.warning("without a prior a chain may never converge; pass weight_prior_std= or prior=")
        batch = concatenate_batches([self.prepare_batch(each) for each in self.read(loader)])
        energy = Potential(self, batch)
        self._check_budget(energy.start.shape[1], batch.size)
        if not torch.equal(*(energy(energy.start)[0] for _ in range(2))):
            raise ValueError("expected equal outputs for equal inputs, got random numbers; remove its randomness")
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
            level = logging.WARNING if acceptance < min(LOW, self.target_acceptance / 2) else logging.INFO
            text = "chain %d accepts %.0f %% of its trajectories; if that is low, try more warm-up"
            log.log(level, text, chain, 100 * acceptance)
        dtypes = {name: each.dtype for name, each in sampled_weights(self.particles).stored.items()}
        found = {name: rows.to(dtypes[name]) for name, rows in energy.split_flat(self.chains.draws).items()}
        copies = {name: rows.clone(memory_format=torch.contiguous_format) for name, rows in found.items()}
        self.stored = self._make_families(copies)
        self.uncalibrate("fit_posthoc")
        return self

    def store_draw(self, loader: Iterable[Any]) -> None:
        self.fit_posthoc(loader)

    def sample(self, samples: int, generator: torch.Generator | None = None) -> Tensors:
        raise ValueError("expected samples of a chain, got none; call fit_posthoc(loader) with the training data")

    def sampled_names(self) -> list[str]:
        return list(sampled_weights(self.particles).stored)

    def _check_budget(self, parameters: int, examples: int) -> None:
        gradients = (self.warmup + self.samples * self.every) * self.leapfrog
        cost = 6.0 * gradients * self.particles.members * examples * parameters
        if cost > self.budget:
            work = f"{gradients:,} gradients × {examples:,} examples × {parameters:,} weights × 6"
            got = f"about {cost:.0e}: {self.particles.members} chains × {work}"
            raise ValueError(f"expected at most {self.budget:.0e} operations, got {got}; do less, or raise budget")


class Potential:
    """(M, P) -> ((M,) energies, (M, P) gradients) of M networks' trained tensors; in float64, on a copy in eval mode."""

    def __init__(self, posterior: HMC, batch: Batch) -> None:
        prior, particles = copy.deepcopy(posterior.prior), copy.deepcopy(posterior.particles)
        self.posterior = MAP(particles, prior=prior, data_size=posterior.data_size).double().eval()
        self.batch = batch.map(lambda each: each.double() if each.is_floating_point() else each)
        self.weights = sampled_weights(particles)
        assert posterior.data_size is not None  # a required argument
        self.scale = posterior.data_size / posterior.posterior_temperature
        self.start = self.weights.flat(torch.float64)

    @torch.no_grad()
    def __call__(self, position: Tensor) -> tuple[Tensor, Tensor]:
        for rows, part in zip(self.weights.rows().values(), self.split_flat(position).values(), strict=True):
            rows.copy_(part)
        with torch.enable_grad():
            found = compute_gradients(self.posterior, self.batch)
        network = weights.network_parameters(self.posterior.particles).stored
        names = {name: f"{PREFIX}{name}" if name in network else name for name in self.weights.stored}
        gradients = self.weights.expand_members({name: found.gradients[full] for name, full in names.items()})
        flat = torch.cat([rows.reshape(len(position), -1) for rows in gradients.values()], dim=1)
        return self.scale * found.losses, self.scale * flat

    def split_flat(self, flat: Tensor) -> Tensors:
        """Name -> (M, …, *shape), cut from flat weights (M, …, P)."""
        one = self.weights.first_member()
        parts = torch.split(flat, [each.numel() for each in one.values()], dim=-1)
        return {n: part.reshape(*flat.shape[:-1], *one[n].shape) for n, part in zip(one, parts, strict=True)}


def sampled_weights(particles: Particles) -> Weights:
    """The trained parameters of networks and likelihood."""
    found = weights.network_parameters(particles).merge_with(weights.likelihood_parameters(particles))
    return found.filter_tensors(lambda _, parameter: parameter.requires_grad)


def concatenate_batches(parts: list[Batch]) -> Batch:
    """All examples of these batches in one."""
    if not parts:
        raise ValueError("expected at least one batch from the loader, got none; pass the training data")
    if len(parts) == 1:
        return parts[0]
    return Batch(*pytree.tree_map(lambda *each: torch.cat(each) if isinstance(each[0], Tensor) else each[0], *parts))
