"""Sentences, results.csv, published numbers and promises in reports."""

import csv
import re
from dataclasses import replace

import pytest
import torch

import dissensus as ds
from dissensus import metrics
from dissensus.bench.report.html_report import report_content
from dissensus.bench.report.measures import measures
from dissensus.bench.report.prose import question_sentences
from dissensus.bench.report.published_numbers import (
    PublishedNumber,
    orderings,
    published_numbers,
    reference_sentences,
    reference_table,
)
from dissensus.bench.report.recommendation import recommend
from dissensus.bench.report.report_figures import guarantee_section
from dissensus.bench.report.results import (
    CRITERION,
    Results,
    SettingSweep,
    accuracies,
    csv_text,
    results_of_evaluations,
    sweep_of,
    sweep_sentence,
    table_rows,
    table_text,
)
from dissensus.bench.report.tables import measures_and_draws
from dissensus.bench.run.evaluate_run import with_choice
from dissensus.bench.run.jobs import bench, report_runs
from dissensus.bench.task.config import load_task
from dissensus.evaluation.evaluation import Evaluation
from dissensus.evaluation.robustness_curves import CorruptedCounts
from dissensus.plots.charts import colours
from refusals import refuses


# ----------------------------------------------------------------------------------------------------------- sentences
def evaluation(**metrics: float) -> Evaluation:
    return Evaluation("regression", {key.replace("__", "/"): value for key, value in metrics.items()}, {}, "total")


def results(methods: dict[str, list[Evaluation]], **more) -> Results:
    origins = {name: [{"method": name, "seed": i} for i in range(len(each))] for name, each in methods.items()}
    return Results("", "", methods, origins, **more)


def regions(*values: float, rmse: float = 1.0) -> list[Evaluation]:
    return [evaluation(region__between__sd=value, rmse=rmse) for value in values]


def test_seeds_on_which_the_focus_is_larger_are_counted_pair_by_pair():
    methods = {
        "deep_ensemble": regions(1.0, 2.0, 3.0),
        "svgd": regions(0.5, 0.5, 0.5, rmse=0.8),
        "lit": regions(0.5, 0.5, 0.5, rmse=1.2),  # a larger error than forde's does not make forde's worse
        "forde": regions(1.5, 1.5, 3.5),
        "forde-sample": regions(9.0, 9.0, 9.0),
    }
    said = question_sentences(results(methods, focus="forde", baseline="deep_ensemble"))
    assert said == [
        "Between the data, forde has a mean standard deviation of 2.167: larger than that of "
        "svgd (0.5) and lit (0.5) on 3 of 3 seeds; of deep_ensemble (2) on 2 of 3 seeds.",
        "The RMSE of forde's mean, 1, is at most 15 % above that of "
        "deep_ensemble (1) and lit (1.2) on 3 of 3 seeds; of svgd (0.8) on 0 of 3 seeds.",
    ]


def test_only_seeds_that_both_methods_have_are_compared():
    methods = {"deep_ensemble": regions(1.0), "forde": regions(2.0, 0.0)}
    assert "on 1 of 1 seed." in question_sentences(results(methods, focus="forde"))[0]


def test_twice_the_uncertainty_of_the_baseline_is_counted():
    def entropies(*values: float) -> list[Evaluation]:
        return [evaluation(region__off_data__total=value) for value in values]

    methods = {"deep_ensemble": entropies(0.5, 0.5), "forde": entropies(1.0, 0.8)}
    said = question_sentences(results(methods, focus="forde", baseline="deep_ensemble"))
    wanted = "forde's total uncertainty is 1.80 times that of deep_ensemble; at least twice on 1 of 2 seeds."
    assert said[-1] == f"Off the data, {wanted}"


def test_nothing_is_claimed_without_a_focus_or_regions():
    assert question_sentences(results({"forde": regions(1.0), "map": regions(2.0)})) == []
    assert question_sentences(results({"forde": [evaluation(rmse=1.0)]}, focus="forde")) == []


def swept(validation: dict[str, list[float]], test: dict[str, float]) -> Results:
    methods = {
        name: [
            Evaluation(
                "classification",
                {
                    CRITERION: value,
                    "accuracy": test[name],
                    **{f"corrupt/severity{s}/accuracy": s / 10 for s in range(1, 6)},
                },
                {},
                "total",
            )
            for value in values
        ]
        for name, values in validation.items()
    }
    methods["deep_ensemble"] = [Evaluation("classification", {"accuracy": 0.5}, {}, "total")]
    values = {"forde": 0.0, "forde-a": 0.4, "forde-b": 1.0}
    return results(methods, baseline="deep_ensemble", sweep=SettingSweep("alpha", values))


def test_the_choice_is_made_on_validation_rows_whatever_the_test_says():
    validation = {"forde": [0.6, 0.6], "forde-b": [0.9, 0.1], "forde-a": [0.7, 0.6]}
    found = swept(validation, {"forde": 0.1, "forde-a": 0.2, "forde-b": 0.9})
    sweep = sweep_of(found)
    assert (sweep.chosen, sweep.key, sweep.base) == ("forde-a", "alpha", "forde")
    assert list(sweep.values.values()) == [0.0, 0.4, 1.0]
    said = sweep_sentence(found, sweep)
    assert "alpha = 0.4 is chosen of 0, 0.4, 1" in said
    assert "65.00 %" in said
    assert (
        "20.00 % (clean), 20.00 % (severities 1–3), 45.00 % (severities 4–5); deep_ensemble gives 50.00 % (clean)"
        in said
    )
    assert question_sentences(found) == [said]


def test_equal_values_choose_the_smallest_and_one_value_is_no_sweep():
    names = ("forde", "forde-a", "forde-b")
    found = swept({name: [0.5] for name in names}, dict.fromkeys(names, 0.1))
    assert sweep_of(found).chosen == "forde"
    assert sweep_of(results({"forde": [evaluation(rmse=1.0)]}, sweep=SettingSweep("alpha", {"forde": 0.0}))) is None


def test_severities_are_grouped_as_far_as_they_were_measured():
    metrics = {"accuracy": 0.9, "corrupt/severity1/accuracy": 0.8, "corrupt/severity3/accuracy": 0.6}
    assert accuracies(Evaluation("classification", metrics, {}, "total")) == {
        "clean": 0.9,
        "severities 1–3": pytest.approx(0.7),
    }


def test_clean_accuracy_beside_severities_is_of_the_rows_that_were_damaged():
    metrics = {"accuracy": 0.9, "corrupt/severity1/accuracy": 0.8}
    arrays = {"corrupt/clean/accuracy": torch.tensor(0.85, dtype=torch.float64)}
    found = accuracies(Evaluation("classification", metrics, arrays, "total"))
    assert found == {"clean": 0.85, "severities 1–3": 0.8}


def test_what_is_chosen_by_is_measured_on_validation_rows():
    bins = torch.zeros(1, 1, 15, dtype=torch.float64)
    bins[0, 0, 14] = 4.0
    correct = torch.zeros_like(bins)
    correct[0, 0, 14] = 3.0
    counts = CorruptedCounts(
        types=("fog",), severities=(1,), nll=torch.full((1, 1), 2.0, dtype=torch.float64), counts=bins,
        confidence=bins, correct=correct, clean=torch.tensor([1.0, 0.25, 0.0], dtype=torch.float64),
        example_accuracy=torch.ones(4), example_nll=torch.ones(4), examples=torch.ones(3, 1, 1, 4),
    )  # fmt: skip
    found = with_choice(evaluation(rmse=1.0), counts).metrics
    assert found == {
        "rmse": 1.0, "validation/accuracy": 1.0, "validation/nll": 0.25, "validation/ece": 0.0,
        "validation/corrupt/accuracy": 0.75, "validation/corrupt/nll": 0.5, "validation/corrupt/ece": 0.25,
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------------- results.csv
def test_a_spreadsheet_runs_no_cell_and_reading_back_gives_every_text(tmp_path):
    texts = [
        *['=HYPERLINK("http://x","y")', "+1+cmd", "-a", "@x", "a=b"], *["'=x", "''-1", "'plain", "-1_0"], "\tx", "\rx",
        "",
    ]  # fmt: skip
    numbers = [-1.5, 2.0, float("-inf"), 1e-300, -3]
    rows = [{"=column": text, "n": repr(number)} for text in texts for number in numbers]
    path = tmp_path / "t.csv"
    path.write_text(table_text(["=column", "n"], rows), encoding="utf-8", newline="")
    with path.open(newline="") as file:
        cells = [cell for line in csv.reader(file) for cell in line]
    for cell in cells:
        if cell[:1] in tuple("=+-@\t\r"):
            float(cell)  # a number, or it would be run
    assert table_rows(path) == rows


def test_a_method_called_like_a_formula_is_a_text_in_the_table():
    one = Evaluation("classification", {"nll": -1.0}, {"test/nll": torch.ones(3)}, "max_probability")
    assert csv_text(results_of_evaluations({"=1+1": one}, "t")) == "method,seed,nll\n'=1+1,0,-1.0\n"


# --------------------------------------------------------------------------------------------------- published numbers
REFERENCE = {
    "source": "Somebody 2020",
    "map": {"accuracy": 0.90, "nll": 0.50, "ood/far/auroc": 0.80},
    "deep_ensemble": {"accuracy": [0.95, 0.01], "nll": 0.40, "ood/far/auroc": 0.70},
    "swag": {"accuracy": 0.99},
}


def evaluation_of(accuracy: float, nll: float, auroc: float) -> Evaluation:
    correct = (torch.arange(100) < 100 * accuracy).double()
    metrics = {"accuracy": accuracy, "nll": nll, "ood/far/auroc": auroc}
    arrays = {"test/correct": correct, "test/nll": nll * torch.linspace(0.9, 1.1, 100, dtype=torch.float64)}
    return Evaluation("classification", metrics, arrays, score="max_probability", ood=("far",))


def results_beside(reference=REFERENCE, **methods: tuple[float, float, float]) -> Results:
    found = {name: [evaluation_of(*values)] for name, values in methods.items()}
    origins = {name: [{}] for name in found}
    return Results("title", "", found, origins, baseline="map", reference=reference)


def test_numbers_come_with_or_without_an_error():
    found = published_numbers(REFERENCE)
    assert found["deep_ensemble"]["accuracy"] == PublishedNumber(0.95, 0.01)
    assert found["map"]["nll"] == PublishedNumber(0.5, None)
    assert list(found) == ["map", "deep_ensemble", "swag"]


def test_the_table_has_ours_and_theirs_of_the_methods_that_ran():
    given = results_beside(map=(0.91, 0.45, 0.85), deep_ensemble=(0.96, 0.35, 0.9))
    table = reference_table(given, measures(given.methods["map"][0]))
    assert table.columns == ["map", "deep_ensemble"]
    shown = {row.label: [(cell.text, cell.note) for cell in row.cells] for row in table.rows}
    assert shown["Accuracy"] == [("91.00", "published 90.00"), ("96.00", "published 95.00 ± 1.00")]
    assert shown["NLL"][1] == ("0.3500", "published 0.4000")
    assert reference_table(results_beside({}, map=(0.9, 0.5, 0.8)), []) is None
    assert reference_table(results_beside({"swag": {"nll": 1.0}}, map=(0.9, 0.5, 0.8)), []) is None


def test_a_sentence_says_where_an_ordering_is_not_as_published():
    # AUROC: published, the ensemble is behind (70 against 80 %); here ahead. The rest is as published.
    given = results_beside(map=(0.91, 0.45, 0.85), deep_ensemble=(0.96, 0.35, 0.9))
    count, only = reference_sentences(given, measures(given.methods["map"][0]))
    assert count == "1 of 3 orderings of two methods are not as published."
    assert "AUROC" in only
    assert "published, map is ahead of deep_ensemble (80.00 against 70.00 %); here it is behind (85.00 against" in only
    assert "no interval" in only
    # Low is good for NLL: 0.55 is behind 0.45 here, where the published 0.40 is ahead of 0.50.
    given = results_beside(map=(0.91, 0.45, 0.85), deep_ensemble=(0.96, 0.55, 0.7))
    _, only = reference_sentences(given, measures(given.methods["map"][0]))
    assert only.startswith(
        "NLL: published, deep_ensemble is ahead of map (0.4000 against 0.5000 nats); here it is behind (0.5500 against"
    )
    # differences 0.09 … 0.11: a standard error of 0.1 · 0.2 / √(12 · 99) = 0.00058
    assert re.search(
        r"difference \+0.1000, \+0.098\d to \+0.101\d, beyond chance, paired test, p < 0.001; counts test examples",
        only,
    )


def test_every_pair_is_looked_at_not_only_pairs_with_the_baseline():
    reference = {"deep_ensemble": {"nll": 0.1}, "swag": {"nll": 0.2}, "tradi": {"nll": 0.3}, "mc_dropout": {"nll": 0.3}}
    # neither has a published number for the baseline; tradi and mc_dropout have no published order
    nll = {"map": 0.1, "deep_ensemble": 0.2, "swag": 0.9, "tradi": 0.5, "mc_dropout": 0.7}
    given = results_beside(reference, **{name: (0.9, value, 0.8) for name, value in nll.items()})
    listed = orderings(given, measures(given.methods["map"][0]))
    assert [(each.ahead, each.behind, each.gap > 0) for each in listed] == [
        ("deep_ensemble", "swag", True), ("deep_ensemble", "tradi", True), ("deep_ensemble", "mc_dropout", True),
        ("swag", "tradi", False), ("swag", "mc_dropout", False),
    ]  # fmt: skip
    said = reference_sentences(given, measures(given.methods["map"][0]))
    assert said[0] == "2 of 5 orderings of two methods are not as published."
    assert ["swag is ahead of" in each for each in said] == [False, True, True]


def test_without_test_examples_seeds_alone_are_counted_and_that_is_said():
    def several(*values: float) -> list[Evaluation]:
        return [Evaluation("classification", {"nll": value}, {}, "") for value in values]

    reference = {"map": {"nll": 0.1}, "deep_ensemble": {"nll": 0.2}}
    methods = {"map": several(0.5, 0.6, 0.55), "deep_ensemble": several(0.3, 0.42)}
    origins = {name: [{"seed": i} for i in range(len(each))] for name, each in methods.items()}
    given = Results("", "", methods, origins, reference=reference)
    _, only = reference_sentences(given, [])
    # on seeds 0 and 1: differences 0.2 and 0.18, 0.19 ± 12.706 · 0.0141/√2
    assert "(0.5500 against 0.3600; difference +0.19, +0.06 to +0.32, beyond chance, paired test, p = 0.033" in only
    assert only.endswith("counts 2 seeds, not test examples).")
    assert reference_table(given, []).headings == ["map (3 seeds)", "deep_ensemble (2 seeds)"]


def test_agreement_is_said_too_and_nothing_without_two_methods():
    given = results_beside(map=(0.91, 0.45, 0.85), deep_ensemble=(0.96, 0.35, 0.7))
    assert reference_sentences(given, []) == ["All 3 orderings of two methods are as published."]
    assert reference_sentences(results_beside({"deep_ensemble": {"nll": 1.0}}, map=(0.9, 0.5, 0.8)), []) == []
    assert reference_sentences(results_beside({"map": {"nll": 1.0}}, map=(0.9, 0.5, 0.8)), []) == []


TASK = """
methods = ["map"]
data = { name = "two_moons", count = 60 }
network = { name = "MLP", hidden = [4] }
training = { epochs = 1 }
[reference]
source = "Somebody 2020"
[reference.map]
accuracy = 0.5
"ood/far_ring/auroc" = [0.7, 0.1]
"""


def test_reports_show_the_published_numbers_also_from_run_folders(undrawn, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TASK)
    bench(load_task(str(path)), out=tmp_path / "runs")
    (tmp_path / "runs" / "report.md").unlink()
    report_runs([tmp_path / "runs"], tmp_path / "runs")
    for name in ("report.md", "report.html"):
        text = (tmp_path / "runs" / name).read_text()
        assert "Beside published numbers" in text
        assert "published 50.00" in text
        assert "Somebody 2020" in text
    assert "published" not in (tmp_path / "runs" / "results.csv").read_text()
    # The run does not depend on them: another number is no other run.
    path.write_text(TASK.replace("accuracy = 0.5", "accuracy = 0.6"))
    bench(load_task(str(path)), out=tmp_path / "runs")


@pytest.mark.parametrize(("text", "message"), [
    ("[reference]\nsource = 3", "expected a text for reference.source, got 3"),
    ("[reference.mapp]\nnll = 1.0", "did you mean 'map'"),
    ('[reference.map]\nnll = "low"', "expected a number or a list for reference.map.nll, got 'low'"),
    ("[reference.map]\nnll = [1.0, 0.1, 0.1]", "expected a number or a list of at most 2 for reference.map.nll"),
    ("[reference]\nmap = 3", "expected a table"),
])  # fmt: skip
def test_a_reference_that_is_wrong_is_one_clear_error(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(TASK.split("[reference]")[0] + text)
    refuses(lambda: load_task(str(path)), message, (ValueError, TypeError))


# ------------------------------------------------------------------------------------------------------------ promises
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
        "conformal/size", "conformal/hard/coverage", "corrupt/conformal/coverage", "ood_gate/refused",
    } <= found.keys()  # fmt: skip
    assert found["conformal/size"].best is None  # empty sets are the smallest
    risk = found["selective/risk"]
    arrays = [evaluations["first"][0].arrays[name] for name in risk.samples[0]]
    value = risk.statistic([torch.ones(1, 20, dtype=torch.float64)], *arrays)
    assert float(value) == pytest.approx(evaluations["first"][0].metrics["selective/risk"])


def test_curves_have_a_line_at_what_was_promised(evaluations):
    results = Results("", "", evaluations, {"first": [{}]})
    title, figures = guarantee_section(results, colours(["first"]))
    assert title == "Are promises kept?"
    assert [words for words, _ in figures] == [
        "Coverage by difficulty: conformal", "Coverage under corruption: conformal", "Risk and acceptance: selective",
    ]  # fmt: skip
    for (_, figure), height in zip(figures, (0.8, 0.8, 0.2), strict=True):
        lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
        assert any(set(line.get_ydata()) == {height} for line in lines.values())


def test_without_promises_there_is_no_section(evaluations):
    plain = {"first": [ds.Evaluation("classification", {"accuracy": 1.0}, {}, "max_probability")]}
    assert guarantee_section(Results("", "", plain, {"first": [{}]}), colours(["first"])) is None


# ------------------------------------------------------------------------------------------------- which method to take
TARGET = torch.arange(400) % 4
NOISE = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
NOISE = (NOISE - NOISE.mean()) / NOISE.std()


def better_by(lower: float, *, noise: float = 0.1, accuracy: float = 0.9, cost: float = 1.0) -> Evaluation:
    """NLL below 1 by `lower` on average; `noise`: standard deviation over examples of that difference."""
    nll = 1.0 + 0.3 * NOISE.roll(7) - lower + noise * NOISE * (lower != 0)
    correct = (torch.arange(400) < 400 * accuracy).double()
    costs = {"cost/train_seconds": 10 * cost, "cost/predict_ms": 0.2 * cost, "cost/memory_mb": 3 * cost}
    arrays = {"test/nll": nll, "test/correct": correct, "test/target": TARGET}
    return Evaluation("classification", {"nll": float(nll.mean()), "accuracy": accuracy, **costs}, arrays, "total")


def results_of(seeds: int = 3, **others: Evaluation) -> Results:
    return results_of_evaluations({name: [e] * seeds for name, e in {"map": better_by(0), **others}.items()}, "t")


@pytest.mark.parametrize(
    ("given", "taken", "title"),
    [
        (results_of(good=better_by(0.2), less=better_by(0.1)), "good", "Take good"),  # a clear winner
        (results_of(worse=better_by(-0.2)), "map", "None is better than map"),
        (results_of(tie=better_by(0.005, noise=1.0)), "map", "None is better than map"),  # t = 0.1
        (results_of(small=better_by(1e-4, noise=1e-5)), "map", "None is better than map"),  # surely, but by nothing
        (results_of(guess=better_by(0.5, accuracy=0.25), good=better_by(0.2)), "good", "Take good"),  # near chance
        (results_of(guess=better_by(0.5, accuracy=0.25), tie=better_by(0.005, noise=1.0)), "map", "None is better than map"),
        (results_of(1, good=better_by(0.2)), "good", "Take good, on one seed"),
        (results_of(1, worse=better_by(-0.2)), "map", "None is better than map, on one seed"),
        (results_of(), None, ""),  # a single method
    ],
)  # fmt: skip
def test_what_is_taken_is_better_in_a_paired_test_and_never_near_chance(given, taken, title):
    found = recommend(given, measures_and_draws(given)[1])
    assert (found.method, found.title) == (taken, title)
    assert ("trained once" in found.sentences.get("How sure", "")) == ("on one seed" in title)


def told_apart(lower: float, shift: float, noise: float) -> Evaluation:
    """`better_by`, and scores of foreign inputs that are higher by `shift`."""
    made, inside = better_by(lower), NOISE.roll(3) + noise * NOISE.roll(11)
    scores = {"test/score/total": inside, "ood/letters/score/total": NOISE.roll(5) + noise * NOISE.roll(17) + shift}
    auroc = float(metrics.auroc(inside, scores["ood/letters/score/total"]))
    return replace(
        made, ood=("letters",), arrays=made.arrays | scores, metrics=made.metrics | {"ood/letters/auroc": auroc}
    )


@pytest.mark.parametrize(("shift", "said"), [
    (0.5, "good is worse than every other method in AUROC (told apart from letters)."), (3.0, None), (1.6, None),
])  # fmt: skip
def test_the_advice_says_where_a_paired_test_finds_the_method_worse_than_all_others(shift, said):
    methods = {"map": told_apart(0, 1.5, 0.0), "good": told_apart(0.2, shift, 0.5), "less": told_apart(0.1, 2.0, 0.0)}
    unmeasured = {"blind": better_by(0.05)}
    given = results_of_evaluations({name: [each] * 3 for name, each in (methods | unmeasured).items()}, "t")
    assert recommend(given, measures_and_draws(given)[1]).sentences.get("Against it") == said
    del given.methods["less"]  # beside one other, the method's own row says it
    assert "Against it" not in recommend(given, measures_and_draws(given)[1]).sentences


def test_many_methods_need_a_stronger_difference():
    """p = 0.03 for one method alone, after Holm's correction above 0.05 among four."""
    near, dull = better_by(0.011, noise=0.1), {f"m{i}": better_by(-0.001 * i, noise=0.1) for i in (1, 2, 3)}
    alone, among = results_of(1, near=near), results_of(1, near=near, **dull)
    assert recommend(alone, measures_and_draws(alone)[1]).method == "near"
    assert recommend(among, measures_and_draws(among)[1]).method == "map"


def test_if_all_are_near_chance_none_is_taken_and_without_a_test_nothing_is_advised():
    guesses = results_of_evaluations({n: better_by(0.1 * i, accuracy=0.25) for i, n in enumerate("ab")}, "t")
    found = recommend(guesses, measures_and_draws(guesses)[1])
    assert (found.method, found.title) == (None, "Take none: no method is better than a constant answer")
    numbers = {n: {"nll": v, "accuracy": 0.9} for n, v in (("a", 1.0), ("b", 0.5))}
    plain = {n: Evaluation("classification", each, {}, "total") for n, each in numbers.items()}
    found = recommend(untested := results_of_evaluations(plain, "t"), measures_and_draws(untested)[1])
    assert (found.method, found.table) == (None, None)
    assert found.title.startswith("No advice")


def test_the_answer_has_its_reason_its_price_and_a_row_for_every_method():
    given = results_of(good=better_by(0.2, accuracy=0.95, cost=5), guess=better_by(0.5, accuracy=0.25))
    advice = report_content(given, with_figures=False)["advice"]
    assert advice.featured == ["good", "map"]
    assert advice.sentences["Why"].startswith("good has Accuracy 95.0 against 90.0 %, NLL 0.80")
    assert "(paired test, p < 0.001)" in advice.sentences["Why"]
    times = "(5.0 × map's)"
    price = f"Training 50 s {times}; Prediction 1.0 ms per input {times}; Memory 15 MB {times}."
    assert advice.sentences["Price"] == price
    rows = {row.label: [cell.text for cell in row.cells] for row in advice.table.rows}
    assert rows["map"][2:] == ["–", "–", "1.0 ×", "1.0 ×", "1.0 ×"]
    assert rows["good"][3:] == ["p < 0.001", "5.0 ×", "5.0 ×", "5.0 ×"]
    assert rows["guess"][3] == "near chance"
    assert [row.cells[0].clear for row in advice.table.rows] == [False, True, False]


def test_methods_of_runs_are_named_by_their_classes_and_others_as_given():
    given = results_of_evaluations({n: better_by(0) for n in ("map", "node_bnn", "forde-small", "mine")}, "t")
    assert list(given.with_class_names().methods) == list(given.methods)
    for origins in given.origins.values():
        origins[0]["task"] = "digits"
    assert list(given.with_class_names().methods) == ["MAP", "NodeBNN", "FoRDE-small", "mine"]
