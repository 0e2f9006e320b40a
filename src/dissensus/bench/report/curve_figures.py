"""Figures of curves: distances of members over training, accuracy over a setting."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dissensus.bench.report.measures import Measure
from dissensus.plots.charts import INK, Array, Curve, Palette, Panel, curve_figure, marker_style, short_name

SPACES = {
    "weight": "distance of weights",
    "function": "distance of outputs (rms)",
    "gradient": "angle of input gradients (rad)",
    "effective": "effective members",
}


def distance_figure(curves: Mapping[str, Mapping[str, tuple[Array, Array]]], *, palette: Palette) -> Figure:
    """One panel per space, one curve (epochs, values) per method: curves[space][method]."""
    panels = []
    for space, methods in curves.items():
        drawn = [Curve(*points, short_name(name), {"color": palette[name]}) for name, points in methods.items()]
        panels.append(Panel(drawn, {"xlabel": "epochs", "title": SPACES.get(space, space)}))
    figure = curve_figure(panels, size=(10.4, 2.8))
    figure.axes[0].set_ylabel("mean over pairs of members")
    for axes in figure.axes:
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
    return figure


UNDER_ATTACK = {
    "accuracy": "Accuracy",
    "nll": "NLL (nats)",
    "ece": "ECE",
    "entropy": "Entropy (nats)",
    "mutual_information": "Mutual information (nats)",
}


def attack_figure(epsilons: Array, drawn: Mapping[str, Mapping[str, Array]], *, palette: Palette, title: str) -> Figure:
    """One panel per metric of UNDER_ATTACK, one curve over ε per method: drawn[metric][method]."""
    panels = []
    for metric, methods in drawn.items():
        looks = {name: {"color": palette[name], **marker_style(i)} for i, name in enumerate(methods)}
        curves = [Curve(epsilons, values, short_name(name), looks[name]) for name, values in methods.items()]
        percent = "y" * (metric in ("accuracy", "ece"))
        panels.append(Panel(curves, {"xlabel": "ε", "title": UNDER_ATTACK[metric]}, percent=percent))
    figure = curve_figure(panels, size=(13.0, 2.8))
    figure.axes[0].set_ylabel(title)
    for axes in figure.axes:
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(5))
    return figure


Interval = tuple[float, float, float]  # estimate, lower, upper
OverValues = dict[
    str, dict[Measure, dict[str, dict[float, Interval]]]
]  # title -> measure -> method -> value of the setting


def setting_figure(rows: OverValues, *, label: str, log: bool, palette: Palette) -> Figure:
    """Measures over the values of a setting, one line per method with intervals; one row of panels per title."""
    each = (points for several in rows.values() for methods in several.values() for points in methods.values())
    panels, ticks = [], sorted({value for points in each for value in points})
    for title, several in rows.items():
        for column, (measure, methods) in enumerate(several.items()):
            drawn = []
            for i, (name, points) in enumerate(methods.items()):
                mean, lower, upper = np.array(list(points.values())).T
                look = {"color": palette[name], **marker_style(i)}
                drawn.append(Curve(list(points), mean, short_name(name), look, band=(lower, upper)))
            axes: dict[str, Any] = {
                "xlabel": label,
                "ylabel": "" if column else title,
                "title": f"{measure.label}{', nats' * (measure.unit == 'nats')}",
                "xscale": "log" if log else "linear",
            }
            if not drawn and len(ticks) > 1:
                axes["xlim"] = (ticks[0], ticks[-1])
            if drawn:  # a cell may lack a measure: without wrong labels none is memorised
                ends = np.concatenate([curve.y for curve in drawn])
                room = 0.35 * (np.nanmax(ends) - np.nanmin(ends)) or 0.01 / measure.scale
                least, most = measure.possible_range
                axes["ylim"] = (max(np.nanmin(ends) - room, least), min(np.nanmax(ends) + room, most))
            panels.append(Panel(drawn, axes, percent="y" * (measure.scale == 100), ticks=ticks))
    columns = max(len(several) for several in rows.values())
    return curve_figure(panels, size=(3.1 * columns, 2.8 * len(rows)), rows=len(rows))


LEARNED = {
    "train/accuracy": "training rows, labels as given",
    "test/accuracy": "test rows",
    "noise/memorised": "wrong labels: as labelled",
    "noise/recovered": "wrong labels: answered truly",
}


def learning_figure(rows: Mapping[str, Mapping[str, Mapping[str, tuple[Array, Array]]]], *, palette: Palette) -> Figure:
    """Accuracy over epochs: mean over seeds and their range. rows[title][name][method]: epochs (E,), values (S, E)."""
    panels, names = [], list(dict.fromkeys(name for several in rows.values() for name in several))
    for title, several in rows.items():
        for column, name in enumerate(names):
            methods = several.get(name, {})
            drawn = []
            for method, (epochs, values) in methods.items():
                look, ends = {"color": palette[method]}, (values.min(0), values.max(0))
                drawn.append(Curve(epochs, values.mean(0), short_name(method), look, ends))
            axes = {"xlabel": "epochs", "ylabel": "" if column else title, "title": LEARNED[name], "ylim": (0, 1)}
            panels.append(Panel(drawn, axes, percent="y"))
    return curve_figure(panels, size=(3.3 * len(names), 2.6 * len(rows)), rows=len(rows))


SPAN = 0.01  # least span of an accuracy axis: a smaller one would magnify noise


def sweep_figure(
    titles: Mapping[str, Mapping[str, Sequence[float]]],
    values: Mapping[str, float],
    *,
    key: str,
    label: str,
    chosen: str,
    palette: Palette,
) -> Figure:
    """Accuracies over a setting: mean over seeds with their spread, the chosen value marked, other methods as lines.

    titles[title][method]: one number per seed. values: the setting's value for each method that has it, ascending.
    """
    x, colour = list(values.values()), palette[next(iter(values))]
    circle = {"marker": "o", "markersize": 11, "markerfacecolor": "none", "color": INK, "linestyle": "none"}
    panels = []
    for title, methods in titles.items():
        mean = {name: float(np.mean(each)) for name, each in methods.items()}
        sd = [np.std(methods[name], ddof=1) for name in values] if min(map(len, methods.values())) > 1 else None
        look = {"color": colour, "yerr": sd, "capsize": 2.5, **marker_style(0)}
        curves = [
            Curve(x, [mean[name] for name in values], short_name(label), look),
            Curve([values[chosen]], [mean[chosen]], f"chosen, {key} = {values[chosen]:g}", circle),
            *(
                Curve([x[0], x[-1]], [mean[name]] * 2, short_name(name), {"color": palette[name], "linestyle": "--"})
                for name in methods
                if name not in values
            ),
        ]
        panels.append(Panel(curves, {"xlabel": key, "title": title, "ymargin": 0.2}, percent="y"))
    figure = curve_figure(panels, size=(3.5 * len(panels), 2.7))
    figure.axes[0].set_ylabel("accuracy")
    for axes in figure.axes:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        low, high = axes.get_ylim()
        room = max(SPAN - (high - low), 0) / 2
        axes.set_ylim(low - room, high + room)
    return figure
