"""Sentences: they count seeds right, compare with the right methods, and choose on validation rows alone."""

import pytest
import torch

from dissensus.bench.report.prose import question_sentences
from dissensus.bench.report.results import CRITERION, Results, SettingSweep, accuracies, sweep_of, sweep_sentence
from dissensus.bench.run.evaluate_run import with_choice
from dissensus.evaluation.corruption_curves import CorruptedCounts
from dissensus.bench.report.results import Results, SettingSweep
from dissensus.bench.report.setting_sweep import CRITERION, accuracies, sweep_of, sweep_sentence
from dissensus.bench.run.extra_measures import with_choice
from dissensus.evaluation.evaluation import Evaluation
from dissensus.evaluation.robustness_curves import CorruptedCounts


def evaluation(**metrics: float) -> Evaluation:
    return Evaluation("regression", {key.replace("__", "/"): value for key, value in metrics.items()}, {}, "variance")


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


def test_twice_the_entropy_of_the_baseline_is_counted():
    def entropies(*values: float) -> list[Evaluation]:
        return [evaluation(region__off_data__entropy=value) for value in values]

    methods = {"deep_ensemble": entropies(0.5, 0.5), "forde": entropies(1.0, 0.8)}
    said = question_sentences(results(methods, focus="forde", baseline="deep_ensemble"))
    assert (
        said[-1] == "Off the data, forde's entropy is 1.80 times that of deep_ensemble; at least twice on 1 of 2 seeds."
    )


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
                "entropy",
            )
            for value in values
        ]
        for name, values in validation.items()
    }
    methods["deep_ensemble"] = [Evaluation("classification", {"accuracy": 0.5}, {}, "entropy")]
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
    found = swept(
        {"forde": [0.5], "forde-a": [0.5], "forde-b": [0.5]}, dict.fromkeys(("forde", "forde-a", "forde-b"), 0.1)
    )
    assert sweep_of(found).chosen == "forde"
    assert sweep_of(results({"forde": [evaluation(rmse=1.0)]}, sweep=SettingSweep("alpha", {"forde": 0.0}))) is None


def test_severities_are_grouped_as_far_as_they_were_measured():
    metrics = {"accuracy": 0.9, "corrupt/severity1/accuracy": 0.8, "corrupt/severity3/accuracy": 0.6}
    assert accuracies(Evaluation("classification", metrics, {}, "entropy")) == {
        "clean": 0.9,
        "severities 1–3": pytest.approx(0.7),
    }


def test_clean_accuracy_beside_severities_is_of_the_rows_that_were_damaged():
    metrics = {"accuracy": 0.9, "corrupt/severity1/accuracy": 0.8}
    arrays = {"corrupt/clean/accuracy": torch.tensor(0.85, dtype=torch.float64)}
    found = accuracies(Evaluation("classification", metrics, arrays, "entropy"))
    assert found == {"clean": 0.85, "severities 1–3": 0.8}


def test_what_is_chosen_by_is_measured_on_validation_rows():
    bins = torch.zeros(1, 1, 15, dtype=torch.float64)
    bins[0, 0, 14] = 4.0
    correct = torch.zeros_like(bins)
    correct[0, 0, 14] = 3.0
    counts = CorruptedCounts(
        types=("fog",),
        severities=(1,),
        nll=torch.full((1, 1), 2.0, dtype=torch.float64),
        counts=bins,
        confidence=bins,
        correct=correct,
        clean=torch.tensor([1.0, 0.25, 0.0], dtype=torch.float64),
        example_accuracy=torch.ones(4),
        example_nll=torch.ones(4),
        examples=torch.ones(3, 1, 1, 4),
    )
    found = with_choice(evaluation(rmse=1.0), counts).metrics
    assert found == {
        "rmse": 1.0,
        "validation/accuracy": 1.0,
        "validation/nll": 0.25,
        "validation/ece": 0.0,
        "validation/corrupt/accuracy": 0.75,
        "validation/corrupt/nll": 0.5,
        "validation/corrupt/ece": 0.25,
    }
