"""Attributes of a network besides its registered tensors: numbers, functions, plain tensors, hooks, training modes.

Members with equal attributes run in one template, into which their tensors are put; members that differ run each in their
own template. Files hold the attributes that are meaningful in other processes, so that `load` can check them.
"""

import hashlib
import json
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from dissensus.utils.tensor_tree import Cache, TensorTree, all_submodules, derived_names
from dissensus.utils.torch_private import buffers_of, forward_hooks_of, parameters_of

PLAIN = (bool, int, float, complex, str, type(None), torch.dtype)
SAME = (*PLAIN, FunctionType, BuiltinFunctionType, type)  # what a copy shares with the original
OWN = vars(nn.Module()).keys()
HOOKS = [name for name in OWN if name.endswith("_hooks")]
# How names of attributes begin that `fully_shard`, Accelerate and Lightning add or change.
WRAPPERS = ("__", "_fsdp", "_is_fsdp", "_is_accelerate", "_current_fx")
# By which torch's transformer layers switch a fast path off; methods that cut layers do so, too.
SWITCHES = ("activation_relu_or_gelu", "use_nested_tensor", "use_nested_tensor_of_torch")
Known = dict[int, tuple[Any, Any]]  # id -> (description, the object, kept so that no other one gets its id)


@dataclass(frozen=True)
class _ProcessLocal:
    """A value that is meaningful only in this process; files do not hold it."""

    value: Any


def differing_attribute(networks: Sequence[nn.Module], but: Collection[str] = ()) -> str | None:
    """Name of an attribute, but not of these, hook or mode in which networks may differ; None if they are equal."""
    training = all(network.training for network in networks)  # in eval mode all layers are in eval mode anyway
    first, *others = (_attributes(network, modes=training) for network in networks)
    names = (name for other in others for name in {**first, **other} if first.get(name) != other.get(name))
    return next((name for name in names if name not in but), None)


def saved_attributes(network: nn.Module) -> dict[str, Any]:
    """Name -> JSON description of attributes that have one; attributes of torch's layers are in their `extra_repr`."""
    parts = network.named_modules()
    torchs = {n for n, each in parts if original_class(each).__module__.startswith("torch.nn.") and each.extra_repr()}
    every = _attributes(network, hooks=False).items()
    split = [(name.rpartition("."), each) for name, each in every]
    kept = {"".join(name): each for name, each in split if name[0] not in torchs and name[2] not in SWITCHES}
    found = json.loads(json.dumps(kept, default=lambda _: None))
    return {name: each for name, each in found.items() if each is not None}


def original_class(part: nn.Module) -> type:
    """The class of a layer as somebody wrote it; methods that cut it, and `fully_shard`, derive others from that."""
    kind = getattr(part, "plain_class", type(part))
    return next(each for each in kind.__mro__ if not each.__module__.startswith("torch.distributed."))


def plain_attributes(module: nn.Module) -> list[Any] | None:
    """All that copies of a module depend on besides the values of its tensors; None if something could change unseen."""
    found: list[Any] = []
    for part in all_submodules(module):
        found += part, type(part), [*parameters_of(part)], [*buffers_of(part)]
        held = {} if isinstance(part, TensorTree) else vars(part)
        if any(map(held.get, HOOKS)):
            return None
        for name in [name for name in held if name not in OWN]:
            try:
                found += name, _copy_plain_value(held[name])
            except TypeError:
                return None
    return found


def _copy_plain_value(value: Any) -> Any:
    """A copy of numbers, names, functions and lists or dicts of them; raises for anything else, which may change."""
    if isinstance(value, Cache):
        return type(value)
    if isinstance(value, SAME):
        return type(value), value
    if type(value) in (list, tuple):
        return type(value), [_copy_plain_value(each) for each in value]
    if type(value) is dict:
        return [(_copy_plain_value(key), _copy_plain_value(each)) for key, each in value.items()]
    raise TypeError


def deepcopy_memo(module: nn.Module) -> dict[int, Any]:
    """A memo for `copy.deepcopy`, which refuses tensors with a graph: those that a forward has left are copied without it."""
    waiting: list[Any] = [value for part in module.modules() for name, value in vars(part).items() if name not in OWN]
    held: dict[int, Any] = {}
    for value in waiting:  # which grows
        if id(value) not in held and type(value) in (list, tuple, dict):
            waiting += value.values() if isinstance(value, dict) else value
        held[id(value)] = value
    return {at: each.detach().clone() for at, each in held.items() if isinstance(each, Tensor) and not each.is_leaf}


def _attributes(network: nn.Module, *, modes: bool = False, hooks: bool = True) -> dict[str, Any]:
    """Name -> description of each attribute that is not registered, with `modes` and `hooks` of these, too."""
    registered = (*network.named_modules(), *network.named_parameters(), *network.named_buffers())
    known: Known = {id(each): (f"@{name}", each) for name, each in registered}
    found: dict[str, Any] = {}
    for path, part in network.named_modules():
        left_out = {*OWN, *derived_names(part)}
        if hasattr(part, "plain_class"):  # of a layer that a method has cut
            left_out |= {*part.added, "plain_class", "read_past"}
        values = {k: v for k, v in vars(part).items() if k not in left_out and not k.startswith(WRAPPERS)}
        if hooks:
            values["hooks"] = _ProcessLocal([hook for hooks in forward_hooks_of(part) for hook in hooks.values()])
        values |= {"training": part.training} if modes else {}
        found |= {f"{path}.{key}" if path else key: _description(value, known) for key, value in values.items()}
    return found


def _description(value: Any, known: Known) -> Any:
    """A description that is equal for equal values; "#" marks a reference from an object to one that contains it."""
    if isinstance(value, weakref.ref):
        value = value()
    if isinstance(value, PLAIN):
        return repr(value)
    if id(value) not in known:
        known[id(value)] = "#", value
        try:
            known[id(value)] = _description_of_parts(value, known), value
        except Exception:  # an object that can neither be read nor pickled equals only itself
            known[id(value)] = _ProcessLocal(id(value)), value
    return known[id(value)][0]


def _description_of_parts(value: Any, known: Known) -> Any:
    if isinstance(value, _ProcessLocal):
        return _ProcessLocal(_description(value.value, known))
    if isinstance(value, Tensor) or type(value).__module__ == "numpy":
        plain = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
        return f"{type(value).__name__} {tuple(value.shape)} {value.dtype} {hashlib.sha256(plain.tobytes()).hexdigest()[:16]}"
    if isinstance(value, FunctionType):
        held = value.__defaults__, value.__kwdefaults__, [cell.cell_contents for cell in value.__closure__ or ()]
        return [value.__qualname__, _description(held, known), _ProcessLocal((value.__module__, value.__code__))]
    if isinstance(value, BuiltinFunctionType | type):
        return [value.__qualname__, _ProcessLocal(value)]
    if type(value) in (list, tuple):
        return [_description(each, known) for each in value]
    if type(value) is dict:
        return [[_description(key, known), _description(each, known)] for key, each in value.items()]
    parts = value.__reduce_ex__(4)
    return _ProcessLocal([_description(list(each) if isinstance(each, Iterator) else each, known) for each in parts])
