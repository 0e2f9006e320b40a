"""One function per figure: takes arrays, returns a figure, saves nothing.

Text and axes are drawn in INK; a report on a page replaces that colour by the page's own, so that figures are readable
on light and on dark ground. Methods have one colour each, given by `colours`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

Array = Any  # anything numpy.asarray takes

INK = "#123456"
PALETTE = (
    "#4c8bc9", "#e0803a", "#35a06f", "#a678d8", "#d4566b", "#29a3a8", "#ac7f52", "#d46eae", "#8f959e", "#a5a13a",
)  # fmt: skip
ROOM_INSIDE = 4  # names of methods in a legend among the data
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.labelsize": 9.5,
    "legend.fontsize": 8.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "svg.fonttype": "path",
    "text.parse_math": False,  # names are text, whatever is in them
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}
WIDTH, HEIGHT = 4.6, 3.3  # inches
PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.4g} %")
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
POWER = FuncFormatter(lambda value, _: f"10{str(round(np.log10(value))).translate(SUPERSCRIPTS)}")


def colours(names: Sequence[str]) -> dict[str, str]:
    """Name -> colour, in order; the first ones differ most. More names than the palette has get darker ones of the same."""
    rounds = [divmod(i, len(PALETTE)) for i in range(len(names))]
    return {name: darker(PALETTE[i], 0.55**turn) for name, (turn, i) in zip(names, rounds, strict=True)}


def darker(colour: str, share: float) -> str:
    """A colour with this share of its brightness."""
    red, green, blue = to_rgb(colour)
    return to_hex((share * red, share * green, share * blue))


def reliability(counts: Array, confidence: Array, accuracy: Array, edges: Array, *, title: str, colour: str) -> Figure:
    """Accuracy against confidence by bin, with the gap to the diagonal, over the histogram of confidences."""
    counts, confidence, accuracy, edges = map(np.asarray, (counts, confidence, accuracy, edges))
    held = counts > 0
    left, width = edges[:-1][held], np.diff(edges)[held]
    with matplotlib.rc_context(STYLE):
        figure, (upper, lower) = _figure(2, 1, height=4.1, sharex=True, height_ratios=(3, 1))
        upper.bar(left, accuracy[held], width, align="edge", color=colour, alpha=0.75, linewidth=0)
        gap = confidence[held] - accuracy[held]
        upper.bar(
            left, gap, width, accuracy[held], align="edge",
            facecolor="none", edgecolor=INK, hatch="////", linewidth=0.4, alpha=0.55,
        )  # fmt: skip
        upper.plot([0, 1], [0, 1], color=INK, linestyle="--", linewidth=1)
        upper.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy", title=short(title, 44))
        lower.bar(edges[:-1], counts / counts.sum(), np.diff(edges), align="edge", color=colour, linewidth=0)
        lower.set(xlabel="confidence (largest probability)", ylabel="inputs", yscale="log")
        lower.set_ylim(0.5 / counts.sum(), 1.5)
        lower.yaxis.set_major_locator(LogLocator(numticks=5))
        lower.yaxis.set_minor_locator(NullLocator())
        for axes in (upper, lower):
            _percent(axes)
    return figure


def ood_histogram(inside: Array, foreign: Mapping[str, Array], *, score: str, title: str, colour: str) -> Figure:
    """Densities of a score on test inputs (filled) and on each set of foreign inputs (lines)."""
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
            axes.stairs(shares(values), edges, color=INK, linewidth=1.4, linestyle=style, label=short(name))
        if logarithmic:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(POWER)
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set(
            xlabel=f"{SCORE_LABELS.get(score, score)}: more foreign →", ylabel="share of inputs", title=short(title, 44)
        )
        axes.yaxis.set_major_formatter(PERCENT)
        axes.margins(x=0.01)
        axes.legend(loc="upper left")
    return figure


def roc(curves: Mapping[str, tuple[Array, Array, float]], *, title: str, palette: Mapping[str, str]) -> Figure:
    """ROC curves (false positive rate, true positive rate, area) of each method; OOD is positive."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure()
        for name, (fpr, tpr, area) in curves.items():
            x, y = _thinned(fpr, tpr)
            axes.plot(x, y, color=palette[name], linewidth=1.7, label=f"{short(name)}  {100 * area:.2f} %")
        axes.plot([0, 1], [0, 1], color=INK, linestyle="--", linewidth=0.8)
        axes.set(
            xlim=(0, 1), ylim=(0, 1.005), title=short(title, 44),
            xlabel="test inputs flagged (false positives)", ylabel="foreign inputs flagged",
        )  # fmt: skip
        _percent(axes)
        axes.legend(loc="lower right", title="area", title_fontsize=8.5)
    return figure


def risk_coverage(
    curves: Mapping[str, tuple[Array, Array]], *, risk: str, percent: bool, palette: Mapping[str, str]
) -> Figure:
    """Risk that is left when only the surest inputs are answered, against the share that is."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure()
        for name, (coverage, values) in curves.items():
            x, y = _thinned(coverage, values)
            axes.plot(x, y, color=palette[name], linewidth=1.7, label=short(name))
        axes.set(xlim=(0, 1), xlabel="inputs answered, surest first", ylabel=risk, title="Risk and coverage")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(PERCENT)
        if percent:
            axes.yaxis.set_major_formatter(PERCENT)
        _legend(figure, axes)
    return figure


def corruption_curves(
    severities: Sequence[int],
    values: Mapping[str, tuple[float, Array]],
    *,
    label: str,
    percent: bool,
    palette: Mapping[str, str],
) -> Figure:
    """A metric against the severity of corruption, types pooled; severity 0 is the same inputs, clean."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure()
        for i, (name, (clean, damaged)) in enumerate(values.items()):
            axes.plot(
                [0, *severities], [clean, *np.asarray(damaged)], marker=MARKERS[i % len(MARKERS)], markersize=4.5,
                color=palette[name], linewidth=1.7, label=short(name),
            )  # fmt: skip
        axes.set(xlabel="severity of corruption (0: clean)", ylabel=label, title=f"{label} under corruption")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if percent:
            axes.yaxis.set_major_formatter(PERCENT)
        _legend(figure, axes)
    return figure


def cost_scatter(
    points: Mapping[str, tuple[float, float, tuple[float, float] | None]],
    *,
    cost: str,
    quality: str,
    percent: bool,
    palette: Mapping[str, str],
) -> Figure:
    """Quality against cost (cost, value, interval), one point a method; the cost axis is logarithmic."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure()
        for i, (name, (spent, value, interval)) in enumerate(points.items()):
            bars = None if interval is None else [[max(value - interval[0], 0)], [max(interval[1] - value, 0)]]
            axes.errorbar(
                [spent], [value], yerr=bars, fmt=MARKERS[i % len(MARKERS)], markersize=7, capsize=3,
                color=palette[name], label=short(name), linewidth=1.3,
            )  # fmt: skip
        costs = [max(spent, 1e-9) for spent, _, _ in points.values()]
        axes.set(xscale="log", xlabel=cost, ylabel=quality, title=f"{quality} and cost")
        axes.set_xlim(min(costs) / 2.5, max(costs) * 2.5)
        ratio = max(costs) / min(costs)  # as many labels as there is room for
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if ratio > 20 else (1.0, 2.0, 5.0), numticks=7))
        axes.xaxis.set_major_formatter(POWER if ratio > 1e4 else FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        if percent:
            axes.yaxis.set_major_formatter(PERCENT)
        axes.margins(y=0.25)
        _legend(figure, axes)
    return figure


def interval_coverage(cumulative: Mapping[str, Array], *, palette: Mapping[str, str]) -> Figure:
    """Share of targets inside central intervals against their level, of P(Y ≤ y) at the targets."""
    levels = np.linspace(0, 1, 101)
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure()
        axes.plot([0, 1], [0, 1], color=INK, linestyle="--", linewidth=1, label="calibrated")
        for name, values in cumulative.items():
            inside = np.sort(np.abs(2 * np.asarray(values).ravel() - 1))
            axes.plot(
                levels, np.searchsorted(inside, levels, side="right") / len(inside),
                color=palette[name], linewidth=1.7, label=short(name),
            )  # fmt: skip
        axes.set(
            xlim=(0, 1), ylim=(0, 1), xlabel="level of the interval", ylabel="targets inside", title="Interval coverage"
        )
        _percent(axes)
        axes.legend(loc="upper left")
    return figure


SCORE_LABELS = {
    "max_probability": "−log largest probability (nats)",
    "entropy": "entropy (nats)",
    "mutual_information": "mutual information (nats)",
    "energy": "energy (nats)",
    "variance": "variance",
    "epistemic": "variance of the means",
}


def short(name: str, length: int = 24) -> str:
    """The name, cut where a figure has no room for it."""
    return name if len(name) <= length else f"{name[: length - 1]}…"


def _figure(rows: int = 1, columns: int = 1, *, height: float = HEIGHT, **keywords: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(WIDTH, height))  # not through pyplot: nothing global is kept
    axes = figure.subplots(rows, columns, **keywords)
    figure.subplots_adjust(left=0.19, right=0.94, top=1 - 0.32 / height, bottom=0.52 / height, hspace=0.12)
    return figure, axes


def _legend(figure: Figure, axes: Any) -> None:
    """Names of the methods: where there is room among few, under the axes where many would lie on the data."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) <= ROOM_INSIDE:
        axes.legend(loc="best")
        return
    columns = 3
    more = 0.19 * -(-len(labels) // columns)  # inches, for the rows of names
    width, height = figure.get_size_inches()
    top, bottom = (
        (1 - figure.subplotpars.top) * height,
        figure.subplotpars.bottom * height,
    )  # inches above and below the axes
    figure.set_size_inches(width, height + more)
    figure.subplots_adjust(top=1 - top / (height + more), bottom=(bottom + more) / (height + more))
    figure.legend(handles, labels, loc="lower center", ncols=columns, columnspacing=1.2, handletextpad=0.5)


def _percent(axes: Any) -> None:
    axes.xaxis.set_major_formatter(PERCENT)
    axes.yaxis.set_major_formatter(PERCENT)


def _thinned(x: Array, y: Array, *, points: int = 300) -> tuple[Any, Any]:
    """At most `points` points of a curve, evenly spaced along its length, both ends kept."""
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if len(x) <= points:
        return x, y
    span = max(np.ptp(y), 1e-12)
    along = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(x)) + np.abs(np.diff(y)) / span)])
    keep = np.unique(np.searchsorted(along, np.linspace(0, along[-1], points)).clip(0, len(x) - 1))
    keep = np.unique(np.concatenate([[0], keep, [len(x) - 1]]))
    return x[keep], y[keep]
