"""A predictive and an evaluation as figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dissensus.plots import charts
from dissensus.utils.arrays import tensor_of
from dissensus.utils.checks import one_of

LEVEL = 0.9
MEMBERS = 10  # drawn as lines

Array = Any  # of numpy


def predictive_figure(predictive: Any, x: Any, seen: tuple[Any, Any] | None, classes: Sequence[str]) -> Any:
    """The figure for the shape of the inputs: see `Predictive.plot`."""
    from dissensus.plots import prediction_figures  # loads matplotlib

    mean, classed = _array(predictive.mean), hasattr(predictive, "log_mean")
    inputs = None if x is None else _array(tensor_of(x))
    if inputs is not None and len(inputs) != len(mean):
        raise ValueError(f"expected the {len(mean)} inputs of the prediction, got {len(inputs)}; pass the same x")
    if classed and mean.ndim > 2:
        truth = None if seen is None else _array(tensor_of(seen[1]))
        spread = _array(predictive.epistemic)
        return prediction_figures.segmentation_figure(inputs, mean, spread, classes=classes, truth=truth)
    dots = None if seen is None else (_array(tensor_of(seen[0])), _array(tensor_of(seen[1])))
    if inputs is not None and inputs.ndim == 2 and inputs.shape[1] == 2:
        total = _array(predictive.total).reshape(len(mean), -1).sum(1)
        label = "entropy (nats)" if classed else "standard deviation"
        return prediction_figures.plane_figure(inputs, total if classed else total**0.5, label=label, seen=dots)
    if classed and inputs is not None and inputs.ndim == 4:
        return prediction_figures.class_figure(inputs, mean, _array(predictive.epistemic), classes=classes)
    flat = _array(torch.arange(len(mean))) if inputs is None else inputs.reshape(len(mean), -1)
    if classed or flat.reshape(len(mean), -1).shape[1] != 1:
        shape = None if inputs is None else inputs.shape
        wanted = "inputs on a line (of a regression), on a plane (B, 2), or images (B, channels, H, W)"
        raise ValueError(f"expected {wanted}, got {shape}; pass x, or plot ds.evaluate(...) instead")
    ends = tuple(_array(each).reshape(len(mean), -1) for each in predictive.interval(LEVEL))
    kept = _array(predictive.defining_tensors()[0][:MEMBERS])  # for a summary its mean
    members = kept.reshape(len(kept), len(mean), -1)
    line, rows = flat.ravel(), mean.reshape(len(mean), -1)
    return prediction_figures.line_figure(line, rows, ends, members, level=LEVEL, seen=dots)


def _array(values: Tensor) -> Array:
    return values.detach().cpu().numpy()


KINDS = {
    "reliability": ("reliability/counts", "evaluate a classification or a regression"),
    "risk": ("risk_coverage/risk", "evaluate whole inputs, not pixels"),
    "ood": ("ood/", "pass ood={name: loader} to ds.evaluate"),
    "corruptions": ("corrupt/by_severity/", "pass corrupt=... to ds.evaluate"),
}
OVER_SEVERITIES = {"accuracy": ("Accuracy", True), "nll": ("NLL (nats)", False), "ece": ("ECE", True)}


def evaluation_figure(evaluation: Any, kind: str) -> Any:
    """The figure of this kind: see `Evaluation.plot`."""
    needed, remedy = KINDS[one_of("a figure", kind, KINDS)]
    arrays, metrics, colour = evaluation.arrays, evaluation.metrics, charts.PALETTE[0]
    if kind == "reliability" and "test/cumulative" in arrays:
        return charts.interval_coverage_figure({"intervals": arrays["test/cumulative"]}, palette={"intervals": colour})
    score = f"/score/{evaluation.score}"
    foreign = {name: arrays[f"ood/{name}{score}"] for name in evaluation.ood if f"ood/{name}{score}" in arrays}
    if not any(name.startswith(needed) for name in arrays) or (kind == "ood" and not foreign):
        raise ValueError(f"expected an evaluation with {kind} to plot, got one without; {remedy}")
    if kind == "reliability":
        parts = [arrays[f"reliability/{key}"] for key in ("counts", "confidence", "accuracy", "edges")]
        return charts.reliability_figure(*parts, title=f"ECE {100 * metrics['ece']:.2f} %", colour=colour)
    if kind == "risk":
        classes = evaluation.kind != "regression"
        curve = (arrays["risk_coverage/coverage"], arrays["risk_coverage/risk"])
        risk = "errors among answered" if classes else "mean squared error"
        return charts.risk_coverage_figure({"risk": curve}, risk=risk, percent=classes, palette={"risk": colour})
    if kind == "ood":
        found = ", ".join(f"{name} {100 * metrics[f'ood/{name}/auroc']:.2f} %" for name in foreign)
        title = f"AUROC: {found}"
        return charts.ood_histogram(arrays[f"test{score}"], foreign, score=evaluation.score, title=title, colour=colour)
    panels = [
        charts.corruption_panel(
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
    return charts.curve_figure(bare, size=(3.9 * len(bare), 3.0))
