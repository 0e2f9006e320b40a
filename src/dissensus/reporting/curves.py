"""Figures of what changes with something: distances of members with training, accuracy with a setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dissensus.reporting.plots import INK, Array, Curve, Panel, curve_figure, marked, short

SPACES = {
    "weight": "distance of weights",
    "function": "distance of outputs (rms)",
    "gradient": "angle of input gradients (rad)",
    "effective": "effective members",
}


def distances_over_training(
    curves: Mapping[str, Mapping[str, tuple[Array, Array]]], *, palette: Mapping[str, str]
) -> Figure:
    """One panel per space, one curve (epochs, values) per method: curves[space][method]."""
    panels = [
        Panel(
            [Curve(*points, short(name), {"color": palette[name]}) for name, points in methods.items()],
            {"xlabel": "epochs", "title": SPACES.get(space, space)},
        )
        for space, methods in curves.items()
    ]
    figure = curve_figure(panels, size=(10.4, 2.8))
    figure.axes[0].set_ylabel("mean over pairs of members")
    for axes in figure.axes:
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
    return figure


SPAN = 0.01  # of an axis of accuracies, at least: less would make chance look like something


class SweepPanel(NamedTuple):
    """One quantity over the values of a setting, (S, V) for S seeds, and of methods without it, (S,)."""

    title: str
    values: Array
    others: Mapping[str, Array]


def sweep(
    settings: Sequence[float],
    panels: Sequence[SweepPanel],
    *,
    key: str,
    label: str,
    chosen: float,
    colours: Mapping[str, str],
) -> Figure:
    """Accuracies against a setting, mean over seeds with their spread; the chosen value marked, other methods as lines."""
    places = np.asarray(settings, dtype=float)
    at = int(np.argmin(np.abs(places - chosen)))
    circle = {"marker": "o", "markersize": 11, "markerfacecolor": "none", "color": INK, "linestyle": "none"}
    drawn = []
    for panel in panels:
        values = np.asarray(panel.values, dtype=float)  # (S, V)
        mean, sd = values.mean(0), values.std(0, ddof=1) if len(values) > 1 else None
        look = {"color": colours[label], "yerr": sd, "capsize": 2.5, **marked(0)}
        swept = [
            Curve(places, mean, short(label), look),
            Curve(places[[at]], mean[[at]], f"chosen, {key} = {chosen:g}", circle),
        ]
        for name, other in panel.others.items():
            level = [float(np.mean(other))] * 2
            swept.append(Curve(places[[0, -1]], level, short(name), {"color": colours[name], "linestyle": "--"}))
        drawn.append(Panel(swept, {"xlabel": key, "title": panel.title, "ymargin": 0.2}, percent="y"))
    figure = curve_figure(drawn, size=(3.5 * len(panels), 2.7))
    figure.axes[0].set_ylabel("accuracy")
    for axes in figure.axes:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        low, high = axes.get_ylim()
        room = max(SPAN - (high - low), 0) / 2
        axes.set_ylim(low - room, high + room)
    return figure
