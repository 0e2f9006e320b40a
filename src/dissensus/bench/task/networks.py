"""Networks that a task names: one of dissensus.nets, or any that Python can import, as "package.module:name".

Importing runs code: a name is looked up where a network is built, and by nothing that only reads settings or makes a report.
"""

import importlib
import os
import sys
from collections.abc import Callable
from functools import reduce
from typing import Any

from torch import nn

from dissensus.nets import NETS
from dissensus.numerics.checks import one_of

NetworkMaker = Callable[..., nn.Module]


def imported(name: str) -> bool:
    """Whether a name says where to import a network from; a saved posterior of such a one does not build it by itself."""
    return ":" in name


def maker(name: str) -> NetworkMaker:
    """What makes the networks of that name: a class, or a function that returns one.

    Modules are looked for where Python looks for them, and in the current folder after that.
    """
    if not imported(name):
        return NETS[one_of("network.name (or package.module:name)", name, NETS)]
    module, _, attributes = name.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # last: no file of the user's may stand in for an installed module
    try:
        found: Any = reduce(getattr, attributes.split("."), importlib.import_module(module))
    except Exception as error:  # an import may raise anything
        raise ValueError(
            f"expected a network that can be imported, as package.module:name, got {name!r} ({type(error).__name__}: {error}); "
            "install its package, or start in the folder that its file lies in"
        ) from error
    if not callable(found) or isinstance(found, nn.Module):
        raise ValueError(
            f"expected a class or function that makes a network, got {name!r}, which is {type(found).__name__}; "
            "name what builds it"
        )
    return found  # type: ignore[no-any-return]
