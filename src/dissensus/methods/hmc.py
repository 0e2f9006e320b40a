"""Markov chains of networks: HMC, a near-exact reference for small networks, and SGHMC, driven by noisy gradients.

Izmailov, Vikram, Hoffman & Wilson, "What are Bayesian neural network posteriors really like?", ICML 2021.
Welling & Teh, "Bayesian learning via stochastic gradient Langevin dynamics", ICML 2011.
Chen, Fox & Guestrin, "Stochastic gradient Hamiltonian Monte Carlo", ICML 2014.
Zhang, Li, Zhang, Chen & Wilson, "Cyclical stochastic gradient MCMC for Bayesian deep learning", ICLR 2020.
"""

import copy
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, Unpack, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from dissensus.core import weights
from dissensus.core.batch import Batch
from dissensus.core.gradients import compute_gradients
from dissensus.core.member import PREFIX
from dissensus.core.networks import MethodKeywords, Networks
from dissensus.core.particles import Particles
from dissensus.core.weights import Weights
from dissensus.engine.loader import Loader
from dissensus.methods.map import MAP
from dissensus.methods.parts.sampling_posterior import RecordingPosterior, SamplingPosterior
from dissensus.methods.snapshots import LastSnapshots, Snapshots
from dissensus.numerics.hamiltonian import Chains, sample_chains
from dissensus.numerics.randomness import chain_generators, next_seed
from dissensus.utils.checks import fraction, integer, number
from dissensus.utils.tensor_tree import Tensors
from dissensus.utils.torch_private import pytree

log = logging.getLogger("dissensus")

SLOW = 30.0  # seconds; longer runs are announced by a warning
LOW = 0.4  # a chain with a lower acceptance rate is reported, whatever its target


@final
class HMC(SamplingPosterior):
    """Near-exact posterior samples of a small network, by Hamiltonian Monte Carlo on the whole training set in float64.

    The target is exp(−(N · mean loss − log p(θ)) / T).
    `fit_posthoc(loader)` runs the chains from the present weights; `fit` first trains the networks as MAP does and then
    calls it. Networks run in eval mode (no dropout, running batch statistics). Check `ds.convergence` before using samples.

    Args:
        networks: one module, not copied, or a list of M; each network has its own independent chain.
        samples: functions kept from each chain.
        every: number of trajectories per kept sample.
        warmup: trajectories before the first sample; they choose the step size.
        leapfrog: leapfrog steps (gradients) per trajectory.
        target_acceptance: acceptance rate that dual averaging aims for when it chooses the step size.
        posterior_temperature: T; below 1 samples a sharper ("cold") posterior.
        budget: most floating-point operations of the chains, at 6 per weight, example and gradient; more raise an error.
        seed: None takes one from torch's generator.
        first_chain: number of the first chain; a chain's random numbers depend only on the seed and its number.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`; data_size is required, and a prior for convergence.

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
        **prior: Unpack[MethodKeywords],
    ) -> None:
        super().__init__(networks, samples=samples, **prior)
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

        The loader is read once and kept in memory. If it holds part of the data, its mean loss counts `data_size` times.
        """
        loader = Loader.complete(loader, self)
        self.check_network()
        batch = concatenate_batches([self.prepare_batch(each) for each in self.read(loader)])
        energy = Potential(self, batch)
        gradients = self._check_budget(energy.start.shape[1], batch.size)
        first, started = energy(energy.start)[0], time.perf_counter()
        if not torch.equal(first, energy(energy.start)[0]):
            raise ValueError("expected equal outputs for equal inputs, got random numbers; remove its randomness")
        seconds = gradients * (time.perf_counter() - started)
        text = "%d chains of %d gradients on %d rows take about %.0f s; fewer samples, warmup or leapfrog take less"
        facts = (self.particles.members, gradients, batch.size, seconds)
        log.log(logging.WARNING if seconds > SLOW else logging.INFO, text, *facts)
        self.chains = sample_chains(
            energy,
            energy.start,
            samples=self.samples,
            every=self.every,
            warmup=self.warmup,
            leapfrog=self.leapfrog,
            target_acceptance=self.target_acceptance,
            generators=make_generators(self),
        )
        for chain, acceptance in enumerate(self.chains.acceptance.tolist(), start=self.first_chain):
            level = logging.WARNING if acceptance < min(LOW, self.target_acceptance / 2) else logging.INFO
            text = "chain %d accepts %.0f %% of its trajectories; if that is low, try more warm-up"
            log.log(level, text, chain, 100 * acceptance)
        found = sampled_weights(self.particles).unflatten(self.chains.draws)
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

    def _check_budget(self, parameters: int, examples: int) -> int:
        gradients = (self.warmup + self.samples * self.every) * self.leapfrog
        cost = 6.0 * gradients * self.particles.members * examples * parameters
        if cost > self.budget:
            work = f"{gradients:,} gradients × {examples:,} examples × {parameters:,} weights × 6"
            got = f"about {cost:.0e}: {self.particles.members} chains × {work}"
            raise ValueError(f"expected at most {self.budget:.0e} operations, got {got}; do less, or raise budget")
        return gradients


def make_generators(posterior: "HMC | SGHMC") -> list[torch.Generator]:
    """A generator for each chain; warns where there is no prior."""
    if posterior.prior is None:
        log.warning("without a prior a chain may never converge; pass weight_prior_std= or prior=")
    seed = next_seed() if posterior.seed is None else posterior.seed
    numbers = range(posterior.first_chain, posterior.first_chain + posterior.particles.members)
    return chain_generators(seed, numbers, posterior.device)


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
        parts = self.weights.unflatten(position)
        for name, rows in self.weights.rows().items():
            rows.copy_(parts[name])
        with torch.enable_grad():
            found = compute_gradients(self.posterior, self.batch)
        network = weights.network_parameters(self.posterior.particles).stored
        names = {name: f"{PREFIX}{name}" if name in network else name for name in self.weights.stored}
        gradients = self.weights.expand_members({name: found.gradients[full] for name, full in names.items()})
        flat = torch.cat([rows.reshape(len(position), -1) for rows in gradients.values()], dim=1)
        return self.scale * found.losses, self.scale * flat


def sampled_weights(particles: Particles) -> Weights:
    """The trained parameters of networks and likelihood."""
    found = weights.network_parameters(particles).merge_with(weights.likelihood_parameters(particles))
    return found.filter_tensors(lambda _, parameter: parameter.requires_grad)


def concatenate_batches(parts: list[Batch]) -> Batch:
    if not parts:
        raise ValueError("expected at least one batch from the loader, got none; pass the training data")
    if len(parts) == 1:
        return parts[0]
    return Batch(*pytree.tree_map(lambda *each: torch.cat(each) if isinstance(each[0], Tensor) else each[0], *parts))


class Langevin(Optimizer):
    """The optimiser that moves a chain. With velocity v, gradient g of the mean loss, ξ ~ N(0, 1), one step is

        v ← (1 − α) v − η g + √(2 α η T / N) ξ,    θ ← θ + v.

    This is Chen et al.'s eq. (15) with their rate written as η / N, so that η is on the scale of SGD with momentum 1 − α;
    α = 1 is SGLD. The target is exp(−N L / T) for a mean loss L that includes the prior. `SGHMC.default_optimizer` makes one:
    `lr` is η before the schedule, `friction` α, `heat` T / N, and `phase` returns (factor of η, factor of T), each (), for the
    next step. There is a generator for each chain; with several, parameters are stacks (M, ...).
    """

    skips = True  # a step obeys `found_inf` and reads no value on the host, so a CUDA graph can capture it

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        friction: float,
        heat: float,
        generators: Sequence[torch.Generator],
        phase: Callable[[], tuple[Tensor, Tensor]],
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "friction": friction, "heat": heat})
        self.generators, self.phase = list(generators), phase

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        moving = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        factor, hot = self.phase()
        halted: Tensor | None = getattr(self, "found_inf", None)
        for (parameter, group), noise in zip(moving, self._chain_noise([each for each, _ in moving]), strict=True):
            state, rate = self.state[parameter], group["lr"] * factor
            if "velocity" not in state:
                state["velocity"] = torch.zeros_like(parameter)
            before = state["velocity"]
            spread = (2 * group["friction"] * group["heat"] * rate * hot).sqrt()
            velocity = (1 - group["friction"]) * before - rate * parameter.grad + spread * noise
            velocity = velocity.to(parameter.dtype)
            if halted is not None:  # a gradient was not finite: nothing moves
                parameter.add_(torch.where(halted > 0, 0, velocity))
                velocity = torch.where(halted > 0, before, velocity)
            else:
                parameter.add_(velocity)
            before.copy_(velocity)  # in place: a graph reads it there

    def _chain_noise(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """ξ for each parameter. A chain's numbers come from its own generator and do not depend on the other chains."""
        chains = len(self.generators)
        sizes = [each.numel() // chains for each in parameters]
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        flat = torch.empty(chains, sum(sizes), dtype=dtype, device=parameters[0].device)  # (M, P)
        for row, generator in zip(flat, self.generators, strict=True):
            row.normal_(generator=generator)
        parts = torch.split(flat, sizes, dim=1)
        return [part.reshape(each.shape) for part, each in zip(parts, parameters, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "generators": [each.get_state() for each in self.generators]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "generators"})
        for generator, state in zip(self.generators, state_dict["generators"], strict=True):
            # A generator state from another kind of device has another length and cannot be continued here.
            if len(state) == len(generator.get_state()):
                generator.set_state(state.cpu())


class CycleSnapshots(Snapshots):
    """`wanted` snapshots in total, spread over the part after the share `tail` of each of `cycles` equal cycles."""

    def __init__(self, wanted: int, *, cycles: int, tail: float) -> None:
        super().__init__(None, None, wanted, tail=tail)
        self.cycles = max(cycles, 1)

    @property
    def reads_next_step(self) -> bool:
        _, _, began, steps = self._read_plan()
        if self._is_waiting or not steps:
            return super().reads_next_step
        done = int(self.observed) - began
        cycles = min(self.cycles, steps)
        cycle = min(done * cycles // steps, cycles - 1)
        first, end = (math.ceil(each * steps / cycles) for each in (cycle, cycle + 1))
        room = max(1, math.floor((1 - self.tail) * (end - first)))
        each = (cycle + 1) * self.wanted // cycles - cycle * self.wanted // cycles  # all cycles: `wanted`
        every, left = max(1, room // max(1, each)), end - 1 - done
        return left % every == 0 and 0 <= left < min(room, each * every)


@final
class SGHMC(RecordingPosterior):
    """Posterior samples from Markov chains driven by noisy gradients of batches (stochastic gradient HMC).

    The target is exp(−(N · mean loss − log p(θ)) / T).
    `fit` makes the optimiser and accepts no other. In each cycle the rate follows a cosine, step by step; the first part
    explores without noise, the last part samples. No proposal is rejected, so the samples are biased: with rate η and
    curvature λ of the mean loss, a Gaussian posterior's variance is too large by 1 / (1 − ηλ / (2 (2 − α))), and gradient
    noise adds to it. Without a prior there may be no distribution to converge to. Gradient clipping changes the target.

    Args:
        networks, posterior_temperature, first_chain: as in `HMC`.
        members: functions kept from each chain, spread evenly over the cycles.
        cycles: cycles of the rate in a run; 0 keeps the rate constant, with noise throughout.
        exploration: share of each cycle without noise and without snapshots; with cycles = 0, the burn-in.
        lr: η, on the scale of SGD.
        friction: α, 1 − momentum; 1 is SGLD.
        seed: seed of the noise; None takes one from torch's generator when training begins.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`; data_size is required.
    """

    name = "sghmc"
    needed = ("data_size",)
    optimizers = (Langevin,)
    random = False
    records_all = True
    recorder: LastSnapshots

    def __init__(
        self,
        networks: Networks,
        *,
        members: int = 12,
        cycles: int = 4,
        exploration: float = 0.8,
        lr: float = 0.1,
        friction: float = 0.1,
        posterior_temperature: float = 1.0,
        seed: int | None = None,
        first_chain: int = 0,
        **prior: Unpack[MethodKeywords],
    ) -> None:
        super().__init__(networks, samples=integer("members", members), **prior)
        self.members = members
        self.cycles = integer("cycles", cycles, least=0)
        self.exploration = fraction("exploration", exploration)
        self.lr = number("lr", lr, above=0)
        self.friction = number("friction", friction, above=0, most=1)
        self.posterior_temperature = number("posterior_temperature", posterior_temperature, least=0)
        self.seed = None if seed is None else integer("seed", seed, least=0)
        self.first_chain = integer("first_chain", first_chain, least=0)
        plan = CycleSnapshots(members, cycles=cycles, tail=exploration)
        self.recorder = LastSnapshots(self.recorded_weights, plan, kept=members)

    def default_optimizer(self) -> Langevin:
        """A new `Langevin` optimiser for these chains."""
        assert self.data_size is not None  # a required argument
        return Langevin(
            self.parameter_groups(self.lr),
            self.lr,
            friction=self.friction,
            heat=self.posterior_temperature / self.data_size,
            generators=make_generators(self),
            phase=self.phase,
        )

    def phase(self) -> tuple[Tensor, Tensor]:
        """(factor of the rate, 1 with noise or 0 without) for the next step, () each; both 1 before a run begins."""
        snapshots = self.recorder.snapshots
        _, _, began, steps = snapshots.plan
        done, begun = (snapshots.observed.value - began) * max(self.cycles, 1), steps > 0
        position = (done % steps.clamp(min=1)) / steps.clamp(min=1)  # share of the present cycle, before the next step
        if not self.cycles:
            return torch.ones_like(position), torch.ones_like(position)
        cosine = 0.5 * (1 + torch.cos(math.pi * position))
        return torch.where(begun, cosine, 1.0), (~begun | (position >= self.exploration)).to(position.dtype)

    def default_schedule(self, epochs: int) -> Callable[[int], float]:
        """Constant over epochs: the optimiser changes the rate at every step."""
        return lambda epoch: 1.0
