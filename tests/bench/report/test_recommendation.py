"""The method that a report tells its reader to take, why, how sure that is and at what price."""

import pytest
import torch

from dissensus.bench.report.html_report import report_content
from dissensus.bench.report.recommendation import recommend
from dissensus.bench.report.results import Results, results_of_evaluations
from dissensus.bench.report.tables import measures_and_draws
from dissensus.evaluation.evaluation import Evaluation

TARGET = torch.arange(400) % 4
NOISE = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
NOISE = (NOISE - NOISE.mean()) / NOISE.std()


def evaluation(lower: float, *, noise: float = 0.1, accuracy: float = 0.9, cost: float = 1.0) -> Evaluation:
    """NLL below 1 by `lower` on average; `noise`: standard deviation over examples of that difference."""
    nll = 1.0 + 0.3 * NOISE.roll(7) - lower + noise * NOISE * (lower != 0)
    correct = (torch.arange(400) < 400 * accuracy).double()
    costs = {"cost/train_seconds": 10 * cost, "cost/predict_ms": 0.2 * cost, "cost/memory_mb": 3 * cost}
    arrays = {"test/nll": nll, "test/correct": correct, "test/target": TARGET}
    return Evaluation("classification", {"nll": float(nll.mean()), "accuracy": accuracy, **costs}, arrays, "entropy")


def results(seeds: int = 3, **others: Evaluation) -> Results:
    return results_of_evaluations({name: [e] * seeds for name, e in {"map": evaluation(0), **others}.items()}, "t")


@pytest.mark.parametrize(
    ("given", "taken", "title"),
    [
        (results(good=evaluation(0.2), less=evaluation(0.1)), "good", "Take good"),  # a clear winner
        (results(worse=evaluation(-0.2)), "map", "None is better than map"),
        (results(tie=evaluation(0.005, noise=1.0)), "map", "None is better than map"),  # t = 0.1
        (results(small=evaluation(1e-4, noise=1e-5)), "map", "None is better than map"),  # surely, but by nothing
        (results(guess=evaluation(0.5, accuracy=0.25), good=evaluation(0.2)), "good", "Take good"),  # near chance
        (results(guess=evaluation(0.5, accuracy=0.25), tie=evaluation(0.005, noise=1.0)), "map", "None is better than map"),
        (results(1, good=evaluation(0.2)), "good", "Take good, on one seed"),
        (results(1, worse=evaluation(-0.2)), "map", "None is better than map, on one seed"),
        (results(), None, ""),  # a single method
    ],
)  # fmt: skip
def test_what_is_taken_is_better_in_a_paired_test_and_never_near_chance(given, taken, title):
    found = recommend(given, measures_and_draws(given)[1])
    assert (found.method, found.title) == (taken, title)
    assert ("trained once" in found.sentences.get("How sure", "")) == ("on one seed" in title)


def test_many_methods_need_a_stronger_difference():
    """p = 0.03 for one method alone, after Holm's correction above 0.05 among four."""
    near, dull = evaluation(0.011, noise=0.1), {f"m{i}": evaluation(-0.001 * i, noise=0.1) for i in (1, 2, 3)}
    alone, among = results(1, near=near), results(1, near=near, **dull)
    assert recommend(alone, measures_and_draws(alone)[1]).method == "near"
    assert recommend(among, measures_and_draws(among)[1]).method == "map"


def test_if_all_are_near_chance_none_is_taken_and_without_a_test_nothing_is_advised():
    guesses = results_of_evaluations({n: evaluation(0.1 * i, accuracy=0.25) for i, n in enumerate("ab")}, "t")
    found = recommend(guesses, measures_and_draws(guesses)[1])
    assert (found.method, found.title) == (None, "Take none: no method is better than a constant answer")
    numbers = {n: {"nll": v, "accuracy": 0.9} for n, v in (("a", 1.0), ("b", 0.5))}
    plain = {n: Evaluation("classification", each, {}, "entropy") for n, each in numbers.items()}
    found = recommend(untested := results_of_evaluations(plain, "t"), measures_and_draws(untested)[1])
    assert (found.method, found.table) == (None, None)
    assert found.title.startswith("No advice")


def test_the_answer_has_its_reason_its_price_and_a_row_for_every_method():
    given = results(good=evaluation(0.2, accuracy=0.95, cost=5), guess=evaluation(0.5, accuracy=0.25))
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
    given = results_of_evaluations({n: evaluation(0) for n in ("map", "node_bnn", "forde-small", "mine")}, "t")
    assert list(given.with_class_names().methods) == list(given.methods)
    for origins in given.origins.values():
        origins[0]["task"] = "digits"
    assert list(given.with_class_names().methods) == ["MAP", "NodeBNN", "FoRDE-small", "mine"]
