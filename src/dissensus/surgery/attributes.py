"""Attributes of networks beside their tensors and layers: of an ensemble's members, the first one's hold for all.

Members run in one template, into which their registered tensors are put. What a network keeps outside of them (a number, a
function, a tensor that is no buffer) is the template's.
"""

import logging
from collections.abc import Iterator, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger("dissensus")

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
DEEPEST = 3  # tables within tables that are looked into


def say_other_attributes(networks: Sequence[nn.Module]) -> None:
    """Warns where a network has an attribute of another value than the first one has, which would be read in its place.

    Also where other layers of it are in eval mode by hand.
    """
    for i, network in enumerate(networks[1:], start=1):
        if (where := next(_differences(networks[0], network), None)) is not None:
            log.warning(
                "members 0 and %d differ in the attribute %s, and member 0's will be read for all of them; register it as a "
                "buffer where it should be each member's own",
                i,
                where,
            )
            break
    for i, network in enumerate(networks[1:], start=1):
        if network.training and (other := _still(networks[0]) ^ _still(network)):
            log.warning(
                "layer '%s' is in eval mode in one of members 0 and %d alone, and all will train as member 0 does; put it in "
                "eval mode in all members or in none",
                min(other),
                i,
            )
            break


def _still(network: nn.Module) -> set[str]:
    """Names of layers that are in eval mode in a network that is not; of one in eval mode all are, and none by hand."""
    return {name for name, part in network.named_modules() if network.training and not part.training}


def _differences(first: nn.Module, other: nn.Module) -> Iterator[str]:
    """Names of attributes, registered ones left out, in which two networks of one architecture differ."""
    own = vars(nn.Module()).keys()
    registered = {id(each) for each in (*first.modules(), *first.parameters(), *first.buffers())}
    for (name, a), (_, b) in zip(first.named_modules(), other.named_modules(), strict=True):
        theirs = vars(b)
        for key, value in vars(a).items():
            # Weight norm and spectral norm by hooks keep what they make of their parameters at every call.
            made = any(f"{key}{ending}" in a._parameters for ending in ("_g", "_orig"))
            if key not in own and not made and key in theirs and _differ(value, theirs[key], registered, DEEPEST):
                yield f"'{name}.{key}'" if name else f"'{key}'"


def _differ(a: Any, b: Any, registered: set[int], depth: int) -> bool:
    """Whether two values differ for certain: what cannot be compared does not, nor what each member has for itself."""
    if id(a) in registered:
        return False
    if type(a) is not type(b):
        return isinstance(a, PLAIN) and isinstance(b, PLAIN)
    if isinstance(a, Tensor):
        return a.shape != b.shape or a.dtype != b.dtype or (not a.is_meta and not torch.equal(a, b.to(a.device)))
    if isinstance(a, FunctionType | BuiltinFunctionType):
        return (a.__module__, a.__qualname__) != (b.__module__, b.__qualname__)
    if type(a).__module__ == "numpy" and hasattr(a, "shape"):
        return a.shape != b.shape or not bool((a == b).all())
    if depth and isinstance(a, nn.Module):  # one that was not registered
        return _differ(dict(a.state_dict()), dict(b.state_dict()), registered, depth - 1)
    if depth and isinstance(a, list | tuple):
        return len(a) != len(b) or any(_differ(x, y, registered, depth - 1) for x, y in zip(a, b, strict=True))
    if depth and isinstance(a, dict):
        return a.keys() != b.keys() or any(_differ(a[key], b[key], registered, depth - 1) for key in a)
    return isinstance(a, PLAIN) and a == a and a != b
