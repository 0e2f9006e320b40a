"""Sampling: one network is trained as ever, functions are drawn by sampling its weights.

A method says only how weights are sampled (`sample`). Drawing, refreshing batch statistics, storing the draw with the
posterior and finding it again in a file are derived here.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import nn

from dissensus.core.functions import DrawnFunctions, MemberFunctions
from dissensus.core.likelihood import Classification, Likelihood
from dissensus.core.modes import eval_mode
from dissensus.core.particles import Particles
from dissensus.core.posterior import Posterior
from dissensus.numerics.checks import check_whole
from dissensus.numerics.randomness import own_generator
from dissensus.numerics.tree import Tensors
from dissensus.surgery.normalization import refresh_statistics, statistics_names


class SamplingPosterior(Posterior):
    """Base class of methods that sample weights of the caller's module, which they hold itself. `samples`: functions per draw.

    `latents`: tensors that are trained beside the network's, deviations for example. Until `ds.refresh` has stored a draw,
    every `draw()` samples anew and uses the batch statistics of the network as it was trained. Which parameters take part
    is settled when it is built: those that are trained then.
    """

    untrained: ClassVar[tuple[str, ...]] = ("samples", "stored")
    own_statistics: ClassVar[bool] = True  # whether sampled networks have batch statistics of their own
    random: ClassVar[bool] = True  # whether `sample` takes random numbers; if not, a draw leaves torch's stream alone
    samples_frozen: ClassVar[bool] = False  # whether parameters that are not trained may be sampled as well
    stored: Particles | None

    def __init__(
        self,
        module: nn.Module,
        *,
        samples: int,
        likelihood: Likelihood | None = None,
        latents: nn.Module | None = None,
        weight_prior_std: float | None = None,
        data_size: int | None = None,
    ) -> None:
        check_whole("samples", samples)
        if samples < 1:
            raise ValueError(f"expected at least one sample, got {samples}; 20 is a usual number")
        particles = Particles.hold(module, likelihood or Classification(), latents)
        super().__init__(particles, weight_prior_std=weight_prior_std, data_size=data_size)
        self.samples = samples
        self.stored = None
        self._built_with = dict(module.named_parameters())
        self._trained = {name: p for name, p in self._built_with.items() if p.requires_grad}
        if not self._trained and not self.samples_frozen:
            raise ValueError(
                f"expected a network with parameters that are trained, got none; {type(self).__name__} samples those alone: "
                "set requires_grad on them"
            )

    @abstractmethod
    def sample(self, generator: torch.Generator | None = None) -> Tensors:
        """Name of a tensor of the network -> (S, ...) samples, without a graph. The other tensors stay as they are.

        Random numbers come from the generator, on the posterior's device; None is torch's own stream, which all threads share.
        """

    @property
    def network(self) -> nn.Module:
        """The caller's module."""
        return self.particles.template.network

    def draw(self) -> DrawnFunctions:
        if (stored := self.stored) is not None:
            return SampledFunctions(stored)
        with self.particles.turn():
            return SampledFunctions(self._particles_of(self.sample(self._generator())))

    def _generator(self) -> torch.Generator | None:
        return own_generator(self.device) if self.random else None

    def current(self) -> DrawnFunctions:
        return MemberFunctions(self.particles)

    def store_draw(self, loader: Iterable[Any]) -> None:
        with torch.no_grad():
            drawn = self._particles_of(self.sample(self._generator()))
        refresh_statistics(drawn, loader, self.device)
        self.stored = drawn

    def _particles_of(self, samples: Tensors) -> Particles:
        """S members with these tensors (S, ...) and copies of the others; batch statistics of their own if `own_statistics`."""
        self.check_network()
        held = {**self.particles.shared_parameters(), **self.particles.shared_buffers()}
        kept = set(self.particles.shared.state_dict())
        statistics = {f"network.{name}" for name in statistics_names(self.network) if self.own_statistics}
        sampled = {f"network.{name}": tensor for name, tensor in samples.items()}
        count = len(next(iter(samples.values()))) if samples else self.samples
        template = self.particles.copied_template()
        template.always_eval = sorted({*template.always_eval, *self.particles.frozen_norms()})
        return Particles.split(
            template,
            {name: sampled.get(name, [tensor.detach()] * count) for name, tensor in held.items()},
            own=lambda name: name in sampled or name in statistics,
            kept=kept,
            members=count,
        )

    def check_network(self) -> None:
        """Raises where the network has other parameters, or trains others, than when this was built."""
        found, known = dict(self.network.named_parameters()), self._built_with
        changed = [name for name in {**found, **known} if found.get(name) is not known.get(name)]
        if changed:
            raise ValueError(
                f"expected the parameters that {type(self).__name__} was built with, got '{changed[0]}' added, removed or "
                "replaced since; change the network first, then build the posterior"
            )
        thawed = [name for name, parameter in found.items() if parameter.requires_grad and name not in self._trained]
        if thawed:
            raise ValueError(
                f"expected the parameters that were trained when {type(self).__name__} was built, got '{thawed[0]}' trained "
                "since; set requires_grad first, then build the posterior"
            )

    def config(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "weight_prior_std": self.weight_prior_std,
            "data_size": self.data_size,
            "stored": self.stored is not None,
            "frozen": [name for name in self._built_with if name not in self._trained],
        }

    @classmethod
    def skeleton(cls, network: nn.Module, config: dict[str, Any], likelihood: Likelihood) -> "SamplingPosterior":
        keywords = {key: value for key, value in config.items() if key not in ("stored", "frozen")}
        for name, parameter in network.named_parameters():
            if "frozen" in config and parameter.is_floating_point():
                parameter.requires_grad_(name not in config["frozen"])
        posterior = cls(network, likelihood=likelihood, **keywords)
        if config.get("stored"):
            posterior.stored = posterior._blank()
        return posterior

    def sampled_names(self) -> list[str]:
        """Names of the network's tensors that `sample` gives."""
        return list(self._trained)

    def _blank(self) -> Particles:
        """A stored draw of the right shapes, to be filled from a file."""
        tensors = {**dict(self.network.named_parameters()), **dict(self.network.named_buffers())}
        return self._particles_of(
            {
                name: tensors[name].detach().new_zeros(self.samples, *tensors[name].shape)
                for name in self.sampled_names()
            }
        )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """A state with a stored draw brings it along, one without takes it away."""
        if not any(key.startswith(f"{prefix}stored.") for key in state_dict):
            self.stored = None
        elif self.stored is None:
            self.stored = self._blank()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class SampledFunctions(DrawnFunctions):
    """Sampled networks in eval mode, whatever the mode of the network that is being trained: the functions are fixed."""

    def __init__(self, particles: Particles) -> None:
        super().__init__()
        self.particles = particles
        self.members = particles.members
        self.training = False

    def each(self, function: Callable[..., Any], *args: Any) -> Any:
        with self.particles.turn(), eval_mode(self.particles, self.particles.template):
            return self.particles.each(function, *args)

    def member(self, index: int) -> nn.Module:
        return self.particles.member(index).eval()

    @property
    def likelihood(self) -> Likelihood:
        return self.particles.likelihood
