"""Weights: the named tensors of one network or many, with the member axis first; and recorders, which observe them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dissensus.core.member import PREFIX
from dissensus.core.particles import Particles
from dissensus.numerics.flat_weights import state_dtype
from dissensus.utils.sharding import gather_full_tensor, is_divided, shard_last_axis
from dissensus.utils.tensor_tree import Tensors


@dataclass(frozen=True)
class Weights:
    """Tensors of the networks by name. `stored`: as in the particles, (M, ...) if `own`, else one for all members."""

    stored: Mapping[str, Tensor]
    own: frozenset[str]
    initial_members: int  # number of members at construction

    @property
    def members(self) -> int:
        """Number of members now: processes that train together may each hold a part of them."""
        return next((len(tensor) for name, tensor in self.stored.items() if name in self.own), self.initial_members)

    def filter_tensors(self, wanted: Callable[[str, Tensor], bool]) -> Weights:
        """The tensors for which wanted(name, stored tensor) is true."""
        return Weights({n: t for n, t in self.stored.items() if wanted(n, t)}, self.own, self.initial_members)

    def merge_with(self, other: Weights) -> Weights:
        """These and the other's tensors; for a name in both, this one's."""
        others = {name: tensor for name, tensor in other.stored.items() if name not in self.stored}
        return Weights({**self.stored, **others}, self.own | other.own, self.initial_members)

    def expand_members(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Name -> detached views (M, ...) of tensors that have the shapes of the stored ones."""
        found = {name: t.detach() for name, t in tensors.items()}
        return {name: t if name in self.own else t.expand(self.members, *t.shape) for name, t in found.items()}

    def rows(self) -> Tensors:
        """Name -> (M, ...) views of the present tensors."""
        return self.expand_members(self.stored)

    def flat(self, dtype: torch.dtype | None = None) -> Tensor:
        """(M, P) copies of all entries of each member, tensor after tensor; in at least float32 by default."""
        # If processes hold parts of the weights, they hold parts of P, too; one member at a time is put together.
        dtype = dtype or state_dtype(list(self.stored.values()))
        rows = self.rows()
        if (like := next(filter(is_divided, rows.values()), None)) is None:
            return torch.cat([each.to(dtype).reshape(self.members, -1) for each in rows.values()], dim=1)

        def whole_row(m: int) -> Tensor:
            return torch.cat([gather_full_tensor(each[m]).to(dtype).flatten() for each in rows.values()])

        return torch.stack([shard_last_axis(whole_row(m), like) for m in range(self.members)])

    def unflatten(self, flat: Tensor) -> Tensors:
        """Name -> (*S, *shape) views of flat (*S, P), in the dtype of the tensors."""
        like = self.first_member()
        parts = torch.split(flat, [tensor.numel() for tensor in like.values()], dim=-1)
        pairs = zip(like.items(), parts, strict=True)
        return {name: part.reshape(*flat.shape[:-1], *t.shape).to(t.dtype) for (name, t), part in pairs}

    def first_member(self) -> Tensors:
        """Name -> the first member's tensor."""
        return {name: rows[0] for name, rows in self.rows().items()}


def network_parameters(particles: Particles) -> Weights:
    """The networks' parameters."""
    return _network_weights(particles, particles.shared_parameters(), particles.own_parameters())


def network_buffers(particles: Particles) -> Weights:
    """The networks' buffers."""
    return _network_weights(particles, particles.shared_buffers(), particles.own_buffers())


def likelihood_parameters(particles: Particles) -> Weights:
    """The likelihood's parameters, such as learned noise, by their full names: "likelihood.log_noise"."""
    stored = {**particles.shared_parameters(), **particles.own_parameters()}
    mine = {name: tensor for name, tensor in stored.items() if name.startswith("likelihood.")}
    return Weights(mine, frozenset(particles.own_parameters()) & mine.keys(), particles.members)


def _network_weights(particles: Particles, shared: Tensors, own: Tensors) -> Weights:
    stored = {n.removeprefix(PREFIX): t for n, t in {**shared, **own}.items() if n.startswith(PREFIX)}
    return Weights(stored, frozenset(n.removeprefix(PREFIX) for n in own), particles.members)


class Recorder(nn.Module, ABC):
    """Base class of recorders: they observe weights during training and sample weights afterwards.

    Subclasses define `observe`, `ready` and `sample` (docs/guides/composing.md). Buffers are moved, saved and resumed.

    Args:
        source: a function that returns the `Weights` to observe, of one network or many; it is called again before every
            recorded step, and may raise. `self.weights.rows()` is name -> (M, ...), the present values.
    """

    # Whether it can record weights of which each process has a part (`utils/sharding.py`).
    can_shard: ClassVar[bool] = False

    def __init__(self, source: Callable[[], Weights]) -> None:
        super().__init__()
        self.source = source
        self.weights = source()
        if not self.can_shard and any(map(is_divided, self.weights.stored.values())):
            kind = type(self).__name__
            raise NotImplementedError(f"expected whole weights for {kind}, got divided ones; leave shard out")

    def with_members(self) -> list[tuple[Tensor, int]]:
        """(buffer, its member axis) for every buffer that has one; processes that train together divide these."""
        # Needed only to divide several networks over processes; without it, only batches can be divided.
        kind = type(self).__name__
        raise ValueError(f"expected a recorder with with_members, got {kind}; define it, or use mesh(members=1)")

    def begin(self, steps: int, *, done: int = 0) -> None:
        """Called before training: the run has `steps` optimiser steps, of which `done` are already done (a resumed run)."""

    def begin_unmeasured(self, epochs: int) -> None:
        """Called before a run of unknown length; `begin` is called after the first epoch."""

    @property
    def reads_next_step(self) -> bool:
        """Whether the next `observe` reads the weights."""
        return True

    def renew_weights(self) -> None:
        """Gets the weights from the source again, if the next `observe` reads them."""
        if self.reads_next_step:
            self.weights = self.source()

    @abstractmethod
    def observe(self, optimizer: Optimizer) -> None:
        """Called after every optimiser step, under no_grad; reads `self.weights`."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether there is something to sample from."""

    @abstractmethod
    def sample(self, samples: int, generator: torch.Generator | None = None) -> Tensors:
        """Name -> (M, S, ...): S samples of each network's weights.

        Random numbers come from `generator`; None is torch's global one.
        """
