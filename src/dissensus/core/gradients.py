"""Gradients of all members on one batch, as pure functions, and the objective that they belong to.

A strategy is a function `(posterior, batch) -> Gradients`. The two strategies here, all members at once by vmap or one after
the other, work everywhere and give the same results; the engines add compiled, streamed and captured ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor, distributed

from dissensus.core.batch import Batch
from dissensus.core.collectives import ALONE
from dissensus.core.divergence import amax
from dissensus.core.member import run_separately
from dissensus.core.member_runner import NOTHING, ONE_LANE, PROCESS, FallbackChain, MemberLanes, cut_rows, map_trees
from dissensus.core.particles import Particles, Rows
from dissensus.kernels.multi_copy import copy_all
from dissensus.numerics.randomness import save_random_state
from dissensus.utils.process_group import world_size
from dissensus.utils.sharding import is_divided, local_part
from dissensus.utils.tensor_tree import Tensors, computed_names, named_tensors
from dissensus.utils.torch_private import gradient_hooks_of, is_inside_ddp, pytree, run_backward


class Gradients(NamedTuple):
    """Results of one batch: losses (M,), gradients of their sum for each trained tensor, buffers (M, ...) afterwards.

    `largest`: (M,) the largest absolute value of each member's own gradients, NaN if there is one; None if nobody has looked.
    """

    losses: Tensor
    gradients: Tensors
    buffers: Tensors
    largest: Tensor | None = None


class State(NamedTuple):
    """All tensors of the members: trained ones apart from frozen ones, own ones (M, ...) apart from shared ones."""

    own: Tensors
    shared: Tensors
    own_frozen: Tensors
    shared_frozen: Tensors
    own_buffers: Tensors
    shared_buffers: Tensors

    def members(self, count: int) -> list[State]:
        """Each member's tensors."""
        rows = cut_rows((self.own, self.own_frozen, self.own_buffers), count)
        return [self._replace(own=own, own_frozen=frozen, own_buffers=buffers) for own, frozen, buffers in rows]

    def leaves(self) -> Tensors:
        """The trained tensors, as leaves that require gradients."""
        return {name: tensor.detach().requires_grad_() for name, tensor in {**self.shared, **self.own}.items()}

    def parameters(self, trained: Tensors | None = None) -> Tensors:
        """All parameters, with `trained` in place of the trained ones."""
        mine = {**self.shared, **self.own} if trained is None else trained
        return {**self.shared_frozen, **self.own_frozen, **mine}

    def buffers(self) -> Tensors:
        return {**self.shared_buffers, **self.own_buffers}


def allocate_stacks(particles: Particles, state: State) -> Tensors:
    """Stacks (M, ...) for own gradients and buffers: a member fills its rows, and what it made goes before the next begins."""
    if particles.exchange is not ALONE or particles.members < 2:
        return {}
    first, count = state.members(1)[0].buffers(), particles.members
    buffers = {name: each.new_empty((count, *each.shape)) for name, each in first.items()}
    return {**buffers, **{name: torch.empty_like(stack) for name, stack in state.own.items()}}


def copy_into_stacks(one: Gradients, rows: Tensors) -> Gradients:
    """A member's results, copied into its rows of the stacks, and on a GPU, where it costs least, its largest gradient ()."""
    if not rows:
        return one
    gradients = {name: rows[name] for name in one.gradients if name in rows}
    there = {name: each for name, each in one.buffers.items() if name in rows}
    buffers = {name: rows[name] for name, each in there.items() if _same_shape_and_dtype(each, rows[name])}
    mine, given = {**gradients, **buffers}, {**one.gradients, **one.buffers}
    copy_all(list(mine.values()), [given[name] for name in mine])
    largest = amax(list(gradients.values()), one.losses.device) if one.losses.is_cuda else None
    return Gradients(one.losses, {**one.gradients, **gradients}, {**one.buffers, **buffers}, largest)


def _same_shape_and_dtype(a: Tensor, b: Tensor) -> bool:
    """Whether a forward pass has left a buffer its shape and dtype."""
    return (a.shape, a.dtype) == (b.shape, b.dtype)


def combine_gradients(state: State, found: list[Gradients], stacks: Tensors) -> Gradients:
    """Joins the results of single members: own gradients are stacked (in `stacks`, if they are there), shared ones summed."""
    like = {**state.shared, **(state.members(1)[0].own if len(found) == 1 else {})}
    found = [one._replace(gradients=_cast_like_parameters(one.gradients, like)) for one in found]
    if len(found) == 1:
        (one,) = found
        mine = {name: g[None] if name in state.own else g for name, g in one.gradients.items()}
        return Gradients(one.losses[None], mine, {name: buffer[None] for name, buffer in one.buffers.items()})
    gradients: Tensors = {}
    targets, sources = [], []
    for name in dict.fromkeys(name for each in found for name in each.gradients):
        each = [one.gradients.get(name) for one in found]
        if name in state.own:
            gradients[name] = stacks[name] if name in stacks else torch.empty_like(state.own[name])
            rows = zip(local_part(gradients[name]).unbind(), each, strict=True)
            # A member may not have used a tensor that other members used.
            missing = [(row, g) for row, g in rows if g is None or name not in stacks]
            targets += [row for row, _ in missing]
            sources += [torch.zeros_like(row) if g is None else local_part(g) for row, g in missing]
        else:
            given = [g for g in each if g is not None]
            gradients[name] = sum(given[1:], given[0])
    buffers: Tensors = {}
    for name, first in found[0].buffers.items():
        in_place = name in stacks and _same_shape_and_dtype(first, stacks[name][0])
        buffers[name] = stacks[name] if in_place else first.new_empty((len(found), *first.shape))
        pairs = zip(buffers[name].unbind(), [one.buffers[name] for one in found], strict=True)
        elsewhere = [(row, b) for row, b in pairs if row.data_ptr() != b.data_ptr()]
        targets += [row for row, _ in elsewhere]
        sources += [b for _, b in elsewhere]
    copy_all(targets, sources)  # few kernels for all tensors and members
    looked = [one.largest for one in found if one.largest is not None]
    largest = torch.stack(looked) if looked else None
    return Gradients(torch.stack([one.losses for one in found]), gradients, buffers, largest)


def _cast_like_parameters(gradients: Tensors, like: Tensors) -> Tensors:
    """Gradients in the precision of these parameters, if they are in half precision; others as they are."""
    lower = [name for name, g in gradients.items() if name in like and g.dtype != like[name].dtype]
    full = {name: torch.empty_like(like[name]) for name in lower}
    copy_all(list(full.values()), [gradients[name] for name in lower])
    return {**gradients, **full}


def can_train_in_place(posterior: Objective) -> bool:
    """Whether the one member is the caller's module, in one process only."""
    particles = posterior.particles
    whole = particles.wraps_original and not particles.divided and not particles.fully_sharded
    return whole and particles.exchange is ALONE and posterior.interaction != "couple"


def in_place_gradients(posterior: Objective, batch: Batch, *, write: bool = False) -> Gradients:
    """Gradients by the module's own parameters, so that nothing is put in their place. `write`: as `.grad`, in its stead."""
    particles = posterior.particles
    params = particles.runner.own_tensors(particles.template)
    before, wanted = params.buffers, {name: each for name, each in params.items() if each.requires_grad}

    def run(*_: Any) -> Gradients:
        for each in wanted.values() if write else ():  # a first attempt may have written some
            each.grad = None
        with torch.enable_grad():
            value, _, after = posterior.member_loss(params, before, batch)
        found: tuple[Tensor | None, ...] = ()
        if write and wanted and value.requires_grad:
            run_backward(value, wanted.values())
        elif wanted and value.requires_grad:
            found = torch.autograd.grad(value, tuple(wanted.values()), allow_unused=True)
        used = {name: g for name, g in zip(wanted, found, strict=False) if g is not None}
        return Gradients(value.detach()[None], used, {name: each.detach()[None] for name, each in after.items()})

    if not before:
        return run()
    # Buffers are copies while it runs, also where activations are recomputed.
    return particles.runner.differentiate(run, lambda: particles.call(run, params, before))


@torch.no_grad()
def apply_gradient_hooks_of(particles: Particles, found: Tensors) -> Tensors:
    """Gradients by other leaves than the caller's parameters, after the tensor hooks of these, which autograd has not run."""
    if not particles.wraps_original or particles.divided or particles.fully_sharded:
        return found
    gradients, named = dict(found), particles.shared_parameters()
    for name in gradients:
        for hook in (gradient_hooks_of(named[name]) or {}).values():
            gradient = gradients[name].to(named[name].dtype)  # it may be in half precision still
            changed = hook(gradient)
            gradients[name] = gradient if changed is None else changed
    return gradients


class Objective(Protocol):
    """The functions of a posterior that are differentiated."""

    particles: Particles
    mesh: Any
    interaction: Literal["couple", "mix"] | None

    def member_loss(self, params: Tensors, buffers: Tensors, batch: Batch) -> tuple[Tensor, Any, Tensors]: ...

    def couple(self, z: Any) -> Any: ...

    def mix(self, gradients: Tensors) -> Tensors: ...


Strategy = Callable[[Objective, Batch], Gradients]


def vectorised_gradients(posterior: Objective, batch: Batch) -> Gradients:
    """Gradients of the members' sum, all members at once by vmap: shared tensors need no copy per member."""
    state = detached_state(posterior)
    # Detached leaves, not the parameters themselves, so that `.grad` and the parameters' own graphs do not change.
    wanted = {name: tensor.requires_grad_() for name, tensor in {**state.shared, **state.own}.items()}
    with posterior.particles.vmap_context(), torch.enable_grad():
        total, losses, after = vmapped_objective(posterior, state, batch)
    # Plain autograd, because function transforms would also keep a graph of the gradients.
    found = torch.autograd.grad(total, list(wanted.values()), materialize_grads=True) if total.requires_grad else ()
    return Gradients(losses.detach(), dict(zip(wanted, found, strict=False)), detach_tree(after))


def vmapped_objective(posterior: Objective, state: State, batch: Batch) -> tuple[Tensor, Tensor, Tensors]:
    """(objective (), losses (M,), buffers afterwards), all members at once. Call it within `particles.vmap_context()`."""

    def one(row: Rows) -> tuple[Tensor, Any, Tensors]:
        params = {**state.shared, **state.shared_frozen, **row.own}
        return posterior.member_loss(params, {**state.shared_buffers, **row.buffers}, batch)

    rows = Rows({**state.own, **state.own_frozen}, state.own_buffers, {})
    losses, z, after = torch.func.vmap(one, randomness="different")(rows)
    return total_objective(posterior, losses, z), losses, after


def total_objective(posterior: Objective, losses: Tensor, z: Any) -> Tensor:
    """() Σ_i loss_i + ⟨z_i, v_i⟩ from losses (M,) and the members' z."""
    total = posterior.particles.exchange.scale_by_fraction(losses.sum())
    return total + inner_product(z, cotangents(posterior, z)) if posterior.interaction == "couple" else total


def cotangents(posterior: Objective, z: Any) -> Any:
    """v, the detached factors of the members' z (M, ...)."""
    return posterior.particles.exchange.couple_members(posterior.couple, detach_tree(z))


def looped_gradients(
    posterior: Objective, batch: Batch, *, member: Callable[..., Gradients] | None = None, lanes: MemberLanes = ONE_LANE
) -> Gradients:
    """Gradients with one member after the other; only one graph exists at a time.

    Coupled members run twice: first without a graph, for z; then, with v known, for the gradient of loss_i + ⟨z_i, v_i⟩.
    Random layers draw the same numbers both times. `member`: computes one member's gradients.
    """
    if member is None and lanes is ONE_LANE and can_train_in_place(posterior):
        return in_place_gradients(posterior, batch)
    member = member or member_gradients
    state, (lane, join), exchange = detached_state(posterior), lanes, posterior.particles.exchange
    count, whole = posterior.particles.members, posterior.particles.full_tensors
    members = state.members(count)
    streams: list[Callable[[], None]] = []
    pulls: list[Any] = [None] * count
    with exchange.loop_context():
        if posterior.interaction == "couple":
            seen = []
            for i, mine in enumerate(members):
                # For the second run: dropout must drop the same units, or z would not be the one that v belongs to.
                streams.append(save_random_state())
                with lane(i), torch.no_grad():
                    seen.append(posterior.member_loss(whole(mine.parameters()), mine.buffers(), batch)[1])
            join()
            streams.append(save_random_state())  # after one run of each member: the final state of the generators
            pulls = _cotangents_of_each(posterior, seen)

        found, stacks = [], allocate_stacks(posterior.particles, state)
        for i, (mine, (rows,)) in enumerate(zip(members, cut_rows([stacks], count), strict=True)):
            if streams:
                streams[i]()
            with lane(i):
                one = member(posterior, mine, batch, pulls[i])
                hooked = apply_gradient_hooks_of(posterior.particles, one.gradients)
                one = exchange.submit_gradients(one._replace(gradients=hooked))
                found.append(copy_into_stacks(one, rows))
        join()
        if streams:
            streams[-1]()
    return combine_gradients(state, found, stacks)


def looped_keeping_graphs(
    posterior: Objective, batch: Batch, *, forward: Callable[..., Any] | None = None, lanes: MemberLanes = ONE_LANE
) -> Gradients:
    """Gradients of coupled members in one pass that keeps all graphs until v is known: faster, with M times the memory."""
    forward = forward or posterior.member_loss
    state, (lane, join) = detached_state(posterior), lanes
    leaves = []
    results: list[tuple[Tensor, Any, Tensors]] = []
    for i, mine in enumerate(state.members(posterior.particles.members)):
        leaves.append(mine.leaves())
        with lane(i), torch.enable_grad():
            results.append(forward(mine.parameters(leaves[i]), mine.buffers(), batch))
    join()
    pulls = _cotangents_of_each(posterior, [z for _, z, _ in results])
    found, stacks = [], allocate_stacks(posterior.particles, state)
    for i, (wanted, (rows,)) in enumerate(zip(leaves, cut_rows([stacks], len(leaves)), strict=True)):
        with lane(i):
            # Taken off the list, so that what is left of its graph is freed for the next member in this lane.
            fraction = posterior.particles.exchange.batch_fraction
            one = _differentiate_member(fraction, wanted, *results.pop(0), pulls[i])
            found.append(copy_into_stacks(one, rows))
    join()
    return combine_gradients(state, found, stacks)


def _cotangents_of_each(posterior: Objective, each: list[Any]) -> list[Any]:
    """Each member's v, from all members' z."""
    together = cotangents(posterior, pytree.tree_map(lambda *parts: torch.stack(parts), *each))
    return [pytree.tree_map(lambda part, i=i: part[i], together) for i in range(len(each))]


def member_gradients(posterior: Objective, state: State, batch: Batch, cotangent: Any) -> Gradients:
    """Loss (), gradients and buffers of one member, by plain autograd, which works for every module."""
    if posterior.particles.fully_sharded:
        return _fully_sharded_gradients(posterior, batch)
    wanted, particles = state.leaves(), posterior.particles
    params, before = state.parameters(wanted), state.buffers()
    if particles.divided:  # gradients by the parts follow from those of the whole
        with torch.enable_grad():
            params = particles.full_tensors(params)

    def run(*_: Any) -> Gradients:
        with torch.enable_grad():
            result = posterior.member_loss(params, before, batch)
        return _differentiate_member(particles.exchange.batch_fraction, wanted, *result, cotangent)

    return particles.runner.differentiate(run, lambda: particles.call(run, params, before))


def _fully_sharded_gradients(posterior: Objective, batch: Batch) -> Gradients:
    """As `member_gradients`, for a network divided by `fully_shard`: its hooks gather weights and reduce gradients."""
    particles = posterior.particles
    params, buffers = particles.member_tensors(0)
    before = {name: parameter.grad for name, parameter in params.items()}
    for parameter in params.values():
        parameter.grad = None
    with torch.enable_grad():
        value, _, after = posterior.member_loss(params, buffers, batch)
    # torch takes the mean over ranks; here the shares of one batch must be summed.
    share, ranks = particles.exchange.batch_fraction, particles.exchange.ranks
    (value if share is None else value * (share * ranks).to(value.dtype)).backward()  # type: ignore[no-untyped-call]
    found = {name: parameter.grad for name, parameter in params.items() if parameter.grad is not None}
    for name, parameter in params.items():
        parameter.grad = before[name]
    gradients = {name: g if is_divided(g) else g / ranks for name, g in found.items()}
    return Gradients(value.detach(), gradients, detach_tree(after))


def _differentiate_member(
    share: Tensor | None, wanted: Tensors, value: Tensor, z: Any, buffers: Tensors, cotangent: Any
) -> Gradients:
    """One member's `Gradients`, of share · loss + ⟨z, v⟩; tensors that it did not use have no gradient."""
    share = None if share is None else share.to(value.dtype)
    pulled = [] if cotangent is None else zip(pytree.tree_leaves(z), pytree.tree_leaves(cotangent), strict=True)
    pairs = [(output, v) for output, v in ((value, share), *pulled) if output.requires_grad]
    gradients: tuple[Tensor | None, ...] = ()
    if pairs and wanted:
        outputs, weights = zip(*pairs, strict=True)
        gradients = torch.autograd.grad(outputs, list(wanted.values()), weights, allow_unused=True)
    used = {name: g for name, g in zip(wanted, gradients, strict=False) if g is not None}
    return Gradients(value.detach(), used, detach_tree(buffers))


def detached_state(posterior: Objective) -> State:
    """The posterior's tensors, detached."""
    particles = posterior.particles
    shared, common = named_tensors(particles.shared)
    own, changing, _ = particles.rows(common=common)
    for name in (*computed_names(particles.own), *computed_names(particles.shared)):
        what = f"'{name}', pruned or parametrised in the stack of members"
        raise ValueError(f"expected stored tensors to train, got {what}; do that to the networks first")
    trained: tuple[Tensors, Tensors] = {}, {}
    frozen: tuple[Tensors, Tensors] = {}, {}
    for i, tensors in enumerate((own, shared)):
        for name, tensor in tensors.items():
            (trained if tensor.requires_grad else frozen)[i][name] = tensor.detach()
    return State(*trained, *frozen, changing, common)


def inner_product(a: Any, b: Any) -> Tensor:
    """⟨a, b⟩ over two equal trees of tensors."""
    terms = [(p * q).sum() for p, q in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)]
    return torch.stack(terms).sum()


def detach_tree(tree: Any) -> Any:
    return map_trees(lambda column: column[0].detach(), [tree])


def loss(posterior: Objective, batch: Batch) -> Tensor:
    """() the objective, differentiable by the parameters; batch statistics are updated."""
    particles = posterior.particles
    shared, common = particles.shared_parameters(), particles.shared_buffers()
    if posterior.interaction == "mix":
        # A scalar with the value Σ losses and the mixed gradients as its derivative, although no loss has that gradient.
        found = compute_gradients(posterior, batch)
        particles.write_buffers(found.buffers)
        parameters = {**shared, **particles.own_parameters()}
        slope = inner_product({name: parameters[name] for name in found.gradients}, found.gradients)
        return found.losses.sum() + slope - slope.detach()

    def one(row: Rows) -> tuple[Tensor, Any, Tensors]:
        return posterior.member_loss({**shared, **row.own}, {**common, **row.buffers}, batch)

    with _training_lock(posterior, by_autograd=True):
        losses, z, buffers = run_separately(particles, lambda: particles.run(one, particles.rows(), particles.members))
        particles.write_buffers(buffers)
        return total_objective(posterior, losses, z)


def backward(posterior: Objective, batch: Batch, strategy: Strategy | None = None) -> Tensor:
    """(M,) losses; adds the objective's gradients to `.grad` and updates batch statistics."""
    found = compute_gradients(posterior, batch, strategy)
    posterior.particles.write_buffers(found.buffers)
    add_gradients(posterior.particles.parameters_by_name(), found.gradients)
    return found.losses


def compute_gradients(
    posterior: Objective, batch: Batch, strategy: Strategy | None = None, check: Callable[..., object] = lambda _: None
) -> Gradients:
    """Gradients by the strategy, mixed if the method mixes them; `check` is called with those before mixing."""
    # The network is locked against other threads meanwhile.
    exchange = posterior.particles.exchange
    with _training_lock(posterior), posterior.particles.runner.run_context():
        with exchange.gradient_context(posterior, batch):
            found = run_separately(posterior.particles, lambda: (strategy or automatic_gradients)(posterior, batch))
        found = cast(Gradients, exchange.reduce_gradients(posterior, found))
        if posterior.interaction != "mix":
            return found
        check(found.gradients)
        return found._replace(gradients=exchange.mix_gradients(posterior.mix, found.gradients), largest=None)


def add_gradients(parameters: Tensors, gradients: Tensors, *, share: Tensor | None = None) -> None:
    """Adds gradients to the `.grad` of parameters by name; with a share s it becomes (1 − s) · `.grad` + s · gradient."""
    if share is not None:
        gradients = {name: gradient * share for name, gradient in gradients.items()}
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(1 - share)
    taken: set[int] = set()
    for name, gradient in gradients.items():
        parameter = parameters[name]
        if parameter.grad is None:
            # In the parameter's memory layout, which vmap does not keep, because fused optimisers silently assume it. And as
            # a copy: if two parameters are added in the network, autograd gives both the same tensor as gradient.
            usable = gradient.stride() == parameter.stride() and gradient.data_ptr() not in taken
            parameter.grad = gradient if usable else torch.empty_like(parameter).copy_(gradient)
            taken.add(gradient.data_ptr())
        else:
            parameter.grad.add_(gradient)


@contextmanager
def _training_lock(posterior: Objective, *, by_autograd: bool = False) -> Iterator[None]:
    """Checks that training is possible and locks the network; coupled members lock the whole process."""
    # Coupled members draw the same random numbers twice and switch attention kernels: both are global to the process.
    check_trainable(posterior)
    _check_single_process(posterior, by_autograd=by_autograd)
    _check_frozen(posterior.particles)
    with PROCESS if posterior.interaction == "couple" else NOTHING, posterior.particles.lock_network():
        yield


def check_trainable(posterior: Objective) -> None:
    """Raises if gradients are not recorded, or if the posterior is only a watcher of the one that trains."""
    if (base := getattr(posterior, "base", None)) is not None:
        watched = f"got {type(posterior).__name__}, which watches {type(base[0]).__name__}"
        raise ValueError(f"expected the posterior that trains, {watched}; train the one that ds.track returned")
    if torch.is_inference_mode_enabled():
        raise ValueError("expected gradients to be recorded, got torch.inference_mode(); leave it, or use no_grad()")


def _check_frozen(particles: Particles) -> None:
    """Raises if a tensor that is stored once because it was frozen is trained now: members would share it."""
    for name, parameter in particles.shared_parameters().items() if particles._frozen else ():
        if parameter.requires_grad and name in particles._frozen:
            raise ValueError(f"expected '{name}' to stay frozen, got requires_grad=True; they share it: set it first")


def _check_single_process(posterior: Objective, *, by_autograd: bool) -> None:
    """Raises if the processes of a group would each train a separate model by mistake."""
    averaged = by_autograd and posterior.interaction is None and is_inside_ddp()
    alone = not averaged and posterior.mesh != "independent" and posterior.particles.exchange is ALONE
    if alone and (size := world_size()) > 1:
        raise ValueError(
            f"expected one process, got rank {distributed.get_rank()} of {size}, whose gradients nobody averages; use ds.fit, "
            "or posterior.loss in the forward of a DistributedDataParallel module (a LightningModule's training_step) if "
            'members do not interact; for one model per rank, without that module, posterior.mesh = "independent"'
        )


def automatic_gradients(posterior: Objective, batch: Batch) -> Gradients:
    """Gradients by vmap, or in a loop if vmap fails; the fallback is logged once."""
    particles = posterior.particles
    if particles.how == "loop" or particles.members == 1:
        return looped_gradients(posterior, batch)
    ways = FallbackChain(particles.runner.note_fallback, vectorised=vectorised_gradients, loop=looped_gradients)
    return ways(posterior, batch)
