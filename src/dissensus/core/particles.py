"""Particles: M functions of one architecture, with own tensors (one per member) and shared tensors.

The pure function of one member is `Particles.call`. It is run over all members by `vmap` or by a plain loop, with equal
results; modules without a batching rule (`nn.LSTM`, data-dependent control flow) fall back to the loop by themselves.
"""

import copy
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from dissensus.core.architecture import check_initialised
from dissensus.core.likelihood import Likelihood
from dissensus.core.modes import plain_attention
from dissensus.core.products import small_products, without_onednn
from dissensus.core.randomness import random_state
from dissensus.core.stacking import StackedLinear
from dissensus.core.tree import TensorTree
from dissensus.core.turns import turn

log = logging.getLogger("dissensus")

How = Literal["loop", "vectorised"]
Tensors = dict[str, Tensor]
Lane = Callable[[int], AbstractContextManager[object]]  # the context (a CUDA stream) that member i runs in


class Member(nn.Module):
    """One network and its likelihood as one module, to which any function can be applied.

    `forward(f, *args)` is `f(member, *args)` and the buffers as f left them, so that one `functional_call` gives both.
    """

    def __init__(self, network: nn.Module, likelihood: Likelihood) -> None:
        super().__init__()
        self.network = network
        self.likelihood = likelihood

    def forward(self, function: Callable[..., Any], *args: Any) -> tuple[Any, Tensors]:
        result = function(self, *args)
        return result, dict(self.named_buffers()) if self.training else {}


class Particles(nn.Module):
    """M functions of one architecture. `own`: stacked tensors (M, ...); `shared`: a module holding the common ones."""

    def __init__(self, template: Member, *, own: nn.Module, shared: nn.Module, members: int) -> None:
        super().__init__()
        # In a tuple, so that the template's (emptied) tensors are not registered as this module's.
        self._template = (template,)
        self.own = own
        self.shared = shared
        self.members = members
        self.how: How = "vectorised" if members > 1 and not _has_convolution(template) else "loop"
        self.training = template.training
        self._linear = StackedLinear(template)
        self.small_products = small_products(template)
        self._lanes: tuple[int, Lane, Callable[[], None]] | None = None  # of one thread
        # Parts that the caller has put into eval mode (frozen batch norm) stay there when the rest trains.
        self._always_eval = [name for name, part in template.named_modules() if template.training and not part.training]

    @classmethod
    def hold(cls, network: nn.Module, likelihood: Likelihood) -> "Particles":
        """One member whose tensors are those of the caller's module itself: nothing is copied."""
        _check_likelihood(likelihood)
        check_initialised(network)
        member = Member(network, copy.deepcopy(likelihood))
        member.training = network.training  # not member.train(): parts the caller has frozen in eval mode stay so
        return cls(member, own=TensorTree(), shared=member, members=1)

    @classmethod
    def stack(cls, networks: Sequence[nn.Module], likelihood: Likelihood) -> "Particles":
        """M members with every tensor their own, copied from the networks. Tied tensors stay tied (stacked by identity)."""
        _check_likelihood(likelihood)
        for network in networks:
            check_initialised(network)
        template = emptied(Member(networks[0], likelihood))
        template.training = networks[0].training
        members = [Member(network, likelihood) for network in networks]
        own = TensorTree()
        columns = [dict(member.named_parameters()) for member in members]
        for name, first in columns[0].items():
            stacked = torch.stack([column[name].detach() for column in columns])  # (M, ...)
            own.plant(name, nn.Parameter(stacked, requires_grad=first.requires_grad))
        kept = set(members[0].state_dict())
        buffers = [dict(member.named_buffers()) for member in members]
        for name in buffers[0]:
            own.plant(name, torch.stack([b[name] for b in buffers]), persistent=name in kept)
        return cls(template, own=own, shared=TensorTree(), members=len(networks))

    @property
    def template(self) -> Member:
        return self._template[0]

    @property
    def likelihood(self) -> Likelihood:
        return self.template.likelihood

    def turn(self) -> AbstractContextManager[object]:
        """Inside, no other thread runs these members' network."""
        return turn(self.template.network)

    def apart(
        self, *, own: nn.Module | None = None, shared: nn.Module | None = None, members: int | None = None
    ) -> "Particles":
        """These or other members of the architecture in a template of their own: what they do to it, nobody else sees."""
        try:
            template = emptied(self.template)
        except (TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
            # Some modules cannot be copied (weight norm by hooks). Theirs is used, in turns, and put back each time.
            log.info("functions run in the caller's network: it cannot be copied (%s)", first_line(error))
            template = self.template
        other = Particles(
            template,
            own=self.own if own is None else own,
            shared=self.shared if shared is None else shared,
            members=members or self.members,
        )
        other._always_eval = self._always_eval
        return other

    def train(self, mode: bool = True) -> "Particles":
        super().train(mode)
        self.template.train(mode)
        for name in self._always_eval:
            self.template.get_submodule(name).training = False
        return self

    def own_parameters(self) -> Tensors:
        """Name -> (M, ...)."""
        return dict(self.own.named_parameters())

    def shared_parameters(self) -> Tensors:
        """Name -> tensor common to all members."""
        return dict(self.shared.named_parameters())

    def own_buffers(self) -> Tensors:
        return dict(self.own.named_buffers())

    def shared_buffers(self) -> Tensors:
        return dict(self.shared.named_buffers())

    def call(self, function: Callable[..., Any], params: Tensors, buffers: Tensors, *args: Any) -> tuple[Any, Tensors]:
        """(function(member, *args), buffers afterwards) of the member with these tensors. Pure: nothing is changed."""
        if self.training:  # batch norm writes its statistics in place: into copies
            buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        result: tuple[Any, Tensors] = functional_call(self.template, {**params, **buffers}, (function, *args))
        return result

    def write_buffers(self, buffers: Tensors) -> None:
        """Stores buffers (M, ...) as they were after a run. Shared ones have one value only where there is one member."""
        own, shared = self.own_buffers(), self.shared_buffers()
        with torch.no_grad():
            for name, value in buffers.items():
                if name in own:
                    own[name].copy_(value)
                elif self.members == 1:
                    shared[name].copy_(value[0])

    def rows(self, varying: Tensors | None = None) -> "Rows":
        """What differs between members, each tensor with the member axis first."""
        return Rows(self.own_parameters(), self.own_buffers(), varying or {})

    def each(
        self, function: Callable[..., Any], *args: Any, varying: Tensors | None = None, how: How | None = None
    ) -> Any:
        """function(member, *args) of every member, stacked along a new first axis; batch statistics are updated.

        `varying`: further tensors (V, ...), one row per function (masks, latents), passed to it as a dict before args.
        With one stored member, V rows give V functions of the same weights.
        """
        shared, common = self.shared_parameters(), self.shared_buffers()

        def one(row: Rows) -> tuple[Any, Tensors]:
            inner = args if varying is None else (row.varying, *args)
            return self.call(function, {**shared, **row.own}, {**common, **row.buffers}, *inner)

        count = self.members if not varying else len(next(iter(varying.values())))
        result, buffers = self.run(one, self.rows(varying), count, how=how)
        if self.training and varying is None:
            self.write_buffers(buffers)
        return result

    def run(self, one: Callable[["Rows"], Any], rows: "Rows", count: int, *, how: How | None = None) -> Any:
        """one(row) of each of `count` rows, stacked: by vmap or by the loop, falling back to the loop where vmap cannot."""
        with self.turn(), without_onednn(self.small_products):
            return self._run(one, rows, count, how)

    def _run(self, one: Callable[["Rows"], Any], rows: "Rows", count: int, how: How | None) -> Any:
        if (how or self.how) == "loop" or count == 1:
            lanes = self._lanes
            mine = lanes[1:] if lanes is not None and lanes[0] == threading.get_ident() else ()
            return loop(one, rows, count, *mine)
        restore = random_state()
        try:
            with self.vectorising():
                return torch.func.vmap(one, randomness="different")(rows)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            restore()
            result = loop(one, rows, count)  # raises the caller's own error if it was one
            self.note_fallback(error)
            return result

    @contextmanager
    def vectorising(self) -> Iterator[None]:
        """What vmap over members runs in: layers in forms that it sees through and that are fast."""
        first = next(chain(self.own.parameters(), self.own.buffers(), self.shared.parameters()), None)
        device = torch.device("cpu") if first is None else first.device
        with plain_attention(self.template), self._linear.on(device):
            yield

    @contextmanager
    def in_lanes(self, lane: Lane, join: Callable[[], None]) -> Iterator[None]:
        """Members that run one after the other do so within lane(i), a CUDA stream for example; join() waits for all."""
        self._lanes = (threading.get_ident(), lane, join)
        try:
            yield
        finally:
            self._lanes = None

    def note_fallback(self, error: Exception) -> None:
        """From now on members run one after the other; said once."""
        if self.how == "loop":
            return
        self.how = "loop"
        log.info("members run one after the other: this network cannot be vectorised (%s)", first_line(error))

    def member(self, index: int) -> nn.Module:
        """A copy of one member's network: an ordinary module that shares nothing with this one."""
        index = member_index(index, self.members)
        with self.turn(), torch.no_grad():
            network = copy.deepcopy(self.template.network)
            values = {**self.shared_parameters(), **self.shared_buffers()}
            values |= {k: v[index] for k, v in {**self.own_parameters(), **self.own_buffers()}.items()}
            for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
                tensor.data = values[f"network.{name}"].detach().clone()
        return network


class Rows(NamedTuple):
    """Tensors with the member axis first: parameters, buffers and whatever else differs between functions."""

    own: Tensors
    buffers: Tensors
    varying: Tensors

    def at(self, index: int) -> "Rows":
        """One member's row."""
        return Rows(*({name: tensor[index] for name, tensor in part.items()} for part in self))


def loop(
    one: Callable[[Rows], Any],
    rows: Rows,
    count: int,
    lane: Lane = lambda _: nullcontext(),
    join: Callable[[], None] = lambda: None,
) -> Any:
    """one(row) of each row in turn, the i-th within lane(i), results stacked along a new first axis."""
    results = []
    for i in range(count):
        with lane(i):
            results.append(one(rows.at(i)))
    join()
    structure = pytree.tree_structure(results[0])
    columns = zip(*(pytree.tree_leaves(result) for result in results), strict=True)
    return pytree.tree_unflatten([torch.stack(column) for column in columns], structure)


def member_index(index: int, members: int) -> int:
    """index as a number from 0 to M − 1; negative ones count from the end."""
    if not -members <= index < members:
        raise ValueError(
            f"expected a member from 0 to {members - 1}, got {index}; this posterior has {members} members"
        )
    return index % members


def first_line(error: Exception) -> str:
    """What an error says first, for the log."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:160]


def _check_likelihood(likelihood: object) -> None:
    if not isinstance(likelihood, Likelihood):
        what = likelihood.__name__ + " itself" if isinstance(likelihood, type) else type(likelihood).__name__
        raise TypeError(f"expected a likelihood, got {what}; pass one that is built, for example Classification()")


def emptied(member: Member) -> Member:
    """A copy of the member without its tensors, which are put in at every call; ties are kept, since objects are."""
    blanks: dict[int, Any] = {}
    for parameter in member.parameters():
        empty = parameter.detach().new_empty(0)
        blanks[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in member.buffers():
        blanks[id(buffer)] = buffer.detach().new_empty(0)
    with turn(member.network):  # another thread's hooks and forwards must not be copied
        copied: Member = copy.deepcopy(member, blanks)
    return copied


def _has_convolution(template: nn.Module) -> bool:
    """Stacked convolutions become grouped ones, which are slower than a loop on CPUs and GPUs alike."""
    return any(isinstance(module, nn.modules.conv._ConvNd) for module in template.modules())
