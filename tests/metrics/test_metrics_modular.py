"""torchmetrics classes equal the plain functions, batch by batch and merged over workers."""

import math
import pickle

import pytest
import torch

import dissensus as ds
import tiny
from dissensus import metrics

pytest.importorskip("torchmetrics", reason="needs torchmetrics: pip install 'dissensus[torchmetrics]'")

GENERATOR = torch.Generator().manual_seed(0)
LOG_P = torch.log_softmax(2 * torch.randn(60, 4, dtype=torch.float64, generator=GENERATOR), dim=1)
Y = torch.randint(4, (60,), generator=GENERATOR)
MEANS = torch.randn(3, 60, 2, dtype=torch.float64, generator=GENERATOR)
VARIANCES = torch.rand(3, 60, 2, dtype=torch.float64, generator=GENERATOR) + 0.1
TARGETS = torch.randn(60, 2, dtype=torch.float64, generator=GENERATOR)
SCORES = torch.randn(60, dtype=torch.float64, generator=GENERATOR)

# class, its arguments, the plain function, and what both take, with the axis of the examples
TABLE = [
    ("Accuracy", {}, metrics.accuracy, [(LOG_P.exp(), 0), (Y, 0)]),
    ("NLL", {}, metrics.nll, [(LOG_P, 0), (Y, 0)]),
    ("NLL", {}, lambda p, y: metrics.nll(p.log(), y), [(LOG_P.exp(), 0), (Y, 0)]),
    ("Brier", {}, metrics.brier, [(LOG_P.exp(), 0), (Y, 0)]),
    ("ECE", {}, metrics.ece, [(LOG_P.exp(), 0), (Y, 0)]),
    ("ECE", {"bins": 4}, lambda p, y: metrics.ece(p, y, bins=4), [(LOG_P.exp(), 0), (Y, 0)]),
    ("MIoU", {"classes": 4}, metrics.miou, [(LOG_P.exp(), 0), (Y, 0)]),
    ("RMSE", {}, metrics.rmse, [(MEANS[0], 0), (TARGETS, 0)]),
    ("GaussianNLL", {}, metrics.gaussian_nll, [(MEANS[0], 0), (VARIANCES[0], 0), (TARGETS, 0)]),
    ("MixtureNLL", {}, metrics.mixture_nll, [(MEANS, 1), (VARIANCES, 1), (TARGETS, 0)]),
    ("CRPS", {}, metrics.crps_mixture, [(MEANS, 1), (VARIANCES, 1), (TARGETS, 0)]),
    ("IntervalCoverage", {}, metrics.interval_coverage, [(MEANS[0] - 1, 0), (MEANS[0] + 1, 0), (TARGETS, 0)]),
    ("AUROC", {}, metrics.auroc, [(SCORES, 0), (TARGETS[:, 0] + 1, 0)]),
    ("AUPR", {}, metrics.aupr, [(SCORES, 0), (TARGETS[:, 0] + 1, 0)]),
    ("FPR95", {}, metrics.fpr95, [(SCORES, 0), (TARGETS[:, 0] + 1, 0)]),
]
NAMES = [f"{name}{arguments or ''}" for name, arguments, _, _ in TABLE]


@pytest.mark.parametrize(("name", "arguments", "plain", "inputs"), TABLE, ids=NAMES)
def test_batches_give_the_value_of_the_plain_function(name, arguments, plain, inputs):
    metric = getattr(metrics, name)(**arguments)
    for start, stop in ((0, 7), (7, 40), (40, 60)):  # batches of unequal size
        metric.update(*(tensor.narrow(axis, start, stop - start) for tensor, axis in inputs))
    expected = plain(*(tensor for tensor, _ in inputs)).item()
    tolerance = 0 if name in ("AUROC", "AUPR", "FPR95") else 1e-12
    if tolerance:
        assert metric.compute().item() == pytest.approx(expected, abs=tolerance)
    else:
        bounded = getattr(metric.histogram, name.lower())()
        assert bounded.lower - 1e-12 <= expected <= bounded.upper + 1e-12
        assert metric.compute() == bounded.value
        assert metric.compute().item() == pytest.approx(expected, abs=2e-3)
    metric.reset()
    metric.update(*(tensor.narrow(axis, 0, 20) for tensor, axis in inputs))
    again = plain(*(tensor.narrow(axis, 0, 20) for tensor, axis in inputs)).item()
    assert metric.compute().item() == pytest.approx(again, abs=tolerance or 2e-3)


@pytest.mark.parametrize(("name", "arguments", "plain", "inputs"), TABLE, ids=NAMES)
def test_states_of_two_workers_add_up(name, arguments, plain, inputs):
    workers = [getattr(metrics, name)(**arguments) for _ in range(2)]
    whole = getattr(metrics, name)(**arguments)
    for i, worker in enumerate(workers):
        batch = [tensor.narrow(axis, 30 * i, 30) for tensor, axis in inputs]
        worker.update(*batch)
        whole.update(*batch)
    # what torchmetrics does over processes: the named reduction of every state
    for state, reduction in whole._reductions.items():
        reduced = reduction(torch.stack([getattr(worker, state) for worker in workers]))
        torch.testing.assert_close(reduced, getattr(whole, state), rtol=0, atol=1e-12)
        setattr(workers[0], state, reduced)
    assert workers[0].compute().item() == pytest.approx(whole.compute().item(), abs=1e-12)


def test_void_pixels_are_left_out():
    p, y = LOG_P.exp().reshape(3, 4, 5, 4).movedim(-1, 1), Y.reshape(3, 4, 5).clone()
    y[:, 0] = 255
    for name, plain in (("Accuracy", metrics.accuracy), ("Brier", metrics.brier), ("ECE", metrics.ece)):
        metric = getattr(metrics, name)(ignore_index=255)
        for i in range(3):
            metric.update(p[i : i + 1], y[i : i + 1])
        metric.update(p[:1], torch.full((1, 4, 5), 255))  # an image with nothing labelled
        assert metric.compute().item() == pytest.approx(plain(p, y, ignore_index=255).item(), abs=1e-12)


def test_one_collection_takes_probabilities_and_agrees_with_evaluate():
    import torchmetrics

    x, y = tiny.points(30)
    posterior = ds.DeepEnsemble([tiny.mlp().double() for _ in range(2)])
    probabilities = posterior.predict(x).mean
    theirs = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
    ours = {"nll": metrics.NLL(), "accuracy": metrics.Accuracy(), "brier": metrics.Brier(), "ece": metrics.ECE()}
    collection = torchmetrics.MetricCollection({**ours, "theirs": theirs})
    for rows in (slice(0, 7), slice(7, 30)):
        collection.update(probabilities[rows], y[rows])
    found, evaluation = collection.compute(), ds.evaluate(posterior, (x, y), progress=False).metrics
    for name in ours:
        assert found[name].item() == pytest.approx(evaluation[name], abs=1e-12), name
    assert found["theirs"].item() == pytest.approx(evaluation["accuracy"], abs=1e-7)
    named = torchmetrics.MetricCollection(ours)
    named.reset()
    named.update(probabilities=probabilities, y=y)
    assert named.compute()["nll"].item() == pytest.approx(evaluation["nll"], abs=1e-12)


def test_metrics_of_equal_values_on_the_first_batch_stay_apart_in_a_collection():
    import torchmetrics

    sure, wrong = torch.eye(4, dtype=torch.float64), torch.full((2, 4), 0.25, dtype=torch.float64)
    kinds = {"nll": metrics.NLL(), "brier": metrics.Brier(), "void": metrics.Brier(ignore_index=3)}
    collection = torchmetrics.MetricCollection(kinds)
    collection.update(sure[:3], torch.arange(3))  # NLL and Brier score are 0
    collection.update(wrong, torch.tensor([0, 3]))
    expected = {"nll": 2 * math.log(4) / 5, "brier": 2 * 0.75 / 5, "void": 0.75 / 4}
    assert {name: value.item() for name, value in collection.compute().items()} == pytest.approx(expected)


def test_nothing_seen_is_an_error():
    for name, arguments, _, _ in TABLE:
        metric = getattr(metrics, name)(**arguments)
        metric._update_count = 1  # torchmetrics itself only warns when there was no update
        with pytest.raises(ValueError, match="expected"):
            metric.compute()


def test_forward_gives_the_value_of_the_batch_and_keeps_the_sum():
    metric = metrics.Accuracy()
    first, second = metric(LOG_P.exp()[:10], Y[:10]), metric(LOG_P.exp()[10:], Y[10:])
    assert first.item() == pytest.approx(metrics.accuracy(LOG_P.exp()[:10], Y[:10]).item())
    assert second.item() == pytest.approx(metrics.accuracy(LOG_P.exp()[10:], Y[10:]).item())
    assert metric.compute().item() == pytest.approx(metrics.accuracy(LOG_P.exp(), Y).item())


def test_metrics_can_be_pickled_with_what_they_have_seen():
    metric = metrics.ECE()
    metric.update(LOG_P.exp(), Y)
    assert pickle.loads(pickle.dumps(metric)).compute() == metric.compute()


def test_any_function_is_a_class_that_keeps_what_it_is_given() -> None:
    from dissensus import metrics

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 60, 4, generator=generator, dtype=torch.float64)
    members, y = logits.log_softmax(2), torch.randint(4, (60,), generator=generator)
    probabilities = members.exp().mean(0)
    cases = [
        (metrics.Gathered(metrics.adaptive_ece), (probabilities, y), metrics.adaptive_ece(probabilities, y)),
        (
            metrics.Gathered(metrics.ece, settings={"bins": 5}),
            (probabilities, y),
            metrics.ece(probabilities, y, bins=5),
        ),
        (metrics.Gathered(metrics.disagreement, arguments=1, axis=1), (members,), metrics.disagreement(members)),
        (metrics.Gathered(metrics.effective_members, axis=1), (members, y), metrics.effective_members(members, y)),
    ]
    for metric, tensors, expected in cases:
        axis = metric.axis
        for rows in (slice(0, 25), slice(25, 60)):
            metric.update(*(t[:, rows] if axis and t.ndim > 1 else t[rows] for t in tensors))
        torch.testing.assert_close(metric.compute(), expected)
        with pytest.raises(ValueError, match="pass their number"):
            metric.update(*tensors, y)
