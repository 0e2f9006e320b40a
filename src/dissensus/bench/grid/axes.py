"""The cells of a task over a grid: one or several settings, each at several values.

    [grid.noise]                               # an axis; figures draw the first axis from left to right
    label = "wrong labels"
    "data.label_noise" = [0.0, 0.2, 0.4]       # a setting as on the command line, and its value in each cell

An axis may have several settings, for methods with different names for one thing; `values` then gives the axis's numbers. A
run that no axis changes is done once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from dissensus.bench.task.config import Task, overridden
from dissensus.bench.task.schema import GRID, check_task
from dissensus.bench.task.variants import base_name, setting_path
from dissensus.numerics.checks import number, one_of


@dataclass(frozen=True)
class Axis:
    name: str
    label: str
    log: bool
    values: list[float]
    settings: dict[str, list[Any]]  # setting, as on the command line -> one value for each of `values`


class GridCell(NamedTuple):
    """A task at one point of the grid."""

    name: str
    at: dict[str, float]  # axis -> value
    task: Task


def axes_of(task: Task) -> list[Axis]:
    """The axes of a task, in its order."""
    return [_axis(name, table, task) for name, table in task.settings["grid"].items()]


def cells_of(task: Task, methods: Sequence[str]) -> list[GridCell]:
    """All cells, the last axis varying fastest; settings of methods that do not run are left out."""
    axes, found = axes_of(task), []
    plain = {key: value for key, value in task.settings.items() if key != "grid"}
    for places in product(*(range(len(axis.values)) for axis in axes)):
        settings, here = plain, list(zip(axes, places, strict=True))
        for axis, i in here:
            for key, values in axis.settings.items():
                if _read(key, methods):
                    settings = overridden(
                        settings, f"{key}={json.dumps(values[i])}", methods=methods, beside=str(task.folder or "")
                    )
        at = {axis.name: axis.values[i] for axis, i in here}
        name = "-".join(f"{axis}{value:g}" for axis, value in at.items())
        check_task(settings, f"{task.name}, {name}")
        found.append(GridCell(name, at, replace(task, settings=settings)))
    return found


def _axis(name: str, table: Mapping[str, Any], task: Task) -> Axis:
    settings = {key: value for key, value in table.items() if "." in key}
    for key in table.keys() - settings.keys():
        one_of(f'a key of [grid.{name}], or a setting as "data.train"', key, GRID)
    if not settings:
        raise ValueError(f'expected a setting in [grid.{name}], got none; write for example "data.train" = [100, 1000]')
    values = table.get("values", next(iter(settings.values())))
    for key, several in settings.items():
        if not isinstance(several, list) or not isinstance(values, list) or len(several) != len(values):
            raise ValueError(f"expected a {key} for each of {values!r} in [grid.{name}], got {several!r}; pass a list")
        _check_alone(key, task.settings, f"[grid.{name}]")
    numbers = [float(number(f"grid.{name}: a value of the axis", each)) for each in values]
    return Axis(name, str(table.get("label", name)), bool(table.get("log", False)), numbers, settings)


def _check_alone(key: str, settings: Mapping[str, Any], where: str) -> None:
    """Raises if the task also sets a setting of the grid: one of the two would be ignored silently."""
    section, *rest = key.split(".")
    tables = (
        list(settings.get("method", {}).values())
        if section == "method" and len(rest) == 1
        else [settings.get(section, {})]
    )
    for table in tables:
        for part in rest:
            table = table.get(part) if isinstance(table, Mapping) else None
        if table is not None:
            raise ValueError(f"expected {key} in {where} only, got it elsewhere in the task too; remove one")


def _read(key: str, methods: Sequence[str]) -> bool:
    """Whether one of the methods reads a setting: method.NAME.key is for NAME only."""
    path = setting_path(key, [*methods, *map(base_name, methods)])
    return path[0] != "method" or len(path) < 3 or path[1] in {*methods, *map(base_name, methods)}
