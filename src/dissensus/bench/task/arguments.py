"""Settings of a method as a task writes them, with the objects that they name made from the run's network and rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dissensus.bench.task.objects import OBJECTS, argument_names, written

# Arguments of an object that may also stand beside it in a method's table, where variants and sweeps change one of them.
BESIDE = {"lengthscales": ("alpha", "form")}


def folded(settings: Mapping[str, Any], keywords: Collection[str]) -> dict[str, Any]:
    """Settings of a method with these keywords, what stands beside an object put into it."""
    found = dict(settings)
    for keyword, names in BESIDE.items():
        here = [name for name in names if keyword in keywords and name in found and name not in keywords]
        beside = {name: found.pop(name) for name in here}
        if not beside:
            continue
        if keyword not in found:
            maker = next(name for name in OBJECTS[keyword] if here[0] in argument_names(keyword, name))
            raise ValueError(f'expected {keyword} = "{maker}" with {here[0]}, got none; add it, or leave {here[0]} out')
        table = written(keyword, found[keyword]).table()
        if twice := [name for name in here if name in table]:
            raise ValueError(f"expected {twice[0]} once, got it in {keyword} and beside it; leave one of them out")
        found[keyword] = table | beside
    return found


def check_objects(settings: Mapping[str, Any], keywords: Collection[str]) -> None:
    """Raises where an object in a method's settings is written wrongly, or lacks an argument."""
    for keyword, value in folded(settings, keywords).items():
        if keyword in OBJECTS:
            written(keyword, value).check()


def resolved(settings: Mapping[str, Any], keywords: Collection[str], **supplied: Any) -> dict[str, Any]:
    """Settings of a method with these keywords, objects in place of what is written for them.

    `supplied`: inputs, batches of (x, …) as the network sees them; network, the architecture.
    """
    return {
        key: written(key, value).made(**supplied) if key in OBJECTS else value
        for key, value in folded(settings, keywords).items()
    }


def value_of(settings: Mapping[str, Any], key: str) -> Any:
    """The value of a setting, or of an argument of that name of one of its objects; None where it has neither."""
    if key in settings:
        return settings[key]
    objects = [written(keyword, value) for keyword, value in settings.items() if keyword in OBJECTS]
    return next((each.arguments[key] for each in objects if key in each.arguments), None)
