"""Every wrong input meets one clear error, whichever metric it is given to; the package's names."""

import pytest
import torch

from dissensus import metrics
from dissensus.metrics import metric_inputs
from refusals import refuses

P = torch.tensor([[0.7, 0.3], [0.4, 0.6], [0.5, 0.5]], dtype=torch.float64)
Y = torch.tensor([0, 1, 1])


@pytest.mark.parametrize(("y", "error", "text"), [
    (torch.tensor([0, 1]), ValueError, r"expected y of shape \(3,\), got \(2,\)"),
    (torch.eye(2).long()[Y], ValueError, r"got \(3, 2\); pass class indices, not one-hot rows"),
    (torch.tensor([0, 2, 1]), ValueError, "expected class indices from 0 to 1 in y, got 2 at row 1"),
    (
        torch.tensor([0, 1, -1]),
        ValueError,
        "expected class indices from 0 to 1 in y, got -1 at row 2; pass ignore_index",
    ),
    (torch.tensor([0.0, 1.0, 1.0]), TypeError, "expected integer class indices in y, got torch.float32"),
    (torch.tensor([True, False, True]), TypeError, "got torch.bool"),
])  # fmt: skip
@pytest.mark.parametrize("metric", [metrics.accuracy, metrics.brier, metrics.ece, metrics.miou, metrics.classwise_ece])
def test_wrong_labels_are_named(metric, y, error, text):
    refuses(lambda: metric(P, y), text, error)


@pytest.mark.parametrize("metric", [metrics.accuracy, metrics.brier, metrics.ece, metrics.adaptive_ece, metrics.miou])
def test_rows_that_do_not_sum_to_one_are_named(metric):
    wrong = P.clone()
    wrong[1, 1] += 0.002
    refuses(lambda: metric(wrong, Y), r"sum to one over axis 1 \(tolerance 0.001\), got 1.002 at row 1; apply softmax")
    nearly = P.clone()
    nearly[1, 1] += 0.0009
    metric(nearly, Y)  # within the tolerance


def test_logits_given_as_log_probabilities_are_refused():
    with pytest.raises(ValueError, match="apply log_softmax first"):
        metrics.nll(torch.tensor([[3.0, 1.0], [0.0, 100.0]]), torch.tensor([0, 1]))
    refuses(lambda: metrics.max_probability_score(torch.zeros(2, 3)), "apply log_softmax first")


def test_negative_probabilities_that_sum_to_one_are_refused():
    refuses(lambda: metrics.brier(torch.tensor([[1.5, -0.5]]), torch.tensor([0])), "got a negative one at row 0")


def test_nan_is_named_with_its_place():
    bad = P.clone()
    bad[2, 0] = torch.nan
    refuses(lambda: metrics.accuracy(bad, Y), "got NaN at row 2; check whether a network diverged")
    pixels = torch.full((1, 2, 3, 3), 0.5)
    pixels[0, 1, 2, 1] = torch.nan
    refuses(lambda: metrics.miou(pixels, torch.zeros(1, 3, 3, dtype=torch.long)), r"got NaN at position \(0, 2, 1\)")
    with pytest.raises(ValueError, match="expected numbers in score_ood, got NaN at row 0"):
        metrics.auroc(torch.zeros(3), torch.tensor([torch.nan]))


@pytest.mark.parametrize("metric", [
    metrics.accuracy, metrics.brier, metrics.ece, metrics.adaptive_ece, metrics.classwise_ece, metrics.debiased_ece,
    metrics.brier_decomposition, metrics.miou, metrics.smooth_ece,
])  # fmt: skip
def test_nothing_to_measure_is_an_error(metric):
    with pytest.raises(ValueError, match="at least one labelled example, got none"):
        metric(torch.zeros(0, 2), torch.zeros(0, dtype=torch.long))
    refuses(lambda: metric(P, torch.full((3,), 255), ignore_index=255), "at least one labelled example, got none")


def test_empty_scores_are_an_error():
    refuses(lambda: metrics.auroc(torch.zeros(3), torch.zeros(0)), "at least one score in score_ood, got none")


def test_integer_probabilities_and_missing_class_axis_are_errors():
    with pytest.raises(TypeError, match=r"expected floating-point probabilities, got torch\.int64"):
        metrics.accuracy(torch.eye(2).long(), torch.tensor([0, 1]))
    refuses(lambda: metrics.accuracy(torch.ones(3), Y), r"\(N, C\) or \(N, C, H, W\), got \(3,\)")
    refuses(lambda: metrics.disagreement(P.log()), r"\(M, N, C\) or \(M, N, C, H, W\), got \(3, 2\)")


def test_void_labels_may_lie_outside_the_classes_but_only_they():
    metric_inputs.labelled_rows(P, torch.tensor([0, 255, 1]), 255)
    with pytest.raises(ValueError, match="got 7 at row 1; only 255 marks void"):
        metric_inputs.labelled_rows(P, torch.tensor([255, 7, 1]), 255)


def test_pixels_come_out_as_rows_in_the_order_of_the_labels():
    p = torch.rand(2, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    p = p / p.sum(1, keepdim=True)
    y = torch.arange(40).reshape(2, 4, 5) % 3
    rows, labels = metric_inputs.labelled_rows(p, y)
    for i, (n, h, w) in enumerate([(n, h, w) for n in range(2) for h in range(4) for w in range(5)]):
        assert torch.equal(rows[i], p[n, :, h, w])
        assert labels[i] == y[n, h, w]


def test_wrong_regression_inputs_are_named():
    y = torch.zeros(4, 1)
    refuses(lambda: metrics.rmse(torch.zeros(4), y), r"expected y of the shape \(4,\) of mean, got \(4, 1\)")
    refuses(lambda: metrics.gaussian_nll(y, y, y), "expected variances above zero, got 0; pass variances, not log")
    refuses(lambda: metrics.mixture_nll(y, y + 1, y), r"expected means of shape \(M, 4, 1\), got \(4, 1\)")
    refuses(lambda: metrics.rmse(torch.zeros(0), torch.zeros(0)), "at least one example in mean")


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 95.0])
def test_shares_must_lie_between_zero_and_one(value):
    refuses(lambda: metrics.fpr95(torch.zeros(3), torch.ones(3), recall=value), "expected recall above 0 and below 1")
    with pytest.raises(ValueError, match="expected prevalence above 0 and below 1"):
        metrics.aupr_adjusted(torch.zeros(3), torch.ones(3), prevalence=value)


def test_inputs_are_left_as_they_were():
    p, y = P.clone().requires_grad_(), Y.clone()
    before = p.detach().clone()
    assert not metrics.brier(p, y).requires_grad
    assert torch.equal(p.detach(), before)
    assert torch.equal(y, Y)


# --------------------------------------------------------------------------------------------------------- the package
def test_every_name_is_there_and_says_what_it_is():
    for name in metrics.__all__:
        assert getattr(metrics, name).__doc__, name
    assert set(metrics.__all__) <= set(dir(metrics))


def test_an_unknown_name_is_an_attribute_error():
    refuses(lambda: metrics.Ece, "has no attribute 'Ece'", AttributeError)
