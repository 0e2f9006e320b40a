"""Promises in reports: coverage, size, risk and acceptance in the table, and curves beside what was promised."""

import pytest
import torch

import dissensus as ds
from dissensus.bench.report.measures import measures
from dissensus.bench.report.report_figures import guarantee_section
from dissensus.bench.report.results import Results
from dissensus.plots.charts import colours


@pytest.fixture(scope="module")
def evaluations():
    torch.manual_seed(0)
    posterior = ds.MAP(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 3)))
    x = torch.rand(60, 3, 32, 32)
    y = torch.multinomial(posterior.predict(x).mean, 1)[:, 0]
    held = [(x[:40], posterior.predict(x[:40]).mean.argmax(1))]
    ds.conformal(posterior, held, level=0.8)
    ds.selective(posterior, held, risk=0.2)
    ds.ood_gate(posterior, held)
    spec = ds.Corruptions(["contrast"], severities=(1, 5))
    return {"first": [ds.evaluate(posterior, [(x[40:], y[40:])], corrupt=spec)]}


def test_the_table_has_what_was_promised_and_what_came_of_it(evaluations):
    found = {measure.key: measure for measure in measures(evaluations["first"][0])}
    assert found["conformal/coverage"].best == 0.8
    assert found["conformal/coverage"].samples == (("test/conformal/covered",),)
    assert {
        "conformal/size",
        "conformal/hard/coverage",
        "corrupt/conformal/coverage",
        "ood_gate/refused",
    } <= found.keys()
    assert found["conformal/size"].best is None  # empty sets are the smallest
    risk = found["selective/risk"]
    arrays = [evaluations["first"][0].arrays[name] for name in risk.samples[0]]
    value = risk.statistic([torch.ones(1, 20, dtype=torch.float64)], *arrays)
    assert float(value) == pytest.approx(evaluations["first"][0].metrics["selective/risk"])


def test_curves_have_a_line_at_what_was_promised(evaluations):
    results = Results("", "", evaluations, {"first": [{}]})
    title, _, figures = guarantee_section(results, colours(["first"]))
    assert title == "Are promises kept?"
    assert [words for words, _ in figures] == [
        "Coverage by difficulty: conformal",
        "Coverage under corruption: conformal",
        "Risk and acceptance: selective",
    ]
    for (_, figure), height in zip(figures, (0.8, 0.8, 0.2), strict=True):
        lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
        assert any(set(line.get_ydata()) == {height} for line in lines.values())


def test_without_promises_there_is_no_section(evaluations):
    plain = {"first": [ds.Evaluation("classification", {"accuracy": 1.0}, {}, "max_probability")]}
    assert guarantee_section(Results("", "", plain, {"first": [{}]}), colours(["first"])) is None
