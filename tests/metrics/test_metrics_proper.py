"""Accuracy, NLL, Brier and mIoU against scikit-learn and by hand."""

import numpy as np
import pytest
import sklearn.metrics
import torch

from dissensus import metrics
from dissensus.metrics.classification import mean_of_present


def forecasts(n=200, classes=4, seed=0, sharpness=2.0):
    generator = torch.Generator().manual_seed(seed)
    log_p = torch.log_softmax(sharpness * torch.randn(n, classes, dtype=torch.float64, generator=generator), dim=1)
    return log_p, torch.randint(classes, (n,), generator=generator)


def test_accuracy_nll_and_brier_equal_scikit_learn():
    log_p, y = forecasts()
    p = log_p.exp()
    one_hot = np.eye(4)[y.numpy()]
    assert metrics.accuracy(p, y).item() == pytest.approx(
        sklearn.metrics.accuracy_score(y.numpy(), p.argmax(1).numpy()), abs=1e-12
    )
    assert metrics.nll(log_p, y).item() == pytest.approx(
        sklearn.metrics.log_loss(y.numpy(), p.numpy(), labels=range(4)), abs=1e-12
    )
    assert metrics.brier(p, y).item() == pytest.approx(((p.numpy() - one_hot) ** 2).sum(1).mean(), abs=1e-12)


def test_binary_brier_is_twice_the_one_of_scikit_learn():
    log_p, y = forecasts(classes=2)
    positive = log_p.exp()[:, 1].numpy()
    expected = 2 * sklearn.metrics.brier_score_loss(y.numpy(), positive)
    assert metrics.brier(log_p.exp(), y).item() == pytest.approx(expected, abs=1e-12)


def test_a_nearly_perfect_forecast_keeps_its_digits():
    p = torch.tensor([[1 - 1e-9, 1e-9]], dtype=torch.float64)
    assert metrics.brier(p, torch.tensor([0])).item() == pytest.approx(2e-18, rel=1e-6)


def test_float32_inputs_are_averaged_in_float64():
    log_p, y = forecasts(n=1000)
    assert metrics.nll(log_p.float(), y).dtype == torch.float64
    assert metrics.nll(log_p.float(), y).item() == pytest.approx(metrics.nll(log_p, y).item(), abs=1e-7)


def test_a_class_of_probability_zero_that_occurs_costs_infinity():
    log_p = torch.tensor([[0.0, -torch.inf]])
    assert metrics.nll(log_p, torch.tensor([1])).item() == torch.inf
    assert metrics.nll(log_p, torch.tensor([0])).item() == 0


def test_of_equally_probable_classes_the_first_counts():
    assert metrics.accuracy(torch.full((2, 2), 0.5), torch.tensor([0, 1])).item() == 0.5


def test_void_pixels_count_for_nothing():
    log_p, y = forecasts(n=2 * 3 * 5)
    pixels = log_p.reshape(2, 3, 5, 4).movedim(-1, 1)
    labels = y.reshape(2, 3, 5).clone()
    void = torch.rand(labels.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    labels[void] = 255
    kept = ~void.flatten()
    for metric, values in ((metrics.nll, log_p), (metrics.brier, log_p.exp()), (metrics.accuracy, log_p.exp())):
        shaped = values.reshape(2, 3, 5, 4).movedim(-1, 1)
        assert metric(shaped, labels, ignore_index=255).item() == pytest.approx(
            metric(values[kept], y[kept]).item(), abs=1e-14
        )
    assert metrics.nll_values(pixels, labels, ignore_index=255).shape == (int(kept.sum()),)


@pytest.mark.parametrize("bins", [1, 3, 15, None])
def test_the_parts_of_the_brier_score_add_up_exactly(bins):
    log_p, y = forecasts()
    p = log_p.exp()
    d = metrics.brier_decomposition(p, y, bins=bins)
    total = d.reliability - d.resolution + d.uncertainty + d.variance_within - d.covariance_within
    assert total.item() == pytest.approx(metrics.brier(p, y).item(), abs=1e-14)
    frequency = np.bincount(y.numpy(), minlength=4) / len(y)
    assert d.uncertainty.item() == pytest.approx((frequency * (1 - frequency)).sum(), abs=1e-14)


def test_groups_of_equal_forecasts_leave_nothing_within():
    # Three distinct forecasts; Murphy's three parts by hand.
    table = torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.2, 0.8]], dtype=torch.float64)
    which = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2, 2])
    y = torch.tensor([0, 0, 0, 1, 0, 1, 1, 1, 1, 1])
    d = metrics.brier_decomposition(table[which], y, bins=None)
    observed = np.array([0.75, 0.5, 0.0])  # share of class 0 in each group
    share = np.array([0.4, 0.2, 0.4])
    assert d.reliability.item() == pytest.approx(2 * (share * (np.array([0.9, 0.5, 0.2]) - observed) ** 2).sum())
    assert d.resolution.item() == pytest.approx(2 * (share * (observed - 0.4) ** 2).sum())
    assert d.uncertainty.item() == pytest.approx(2 * 0.4 * 0.6)
    assert d.variance_within.item() == pytest.approx(0, abs=1e-16)
    assert d.covariance_within.item() == pytest.approx(0, abs=1e-16)
    # and the binned grouping finds the same three groups here
    torch.testing.assert_close(metrics.brier_decomposition(table[which], y), d, rtol=0, atol=1e-15)


def test_confusion_matrix_and_miou_equal_scikit_learn():
    log_p, y = forecasts(n=300, classes=5)
    prediction = log_p.argmax(1)
    np.testing.assert_array_equal(
        metrics.confusion_matrix(prediction, y, classes=5).numpy(),
        sklearn.metrics.confusion_matrix(y.numpy(), prediction.numpy(), labels=range(5)),
    )
    expected = sklearn.metrics.jaccard_score(y.numpy(), prediction.numpy(), average="macro")
    assert metrics.miou(log_p.exp(), y).item() == pytest.approx(expected, abs=1e-12)


def test_classes_neither_true_nor_predicted_are_skipped_in_miou():
    p = torch.eye(4)[torch.tensor([0, 0, 1, 3])]
    y = torch.tensor([0, 1, 1, 255])  # the predicted 3 lies on void
    confusion = metrics.confusion_matrix(p.argmax(1), y, classes=4, ignore_index=255)
    iou = metrics.intersection_over_union(confusion)
    assert iou[:2].tolist() == [0.5, 0.5]
    assert iou[2:].isnan().all()
    assert mean_of_present(iou).item() == metrics.miou(p, y, ignore_index=255).item() == 0.5
    # a class predicted but never true counts with zero
    assert metrics.miou(torch.eye(4)[[0, 0, 2]], torch.tensor([0, 0, 0])).item() == pytest.approx((2 / 3 + 0) / 2)


def test_confusion_matrix_refuses_what_is_not_a_class_index():
    y = torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"expected prediction of shape .*; pass class indices"):
        metrics.confusion_matrix(torch.zeros(2, 3), y, classes=3)
    with pytest.raises(TypeError, match="expected integer class indices in prediction"):
        metrics.confusion_matrix(torch.zeros(2), y, classes=3)
    with pytest.raises(ValueError, match="expected class indices from 0 to 2 in prediction, got 3 at row"):
        metrics.confusion_matrix(torch.tensor([0, 3]), y, classes=3)
