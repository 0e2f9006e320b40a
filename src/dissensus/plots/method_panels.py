"""Figures with one panel per method, all on the same scales."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from dissensus.plots.charts import INK, STYLE, Array, Palette, short_name

Window = tuple[float, float, float, float]  # left, right, bottom, top
COLUMNS = 5  # most panels in a row
POINTS = 200  # most points of a member's line: ten lines in each of ten panels make large files


class Band(NamedTuple):
    """One method's prediction along a line."""

    mean: Array  # (n,)
    sd: Array  # (n,) of the members' means
    members: Array  # (up to ten, n)


def band_figure(where: Array, methods: Mapping[str, Band], *, seen: tuple[Array, Array], palette: Palette) -> Figure:
    """Draws mean, ±3 standard deviations and some members of every method; where: (n,), seen: data (N,) and (N,)."""
    where, (x, y) = np.asarray(where), (np.asarray(each) for each in seen)
    low, high = _limits(methods, y)
    thinner = max(1, len(where) // POINTS)
    with matplotlib.rc_context(STYLE):
        figure, panels = _grid(len(methods), aspect=0.75, xlabel="x", ylabel="y")
        for axes, (name, band) in zip(panels, methods.items(), strict=True):
            mean, sd, colour = np.asarray(band.mean), np.asarray(band.sd), palette[name]
            axes.fill_between(where, mean - 3 * sd, mean + 3 * sd, color=colour, alpha=0.25, linewidth=0)
            members = np.asarray(band.members)[:, ::thinner]
            axes.plot(where[::thinner], members.T, color=colour, alpha=0.4, linewidth=0.6)
            axes.plot(where, mean, color=colour, linewidth=1.6)
            axes.plot(x, y, ".", color=INK, markersize=2.2, alpha=0.6, zorder=3)
            axes.set(title=short_name(name), xlim=(where.min(), where.max()), ylim=(low, high))
    return figure


def entropy_maps(squares: Mapping[str, Array], *, window: Window, largest: float, seen: tuple[Array, Array]) -> Figure:
    """Draws every method's entropy over the plane, 0 to `largest`; squares (side, side), seen: points (N, 2), classes (N,)."""
    points, classes = (np.asarray(each) for each in seen)
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure, panels = _grid(len(squares), aspect=0.85, xlabel="first input", ylabel="second input")
        for axes, (name, square) in zip(panels, squares.items(), strict=True):
            image = axes.imshow(
                np.asarray(square), origin="lower", extent=window, vmin=0, vmax=largest, cmap="viridis", aspect="auto"
            )
            axes.scatter(*points.T, s=3, c=classes, cmap="Set1", linewidths=0)
            axes.set(title=short_name(name), xlim=window[:2], ylim=window[2:])
        figure.colorbar(image, ax=panels, shrink=0.6, label="entropy (nats)")
    return figure


LEVELS = 24  # contour levels


def surface_figure(
    losses: Mapping[str, tuple[Array, Array, Array, Mapping[str, tuple[float, float]]]],
    *,
    xlabel: str = "",
    ylabel: str = "",
    highest: float | None = None,
) -> Figure:
    """Draws contours of losses (P, Q) at x and y (P, Q), on one logarithmic scale, with named points.

    highest: losses above it get its colour; by default three hundred times the lowest loss.
    """
    every = np.concatenate([np.asarray(loss, float).ravel() for _, _, loss, _ in losses.values()])
    finite = every[np.isfinite(every)]
    low = max(float(finite.min()), 1e-4)
    top = min(float(finite.max()), 300 * low) if highest is None else highest
    levels = np.geomspace(low, max(top, 1.001 * low), LEVELS)
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(3.4 * len(losses) + 1.2, 3.5), layout="compressed")
        panels = list(figure.subplots(1, len(losses), squeeze=False).flat)
        for axes, (name, (x, y, loss, marks)) in zip(panels, losses.items(), strict=True):
            shown = np.clip(np.nan_to_num(np.asarray(loss, float), nan=np.inf), levels[0], levels[-1])
            x, y = np.asarray(x), np.asarray(y)
            filled = axes.contourf(x, y, shown, levels=levels, cmap="viridis", norm=LogNorm(levels[0], levels[-1]))
            axes.contour(x, y, shown, levels=levels[1::2], colors=INK, linewidths=0.3, alpha=0.6)
            for label, (left, up) in marks.items():
                axes.plot(left, up, "o", color="white", markeredgecolor=INK, markersize=5, clip_on=False)
                if len(marks) > 1:
                    axes.annotate(label, (left, up), (4, 4), textcoords="offset points", color="white")
            axes.set_aspect("equal")
            axes.set(title=short_name(name, 40), xlabel=xlabel, ylabel="" if axes is not panels[0] else ylabel)
        bar = figure.colorbar(filled, ax=panels, shrink=0.8, label="loss (nats)")
        bar.ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=8))
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        bar.ax.minorticks_off()
    return figure


def _limits(methods: Mapping[str, Band], y: Any) -> tuple[float, float]:
    """Limits of the vertical axis: the data with a margin, extended for the means, without outliers."""
    span = np.ptp(y)
    means = np.concatenate([np.asarray(band.mean) for band in methods.values()])
    low, high = min(y.min(), np.quantile(means, 0.02)), max(y.max(), np.quantile(means, 0.98))
    room = 0.6 * span
    return float(max(low, y.min() - 2 * span) - room), float(min(high, y.max() + 2 * span) + room)


def _grid(count: int, *, aspect: float, xlabel: str, ylabel: str) -> tuple[Figure, list[Any]]:
    """A labelled figure with `count` axes in rows of nearly equal length, all on the same scales."""
    rows = math.ceil(count / COLUMNS)
    columns = math.ceil(count / rows)
    width = max(2.3 * columns, 4.6)
    height = rows * ((width - 0.8) / columns * aspect + 0.3) + 0.55
    figure = Figure(figsize=(width, height), layout="constrained")  # not through pyplot, which keeps global state
    flat = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    figure.supxlabel(xlabel, size="medium")
    figure.supylabel(ylabel, size="medium")
    flat[0].xaxis.set_major_locator(MaxNLocator(4, prune="both"))  # shared; end labels would touch the next panel
    for unused in flat[count:]:
        unused.set_axis_off()
    for shown in flat[count - columns : count]:  # also the last panel of a shorter column
        shown.xaxis.set_tick_params(labelbottom=True)
    return figure, flat[:count]


def implicit_figure(before: Array, after: Array, *, largest: float, title: str) -> Figure:
    """Draws images (n, C, H, W), S changed versions of each (n, S, C, H, W), and below them the change, ±largest."""
    before, after = np.asarray(before), np.asarray(after)
    n, columns = len(before), after.shape[1] + 1
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(0.62 * columns, 1.24 * n + 0.3))
        grid = figure.subplots(2 * n, columns, squeeze=False)
        top = 1 - 0.3 / (1.24 * n + 0.3)
        figure.subplots_adjust(left=0.01, right=0.99, bottom=0.01, top=top, wspace=0.06, hspace=0.06)
        figure.suptitle(title, fontsize=8, x=0.01, ha="left")
        for axes in grid.flat:
            axes.set_axis_off()
        for i, image in enumerate(before):
            for j, shown in enumerate((image, *after[i])):
                pixels = np.clip(shown, 0, 1).transpose(1, 2, 0)
                pixels = np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels
                grid[2 * i, j].imshow(pixels, interpolation="none")
                if j:
                    change = (shown - image).mean(0)  # over channels
                    scale: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest}
                    grid[2 * i + 1, j].imshow(change, interpolation="none", **scale)
    return figure
