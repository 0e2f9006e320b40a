"""Member: one network, its likelihood and its latents as one module, the template for each member's tensors.

A member's tensors are its own, or shared: stored once for all members. What a forward writes into plain attributes (features
that it keeps, counters, caches) is restored after every call. A training call may change some that it has read, such as a
counter: they are the member's state. Each member then runs in its own template, and its state is stored as batch statistics
are, once per step.
"""

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dissensus.core.batch import Batch, all_outputs
from dissensus.core.likelihood import Likelihood
from dissensus.core.member_runner import first_line, network_lock
from dissensus.utils.batch_norm_names import frozen_norms, statistics_names
from dissensus.utils.memory_layout import with_own_memory
from dissensus.utils.module_state import OWN, deepcopy_memo
from dissensus.utils.network_outputs import auxiliary_output, output_tensor
from dissensus.utils.sharding import check_copyable
from dissensus.utils.shared_tensors import is_one_tensor
from dissensus.utils.tensor_tree import (
    SubmoduleCache,
    Tensors,
    TensorTree,
    derived_names,
    known_submodules,
    known_tensors,
    run_keeping_tensors,
)
from dissensus.utils.torch_private import (
    buffers_of,
    forward_hooks_of,
    has_vmap_axis,
    in_vmap,
    is_transformed,
    pytree,
    submodule,
    version_of,
)

log = logging.getLogger("dissensus")
PREFIX = "network."  # prefix of the names of a network's tensors in a member


class Member(nn.Module):
    """One network and its likelihood as one module. `forward(f, *args)` returns (f(member, *args), buffers afterwards).

    They are one module so that one `functional_call` serves both. `latents`: tensors that belong to neither, such as
    variational means and deviations, without weight prior and weight decay; f reads them as `member.latents`.
    """

    network: nn.Module = submodule("network")
    likelihood: Likelihood = submodule("likelihood")
    latents: nn.Module = submodule("latents")

    def __init__(self, network: nn.Module, likelihood: Likelihood, latents: nn.Module | None = None) -> None:
        super().__init__()
        if not isinstance(likelihood, Likelihood):
            what = likelihood.__name__ + " itself" if isinstance(likelihood, type) else type(likelihood).__name__
            raise TypeError(f"expected a likelihood object, got {what}; pass an instance, for example Classification()")
        self.network, self.likelihood = network, likelihood
        self.latents = TensorTree() if latents is None else latents
        known_submodules(self)  # which keeps them from now on
        self.training = network.training  # not self.train(), which would change the submodules
        # Submodules that the caller has put in eval mode: they stay in it during training.
        self.always_eval = [name for name, part in self.named_modules() if network.training and not part.training]

    def forward(self, function: Callable[..., Any], *args: Any) -> tuple[Any, Tensors]:
        result = function(self, *args)
        if not self.training:
            return result, {}
        named = torch.compiler.is_dynamo_compiling()
        return result, dict(self.named_buffers()) if named else known_tensors(self, buffers_of)

    def nll(self, batch: Batch) -> Tensor:
        """() mean negative log-likelihood of the batch; in training with that of an auxiliary head."""
        return self.outputs_and_nll(batch)[1]

    def outputs_and_nll(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(outputs (B, ...), `nll`)."""
        outputs, auxiliary = self.outputs_and_auxiliary(batch)
        nll = self.likelihood.nll(outputs, batch.y, batch.weight)
        return outputs, nll + auxiliary if isinstance(auxiliary, Tensor) else nll

    def outputs_and_auxiliary(self, batch: Batch) -> tuple[Tensor, Tensor | float]:
        """(outputs (B, ...), in training () the mean loss of "aux" times the network's `auxiliary_weight`, or 0.0)."""
        outputs = all_outputs(self.network, batch.x)
        if isinstance(outputs, Tensor):
            return outputs, 0.0
        weight = getattr(self.network, "auxiliary_weight", 0.0) if self.network.training else 0.0
        auxiliary = weight * self.likelihood.nll(auxiliary_output(outputs), batch.y, batch.weight) if weight else 0.0
        return output_tensor(outputs), auxiliary


def empty_copy(member: Member) -> Member:
    """A copy of the member with empty tensors, into which real ones are put at every call. Tied tensors stay tied."""
    check_copyable(member.network)
    with network_lock(member.network):  # another thread's hooks and forwards must not be copied
        copied: Member = copy.deepcopy(member, empty_tensor_memo(member))
    return copied


def empty_copy_if_possible(member: Member) -> Member:
    """The same, or the member itself where it cannot be copied."""
    try:
        return empty_copy(member)
    except (TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
        # Some modules cannot be copied (they hold a lock). The original is used, under its lock, and restored each time.
        log.info("functions run in the caller's network: it cannot be copied (%s)", first_line(error))
        return member


def empty_tensor_memo(part: nn.Module) -> dict[int, Any]:
    """What a copy of the part gets in place of its tensors: empty ones."""
    found = deepcopy_memo(part)
    for parameter in part.parameters():
        empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        found[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in part.buffers():
        found[id(buffer)] = buffer.detach().new_empty(0)
    return found


def member_index(index: int, members: int) -> int:
    """The index from 0 to M − 1; negative ones count from the end."""
    if not -members <= index < members:
        raise ValueError(f"expected a member from 0 to {members - 1}, got {index}; there are {members} members")
    return index % members


def check_initialised(network: nn.Module) -> None:
    """Raises if this is not a network, or one with lazy tensors, tensors on the meta device, or parts of TorchScript."""
    if not isinstance(network, nn.Module):
        raise TypeError(f"expected an nn.Module, got {type(network).__name__}; pass the network object itself")
    for name, part in network.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            what = f"{name or 'one'} of torch.jit, which runs only with its own weights"
            raise TypeError(f"expected a network of Python modules, got {what}; pass the one that was traced")
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        if nn.parameter.is_lazy(tensor) or tensor.is_meta:
            what = f"'{name}', which is lazy or on the meta device"
            raise ValueError(f"expected initialised tensors, got {what}; run one batch, or network.to_empty(device=…)")


Names = Collection[str]
NUMBER = "number"  # the buffer with each member's template index, if members have different templates


def split_trees(
    rows: Mapping[str, Sequence[Tensor] | Tensor], *, own: Callable[[str], bool], kept: Names, held: Names = ()
) -> tuple[TensorTree, TensorTree]:
    """(own, shared) trees: the M rows of a name are stacked if `own(name)`, else the first is shared, copied if not `held`."""
    trees = {True: TensorTree(), False: TensorTree()}
    for name, each in rows.items():
        if name in held:
            trees[False].add_tensor(name, each[0], persistent=name in kept)
            continue
        mine = own(name)
        value = _stack_rows(each) if mine else each[0].detach().clone()
        first = each if isinstance(each, nn.Parameter) else each[0]
        if isinstance(first, nn.Parameter):
            value = nn.Parameter(value, requires_grad=first.requires_grad)
        trees[mine].add_tensor(name, value, persistent=name in kept)
    return trees[True], trees[False]


def tensors_by_name(module: nn.Module) -> Tensors:
    """Name -> parameter or buffer."""
    return dict(chain(module.named_parameters(), module.named_buffers()))


def equal_frozen_names(member: Member, rows: Mapping[str, Sequence[Tensor]]) -> set[str]:
    """Names of frozen tensors that are equal in all of several members, unless these are all tensors."""
    frozen = {name for name, tensor in member.named_parameters() if not tensor.requires_grad}
    layers = frozen_norms(member, frozen)
    kept = {*frozen, *(name for name in statistics_names(member) if name.rpartition(".")[0] in layers)}
    one = {name for name in rows if is_one_tensor(rows[name])}
    alike = {name for name in kept if name in one or all(torch.equal(row, rows[name][0]) for row in rows[name][1:])}
    fixed = (name for name, _ in member.named_buffers() if name.rpartition(".")[0] in member.always_eval)
    alike |= one.intersection(fixed)
    several = all(len(each) > 1 for each in rows.values())
    return alike if several and len(alike) < len(rows) else set()


def convert_state_layout(
    state: dict[str, Any], prefix: str, *, own: nn.Module, shared: nn.Module, members: int
) -> None:
    """Converts a state dict to the layout of these trees: single tensors are repeated, or equal rows become one."""
    for name in tensors_by_name(own):
        mine, common = f"{prefix}own.{name}", f"{prefix}shared.{name}"
        if common in state and mine not in state:
            value = state.pop(common)
            state[mine] = value.expand(members, *value.shape)
    for name in tensors_by_name(shared):
        mine, common = f"{prefix}own.{name}", f"{prefix}shared.{name}"
        if mine in state and common not in state:
            rows = state[mine]
            if rows.ndim and len(rows) and all(torch.equal(row, rows[0]) for row in rows):
                state[common] = state.pop(mine)[0]


def _stack_rows(rows: Sequence[Tensor] | Tensor) -> Tensor:
    """(M, ...) as a copy: with views of a flat tensor, products would differ in the last bit from those after loading."""
    if isinstance(rows, nn.Parameter):
        return rows.detach()
    return with_own_memory(rows.detach()) if isinstance(rows, Tensor) else torch.stack([row.detach() for row in rows])


MOST = 10_000  # entries of a list or dict; longer ones are not looked at
MISSING = object()
Named = Sequence[tuple[str, nn.Module]]  # modules with their paths
Attribute = tuple[dict[str, Any], str, Any]  # a module's attributes, the name of one, and its value


class MemberStateError(RuntimeError):
    """A forward or a hook keeps tensors of vmap, which mean nothing after it."""


class ForwardAttributes:
    """Runs a template, restores its attributes, and finds out which of them are state."""

    def __init__(self, unread: set[str] | None = None, state: Iterable[str] = ()) -> None:
        self.known, self.found = SubmoduleCache(), [nn.Module()]
        self.unread = unread  # what training sets before it reads it; None before the first such call
        self.state = {*state}  # names of the attributes that are state
        self.pending_state: list[Attribute] = []  # the state that the last training call has left

    def __reduce__(self) -> tuple[type["ForwardAttributes"], tuple[Any, ...]]:
        return ForwardAttributes, (self.unread, self.state)

    def modules_to_watch(self, template: nn.Module) -> Named:
        """The template's modules that may write attributes: the caller's own, or all, if there are hooks."""
        if torch.compiler.is_dynamo_compiling():
            return ()
        if (found := self.known(template)) is not self.found:
            self.found, self.all = found, known_submodules(template)
            self.foreign = [each for each in self.all if _is_foreign(type(each[1])) or "forward" in vars(each[1])]
            self.hooks = [*chain.from_iterable(map(forward_hooks_of, found))]
            self.known_values: list[Any] = []
        return self.all if any(self.hooks) else self.foreign

    def run_with_own_tensors(self, template: Any, function: Callable[..., Any], *args: Any) -> Any:
        """function(template, *args) with the template's own tensors, which are restored, too."""
        if not self.modules_to_watch(template):  # nor do torch's layers assign other tensors
            return function(template, *args)
        return self.run(template, lambda: run_keeping_tensors(self.found, function, template, *args))

    def run(self, template: Any, function: Callable[..., Any], *args: Any, alone: bool = True, **keywords: Any) -> Any:
        """function(*args, **keywords), which runs the template; `alone`: whether no other member runs in it."""
        if not (watched := self.modules_to_watch(template)):
            return function(*args, **keywords)
        outside = [(each, each.copy()) for each in _outside_containers(self.hooks)] if any(self.hooks) else ()
        trains, lent = template.network.training, _AttributeSnapshot(self, watched)
        self.pending_state = [] if trains else self.pending_state
        try:
            if trains and self.unread is None:
                lent.trace(watched)
            result = function(*args, **keywords)
        finally:
            changed = lent.restore_attributes()
        for each, before in outside:
            inside = (value for value in _container_values(each) if isinstance(value, Tensor))
            if any(map(has_vmap_axis, inside)):
                each.clear()
                (each.extend if isinstance(each, list) else each.update)(before)
                raise MemberStateError("a hook keeps tensors of all members outside of the network")
        if trains:
            if self.unread is None:
                self.unread = {name for name in changed if lent.first.get(name)}
                self.unread |= {path + name for path, part in watched for name in derived_names(part)}
            self.state |= (state := changed.keys() - self.unread)
            if state and alone:
                # A CUDA graph would repeat what this call has read.
                if in_vmap() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
                    raise MemberStateError(f"forward reads and changes {min(state)}")
                self.pending_state += map(changed.__getitem__, state)  # besides that of an inner run
        return result

    def store_state(self) -> None:
        """Stores the state that the last training call has left."""
        for attributes, name, value in self.pending_state:
            attributes[name] = value
        self.pending_state = []


class _AttributeSnapshot:
    """The attributes of modules before a call. Lists, dicts and plain tensors are lent as copies, to be changed in place."""

    def __init__(self, written: ForwardAttributes, watched: Named) -> None:
        self.member = written.found[0]
        self.kinds: list[tuple[nn.Module, type[nn.Module]]] = []  # of modules that are traced
        self.copies: dict[int, Any] = {}  # by id of the list, dict or tensor
        self.first: dict[str, bool] = {}  # name of a traced attribute -> whether it was set before it was read
        if len(written.known_values) != len(watched):
            written.known_values = [(path, vars(part), {}, []) for path, part in watched]
        for i, (path, now, before, _) in enumerate(written.known_values):
            if len(now) != len(before) or not all(map(is_, now.values(), before.values())):
                keys = [key for key, each in now.items() if key not in OWN and isinstance(each, list | dict | Tensor)]
                written.known_values[i] = path, now, now.copy(), keys
        self.before = written.known_values.copy()
        for _, now, before, keys in self.before:
            for key in keys:
                now[key] = self._copy_container(before[key])

    def trace(self, watched: Named) -> None:
        """Notes which attributes of a caller's modules are read, and which are set, first."""
        for path, part in watched:
            if _is_foreign(kind := type(part)):
                self.kinds.append((part, kind))
                object.__setattr__(part, "__class__", _tracing_class(kind, path, self.first))

    def restore_attributes(self) -> dict[str, Attribute]:
        """Restores the attributes; returns those that the call has changed, by name."""
        for part, kind in self.kinds:
            object.__setattr__(part, "__class__", kind)
        found: dict[str, Attribute] = {}
        for path, now, before, keys in self.before:
            if not keys and len(now) == len(before) and all(map(is_, now.values(), before.values())):
                continue
            for key, each in now.items():
                value = before.get(key, MISSING)
                lent = self.copies.get(id(value), value)
                if each is not lent or (lent is not value and self._has_changed(value, lent)):
                    found[path + key] = now, key, each
                    self.first[path + key] = each is not lent and self.first.get(path + key, False)
            for key in now.keys() - before.keys():
                del now[key]
            now.update(before)
        return found

    def _copy_container(self, value: Any) -> Any:
        if id(value) not in self.copies and (isinstance(value, Tensor) or len(value) <= MOST):
            deep = isinstance(value, Tensor) or any(
                isinstance(e, list | dict | tuple | Tensor) for e in _container_values(value)
            )
            self.copies[id(value)] = pytree.tree_map(self._copy_leaf, value) if deep else value.copy()
        return self.copies.get(id(value), value)

    def _copy_leaf(self, each: Any) -> Any:
        """A copy, if this is a tensor that is neither registered nor part of a graph or a transform."""
        if not isinstance(each, Tensor) or each.requires_grad or each.is_inference():
            return each
        if is_transformed(each) or any(each is tensor for tensor in known_tensors(self.member, buffers_of).values()):
            return each
        return self.copies.setdefault(id(each), each.detach().clone())

    def _has_changed(self, value: Any, lent: Any) -> bool:
        same_keys = not isinstance(value, Tensor) and len(value) == len(lent) and all(map(is_, value, lent))
        if same_keys and all(map(is_, _container_values(value), _container_values(lent))):
            return False
        (leaves, form), (now, other) = pytree.tree_flatten(value), pytree.tree_flatten(lent)
        pairs = zip(leaves, now, strict=False)
        same = (b is self.copies.get(id(a), a) and (b is a or not version_of(b)) for a, b in pairs)
        return form != other or not all(same)


def _tracing_class(kind: type[nn.Module], path: str, first: dict[str, bool]) -> type[nn.Module]:
    def get(part: nn.Module, name: str) -> Any:
        first.setdefault(path + name, False)
        return kind.__getattribute__(part, name)

    def put(part: nn.Module, name: str, value: Any) -> None:
        first.setdefault(path + name, True)
        kind.__setattr__(part, name, value)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    meta: Any = type(kind)
    return meta(kind.__name__, (kind,), {"__getattribute__": get, "__setattr__": put, **names})


def _outside_containers(hooks: Sequence[dict[int, Any]]) -> list[Any]:
    """Lists and dicts outside of the network that its hooks know as variables."""
    found: list[Any] = []
    for each in chain.from_iterable(map(dict.values, hooks)):
        if isinstance(each, FunctionType):
            found += [cell.cell_contents for cell in each.__closure__ or ()]
            found += map(each.__globals__.get, each.__code__.co_names)
    return [each for each in found if isinstance(each, list | dict)]


def _container_values(holder: Any) -> Any:
    return holder.values() if isinstance(holder, dict) else holder


def _is_foreign(kind: type[nn.Module]) -> bool:
    """Whether layers of this class may write attributes: torch's and the library's own do not."""
    return not kind.__module__.startswith(("torch.", "dissensus."))


Result = TypeVar("Result")


def state_names(particles: Any) -> set[str]:
    """Names of the networks' plain attributes that training reads and changes."""
    return {name.removeprefix(PREFIX) for written in particles._forward_attributes.values() for name in written.state}


def run_separately(particles: Any, run: Callable[[], Result]) -> Result:
    """run(), and once more with a template for each member if forward has state in attributes of the one for all."""
    result = run()
    if not particles._forward_attributes[0].state or len(particles.templates) >= particles.members:
        return result
    others = [empty_copy(particles.template) for _ in range(1, particles.members)]
    particles.templates = (particles.template, *others)
    particles.own.add_tensor(NUMBER, torch.arange(particles.members, device=particles.device), persistent=False)
    particles._choose_runner()
    log.info("members run one after the other: forward reads and changes %s", ", ".join(sorted(state_names(particles))))
    return run()


def run_compiled(particles: Any, run: Callable[[], Result]) -> Result:
    """run(), in which compiled code runs members; raises if they have state, which that would not keep apart."""
    pairs = [(particles._forward_attributes[i], each) for i, each in enumerate(particles.templates)]
    lent = [(each, _AttributeSnapshot(each, watched)) for each, one in pairs if (watched := each.modules_to_watch(one))]
    try:
        return run()
    finally:
        for written, each in lent:
            if each.restore_attributes().keys() - (written.unread or set()):
                raise MemberStateError("forward changes attributes")


def warn_of_state(particles: Any) -> None:
    """Logs, once, which attributes a state dict does not hold."""
    if state := sorted(state_names(particles) - particles._logged_names):
        particles._logged_names.update(state)
        log.warning(
            "a state holds tensors only, not the attribute %s, which forward reads and changes in training: wherever it is "
            "loaded, the attribute is that of a new network; register it as a buffer",
            ", ".join(state),
        )
