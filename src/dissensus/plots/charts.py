"""One function per figure: takes arrays, returns a figure, saves nothing.

Text and axes are drawn in INK. A report replaces that colour by the page's text colour, so that figures are readable on
light and dark backgrounds. Each method has one colour, given by `colours`; figures with one panel per method have one scale.
"""

import io
import math
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.resources import as_file, files
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from dissensus.utils.text import CONTROL

Array = Any  # anything numpy.asarray takes
Palette = Mapping[str, str]  # name -> colour

INK = "#123456"
PALETTE = ("#4c8bc9", "#e0803a", "#35a06f", "#a678d8", "#d4566b", "#29a3a8", "#ac7f52", "#d46eae", "#8f959e", "#a5a13a")
ROOM_INSIDE = 4  # most names in a legend inside the axes
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
INKED = ["text.", "axes.label", "axes.edge", "axes.title", "xtick.", "ytick.", "grid.", "legend.label"]
STYLE: dict[Any, Any] = {f"{part}color": INK for part in INKED}
with as_file(files("dissensus.plots") / "charts.mplstyle") as path:
    STYLE |= matplotlib.rc_params_from_file(path, use_default_template=False)
WIDTH, HEIGHT = 4.6, 3.3  # inches
PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.4g} %")
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
POWER = FuncFormatter(lambda value, _: f"10{str(round(np.log10(value))).translate(SUPERSCRIPTS)}")


def colours(names: Sequence[str]) -> dict[str, str]:
    """Name -> colour, in order; the first ones differ most. Names beyond the palette get darker shades of it."""
    rounds = [divmod(i, len(PALETTE)) for i in range(len(names))]
    parts = [(0.55**turn, *to_rgb(PALETTE[i])) for turn, i in rounds]
    shades = [to_hex((share * red, share * green, share * blue)) for share, red, green, blue in parts]
    return dict(zip(names, shades, strict=True))


class Curve(NamedTuple):
    """Points to draw; `look`: keywords of `Axes.errorbar`, such as color, marker, linestyle, yerr."""

    x: Array
    y: Array
    label: str
    look: Mapping[str, Any]
    band: tuple[Array, Array] | None = None  # lower and upper ends of a shaded band


class Panel(NamedTuple):
    """Curves on one pair of axes; `axes`: keywords of `Axes.set`, such as title, xlabel, ylabel, xscale, ylim."""

    curves: Sequence[Curve]
    axes: Mapping[str, Any]
    percent: str = ""  # axes of shares: "x", "y" or "xy"
    ticks: Sequence[float] = ()  # of the horizontal axis; () uses matplotlib's


def curve_figure(
    panels: Sequence[Panel], *, size: tuple[float, float] = (WIDTH, HEIGHT), rows: int = 1, note: str | None = None
) -> Figure:
    """Draws the panels in `rows` rows; size: inches, to which a legend below adds; note: title of the legend."""
    with matplotlib.rc_context(STYLE):
        figure, grid = _figure(rows, -(-len(panels) // rows), size=size, squeeze=False)
        for axes, panel in zip(grid.flat, panels, strict=True):
            for curve in panel.curves:
                if curve.band is not None:
                    axes.fill_between(curve.x, *curve.band, color=curve.look["color"], alpha=0.1, linewidth=0)
                axes.errorbar(curve.x, curve.y, label=curve.label, **curve.look)
            axes.set(**panel.axes)
            if len(panel.ticks):
                axes.set_xticks(panel.ticks, [f"{each:g}" for each in panel.ticks])
                axes.xaxis.set_minor_locator(NullLocator())
            for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
                if name in panel.percent:
                    axis.set_major_formatter(PERCENT)
                if axis.get_scale() == "log" and not (name == "x" and len(panel.ticks)):
                    _set_log_ticks(axis)
        _add_legend(figure, note)
    return figure


# Names with _ have no legend.
DIAGONAL = Curve([0, 1], [0, 1], "_diagonal", {"color": INK, "linestyle": "--", "linewidth": 1})


def reliability_figure(
    counts: Array, confidence: Array, accuracy: Array, edges: Array, *, title: str, colour: str
) -> Figure:
    """Draws accuracy against confidence by bin, with the gap to the diagonal, above the histogram of confidences."""
    counts, confidence, accuracy, edges = map(np.asarray, (counts, confidence, accuracy, edges))
    held = counts > 0
    left, width = edges[:-1][held], np.diff(edges)[held]
    with matplotlib.rc_context(STYLE):
        figure, (upper, lower) = _figure(2, 1, size=(WIDTH, 4.1), gap=0.2, sharex=True, height_ratios=(3, 1))
        upper.bar(left, accuracy[held], width, align="edge", color=colour, alpha=0.75, linewidth=0)
        gap = confidence[held] - accuracy[held]
        upper.bar(
            left, gap, width, accuracy[held], align="edge",
            facecolor="none", edgecolor=INK, hatch="////", linewidth=0.4, alpha=0.55,
        )  # fmt: skip
        upper.plot([0, 1], [0, 1], color=INK, linestyle="--", linewidth=1)
        upper.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy", title=short_name(title, 44))
        lower.bar(edges[:-1], counts / counts.sum(), np.diff(edges), align="edge", color=colour, linewidth=0)
        lower.set(xlabel="confidence (largest probability)", ylabel="inputs", yscale="log")
        lower.set_ylim(0.5 / counts.sum(), 1.5)
        lower.yaxis.set_major_locator(LogLocator(numticks=5))
        lower.yaxis.set_minor_locator(NullLocator())
        for axis in (upper.xaxis, upper.yaxis, lower.xaxis, lower.yaxis):
            axis.set_major_formatter(PERCENT)
    return figure


def ood_histogram(inside: Array, foreign: Mapping[str, Array], *, score: str, title: str, colour: str) -> Figure:
    """Draws histograms of a score on test inputs (filled) and on each set of foreign inputs (lines)."""
    inside = np.asarray(inside)
    everything = np.concatenate([inside, *map(np.asarray, foreign.values())])
    logarithmic = score != "energy"
    if logarithmic:
        floor = 1e-8 * (everything.max() or 1.0)
        low, high = max(everything.min(), floor), max(everything.max(), floor * 10)
        edges = np.geomspace(low, high * 1.001, 41)
    else:
        low, high = everything.min(), everything.max()
        edges = np.linspace(low, high if high > low else low + 1, 41)
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure()

        def shares(values: Array) -> Any:
            values = np.clip(np.asarray(values), edges[0], edges[-1])
            return np.histogram(values, edges)[0] / len(values)

        axes.stairs(shares(inside), edges, fill=True, color=colour, alpha=0.6, label="test")
        for (name, values), style in zip(foreign.items(), ("-", "--", ":", "-.") * len(foreign), strict=False):
            axes.stairs(shares(values), edges, color=INK, linewidth=1.4, linestyle=style, label=short_name(name))
        if logarithmic:
            axes.set_xscale("log")
            _set_log_ticks(axes.xaxis)
        xlabel = f"{SCORE_LABELS.get(score, score)}: more foreign →"
        axes.set(xlabel=xlabel, ylabel="share of inputs", title=short_name(title, 44))
        axes.yaxis.set_major_formatter(PERCENT)
        axes.margins(x=0.01)
        axes.legend(loc="upper left")
    return figure


def roc_figure(curves: Mapping[str, tuple[Array, Array, float]], *, title: str, palette: Palette) -> Figure:
    """Draws the ROC curve (false positive rate, true positive rate, area) of each method; OOD is positive."""
    drawn = [
        Curve(*_thin_curve(fpr, tpr), f"{short_name(name)}  {100 * area:.2f} %", {"color": palette[name]})
        for name, (fpr, tpr, area) in curves.items()
    ]
    labels = {"xlabel": "test inputs flagged (false positives)", "ylabel": "foreign inputs flagged"}
    axes = {**labels, "xlim": (0, 1), "ylim": (0, 1.005), "title": short_name(title, 44)}
    return curve_figure([Panel([*drawn, DIAGONAL], axes, percent="xy")], note="area")


def risk_coverage_figure(
    curves: Mapping[str, tuple[Array, Array]], *, risk: str, percent: bool, palette: Palette, labelled: Sequence[str]
) -> Figure:
    """Draws the risk of the most certain inputs against their share; methods that are not `labelled` are grey."""
    faint = {"color": PALETTE[8], "alpha": 0.55, "linewidth": 0.9}
    drawn = [
        Curve(*_thin_curve(*each), f"_{name}", {"color": palette[name]} if name in labelled else faint)
        for name, each in sorted(curves.items(), key=lambda item: item[0] in labelled)
    ]
    highest = max(np.max(curve.y[curve.x >= 0.2], initial=0) for curve in drawn)  # the first few inputs say little
    start = min(float(curve.x[np.argmax(curve.y > 0.02 * highest)]) for curve in drawn)  # no risk before it
    axes = {"xlabel": "inputs answered, most certain first", "ylabel": risk, "title": "Risk and coverage"}
    limits = {"xlim": (math.floor(10 * start) / 10 if start < 1 else 0, 1), "ylim": (0, 1.05 * highest or 1)}
    size = (8.6, 3.4) if len(curves) > 1 else (WIDTH, HEIGHT)
    figure = curve_figure([Panel(drawn, axes | limits, percent="xy" if percent else "x")], size=size)
    if len(curves) > 1:
        _label_ends(figure.axes[0], {name: float(curves[name][1][-1]) for name in labelled}, palette)
    return figure


def _label_ends(axes: Any, ends: Mapping[str, float], palette: Palette) -> None:
    """Writes names right of the axes at these heights, in their colours, moved apart where they would overlap."""
    axes.figure.subplots_adjust(right=0.8)
    (bottom, top), height = axes.get_ylim(), -math.inf
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        height, line = max((end - bottom) / (top - bottom), height + 0.07), {"arrowstyle": "-", "relpos": (0, 0.5)}
        place: dict[str, Any] = {"xytext": (1.04, height), "textcoords": "axes fraction", "va": "center"}
        look = {"color": palette[name]}
        axes.annotate(short_name(name, 18), (1, end), **place, **look, arrowprops=line | look)


def confusion_figure(counts: Array, classes: Sequence[str], *, title: str) -> Figure:
    """Draws counts (C, C) of true (rows) and predicted classes, shaded by their share of the row; with numbers up to 12."""
    counts = np.asarray(counts)
    # Square roots, so that one mistake in a hundred is seen; transparent without any, for light and dark pages.
    shade = 0.7 * np.sqrt(counts / np.maximum(counts.sum(1, keepdims=True), 1))
    few, names = len(classes) <= 12, [short_name(each, 8) for each in classes]
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure, axes = _figure(size=(WIDTH, 4.1))
        axes.imshow(np.dstack([np.broadcast_to(to_rgb(PALETTE[0]), (*counts.shape, 3)), shade]), aspect="auto")
        axes.set(title=short_name(title, 44), xlabel="predicted class", ylabel="true class")
        if few:
            for row, column in np.argwhere(counts):
                axes.text(column, row, f"{counts[row, column]}", ha="center", va="center", fontsize=7.5)
            long = max(map(len, names)) > 3
            axes.set_xticks(range(len(names)), names, rotation=90 * long)
            axes.set_yticks(range(len(names)), names)
            _set_margins(figure, below=0.5 * long)
    return figure


def corruption_panel(
    severities: Sequence[int], values: Mapping[str, tuple[float, Array]], *, label: str, percent: bool, palette: Palette
) -> Panel:
    """A metric against the severity of corruption, types pooled; severity 0 is the clean inputs."""
    x = [0, *severities]
    drawn = [
        Curve(x, [clean, *np.asarray(damaged)], short_name(name), {"color": palette[name], **marker_style(i)})
        for i, (name, (clean, damaged)) in enumerate(values.items())
    ]
    axes = {"xlabel": "severity of corruption (0: clean)", "ylabel": label, "title": f"{label} under corruption"}
    return Panel(drawn, axes, percent="y" * percent, ticks=x)


def cost_scatter(
    points: Mapping[str, tuple[float, float, tuple[float, float] | None]],
    *,
    cost: str,
    quality: str,
    percent: bool,
    palette: Palette,
    better: Literal["high", "low"],
) -> Figure:
    """Draws quality against cost (cost, value, interval), one point per method; the cost axis is logarithmic."""
    drawn = []
    for i, (name, (spent, value, interval)) in enumerate(points.items()):
        bars = None if interval is None else [[max(value - interval[0], 0)], [max(interval[1] - value, 0)]]
        look = {"color": palette[name], "yerr": bars, "capsize": 3, **marker_style(i, size=7)}
        drawn.append(Curve([spent], [value], short_name(name), look))
    costs = [max(spent, 1e-9) for spent, _, _ in points.values()]
    axes = {"xscale": "log", "xlim": (min(costs) / 2.5, max(costs) * 2.5), "ymargin": 0.25}
    title = f"{quality}: {'up' if better == 'high' else 'down'} is better"
    labels = {"xlabel": cost, "ylabel": quality, "title": title}
    figure = curve_figure([Panel(drawn, axes | labels, percent="y" * percent)])
    low, high = figure.axes[0].get_ylim()
    if percent:  # the margin around points may exceed 0 to 1
        figure.axes[0].set_ylim(max(low, 0.0), min(high, 1.005))
    return figure


def interval_coverage_figure(cumulative: Mapping[str, Array], *, palette: Palette) -> Figure:
    """Draws the share of targets inside central intervals against their level, from P(Y ≤ y) at the targets."""
    levels, drawn = np.linspace(0, 1, 101), [DIAGONAL._replace(label="calibrated")]
    for name, values in cumulative.items():
        inside = np.sort(np.abs(2 * np.asarray(values).ravel() - 1))
        share = np.searchsorted(inside, levels, side="right") / len(inside)
        drawn.append(Curve(levels, share, short_name(name), {"color": palette[name]}))
    labels = {"xlabel": "level of the interval", "ylabel": "targets inside", "title": "Interval coverage"}
    return curve_figure([Panel(drawn, {**labels, "xlim": (0, 1), "ylim": (0, 1)}, percent="xy")])


SCORE_LABELS = {
    "max_probability": "−log largest probability (nats)",
    "total": "total uncertainty",
    "epistemic": "epistemic uncertainty",
    "energy": "energy (nats)",
}


def short_name(name: str, length: int = 24) -> str:
    """The name, shortened to `length` characters, without characters that fonts cannot draw."""
    name = name.translate(CONTROL)
    return name if len(name) <= length else f"{name[: length - 1]}…"


def marker_style(i: int, *, size: float = 4.5) -> dict[str, Any]:
    """Marker keywords of the i-th curve."""
    return {"marker": MARKERS[i % len(MARKERS)], "markersize": size}


def _figure(
    rows: int = 1, columns: int = 1, *, size: tuple[float, float] = (WIDTH, HEIGHT), gap: float = 0.8, **keywords: Any
) -> tuple[Figure, Any]:
    figure = Figure(figsize=size)  # not through pyplot, which keeps global state
    axes = figure.subplots(rows, columns, **keywords)
    _set_margins(figure, gap=gap)
    return figure, axes


def _set_margins(figure: Any, *, below: float = 0.0, gap: float = 0.8) -> None:
    """Sets margins in inches: `gap` between rows, `below` under the figure; matplotlib's layout engine is slow."""
    (width, height), (rows, columns) = figure.get_size_inches(), figure.axes[0].get_gridspec().get_geometry()
    left, right, top, bottom, between = 0.87, 0.25, 0.32, 0.52 + below, 0.8
    across, down = width - left - right - (columns - 1) * between, height - top - bottom - (rows - 1) * gap
    figure.subplots_adjust(
        left=left / width, right=1 - right / width, top=1 - top / height, bottom=bottom / height,
        wspace=between * columns / across, hspace=gap * rows / down,
    )  # fmt: skip


def _add_legend(figure: Figure, title: str | None = None) -> None:
    """Adds the legend: inside the axes for few curves in one panel, else below them."""
    handles = {label: h for axes in figure.axes for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if len(figure.axes) == 1 and 0 < len(handles) <= ROOM_INSIDE:
        figure.axes[0].legend(loc="best", title=title, title_fontsize=8.5)
    if len(handles) <= ROOM_INSIDE * (len(figure.axes) == 1):
        return
    width, height = figure.get_size_inches()
    columns = max(1, int(width / (0.6 + 0.065 * max(map(len, handles)))))  # inches of a line and of a letter
    lines = -(-len(handles) // columns)
    below = 0.1 + 0.19 * (lines + (title is not None))
    figure.set_size_inches(width, height + below)
    _set_margins(figure, below=below)
    ncols = -(-len(handles) // lines)
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=ncols, title=title, title_fontsize=8.5)


def _set_log_ticks(axis: Any) -> None:
    """Sets as many labels as fit, as numbers or powers of ten; text is never parsed as mathematics here."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 100 else (1.0, 2.0, 5.0), numticks=7))
    axis.set_major_formatter(POWER if high / low > 1e4 or high > 1e6 else FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _thin_curve(x: Array, y: Array, *, points: int = 300) -> tuple[Any, Any]:
    """At most `points` points of a curve, evenly spaced along its length, both ends kept."""
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if len(x) <= points:
        return x, y
    span = max(np.ptp(y), 1e-12)
    along = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(x)) + np.abs(np.diff(y)) / span)])
    keep = np.unique(np.searchsorted(along, np.linspace(0, along[-1], points)).clip(0, len(x) - 1))
    keep = np.unique(np.concatenate([[0], keep, [len(x) - 1]]))
    return x[keep], y[keep]


def notebook_figure(figure: Figure) -> Figure:
    """The figure on white, with a PNG representation: without pyplot a notebook would show only its name."""
    figure.set_facecolor("white")
    figure._repr_png_ = partial(png_bytes, figure)  # type: ignore[attr-defined]
    return figure


def png_bytes(figure: Figure) -> bytes:
    """The figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


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
    # The vertical axis has the data with a margin, and the means, without outliers.
    span, means = np.ptp(y), np.concatenate([np.asarray(band.mean) for band in methods.values()])
    low = max(min(y.min(), np.quantile(means, 0.02)), y.min() - 2 * span) - 0.6 * span
    high = min(max(y.max(), np.quantile(means, 0.98)), y.max() + 2 * span) + 0.6 * span
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


def plane_maps(squares: Mapping[str, Array], *, window: Window, largest: float, seen: tuple[Array, Array]) -> Figure:
    """Draws every method's total uncertainty over the plane, 0 to `largest`; seen: points (N, 2), classes (N,)."""
    points, classes = (np.asarray(each) for each in seen)
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure, panels = _grid(len(squares), aspect=0.85, xlabel="first input", ylabel="second input")
        for axes, (name, square) in zip(panels, squares.items(), strict=True):
            look: dict[str, Any] = {"origin": "lower", "cmap": "viridis", "aspect": "auto"}
            image = axes.imshow(np.asarray(square), extent=window, vmin=0, vmax=largest, **look)
            axes.scatter(*points.T, s=3, c=classes, cmap="Set1", linewidths=0)
            axes.set(title=short_name(name), xlim=window[:2], ylim=window[2:])
        figure.colorbar(image, ax=panels, shrink=0.6, label="total uncertainty (nats)")
    return figure


LEVELS = 24  # contour levels


def surface_figure(
    losses: Mapping[str, tuple[Array, Array, Array, Mapping[str, tuple[float, float]]]],
    *,
    xlabel: str = "",
    ylabel: str = "",
    highest: float | None = None,
) -> Figure:
    """Draws contours of losses (P, Q) at x and y (P, Q) on one log scale; highest: by default 300 times the lowest."""
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


def _grid(count: int, *, aspect: float, xlabel: str, ylabel: str) -> tuple[Figure, list[Any]]:
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


def image_grid(rows: Sequence[Sequence[tuple[str, Any] | None]], names: Sequence[str] = ()) -> Figure:
    """Draws images (H, W, 3) with their titles, and nothing for None; names: of the rows."""
    columns, (height, width) = max(map(len, rows)), next(each[1].shape[:2] for each in rows[0] if each)
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(2.1 * columns, len(rows) * (2.1 * height / width + 0.5)), layout="constrained")
        grid = figure.subplots(len(rows), columns, squeeze=False)
        for axes in grid.flat:
            axes.set_axis_off()
        for row, shown in zip(grid, rows, strict=True):
            for axes, each in zip(row, shown, strict=False):
                if each is not None:
                    axes.imshow(each[1], interpolation="none")
                    axes.set_title(each[0], fontsize=8, pad=2)
        for row, name in zip(grid, names, strict=False):
            row[0].text(-0.06, 0.5, name, transform=row[0].transAxes, rotation=90, ha="right", va="center")
    return figure
