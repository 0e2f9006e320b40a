"""SGHMC: a chain of networks whose steps are noisy gradients, kept now and then.

Welling & Teh, "Bayesian learning via stochastic gradient Langevin dynamics", ICML 2011.
Chen, Fox & Guestrin, "Stochastic gradient Hamiltonian Monte Carlo", ICML 2014.
Zhang, Li, Zhang, Chen & Wilson, "Cyclical stochastic gradient MCMC for Bayesian deep learning", ICLR 2020.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim import Optimizer

from dissensus.core.likelihood import Likelihood
from dissensus.core.prior import PriorKeywords
from dissensus.methods.parts.networks import Networks
from dissensus.methods.parts.trajectory import Snapshots
from dissensus.methods.snapshots import LastSnapshots, SnapshotEnsemble
from dissensus.numerics.checks import number, share, whole
from dissensus.numerics.randomness import chain_generators, next_seed

log = logging.getLogger("dissensus")


class Langevin(Optimizer):
    """The step of a chain, v the velocity, g the gradient of the mean loss, ξ ~ N(0, 1):

        v ← (1 − α) v − η g + √(2 α η T / N) ξ,    θ ← θ + v.

    Chen et al.'s eq. (15) with their rate as η / N, so that η is what SGD with momentum 1 − α would take; α = 1 is SGLD. Its
    target is exp(−N L / T), L the mean loss with its prior. `SGHMC.default_optimizer` makes one.

    Args:
        params: parameter groups, as optimisers take them.
        lr: η before the schedule.
        friction: α.
        heat: T / N.
        generators: one for each chain; with several, parameters are stacks (M, ...).
        phase: gives (factor of η, factor of T), two tensors (), for the step to come.
    """

    skips = True  # a step obeys `found_inf` and reads nothing on the host: a CUDA graph can hold it

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
        for (parameter, group), noise in zip(moving, self._noise([each for each, _ in moving]), strict=True):
            state, rate = self.state[parameter], group["lr"] * factor
            before = state.get("velocity")
            before = torch.zeros_like(parameter) if before is None else before
            spread = (2 * group["friction"] * group["heat"] * rate * hot).sqrt()
            velocity = (1 - group["friction"]) * before - rate * parameter.grad + spread * noise
            velocity = velocity.to(parameter.dtype)
            if halted is not None:  # something was not finite: nothing moves
                parameter.add_(torch.where(halted > 0, 0, velocity))
                velocity = torch.where(halted > 0, before, velocity)
            else:
                parameter.add_(velocity)
            if "velocity" in state:
                before.copy_(velocity)  # in place: a graph reads it there
            else:
                state["velocity"] = velocity

    def _noise(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """ξ for each parameter. Each chain's generator gives all numbers of that chain at once, whoever else there is."""
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
            # The state of another kind of device, whose numbers this one cannot go on with, has another length.
            if len(state) == len(generator.get_state()):
                generator.set_state(state.cpu())


class CycleSnapshots(Snapshots):
    """Snapshots at the ends of `cycles` equal parts of a run, `wanted` in all, spread over what follows `tail` of each."""

    def __init__(self, wanted: int, *, cycles: int, tail: float) -> None:
        super().__init__(None, None, wanted, tail=tail)
        self.cycles = max(cycles, 1)

    @property
    def upcoming(self) -> bool:
        _, _, began, steps = self._planned()
        if self._waiting or not steps:
            return super().upcoming
        done = int(self.observed) - began
        cycles = min(self.cycles, steps)
        cycle = min(done * cycles // steps, cycles - 1)
        first, end = (math.ceil(each * steps / cycles) for each in (cycle, cycle + 1))
        room = max(1, math.floor((1 - self.tail) * (end - first)))
        each = (cycle + 1) * self.wanted // cycles - cycle * self.wanted // cycles  # all cycles: `wanted`
        every, left = max(1, room // max(1, each)), end - 1 - done
        return left % every == 0 and 0 <= left < min(room, each * every)

    def position(self) -> tuple[Tensor, Tensor]:
        """(share of its cycle that is behind before the next step, whether a run was begun), both ()."""
        began, steps = self.plan[2], self.plan[3]
        done = (self.observed.value - began) * self.cycles
        return (done % steps.clamp(min=1)) / steps.clamp(min=1), steps > 0


class SGHMC(SnapshotEnsemble):
    """Snapshots of chains that sample exp(−(N · mean loss − log p(θ)) / T), by noisy gradients of batches.

    `fit` makes its optimiser, and takes no other. Each cycle goes down a cosine in rate, step by step; its first part
    explores without noise, its last part samples. Nothing is rejected: steps of rate η make a Gaussian posterior's variance too
    large by 1 / (1 − ηλ / (2 (2 − α))) where the mean loss has curvature λ, and the gradients' own noise adds to it. Without a
    prior a chain need not have anything to converge to. Clipped gradients change what is sampled.

    Args:
        networks: one module, held and not copied, or a list of M, each with a chain of its own that does not depend on
            the others.
        members: functions kept of each chain, the same number in every cycle but for rounding.
        cycles: of the rate over a run; 0 keeps the rate, with noise throughout.
        exploration: share of each cycle without noise, in which nothing is kept; with cycles = 0, the burn-in.
        lr: η, as SGD would take it.
        friction: α, 1 − momentum; 1 is SGLD.
        posterior_temperature: T; below 1 samples a sharper ("cold") posterior.
        seed: of the noise; None takes one from torch's generator when training begins.
        first_chain: the number of the first chain; a chain's noise depends on the seed and its number alone.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`; data_size is required.
    """

    name = "sghmc"
    needed = ("data_size",)
    optimizers = (Langevin,)

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
        likelihood: Likelihood | None = None,
        **prior: Unpack[PriorKeywords],
    ) -> None:
        super().__init__(networks, members=members, likelihood=likelihood, **prior)
        self.cycles = whole("cycles", cycles, least=0)
        self.exploration = share("exploration", exploration)
        self.lr = number("lr", lr, above=0)
        self.friction = number("friction", friction, above=0, most=1)
        self.posterior_temperature = number("posterior_temperature", posterior_temperature, least=0)
        self.seed = None if seed is None else whole("seed", seed, least=0)
        self.first_chain = whole("first_chain", first_chain, least=0)
        self.recorder = LastSnapshots(
            self.recorded, CycleSnapshots(members, cycles=cycles, tail=exploration), kept=members
        )

    def default_optimizer(self) -> Langevin:
        """The chains' own, at their beginning."""
        assert self.data_size is not None  # it is needed
        if self.prior is None:
            log.warning("a chain without a prior may drift without end; pass weight_prior_std= or prior=")
        seed = next_seed() if self.seed is None else self.seed
        numbers = range(self.first_chain, self.first_chain + self.particles.members)
        return Langevin(
            self.parameter_groups(self.lr),
            self.lr,
            friction=self.friction,
            heat=self.posterior_temperature / self.data_size,
            generators=chain_generators(seed, numbers, self.device),
            phase=self.phase,
        )

    def phase(self) -> tuple[Tensor, Tensor]:
        """(factor of the rate, 1 with noise or 0 without) of the next step, () each; both 1 before a run was begun."""
        snapshots = self.recorder.snapshots
        assert isinstance(snapshots, CycleSnapshots)
        position, begun = snapshots.position()
        if not self.cycles:
            return torch.ones_like(position), torch.ones_like(position)
        cosine = 0.5 * (1 + torch.cos(math.pi * position))
        return torch.where(begun, cosine, 1.0), (~begun | (position >= self.exploration)).to(position.dtype)

    def default_schedule(self, epochs: int) -> Callable[[int], float]:
        """Constant over epochs: the rate goes by steps, in the optimiser."""
        return lambda epoch: 1.0
