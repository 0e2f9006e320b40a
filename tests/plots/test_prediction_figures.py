"""Predictives, evaluations and histories as figures, tables and text; figures show the numbers they were given."""

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import dissensus as ds
from dissensus.bench.report.results import results_of_evaluations
from refusals import refuses


def drawn(figure) -> Figure:
    """The figure, after it was really drawn."""
    assert isinstance(figure, Figure)
    assert figure.get_facecolor() == (1, 1, 1, 1)  # readable in a dark notebook
    FigureCanvasAgg(figure).draw()
    return figure


def line_of(figure: Figure, label: str):
    """(x, y) of the curve with this name."""
    axes = figure.axes[0]
    handle = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))[label]
    return handle.lines[0].get_data()


@pytest.fixture(scope="module")
def classified():
    torch.manual_seed(0)
    x, y = torch.rand(40, 1, 8, 8), torch.randint(3, (40,))
    posterior = ds.DeepEnsemble([ds.nets.MLP(64, 3, hidden=(8,)) for _ in range(2)])
    return ds.evaluate(
        posterior, [(x, y)], ood={"dark ones": [(x / 4, y)]}, corrupt=ds.Corruptions(["contrast"], (1, 5))
    )


def test_bands_are_the_mean_and_the_interval_of_the_mixture_in_order_of_x():
    torch.manual_seed(0)
    x = torch.randperm(20).double()[:, None]
    predictive = ds.RegressionPredictive(torch.randn(3, 20, 1).double(), torch.rand(3, 20, 1).double() + 0.1)
    figure = drawn(predictive.plot(x, seen=(x, x)))
    at, mean = line_of(figure, "mean, 90 % interval")
    assert np.array_equal(at, np.arange(20))
    order = x[:, 0].argsort()
    assert np.allclose(mean, predictive.mean[order, 0])
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
    images = torch.rand(3, 1, 6, 5)
    answers = ds.ClassificationPredictive(torch.randn(2, 3, 4).log_softmax(2))
    titles = [axes.get_title() for axes in drawn(answers.plot(images, classes=list("abcd"))).axes][:3]
    best = [f"{'abcd'[int(row.argmax())]} {100 * float(row.max()):.0f} %" for row in answers.mean]
    assert [title.splitlines()[0] for title in titles] == best
    pixels = ds.ClassificationPredictive(torch.randn(2, 3, 4, 6, 5).log_softmax(2))
    assert [len(drawn(each).axes) for each in (pixels.plot(), pixels.plot(images))] == [9, 12]
    assert len(drawn(pixels.plot(images, seen=(images, torch.zeros(3, 6, 5, dtype=torch.long)))).axes) == 15


def test_void_pixels_of_the_truth_are_black_and_only_what_is_there_is_in_the_legend():
    images, truth = torch.rand(2, 1, 6, 5), torch.zeros(2, 6, 5, dtype=torch.uint8)
    pixels = ds.ClassificationPredictive(torch.randn(2, 2, 4, 6, 5).log_softmax(2))

    def names(figure):
        return [text.get_text() for text in figure.legends[0].get_texts()]

    assert names(drawn(pixels.plot(images, seen=(images, truth), classes=list("abcd")))) == list("abcd")
    truth[0, 2] = 255
    figure = drawn(pixels.plot(images, seen=(images, truth), classes=list("abcd")))
    assert names(figure) == [*"abcd", "void"]
    shown = {axes.get_title(): axes.images[0].get_array() for axes in reversed(figure.axes)}
    assert (shown["truth"][2] == 0).all()
    assert (shown["truth"][3] != 0).any()
    assert "confidence, 0 (dark) to 1" in shown


def test_inputs_that_no_figure_is_for_are_one_clear_error():
    predictive = ds.ClassificationPredictive(torch.randn(2, 3, 4).log_softmax(2))
    refuses(lambda: predictive.plot(torch.rand(3, 7)), r"expected inputs on a line .* got \(3, 7\); pass x")
    refuses(lambda: predictive.plot(torch.rand(2, 2)), "expected the 3 inputs of the prediction, got 2")


@pytest.mark.parametrize(("kind", "axes"), [("reliability", 2), ("risk", 1), ("ood", 1), ("corruptions", 3)])
def test_an_evaluation_draws_what_it_measured(classified, kind, axes):
    figure = drawn(classified.plot(kind))
    assert len(figure.axes) == axes
    if kind == "reliability":
        assert figure.axes[0].get_title() == f"ECE {100 * classified.metrics['ece']:.2f} %"
    if kind == "corruptions":
        shown = figure.axes[0].lines[0].get_ydata()
        clean, damaged = (classified.arrays[f"corrupt/{key}/accuracy"] for key in ("clean", "by_severity"))
        assert np.allclose(shown, [float(clean), *damaged.tolist()])


def test_a_figure_of_what_was_not_measured_is_one_clear_error(classified):
    plain = ds.evaluate(ds.MAP(ds.nets.MLP(2, 2, hidden=(4,))), [(torch.rand(9, 2), torch.randint(2, (9,)))])
    with pytest.raises(
        ValueError, match="expected an evaluation with corruptions to plot, got one without; pass corrupt"
    ):
        plain.plot("corruptions")
    refuses(lambda: plain.plot("ood"), "expected an evaluation with ood to plot")
    refuses(lambda: classified.plot("rsk"), "did you mean 'risk'")


def test_evaluations_and_histories_are_short_in_text_and_whole_in_frames(classified):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed: pip install pandas")
    assert len(repr(classified).splitlines()) == 1
    assert f"accuracy {classified.metrics['accuracy']:.4f}" in repr(classified)
    assert "<td style='text-align:left'>ood/dark ones/auroc</td>" in classified._repr_html_()
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
    at, kept = line_of(figure, f"kept: epoch {history.best + 1}")
    assert (at[0], kept[0]) == (history.best + 1, history[history.best].validation)
    assert f"<td>{history[-1].loss:.4f}</td>" in history._repr_html_()


def test_predictives_have_a_row_for_each_of_the_first_inputs_in_a_notebook():
    predictive = ds.ClassificationPredictive(torch.randn(2, 9, 3).log_softmax(2))
    page = predictive._repr_html_()
    assert page.count("<tr>") == 6
    assert "the first 5 of 9 inputs" in page
    assert f"<td>{float(predictive.confidence[0]):.4g}</td>" in page
    for other in (
        ds.RegressionPredictive(torch.randn(2, 3, 1), torch.ones(2, 3, 1)),
        ds.ClassificationPredictive(torch.randn(2, 3, 4, 6, 5).log_softmax(2)),
    ):
        assert other._repr_html_().count("<tr>") == 4
