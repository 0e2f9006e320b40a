"""Figures of promises: coverage of conformal sets and risk of gates, beside the promised values."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from dissensus.drawing.plots import INK, Curve, Panel, curve_figure, marked, short
from dissensus.evaluation.evaluation import Evaluation
from dissensus.evaluation.promised import DIFFICULTIES
from dissensus.reporting.results import Results
from dissensus.reporting.scenes import Made


def promised(results: Results, palette: Mapping[str, str]) -> Made | None:
    """Coverage by difficulty and severity with the promised level; risk by acceptance with the promised risk."""
    panels = [*_sets(results, palette), *_gates(results, palette)]
    text = (
        "Dashed lines are the promised values, for inputs like the calibration rows. Coverage is promised over all inputs, not "
        "for the hard ones separately, and not for corrupted inputs. Markers on the risk curves are the gates."
    )
    figures = [(str(panel.axes["title"]), curve_figure([panel])) for panel in panels]
    return ("Are promises kept?", text, figures) if figures else None


def _sets(results: Results, palette: Mapping[str, str]) -> list[Panel]:
    panels = []
    for name in _names(results, "/level"):
        keys = [f"{name}/{each}/coverage" for each in DIFFICULTIES]
        drawn = _curves(results, palette, [1, 2, 3], keys)
        if drawn:
            level = _first(results, f"{name}/level")
            label = {"xlabel": "thirds of the inputs, easy to hard", "ylabel": "sets that hold the truth"}
            title = {"title": f"Coverage by difficulty: {name}", "ylim": (None, 1.01)}
            panels.append(Panel([*drawn, _line(1, 3, level)], label | title, percent="y", ticks=[1, 2, 3]))
        severities = next(iter(results.methods.values()))[0].severities
        keys = [f"{name}/coverage", *(f"corrupt/severity{s}/{name}/coverage" for s in severities)]
        if severities and (drawn := _curves(results, palette, [0, *severities], keys)):
            label = {"xlabel": "severity of corruption (0: clean)", "ylabel": "sets that hold the truth"}
            title = {"title": f"Coverage under corruption: {name}", "ylim": (None, 1.01)}
            line = _line(0, max(severities), _first(results, f"{name}/level"))
            panels.append(Panel([*drawn, line], label | title, percent="y", ticks=[0, *severities]))
    return panels


def _gates(results: Results, palette: Mapping[str, str]) -> list[Panel]:
    panels = []
    for name in _names(results, "/promised"):
        drawn = []
        for i, (method, several) in enumerate(results.methods.items()):
            first = several[0]
            if f"test/{name}/error" not in first.arrays or "risk_coverage/risk" not in first.arrays:
                continue
            x, y = (first.arrays[f"risk_coverage/{key}"].numpy() for key in ("coverage", "risk"))
            thin = np.linspace(0, len(x) - 1, min(len(x), 300)).round().astype(int)
            drawn.append(Curve(x[thin], y[thin], short(method), {"color": palette[method]}))
            at = [first.metrics[f"{name}/accepted"]], [first.metrics.get(f"{name}/risk", 0.0)]
            drawn.append(Curve(*at, f"_{method}", {"color": palette[method], **marked(i, size=7)}))
        if drawn and next(iter(results.methods.values()))[0].kind == "classification":
            label = {"xlabel": "inputs accepted, most certain first", "ylabel": "errors among accepted"}
            axes = label | {"title": f"Risk and acceptance: {name}", "xlim": (0, 1.02)}
            panels.append(Panel([*drawn, _line(0, 1, _first(results, f"{name}/promised"))], axes, percent="xy"))
    return panels


def _names(results: Results, ending: str) -> list[str]:
    """Names of the promises for which a method has a metric with this ending."""
    found = (key for several in results.methods.values() for key in several[0].metrics if key.endswith(ending))
    return [key.removesuffix(ending) for key in dict.fromkeys(found) if "/" not in key.removesuffix(ending)]


def _curves(results: Results, palette: Mapping[str, str], x: Sequence[float], keys: Sequence[str]) -> list[Curve]:
    """One curve per method that has all these metrics, averaged over seeds."""
    return [
        Curve(list(x), _means(several, keys), short(method), {"color": palette[method], **marked(i)})
        for i, (method, several) in enumerate(results.methods.items())
        if all(key in each.metrics for each in several for key in keys)
    ]


def _means(several: Sequence[Evaluation], keys: Sequence[str]) -> list[float]:
    return [math.fsum(each.metrics[key] for each in several) / len(several) for key in keys]


def _first(results: Results, key: str) -> float:
    return next(e.metrics[key] for several in results.methods.values() for e in several if key in e.metrics)


def _line(left: float, right: float, height: float) -> Curve:
    return Curve([left, right], [height, height], "promised", {"color": INK, "linestyle": "--", "linewidth": 1})
