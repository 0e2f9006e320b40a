"""Method variants: NAME is a method, NAME-VARIANT the same method with the settings of [method.NAME-VARIANT] on top."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dissensus.bench.names import listed
from dissensus.methods import METHODS
from dissensus.numerics.checks import one_of


def base_name(name: str) -> str:
    """The method's own name, a key of METHODS: tradi of tradi and of tradi-diagonal."""
    base, _, variant = name.partition("-")
    one_of("a method", base, METHODS)
    if not re.fullmatch(r"[\w-]+", variant or "none"):
        raise ValueError(f"expected letters, digits, _ and - after the method's name, got {name!r}; rename the variant")
    return base


def variants_of(settings: Mapping[str, Any]) -> list[str]:
    """The variants a task's settings name, in `methods` or by a table of their own."""
    named = [*listed(settings.get("methods", [])), *settings.get("method", {})]
    return [name for name in dict.fromkeys(named) if "-" in name and name.partition("-")[0] in METHODS]


def check_methods(methods: Sequence[str], settings: Mapping[str, Any]) -> None:
    """An error for a method that is not known, and for a variant without a table that says what is different."""
    tables = settings.get("method", {})
    for name in methods:
        if base_name(name) == name or name in tables:
            continue
        variants = [each for each in tables if "-" in each]
        hint = f"; known variants are {', '.join(variants)}" if variants else ""
        raise ValueError(
            f"expected a table [method.{name}] for the variant, got none; add what is different in it{hint}"
        )


def check_read(overrides: Sequence[str], running: Collection[str]) -> None:
    """An error where method.NAME.key=value is of a method that does not run, so that nothing would read it."""
    read = {*running, *map(base_name, running)}
    for override in overrides:
        path = override.partition("=")[0].strip().split(".")
        if path[0] == "method" and len(path) > 2 and path[1].partition("-")[0] in METHODS and path[1] not in read:
            raise ValueError(
                f"expected a setting of the methods that run ({', '.join(running)}), got {override!r}; choose "
                f"{path[1]}, or leave it out"
            )
