"""The networks of tasks by name: one of dissensus.nets, or the user's."""

from collections.abc import Callable

from torch import nn

from dissensus.bench.own import imported, own_object
from dissensus.nets import NETS
from dissensus.numerics.checks import one_of

NetworkMaker = Callable[..., nn.Module]


def maker(name: str, beside: str = "") -> NetworkMaker:
    """The class of that name, or a function that returns a network. `beside`: the task's folder."""
    if not imported(name):
        return NETS[one_of("network.name (or package.module:name)", name, NETS)]
    found = own_object(name, "a network", beside)
    if not callable(found) or isinstance(found, nn.Module):
        raise ValueError(f"expected a class or function that makes a network, got {type(found).__name__} as {name!r}")
    return found  # type: ignore[no-any-return]
