"""Sampling: networks are trained as usual; functions are drawn by sampling weights around each network.

A method only defines how weights are sampled (`sample`), or has a recorder that watches the training and samples
(`RecordingPosterior`). Drawing, re-estimating batch statistics, and storing, saving and loading the draw are done here.
"""

from __future__ import annotations

import logging
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self, Unpack, cast, final

import torch
from torch import Tensor, nn

from dissensus.core import weights
from dissensus.core.drawn_functions import DrawnFunctions, MemberFunctions, join_families
from dissensus.core.member import NUMBER, PREFIX
from dissensus.core.networks import MethodKeywords, Networks, NetworksPosterior, StoringPosterior
from dissensus.core.particles import Particles, copy_to_device, member_subset
from dissensus.core.weights import Recorder, Weights
from dissensus.engine.cuda_graphs import CapturedFunction
from dissensus.engine.fast_optimisers import use_channels_last
from dissensus.engine.memory import format_bytes, free_bytes
from dissensus.layers.batch_norm import refresh_statistics
from dissensus.numerics.randomness import own_generator
from dissensus.utils.batch_norm_names import statistics_names
from dissensus.utils.checks import integer
from dissensus.utils.parameter_groups import constant_tail
from dissensus.utils.sharding import check_copyable, gather_full_tensors
from dissensus.utils.tensor_tree import Tensors
from dissensus.utils.torch_modes import eval_mode

log = logging.getLogger("dissensus")


class SamplingPosterior(StoringPosterior, NetworksPosterior):
    """Base class of methods that sample weights around one trained network, or around each of a list.

    Until `ds.refresh` has stored a draw, every `draw()` samples again and uses the networks' batch statistics from
    training. Only parameters that require gradients at construction are sampled.

    Args:
        networks: one module, a list of M, or another posterior's `Particles`.
        samples: functions per network and draw.
        latents: extra trained tensors, for example standard deviations.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """

    own_statistics: ClassVar[bool] = True  # whether sampled networks have their own batch statistics
    # Whether `sample` uses random numbers; if not, a draw does not advance torch's generator.
    random: ClassVar[bool] = True
    samples_frozen: ClassVar[bool] = False  # whether frozen parameters may be sampled, too
    shares_unsampled: ClassVar[bool] = False  # whether functions of one network share the tensors that are not sampled
    can_shard: ClassVar[bool] = False  # whether `sample` takes weights of which each process has a part
    stored: Families | None

    def __init__(
        self, networks: Networks, *, samples: int, latents: nn.Module | None = None, **prior: Unpack[MethodKeywords]
    ) -> None:
        super().__init__(networks, latents=latents, **prior)
        check_copyable(self.network)  # samples run in copies
        if self.particles.divided and not self.can_shard:
            kind = type(self).__name__
            raise NotImplementedError(f"expected undivided networks for {kind}, got divided ones; leave shard out")
        self.samples = integer("samples", samples, hint="20 is a usual number")
        self.stored = None
        self.built_with = weights.network_parameters(self.particles)
        self.trained = self.built_with.filter_tensors(lambda _, parameter: parameter.requires_grad)
        if not self.trained.stored and not self.samples_frozen:
            raise ValueError(f"expected trainable parameters for {type(self).__name__}, got none; set requires_grad")

    @abstractmethod
    def sample(self, samples: int, generator: torch.Generator | None = None) -> Tensors:
        """Name of a tensor of the networks -> (M, S, ...) samples, detached. Tensors not named keep their values.

        Learned noise may be included, as "likelihood.log_noise".

        Random numbers come from `generator`, on the posterior's device; None is torch's global one, which all threads share.
        """

    @property
    @final
    def network(self) -> nn.Module:
        """The caller's module; for a list of networks, the template that they run in."""
        return self.particles.template.network

    @final
    def public_tensors(self, tensors: Tensors) -> Tensors:
        """What is public of tensors (M, ...): without the first axis where one module is held."""
        own = self.built_with.own
        return gather_full_tensors(tensors if own else {name: rows[0] for name, rows in tensors.items()})

    def draw(self) -> DrawnFunctions:
        if (stored := self.stored) is not None:
            return self.make_functions(stored)
        with self.particles.lock_network():
            return self.make_functions(self.sample_families())

    def current(self) -> DrawnFunctions:
        return MemberFunctions(self.particles)

    def store_draw(self, loader: Iterable[Any]) -> None:
        self.stored = self.sample_families(loader)

    @final
    @torch.no_grad()
    def sample_families(self, loader: Iterable[Any] | None = None) -> Families:
        """New samples, in parts on the host if they do not fit on the device; a loader re-estimates batch statistics."""
        self.check_network()
        generator = own_generator(self.device) if self.random else None
        at_once = self._samples_at_once()
        if at_once >= self.samples:
            families = self._make_families(self.sample(self.samples, generator))
            self._refresh_statistics(families.each, loader)
            return families
        parts: list[list[Particles]] = [[] for _ in range(self.particles.members)]
        for start in range(0, self.samples, at_once):
            samples = self.sample(min(at_once, self.samples - start), generator)
            for m, mine in enumerate(parts):
                family = self.make_family(samples, slice(m, m + 1), apart=True)
                self._refresh_statistics([family], loader)
                mine.append(family.to("cpu"))
        return Families((family for mine in parts for family in mine), parts=True)

    def _samples_at_once(self) -> int:
        """How many samples of every network fit in memory, with twice the space: they are made and then copied."""
        free, needed = free_bytes(self.device), 2 * self.drawn_bytes()
        if free is None or not self.random or self.shares_unsampled or needed < 0.9 * free:
            return self.samples
        at_once = max(int(0.45 * free / needed * self.samples), 1)
        parts = f"parts of {at_once} of {self.samples} samples, which are kept in the host's memory"
        why = f"a draw of {format_bytes(needed // 2)} does not fit on {self.device} ({format_bytes(free)} free)"
        log.info("%s: it is made in %s", why, parts)
        return at_once

    def _refresh_statistics(self, families: Iterable[Particles], loader: Iterable[Any] | None) -> None:
        if loader is not None:
            for family in families:
                functions, count = SampledFunctions(family, self.device), getattr(loader, "length", None)
                faster = partial(CapturedFunction, drawn=functions, count=count)
                keeps_state = any(each.state for each in self.particles._forward_attributes.values())
                plain = keeps_state or self.network_is_random or not self._known.shapes  # which tell that it was tried
                refresh_statistics(family, self.read(loader), self.device, None if plain else faster)

    @final
    def make_functions(self, families: Families) -> DrawnFunctions:
        """The functions of these particles, in their order."""
        drawn = join_families(SampledFunctions(family, self.device) for family in families.each)
        drawn.networks = self.particles.members
        return drawn

    def _make_families(self, samples: Tensors) -> Families:
        """Particles with these tensors (M, S, ...), network by network, and copies of all others that are not frozen."""
        members = self.particles.members
        if members > 1 and (self.shares_unsampled or len(self.particles.templates) > 1):
            return Families(self.make_family(samples, slice(m, m + 1)) for m in range(members))
        return Families([self.make_family(samples, slice(0, members))])

    def make_family(self, samples: Tensors, networks: slice, *, apart: bool = False) -> Particles:
        """Functions of these networks, with own batch statistics if `own_statistics`; `apart`: with copies of frozen ones."""
        particles = self.particles
        stacked = {**particles.own_parameters(), **particles.own_buffers()}
        own = {name: rows[networks] for name, rows in stacked.items() if name != NUMBER}
        common = {**particles.shared_parameters(), **particles.shared_buffers()}
        count = len(next(iter(samples.values()))[0]) if samples else self.samples
        several = networks.stop - networks.start > 1
        noise = weights.likelihood_parameters(particles).stored.keys() - self.built_with.stored.keys()
        sampled = {n if n in noise else f"{PREFIX}{n}": rows[networks].flatten(0, 1) for n, rows in samples.items()}
        statistics = {f"{PREFIX}{name}" for name in statistics_names(self.network) if self.own_statistics}
        total = count * (networks.stop - networks.start)
        frozen = (n for n, p in particles.shared_parameters().items() if not p.requires_grad and n not in sampled)
        held = [] if apart else list(frozen)
        rows: dict[str, Any] = {n: [t if n in held else t.detach()] * total for n, t in common.items()}
        rows |= {name: t.detach().repeat_interleave(count, dim=0) for name, t in own.items() if name not in sampled}
        template = particles.copy_template(networks.start)
        template.always_eval = sorted({*template.always_eval, *particles.frozen_norms()})
        mine = {*sampled, *statistics, *(own if several else ())}
        kept = {*particles.shared.state_dict(), *particles.own.state_dict()}
        rows |= sampled
        family = Particles.split(template, rows, own=mine.__contains__, kept=kept, members=total, held=held)
        use_channels_last(family)  # as `fit` has done with the networks
        return family

    @final
    def check_network(self) -> None:
        """Raises if the network's parameters, or their requires_grad, have changed since the posterior was built."""
        found, known = weights.network_parameters(self.particles).stored, self.built_with.stored
        if changed := [name for name in {**found, **known} if found.get(name) is not known.get(name)]:
            got = f"'{changed[0]}' added, removed or replaced since; change the network first, then build the posterior"
            raise ValueError(f"expected the parameters that {type(self).__name__} was built with, got {got}")
        if thawed := [name for name, p in found.items() if p.requires_grad and name not in self.trained.stored]:
            built = f"as when {type(self).__name__} was built, got '{thawed[0]}', which was frozen then"
            raise ValueError(f"expected the same trainable parameters {built}; build the posterior afterwards")

    @final
    def frozen_names(self) -> list[str]:
        """Names of the parameters that were frozen when the posterior was built, and are not sampled."""
        return [name for name in self.built_with.stored if name not in self.trained.stored]

    def sampled_names(self) -> list[str]:
        """Names of the tensors that `sample` returns."""
        return list(self.trained.stored)

    @final
    def drawn_bytes(self) -> int:
        rows = self.trained.rows()
        return self.samples * sum(rows[name].nbytes for name in self.sampled_names() if name in rows)

    @final
    def draw_sizes(self, state: Tensors | None = None) -> list[int] | None:
        if state is None:
            return None if self.stored is None else self.stored.sizes
        found = [(re.match(r"stored\.(\d+)\.own\.", key), tensor) for key, tensor in state.items()]
        sizes = {int(key[1]): len(tensor) for key, tensor in found if key is not None}  # family -> its functions
        return [sizes[family] for family in sorted(sizes)] or [self.samples]

    def blank_draw(self, sizes: Sequence[int], state: Tensors) -> Families:
        members = self.particles.members
        kinds = (weights.likelihood_parameters, weights.network_buffers, weights.network_parameters)
        one = {name: tensor for kind in kinds for name, tensor in kind(self.particles).first_member().items()}
        blank = {n: one[n].new_zeros(1).expand(members, self.samples, *one[n].shape) for n in self.sampled_names()}
        if max(sizes) >= self.samples:
            return self._make_families(blank)
        parts = []
        for i, size in enumerate(sizes):
            network = i * members // len(sizes)  # every network has the same number of parts
            some = {name: rows[:, :size] for name, rows in blank.items()}
            parts.append(self.make_family(some, slice(network, network + 1), apart=True).to("cpu"))
        return Families(parts, parts=True)


class Families(nn.ModuleList):
    """Particles of drawn functions, in order: one for all, one per network, or (`parts`) several of each, on the host."""

    def __init__(self, families: Iterable[Particles], *, parts: bool = False) -> None:
        super().__init__(families)
        self.parts = parts

    @property
    def each(self) -> list[Particles]:
        return [cast(Particles, family) for family in self]

    @property
    def sizes(self) -> list[int]:
        return [family.members for family in self.each]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if not self.parts:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for family in self.each:  # one after the other, so that only one at a time is on the device
            family._apply(fn).to("cpu")  # type: ignore[no-untyped-call]
        return self


class SampledFunctions(DrawnFunctions):
    """Sampled networks as fixed functions, always in eval mode, also while the network itself is in training mode."""

    def __init__(self, particles: Particles, device: torch.device) -> None:
        """`device`: where the functions run; their tensors may be kept on the host."""
        super().__init__()
        self.particles, self.device = particles, device
        self.members, self.training = particles.members, False

    def map_members(self, function: Callable[..., Any], *args: Any) -> Any:
        here = self.particles.device == self.device
        particles = self.particles if here else copy_to_device(self.particles, self.device)
        with self.particles.lock_network(), eval_mode(particles, particles.template):
            return particles.map_members(function, *args)

    def call_member(self, index: int, function: Callable[..., Any], *args: Any) -> Any:
        both = self.particles.member_tensors(index)
        params, buffers = ({n: t.to(self.device) for n, t in each.items()} for each in both)
        with self.particles.lock_network(), eval_mode(self.particles, self.particles.template):
            return self.particles.call(function, params, buffers, *args)[0]

    def build_subset(self, rows: slice) -> DrawnFunctions:
        return SampledFunctions(member_subset(self.particles, rows), self.device)

    def member(self, index: int) -> nn.Module:
        return self.particles.member(index).to(self.device).eval()


def stack_networks(draw: Callable[[int], Tensors], members: int) -> Tensors:
    """Name -> (M, S, ...), stacked from `draw(m)`, which returns (S, ...) for network m."""
    each = [draw(m) for m in range(members)]
    return {name: torch.stack([one[name] for one in each]) for name in each[0]}


def sample_normal(samples: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """(S, ...) standard normal numbers of the shape, dtype and device of `like`."""
    return torch.randn(samples, *like.shape, dtype=like.dtype, device=like.device, generator=generator)


class RecordingPosterior(SamplingPosterior):
    """Base class of methods that record the weights during training and sample from the record.

    Arguments as in `SamplingPosterior`. A subclass sets `self.recorder = MyRecorder(self.recorded_weights)`.
    """

    recorder: Recorder
    can_shard = True  # if the recorder can
    records_all: ClassVar[bool] = False  # whether buffers and learned noise are recorded, so that a draw needs no data
    floor: ClassVar[float] = 0.5  # factor of the rate at the end of the default schedule
    judged_by: ClassVar[Literal["current", "draw"] | None] = None  # a record belongs to a whole run, not to an epoch

    def draw(self) -> DrawnFunctions:
        """M functions sampled from the record; during a run, until there is a record, the networks themselves."""
        under_way = int(self.steps) - self.steps_before_run < (self.run_length or 0)
        return self.current() if under_way and self.stored is None and not self.ready else super().draw()

    def recorded_weights(self) -> Weights:
        """The weights to record; raises if the network's parameters have changed since the posterior was built."""
        self.check_network()
        if not self.records_all:
            return self.trained
        # Looked up anew: moving a network replaces its buffers.
        others = weights.network_buffers(self.particles), weights.likelihood_parameters(self.particles)
        return self.trained.merge_with(others[0]).merge_with(others[1])

    def store_draw(self, loader: Iterable[Any]) -> None:
        if not self.records_all:
            super().store_draw(loader)

    def default_schedule(self, epochs: int) -> Callable[[int], float]:
        """Constant, then linear to `floor`, then constant over the last quarter, so that the weights keep moving."""
        return lambda epoch: constant_tail(epoch / max(epochs, 1), floor=self.floor)

    def sample(self, samples: int, generator: torch.Generator | None = None) -> Tensors:
        found = self.recorder.sample(samples, generator)
        if not self.recorder.ready:
            got = f"none, or too few for its {type(self.recorder).__name__}; train with fit"
            raise ValueError(f"expected observed steps, got {got}, or call observe(optimizer) each step")
        return found

    @final
    def draw_for_validation(self, loader: Iterable[Any]) -> DrawnFunctions:
        """Sampled networks, as they would be drawn at the end, but with batch statistics of these (validation) inputs."""
        # A pass over the training set for each look would cost more than the training; the network's own statistics are not
        # good enough: TRADI on digits then has an NLL of 0.73, against 0.186 (training rows) and 0.185 (these rows).
        return self.make_functions(self.sample_families(loader))

    def sampled_names(self) -> list[str]:
        return list(self.recorder.weights.stored)
