"""Errors about `--set` that name what the methods that run have, and a form that works."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dissensus.bench.task.objects import OBJECTS, argument_names
from dissensus.bench.task.variants import base_name
from dissensus.core.errors import unknown
from dissensus.methods import METHODS


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


def no_such_setting(key: str, running: Collection[str], known: Mapping[str, Collection[str]]) -> ValueError:
    """The error for method.key=value where no method that runs has the key; `known`: keys by section."""
    there = sorted({each for method in running for each in known[f"method.{base_name(method)}"]})
    what = f"a setting of the methods that run ({', '.join(running)})"
    elsewhere = [method for method in METHODS if key in known[f"method.{method}"]]
    if not elsewhere:
        return unknown(what, key, there)
    return ValueError(
        f"expected {what} of {', '.join(there)}, got {key!r}, which is one of {', '.join(elsewhere)}; choose a method that "
        "has it, or leave it out"
    )


def object_hint(
    path: Sequence[str], text: str, running: Collection[str], known: Mapping[str, Collection[str]]
) -> ValueError | None:
    """The error for a part of an object that cannot be set alone, with the whole as it may be written; None for others."""
    if len(path) < 2 or path[-2] not in OBJECTS:
        return None
    *section, keyword, key = path
    owners = section[1:] or [base_name(each) for each in running]
    methods = section[:1] == ["method"] and any(keyword in known.get(f"method.{each}", ()) for each in owners)
    if not methods and path[:-1] != ["likelihood"]:
        return None
    name, whole = ".".join(path[:-1]), _whole(keyword, key, text)
    if whole is not None:
        return ValueError(f"expected {name} as a whole, got {'.'.join(path)!r}; write --set '{name}={whole}'")
    return None if name in known else unknown(keyword, key, OBJECTS[keyword])


def _whole(keyword: str, key: str, text: str) -> str | None:
    """An object with a constructor or an argument called `key`, as it is written in a line."""
    family: Mapping[str, Any] = OBJECTS[keyword]
    if key in family:
        return f"{{{key}={text}}}"
    maker = next((name for name in family if key in argument_names(keyword, name)), None)
    if maker is None:
        return None
    arguments = inspect.signature(family[maker]).parameters
    others = [name for name, each in arguments.items() if each.default is inspect.Parameter.empty and name != key]
    given = ", ".join([*(f"{name}=…" for name in others if name in argument_names(keyword, maker)), f"{key}={text}"])
    return f"{{{maker}={{{given}}}}}"
