"""Particles: M functions of one architecture, with own tensors (one per member) and shared tensors.

`Particles.call` is the pure function of one member. It runs over all members by `vmap` or by a plain loop, with equal
results; modules that vmap does not support (`nn.LSTM`, data-dependent control flow) run in the loop automatically.
"""

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dissensus.core.collectives import ALONE, Exchange
from dissensus.core.likelihood import Likelihood
from dissensus.core.member import (
    NUMBER,
    PREFIX,
    ForwardAttributes,
    Member,
    check_initialised,
    convert_state_layout,
    empty_copy,
    empty_copy_if_possible,
    empty_tensor_memo,
    equal_frozen_names,
    member_index,
    run_separately,
    split_trees,
    tensors_by_name,
    warn_of_state,
)
from dissensus.core.member_runner import How, Rows, Runner, locked_deepcopy, loop, network_lock, stack_trees
from dissensus.kernels.multi_copy import copy_all, copy_by_name
from dissensus.utils import sharding
from dissensus.utils.batch_norm_names import frozen_norms
from dissensus.utils.module_state import deepcopy_memo, differing_attribute, plain_attributes
from dissensus.utils.shared_tensors import alias, is_one_tensor
from dissensus.utils.tensor_tree import (
    Cache,
    OwnTensors,
    TensorPlaces,
    Tensors,
    TensorTree,
    assign_tensors,
    call_with_tensors,
    named_tensors,
)
from dissensus.utils.torch_modes import set_mode
from dissensus.utils.torch_private import submodule

__all__ = ["How", "Member", "Particles", "Rows", "loop", "member_index"]

log = logging.getLogger("dissensus")
Part = TypeVar("Part", bound=nn.Module)


class Particles(nn.Module):
    """M members of one architecture. `own`: stacked tensors (M, ...); `shared`: a module with the tensors common to all.

    If several processes train some of the members each, `members` counts those of this process and `total_members` all.
    """

    exchange: Exchange = ALONE
    own: nn.Module = submodule("own")
    shared: nn.Module = submodule("shared")

    def __init__(
        self, *templates: Member, own: nn.Module, shared: nn.Module, members: int, frozen: Collection[str] = ()
    ) -> None:
        """`templates`: one for all members, or one for each; members then run in a loop."""
        super().__init__()
        self.templates = templates  # a tuple, so that their (emptied) tensors are not registered as this module's
        self.own, self.shared, self.members = own, shared, members
        self.training = self.template.training
        self._choose_runner()
        # By number of the template, with what they were found for: the caller's module may change.
        self._places: dict[int, tuple[object, TensorPlaces]] = {}
        self._forward_attributes = defaultdict[int, ForwardAttributes](ForwardAttributes)  # by number of the template
        # divided by torch, which gathers layers itself
        self.fully_sharded = sharding.is_fully_sharded(self.template.network)
        self._frozen = {*frozen}  # tensors stored once because no member trains them
        self._logged_names: set[str] = set()

    def _choose_runner(self) -> None:
        """Chooses the runner for the present split into own and shared tensors."""
        stacked = tensors_by_name(self.own)
        own = {id(tensor) for name, tensor in tensors_by_name(self.template).items() if name in stacked}
        self.runner = Runner(self.template, own)
        # whether processes have parts of the weights (`ds.distributed.shard`, `fully_shard`)
        self.divided = any(map(sharding.is_divided, chain(stacked.values(), tensors_by_name(self.shared).values())))
        self.wraps_original = self.shared is self.template  # whether the one member is the caller's module itself
        if len(self.templates) > 1 or self.divided:
            self.how = "loop"

    @classmethod
    def wrap_network(cls, network: nn.Module, likelihood: Likelihood, latents: nn.Module | None = None) -> "Particles":
        """One member that is the caller's module itself, not a copy, with these latents. Particles are returned unchanged."""
        if isinstance(network, Particles):
            return network
        check_initialised(network)
        sharding.reshard_after_forward(network)
        member = Member(network, copy.deepcopy(likelihood), latents)
        return cls(member, own=TensorTree(), shared=member, members=1)

    @classmethod
    def stack(
        cls,
        networks: Sequence[nn.Module],
        likelihood: Likelihood,
        *,
        latents: Sequence[nn.Module] | None = None,
        own: Callable[[str], bool] | None = None,
        frozen: Collection[str] = (),
    ) -> "Particles":
        """M members, copied from M networks and M latents. Tied tensors stay tied (stacked by identity).

        Networks that differ in more than tensors (`utils/module_state.py`) run in a loop, each in its own template.
        `own(name)`: whether each member has its own tensor of this name ("network.0.weight"); other tensors are shared and
        taken from the first network. None: all are own, except tensors that are frozen and equal in all networks; these are
        stored once, and not copied if all networks hold the same memory. With `own`, `frozen` names such tensors.
        """
        each = [None] * len(networks) if latents is None else latents
        members = [Member(network, likelihood, mine) for network, mine in zip(networks, each, strict=True)]
        apart = differing_attribute(networks) is not None
        # A buffer, because rows of tensors are all that reaches `call`: it reads there whose template to take.
        for number, member in enumerate(members if apart else ()):
            where = next((tensor.device for tensor in tensors_by_name(member).values()), None)
            member.register_buffer(NUMBER, torch.tensor(number, device=where), persistent=False)
        columns = [tensors_by_name(member) for member in members]
        rows = {name: [column[name] for column in columns] for name in columns[0]}
        alike = equal_frozen_names(members[0], rows) if own is None else {*frozen}
        rule = own or (lambda name: name not in alike)
        kept = members[0].state_dict()
        once = [name for name in alike if len(networks) > 1 and is_one_tensor(rows[name])]
        held = {name: [alias(rows[name][0], trained=False)] for name in once}
        mine, common = split_trees({**rows, **held}, own=lambda n: n == NUMBER or rule(n), kept=kept, held=held)
        templates = [empty_copy(member) for member in (members if apart else members[:1])]
        particles = cls(*templates, own=mine, shared=common, members=len(members), frozen=alike)
        return particles.train(particles.training)

    @classmethod
    def split(
        cls,
        template: Member,
        rows: Mapping[str, Sequence[Tensor] | Tensor],
        *,
        own: Callable[[str], bool],
        kept: Collection[str],
        members: int,
        held: Collection[str] = (),
    ) -> "Particles":
        """M members from M rows per name, of which only the first is stored unless `own(name)`; others as in `split_trees`."""
        mine, common = split_trees(rows, own=own, kept=kept, held=held)
        return cls(template, own=mine, shared=common, members=members)

    @property
    def template(self) -> Member:
        """The first member's template."""
        return self.templates[0]

    @property
    def likelihood(self) -> Likelihood:
        return self.template.likelihood

    @property
    def total_members(self) -> int:
        """M over all processes that train together."""
        return self.exchange.members or self.members

    def lock_network(self) -> AbstractContextManager[object]:
        """Inside, no other thread runs these members' network."""
        return network_lock(self.templates[0].network)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Particles":
        for part in (*self.templates, self.own, self.shared):
            memo.update(deepcopy_memo(part))
        return locked_deepcopy(self, memo, self.template.network)

    def with_separate_template(self) -> "Particles":
        """The same tensors with a separate template: hooks, modes and forwards set there have no effect elsewhere."""
        templates = (self.copy_template(), *map(empty_copy, self.templates[1:]))
        return Particles(*templates, own=self.own, shared=self.shared, members=self.members)

    def copy_template(self, index: int = 0) -> Member:
        """A copy of this member's template, without tensors."""
        return empty_copy_if_possible(self.templates[index % len(self.templates)])

    def train(self, mode: bool = True) -> "Particles":
        self.training = mode
        fixed = self.frozen_norms() if mode else []
        for part in {self.own, self.shared, *self.templates}:
            set_mode(part, mode)
        for template in self.templates:
            for name in (*template.always_eval, *fixed):
                template.get_submodule(name).training = False
        if new := sorted({*fixed} - {*self.template.always_eval, *self._logged_names}):
            self._logged_names.update(new)
            log.info("%s: kept in eval mode during training, since all their parameters are frozen", ", ".join(new))
        return self

    def frozen_norms(self) -> list[str]:
        """Names of norm layers whose parameters are all frozen: training does not change their batch statistics."""
        frozen = {name for name, p in self.parameters_by_name().items() if not p.requires_grad}
        return list(frozen_norms(self.template, frozen)) if frozen else []

    def store_once(self, names: Collection[str]) -> None:
        """Stores only the first member's copy of these tensors, for all members."""
        own, shared = tensors_by_name(self.own), tensors_by_name(self.shared)
        if own.keys().isdisjoint(names):
            return
        rows: dict[str, Any] = {**own, **{name: [tensor] for name, tensor in shared.items()}}
        kept = {**self.own.state_dict(), **self.shared.state_dict()}
        self.own, self.shared = split_trees(rows, own=lambda name: name in own and name not in names, kept=kept)
        self._choose_runner()

    @property
    def stored_once(self) -> dict[str, bool]:
        """Name of a tensor stored once for all members -> whether the reason is that no member trains it."""
        return {name: name in self._frozen for name in tensors_by_name(self.shared)}

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        warn_of_state(self)
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """Also loads states that store a tensor once instead of M rows, and, if the rows are equal, the reverse."""
        convert_state_layout(state_dict, prefix, own=self.own, shared=self.shared, members=self.members)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def own_parameters(self) -> Tensors:
        """Name -> (M, ...)."""
        return named_tensors(self.own)[0]

    def shared_parameters(self) -> Tensors:
        """Name -> tensor common to all members."""
        return self._shared_tensors()[0]

    def parameters_by_name(self) -> Tensors:
        """Own and shared ones."""
        return {**self.shared_parameters(), **self.own_parameters()}

    def own_buffers(self) -> Tensors:
        return named_tensors(self.own)[1]

    def shared_buffers(self) -> Tensors:
        return self._shared_tensors()[1]

    def _shared_tensors(self) -> tuple[Tensors, Tensors]:
        if not self.wraps_original or torch.compiler.is_compiling():
            return named_tensors(self.shared)
        own = self.runner.own_tensors(self.template)
        return dict(own), dict(own.buffers)

    def call(self, function: Callable[..., Any], params: Tensors, buffers: Tensors, *args: Any) -> tuple[Any, Tensors]:
        """(function(member, *args), buffers afterwards) for the member with these tensors. Pure: changes nothing."""
        if self.fully_sharded:
            sharding.check_own_tensors(params, self.shared_parameters())
        # Read on the host, which neither vmap nor a CUDA graph can do: both then fall back to the plain loop.
        number = 0 if len(self.templates) == 1 else int(buffers[NUMBER])
        template = self.templates[number]
        written, alone = self._forward_attributes[number], len(self.templates) >= self.members
        if isinstance(params, OwnTensors) and not buffers:
            return written.run_with_own_tensors(template, function, *args), {}
        if template.training:  # batch norm writes its statistics in place, so it gets copies
            buffers = copy_by_name(buffers) if buffers else {}
        whole = self.full_tensors({**params, **buffers})
        places = None if torch.compiler.is_dynamo_compiling() else self._places_of_tensors(number)
        return written.run(template, call_with_tensors, template, whole, function, *args, places=places, alone=alone)

    def _places_of_tensors(self, number: int) -> TensorPlaces:
        """The places in this template, found again only if it is the caller's module and has changed."""
        template = self.templates[number]
        now = self.runner.own_tensors(template) if self.wraps_original else None
        if number not in self._places or self._places[number][0] is not now:
            self._places[number] = now, TensorPlaces(template)
        return self._places[number][1]

    def full_tensors(self, tensors: Tensors) -> Tensors:
        """One member's tensors, whole where processes have parts of them."""
        return sharding.gather_full_tensors(tensors) if self.divided and not self.fully_sharded else tensors

    def write_buffers(self, buffers: Tensors) -> None:
        """Stores buffers (M, ...) after a run, and state in attributes; shared buffers get the mean over members."""
        for written in self._forward_attributes.values():
            written.store_state()
        if not buffers:
            return
        # Each member has updated its copy of a shared buffer by its own activations; the mean weighs them equally.
        own, shared = self.own_buffers(), self.shared_buffers()
        with torch.no_grad():
            mine = [name for name in buffers if name in own]
            common = [name for name in buffers if name not in own and name not in self._frozen]
            targets = [*(own[name] for name in mine), *(shared[name] for name in common)]
            one = self.total_members == 1
            means = (buffers[name][0] if one else self.exchange.average_members(buffers[name]) for name in common)
            copy_all(targets, [*(buffers[name] for name in mine), *means])

    def rows(self, varying: Tensors | None = None, common: Tensors | None = None) -> Rows:
        """Tensors that differ between functions, with the function axis first; `common`: the shared buffers, if known.

        Buffers are those that training changes: own ones, and shared ones copied for each of several members.
        """
        own, buffers = named_tensors(self.own)
        if self.members > 1 and self.training:
            common = self.shared_buffers() if common is None else common
            shared = {name: b for name, b in common.items() if name not in self._frozen}
            buffers = {**{name: b.expand(self.members, *b.shape) for name, b in shared.items()}, **buffers}
        return Rows(own, buffers, varying or {})

    def map_members(
        self, function: Callable[..., Any], *args: Any, varying: Tensors | None = None, how: How | None = None
    ) -> Any:
        """function(member, *args) for every member, stacked along a new first axis; batch statistics are updated.

        `varying`: further tensors (V, ...), such as masks, one row per function of one stored member, passed before args.
        """
        if varying is None and self.wraps_original and not self.training and not self.divided:
            with self.lock_network(), self.runner.run_context():
                written = self._forward_attributes[0]
                return stack_trees([written.run_with_own_tensors(self.templates[0], function, *args)])
        shared, common = named_tensors(self.shared)

        def one(row: Rows) -> tuple[Any, Tensors]:
            inner = args if varying is None else (row.varying, *args)
            return self.call(function, {**shared, **row.own}, {**common, **row.buffers}, *inner)

        count = self.members if not varying else len(next(iter(varying.values())))
        result, buffers = run_separately(self, lambda: self.run(one, self.rows(varying, common), count, how=how))
        if self.training and varying is None:
            self.write_buffers(buffers)
        return result

    def run(self, one: Callable[[Rows], Any], rows: Rows, count: int, *, how: How | None = None) -> Any:
        """one(row) for each of `count` rows, stacked; the runner chooses vmap or a loop."""
        with self.lock_network(), self.runner.run_context():
            device = next((each.device for each in rows.own.values()), None) or self.device
            return self.runner.run(one, rows, count, device=device, how=how)

    def member_tensors(self, index: int) -> tuple[Tensors, Tensors]:
        """(parameters, buffers) of one member, for `call`."""
        (params, buffers), row = (
            named_tensors(self.shared),
            Rows(*named_tensors(self.own), {}).member_rows(index + 1)[index],
        )
        return {**params, **row.own}, {**buffers, **row.buffers}

    @property
    def may_write_attributes(self) -> bool:
        """Whether a network may write attributes in forward, which are restored after a call: it has foreign code or hooks."""
        return any(self._forward_attributes[i].modules_to_watch(each) for i, each in enumerate(self.templates))

    def call_first(self, function: Callable[..., Any], *args: Any) -> Any:
        """function(member, *args) of the first member; changes nothing."""
        return self.call(function, *self.member_tensors(0), *args)[0]

    def vmap_context(self) -> AbstractContextManager[object]:
        """The context that vmap over members needs."""
        return self.runner.vmap_context(self.device)

    @property
    def how(self) -> How:
        """How members run, "vectorised" or "loop"."""
        return self.runner.how

    @how.setter
    def how(self, how: How) -> None:
        self.runner.how = how

    @property
    def device(self) -> torch.device:
        """Where the members' tensors are."""
        trees = (self.own, self.shared)
        first = next(chain.from_iterable(each.values() for tree in trees for each in named_tensors(tree)), None)
        return torch.device("cpu") if first is None else first.device

    def member(self, index: int) -> nn.Module:
        """A copy of one member's network: an ordinary module that shares no tensor with this one."""
        return self.copy_part(self.templates[index % len(self.templates)].network, PREFIX, index)

    def separate_members(self) -> list[Member] | None:
        """The members as modules of their own, for predictions; their tensors are views of these. None: uncopyable."""
        found = []
        for i in range(self.members):
            (params, buffers), made = self.member_tensors(i), self.copy_template(i)
            if made in self.templates or self.divided:
                return None
            assign_tensors(places := TensorPlaces(made), map({**params, **buffers}.__getitem__, places.names))
            found.append(made)
        return found

    def copy_part(self, part: Part, prefix: str, index: int) -> Part:
        """A copy of a part of the template with one member's tensors."""
        index = member_index(index, self.members)
        sharding.check_copyable(self.template.network)
        with self.lock_network(), torch.no_grad():
            copied = copy.deepcopy(part, empty_tensor_memo(part) if self.divided else deepcopy_memo(part))
            params, buffers = self.member_tensors(index)
            values = {**self.full_tensors(params), **buffers}
            for name, tensor in [*copied.named_parameters(), *copied.named_buffers()]:
                tensor.data = values[f"{prefix}{name}"].detach().clone()
        return copied


def single_member(particles: Particles, index: int) -> Particles:
    """One member with its own template; its tensors are views of the stacked ones, so later changes are seen."""
    if not particles.own_parameters() and not particles.own_buffers():
        return particles.with_separate_template()
    alone = TensorTree()
    for tree in (particles.own, particles.shared):
        kept = tree.state_dict().keys()
        for name, tensor in tensors_by_name(tree).items():
            if name != NUMBER:
                alone.add_tensor(name, tensor[index] if tree is particles.own else tensor, persistent=name in kept)
    return Particles(particles.copy_template(index), own=TensorTree(), shared=alone, members=1)


class SingleMemberCache(Cache):  # to copy a small network takes longer than to run it
    """One network's particles with a separate template, as `single_member` makes them, kept until it could have changed."""

    def __init__(self) -> None:
        self.known: tuple[list[Any], Particles] | None = None

    def __call__(self, particles: Particles) -> Particles:
        with particles.lock_network():
            now = plain_attributes(particles.template) if particles.wraps_original else None
            if now is None or self.known is None or self.known[0] != now:
                made = single_member(particles, 0)
                kept = now is not None and made.template is not particles.template
                self.known = (now, made) if now is not None and kept else None
                return made
            return self.known[1]


def member_subset(particles: Particles, rows: slice) -> Particles:
    """These members, which run as all of them do, with the same tensors."""
    own = TensorTree()
    for name, tensor in tensors_by_name(particles.own).items():
        own.add_tensor(name, tensor.detach()[rows])
    mine = Particles(*particles.templates, own=own, shared=particles.shared, members=rows.stop - rows.start)
    mine.runner = particles.runner  # with what it has found out about the network
    return mine


def store_tensors_once(particles: Particles, names: Iterable[str]) -> None:
    """Stores these tensors once for all members, as frozen ones, to match the layout of a file."""
    particles._frozen |= {name for name in names if name in tensors_by_name(particles.own)}
    particles.store_once(particles._frozen)
    for name in particles._frozen & particles.shared_parameters().keys():
        particles.shared_parameters()[name].requires_grad_(False)


def copy_to_device(particles: Particles, device: torch.device) -> Particles:
    """Copies of the tensors on another device, with the same template."""
    trees = [TensorTree(), TensorTree()]
    for tree, source in zip(trees, (particles.own, particles.shared), strict=True):
        for name, tensor in tensors_by_name(source).items():
            tree.add_tensor(name, tensor.detach().to(device))
    return Particles(*particles.templates, own=trees[0], shared=trees[1], members=particles.members)


def copy_likelihood(particles: Particles, index: int) -> Likelihood:
    """A copy of one member's likelihood."""
    return particles.copy_part(particles.likelihood, "likelihood.", index)
