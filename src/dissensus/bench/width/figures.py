"""Figures of a task over widths: one function each, takes rows, returns a figure, saves nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, NullLocator

from dissensus.bench.width.claims import (
    Table,
    embedded,
    estimate,
    factors_of,
    independent,
    members_of,
    table_of,
)
from dissensus.bench.width.rows import Place, WidthRow
from dissensus.reporting.plots import INK, MARKERS, PALETTE, PERCENT, POWER, STYLE

PANELS = (
    ("accuracy", "ensemble, test rows"),
    ("member_accuracy", "a member, test rows (mean)"),
    ("train_member_accuracy", "a member, training rows (mean)"),
)


def width_figure(rows: Sequence[WidthRow]) -> Figure:
    """Accuracy over M for every width, of ensembles, members, and members on training rows; and over parameters."""
    table = table_of(rows)
    factors = factors_of(table)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.4, 7.4))
        panels = figure.subplots(2, 2).flat
        for axes, (name, title) in zip(panels, PANELS, strict=False):
            for i, factor in enumerate(factors):
                for places, line in _curves(table, factor):
                    _draw(axes, table, places, name, lambda place: float(place.members), i, line)
            axes.set(xscale="log", xlabel="members M", ylabel="accuracy", title=title)
            _whole(axes, members_of(table))
            axes.yaxis.set_major_formatter(PERCENT)
        last = figure.axes[3]
        for i, factor in enumerate(factors):
            for places, line in _curves(table, factor):
                _draw(last, table, places, "accuracy", lambda place: _parameters(table, place), i, line)
        last.set(xscale="log", xlabel="parameters", ylabel="accuracy", title="ensemble, over its parameters")
        last.xaxis.set_major_formatter(POWER)
        last.xaxis.set_minor_formatter(NullFormatter())
        last.yaxis.set_major_formatter(PERCENT)
        figure.legend(handles=_handles(rows, factors), loc="lower center", ncols=len(factors) + 2)
        figure.subplots_adjust(left=0.075, right=0.985, top=0.96, bottom=0.125, wspace=0.2, hspace=0.3)
    return figure


def transition_figure(rows: Sequence[WidthRow]) -> Figure:
    """Accuracy of ensemble and members, and how many members are effective, over p for both γ."""
    table = table_of(rows)
    swept = [place for place in table if place.p is not None]
    factor, members = swept[0].factor, swept[0].members
    panels = (*PANELS[:2], ("effective", "effective members"))
    lost = [row for row in rows if row.p is not None and row.diverged is not None]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.4, 3.6))
        for axes, (name, title) in zip(figure.subplots(1, 3), panels, strict=True):
            for i, gamma in enumerate(("M", "1")):
                places = sorted((p for p in swept if p.gamma == gamma), key=lambda place: place.p or 0.0)
                _draw(axes, table, places, name, lambda place: float(place.p or 0.0), i, "-", label=f"γ = {gamma}")
            beside = independent(factor, members)
            if (found := estimate(table, {beside: 1.0}, name)) is not None:
                axes.axhline(found[0], color=INK, linestyle="--", linewidth=1, label="independent networks")
            axes.set(xlabel="p: modulations p + √(1 − p²) N(0, 1)", title=f"{title}, M = {members}")
            if name != "effective":
                axes.set_ylabel("accuracy")
                axes.yaxis.set_major_formatter(PERCENT)
        said = f"{len(lost)} diverged" if lost else None
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="lower center", ncols=3, title=said)
        figure.subplots_adjust(left=0.075, right=0.985, top=0.9, bottom=0.27, wspace=0.26)
    return figure


def _curves(table: Table, factor: float) -> list[tuple[list[Place], str]]:
    """Embedded ensembles of a width as a line, independent ones as a dashed one."""
    sizes = members_of(table)
    return [([embedded(table, factor, m) for m in sizes], "-"), ([independent(factor, m) for m in sizes], "--")]


def _draw(
    axes: Axes,
    table: Table,
    places: Sequence[Place],
    name: str,
    x: Callable[[Place], float],
    i: int,
    line: str,
    label: str | None = None,
) -> None:
    drawn = [(x(place), found) for place in places if (found := estimate(table, {place: 1.0}, name)) is not None]
    if not drawn:
        return
    at = [each for each, _ in drawn]
    value, lower, upper = zip(*(found for _, found in drawn), strict=True)
    if name != "effective":  # no accuracy is beyond these, however few the seeds
        lower, upper = (tuple(min(max(each, 0.0), 1.0) for each in side) for side in (lower, upper))
    colour = PALETTE[i % len(PALETTE)]
    axes.fill_between(at, lower, upper, color=colour, alpha=0.13 if line == "-" else 0.06, linewidth=0)
    style: dict[str, Any] = {"marker": MARKERS[i % len(MARKERS)], "markersize": 4} if line == "-" else {}
    axes.plot(at, value, line, color=colour, linewidth=1.5, label=label, **style)


def _parameters(table: Table, place: Place) -> float:
    return fmean(row.parameters for row in table[place].values()) if place in table else 0.0


def _handles(rows: Sequence[WidthRow], factors: Sequence[float]) -> list[Line2D]:
    units = {row.factor: row.units for row in rows}
    found = [
        Line2D([], [], color=PALETTE[i % len(PALETTE)], marker=MARKERS[i % len(MARKERS)], markersize=4,
               label=f"{factor:g}× (N = {units[factor]})")
        for i, factor in enumerate(factors)
    ]  # fmt: skip
    kinds: tuple[tuple[Any, str], ...] = (("-", "embedded"), ("--", "independent"))
    return [*found, *(Line2D([], [], color=INK, linestyle=line, label=label) for line, label in kinds)]


def _whole(axes: Axes, values: Sequence[int]) -> None:
    axes.set_xticks(values, [str(value) for value in values])
    axes.xaxis.set_minor_locator(NullLocator())
