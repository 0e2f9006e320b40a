"""Figures of a task over widths: one function each, takes rows, returns a figure, saves nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from dissensus.bench.width.claims import WidthTable
from dissensus.bench.width.grid import EMBEDDED, INDEPENDENT
from dissensus.bench.width.rows import Place, WidthRow
from dissensus.reporting.plots import INK, PALETTE, Curve, Panel, curve_figure, marked

TITLES = {
    "accuracy": "ensemble, test rows",
    "member_accuracy": "a member, test rows (mean)",
    "train_member_accuracy": "a member, training rows (mean)",
}
DASHED = {"color": INK, "linestyle": "--"}


def width_figure(rows: Sequence[WidthRow]) -> Figure:
    """Accuracy over M for every width, of ensembles, members, and members on training rows; and over parameters."""
    table, units = WidthTable(rows), {row.factor: row.units for row in rows}

    def panel(name: str, over: str, xlabel: str, title: str) -> Panel:
        curves = []
        for i, factor in enumerate(table.factors):
            for method, look in ((EMBEDDED, marked(i)), (INDEPENDENT, {"linestyle": "--"})):
                places = {
                    place: table.mean(place, over)
                    for place in (Place(method, factor, members) for members in table.sizes)
                    if place in table.rows
                }
                label = f"{factor:g}× (N = {units[factor]})" if method == EMBEDDED else ""
                curves.append(_curve(table, places, name, label, {**_coloured(i), **look}))
        kinds = [Curve([], [], "embedded", {"color": INK}), Curve([], [], "independent", DASHED)]
        axes = {"xscale": "log", "xlabel": xlabel, "ylabel": "accuracy", "title": title}
        return Panel([*curves, *kinds], axes, percent="y", ticks=table.sizes if over == "members" else ())

    panels = [panel(name, "members", "members M", title) for name, title in TITLES.items()]
    panels.append(panel("accuracy", "parameters", "parameters", "ensemble, over its parameters"))
    return curve_figure(panels, size=(10.4, 7.0), rows=2)


def transition_figure(rows: Sequence[WidthRow]) -> Figure:
    """Accuracy of ensemble and members, and how many members are effective, over p for both γ."""
    table = WidthTable(rows)
    swept = sorted((place for place in table.rows if place.p is not None), key=lambda place: place.p or 0.0)
    ends, beside = (swept[0].p, swept[-1].p), Place(INDEPENDENT, swept[0].factor, swept[0].members)
    panels = []
    for name in ("accuracy", "member_accuracy", "effective"):
        curves = []
        for i, gamma in enumerate(("M", "1")):
            places = {place: place.p or 0.0 for place in swept if place.gamma == gamma}
            curves.append(_curve(table, places, name, f"γ = {gamma}", {**_coloured(i), **marked(i)}))
        if (found := table.estimate({beside: 1.0}, name)) is not None:
            curves.append(Curve(ends, [found[0]] * 2, "independent networks", DASHED))
        title = f"{TITLES.get(name, 'effective members')}, M = {beside.members}"
        axes = {"xlabel": "p: modulations p + √(1 − p²) N(0, 1)", "title": title}
        share = name in TITLES
        panels.append(Panel(curves, {**axes, "ylabel": "accuracy" * share}, percent="y" * share))
    lost = sum(row.p is not None and row.diverged is not None for row in rows)
    return curve_figure(panels, size=(10.4, 3.2), note=f"{lost} diverged" if lost else None)


def _coloured(i: int) -> dict[str, Any]:
    return {"color": PALETTE[i % len(PALETTE)]}


def _curve(table: WidthTable, places: Mapping[Place, float], name: str, label: str, look: Mapping[str, Any]) -> Curve:
    """A number with its interval at the places that have it, each at its x."""
    found = {x: each for place, x in places.items() if (each := table.estimate({place: 1.0}, name)) is not None}
    ends = (
        [0.0, 1.0] if name in TITLES else [-float("inf"), float("inf")]
    )  # no accuracy is beyond, however few the seeds
    lower, upper = ([min(max(each[side], ends[0]), ends[1]) for each in found.values()] for side in (1, 2))
    return Curve(list(found), [each[0] for each in found.values()], label, look, band=(lower, upper))
