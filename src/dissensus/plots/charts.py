"""One function per figure: takes arrays, returns a figure, saves nothing.

Text and axes are drawn in INK. A report replaces that colour by the page's text colour, so that figures are readable on
light and dark backgrounds. Each method has one colour, given by `colours`.
"""

import io
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from dissensus.utils.text import CONTROL

Array = Any  # anything numpy.asarray takes
Palette = Mapping[str, str]  # name -> colour

INK = "#123456"
PALETTE = (
    "#4c8bc9", "#e0803a", "#35a06f", "#a678d8", "#d4566b", "#29a3a8", "#ac7f52", "#d46eae", "#8f959e", "#a5a13a",
)  # fmt: skip
ROOM_INSIDE = 4  # most names in a legend inside the axes
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
INKED = ["text.", "axes.label", "axes.edge", "axes.title", "xtick.", "ytick.", "grid.", "legend.label"]
STYLE: dict[Any, Any] = {
    **{f"{part}color": INK for part in INKED},
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.labelsize": 9.5,
    "legend.fontsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "text.parse_math": False,  # names are plain text, never formulas
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}
WIDTH, HEIGHT = 4.6, 3.3  # inches
PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.4g} %")
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
POWER = FuncFormatter(lambda value, _: f"10{str(round(np.log10(value))).translate(SUPERSCRIPTS)}")


def colours(names: Sequence[str]) -> dict[str, str]:
    """Name -> colour, in order; the first ones differ most. Names beyond the palette get darker shades of it."""
    rounds = [divmod(i, len(PALETTE)) for i in range(len(names))]
    return {name: darken(PALETTE[i], 0.55**turn) for name, (turn, i) in zip(names, rounds, strict=True)}


def darken(colour: str, share: float) -> str:
    """A colour with this share of its brightness."""
    red, green, blue = to_rgb(colour)
    return to_hex((share * red, share * green, share * blue))


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


DIAGONAL = Curve(
    [0, 1], [0, 1], "_diagonal", {"color": INK, "linestyle": "--", "linewidth": 1}
)  # names with _ have no legend


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
    logarithmic = score in ("max_probability", "entropy", "mutual_information", "variance", "epistemic")
    if logarithmic:
        floor = 1e-8 if score != "variance" else everything.min()
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
        axes.set(
            xlabel=f"{SCORE_LABELS.get(score, score)}: more foreign →",
            ylabel="share of inputs",
            title=short_name(title, 44),
        )
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
    curves: Mapping[str, tuple[Array, Array]], *, risk: str, percent: bool, palette: Palette
) -> Figure:
    """Draws the risk of the most certain inputs against their share."""
    drawn = [Curve(*_thin_curve(*each), short_name(name), {"color": palette[name]}) for name, each in curves.items()]
    highest = max(np.max(curve.y) for curve in drawn)
    axes = {"xlabel": "inputs answered, most certain first", "ylabel": risk, "title": "Risk and coverage"}
    limits = {"xlim": (0, 1), "ylim": (0, 1.05 * highest or 1)}
    return curve_figure([Panel(drawn, axes | limits, percent="xy" if percent else "x")])


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
    "entropy": "entropy (nats)",
    "mutual_information": "mutual information (nats)",
    "energy": "energy (nats)",
    "variance": "variance",
    "epistemic": "variance of the means",
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
    """Sets margins for ticks and labels, in inches: `gap` between rows, `below` under the figure.

    matplotlib's layout engine would do the same, but takes as long as the drawing itself.
    """
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
    figure._repr_png_ = partial(_png, figure)  # type: ignore[attr-defined]
    return figure


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
