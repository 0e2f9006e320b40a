"""Predictives against brute force, exact mixture quantiles and their own samples, and drawn functions as one module."""

import copy
import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch
import torch.distributions as D
from torch import nn

import dissensus as ds
import tiny
from refusals import refuses

F64 = torch.float64


def categorical(members=5, inputs=7, classes=4, *space, sharpness=2.0):
    logits = sharpness * torch.randn(members, inputs, classes, *space, dtype=F64)
    return ds.ClassificationPredictive(logits.log_softmax(2))


def gaussian(members=4, inputs=6, outputs=2):
    means, variances = torch.randn(members, inputs, outputs, dtype=F64), torch.rand(members, inputs, outputs, dtype=F64)
    return ds.RegressionPredictive(means, 0.1 + variances)


def test_entropies_split_as_brute_force_says():
    predictive = categorical()
    p = predictive.member_means.numpy()  # (M, B, C)
    for b in range(7):
        mean = p[:, b].mean(0)
        total = scipy.stats.entropy(mean)
        aleatoric = np.mean([scipy.stats.entropy(row) for row in p[:, b]])
        assert predictive.mean[b].numpy() == pytest.approx(mean, abs=1e-12)
        assert float(predictive.total[b]) == pytest.approx(total, abs=1e-12)
        assert float(predictive.aleatoric[b]) == pytest.approx(aleatoric, abs=1e-12)
        assert float(predictive.epistemic[b]) == pytest.approx(total - aleatoric, abs=1e-12)
        assert float(predictive.confidence[b]) == pytest.approx(mean.max(), abs=1e-12)


def test_members_that_agree_have_no_epistemic_uncertainty_and_those_sure_of_different_classes_log_m():
    agreed = ds.ClassificationPredictive(torch.randn(6, 4).log_softmax(1).expand(5, 6, 4)).epistemic
    assert bool(((agreed >= 0) & (agreed < 1e-7)).all())
    predictive = ds.ClassificationPredictive(torch.eye(3, dtype=F64).log()[:, None])
    assert float(predictive.aleatoric) == 0
    assert float(predictive.epistemic) == pytest.approx(math.log(3), abs=1e-12)
    assert float(predictive.total) == pytest.approx(math.log(3), abs=1e-12)


def test_impossible_classes_make_no_nan():
    members = categorical().log_probs.clone()
    members[:, :, 0] = -math.inf  # impossible for all
    members[0, :, 1] = -math.inf  # impossible for one
    members = members.log_softmax(2)
    predictive = ds.ClassificationPredictive(members)
    for each in (predictive.mean, predictive.aleatoric, predictive.epistemic, predictive.total, predictive.confidence):
        assert bool(each.isfinite().all())
    p = predictive.mean[0].numpy()
    assert float(predictive.total[0]) == pytest.approx(scipy.stats.entropy(p), abs=1e-12)
    assert bool((predictive.log_prob(torch.zeros(7, dtype=torch.int64)) == -math.inf).all())
    assert not bool((predictive.sample(1000) == 0).any())
    soft = torch.tensor([[0.0, 0.5, 0.5, 0.0]], dtype=F64).repeat(7, 1)
    assert bool(predictive.log_prob(soft).isfinite().all())
    assert bool(predictive.apply_temperature(2.0).total.isfinite().all())


def test_log_probabilities_do_not_saturate():
    """float32 probabilities near one tie, log-probabilities do not."""
    logits = torch.tensor([[[0.0, -20.0]], [[0.0, -30.0]]])
    predictive = ds.ClassificationPredictive(logits.log_softmax(2))
    expected = math.log(0.5 * (math.exp(-20) + math.exp(-30)))
    assert float(predictive.log_prob(torch.tensor([1]))) == pytest.approx(expected, rel=1e-6)


def test_log_prob_is_that_of_the_mixture():
    predictive, y = categorical(), torch.randint(4, (7,))
    mixture = D.Categorical(probs=predictive.member_means.mean(0))
    torch.testing.assert_close(predictive.log_prob(y), mixture.log_prob(y), rtol=0, atol=1e-12)
    torch.testing.assert_close(predictive.log_prob(y.to(torch.uint8)), mixture.log_prob(y), rtol=0, atol=1e-12)
    soft = torch.rand(7, 4, dtype=F64).softmax(1)
    expected = (soft * mixture.probs.log()).sum(1)
    torch.testing.assert_close(predictive.log_prob(soft), expected, rtol=0, atol=1e-12)


def test_class_intervals_are_quantiles_over_members():
    predictive = categorical(members=9)
    lower, upper = predictive.interval(0.8)
    p = predictive.member_means
    torch.testing.assert_close(lower, p.quantile(0.1, dim=0), rtol=0, atol=1e-12)
    torch.testing.assert_close(upper, p.quantile(0.9, dim=0), rtol=0, atol=1e-12)
    one = categorical(members=1)
    assert all(torch.equal(bound, one.member_means[0]) for bound in one.interval(0.5))


def test_a_credible_set_is_the_smallest_that_holds_the_level():
    predictive = categorical(inputs=50, sharpness=1.0)
    for level in (0.3, 0.5, 0.9, 0.99):
        chosen = predictive.credible_set(level)
        assert chosen.shape == (50, 4)
        for p, mine in zip(predictive.mean, chosen, strict=True):
            sizes = [k for k in range(1, 5) if float(p.sort(descending=True).values[:k].sum()) >= level]
            assert int(mine.sum()) == sizes[0]  # no smaller set does
            assert float(p[mine].sum()) >= level
    assert int(predictive.credible_set(1e-9).sum(1).max()) == 1
    assert bool(predictive.credible_set(1.0).all())


def test_class_samples_have_the_mixtures_frequencies():
    predictive = categorical(inputs=3)
    n = 20_000
    draws = predictive.sample(n, generator=torch.Generator().manual_seed(1))
    assert draws.shape == (n, 3)
    for c in range(4):
        p = predictive.mean[:, c]
        error = 4 * (p * (1 - p) / n).sqrt()
        assert bool(((draws == c).double().mean(0) - p).abs().lt(error).all())
    again = predictive.sample(n, generator=torch.Generator().manual_seed(1))
    assert torch.equal(draws, again)


def test_pixels_are_treated_one_by_one():
    predictive = categorical(3, 2, 4, 5, 6)
    flat = ds.ClassificationPredictive(predictive.log_probs.movedim(2, -1).reshape(3, 60, 4))
    for name in ("aleatoric", "epistemic", "total", "confidence"):
        found = getattr(predictive, name)
        assert found.shape == (2, 5, 6)
        torch.testing.assert_close(found.flatten(), getattr(flat, name), rtol=0, atol=1e-12)
    y = torch.randint(4, (2, 5, 6))
    assert predictive.log_prob(y).shape == (2, 5, 6)
    torch.testing.assert_close(predictive.log_prob(y).flatten(), flat.log_prob(y.flatten()), rtol=0, atol=1e-12)
    assert predictive.sample(3).shape == (3, 2, 5, 6)
    assert predictive.credible_set(0.5).shape == (2, 4, 5, 6)
    assert torch.equal(predictive.credible_set(0.5).movedim(1, -1).reshape(60, 4), flat.credible_set(0.5))
    n = 4000
    frequency = (predictive.sample(n) == 1).double().mean(0)
    p = predictive.mean[:, 1]
    assert bool(((frequency - p).abs() < 5 * (p * (1 - p) / n).sqrt() + 1e-12).all())


def test_tempered_members_have_divided_logits():
    logits = torch.randn(3, 5, 4, dtype=F64)
    predictive = ds.ClassificationPredictive(logits.log_softmax(2))
    expected = (logits / 1.7).log_softmax(2)
    torch.testing.assert_close(predictive.apply_temperature(1.7).log_probs, expected, rtol=0, atol=1e-12)


def test_variances_obey_the_law_of_total_variance():
    predictive = gaussian()
    for b in range(6):
        for d in range(2):
            means, variances = predictive.member_means[:, b, d].numpy(), predictive.variances[:, b, d].numpy()
            second = np.mean(means**2 + variances)  # E y² of the mixture
            assert float(predictive.total[b, d]) == pytest.approx(second - means.mean() ** 2, abs=1e-12)
            assert float(predictive.aleatoric[b, d]) == pytest.approx(variances.mean(), abs=1e-12)
            assert float(predictive.epistemic[b, d]) == pytest.approx(means.var(), abs=1e-12)
    assert torch.equal(predictive.total, predictive.aleatoric + predictive.epistemic)
    assert float(gaussian(members=1).epistemic.abs().max()) == 0


def test_log_density_is_that_of_the_mixture():
    predictive, y = gaussian(), torch.randn(6, 2, dtype=F64)
    means, deviations = (each.movedim(0, 1) for each in (predictive.member_means, predictive.variances.sqrt()))
    weights = D.Categorical(probs=torch.ones(6, 4, dtype=F64))
    mixture = D.MixtureSameFamily(weights, D.Independent(D.Normal(means, deviations), 1))
    torch.testing.assert_close(predictive.log_prob(y), mixture.log_prob(y), rtol=0, atol=1e-12)
    assert predictive.log_prob(y + 1e3).isfinite().all()  # the densities underflow there, their logarithm does not


@pytest.mark.parametrize("level", [0.01, 0.5, 0.9, 0.999])
def test_intervals_are_exact_mixture_quantiles(level):
    predictive = gaussian()
    lower, upper = predictive.interval(level)
    means, deviations = predictive.member_means.numpy(), predictive.variances.sqrt().numpy()
    for b in range(6):
        for d in range(2):
            normal = scipy.stats.norm(means[:, b, d], deviations[:, b, d])
            for found, q in ((lower, (1 - level) / 2), (upper, (1 + level) / 2)):
                expected = scipy.optimize.brentq(lambda t, q=q, n=normal: n.cdf(t).mean() - q, -50, 50, xtol=1e-13)
                assert float(found[b, d]) == pytest.approx(expected, abs=1e-9)
    assert bool((lower < upper).all())


def test_quantiles_hold_for_members_far_apart_and_in_float32():
    means, variances = torch.tensor([[[-100.0]], [[100.0]]]), torch.tensor([[[1.0]], [[1e-4]]])
    predictive = ds.RegressionPredictive(means, variances)
    for q in (0.01, 0.25, 0.75, 0.99):
        expected = scipy.stats.norm(-100, 1).ppf(2 * q) if q < 0.5 else scipy.stats.norm(100, 0.01).ppf(2 * q - 1)
        assert float(predictive.quantile(q)) == pytest.approx(expected, abs=2e-5)


def test_samples_cover_and_have_the_mixtures_moments():
    predictive = gaussian(inputs=3)
    n = 40_000
    draws = predictive.sample(n, generator=torch.Generator().manual_seed(2))
    assert draws.shape == (n, 3, 2)
    error = 4 * (predictive.total / n).sqrt()
    assert bool(((draws.mean(0) - predictive.mean).abs() < error).all())
    lower, upper = predictive.interval(0.9)
    covered = ((draws > lower) & (draws < upper)).double().mean(0)
    assert bool(((covered - 0.9).abs() < 4 * math.sqrt(0.9 * 0.1 / n)).all())
    # Outputs of one draw come from one member: their covariance is that of the members' means.
    m = predictive.member_means[:, 0]
    expected = ((m[:, 0] - m[:, 0].mean()) * (m[:, 1] - m[:, 1].mean())).mean()
    centred = draws[:, 0] - predictive.mean[0]
    product = centred[:, 0] * centred[:, 1]
    assert abs(float(product.mean() - expected)) < 4 * float(product.std()) / n**0.5


def test_the_distribution_function_is_the_mean_over_members():
    predictive, y = gaussian(), torch.randn(6, 2, dtype=F64)
    members = scipy.stats.norm(predictive.member_means.numpy(), predictive.variances.sqrt().numpy())
    expected = members.cdf(y.numpy()).mean(0)
    np.testing.assert_allclose(predictive.cdf(y).numpy(), expected, rtol=0, atol=1e-12)


def test_a_tempered_gaussian_has_a_larger_deviation():
    predictive = gaussian()
    tempered = predictive.apply_temperature(3.0)
    torch.testing.assert_close(tempered.aleatoric, 9 * predictive.aleatoric, rtol=1e-12, atol=0)
    assert torch.equal(tempered.epistemic, predictive.epistemic)


def test_outputs_without_an_axis_of_their_own():
    predictive = ds.RegressionPredictive(torch.randn(4, 6, dtype=F64), torch.rand(4, 6, dtype=F64) + 0.1)
    wide = ds.RegressionPredictive(predictive.member_means[..., None], predictive.variances[..., None])
    y = torch.randn(6, dtype=F64)
    assert predictive.mean.shape == predictive.total.shape == predictive.log_prob(y).shape == (6,)
    torch.testing.assert_close(predictive.log_prob(y), wide.log_prob(y[:, None]), rtol=0, atol=1e-12)
    torch.testing.assert_close(predictive.interval()[0], wide.interval()[0][:, 0], rtol=0, atol=1e-12)
    assert predictive.sample(5).shape == (5, 6)


@pytest.mark.parametrize("make", [categorical, gaussian])
def test_parts_make_the_whole(make):
    predictive = make()
    n = len(predictive)
    parts = [predictive[:2], predictive[torch.arange(2, 5)], predictive[torch.arange(n) >= 5]]
    assert [len(part) for part in parts] == [2, 3, n - 5]
    whole = ds.Predictive.cat(parts)
    assert type(whole) is type(predictive)
    assert all(torch.equal(a, b) for a, b in zip(whole.defining_tensors(), predictive.defining_tensors(), strict=True))
    one = predictive[3]
    assert len(one) == 1
    torch.testing.assert_close(one.total, predictive.total[3:4], rtol=0, atol=1e-15)
    torch.testing.assert_close(predictive[-1].mean, predictive.mean[-1:], rtol=0, atol=1e-15)
    assert len(list(predictive)) == n
    with pytest.raises(IndexError):
        predictive[n]
    assert torch.equal(predictive.to("cpu").member_means, predictive.member_means)
    assert f"members={predictive.member_means.shape[0]}" in repr(predictive)


@pytest.mark.parametrize("level", [0, 1, -0.5, 1.5, math.nan])
def test_a_level_outside_is_refused(level):
    for predictive in (categorical(), gaussian()):
        refuses(lambda p=predictive: p.interval(level), "expected level above 0 and below 1")
    if level != 1:
        refuses(lambda: categorical().credible_set(level), r"expected level above 0 and of at most 1")


def test_a_regression_has_neither_confidence_nor_log_probs():
    refuses(lambda: gaussian().confidence, r"use \.total, a variance, instead", TypeError)
    refuses(lambda: gaussian().log_probs, r"expected a classification for log_probs, .* use \.member_means", TypeError)


def test_members_are_named_by_their_scale():
    predictive = categorical()
    assert torch.equal(predictive.member_means, predictive.log_probs.exp())
    torch.testing.assert_close(predictive.member_means.mean(0), predictive.mean, rtol=0, atol=1e-12)
    for each in (predictive, gaussian(), predictive[0]):
        with pytest.raises(AttributeError, match="got 'members'; use member_means or log_probs"):
            _ = each.members
        assert not hasattr(each, "anything")


def test_batches_whose_outputs_differ_in_shape_do_not_join():
    batches = [categorical(5, 7, 4, 3), categorical(5, 7, 4, 2)]
    refuses(lambda: ds.Predictive.cat(batches), r"one shape, got \[\(4, 2\), \(4, 3\)\].*ds.predict_batches")


def test_levels_and_quantiles_are_one_number():
    predictive = ds.RegressionPredictive(torch.zeros(2, 3, 1), torch.ones(2, 3, 1))
    classes = ds.ClassificationPredictive(torch.zeros(2, 3, 1))
    for wrong in ([0.5, 0.9], torch.tensor([0.5, 0.9]), np.array([0.5, 0.9]), None):
        for ask in (predictive.interval, predictive.quantile, classes.interval, classes.credible_set):
            refuses(lambda ask=ask, wrong=wrong: ask(wrong), r"as a number, got .*; pass a float", TypeError)
    for outside in (0.0, 1.0, 2.0):
        refuses(lambda q=outside: predictive.quantile(q), "expected q above 0 and below 1")
    assert torch.equal(predictive.quantile(torch.tensor(0.25)), predictive.quantile(0.25))


def test_targets_do_not_broadcast():
    """(B,) beside means of (M, B, 1) would be (B, B), summed without a word; it stands for the column (B, 1)."""
    predictive = ds.RegressionPredictive(torch.zeros(2, 3, 1), torch.ones(2, 3, 1))
    for ask in (predictive.log_prob, predictive.cdf):
        assert torch.equal(ask(torch.arange(3.0)), ask(torch.arange(3.0)[:, None]))
        with pytest.raises(ValueError, match=r"targets of shape \(3, 1\), got \(2,\)"):
            ask(torch.zeros(2))
    assert torch.equal(predictive.log_prob(np.zeros((3, 1))), predictive.log_prob(torch.zeros(3, 1)))
    assert predictive.cdf(torch.tensor(0.0)).tolist() == [[0.5]] * 3


def mlp():
    return ds.nets.MLP(4, 3, hidden=(6,)).double()


def swag():
    posterior, (x, y) = ds.SWAG(mlp(), rank=3, samples=4), tiny.points()
    ds.fit(posterior, [(x, y)], epochs=8, progress=False, engine="loop")
    return posterior


EXPORTED = {"map": lambda: ds.MAP(mlp()), "ensemble": lambda: ds.DeepEnsemble([mlp() for _ in range(3)]), "swag": swag}


@pytest.mark.slow  # files that were exported are looked at in tests/test_states.py
@pytest.mark.parametrize("method", EXPORTED)
def test_an_exported_predictor_has_the_temperature_inside(method, tmp_path):
    posterior, (x, _) = EXPORTED[method](), tiny.points()
    posterior.temperature.fill_(2.34)
    batch = {0: torch.export.Dim("batch", min=2, max=64)}
    program = torch.export.export(posterior.predictor(), (x,), dynamic_shapes=(batch,), strict=False)
    torch.export.save(program, tmp_path / "moons.pt2")
    exported = torch.export.load(tmp_path / "moons.pt2").module()
    found, predictive = exported(x[:7]), posterior.predict(x[:7])
    for name in ("mean", "total", "aleatoric", "epistemic"):
        torch.testing.assert_close(found[name], getattr(predictive, name), rtol=0, atol=1e-12)
    cold = posterior(x[:7]).detach().softmax(2).mean(0)
    assert float((cold - found["mean"]).abs().max()) > 1e-3  # the networks' own outputs know of no temperature


def test_a_predictor_of_a_regression_gives_mean_and_variance():
    posterior = ds.MAP(nn.Linear(4, 1).double(), likelihood=ds.Regression(noise=0.2))
    posterior.temperature.fill_(3.0)
    x, _ = tiny.points()
    found = posterior.predictor()(x)
    torch.testing.assert_close(found["mean"], posterior.member(0)(x).detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(found["total"], torch.full((12, 1), 0.36, dtype=torch.float64), rtol=1e-6, atol=0)


def test_nothing_that_happens_afterwards_changes_a_predictor():
    posterior, (x, y) = tiny.ensemble(tiny.mlp), tiny.points()  # with batch norm
    posterior.temperature.fill_(2.0)
    predictor = posterior.train().predictor()
    before = predictor(x)["mean"]
    ds.fit(posterior, [(x, y)], epochs=1, progress=False)
    for use in (predictor, predictor.train(), copy.deepcopy(predictor)):
        assert torch.equal(use(x)["mean"], before)
        assert not any(parameter.requires_grad for parameter in use.parameters())
    x.requires_grad_()
    predictor(x)["total"].sum().backward()
    assert float(x.grad.abs().max()) > 0
