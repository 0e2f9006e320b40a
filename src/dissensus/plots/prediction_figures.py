"""Figures of one prediction over a line, a plane or images, and of a training run."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dissensus.plots import segmentation_maps
from dissensus.plots.charts import INK, PALETTE, STYLE, Array, Curve, Panel, curve_figure, marker_style, short_name

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
        name = f"y, output {d}" if mean.shape[1] > 1 else "y"
        panels.append(Panel(drawn, {"xlabel": "x", "ylabel": name}))
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
    """Draws one row per image (B, C, H, W): image, truth (B, H, W) if given, classes, confidence, mutual information."""
    count = probabilities.shape[1]
    largest = float(np.quantile(epistemic, 0.998)) or 1.0
    rows = []
    for i, each in enumerate(probabilities[:MOST]):
        row = [] if images is None else [("image", displayable_image(images[i]))]
        row += [] if truth is None else [("truth", segmentation_maps.class_image(truth[i], count))]
        confidence = segmentation_maps.heat_image(each.max(0), largest=1.0, colours=segmentation_maps.CONFIDENCE)
        apart = segmentation_maps.heat_image(epistemic[i], largest=largest, colours=segmentation_maps.EPISTEMIC)
        row += [("prediction", segmentation_maps.class_image(each.argmax(0), count))]
        row += [("confidence, 0 (dark) to 1", confidence), (f"mutual information, to {largest:.2g} nats", apart)]
        rows.append(row)
    figure = image_grid(rows)
    marks = [] if truth is None else segmentation_maps.special_labels(truth[:MOST], count)
    segmentation_maps.add_class_legend(figure, list(classes) or [str(i) for i in range(count)], marks)
    return figure


def class_figure(images: Array, probabilities: Array, epistemic: Array, *, classes: Sequence[str]) -> Figure:
    """Draws images (B, C, H, W) with their predicted class, the confidence and the mutual information in nats."""
    said = []
    for image, each, apart in zip(images[:MOST], probabilities, epistemic, strict=False):
        best = int(each.argmax())
        name = classes[best] if best < len(classes) else str(best)
        said.append((f"{short_name(name, 14)} {100 * each[best]:.0f} %\n{apart:.2g} nats", displayable_image(image)))
    return image_grid([said[i : i + 4] for i in range(0, len(said), 4)])


def image_grid(rows: Sequence[Sequence[tuple[str, Any]]]) -> Figure:
    """Draws images (H, W, 3) with their titles."""
    columns, (height, width) = max(map(len, rows)), rows[0][0][1].shape[:2]
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(2.1 * columns, len(rows) * (2.1 * height / width + 0.4)), layout="constrained")
        grid = figure.subplots(len(rows), columns, squeeze=False)
        for axes in grid.flat:
            axes.set_axis_off()
        for row, shown in zip(grid, rows, strict=True):
            for axes, (title, image) in zip(row, shown, strict=False):
                axes.imshow(image, interpolation="none")
                axes.set_title(title, fontsize=8, pad=2)
    return figure


def displayable_image(image: Array) -> Any:
    """(H, W, 3) in [0, 1] from an image (C, H, W) in any units: values in [0, 1] are kept, others are rescaled."""
    shown = np.asarray(image, float)
    if shown.min() < 0 or shown.max() > 1:
        shown = (shown - shown.min()) / (np.ptp(shown) or 1.0)
    shown = shown if len(shown) == 3 else shown[:1].repeat(3, 0)
    return shown.transpose(1, 2, 0)


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
        drawn.append(Curve([best + 1], [validation[best]], f"kept: epoch {best + 1}", look))
    figure = curve_figure([Panel(drawn, {"xlabel": "epoch", "ylabel": "nats per example", "title": "Training"})])
    figure.axes[0].xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure
