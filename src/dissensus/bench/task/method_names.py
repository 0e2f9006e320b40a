"""Names of methods: one of METHODS, or the user's class, package.module:Class. NAME-VARIANT is NAME with the settings of
[method.NAME-VARIANT] added."""

import inspect
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from inspect import Parameter
from typing import Any

from dissensus.bench.names import name_list
from dissensus.bench.user_code import import_object, is_import_path
from dissensus.core.posterior import Posterior
from dissensus.methods import METHODS
from dissensus.utils.checks import one_of


def base_name(name: str) -> str:
    """The method's name without its variant: "tradi" for "tradi-diagonal", "mine:Own" for "mine:Own-wide"."""
    base, _, variant = name.partition("-")
    if not re.fullmatch(r"[\w.]+:[\w.]+", base):
        one_of("a method (or package.module:Class)", base, METHODS)
    if not re.fullmatch(r"[\w-]+", variant or "none"):
        raise ValueError(f"expected letters, digits, _ and - after the method's name, got {name!r}; rename the variant")
    return base


def method_class(name: str, beside: str = "") -> type[Posterior]:
    """The class of a method or variant. `beside`: the task's folder, for the user's methods."""
    base = base_name(name)
    if not is_import_path(base):
        return METHODS[base]
    found = import_object(base, "a method", beside)
    if not (isinstance(found, type) and issubclass(found, Posterior)):
        raise ValueError(f"expected a class derived from dissensus.Posterior, got {base!r}, which is {found!r}")
    if not hasattr(found, "name"):
        raise ValueError(f'expected a name in the class {base}, got none; write name = "…" in it, for saved files')
    return found


def parameters(method: type[Posterior]) -> dict[str, Parameter]:
    """The parameters of a method's constructor by name; with **keywords also those of its base classes."""
    found: dict[str, Parameter] = {}
    for each in [each for each in method.__mro__ if "__init__" in vars(each)]:
        own = inspect.signature(each).parameters.values()
        for p in own:
            if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) and p.name != "particles":
                found.setdefault(p.name, p)
        if each is Posterior or not any(p.kind is Parameter.VAR_KEYWORD for p in own):
            break
    return found


def count_setting(method: type[Posterior]) -> str | None:
    """The setting for a method's number of networks: `members` if it takes several, `networks` if any number, or None."""
    return {"several": "members", "any": "networks"}.get(method.networks_taken)


def variants_of(settings: Mapping[str, Any]) -> list[str]:
    """The variants and the user's methods in a task's settings, named in `methods` or by a table."""
    named = [*name_list(settings.get("methods", [])), *settings.get("method", {})]
    own = [name for name in dict.fromkeys(named) if is_import_path(name) or name.partition("-")[0] in METHODS]
    return [name for name in own if name not in METHODS]


def setting_path(key: str, methods: Iterable[str]) -> list[str]:
    """A setting's dotted key as ["method", NAME, …] or [section, …]; the names of the user's methods contain dots."""
    plain = key.strip().replace('"', "")
    for name in sorted(filter(is_import_path, methods), key=len, reverse=True):
        if f"{plain}.".startswith(f"method.{name}."):
            return ["method", name, *filter(None, plain.removeprefix(f"method.{name}").split("."))]
    return plain.split(".")


def check_methods(methods: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Raises for an unknown method, and for a variant without a table."""
    tables = settings.get("method", {})
    for name in methods:
        if base_name(name) == name or name in tables:
            continue
        variants = [each for each in tables if "-" in each]
        hint = f"; known variants are {', '.join(variants)}" if variants else ""
        raise ValueError(f"expected a table [method.{name}] for the variant, got none; add it{hint}")


def check_overrides_read(overrides: Sequence[str], running: Collection[str]) -> None:
    """Raises if method.NAME.key=value names a method that does not run, so that the value would be ignored."""
    read = {*running, *map(base_name, running)}
    for override in overrides:
        path = setting_path(override.partition("=")[0], read)
        if path[0] == "method" and len(path) > 2 and path[1].partition("-")[0] in METHODS and path[1] not in read:
            known = f"the methods that run ({', '.join(running)})"
            raise ValueError(f"expected a setting of {known}, got {override!r}; choose {path[1]}, or leave it out")
