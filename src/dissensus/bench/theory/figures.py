"""Figures of `dissensus theory`: one function each, takes rows, returns a figure, saves nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.figure import Figure
from torch import Tensor

from dissensus.bench.theory.runs import KERNELS, Course, Measured, deviations, settings_of, slope
from dissensus.reporting.plots import INK, PALETTE, STYLE, Curve, Panel, curve_figure

DOTS = {"linestyle": "none", "marker": "o", "markersize": 3.5}


def kernel_figure(rows: Sequence[Measured]) -> Figure:
    """Deviation of empirical from analytic kernels over the width, one panel a setting, with a line of slope −½."""
    found = {kernel: deviations(rows, kernel) for kernel in KERNELS}
    panels = []
    for name in settings_of(rows):
        widths, (start, *_) = found["common_cross"][name]
        curves = [
            Curve(*found[kernel][name], label, {"color": colour, "marker": "o", "markersize": 4, "linewidth": 1})
            for (kernel, label), colour in zip(KERNELS.items(), PALETTE, strict=False)
            if max(found[kernel][name][1]) > 0
        ]
        guide = [1.6 * start * (width / widths[0]) ** -0.5 for width in widths]
        curves.append(Curve(widths, guide, "N^−½", {"color": INK, "linestyle": "--", "linewidth": 0.9}))
        labels = {"xlabel": "width N", "ylabel": "deviation / kernel within a member", "title": name}
        panels.append(Panel(curves, {"xscale": "log", "yscale": "log", **labels}, ticks=widths))
    return curve_figure(panels, size=(4.8 * len(panels), 3.6))


def dynamics_figure(courses: Mapping[str, Course]) -> Figure:
    """Training curves of both modes in each setting, points measured and lines predicted."""
    panels = []
    for name, found in courses.items():
        curves = []
        for (label, (measured, predicted)), colour in zip(found.followed.items(), PALETTE, strict=False):
            steps = range(len(measured))
            curves.append(Curve(steps, predicted, f"{label}, predicted", {"color": colour, "linewidth": 1.2}))
            curves.append(Curve(steps[::3], measured[::3], f"{label}, trained", {"color": colour, **DOTS}))
        axes = {"yscale": "log", "xlabel": "steps", "ylabel": "root mean square", "title": name}
        panels.append(Panel(curves, axes))
    return curve_figure(panels, size=(4.8 * len(panels), 3.6))


def error_figure(rows: Sequence[Measured]) -> Figure:
    """Error of predicted training over the width, a point a seed, with the fitted slope."""
    curves = []
    for (name, mine), colour, shift in zip(settings_of(rows).items(), PALETTE, (0.97, 1.03), strict=False):
        label = "{}: slope {:.2f} ({:.2f}…{:.2f})".format(name, *slope(mine))
        x, y = [shift * row["width"] for row in mine], [row["error"] for row in mine]
        curves.append(Curve(x, y, label, {"color": colour, "alpha": 0.6, **DOTS}))
    axes = {"xscale": "log", "yscale": "log", "xlabel": "width N", "ylabel": "largest error / initial residual"}
    return curve_figure([Panel(curves, axes, ticks=sorted({row["width"] for row in rows}))], size=(6.2, 3.8))


def regime_figure(rate: Tensor, speed: Tensor, collectivities: Sequence[float], members: Sequence[int]) -> Figure:
    """The map of collectivity × members: two panels of the numbers of `regime_map`."""
    titles = (
        "largest stable rate at γ = M,\nrelative to one member",
        "at γ = 1, u fixed: speed of differences\nover that of the mean",
    )
    places = range(len(members))
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(9.6, 4.0), layout="constrained")
        for axes, values, title in zip(figure.subplots(1, 2), (rate, speed), titles, strict=True):
            shown = values.clamp(min=1e-3).log10().numpy()
            drawn = axes.pcolormesh(places, collectivities, shown, cmap="viridis", vmin=-2, vmax=0)
            levels = {"levels": [0.02, 0.05, 0.1, 0.2, 0.5], "colors": "white", "linewidths": 0.8}
            lines = axes.contour(places, collectivities, values.numpy(), **levels)
            axes.clabel(lines, fmt="%g", fontsize=8)
            axes.set_xticks(places, [str(count) for count in members])
            axes.set(xlabel="members M", ylabel="collectivity U₁²/U₂", title=title)
            figure.colorbar(drawn, ax=axes, ticks=[-2, -1, 0]).ax.set_yticklabels(["0.01", "0.1", "1"])
    return figure
