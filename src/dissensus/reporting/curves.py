"""Figures of what changes with something: distances of members with training, accuracy with a setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dissensus.reporting.plots import INK, MARKERS, PERCENT, STYLE, Array, short

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
    width, height = 10.4, 3.2
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        panels = figure.subplots(1, len(curves), squeeze=False)[0]
        names = list(dict.fromkeys(name for each in curves.values() for name in each))
        for axes, (space, methods) in zip(panels, curves.items(), strict=True):
            for name, (epochs, values) in methods.items():
                axes.plot(epochs, values, color=palette[name], linewidth=1.5, label=short(name))
            axes.set(xlabel="epochs", title=SPACES.get(space, space))
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(5))
        panels[0].set_ylabel("mean over pairs of members")
        handles, labels = panels[0].get_legend_handles_labels()
        rows = -(-len(names) // 5)
        columns = -(-len(names) // rows)
        figure.legend(handles, labels, loc="lower center", ncols=columns)
        bottom = (0.5 + 0.2 * rows) / height
        figure.subplots_adjust(left=0.08, right=0.985, top=1 - 0.3 / height, bottom=bottom, wspace=0.32)
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
    width, height = 3.5 * len(panels), 3.1
    places = np.asarray(settings, dtype=float)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            values = np.asarray(panel.values, dtype=float)  # (S, V)
            mean, spread = values.mean(0), _spread(values)
            axes.errorbar(
                places, mean, yerr=spread, color=colours[label], marker=MARKERS[0], markersize=4.5, linewidth=1.6,
                capsize=2.5, label=short(label),
            )  # fmt: skip
            at = int(np.argmin(np.abs(places - chosen)))
            axes.plot(
                places[at], mean[at], marker="o", markersize=11, markerfacecolor="none", color=INK, linestyle="none",
                label=f"chosen, {key} = {chosen:g}",
            )  # fmt: skip
            for name, other in panel.others.items():
                level = np.asarray(other, dtype=float)
                axes.axhline(level.mean(), color=colours[name], linestyle="--", linewidth=1.4, label=short(name))
            axes.set(xlabel=key, title=panel.title)
            axes.yaxis.set_major_formatter(PERCENT)
            axes.yaxis.set_major_locator(MaxNLocator(5))
            axes.margins(y=0.2)
            low, high = axes.get_ylim()
            room = max(SPAN - (high - low), 0) / 2
            axes.set_ylim(low - room, high + room)
        figure.axes[0].set_ylabel("accuracy")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=len(labels))
        figure.subplots_adjust(left=0.85 / width, right=0.985, top=1 - 0.3 / height, bottom=0.78 / height, wspace=0.3)
    return figure


def _spread(values: Any) -> Any:
    """(V,) standard deviation over seeds of (S, V); none for a single seed."""
    return values.std(0, ddof=1) if len(values) > 1 else None
