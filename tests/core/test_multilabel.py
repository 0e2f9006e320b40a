"""MultiLabel: independent labels against torch.distributions, the mixture against sums over all labels, and every function."""

import itertools
import math

import pytest
import torch
import torch.distributions as D
from torch import nn

import dissensus as ds
import tiny
from refusals import refuses

F64 = torch.float64


def labels(rows: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    """x (N, 4), and y (N, 3) that depends on it, of both kinds in every column."""
    x = torch.randn(rows, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    return x, (x[:, :3] + 0.3 * x[:, 1:] > 0).long()


def ensemble(members: int = 3) -> ds.DeepEnsemble:
    torch.manual_seed(0)
    return ds.DeepEnsemble([nn.Linear(4, 3).double() for _ in range(members)], likelihood=ds.MultiLabel())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool, torch.int64])
def test_labels_are_independent_bernoulli(dtype):
    logits, y = 4 * torch.randn(20, 5, dtype=F64), torch.rand(20, 5) > 0.5
    likelihood = ds.MultiLabel()
    expected = D.Bernoulli(logits=logits).log_prob(y.double()).sum(1)
    torch.testing.assert_close(likelihood.log_prob(logits, y.to(dtype)), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(likelihood.nll(logits, y.to(dtype)), -expected.mean(), rtol=0, atol=1e-12)
    likelihood.check(logits.shape, y.to(dtype))
    closed, u = likelihood.curvature(logits)
    whole, _ = ds.Likelihood.curvature(likelihood, logits, y.to(dtype))  # by automatic differentiation, (B, L, L)
    assert u is None
    torch.testing.assert_close(torch.diag_embed(closed), whole, rtol=0, atol=1e-12)


def test_the_mixture_is_a_distribution_whose_moments_are_those_of_its_members():
    members = 2 * torch.randn(3, 7, 4, dtype=F64)
    predictive = ds.MultiLabel().predictive(members)
    every = torch.tensor([*itertools.product([0.0, 1.0], repeat=4)], dtype=F64)  # (16, L)
    p = torch.stack([predictive.log_prob(row.expand(7, 4)) for row in every]).exp()  # (16, B)
    torch.testing.assert_close(p.sum(0), torch.ones(7, dtype=F64), rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.einsum("kb,kl->bl", p, every), predictive.mean, rtol=0, atol=1e-12)
    alone, mean = D.Bernoulli(logits=members), D.Bernoulli(predictive.mean)
    torch.testing.assert_close(predictive.aleatoric, alone.entropy().sum(2).mean(0), rtol=0, atol=1e-12)
    torch.testing.assert_close(predictive.total, mean.entropy().sum(1), rtol=0, atol=1e-12)
    assert bool((predictive.epistemic > 0).all())
    likelier = torch.maximum(predictive.mean, 1 - predictive.mean)
    torch.testing.assert_close(predictive.confidence, likelier, rtol=0, atol=1e-12)
    drawn = predictive.sample(
        40_000, generator=torch.Generator().manual_seed(0)
    )  # rows keep one member's labels together
    pairs = torch.einsum("nbi,nbj->bij", drawn, drawn) / 40_000
    joint = torch.einsum("kb,ki,kj->bij", p, every, every)
    torch.testing.assert_close(pairs, joint, rtol=0, atol=4 * 0.5 / 200)
    for end, q in zip(predictive.interval(0.5), (0.25, 0.75), strict=True):
        torch.testing.assert_close(end, predictive.member_means.quantile(q, dim=0), rtol=0, atol=1e-12)
    sharp = ds.MultiLabelPredictive(torch.tensor([[[800.0, -800.0]]]))
    assert (float(sharp.log_prob(torch.tensor([[1, 0]]))), float(sharp.total)) == (0.0, 0.0)
    assert float(sharp.log_prob(torch.tensor([[0, 0]]))) == -800
    torch.testing.assert_close(predictive.apply_temperature(2.0).member_means, (members / 2).sigmoid())


def test_metrics_of_labels_are_those_of_their_definitions():
    x, y = labels()
    posterior = ensemble()
    found = ds.evaluate(posterior, (x, y), ood={"far": 9 * x}, progress=False)
    predictive = posterior.predict(x)
    right = (predictive.mean > 0.5) == (y == 1)
    confidence, correct = predictive.confidence.flatten(), right.flatten().double()
    alone = D.Bernoulli(logits=posterior(x).detach()).log_prob(y.double()).sum(2).mean(1)
    expected = {
        "accuracy": right.double().mean(),
        "exact_match": right.all(1).double().mean(),
        "nll": -predictive.log_prob(y).mean(),
        "brier": 2 * (predictive.mean - y).square().mean(),
        "ece": ds.metrics.classification.confidence_ece(confidence, correct, bins=15),
        "average_precision": sum(_average_precision(predictive.mean[:, i], y[:, i]) for i in range(3)) / 3,
        "members/nll": -alone.mean(),
        "members/nll_best": -alone.max(),
        "members/diversity": -alone.mean() + predictive.log_prob(y).mean(),
        "ood/far/auroc": ds.metrics.auroc(*(-posterior.predict(at).confidence.log().sum(1) for at in (x, 9 * x))),
    }
    assert found.kind == "multilabel"
    for name, value in expected.items():
        assert found.metrics[name] == pytest.approx(float(value), abs=1e-12), name
    each = {"correct": "accuracy", "exact_match": "exact_match", "nll": "nll", "brier": "brier"}
    for name, metric in each.items():
        assert found.arrays[f"test/{name}"].shape == (60,)
        assert float(found.arrays[f"test/{name}"].mean()) == pytest.approx(found.metrics[metric], abs=1e-12)
    assert "nats" in predictive._repr_html_()
    half = ds.evaluate(posterior, (x, 0.2 + 0.6 * y), progress=False).metrics  # as mixup makes them
    assert half["accuracy"] == found.metrics["accuracy"]
    assert half["nll"] == pytest.approx(-float(predictive.log_prob(0.2 + 0.6 * y).mean()), abs=1e-12)


def _average_precision(score: torch.Tensor, y: torch.Tensor) -> float:
    """Mean over present labels of the share of present ones among those that score at least as high."""
    return sum(float(y[score >= at].double().mean()) for at in score[y == 1]) / int(y.sum())


def test_every_function_takes_several_labels(tmp_path):
    x, y = labels()
    posterior = ensemble()
    before = ds.evaluate(posterior, (x, y), progress=False).metrics["nll"]
    ds.fit(posterior, (x, y), epochs=20, validation=(x, y), progress=False)
    assert ds.evaluate(posterior, (x, y), progress=False).metrics["nll"] < before
    assert ds.calibrate(posterior, (x, y)).temperature != 1
    ds.save(posterior, tmp_path / "labels")
    loaded = ds.load(tmp_path / "labels", network=nn.Linear(4, 3).double())
    assert torch.equal(loaded.predict(x).mean, posterior.predict(x).mean)
    laplace = ds.Laplace(posterior.member(0), likelihood=ds.MultiLabel(), prior_precision=1.0).fit_posthoc((x, y))
    assert math.isfinite(float(laplace.log_marginal_likelihood()))
    assert bool((laplace.predict(x).epistemic > 0).all())
    assert posterior.predictor()(x)["mean"].equal(posterior.predict(x).mean)
    refuses(lambda: ds.calibrate(posterior, (x, y), "isotonic"), "expected method of temperature.* a multilabel")
    refuses(lambda: ds.conformal(posterior, (x, y)), "expected one class or real targets per row, got several labels")
    refuses(lambda: ds.summarise(posterior, (x, y)), "expected a classification or regression to summarise", TypeError)
    refuses(lambda: posterior.loss(x, y[:, :2]), r"of one shape \(B, L\), got \(60, 3\) and \(60, 2\)")
    refuses(lambda: posterior.loss(x, 2 * y), "expected targets from 0 to 1")
    refuses(lambda: ds.MAP(tiny.segmenter(), likelihood=ds.MultiLabel()).loss(torch.zeros(1, 2, 4, 4), y), "shape")
