"""Figures of segmentations: the image, every method's classes, and its uncertainty in each pixel."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from dissensus.plots.charts import STYLE, Array, short_name

VOID, UNKNOWN = -1, -2  # labels of pixels without a class, and of classes unknown in training
PALETTE = (
    "#7fb5e6", "#a65a4a", "#e8c547", "#6b6f7a", "#c9b79c", "#3f8f4f", "#e2711d", "#7d5ba6", "#2457c5", "#c8e05a",
    "#5fd0c5", "#d9828b", "#8a6d1c", "#1f6f6b", "#b9a7e0", "#4a2f27", "#f4a261", "#9bc995", "#31356e", "#b0323a",
)  # fmt: skip
VOID_COLOUR, UNKNOWN_COLOUR = "#000000", "#ff00ff"
MARKS = {"unknown": UNKNOWN_COLOUR, "void": VOID_COLOUR}
CONFIDENCE, EPISTEMIC = "cividis", "inferno"
ZOOM = 3  # a window has 1/ZOOM of the image's height and width
COLUMN = 2.1  # width of a column, inches


class PixelMaps(NamedTuple):
    """One method's prediction for an image, each (H, W): the class, its probability, the mutual information in nats."""

    prediction: Array
    confidence: Array
    epistemic: Array


def class_colours(count: int) -> np.ndarray:
    """(count, 3) uint8, one colour per class; classes beyond the palette get darker shades of it."""
    rounds = (divmod(i, len(PALETTE)) for i in range(count))
    return np.array([_rgb(PALETTE[i]) * 0.6**turn for turn, i in rounds]).reshape(count, 3).astype(np.uint8)


def class_image(labels: Array, count: int) -> np.ndarray:
    """(H, W, 3) uint8: labels (H, W) in the colours of `count` classes; UNKNOWN has its own colour, other labels are black."""
    labels = np.asarray(labels).astype(int)
    labels = np.where((labels >= count) | (labels < UNKNOWN), VOID, labels)  # such as 255
    table = np.concatenate([class_colours(count), [_rgb(UNKNOWN_COLOUR), _rgb(VOID_COLOUR)]]).astype(np.uint8)
    found: np.ndarray = table[labels]  # −1 and −2 are the last rows
    return found


def heat_image(values: Array, *, largest: float, colours: str) -> np.ndarray:
    """(H, W, 3) uint8: values (H, W) from 0 to `largest` in a matplotlib colour map."""
    shown = matplotlib.colormaps[colours](Normalize(0, largest, clip=True)(np.asarray(values, dtype=float)))
    return (255 * np.asarray(shown)[..., :3]).round().astype(np.uint8)


def scene_figure(image: Array, target: Array, methods: Mapping[str, PixelMaps], *, classes: Sequence[str]) -> Figure:
    """Draws image (H, W, 3), truth (H, W) and a row per method; the window with most UNKNOWN pixels is enlarged."""
    target = np.asarray(target)
    window = densest_window(target == UNKNOWN)
    largest = max(float(np.quantile(np.asarray(each.epistemic), 0.998)) for each in methods.values()) or 1.0
    height, width = target.shape
    across, down = (5 if window else 3) * COLUMN + 0.5, COLUMN * height / width + 0.22
    legend = 0.75 + 0.2 * (-(-(len(classes) + 2) // 6))
    rows = len(methods) + 1
    figure = Figure(figsize=(across, rows * down + legend))  # not through pyplot, which keeps global state
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        grid = figure.subplots(rows, 5 if window else 3, squeeze=False)
        bottom, top = legend / figure.get_figheight(), 1 - 0.22 / figure.get_figheight()
        left, right = 0.3 / across, 1 - 0.1 / across
        figure.subplots_adjust(left=left, right=right, top=top, bottom=bottom, wspace=0.04, hspace=0.16)
        for axes in grid.flat:
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        shown: list[tuple[str, Any]] = [("image", np.asarray(image)), ("truth", class_image(target, len(classes)))]
        _draw_row(grid[0], [*shown, None, *_zoom_images(shown, window)], window, marked=(0, 1))
        for line, (name, maps) in zip(grid[1:], methods.items(), strict=True):
            shown = [
                ("prediction", class_image(maps.prediction, len(classes))),
                ("confidence", heat_image(maps.confidence, largest=1.0, colours=CONFIDENCE)),
                ("mutual information", heat_image(maps.epistemic, largest=largest, colours=EPISTEMIC)),
            ]
            _draw_row(line, [*shown, *_zoom_images([shown[0], shown[2]], window)], window, marked=(2,))
            line[0].set_ylabel(short_name(name))
        _add_legends(figure, classes, largest, special_labels(target, len(classes)))
    return figure


def densest_window(mask: Array) -> tuple[slice, slice] | None:
    """Rows and columns of the window, a third of the image each way, with most of the mask (H, W); None if it is empty."""
    mask = np.asarray(mask)
    if not mask.any():
        return None
    height, width = (max(1, -(-side // ZOOM)) for side in mask.shape)
    sums = np.pad(mask.astype(int).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    inside = sums[height:, width:] - sums[:-height, width:] - sums[height:, :-width] + sums[:-height, :-width]
    best = np.argwhere(inside == inside.max())
    row, column = best[len(best) // 2]  # the middle one of ties
    return slice(row, row + height), slice(column, column + width)


def _zoom_images(shown: Sequence[tuple[str, Any]], window: tuple[slice, slice] | None) -> list[tuple[str, Any]]:
    return [] if window is None else [(f"{name}, enlarged", pixels[window]) for name, pixels in shown]


def _draw_row(line: Any, shown: Sequence[Any], window: tuple[slice, slice] | None, *, marked: Sequence[int]) -> None:
    """Draws named images in a row of axes; None leaves a place empty. The window is framed in the `marked` images."""
    for i, axes in enumerate(line):
        each = shown[i] if i < len(shown) else None
        if each is None:
            axes.set_axis_off()
            continue
        axes.imshow(each[1], interpolation="none", aspect="auto")
        axes.set_title(each[0], fontsize=8, pad=2)
        if window is not None and i in marked:
            rows, columns = window
            x = [columns.start, columns.stop, columns.stop, columns.start]
            y = [rows.start, rows.start, rows.stop, rows.stop]
            axes.fill(np.array(x) - 0.5, np.array(y) - 0.5, fill=False, edgecolor="white", linewidth=0.9)


def class_legend(classes: Sequence[str]) -> Figure:
    """Legend entries: class names with their colours."""
    lines = -(-(len(classes) + 2) // 6)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 0.3 + 0.2 * lines))
        _draw_class_legend(figure, classes, (), loc="center")
    return figure


def special_labels(labels: Array, count: int) -> list[str]:
    """Which of "unknown" and "void" occur among labels of `count` classes."""
    labels = np.asarray(labels).astype(int)
    unknown, other = labels == UNKNOWN, (labels >= count) | (labels < 0)
    return [name for name, here in (("unknown", unknown), ("void", other & ~unknown)) if here.any()]


def add_class_legend(figure: Figure, classes: Sequence[str], marks: Sequence[str]) -> None:
    """Adds this legend below a figure, which is enlarged for it; `marks`: as from `special_labels`."""
    width, height = figure.get_size_inches()
    room = 0.1 + 0.2 * -(-(len(classes) + 2) // 6)
    figure.set_size_inches(width, height + room)
    if isinstance(engine := figure.get_layout_engine(), ConstrainedLayoutEngine):
        engine.set(rect=(0, room / (height + room), 1, height / (height + room)))
    with matplotlib.rc_context(STYLE):
        _draw_class_legend(figure, classes, marks, loc="lower center")


def _draw_class_legend(
    figure: Figure, classes: Sequence[str], marks: Sequence[str], *, loc: Literal["center", "lower center"]
) -> None:
    colours = [*(class_colours(len(classes)) / 255), *(MARKS[name] for name in marks)]
    names = [*map(short_name, classes), *marks]
    patches = [Patch(color=colour, label=name) for colour, name in zip(colours, names, strict=True)]
    figure.legend(handles=patches, loc=loc, ncols=6, handlelength=1.2, fontsize=8)


def _add_legends(figure: Figure, classes: Sequence[str], largest: float, marks: Sequence[str]) -> None:
    """Adds the legend of classes and the two colour scales below the figure."""
    _draw_class_legend(figure, classes, marks, loc="lower center")
    width, height = figure.get_size_inches()
    base = 0.42 + 0.2 * (-(-(len(classes) + 2) // 6))
    for left, colours, top, label in (
        (0.3, CONFIDENCE, 1.0, "confidence (probability)"),
        (width / 2 + 0.2, EPISTEMIC, largest, "mutual information (nats)"),
    ):
        bar = figure.add_axes((left / width, base / height, (width / 2 - 0.6) / width, 0.09 / height))
        scale = matplotlib.cm.ScalarMappable(Normalize(0, top), colours)
        figure.colorbar(scale, cax=bar, orientation="horizontal", ticks=MaxNLocator(5))
        bar.tick_params(labelsize=7, length=2, pad=1)
        bar.set_title(label, fontsize=8, pad=2)


def _rgb(colour: str) -> np.ndarray:
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)], dtype=float)
