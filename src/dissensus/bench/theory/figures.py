"""Figures of `dissensus theory`: one function each, takes rows, returns a figure, saves nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from torch import Tensor

from dissensus.bench.theory.runs import FIELDS, Course, Row, deviations, slope
from dissensus.reporting.plots import INK, PALETTE, STYLE

LABELS = {
    "gp_same": "K_d, within a member",
    "gp_cross": "K_o, between members",
    "common_same": "Θ_d, within a member",
    "common_cross": "Θ_o, between members",
    "individual": "Θ_ind, its modulations",
}


def kernel_figure(rows: Sequence[Row]) -> Figure:
    """Deviation of empirical from analytic kernels over the width, one panel a setting, with a line of slope −½."""
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.8 * len(settings), 3.6))
        for axes, name in zip(figure.subplots(1, len(settings), squeeze=False)[0], settings, strict=True):
            for field, colour in zip(FIELDS, PALETTE, strict=False):
                widths, found = deviations(rows, field)[name]
                if max(found) > 0:
                    axes.plot(widths, found, "o-", color=colour, markersize=4, linewidth=1, label=LABELS[field])
            start = deviations(rows, "common_cross")[name][1][0]
            guide = [1.6 * start * (width / widths[0]) ** -0.5 for width in widths]
            axes.plot(widths, guide, "--", color=INK, linewidth=0.9, label="N^−½")
            axes.set(xscale="log", yscale="log", xlabel="width N", title=name)
            axes.set_ylabel("deviation / kernel within a member")
            _plain_ticks(axes)
            axes.set_xticks(widths, [str(width) for width in widths])
            axes.legend()
        figure.subplots_adjust(left=0.09, right=0.98, top=0.9, bottom=0.15, wspace=0.28)
    return figure


def dynamics_figure(courses: Mapping[str, Course]) -> Figure:
    """Training curves of both modes in each setting, points measured and lines predicted."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.8 * len(courses), 3.6))
        panels = figure.subplots(1, len(courses), squeeze=False)[0]
        for axes, (name, found) in zip(panels, courses.items(), strict=True):
            pairs = (
                ("mean − target", found.mean, found.mean_predicted),
                ("members − mean", found.difference, found.difference_predicted),
            )
            for (label, measured, predicted), colour in zip(pairs, PALETTE, strict=False):
                axes.plot(found.times, predicted, color=colour, linewidth=1.2, label=f"{label}, predicted")
                axes.plot(found.times[::3], measured[::3], "o", color=colour, markersize=3.5, label="trained")
            axes.set(yscale="log", xlabel="steps", ylabel="root mean square", title=name)
            _plain_ticks(axes)
            axes.legend()
        figure.subplots_adjust(left=0.09, right=0.98, top=0.9, bottom=0.15, wspace=0.28)
    return figure


def width_figure(rows: Sequence[Row]) -> Figure:
    """Error of predicted training over the width, a point a seed, with the fitted slope."""
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.2, 3.8))
        axes = figure.subplots()
        for name, colour, shift in zip(settings, PALETTE, (0.97, 1.03), strict=False):
            mine = [row for row in rows if row["setting"] == name]
            found, lower, upper = slope(mine)
            label = f"{name}: slope {found:.2f} ({lower:.2f}…{upper:.2f})"
            axes.plot(
                [shift * row["width"] for row in mine], [row["error"] for row in mine], "o", color=colour,
                markersize=3.5, alpha=0.6, label=label,
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="width N", ylabel="largest error / initial residual")
        _plain_ticks(axes)
        widths = sorted({row["width"] for row in rows})
        axes.set_xticks(widths, [str(width) for width in widths])
        axes.legend()
        figure.subplots_adjust(left=0.12, right=0.98, top=0.96, bottom=0.14)
    return figure


def regime_figure(rate: Tensor, speed: Tensor, collectivities: Sequence[float], members: Sequence[int]) -> Figure:
    """The map of collectivity × members: two panels of the numbers of `regime_map`."""
    titles = (
        "largest stable rate at γ = M,\nrelative to one member",
        "at γ = 1, u fixed: speed of differences\nover that of the mean",
    )
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(9.6, 4.0))
        for axes, values, title in zip(figure.subplots(1, 2), (rate, speed), titles, strict=True):
            drawn = axes.pcolormesh(
                range(len(members)),
                collectivities,
                values.clamp(min=1e-3).log10().numpy(),
                cmap="viridis",
                vmin=-2,
                vmax=0,
            )
            lines = axes.contour(
                range(len(members)), collectivities, values.numpy(), levels=[0.02, 0.05, 0.1, 0.2, 0.5], colors="white",
                linewidths=0.8,
            )  # fmt: skip
            axes.clabel(lines, fmt="%g", fontsize=8)
            axes.set_xticks(range(len(members)), [str(count) for count in members])
            axes.set(xlabel="members M", ylabel="collectivity U₁²/U₂", title=title)
            bar = figure.colorbar(drawn, ax=axes, ticks=[-2, -1, 0])
            bar.ax.set_yticklabels(["0.01", "0.1", "1"])
        figure.subplots_adjust(left=0.07, right=0.97, top=0.86, bottom=0.13, wspace=0.22)
    return figure


def _plain_ticks(axes: Axes) -> None:
    """0.02, 0.05, 0.1 … on the vertical axis: text here is never parsed as mathematics."""
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for each in (axes.xaxis, axes.yaxis):
        each.set_minor_formatter(NullFormatter())
