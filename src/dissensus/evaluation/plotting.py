"""Figures of one evaluation."""

from __future__ import annotations

from typing import Any

from dissensus.drawing import plots
from dissensus.numerics.checks import one_of

KINDS = {
    "reliability": ("reliability/counts", "evaluate a classification or a regression"),
    "risk": ("risk_coverage/risk", "evaluate whole inputs, not pixels"),
    "ood": ("ood/", "pass ood={name: loader} to ds.evaluate"),
    "corruptions": ("corrupt/by_severity/", "pass corrupt=... to ds.evaluate"),
}
OVER_SEVERITIES = {"accuracy": ("Accuracy", True), "nll": ("NLL (nats)", False), "ece": ("ECE", True)}


def figure_of(evaluation: Any, kind: str) -> Any:
    """The figure of this kind: see `Evaluation.plot`."""
    needed, remedy = KINDS[one_of("a figure", kind, KINDS)]
    arrays, metrics, colour = evaluation.arrays, evaluation.metrics, plots.PALETTE[0]
    if kind == "reliability" and "test/cumulative" in arrays:
        return plots.interval_coverage_figure({"intervals": arrays["test/cumulative"]}, palette={"intervals": colour})
    score = f"/score/{evaluation.score}"
    foreign = {name: arrays[f"ood/{name}{score}"] for name in evaluation.ood if f"ood/{name}{score}" in arrays}
    if not any(name.startswith(needed) for name in arrays) or (kind == "ood" and not foreign):
        raise ValueError(f"expected an evaluation with {kind} to plot, got one without; {remedy}")
    if kind == "reliability":
        parts = [arrays[f"reliability/{key}"] for key in ("counts", "confidence", "accuracy", "edges")]
        return plots.reliability(*parts, title=f"ECE {100 * metrics['ece']:.2f} %", colour=colour)
    if kind == "risk":
        classes = evaluation.kind != "regression"
        curve = (arrays["risk_coverage/coverage"], arrays["risk_coverage/risk"])
        risk = "errors among answered" if classes else "mean squared error"
        return plots.risk_coverage_figure({"risk": curve}, risk=risk, percent=classes, palette={"risk": colour})
    if kind == "ood":
        found = ", ".join(f"{name} {100 * metrics[f'ood/{name}/auroc']:.2f} %" for name in foreign)
        title = f"AUROC: {found}"
        return plots.ood_histogram(arrays[f"test{score}"], foreign, score=evaluation.score, title=title, colour=colour)
    panels = [
        plots.corruption_panel(
            evaluation.severities,
            {label: (float(arrays[f"corrupt/clean/{key}"]), arrays[f"corrupt/by_severity/{key}"])},
            label=label,
            percent=percent,
            palette={label: colour},
        )
        for key, (label, percent) in OVER_SEVERITIES.items()
        if f"corrupt/by_severity/{key}" in arrays
    ]
    bare = [panel._replace(curves=[curve._replace(label="_") for curve in panel.curves]) for panel in panels]
    return plots.curve_figure(bare, size=(3.9 * len(bare), 3.0))
