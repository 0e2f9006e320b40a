"""Wrong labels in a run: which rows have them, what is counted at them, and curves that do not disturb the training."""

import pytest
import torch

from dissensus.bench.report import figure_sections
from dissensus.bench.report.results import results_of_evaluations
from dissensus.bench.rows.dataset_rows import TaskRows
from dissensus.bench.rows.task_rows import task_data
from dissensus.bench.run.run import Run
from dissensus.bench.run.training_watch import CURVES, compare_with_labels
from dissensus.bench.task.config import load_task, run_config
from small_runs import trained


def run(folder, method: str, *overrides: str) -> Run:
    small = ["network.hidden=[8]", "training.epochs=2", "method.components=2", "method.samples=2"]
    given = [*(each for each in small if method == "node_bnn" or not each.startswith("method.")), *overrides]
    task = load_task("digits", size="smoke", overrides=["evaluation.corrupt=none", *given], methods=[method])
    return Run(folder, run_config(task, method, 0))


def test_training_labels_are_wrong_and_test_labels_are_not():
    settings = {"name": "digits", "train": 500, "validation": 100, "test": 200}
    clean, noisy = task_data(settings), task_data({**settings, "label_noise": 0.4})
    wrong = [(rows.y != rows.true_labels).sum() for rows in (noisy.train, noisy.validation)]
    assert sum(map(int, wrong)) == 200  # what is held out of a noisy set is noisy
    assert min(wrong) > 20
    assert clean.train.true_labels is None
    assert torch.equal(noisy.test.y, clean.test.y)
    assert noisy.test.true_labels is None
    assert torch.equal(
        *(
            torch.cat(each).bincount()
            for each in ([noisy.train.true_labels, noisy.validation.true_labels], [clean.train.y, clean.validation.y])
        )
    )


def test_what_is_memorised_is_counted_at_the_wrong_rows_alone():
    rows = TaskRows(torch.zeros(5, 1), torch.tensor([0, 1, 2, 2, 2]), torch.tensor([0, 1, 0, 1, 2]))
    found = compare_with_labels(torch.tensor([0, 0, 2, 1, 2]), rows)
    assert {name: each.tolist() for name, each in found.items()} == {
        "noise/memorised": [True, False],
        "noise/recovered": [False, True],
        "noise/clean": [True, False, True],
    }
    assert compare_with_labels(torch.zeros(5), TaskRows(rows.x, rows.y)) == {}


@pytest.mark.parametrize("method", ["map", "node_bnn"])
def test_curves_agree_with_the_evaluation_and_leave_the_training_alone(tmp_path, method):
    looked = trained(run(tmp_path / "looked", method, "data.label_noise=0.5", "evaluation.curves_every=1")).evaluate()
    alone = trained(run(tmp_path / "alone", method, "data.label_noise=0.5")).evaluate()
    assert looked.metrics["nll"] == alone.metrics["nll"]
    assert not (tmp_path / "alone" / CURVES).exists()
    assert looked.arrays["curves/epochs"].tolist() == [0, 1, 2]
    drawn = figure_sections.learning_section(results_of_evaluations({method: looked}, "title"), {method: "black"})
    assert drawn is not None
    assert len(drawn[2][0][1].axes) == 4  # training rows, test rows, memorised, recovered
    assert figure_sections.learning_section(results_of_evaluations({method: alone}, "title"), {method: "black"}) is None
    if method == "map":  # one function, kept at the last epoch or at the best
        ends = {name: looked.arrays[f"curves/over/{name}"].tolist() for name in ("test/nll", "noise/memorised")}
        assert any(each == pytest.approx(looked.metrics["nll"], rel=1e-6) for each in ends["test/nll"])
        assert any(
            each == pytest.approx(looked.metrics["noise/memorised"], rel=1e-12) for each in ends["noise/memorised"]
        )


def test_curves_of_a_regression_are_refused(tmp_path):
    task = load_task("cubic", size="smoke", overrides=["evaluation.curves_every=1"])
    with pytest.raises(ValueError, match=r"expected classes for evaluation.curves_every, got a regression"):
        Run(tmp_path, run_config(task, task.methods[0], 0)).check()
    with pytest.raises(ValueError, match=r"expected classes for data.label_noise = 0.1, got a set without"):
        task_data({"name": "cubic", "label_noise": 0.1})
