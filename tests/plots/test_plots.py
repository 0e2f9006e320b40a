"""Figures, tables and maps: labelled, readable, and of the numbers they were given."""

from itertools import combinations

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import dissensus as ds
from dissensus.bench.report import figure_sections
from dissensus.bench.report.results import results_of_evaluations
from dissensus.plots import charts, segmentation_maps
from refusals import refuses
from thinning import often


def drawn(figure) -> Figure:
    """The figure, after it was really drawn."""
    assert isinstance(figure, Figure)
    assert figure.get_facecolor() == (1, 1, 1, 1)  # readable in a dark notebook
    FigureCanvasAgg(figure).draw()
    return figure


def line_of(figure: Figure, label: str):
    """(x, y) of the curve with this name."""
    handle = dict(zip(*reversed(figure.axes[0].get_legend_handles_labels()), strict=True))[label]
    return handle.lines[0].get_data()


@pytest.fixture(scope="module")
def classified():
    torch.manual_seed(0)
    x, y = torch.rand(40, 1, 8, 8), torch.randint(3, (40,))
    posterior = ds.DeepEnsemble([ds.nets.MLP(64, 3, hidden=(8,)) for _ in range(2)])
    corrupt = ds.Corruptions(["contrast"], (1, 5))
    return ds.evaluate(posterior, [(x, y)], ood={"dark ones": [(x / 4, y)]}, corrupt=corrupt)


def test_bands_are_the_mean_and_the_interval_of_the_mixture_in_order_of_x():
    torch.manual_seed(0)
    x = torch.randperm(20).double()[:, None]
    predictive = ds.RegressionPredictive(torch.randn(3, 20, 1).double(), torch.rand(3, 20, 1).double() + 0.1)
    figure = drawn(predictive.plot(x, seen=(x, x)))
    at, mean = line_of(figure, "mean, 90 % interval")
    assert np.array_equal(at, np.arange(20))
    assert np.allclose(mean, predictive.mean[x[:, 0].argsort(), 0])
    (band,) = figure.axes[0].collections
    ends = band.get_paths()[0].get_extents()
    lower, upper = predictive.interval(0.9)
    assert ends.y0 == pytest.approx(float(lower.min()))
    assert ends.y1 == pytest.approx(float(upper.max()))
    assert len(drawn(ds.RegressionPredictive(torch.randn(2, 5, 2), torch.ones(2, 5, 2)).plot()).axes) == 2


def test_a_plane_shows_the_total_uncertainty_of_every_point():
    points = torch.rand(30, 2)
    classes = ds.ClassificationPredictive(torch.randn(2, 30, 3).log_softmax(2))
    (mesh,) = drawn(classes.plot(points)).axes[0].collections
    assert np.allclose(mesh.get_array(), classes.total)
    numbers = ds.RegressionPredictive(torch.randn(2, 30, 1), torch.ones(2, 30, 1))
    mesh = drawn(numbers.plot(points, seen=(points[:5], torch.zeros(5)))).axes[0].collections[0]
    assert np.allclose(mesh.get_array(), numbers.total[:, 0].sqrt(), atol=1e-6)


def test_images_are_shown_with_what_is_said_of_them_and_pixels_as_maps():
    images = torch.rand(2, 1, 6, 5)
    answers = ds.ClassificationPredictive(torch.randn(2, 2, 4).log_softmax(2))
    titles = [axes.get_title() for axes in drawn(answers.plot(images, classes=list("abcd"))).axes][:2]
    best = [f"{'abcd'[int(row.argmax())]}: {100 * float(row.max()):.0f} %" for row in answers.mean]
    parts = [f"epistemic {e:.3f} of {t:.3f} nats" for e, t in zip(answers.epistemic, answers.total, strict=True)]
    assert [title.splitlines() for title in titles] == [list(lines) for lines in zip(best, parts, strict=True)]
    for seen in (torch.tensor([3, 0]), (images, torch.eye(4)[[3, 0]])):
        figure = answers.plot(images, seen=seen, classes=list("abcd"))
        assert [axes.get_title().splitlines()[1] for axes in figure.axes][:2] == ["truth: d", "truth: a"]
    refuses(lambda: answers.plot(images, seen=torch.zeros(7)), "expected the 2 targets of the prediction, got 7")
    pixels = ds.ClassificationPredictive(torch.randn(2, 2, 4, 6, 5).log_softmax(2))
    assert [len(each.axes) for each in (drawn(pixels.plot()), pixels.plot(images))] == [6, 8]


def test_void_pixels_of_the_truth_are_black_and_only_what_is_there_is_in_the_legend():
    images, truth = torch.rand(1, 1, 6, 5), torch.zeros(1, 6, 5, dtype=torch.uint8)
    pixels = ds.ClassificationPredictive(torch.randn(2, 1, 4, 6, 5).log_softmax(2))

    def names(figure):
        return [text.get_text() for text in figure.legends[0].get_texts()]

    assert names(pixels.plot(images, seen=truth, classes=list("abcd"))) == list("abcd")
    truth[0, 2] = 255
    figure = drawn(pixels.plot(images, seen=(images, truth), classes=list("abcd")))
    assert names(figure) == [*"abcd", "void"]
    assert len(figure.axes) == 5
    shown = {axes.get_title(): axes.images[0].get_array() for axes in reversed(figure.axes)}
    assert (shown["truth"][2] == 0).all()
    assert (shown["truth"][3] != 0).any()
    assert "confidence, 0 % (dark) to 100 %" in shown


def test_inputs_that_no_figure_is_for_are_one_clear_error():
    predictive = ds.ClassificationPredictive(torch.randn(2, 3, 4).log_softmax(2))
    refuses(lambda: predictive.plot(torch.rand(3, 7)), r"expected inputs on a line .* got \(3, 7\); pass x")
    refuses(lambda: predictive.plot(torch.rand(2, 2)), "expected the 3 inputs of the prediction, got 2")


@pytest.mark.parametrize(
    ("kind", "axes"), [("reliability", 2), ("risk", 1), ("ood", 1), ("corruptions", 3), ("gallery", 16)]
)
def test_an_evaluation_draws_what_it_measured(classified, kind, axes):
    figure = drawn(classified.plot(kind))
    assert len(figure.axes) == axes
    if kind == "reliability":
        assert figure.axes[0].get_title() == f"ECE {100 * classified.metrics['ece']:.2f} %"
    if kind == "gallery":
        frame = classified.examples()
        unsure = frame.sort_values("confidence").iloc[:8]
        wrong = frame[~frame["correct"]].sort_values("confidence", ascending=False).iloc[:8]
        for axes, (_, row) in zip(figure.axes, [*unsure.iterrows(), *wrong.iterrows()], strict=True):
            answer, truth, _ = axes.get_title().splitlines()
            assert (answer, truth) == (f"{row.prediction}: {100 * row.confidence:.0f} %", f"truth: {row.truth}")
        assert [axes.texts[0].get_text() for axes in figure.axes[::8]] == ["least certain", "most certain mistakes"]
    if kind == "corruptions":
        shown = figure.axes[0].lines[0].get_ydata()
        clean, damaged = (classified.arrays[f"corrupt/{key}/accuracy"] for key in ("clean", "by_severity"))
        assert np.allclose(shown, [float(clean), *damaged.tolist()])


def test_a_figure_of_what_was_not_measured_is_one_clear_error(classified):
    plain = ds.evaluate(ds.MAP(ds.nets.MLP(2, 2, hidden=(4,))), [(torch.rand(9, 2), torch.randint(2, (9,)))])
    for kind, words in (
        ("corruptions", "corruptions to plot, got one without; pass corrupt"),
        ("ood", "ood to plot"),
        ("gallery", "gallery to plot, got one without; evaluate a class"),
    ):
        refuses(lambda kind=kind: plain.plot(kind), f"expected an evaluation with {words}")
    refuses(lambda: classified.plot("rsk"), "did you mean 'risk'")


def test_evaluations_and_histories_are_short_in_text_and_whole_in_frames(classified):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed: pip install pandas")
    assert len(repr(classified).splitlines()) == 1
    assert f"accuracy {classified.metrics['accuracy']:.4f}" in repr(classified)
    assert "\nForeign inputs\n  ood/dark ones/auroc " in classified._repr_html_()
    assert classified.to_dataframe()["value"].to_dict() == classified.metrics
    results = results_of_evaluations({"a": [classified, classified], "b": classified}, "t").to_dataframe()
    assert isinstance(results, pandas.DataFrame)
    assert list(zip(results["method"], results["seed"], strict=True)) == [("a", 0), ("a", 1), ("b", 0)]
    assert set(results["nll"]) == {classified.metrics["nll"]}


def test_a_history_is_one_line_of_text_and_draws_losses_validation_and_what_was_kept(capsys):
    pytest.importorskip("pandas", reason="pandas is not installed: pip install pandas")
    torch.manual_seed(0)
    x, y = ds.data.two_moons(60, seed=0)
    posterior = ds.DeepEnsemble([ds.nets.MLP(2, 2, hidden=(8,)) for _ in range(3)])
    history = ds.fit(posterior, [(x, y)], epochs=12, validation=[(x, y)])
    assert len(capsys.readouterr().err.splitlines()) == 2  # the first epoch and the last
    assert repr(history).startswith(f"History(12 epochs, loss {history[-1].loss:.4g}, validation ")
    assert "\n" not in repr(history)
    frame = history.to_dataframe()
    assert frame["loss"].tolist() == [epoch.loss for epoch in history.epochs]
    assert frame[["member0", "member1", "member2"]].to_numpy().tolist() == [epoch.members for epoch in history.epochs]
    figure = drawn(history.plot())
    _, validation = line_of(figure, "validation NLL of the mixture")
    assert validation.tolist() == [epoch.validation for epoch in history.epochs]
    assert figure._repr_png_().startswith(b"\x89PNG")
    at, kept = line_of(figure, f"kept: epoch {history.best.epoch}")
    assert (at[0], kept[0]) == (history.best.epoch, history.best.validation)
    assert f"<td>{history[-1].loss:.4f}</td>" in history._repr_html_()


def test_predictives_have_a_row_for_each_of_the_first_inputs_in_a_notebook():
    predictive = ds.ClassificationPredictive(torch.randn(2, 9, 3).log_softmax(2))
    page = predictive._repr_html_()
    assert page.count("<tr>") == 6
    assert "the first 5 of 9 inputs" in page
    assert f"<td>{float(predictive.confidence[0]):.4g}</td>" in page
    numbers = ds.RegressionPredictive(torch.randn(2, 3, 1), torch.ones(2, 3, 1))
    pixels = ds.ClassificationPredictive(torch.randn(2, 3, 4, 6, 5).log_softmax(2))
    for other in (numbers, pixels):
        assert other._repr_html_().count("<tr>") == 4


# -------------------------------------------------------------------------------------- functions, training and sweeps
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
    shown = {"window": (-7, 7, -7, 7), "largest": 1.6, "seen": (points, np.arange(20) % 5)}
    return charts.plane_maps(dict.fromkeys(NAMES[:count], square), **shown)


def distances(count: int) -> Figure:
    epochs = np.arange(0, 3001, 100)
    curve = {name: (epochs, 1000.0 + i + np.exp(-epochs / 500)[None]) for i, name in enumerate(NAMES[:count])}
    rows = {"": dict.fromkeys(figure_sections.OVER_EPOCHS["distances"][1], curve)}
    return figure_sections.epoch_figure(rows, "distances", palette=charts.colours(NAMES))


def confusions(count: int) -> Figure:
    counts = np.random.default_rng(0).integers(0, 200, (count, count))
    return charts.confusion_figure(counts, [f"class {i}" for i in range(count)], title="NodeBNN")


def sweep(seeds: int) -> Figure:
    values = {f"forde-{alpha}": alpha for alpha in (0.0, 0.1, 0.2, 0.4, 0.8, 1.0)}
    numbers = 0.9 + 0.001 * np.arange(6 * seeds).reshape(seeds, 6)
    methods = dict(zip(values, numbers.T, strict=True)) | {"deep_ensemble": np.full(seeds, 0.9)}
    return figure_sections.sweep_figure(
        dict.fromkeys(("clean", "damaged", "both"), methods), values, key="alpha", label="forde", chosen="forde-0.4",
        palette=charts.colours(list(methods)),
    )  # fmt: skip


FIGURES = {
    **{f"bands of {n}": (bands, n) for n in (1, 3, 6, 10, 11)}, **{f"maps of {n}": (maps, n) for n in (1, 3, 6, 10)},
    "distances of 6": (distances, 6), "distances of 11": (distances, 11), "sweep of one seed": (sweep, 1),
    "sweep of three seeds": (sweep, 3), "confusions of 12": (confusions, 12), "confusions of 50": (confusions, 50),
}  # fmt: skip


OFTEN = [
    "bands of 11", "maps of 1", "maps of 10", "distances of 11", "sweep of one seed", "confusions of 12",
]  # fmt: skip  # the fewest and the most


@pytest.mark.parametrize("name", often(OFTEN, [name for name in FIGURES if name not in OFTEN]))
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
    path = bands(1).axes[0].collections[0].get_paths()[0].vertices
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


# ------------------------------------------------------------------------------------------------------ maps of scenes
def test_every_class_has_a_colour_of_its_own_and_so_have_void_and_unknown():
    labels = np.array([[*range(25), segmentation_maps.VOID, segmentation_maps.UNKNOWN]])
    colours = segmentation_maps.class_image(labels, 25)[0]
    assert len({tuple(each) for each in colours.tolist()}) == 27
    assert colours[-2].tolist() == [0, 0, 0]
    assert colours[-1].tolist() == [255, 0, 255]
    assert colours[3].tolist() == segmentation_maps.class_colours(4)[3].tolist()  # whatever the number of classes


def test_the_window_holds_most_of_the_mask():
    mask = np.zeros((30, 60), dtype=bool)
    mask[2:5, 3:6] = mask[20:28, 45:57] = True
    rows, columns = segmentation_maps.densest_window(mask)
    assert (rows.stop - rows.start, columns.stop - columns.start) == (10, 20)
    assert mask[rows, columns].sum() == 8 * 12
    assert segmentation_maps.densest_window(np.zeros((3, 3))) is None


@pytest.mark.parametrize("unknown", often([True], [False]))
def test_a_scene_has_a_row_for_every_method_and_pixels_where_they_were(unknown):
    truth = np.zeros((6, 9), dtype=int)
    truth[0], truth[4:, 6:] = segmentation_maps.VOID, segmentation_maps.UNKNOWN if unknown else 1
    image = np.arange(6 * 9 * 3, dtype=np.uint8).reshape(6, 9, 3)
    said = segmentation_maps.PixelMaps(np.abs(truth) % 2, np.full((6, 9), 0.5), np.zeros((6, 9)))
    figure = segmentation_maps.scene_figure(image, truth, {"map": said, "tradi": said}, classes=["road", "car"])
    FigureCanvasAgg(figure).draw()
    shown = {(axes.get_title(), i): axes.images[0].get_array() for i, axes in enumerate(figure.axes) if axes.images}
    assert len(shown) == (4 + 2 * 5 if unknown else 2 + 2 * 3)
    by_name = {name: pixels for (name, _), pixels in shown.items()}
    assert np.array_equal(by_name["image"], image)
    assert np.array_equal(by_name["truth"], segmentation_maps.class_image(truth, 2))
    if unknown:
        rows, columns = segmentation_maps.densest_window(truth == segmentation_maps.UNKNOWN)
        assert np.array_equal(by_name["image, enlarged"], image[rows, columns])
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["road", "car", *(["unknown"] if unknown else []), "void"]
