"""Reports: well-formed, self-contained, escaped, and with the numbers they were given."""

import base64
import csv
import io
import json
import re
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from html import escape
from html.parser import HTMLParser
from itertools import combinations

import matplotlib
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread

import dissensus as ds
from dissensus.bench.report import comparisons, report_figures, tables
from dissensus.bench.report.html_report import render_template, report_content
from dissensus.bench.report.measures import measures
from dissensus.bench.report.results import results_of_evaluations
from dissensus.bench.run import jobs
from dissensus.bench.run.run import Run
from dissensus.bench.task.config import load_task
from dissensus.evaluation.evaluate import evaluate
from dissensus.evaluation.evaluation import Evaluation
from dissensus.evaluation.robustness_curves import Corruptions
from dissensus.plots import charts
from dissensus.report import report
from refusals import refuses
from thinning import often

VOID = {"meta", "wbr", "link", "img", "br", "use", "path", "rect", "line", "circle"}
NASTY = "<script>alert('x')</script> & --> $\\frac$ | name"


class Checked(HTMLParser):
    """Every element closed by its own end, and everything that could ask for something from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action", "data")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        self.text.append(data)


def checked(text: str) -> Checked:
    parser = Checked()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


def classification(seed: int = 0, *, members: int = 2) -> Evaluation:
    """One that the test may change."""
    found = evaluated(seed, members)
    return replace(found, metrics=dict(found.metrics), arrays=dict(found.arrays))


@cache
def evaluated(seed: int, members: int) -> Evaluation:
    generator = torch.Generator().manual_seed(7)
    x = torch.randint(256, (30, 1, 16, 16), generator=generator).float() / 255
    y = torch.randint(3, (30,), generator=generator)
    torch.manual_seed(seed)
    posterior = ds.DeepEnsemble([ds.nets.MLP(256, 3, hidden=(8,)) for _ in range(members)])
    optimizer = torch.optim.Adam(posterior.parameters(), lr=0.02)
    ds.fit(posterior, [(x, y)], epochs=9, optimizer=optimizer, progress=False)  # better than chance, and not perfect
    spec = Corruptions(["fog", "contrast"], (1, 5))
    return evaluate(posterior, [(x, y)], ood={"dark": [(x / 4, y)], "light": [(x / 2 + 0.5, y)]}, corrupt=spec)


def regression(seed: int = 0) -> Evaluation:
    torch.manual_seed(seed)
    x, y = ds.data.x_sin_x(15)
    posterior = ds.DeepEnsemble([ds.nets.MLP(1, 1, hidden=(8,)) for _ in range(2)], likelihood=ds.Regression(0.5))
    return evaluate(posterior, [(x, y)], ood={"far": [(x + 9, y)]}, shift={"near": [(x + 1, y)]})


PAGE = ["map", "deep_ensemble"]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of the smallest bench with images, corruptions and foreign inputs."""
    folder = tmp_path_factory.mktemp("digits")
    task = load_task("digits", size="smoke", overrides=["training.epochs=8"])  # enough to be better than chance
    jobs.bench(task, methods=PAGE, out=folder)
    return folder


def test_the_page_is_well_formed_and_asks_for_nothing(page):
    text = (page / "report.html").read_text()
    found = checked(text)
    assert "script" not in found.tags
    assert found.links
    assert all(link.startswith(("data:", "#")) for link in found.links)
    assert "http://" not in text
    assert "https://" not in text
    assert "@import" not in text
    assert "url(" not in text.replace("url(#", "")
    assert len(found.ids) == len(set(found.ids))
    used = {link[1:] for link in found.links if link.startswith("#")}
    assert used <= set(found.ids)


def test_the_page_has_all_its_parts(page):
    found = checked((page / "report.html").read_text())
    text = " ".join(found.text)
    assert "A smoke test" in text
    headings = (
        "Results", "Differences to MAP", "Mixtures and their members", "AUROC by score", "By type of corruption",
        "How training went", "Which classes are confused?", "Does confidence match accuracy?",
        "Does it notice foreign inputs?", "How does refusing uncertain inputs help?", "What happens on corrupted inputs?",
        "The most and the least certain inputs", "What the numbers mean", "Provenance",
    )  # fmt: skip
    slugs = list(map(report_figures.slug, headings))
    contents = [link[1:] for link in found.links if link.startswith("#") and link[1:] in slugs]
    assert contents == slugs  # the contents list, in the order of the page
    places = [found.text.index(heading, found.text.index("Rule")) for heading in headings]  # after the answer
    assert places == sorted(places)
    assert found.text.index("Contents") < found.text.index("Rule")
    assert found.tags.count("details") >= len(headings)  # folded
    assert "deep_ensemble" not in text.replace("--methods", "").split("Provenance")[1]  # named as in the documentation
    # of every method: reliability and scores; then one ROC, one risk curve, three corruption curves, three costs, one of
    # training, and a confusion matrix of the method to take and of the baseline
    methods = len(PAGE)
    assert found.tags.count("svg") - methods - methods - 1 - 1 - 3 - 3 - 1 in (1, 2)
    assert found.tags.count("img") >= methods * 2 * 8
    assert charts.INK not in (page / "report.html").read_text()


def test_what_damage_does_is_said_of_the_inputs_that_were_damaged(page):
    runs = [Run.open(path) for path in sorted(page.glob("*-seed0"))]
    best = max((run.evaluate() for run in runs), key=lambda each: each.metrics["corrupt/accuracy"])
    clean, few = best.arrays["corrupt/clean/accuracy"], len(best.arrays["corrupt/example_accuracy"])
    assert few < len(best.arrays["test/nll"])
    for name in ("report.md", "report.html"):
        text = (page / name).read_text().replace("\N{NO-BREAK SPACE}", " ")
        assert f"{few} of the test inputs were corrupted" in text
        assert f"accuracy changes from {100 * clean:.2f} %" in text
        # that of single damages, not of all together: with more rows in a bin it is smaller by chance
        ends = [100 * float(best.arrays[f"corrupt/{each}ece"].mean()) for each in ("clean/", "")]
        assert best.metrics["corrupt/ece"] != pytest.approx(ends[1] / 100)
        assert f"calibration error changes from {ends[0]:.2f} % to {ends[1]:.2f} %" in text


def test_table_and_text_show_the_stored_numbers(page):
    with (page / "results.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    for name in ("report.md", "report.html"):
        text = (page / name).read_text()
        for row in rows.values():
            assert f"{float(row['nll']):.2f}" in text
            assert f"{100 * float(row['ood/fashion/auroc']):.0f}" in text
            assert f"{float(row['cost/memory_mb']):.1f}" in text


def test_names_are_escaped_wherever_they_stand(tmp_path):
    evaluations = {NASTY: classification(0), "plain": classification(1)}
    written = report(evaluations, tmp_path, title=NASTY)
    html = (tmp_path / "report.html").read_text()
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    found = checked(html)
    assert "script" not in found.tags
    assert any(NASTY in text for text in found.text)
    assert "<script" not in (tmp_path / "report.md").read_text()
    with (tmp_path / "results.csv").open() as file:
        assert [row["method"] for row in csv.DictReader(file)] == [NASTY, "plain"]
    assert [path.name for path in written] == ["results.csv", "report.md", "report.html"]


@pytest.mark.parametrize("suffix", [".csv", ".md", ".html", ".tex"])
def test_a_suffix_asks_for_one_file(undrawn, tmp_path, suffix):
    path = tmp_path / f"mine{suffix}"
    assert report({"one": regression()}, path) == [path]
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_report_of_regressions_is_complete(undrawn, tmp_path):
    report({"a": regression(0), "b": [regression(1), regression(2)]}, tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "Interval coverage" in text or "Do intervals cover" in text
    checked(text)
    with (tmp_path / "results.csv").open() as file:
        assert [(row["method"], row["seed"]) for row in csv.DictReader(file)] == [("a", "0"), ("b", "0"), ("b", "1")]


def test_a_report_of_segmentations_is_made_of_what_there_is(undrawn, tmp_path):
    network = torch.nn.Conv2d(3, 4, 3, padding=1)
    x, y = torch.rand(3, 3, 12, 12), torch.randint(4, (3, 12, 12))
    mask = torch.randint(2, (3, 12, 12))
    result = evaluate(ds.MAP(network), [(x, y)], ood={"odd": [(x, mask)]}, corrupt=["fog"])
    report({"one": result}, tmp_path)
    assert "mIoU" in (tmp_path / "report.md").read_text()
    checked((tmp_path / "report.html").read_text())


def test_the_best_is_marked_and_its_equals_are(tmp_path):
    good = classification(0)
    worse = shifted(good, 1.0)
    results = results_of_evaluations({"good": good, "worse": worse, "twin": good}, "t")
    found, draws = tables.measures_and_draws(results)
    rows = {(row.group, row.label): row for row in tables.main_table(results, found, draws).rows}
    nll = rows["test", "NLL"]
    assert [cell.best for cell in nll.cells] == [True, False, True]  # equal numbers are both best
    assert nll.cells[1].note == "p < 0.001"
    assert not nll.cells[1].equal
    against = tables.compare_with_baseline(results, found, draws, "worse")
    difference = tables.difference_table(results, found, against, "worse")
    first = next(row for row in difference.rows if row.label == "NLL" and row.group == "test")
    assert first.cells[0].text == "−1.000"
    assert not first.cells[0].best  # p < 0.001, but one seed says nothing of others


def test_nothing_in_a_title_or_a_name_is_live_in_markdown(tmp_path):
    title, name = "![x](http://e/p.png) <img src=x> \\[a](http://e)", "[m](http://e) `*`|"
    report({name: classification(0), "other": classification(1)}, tmp_path / "report.md", title=title)
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# !\\[x\\](http://e/p.png) &lt;img src=x> \\\\\\[a\\](http://e)\n")
    assert not re.search(r"(?<!\\)\[", text)
    assert "| \\[m\\](http://e) \\`\\*\\`\\| |" in text


def test_one_example_has_no_interval_and_is_cautioned_about(tmp_path):
    given = {name: Evaluation("classification", {"nll": v, "accuracy": 1.0}, {"test/nll": torch.tensor([v])}, "total")
             for name, v in (("a", 0.5521), ("b", 0.7))}  # fmt: skip
    report(given, tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text()
    assert "No advice: no paired test" in text
    assert "Few examples (test: 1)" in text
    assert "p = " not in text.replace("p ≥ 0.05", "")
    assert "p < 0.001" not in text


def test_the_best_coverage_is_the_one_nearest_its_target(tmp_path):
    def covered(share: float) -> Evaluation:
        inside = (torch.arange(50) < 50 * share).double()
        metrics = {"nll": 1.0, "rmse": 1.0, "coverage90": share}
        return Evaluation("regression", metrics, {"test/covered90": inside}, "total")

    results = results_of_evaluations({"all": covered(1.0), "near": covered(0.86)}, "t")
    found, draws = tables.measures_and_draws(results)
    row = next(r for r in tables.main_table(results, found, draws).rows if r.label.startswith("Coverage"))
    assert [cell.best for cell in row.cells] == [False, True]


def test_the_baseline_and_holm_are_the_callers_choice(tmp_path):
    evaluations = {"one": classification(0), "two": classification(1), "three": classification(2)}
    report(evaluations, tmp_path / "first.md")
    report(evaluations, tmp_path / "second.md", baseline="two", holm=True)
    first, second = ((tmp_path / f"{name}.md").read_text() for name in ("first", "second"))
    assert "Differences to one" in first
    assert "No correction for many comparisons" in first
    assert "Differences to two" in second
    assert "(Holm)" in second
    told = "as baseline of one, two, three, got 'tow'; did you mean 'two'"
    refuses(lambda: report(evaluations, tmp_path / "third.md", baseline="tow"), told)


def test_a_report_says_what_its_intervals_count_and_how_many_seeds_each_method_has(tmp_path):
    report({"one": classification(0), "two": classification(1)}, tmp_path / "single.md")
    assert "reflect test-set size only" in (tmp_path / "single.md").read_text()
    seeds = {"one": [classification(i) for i in range(3)], "two": [classification(i) for i in range(2)]}
    report(seeds, tmp_path / "several.md")
    text = (tmp_path / "several.md").read_text()
    assert "count test examples and 2 to 3 seeds" in text
    assert "| | one (3 seeds) | two (2 seeds) |" in text
    same = {name: several[:2] for name, several in seeds.items()}
    report(same, tmp_path / "same.md")
    assert "| | one | two |" in (tmp_path / "same.md").read_text()


def test_bad_input_is_one_clear_error(tmp_path):
    told = "expected a dict of name -> Evaluation, got Evaluation; pass"
    refuses(lambda: report(regression(), tmp_path), told, TypeError)
    refuses(lambda: report({}, tmp_path), "expected a dict of name -> Evaluation")
    refuses(lambda: report({"a": 3}, tmp_path), "expected an Evaluation for 'a', got int", TypeError)
    refuses(lambda: report({"a": classification(), "b": regression()}, tmp_path), "expected evaluations of one kind")
    refuses(lambda: report({"a": regression()}, tmp_path / "mine.pdf"), r"a \.csv, \.md, \.html or \.tex file")


def test_what_steers_a_terminal_reaches_no_file(tmp_path):
    report({"\x1b[31mred\x9b\x07": regression()}, tmp_path)
    for path in tmp_path.iterdir():
        text = path.read_text(encoding="utf-8")
        assert "[31mred" in text
        assert not any(character in text for character in "\x1b\x9b\x07\r")


def every_figure() -> dict[str, Figure]:
    """Each kind of figure, with numbers that ask for awkward tick labels."""
    names = ["deep_ensemble", "a name that is too long to stand anywhere in a figure"]
    palette = charts.colours(names)
    first, second = names
    edges = [i / 15 for i in range(16)]
    return {
        "reliability": charts.reliability_figure(
            [0] * 4 + [1] * 10 + [1996], edges[1:], edges[:-1], edges, title=f"{second}: ECE 12.34 %", colour="#4c8bc9"
        ),
        "total": charts.ood_histogram(
            [1e-12, 1e-5, 0.1], {second: [0.5, 1.0]}, score="total", title=second, colour="#4c8bc9"
        ),
        "energy": charts.ood_histogram([-3e3, -1.0], {first: [2e3]}, score="energy", title=first, colour="#4c8bc9"),
        "roc": charts.roc_figure(
            {first: ([0, 0.2, 1], [0, 0.9, 1], 0.9), second: ([0, 1], [0, 1], 0.5)}, title=second, palette=palette
        ),
        "risk": charts.risk_coverage_figure(
            {first: ([0.5, 1], [0.0, 0.034]), second: ([0.5, 1], [0.1, 0.2])}, risk="errors", percent=True, palette=palette,
            labelled=names,
        ),
        "corruption": charts.curve_figure([charts.corruption_panel(
            [1, 2, 3, 4, 5], {first: (0.99, [0.98, 0.97, 0.9, 0.8, 0.1]), second: (0.5, [0.4] * 5)},
            label="Accuracy", percent=True, palette=palette,
        )]),
        "cheap": charts.cost_scatter(
            {first: (9.5, 0.9685, (0.96, 0.97)), second: (39.0, 0.8, None)},
            cost="training (seconds)", quality="Accuracy", percent=True, palette=palette, better="high",
        ),
        "dear": charts.cost_scatter(
            {first: (0.001, -1.23456, None), second: (90_000.0, 1000.5, (900.0, 1100.0))},
            cost="training (seconds)", quality="NLL (nats)", percent=False, palette=palette, better="low",
        ),
        "coverage": charts.interval_coverage_figure({first: [0.1, 0.5, 0.9], second: [0.5, 0.5]}, palette=palette),
    }  # fmt: skip


def test_figures_are_labelled_by_text_that_neither_overlaps_nor_leaves_them_and_nothing_global_is_touched():
    before = dict(matplotlib.rcParams)
    for name, figure in every_figure().items():
        assert isinstance(figure, Figure), name
        assert figure.axes[-1].get_xlabel(), name
        assert all(axes.get_ylabel() for axes in figure.axes), name
        check_text(name, figure)
    assert dict(matplotlib.rcParams) == before


def check_text(name: str, figure: Figure) -> None:
    with matplotlib.rc_context(charts.STYLE):
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
        boxes = []
        for axes in figure.axes:
            low, high = axes.get_xlim()
            ticks = [t.label1 for t in axes.xaxis.get_major_ticks() if low <= t.get_loc() <= high]
            low, high = axes.get_ylim()
            ticks += [t.label1 for t in axes.yaxis.get_major_ticks() if low <= t.get_loc() <= high]
            labels = [*ticks, axes.xaxis.label, axes.yaxis.label, axes.title]
            shown = [text for text in labels if text.get_text() and text.get_visible()]
            boxes += [(text.get_text(), text.get_window_extent(renderer)) for text in shown]
    assert not any("math" in text or "$" in text for text, _ in boxes), name
    whole = figure.bbox
    outside = [t for t, box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > whole.x1 or box.y1 > whole.y1]
    assert outside == [], name
    overlapping = [(a, b) for (a, one), (b, two) in combinations(boxes, 2) if one.overlaps(two)]
    assert overlapping == [], name


def test_a_thinned_curve_keeps_its_ends_and_its_shape():
    x = torch.linspace(0, 1, 5000)
    thin_x, thin_y = charts._thin_curve(x, (x > 0.5).double())
    assert len(thin_x) <= 302
    assert (thin_x[0], thin_x[-1]) == (0, 1)
    step = next(float(a) for a, b in zip(thin_x, thin_y, strict=True) if b == 1)
    assert step == pytest.approx(0.5, abs=0.01)


def test_svg_of_a_page_takes_its_colour_and_has_names_of_its_own():
    figure = charts.roc_figure({"a": ([0, 1], [0, 1], 0.5)}, title="t", palette={"a": "#ff0000"})
    text = report_figures.svg(figure, "f7")
    found = checked(text)
    assert text.startswith("<svg")
    assert charts.INK not in text
    assert "currentColor" in text
    assert found.ids
    assert all(name.startswith("f7-") for name in found.ids)
    assert "xmlns" not in text


def test_images_become_pngs_whatever_their_units():
    def pixels(image):
        uri = report_figures.image_data_uri(image).removeprefix("data:image/png;base64,")
        return imread(io.BytesIO(base64.b64decode(uri)))

    levels = torch.arange(64, dtype=torch.uint8).reshape(1, 8, 8) * 4
    expected = levels[0].numpy() / 255
    for image in (levels, levels.float() / 255, levels.expand(3, 8, 8)):
        assert abs(pixels(image)[..., 0] - expected).max() < 0.5 / 255
    stretched = pixels(levels.float() - 100)[..., 0]
    assert (stretched.min(), stretched.max()) == (0, 1)


# ------------------------------------------------------------------------------------------ what cannot be compared


def trained_pair():
    torch.manual_seed(0)
    x, y = ds.data.two_moons(60, seed=0)
    posteriors = [ds.MAP(ds.nets.MLP(2, 2, hidden=(8,))) for _ in range(2)]
    for each in posteriors:
        ds.fit(each, [(x, y)], epochs=20, optimizer=torch.optim.Adam(each.parameters(), lr=0.05), progress=False)
    return posteriors, x, y


@pytest.mark.parametrize("count", [40, 60])
def test_methods_tested_on_other_examples_are_not_ranked(undrawn, tmp_path, count):
    (first, second), x, y = trained_pair()
    far = {"far": ds.data.Batches(x + 9, y, batch_size=20)}
    others = y[:count] if count < 60 else torch.zeros_like(y)  # fewer examples, or as many with other labels
    found = {
        "a": ds.evaluate(first, ds.data.Batches(x, y, batch_size=20), ood=far),
        "b": ds.evaluate(second, ds.data.Batches(x[:count], others, batch_size=20), ood=far),
    }
    report(found, tmp_path)
    for name in ("report.md", "report.html"):
        page = (tmp_path / name).read_text()
        assert "b was tested on other examples than a: the numbers do not say which is better" in page
        assert " best:" not in page
        assert "Differences to" not in page
    assert "**" not in (tmp_path / "report.md").read_text().split("## What the numbers mean")[0]


def test_methods_that_met_the_examples_in_another_order_are_ranked_and_not_compared(undrawn, tmp_path):
    (first, second), x, y = trained_pair()
    shuffled = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    found = {
        "a": ds.evaluate(first, ds.data.Batches(x, y, batch_size=20)),
        "b": ds.evaluate(second, ds.data.Batches(x[shuffled], y[shuffled], batch_size=20)),
    }
    report(found, tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert "b saw the examples in another order than a: differences cannot be tested by example" in page
    assert "No advice: no paired test" in page
    assert "**" in page.split("## What the numbers mean")[0]
    assert "Differences to" not in page
    report({"a": found["a"], "b": ds.evaluate(second, ds.data.Batches(x, y, batch_size=20))}, tmp_path / "same")
    assert "Differences to a" in (tmp_path / "same" / "report.md").read_text()


def test_a_report_says_what_methods_say_against_their_own_numbers(undrawn, tmp_path, caplog):
    torch.manual_seed(0)
    x, y = ds.data.two_moons(60, seed=0)
    near = ds.BatchEnsemble(ds.nets.MLP(2, 2, hidden=(8,)), members=4, modulation=ds.Modulation.normal(1, 1e-3))
    found = ds.evaluate(near, ds.data.Batches(x, y, batch_size=20))
    assert "4 members count as 1.0" in caplog.text  # a warning: seen without any setting
    assert list(found.cautions) == ["collapse"]
    report({"batch_ensemble": found}, tmp_path)
    for name in ("report.md", "report.html"):
        assert "batch_ensemble: 4 members count as 1.0" in (tmp_path / name).read_text()


@pytest.mark.parametrize("count", [3, 8])
def test_names_of_many_methods_stand_under_the_axes_and_those_of_few_among_the_data(count):
    names = [f"method{i}" for i in range(count)]
    palette = dict.fromkeys(names, "#000000")
    points = {name: (10.0 + i, 0.9 + 0.01 * i, None) for i, name in enumerate(names)}
    about = {"cost": "parameters", "quality": "accuracy", "percent": True, "better": "high"}
    figure = charts.cost_scatter(points, **about, palette=palette)
    FigureCanvasAgg(figure).draw()
    axes = figure.axes[0]
    assert (axes.get_legend() is None) == (count == 8)
    if count == 8:
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == names
        assert legend.get_window_extent().y1 <= axes.xaxis.get_label().get_window_extent().y0
        assert legend.get_window_extent().y0 >= 0


# ------------------------------------------------------------------------------------------ what is marked, and as what


def shifted(evaluation: Evaluation, by: float) -> Evaluation:
    """The same with the NLL of every example higher by about so much, and surely so."""
    nll = evaluation.arrays["test/nll"]
    more = by * (1 + 0.1 * torch.linspace(-1, 1, len(nll), dtype=nll.dtype))
    arrays = evaluation.arrays | {"test/nll": nll + more}
    return replace(evaluation, metrics=evaluation.metrics | {"nll": float((nll + more).mean())}, arrays=arrays)


@pytest.mark.parametrize(("by", "seeds", "shaded"), [(0.1, 2, True), (2e-5, 2, False), (0.1, 1, False)])
def test_a_best_number_is_shaded_over_several_seeds_and_by_enough_to_matter(by, seeds, shaded):
    one = classification(0)
    several = {"good": [one] * seeds, "worse": [shifted(one, by)] * seeds}
    results = results_of_evaluations(several, "t")
    found, draws = tables.measures_and_draws(results)
    against = tables.compare_with_baseline(results, found, draws, "worse")
    assert against.p_values["nll", "good"] < 0.001  # however small the difference is
    main = next(row for row in tables.main_table(results, found, draws).rows if row.label == "NLL")
    assert [cell.best for cell in main.cells] == [by > 1e-4, False]  # the same as shown
    assert [cell.clear for cell in main.cells] == [shaded, False]
    (cell,) = next(r for r in tables.difference_table(results, found, against, "worse").rows if r.label == "NLL").cells
    assert cell.clear == shaded


def guessing(kind: str) -> Evaluation:
    """One that answers no better than a constant, with the best calibration of all."""
    if kind == "regression":
        found = regression(0)
        y = found.arrays["test/target"].double().reshape(-1)
        arrays = found.arrays | {"test/squared_error": (y - y.mean()).square()}
        return replace(found, arrays=arrays, metrics=found.metrics | {"nll": -9.0, "coverage90": 0.9})
    found = classification(0)
    constant = (found.arrays["test/target"] == found.arrays["test/target"].mode().values).double()
    metrics = found.metrics | {"accuracy": float(constant.mean()), "ece": 0.0}
    return replace(found, arrays=found.arrays | {"test/correct": constant}, metrics=metrics)


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_nothing_of_a_method_near_chance_is_best_or_better(kind):
    good = classification(0)
    if kind == "regression":
        good = regression(0)
        good = replace(good, arrays=good.arrays | {"test/squared_error": good.arrays["test/squared_error"] * 1e-3})
    more = shifted(good, 0.1 if kind == "classification" else 9.0)
    given = {"guess": [guessing(kind)] * 2, "good": [good] * 2, "more": [more] * 2}
    results = results_of_evaluations(given, "t")
    assert results.near_chance == {"guess"}
    found, draws = tables.measures_and_draws(results)
    against = tables.compare_with_baseline(results, found, draws, "good")
    made = tables.main_table(results, found, draws), tables.difference_table(results, found, against, "good")
    cells = [row.cells[0] for table in made for row in table.rows]
    assert not any(cell.best or cell.clear or cell.equal for cell in cells)
    assert any(cell.best for row in made[0].rows for cell in row.cells[1:])
    assert made[0].columns[0] == "guess¹"
    assert made[0].notes[0].startswith("¹ Near chance")
    content = report_content(results, with_figures=False)
    assert not any("guess" in sentence for sentence in content["headline"])


def test_a_number_is_not_both_best_and_like_the_best_and_rounding_is_no_difference():
    one = classification(0)
    nll = one.arrays["test/nll"] + 1e-5 * torch.linspace(-1, 1.1, 30)  # larger on average, and not beyond chance
    near = replace(one, arrays=one.arrays | {"test/nll": nll}, metrics=one.metrics | {"nll": float(nll.mean())})
    results = results_of_evaluations({"a": one, "b": near, "c": shifted(one, 0.5)}, "t")
    found, draws = tables.measures_and_draws(results)
    row = next(row for row in tables.main_table(results, found, draws).rows if row.label == "NLL")
    assert [(cell.best, cell.equal) for cell in row.cells] == [(True, False), (True, False), (False, False)]
    accuracy = next(measure for measure in found if measure.key == "accuracy")
    spread = comparisons.Spread(0.01, 1, 0.01)
    compared = comparisons.MethodComparison(0.7, 0.1 + 0.2 + 0.4, spread, 2, "")
    assert compared.first != compared.second
    assert accuracy.text(compared.difference, signed=True) == "0.00"


def test_shares_are_alike_by_what_is_rarer_and_nothing_is_marked_where_all_numbers_are_the_same():
    one = classification(0)
    results = results_of_evaluations({"a": [one, one], "b": [one, one]}, "t")
    found, draws = tables.measures_and_draws(results)
    cells = [cell for row in tables.main_table(results, found, draws).rows for cell in row.cells]
    assert not any(cell.best or cell.clear for cell in cells)
    accuracy = next(m for m in measures(one) if m.key == "accuracy")
    for first, second, alike in ((0.96, 0.9605, 1), (0.96, 0.962, 0), (0.9995, 0.9998, 0), (0.5, 0.5, 1)):
        assert accuracy.is_negligible(first, second) == alike


def test_a_page_has_four_sentences_at_most_and_members_in_a_table(undrawn, tmp_path):
    results = results_of_evaluations({f"m{i}": classification(i) for i in range(3)}, "t")
    content = report_content(results)
    assert 1 <= sum(len(re.findall(r"\.(?= |$)", text)) for text in content["headline"]) <= 4
    members = next(each for each in content["chapters"] if each.title == "Mixtures and their members")
    assert len(members.tables[""].columns) == 3
    assert content["against_cost"].figures
    page = render_template("report.html.j2", content)
    assert page.index("<nav") < page.index('class="headline answer"') < page.index("<table") < page.index("<svg")


def test_latex_and_csv_of_every_table_are_on_the_page_and_have_its_numbers(undrawn, tmp_path):
    name = "50 % & <b>_{x}\\"
    given = {name: classification(0), "b": classification(1)}
    report(given, tmp_path)
    found = checked((tmp_path / "report.html").read_text())
    links = [link for link in found.links if link.startswith("data:text/")]
    assert len(links) == 2 * found.tags.count("table")
    kinds = {"csv": [], "x-tex": []}
    for link in links:
        head, _, body = link.partition(";base64,")
        kinds[head.removeprefix("data:text/")].append(base64.b64decode(body).decode())
    main = next(csv.reader(io.StringIO(kinds["csv"][1])))
    assert main[:5] == ["group", "measure", "unit", name, f"{name} interval"]
    nll = next(row for row in csv.DictReader(io.StringIO(kinds["csv"][1])) if row["measure"] == "NLL")
    report(given, tmp_path / "page.tex")
    tex = (tmp_path / "page.tex").read_text()
    assert all(each.strip() in tex for each in kinds["x-tex"])
    assert nll[name] in tex
    assert r"50 \% \& $<$b$>$\_\{x\}\textbackslash{}" in tex
    for table in kinds["x-tex"]:
        rows = [line for line in table.splitlines() if line.endswith(r"\\") and "multicolumn" not in line]
        columns = len(re.search(r"tabular}{(lr*)}", table)[1])
        assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {columns}
        assert len(re.findall(r"(?<!\\){", table)) == len(re.findall(r"(?<!\\)}", table))


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: no browser to open the page in")
@pytest.mark.parametrize("width", often([390], [1280]))
def test_a_browser_shows_the_page_without_a_word_and_nothing_leaves_it(page, tmp_path, width):
    """The page is framed, as wide as a screen or a phone; a script around it says what the browser laid out."""
    frame = f"""<body style="margin:0"><iframe id="f" srcdoc="{escape((page / "report.html").read_text())}"
        style="width:{width}px;height:900px;border:0"></iframe><pre id="said"></pre><script>
        document.getElementById("f").onload = event => {{
            const inner = event.target.contentDocument, names = [...inner.querySelectorAll("thead th")];
            document.getElementById("said").textContent = JSON.stringify({{
                wide: inner.documentElement.scrollWidth, tables: inner.querySelectorAll("table").length,
                broken: names.filter(th => th.firstChild && th.firstChild.nodeType === 3 && (() => {{
                    const range = inner.createRange(); range.selectNode(th.firstChild);
                    return range.getClientRects().length > 1; }})()).map(th => th.textContent),
                sticky: getComputedStyle(inner.querySelector('th[scope="row"]')).position }}) }}</script>"""
    (tmp_path / "frame.html").write_text(f"<!DOCTYPE html><meta charset='utf-8'>{frame}", encoding="utf-8")
    options = f"--headless --no-sandbox --disable-gpu --user-data-dir={tmp_path / 'profile'} --v=0"
    options += " --enable-logging=stderr --virtual-time-budget=4000 --window-size=1300,1000 --dump-dom"
    call = [CHROMIUM, *options.split(), (tmp_path / "frame.html").as_uri()]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    said = json.loads(re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.DOTALL)[1])
    assert said["tables"] > 3
    assert said["broken"] == []
    assert said["sticky"] == "sticky"
    assert said["wide"] <= width  # tables scroll, the page does not


def test_an_auroc_below_one_half_is_not_called_telling_apart(undrawn, tmp_path):
    one = classification(0)
    one.metrics.update({"ood/dark/auroc": 0.1, "ood/light/auroc": 0.9})
    report({"a": one}, tmp_path / "report.md")
    said = (tmp_path / "report.md").read_text().replace("\N{NO-BREAK SPACE}", " ")
    told = "No method separates dark from test inputs better than chance: a has AUROC 10.0 %; a separates light from"
    assert told in said
