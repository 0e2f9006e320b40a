"""A row per example: of predictions, of evaluations, with sets and gates; and the operations of a prediction."""

import pytest
import torch
from torch import nn

import dissensus as ds
from refusals import refuses

pytest.importorskip("pandas", reason="pandas is not installed: pip install pandas")
PARTS = ["total", "aleatoric", "epistemic"]
NAMES = ["sun", "rain", "snow"]


def ensemble(outputs: int, **settings) -> ds.DeepEnsemble:
    torch.manual_seed(0)
    return ds.DeepEnsemble([ds.nets.MLP(4, outputs, hidden=(8,)) for _ in range(3)], **settings)


def rows(count: int = 60) -> torch.Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def promised():
    """(posterior with class names, a conformal set and a gate; inputs; labels)."""
    posterior, x = ensemble(3), rows()
    y = posterior.predict(x).sample(1, generator=torch.Generator().manual_seed(2))[0]
    posterior.classes = NAMES
    ds.conformal(posterior, [(x, y)], level=0.7)
    ds.selective(posterior, [(x, y)], risk=0.7)
    return posterior, x, y


def test_a_classification_has_truth_answer_uncertainty_set_and_gate(promised):
    posterior, x, y = promised
    predictive = posterior.predict(x)
    frame = predictive.to_dataframe(y, posterior=posterior)
    confidence, answer = predictive.mean.max(1)
    assert frame["truth"].tolist() == [NAMES[i] for i in y]
    assert frame["prediction"].tolist() == [NAMES[i] for i in answer]
    assert frame["correct"].tolist() == (answer == y).tolist()
    assert frame["confidence"].tolist() == confidence.tolist()
    expected = torch.stack([getattr(predictive, p) for p in PARTS], 1)
    assert torch.allclose(torch.tensor(frame[PARTS].to_numpy()), expected)
    inside = posterior.promises["conformal"].set(x)
    sets = [tuple(n for n, there in zip(NAMES, row, strict=True) if there) for row in inside]
    assert frame["conformal/set"].tolist() == sets
    assert frame["selective/accepted"].tolist() == posterior.promises["selective"](x).accept.tolist()
    assert ds.predict(posterior, [(x, y)]).to_dataframe()["truth"].tolist() == y.tolist()  # the loader's, by number
    assert list(predictive.to_dataframe()) == ["prediction", "confidence", *PARTS]


def test_an_evaluation_has_the_rows_of_its_predictions_in_the_loaders_order(promised):
    posterior, x, y = promised
    evaluation = ds.evaluate(posterior, ds.data.Batches(x, y, batch_size=7))
    frame, expected = evaluation.examples(), posterior.predict(x).to_dataframe(y, posterior=posterior)
    assert frame["truth"].tolist() == expected["truth"].tolist()
    assert frame["conformal/set"].tolist() == expected["conformal/set"].tolist()
    assert all(frame[key].dtype == bool for key in ("correct", "conformal/covered", "selective/accepted"))
    assert abs(frame[["confidence", *PARTS]] - expected[["confidence", *PARTS]]).to_numpy().max() < 1e-6
    for key, metric in (("correct", "accuracy"), ("nll", "nll"), ("conformal/covered", "conformal/coverage")):
        assert frame[key].mean() == pytest.approx(evaluation.metrics[metric], abs=1e-9)
    held = [truth in inside for truth, inside in zip(frame["truth"], frame["conformal/set"], strict=True)]
    assert frame["conformal/covered"].tolist() == held


def test_a_regression_has_mean_parts_and_intervals_of_every_output():
    posterior, x = ensemble(2, likelihood=ds.Regression(0.5)), rows()
    y = posterior.predict(x).sample(1, generator=torch.Generator().manual_seed(2))[0]
    ds.conformal(posterior, [(x, y)], level=0.8)
    predictive = posterior.predict(x)
    for frame in (predictive.to_dataframe(y, posterior=posterior), ds.evaluate(posterior, [(x, y)]).examples()):
        assert frame["truth/1"].tolist() == y[:, 1].tolist()
        assert frame["std/0"].tolist() == predictive.total[:, 0].sqrt().tolist()
        assert (abs(frame["total/1"] - frame["aleatoric/1"] - frame["epistemic/1"]) < 1e-6).all()
        assert frame["upper90/0"].tolist() == predictive.interval(0.9)[1][:, 0].tolist()
        assert frame["conformal/lower/1"].tolist() == posterior.promises["conformal"].interval(x)[0][:, 1].tolist()
    assert "mean" in ensemble(1, likelihood=ds.Regression(0.5)).predict(x).to_dataframe()


def test_several_labels_are_tuples_of_names():
    posterior, x = ensemble(3, likelihood=ds.MultiLabel()), rows(9)
    y = torch.eye(3).repeat(3, 1)
    predictive = posterior.predict(x)
    evaluation = ds.evaluate(posterior, [(x, y)], classes=NAMES)
    for frame in (predictive.to_dataframe(y, classes=NAMES), evaluation.examples()):
        assert frame["truth"].tolist() == [(name,) for name in NAMES] * 3
        assert frame["prediction"][0] == tuple(n for n, p in zip(NAMES, predictive.mean[0], strict=True) if p > 0.5)
        assert frame["confidence/rain"].tolist() == pytest.approx(predictive.confidence[:, 1].tolist(), abs=1e-6)
    assert evaluation.examples()["exact_match"].mean() == pytest.approx(evaluation.metrics["exact_match"])


def test_a_segmentation_has_a_row_per_image_of_the_pixels_that_count():
    torch.manual_seed(0)
    networks = [nn.Conv2d(1, 3, 3, padding=1) for _ in range(2)]
    posterior = ds.DeepEnsemble(networks, likelihood=ds.Classification(ignore_index=255))
    x, y = torch.rand(4, 1, 8, 8), torch.randint(3, (4, 8, 8))
    y[0, :3] = 255
    predictive, frame = posterior.predict(x), posterior.predict(x).to_dataframe(y)
    right = predictive.mean.argmax(1) == y
    assert frame["correct"][0] == pytest.approx(float(right[0, 3:].float().mean()))
    assert frame["total"].tolist()[1:] == pytest.approx(predictive.total[1:].mean((1, 2)).tolist())
    rows_of = ds.evaluate(posterior, [(x, y)]).examples()
    assert rows_of["correct"].tolist() == pytest.approx(frame["correct"].tolist())


def test_what_has_no_rows_is_one_clear_error(promised):
    posterior, x, y = promised
    refuses(lambda: posterior.predict(x).to_dataframe(y[:3]), "expected 60 targets, got 3; pass one per input")
    tokens = ds.DeepEnsemble([nn.Linear(4, 3) for _ in range(2)], likelihood=ds.Tokens())
    refuses(lambda: tokens.predict(rows(6)[None]).to_dataframe(), "got tokens; use .sequence", TypeError)
    frame = ds.evaluate(tokens, [(rows(6)[None], torch.zeros(1, 6, dtype=torch.long))]).examples()
    assert len(frame) == 1


@pytest.mark.parametrize(("posterior", "network", "total"), [
    (lambda: ensemble(3), 2 * (4 * 8 + 8 * 3), 3 * 2 * (4 * 8 + 8 * 3)),
    (lambda: ds.MAP(nn.Sequential(nn.Conv2d(4, 2, 3, padding=1), nn.Flatten(), nn.Linear(32, 3))), 2496, 2496),
    (lambda: ds.MCDropout(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), samples=5), 112, 64 + 5 * 48),
])  # fmt: skip
def test_operations_are_counted_for_one_input_and_shared_layers_once(posterior, network, total):
    posterior = posterior()
    x = torch.rand(5, 4, 4, 4) if isinstance(posterior, ds.MAP) else rows(5)
    assert ds.count_operations(posterior, x) == (network, total)
    found = ds.evaluate(posterior, [(x, torch.zeros(5, dtype=torch.long))], operations=True).metrics
    assert (found["cost/network_operations"], found["cost/operations"]) == (network, total)
    assert "cost/operations" not in ds.evaluate(posterior, [(x, torch.zeros(5, dtype=torch.long))]).metrics
