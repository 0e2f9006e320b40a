"""Figures of segmentations: the image, every method's classes, and its uncertainty in each pixel."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch

from dissensus.plots.charts import STYLE, Array, image_grid, short_name

VOID, UNKNOWN = -1, -2  # labels of pixels without a class, and of classes unknown in training
PALETTE = (
    "#7fb5e6", "#a65a4a", "#e8c547", "#6b6f7a", "#c9b79c", "#3f8f4f", "#e2711d", "#7d5ba6", "#2457c5", "#c8e05a",
    "#5fd0c5", "#d9828b", "#8a6d1c", "#1f6f6b", "#b9a7e0", "#4a2f27", "#f4a261", "#9bc995", "#31356e", "#b0323a",
)  # fmt: skip
VOID_COLOUR, UNKNOWN_COLOUR = "#000000", "#ff00ff"
MARKS = {"unknown": UNKNOWN_COLOUR, "void": VOID_COLOUR}
CONFIDENCE, EPISTEMIC = "cividis", "inferno"
ZOOM = 3  # a window has 1/ZOOM of the image's height and width


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
    return table[labels]  # −1 and −2 are the last rows


def heat_image(values: Array, *, largest: float, colours: str) -> np.ndarray:
    """(H, W, 3) uint8: values (H, W) from 0 to `largest` in a matplotlib colour map."""
    shown = matplotlib.colormaps[colours](Normalize(0, largest, clip=True)(np.asarray(values, dtype=float)))
    return (255 * np.asarray(shown)[..., :3]).round().astype(np.uint8)


def map_images(maps: PixelMaps, count: int, largest: float) -> list[tuple[str, Any]]:
    """(title, (H, W, 3)) of a prediction's maps, with the ends of their scales; `largest`: of the mutual information."""
    return [
        ("prediction", class_image(maps.prediction, count)),
        ("confidence, 0 % (dark) to 100 %", heat_image(maps.confidence, largest=1.0, colours=CONFIDENCE)),
        (f"epistemic, to {largest:.2g} nats", heat_image(maps.epistemic, largest=largest, colours=EPISTEMIC)),
    ]


def scene_figure(image: Array, target: Array, methods: Mapping[str, PixelMaps], *, classes: Sequence[str]) -> Figure:
    """Draws image (H, W, 3), truth (H, W) and a row per method; the window with most UNKNOWN pixels is enlarged."""
    target = np.asarray(target)
    largest = max(float(np.quantile(np.asarray(each.epistemic), 0.998)) for each in methods.values()) or 1.0
    rows: list[list[Any]] = [[("image", np.asarray(image)), ("truth", class_image(target, len(classes))), None]]
    rows += [map_images(maps, len(classes), largest) for maps in methods.values()]
    if window := densest_window(target == UNKNOWN):
        for row in rows:
            first, last = row[0], row[-1] or row[1]
            row += [(f"{name.partition(',')[0]}, enlarged", pixels[window]) for name, pixels in (first, last)]
    figure = image_grid(rows, ["", *map(short_name, methods)])
    framed = ("image", "truth", rows[1][2][0])
    for axes in figure.axes:
        if window is not None and axes.get_title() in framed:
            y, x = (np.array([part.start, part.stop]) - 0.5 for part in window)
            axes.fill(x[[0, 1, 1, 0]], y[[0, 0, 1, 1]], fill=False, edgecolor="white", linewidth=0.9)
    add_class_legend(figure, classes, special_labels(target, len(classes)))
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


def class_legend(classes: Sequence[str]) -> Figure:
    """Legend entries: class names with their colours."""
    figure = Figure(figsize=(9.0, 0.2))
    add_class_legend(figure, classes, ())
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
    colours = [*(class_colours(len(classes)) / 255), *(MARKS[name] for name in marks)]
    names = [*map(short_name, classes), *marks]
    patches = [Patch(color=colour, label=name) for colour, name in zip(colours, names, strict=True)]
    with matplotlib.rc_context(STYLE):
        figure.legend(handles=patches, loc="lower center", ncols=6, handlelength=1.2, fontsize=8)


def _rgb(colour: str) -> np.ndarray:
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)], dtype=float)
