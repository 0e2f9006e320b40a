"""Figures of functions, of training and of sweeps: labelled, readable, and of what they were given."""

from itertools import combinations

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dissensus.bench.report import figure_sections
from dissensus.plots import charts

NAMES = ["deep_ensemble", "a name that is too long to stand anywhere", *(f"forde-variant{i}" for i in range(9))]


def bands(count: int) -> Figure:
    where = np.linspace(-10, 10, 51)
    members = np.stack([np.sin(where + i) for i in range(4)])
    band = charts.Band(members.mean(0), members.std(0), members)
    methods = dict.fromkeys(NAMES[:count], band)
    return charts.band_figure(where, methods, seen=(where[::5], np.sin(where[::5])), palette=charts.colours(NAMES))


def maps(count: int) -> Figure:
    square = np.random.default_rng(0).uniform(0, 1.6, (9, 9))
    points = np.random.default_rng(1).normal(size=(20, 2))
    return charts.entropy_maps(
        dict.fromkeys(NAMES[:count], square), window=(-7, 7, -7, 7), largest=1.6, seen=(points, np.arange(20) % 5)
    )


def distances(count: int) -> Figure:
    epochs = np.arange(0, 3001, 100)
    curve = {name: (epochs, 1000.0 + i + np.exp(-epochs / 500)) for i, name in enumerate(NAMES[:count])}
    return figure_sections.distance_figure(dict.fromkeys(figure_sections.SPACES, curve), palette=charts.colours(NAMES))


def sweep(seeds: int) -> Figure:
    values = {f"forde-{alpha}": alpha for alpha in (0.0, 0.1, 0.2, 0.4, 0.8, 1.0)}
    numbers = 0.9 + 0.001 * np.arange(6 * seeds).reshape(seeds, 6)
    methods = dict(zip(values, numbers.T, strict=True)) | {"deep_ensemble": np.full(seeds, 0.9)}
    return figure_sections.sweep_figure(
        dict.fromkeys(("clean", "damaged", "both"), methods), values, key="alpha", label="forde", chosen="forde-0.4",
        palette=charts.colours(list(methods)),
    )  # fmt: skip


FIGURES = {
    **{f"bands of {n}": (bands, n) for n in (1, 3, 6, 10, 11)},
    **{f"maps of {n}": (maps, n) for n in (1, 3, 6, 10)},
    "distances of 6": (distances, 6),
    "distances of 11": (distances, 11),
    "sweep of one seed": (sweep, 1),
    "sweep of three seeds": (sweep, 3),
}


BETWEEN = (
    "bands of 3",
    "bands of 6",
    "bands of 10",
    "distances of 6",
    "maps of 3",
    "maps of 6",
)  # fewer and more methods are drawn every time


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in BETWEEN else name for name in FIGURES]
)
def test_the_text_of_a_figure_neither_overlaps_nor_leaves_it(name):
    make, count = FIGURES[name]
    before = dict(matplotlib.rcParams)
    figure = make(count)
    assert dict(matplotlib.rcParams) == before
    with matplotlib.rc_context(charts.STYLE):
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
        boxes = []
        for axes in figure.axes:
            if not axes.axison:
                continue
            labels = [axes.title, axes.xaxis.label, axes.yaxis.label]
            for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
                for tick in axis.get_major_ticks():
                    if low <= tick.get_loc() <= high:
                        labels += [label for label in (tick.label1, tick.label2) if label.get_visible()]
            boxes += [(t.get_text(), t.get_window_extent(renderer)) for t in labels if t.get_text() and t.get_visible()]
        for legend in figure.legends:
            boxes.append(("legend", legend.get_window_extent(renderer)))
    whole = figure.bbox
    outside = [t for t, box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > whole.x1 or box.y1 > whole.y1]
    assert outside == []
    overlapping = [(a, b) for (a, one), (b, two) in combinations(boxes, 2) if one.overlaps(two)]
    assert overlapping == []


def test_methods_share_their_scales():
    for figure in (bands(6), maps(6)):
        shown = [axes for axes in figure.axes if axes.axison][:6]
        assert len({axes.get_xlim() for axes in shown}) == 1
        assert len({axes.get_ylim() for axes in shown}) == 1
    images = [axes.images[0] for axes in maps(6).axes if axes.images]
    assert {image.get_clim() for image in images} == {(0, 1.6)}


def test_a_band_is_three_standard_deviations_about_the_mean():
    figure = bands(1)
    path = figure.axes[0].collections[0].get_paths()[0].vertices
    where = np.linspace(-10, 10, 51)
    members = np.stack([np.sin(where + i) for i in range(4)])
    mean, sd = members.mean(0), members.std(0)
    for x, low, high in zip(where[1:-1], (mean - 3 * sd)[1:-1], (mean + 3 * sd)[1:-1], strict=True):
        found = path[np.isclose(path[:, 0], x), 1]
        assert found.min() == pytest.approx(low)
        assert found.max() == pytest.approx(high)


def test_the_chosen_value_is_marked_on_the_curve():
    figure = sweep(3)
    marked = next(line for line in figure.axes[0].lines if line.get_markerfacecolor() == "none")
    values = 0.9 + 0.001 * np.arange(18).reshape(3, 6)
    assert marked.get_xdata() == [0.4]
    assert marked.get_ydata() == pytest.approx([values.mean(0)[3]])
    low, high = figure.axes[0].get_ylim()
    assert high - low >= figure_sections.SPAN


def test_more_methods_than_colours_still_have_one_each():
    names = [f"method{i}" for i in range(25)]
    found = charts.colours(names)
    assert len(set(found.values())) == len(names)
    assert charts.colours(names[:3]) == {name: found[name] for name in names[:3]}


@pytest.mark.parametrize("channels", [1, 3])
def test_implicit_corruptions_stand_beside_the_image_with_their_change_below(channels):
    rng = np.random.default_rng(0)
    before = rng.random((2, channels, 5, 6))
    after = before[:, None] + 0.1 * rng.standard_normal((2, 3, channels, 5, 6))
    figure = charts.implicit_figure(before, after, largest=0.2, title="a method")
    shown = [axes.images[0].get_array() if axes.images else None for axes in figure.axes]
    assert len(shown) == 2 * 2 * (1 + 3)  # two rows for each of two images
    assert shown[4] is None  # nothing has changed in the image itself
    np.testing.assert_allclose(shown[0][..., 0], before[0, 0])
    np.testing.assert_allclose(shown[5], (after[0, 0] - before[0]).mean(0))
    np.testing.assert_allclose(shown[8 + 4 + 2], (after[1, 1] - before[1]).mean(0))
    assert {axes.images[0].get_clim() for axes in (figure.axes[5], figure.axes[14])} == {(-0.2, 0.2)}
