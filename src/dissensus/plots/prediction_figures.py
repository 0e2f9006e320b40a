"""Figures of one prediction over a line, a plane or images, of an evaluation, and of a training run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from dissensus.plots import charts, segmentation_maps
from dissensus.plots.charts import INK, PALETTE, STYLE, Array, Curve, Panel, curve_figure, marker_style, short_name
from dissensus.utils.arrays import tensor_of
from dissensus.utils.checks import one_of

LEVEL = 0.9
MEMBERS = 10  # drawn as lines


def predictive_figure(predictive: Any, x: Any, seen: Any, classes: Sequence[str]) -> Any:
    """The figure for the shape of the inputs: see `Predictive.plot`."""
    mean, classed = _array(predictive.mean), hasattr(predictive, "log_mean")
    inputs = None if x is None else _array(tensor_of(x))
    if not isinstance(seen, tuple | None):  # targets alone are those of x
        seen = (torch.arange(len(mean)) if x is None else x, seen)
    dots = None if seen is None else (_array(tensor_of(seen[0])), _array(tensor_of(seen[1])))
    pictures = classed and (mean.ndim > 2 or (inputs is not None and inputs.ndim == 4))
    truth = None if dots is None or not pictures else dots[1].argmax(1) if dots[1].ndim == 2 else dots[1]
    for name, values in (("inputs", inputs), ("targets", truth)):
        if values is not None and len(values) != len(mean):
            raise ValueError(f"expected the {len(mean)} {name} of the prediction, got {len(values)}; pass the same x")
    if classed and mean.ndim > 2:
        return segmentation_figure(inputs, mean, _array(predictive.epistemic), classes=classes, truth=truth)
    if inputs is not None and inputs.ndim == 2 and inputs.shape[1] == 2:
        total = _array(predictive.total).reshape(len(mean), -1).sum(1)
        nats = classed or predictive.kind == "multilabel"
        label = "total uncertainty (nats)" if nats else "standard deviation"
        return plane_figure(inputs, total if nats else total**0.5, label=label, seen=dots)
    if pictures and inputs is not None:
        parts = mean.argmax(1), mean.max(1), _array(predictive.total), _array(predictive.epistemic)
        return charts.image_grid(captioned_rows(inputs[:MOST], classes, *parts, truth))
    flat = _array(torch.arange(len(mean))) if inputs is None else inputs.reshape(len(mean), -1)
    if classed or predictive.kind == "multilabel" or flat.reshape(len(mean), -1).shape[1] != 1:
        shape = None if inputs is None else inputs.shape
        wanted = "inputs on a line (of a regression), on a plane (B, 2), or images (B, channels, H, W)"
        raise ValueError(f"expected {wanted}, got {shape}; pass x, or plot ds.evaluate(...) instead")
    ends = tuple(_array(each).reshape(len(mean), -1) for each in predictive.interval(LEVEL))
    kept = _array(predictive.defining_tensors()[0][:MEMBERS])  # for a summary its mean
    members = kept.reshape(len(kept), len(mean), -1)
    line, rows = flat.ravel(), mean.reshape(len(mean), -1)
    return line_figure(line, rows, ends, members, level=LEVEL, seen=dots)


def _array(values: Tensor) -> Array:
    return values.detach().cpu().numpy()


KINDS = {
    "reliability": ("reliability/counts", "evaluate a classification or a regression"),
    "risk": ("risk_coverage/risk", "evaluate whole inputs, not pixels"),
    "ood": ("ood/", "pass ood={name: loader} to ds.evaluate"),
    "corruptions": ("corrupt/by_severity/", "pass corrupt=... to ds.evaluate"),
    "gallery": ("examples/least/", "evaluate a classification of images (B, 1 or 3, H, W)"),
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
        about: dict[str, Any] = {"risk": risk, "percent": classes, "palette": {"": colour}, "labelled": [""]}
        return charts.risk_coverage_figure({"": curve}, **about)
    if kind == "gallery":
        return gallery_figure(arrays, evaluation.notes.get("classes", "").splitlines())
    if kind == "ood":
        title = "AUROC: " + ", ".join(f"{name} {100 * metrics[f'ood/{name}/auroc']:.2f} %" for name in foreign)
        return charts.ood_histogram(arrays[f"test{score}"], foreign, score=evaluation.score, title=title, colour=colour)
    panels = []
    for key, (label, percent) in OVER_SEVERITIES.items():
        if f"corrupt/by_severity/{key}" in arrays:
            values = {label: (float(arrays[f"corrupt/clean/{key}"]), arrays[f"corrupt/by_severity/{key}"])}
            about = {"label": label, "percent": percent, "palette": {label: colour}}
            panels.append(charts.corruption_panel(evaluation.severities, values, **about))
    bare = [panel._replace(curves=[curve._replace(label="_") for curve in panel.curves]) for panel in panels]
    return charts.curve_figure(bare, size=(3.9 * len(bare), 3.0))


MOST = 8  # most images shown
Seen = tuple[Array, Array]


def line_figure(
    x: Array, mean: Array, interval: tuple[Array, Array], members: Array, *, level: float, seen: Seen | None = None
) -> Figure:
    """Draws a regression over x (B,): mean (B, D), central interval, members (M, B, D) as thin lines; one panel per output."""
    order = np.argsort(x)
    x, colour, panels = np.asarray(x)[order], PALETTE[0], []
    for d in range(mean.shape[1]):
        low, high = (each[order, d] for each in interval)
        drawn = [Curve(x, mean[order, d], f"mean, {100 * level:g} % interval", {"color": colour}, band=(low, high))]
        thin = {"color": colour, "alpha": 0.4, "linewidth": 0.6}
        drawn += [Curve(x, each[order, d], "members" if i == 0 else "_", thin) for i, each in enumerate(members)]
        if seen is not None:
            dots = {"color": INK, "linestyle": "none", "marker": ".", "markersize": 3, "alpha": 0.6}
            targets = np.asarray(seen[1]).reshape(len(seen[1]), -1)
            drawn.append(Curve(np.asarray(seen[0]).ravel(), targets[:, d], "data", dots))
        panels.append(Panel(drawn, {"xlabel": "x", "ylabel": f"y, output {d}" if mean.shape[1] > 1 else "y"}))
    return curve_figure(panels, size=(4.6 * len(panels), 3.3))


def plane_figure(points: Array, values: Array, *, label: str, seen: Seen | None = None) -> Figure:
    """Draws values (B,) at points (B, 2) of the plane, on a grid or not; seen: points (N, 2) and targets (N,)."""
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(4.6, 3.6), layout="constrained")  # not through pyplot, which keeps global state
        axes = figure.subplots()
        across, up = np.asarray(points, float).T
        filled = axes.tripcolor(across, up, np.asarray(values, float), shading="gouraud", cmap="viridis")
        if seen is not None:
            across, up = np.asarray(seen[0], float).T
            axes.scatter(across, up, c=np.asarray(seen[1]).ravel(), s=4, cmap="Set1", linewidths=0)
        axes.set(xlabel="first input", ylabel="second input")
        figure.colorbar(filled, ax=axes, label=label)
    return figure


def segmentation_figure(
    images: Array | None, probabilities: Array, epistemic: Array, *, classes: Sequence[str], truth: Array | None = None
) -> Figure:
    """Draws one row per image (B, C, H, W): image, truth (B, H, W) if given, classes, confidence, epistemic uncertainty."""
    count = probabilities.shape[1]
    largest = float(np.quantile(epistemic, 0.998)) or 1.0
    rows = []
    for i, each in enumerate(probabilities[:MOST]):
        row = [] if images is None else [("image", displayable_image(images[i]))]
        row += [] if truth is None else [("truth", segmentation_maps.class_image(truth[i], count))]
        maps = segmentation_maps.PixelMaps(each.argmax(0), each.max(0), epistemic[i])
        rows.append(row + segmentation_maps.map_images(maps, count, largest))
    figure = charts.image_grid(rows)
    marks = [] if truth is None else segmentation_maps.special_labels(truth[:MOST], count)
    segmentation_maps.add_class_legend(figure, list(classes) or [str(i) for i in range(count)], marks)
    return figure


def gallery_figure(arrays: Mapping[str, Array], classes: Sequence[str]) -> Figure:
    """Draws the least certain images of an evaluation and its most certain mistakes, each with its truth."""
    numbers = {"test/score/epistemic": 0 * arrays["test/confidence"], **arrays}  # a single network has none
    keys = ("prediction", "confidence", "score/total", "score/epistemic", "target")
    rows, names = list[Any](), list[str]()
    for group, name in (("least", "least certain"), ("mistakes", "most certain mistakes")):
        images, index = (_array(arrays[f"examples/{group}/{key}"]) for key in ("inputs", "index"))
        rows += captioned_rows(images, classes, *(_array(numbers[f"test/{key}"])[index] for key in keys))
        names += [name] * (len(rows) - len(names))
    return charts.image_grid(rows, names)


def captioned_rows(
    images: Array, classes: Sequence[str], answer: Array, confidence: Array, total: Array, epistemic: Array, truth: Any
) -> list[list[tuple[str, Any]]]:
    """(caption, image) in rows of four: predicted and true class, confidence, total and epistemic uncertainty in nats."""
    names, shown = dict(enumerate(classes)), []
    for i, image in enumerate(images):
        lines = [f"{short_name(str(names.get(int(answer[i]), answer[i])), 24)}: {100 * confidence[i]:.0f} %"]
        lines += [] if truth is None else [f"truth: {short_name(str(names.get(int(truth[i]), truth[i])), 24)}"]
        lines += [f"epistemic {epistemic[i]:.3f} of {total[i]:.3f} nats"]
        shown.append(("\n".join(lines), displayable_image(image)))
    return [shown[i : i + 4] for i in range(0, len(shown), 4)]


def displayable_image(image: Array) -> Any:
    """(H, W, 3) in [0, 1] from an image (C, H, W): bytes and values in [0, 1] are kept, others are rescaled."""
    image = np.asarray(image)
    shown = image / 255 if image.dtype == np.uint8 else image.astype(float)
    if shown.min() < -1e-3 or shown.max() > 1 + 1e-3:
        shown = (shown - shown.min()) / (np.ptp(shown) or 1.0)
    shown = shown if len(shown) == 3 else shown[:1].repeat(3, 0)
    return shown.clip(0, 1).transpose(1, 2, 0)


def training_figure(losses: Array, validation: Array, *, best: int | None) -> Figure:
    """Draws the members' losses (E, M) and the validation NLL (E,), NaN if unmeasured, over epochs from 1."""
    epochs = np.arange(1, len(losses) + 1)
    thin = {"color": PALETTE[0], "alpha": 0.35, "linewidth": 0.7}
    several = losses.shape[1] > 1
    drawn = [Curve(epochs, each, "_", thin) for each in losses.T] if several else []
    name = "training loss, mean of members" if several else "training loss"
    drawn.append(Curve(epochs, losses.mean(1), name, {"color": PALETTE[0]}))
    if np.isfinite(validation).any():
        drawn.append(Curve(epochs, validation, "validation NLL of the mixture", {"color": PALETTE[1]}))
    if best is not None:
        look = {"color": PALETTE[1], "linestyle": "none", **marker_style(0, size=7)}
        drawn.append(Curve([best], [validation[best - 1]], f"kept: epoch {best}", look))
    figure = curve_figure([Panel(drawn, {"xlabel": "epoch", "ylabel": "nats per example", "title": "Training"})])
    figure.axes[0].xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure
