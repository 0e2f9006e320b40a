"""Likelihoods against torch.distributions and scipy, weights, soft labels, and what they refuse."""

import copy
import math

import numpy as np
import pytest
import scipy.stats
import torch
import torch.distributions as D
from torch import nn

import dissensus as ds
import tiny
from dissensus.core.likelihood import expand_weight, full_precision
from refusals import refuses

F64 = torch.float64


def test_classification_is_a_categorical():
    logits, y = 5 * torch.randn(40, 4, dtype=F64), torch.randint(4, (40,))
    likelihood = ds.Classification()
    expected = D.Categorical(logits=logits).log_prob(y)
    torch.testing.assert_close(likelihood.log_prob(logits, y), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(likelihood.nll(logits, y), -expected.mean(), rtol=0, atol=1e-12)
    (described,) = likelihood.describe(logits)
    torch.testing.assert_close(described.logsumexp(1), torch.zeros(40, dtype=F64), rtol=0, atol=1e-12)
    torch.testing.assert_close(described.gather(1, y[:, None])[:, 0], expected, rtol=0, atol=1e-12)
    assert isinstance(likelihood.predictive(described[None]), ds.ClassificationPredictive)


def test_soft_labels_are_the_expected_log_probability():
    logits, soft = torch.randn(20, 4, dtype=F64), torch.rand(20, 4, dtype=F64).softmax(1)
    each = torch.stack([D.Categorical(logits=logits).log_prob(torch.full((20,), c)) for c in range(4)], 1)
    found = ds.Classification().log_prob(logits, soft)
    torch.testing.assert_close(found, (soft * each).sum(1), rtol=0, atol=1e-12)
    hard = torch.randint(4, (20,))
    one_hot = nn.functional.one_hot(hard, 4).double()
    expected = ds.Classification().log_prob(logits, hard)
    torch.testing.assert_close(ds.Classification().log_prob(logits, one_hot), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_class_indices_of_any_integer_type(dtype):
    logits, y = torch.randn(6, 3, dtype=F64), torch.arange(6) % 3
    likelihood = ds.Classification()
    likelihood.check(logits.shape, y.to(dtype))
    assert torch.equal(likelihood.log_prob(logits, y.to(dtype)), likelihood.log_prob(logits, y))


def test_positions_to_ignore_do_not_count():
    logits, y = torch.randn(3, 4, 5, 6, dtype=F64), torch.randint(4, (3, 5, 6))
    void = torch.rand(3, 5, 6) < 0.4
    likelihood = ds.Classification(ignore_index=255)
    each = D.Categorical(logits=logits.movedim(1, -1)).log_prob(y)
    found = likelihood.nll(logits, torch.where(void, 255, y))
    torch.testing.assert_close(found, -each[~void].mean(), rtol=0, atol=1e-12)
    # with weights per example: Σ w log p / Σ w over what counts
    weight = torch.tensor([1.0, 2.0, 0.5], dtype=F64)
    w = weight[:, None, None].expand(3, 5, 6)[~void]
    expected = -(w * each[~void]).sum() / w.sum()
    found = likelihood.nll(logits, torch.where(void, 255, y), weight)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_batch_in_which_nothing_counts_has_no_loss_and_no_gradient():
    logits = torch.randn(4, 3, requires_grad=True)
    loss = ds.Classification(ignore_index=-1).nll(logits, torch.full((4,), -1))
    loss.backward()
    assert float(loss.detach()) == 0
    assert float(logits.grad.abs().max()) == 0
    loss = ds.Classification().nll(logits, torch.zeros(4, dtype=torch.int64), torch.zeros(4))
    assert float(loss.detach()) == 0


@pytest.mark.parametrize("shape", [(7,), (7, 1), (7, 3), (7, 2, 3)])
def test_regression_is_a_gaussian(shape):
    mean, y = torch.randn(shape, dtype=F64), torch.randn(shape, dtype=F64)
    expected = D.Normal(mean, 0.3).log_prob(y).reshape(7, -1).sum(1)
    likelihood = ds.Regression(noise=0.3)
    likelihood.check(mean.shape, y)
    torch.testing.assert_close(likelihood.log_prob(mean, y), expected, rtol=0, atol=1e-12)
    by_scipy = scipy.stats.norm(mean.numpy(), 0.3).logpdf(y.numpy()).reshape(7, -1).sum(1)
    np.testing.assert_allclose(likelihood.log_prob(mean, y).numpy(), by_scipy, rtol=0, atol=1e-12)
    means, variances = likelihood.describe(mean)
    assert means.shape == variances.shape == shape
    torch.testing.assert_close(variances, torch.full(shape, 0.09, dtype=F64), rtol=1e-12, atol=0)


def test_learned_noise_goes_to_the_residuals_deviation():
    """The maximum of the likelihood in σ is the root mean square of the residuals."""
    likelihood = ds.Regression(initial=2.0).double()
    residuals = 0.5 * torch.randn(1000, 1, dtype=F64)
    assert float(likelihood.describe(residuals)[1][0].detach()) == pytest.approx(4.0, rel=1e-6)
    means = torch.zeros_like(residuals)
    tiny.minimise(likelihood.parameters(), lambda: likelihood.nll(means, residuals), calls=3)
    expected = float(residuals.square().mean().sqrt())
    assert float(likelihood.log_noise.detach().exp()) == pytest.approx(expected, rel=1e-6)


def test_heteroscedastic_regression_is_a_gaussian_per_input():
    outputs, y = torch.randn(9, 6, dtype=F64), torch.randn(9, 3, dtype=F64)
    std = (nn.functional.softplus(outputs[:, 3:]) + 1e-6).sqrt()
    expected = D.Normal(outputs[:, :3], std).log_prob(y).sum(1)
    likelihood = ds.HeteroscedasticRegression()
    likelihood.check(outputs.shape, y)
    torch.testing.assert_close(likelihood.log_prob(outputs, y), expected, rtol=0, atol=1e-12)
    means, variances = likelihood.describe(outputs)
    assert torch.equal(means, outputs[:, :3])
    torch.testing.assert_close(variances, std**2, rtol=1e-12, atol=0)
    # A raw variance of −50 is no division by zero.
    outputs[:, 3:] = -50
    assert bool(likelihood.log_prob(outputs, y).isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_not_where_likelihoods_are_evaluated(dtype):
    logits = torch.randn(5, 3).to(dtype)
    assert full_precision(logits).dtype == torch.float32
    assert full_precision(logits.double()).dtype == F64
    assert ds.Classification().nll(logits, torch.zeros(5, dtype=torch.int64)).dtype == torch.float32
    assert ds.Classification().describe(logits)[0].dtype == torch.float32
    learned = ds.Regression("learned", initial=300.0).to(dtype)  # a variance of 9e4 is beyond float16
    mean, variance = learned.describe(logits)
    expected = (2 * learned.log_noise.detach().double()).exp()
    torch.testing.assert_close(variance.detach().double(), expected.expand_as(variance), rtol=1e-6, atol=0)
    assert bool(learned.nll(logits, mean.detach()).isfinite())


@pytest.mark.parametrize(("likelihood", "outputs", "y"), [
    (ds.Classification(), torch.randn(4, 3, dtype=F64), torch.tensor([0, 1, 2, 1])),
    (ds.Classification(), torch.randn(4, 3, 2, 2, dtype=F64), torch.randint(3, (4, 2, 2))),
    (ds.Regression(noise=0.5), torch.randn(4, 2, dtype=F64), torch.randn(4, 2, dtype=F64)),
    (ds.HeteroscedasticRegression(), torch.randn(4, 2, dtype=F64), torch.randn(4, 1, dtype=F64)),
], ids=["classes", "pixels", "regression", "heteroscedastic"])  # fmt: skip
def test_a_weight_of_two_is_the_example_twice(likelihood, outputs, y):
    weight = torch.tensor([1.0, 2.0, 1.0, 0.0])
    rows = torch.tensor([0, 1, 1, 2])
    expected = likelihood.nll(outputs[rows], y[rows])
    torch.testing.assert_close(likelihood.nll(outputs, y, weight), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(likelihood.nll(outputs, y, 10 * weight), expected, rtol=0, atol=1e-12)


def test_weights_are_spread_over_pixels_of_their_own_example():
    like = torch.zeros(2, 2, 2)
    assert expand_weight(torch.tensor([1.0, 3.0]), like)[1].tolist() == [[3, 3], [3, 3]]
    assert expand_weight(torch.tensor([1.0, 3.0]), like)[0].tolist() == [[1, 1], [1, 1]]
    for weight in (torch.ones(3), torch.ones(2, 2, 2, 1)):
        with pytest.raises(ValueError, match=r"expected sample weights of shape \(2,\), got"):
            expand_weight(weight, like)


@pytest.mark.parametrize("space", [(), (5, 4)])
@pytest.mark.parametrize("ignore", [None, 255, 1, 0, -1, -100])
def test_class_weights_are_those_of_torchs_cross_entropy(space, ignore):
    outputs, y = torch.randn(6, 3, *space, dtype=F64), torch.randint(3, (6, *space))
    weights = torch.tensor([0.5, 3.0, 40.0], dtype=F64)
    likelihood = ds.Classification(ignore_index=ignore, class_weights=weights)
    if ignore is not None:
        y[0] = ignore
        likelihood.check(outputs.shape, y)
    ignored = -100 if ignore is None else ignore
    expected = nn.functional.cross_entropy(outputs, y, weight=weights, ignore_index=ignored)
    torch.testing.assert_close(likelihood.nll(outputs, y), expected, rtol=0, atol=1e-12)
    if ignore is None or ignore >= 0:
        torch.testing.assert_close(likelihood.nll(outputs, y.to(torch.uint8)), expected, rtol=0, atol=1e-12)
    rows = torch.tensor([0, 1, 1, 3])
    twice = likelihood.nll(outputs[rows], y[rows])
    weighted = likelihood.nll(outputs, y, torch.tensor([1.0, 2, 0, 1, 0, 0]))
    torch.testing.assert_close(weighted, twice, rtol=0, atol=1e-12)
    assert torch.equal(likelihood.log_prob(outputs, y), ds.Classification(ignore).log_prob(outputs, y))


def test_class_weights_are_trained_with_saved_and_loaded(tmp_path):
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    weights = ds.data.class_weights(torch.tensor([[0, 0, 1, 1, 1, 2]]), 3)
    likelihood = ds.Classification(class_weights=weights)
    posterior = ds.DeepEnsemble([nn.Linear(4, 3) for _ in range(2)], likelihood=likelihood)
    ds.fit(posterior, [(x, y)], epochs=1, progress=False)
    ds.save(posterior, tmp_path / "posterior")
    loaded = ds.load(tmp_path / "posterior", nn.Linear(4, 3))
    assert loaded.likelihood.class_weights == weights.tolist()
    assert torch.equal(loaded.predict(x).member_means, posterior.predict(x).member_means)


def test_class_weights_that_are_none():
    refuses(lambda: ds.Classification(class_weights=[1.0, 0.0]), "expected every class weight above 0, got 0")
    two, three = (ds.Classification(class_weights=[1.0, 2.0, 3.0][:n]) for n in (2, 3))
    refuses(lambda: two.check(torch.Size((4, 3)), torch.zeros(4).long()), "expected 3 class weights, got 2")
    refuses(lambda: ds.Laplace(nn.Linear(4, 3), likelihood=three), "expected a likelihood without class_weights")


@pytest.mark.parametrize(("shape", "y", "text"), [
    ((4, 3), torch.tensor([0, 1, 2, 3]), "expected labels in 0…2, got 3"),
    ((4, 3), torch.tensor([0, 1, 2, -1]), "expected labels in 0…2, got -1"),
    ((4, 3), torch.tensor([0, 1, 2, -100]), "expected labels in 0…2, got -100"),
    ((4, 3), torch.tensor([0, 1, 2]), r"class indices of shape \(4,\).* got torch.int64 of shape \(3,\)"),
    ((4, 3), torch.zeros(4, 1, dtype=torch.int64), "pass one class index per example"),
    ((4, 2), torch.zeros(4, dtype=torch.bool), r"bool of shape \(4,\); pass one class index per example, y.long\("),
    ((4, 3), torch.eye(4, 3, dtype=torch.int64), "pass class indices, not one-hot rows"),
    ((4, 3), torch.zeros(4), r"got torch.float32 of shape \(4,\); pass one class index per example, y.long"),
    ((4, 3), torch.ones(4, 3), "expected soft labels ≥ 0 that sum to one"),
    ((4, 3), torch.tensor([[2.0, -1.0, 0.0]]).repeat(4, 1), "expected soft labels ≥ 0 that sum to one"),
    ((4, 3), torch.full((4, 3), math.nan), "expected soft labels ≥ 0 that sum to one"),
    ((4, 3), torch.zeros(4, dtype=torch.bool), "got torch.bool"),
    ((4, 1), torch.zeros(4, dtype=torch.int64), r"expected logits of shape \(B, C\) with C ≥ 2, got \(4, 1\)"),
    ((4,), torch.zeros(4, dtype=torch.int64), r"expected logits of shape \(B, C\) with C ≥ 2, got \(4,\)"),
    ((2, 3, 5, 6), torch.zeros(2, dtype=torch.int64), r"expected integer class indices of shape \(2, 5, 6\)"),
    ((2, 3, 5, 6), torch.zeros(2, 6, 5, dtype=torch.int64), r"expected integer class indices of shape \(2, 5, 6\)"),
])  # fmt: skip
def test_labels_that_cannot_belong_to_the_logits(shape, y, text):
    refuses(lambda: ds.Classification().check(torch.Size(shape), y), text)
    network = nn.Sequential(nn.Flatten(), nn.Linear(2, math.prod(shape[1:])), nn.Unflatten(1, shape[1:] or (1,)))
    network = nn.Sequential(network, nn.Flatten(0)) if len(shape) == 1 else network
    refuses(lambda: ds.MAP(network).backward(torch.zeros(shape[0], 2), y), text)


@pytest.mark.parametrize(("likelihood", "shape", "y", "text"), [
    (ds.Regression(), (4, 1), torch.zeros(4), r"expected targets of shape \(4, 1\), got \(4,\); reshape"),
    (ds.Regression(), (4,), torch.zeros(4, 1), r"expected targets of shape \(4,\), got \(4, 1\)"),
    (ds.Regression(), (4, 1), torch.zeros(4, 1, dtype=torch.int64), "expected real targets, got torch.int64"),
    (ds.Regression(), (4, 1), torch.full((4, 1), math.nan), "expected finite targets, got NaN or infinity"),
    (ds.Regression(), (4, 1), torch.full((4, 1), math.inf), "expected finite targets"),
    (ds.HeteroscedasticRegression(), (4, 3), torch.zeros(4, 1), r"expected outputs of shape \(B, 2D\)"),
    (ds.HeteroscedasticRegression(), (4, 4), torch.zeros(4, 4), r"expected targets of shape \(4, 2\)"),
])  # fmt: skip
def test_targets_that_cannot_belong_to_the_outputs(likelihood, shape, y, text):
    refuses(lambda: likelihood.check(torch.Size(shape), y), text)


def test_a_noise_that_is_none():
    for noise in (0, -1.0, math.nan, "learnt", None):
        with pytest.raises((ValueError, TypeError), match=r"expected noise (above 0|of learned|as a number), got"):
            ds.Regression(noise=noise)
    refuses(lambda: ds.Regression(initial=0), "expected initial above 0, got 0")


def whole(likelihood, outputs, y=None):
    """(B, ..., C, C) Hessians, from either form that a likelihood may give."""
    a, u = likelihood.curvature(outputs, y)
    found = torch.diag_embed(a.movedim(1, -1)) if a.ndim == outputs.ndim else a.movedim(1, -2)
    return found if u is None else found - u.movedim(1, -1)[..., :, None] * u.movedim(1, -1)[..., None, :]


def by_rows(likelihood, outputs, y):
    """(B, C, C) second derivatives of −log p of one example after the other."""
    hessian = torch.func.hessian(lambda row, t: -likelihood.log_prob(row[None], t[None]).sum())
    return torch.stack([hessian(f, t) for f, t in zip(outputs, y, strict=True)])


LAWS = {
    "classes": (ds.Classification(), torch.tensor([0, 2, 1, 1, 0])),
    "soft labels": (ds.Classification(), torch.rand(5, 4, dtype=F64).softmax(1)),
    "fixed noise": (ds.Regression(0.3), torch.randn(5, 4, dtype=F64)),
    "learned noise": (ds.Regression(initial=0.7).double(), torch.randn(5, 4, dtype=F64)),
}


@pytest.mark.parametrize("law", LAWS)
def test_a_closed_curvature_is_the_hessian(law):
    likelihood, y = LAWS[law]
    outputs = 2 * torch.randn(5, 4, dtype=F64)
    expected = by_rows(likelihood, outputs, y)
    torch.testing.assert_close(whole(likelihood, outputs), expected, rtol=0, atol=1e-10)
    derived = ds.Likelihood.curvature(likelihood, outputs, y)[0]
    torch.testing.assert_close(derived, expected, rtol=0, atol=1e-10)
    assert not derived.requires_grad


def test_the_curvature_of_outputs_that_give_a_variance_is_the_mean_hessian():
    likelihood, outputs = ds.HeteroscedasticRegression(), torch.randn(5, 4, dtype=F64)
    mean, variance = likelihood.describe(outputs)
    # The Hessian is linear in y − mean and in its square: two points one deviation off have both moments of y.
    both = [by_rows(likelihood, outputs, mean + sign * variance.sqrt()) for sign in (-1.0, 1.0)]
    torch.testing.assert_close(whole(likelihood, outputs), sum(both) / 2, rtol=0, atol=1e-10)


def test_curvature_at_positions_is_that_of_rows():
    logits, y = torch.randn(2, 3, 4, 5, dtype=F64), torch.randint(3, (2, 4, 5))
    flat = whole(ds.Classification(), logits.movedim(1, -1).reshape(-1, 3)).reshape(2, 4, 5, 3, 3)
    torch.testing.assert_close(whole(ds.Classification(), logits), flat, rtol=0, atol=1e-12)
    derived = ds.Likelihood.curvature(ds.Classification(), logits, y)[0]  # (B, C, H, W, C)
    torch.testing.assert_close(derived.movedim(1, -2), flat, rtol=0, atol=1e-12)


class Cauchy(tiny.Poisson):
    """−log p = log(1 + |y − f|²): curved by 2(1 − r²)/(1 + r²)² along y − f, by 2/(1 + r²) across."""

    def log_prob(self, outputs, y):
        return -torch.log1p((y - outputs).square().sum(1))


def test_directions_of_negative_curvature_are_flat():
    outputs = torch.tensor([[0.5, 0.0], [0.0, 0.0], [0.0, 3.0]], dtype=F64)
    with torch.no_grad():
        found = Cauchy().curvature(outputs, torch.zeros(3, 2, dtype=F64))[0]
    expected = torch.tensor([[2 * 0.75 / 1.25**2, 2 / 1.25], [2, 2], [2 / 10, 0]], dtype=F64)
    torch.testing.assert_close(found, torch.diag_embed(expected), rtol=0, atol=1e-12)
    alone = Cauchy().curvature(torch.tensor([[0.5], [3.0]], dtype=F64), torch.zeros(2, 1, dtype=F64))[0]
    torch.testing.assert_close(alone, torch.tensor([[2 * 0.75 / 1.25**2], [0]], dtype=F64), rtol=0, atol=1e-12)


def test_outputs_without_an_axis_have_a_curvature():
    class Flat(tiny.Poisson):
        def log_prob(self, outputs, y):
            return y * outputs - outputs.exp()

    outputs = torch.randn(6, dtype=F64)
    found, outer = Flat().curvature(outputs, torch.ones(6, dtype=F64))
    torch.testing.assert_close(found, outputs.exp(), rtol=0, atol=1e-12)
    assert outer is None


def test_a_closed_curvature_belongs_to_the_log_prob_beside_it():
    class Doubled(ds.Regression):
        def log_prob(self, outputs, y):
            return 2 * super().log_prob(outputs, y)

    class Described(Doubled):
        def describe(self, outputs):
            return outputs, outputs

    class Closed(Doubled):
        def log_prob(self, outputs, y):
            return super().log_prob(outputs, y)

        def curvature(self, outputs, y=None):
            return torch.full_like(outputs, 8.0), None

    outputs, y = torch.randn(2, 5, 1, dtype=F64)
    for law, targets in ((Doubled(0.5), y), (Described(0.5), y), (Closed(0.5), None)):
        torch.testing.assert_close(law.curvature(outputs, targets)[0], torch.full_like(outputs, 8.0))
    refuses(lambda: Doubled(0.5).curvature(outputs), "expected targets, got None; pass y")


def test_a_likelihood_of_ones_own_trains_predicts_and_loads(tmp_path):
    outputs, y = torch.randn(5, 1, dtype=F64), torch.tensor([[0.0], [1], [2], [3], [9]], dtype=F64)
    expected = D.Poisson(outputs.exp()).log_prob(y)[:, 0]
    torch.testing.assert_close(tiny.Poisson().log_prob(outputs, y), expected, rtol=0, atol=1e-10)

    x = torch.linspace(-1, 1, 200, dtype=F64)[:, None]
    rate = (1 + x).exp()
    y = torch.poisson(rate)
    posterior = tiny.ensemble(lambda: nn.Linear(1, 1), members=2, likelihood=tiny.Poisson())
    tiny.minimise(posterior.parameters(), lambda: posterior.loss(x, y), max_iter=60)
    # Poisson regression is convex: both members meet, and the score equations hold: Σ (y − rate) (1, x) = 0.
    found = posterior.predict(x)
    assert float(found.epistemic.max()) < 1e-6
    residual = (y - found.mean).T @ torch.cat([torch.ones_like(x), x], 1)
    assert float(residual.abs().max()) < 1e-2
    # Standard error of the two coefficients at 200 points is below 0.1.
    assert float((found.mean.log() - rate.log()).abs().max()) < 0.5
    torch.testing.assert_close(found.aleatoric, found.mean, rtol=1e-6, atol=0)
    ds.fit(posterior, [(x, y)], epochs=1, validation=[(x, y)], progress=False, engine="loop")

    ds.save(posterior, tmp_path)
    refuses(lambda: ds.load(tmp_path, nn.Linear(1, 1)), "expected the likelihood 'Poisson' as an argument")
    loaded = ds.load(tmp_path, nn.Linear(1, 1), likelihood=tiny.Poisson())
    assert torch.equal(loaded.predict(x).member_means, posterior.predict(x).member_means)


def test_every_member_has_a_noise_of_its_own():
    posterior = tiny.ensemble(lambda: nn.Linear(4, 1), likelihood=ds.Regression(initial=0.5))
    noise = posterior.particles.own_parameters()["likelihood.log_noise"]
    assert noise.shape == (3,)
    with torch.no_grad():
        noise.copy_(torch.tensor([0.1, 1.0, 2.0]).log())
    found = posterior.predict(tiny.points()[0]).variances[:, 0, 0]
    torch.testing.assert_close(found, torch.tensor([0.01, 1.0, 4.0], dtype=F64), rtol=1e-6, atol=0)


def test_the_callers_likelihood_is_left_alone():
    likelihood = ds.Regression(initial=0.5)
    before = copy.deepcopy(likelihood.state_dict())
    posterior = ds.MAP(nn.Linear(4, 1), likelihood=likelihood)
    x = torch.randn(8, 4)
    ds.fit(posterior, [(x, x[:, :1])], epochs=3, progress=False, engine="loop")
    assert torch.equal(likelihood.log_noise, before["log_noise"])


def tokens(classes: int, *, first: bool) -> nn.Module:
    """(B, T) tokens -> logits (B, T, C), or (B, C, T) where classes come first."""
    table = nn.Embedding(7, classes)
    return tiny.Network(lambda self, x: self.table(x).movedim(-1, 1) if first else self.table(x), table=table)


def test_token_logits_with_classes_last_are_refused_with_the_axis_to_move():
    x = torch.randint(7, (6, 5))
    with pytest.raises(ValueError, match=r"classes are axis 1 of the logits: .* outputs.movedim\(-1, 1\)"):
        ds.MAP(tokens(4, first=False)).loss(x, x % 4)
    images = nn.Sequential(nn.Conv2d(1, 3, 1), nn.Flatten(2), nn.Unflatten(2, (4, 5)))
    with pytest.raises(ValueError, match=r"outputs.movedim\(-1, 1\)"):  # (B, H, W, C)
        ds.Classification().check(torch.Size((2, 4, 5, 3)), torch.zeros(2, 4, 5, dtype=torch.int64))
    assert ds.MAP(images).loss(torch.randn(2, 1, 4, 5), torch.zeros(2, 4, 5, dtype=torch.int64)) > 0


def test_as_many_tokens_as_classes_are_refused_until_a_batch_tells_the_axes_apart():
    square, longer = torch.randint(7, (6, 4)), torch.randint(7, (6, 5))
    for first in (False, True):
        with pytest.raises(ValueError, match=r"got \(6, 4, 4\), perhaps \(B, T, C\); return outputs"):
            ds.MAP(tokens(4, first=first)).loss(square, square % 4)
    posterior = ds.MAP(tokens(4, first=True))
    posterior.loss(longer, longer % 4)
    expected = nn.functional.cross_entropy(posterior(square)[0], square % 4)
    torch.testing.assert_close(posterior.loss(square, square % 4), expected)


def test_axes_that_leave_no_doubt_are_taken():
    x = torch.randint(7, (6, 4))
    network = nn.Sequential(tokens(4, first=True), nn.Unflatten(2, (4, 1)))  # the trailing axis says it
    expected = nn.functional.cross_entropy(network[0](x), x % 4)
    torch.testing.assert_close(ds.MAP(network).loss(x, (x % 4)[..., None]), expected)
    ds.Classification().check(torch.Size((2, 5, 5, 5)), torch.zeros(2, 5, 5, dtype=torch.int64))


def test_a_label_that_torch_would_leave_out_is_refused() -> None:
    outputs, y = torch.randn(3, 4), torch.tensor([0, -100, 2])
    refuses(lambda: ds.Classification().nll(outputs, y), "out of bounds", IndexError)
    kept = ds.Classification().nll(outputs, y.clamp(min=0))
    torch.testing.assert_close(kept, -outputs.log_softmax(1)[range(3), y.clamp(min=0)].mean())


@pytest.mark.parametrize("soft", [False, True], ids=["labels", "soft"])
@pytest.mark.parametrize("weights", [None, (0.5, 1.0, 3.0)], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("ignore", [None, 2, -100])
@pytest.mark.parametrize("shape", [(), (5,)], ids=["rows", "positions"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_label_smoothing_is_torchs(soft, weights, ignore, shape, smoothing):
    logits, y = torch.randn(8, 3, *shape, dtype=F64), torch.randint(3, (8, *shape))
    y = y if ignore is None or soft else y.where(torch.rand(y.shape) < 0.7, ignore)
    target = torch.rand(8, 3, *shape, dtype=F64).softmax(1) if soft else y
    likelihood = ds.Classification(ignore, class_weights=weights, label_smoothing=smoothing)
    how = {"weight": None if weights is None else torch.tensor(weights, dtype=F64), "label_smoothing": smoothing}
    how |= {"ignore_index": -100 if soft or ignore is None else ignore}
    expected = nn.functional.cross_entropy(logits, target, **how)
    torch.testing.assert_close(likelihood.nll(logits, target), expected, rtol=0, atol=1e-12)
    twice = likelihood.nll(logits, target, torch.tensor([2.0] + [1.0] * 7, dtype=F64))
    copied = likelihood.nll(torch.cat([logits[:1], logits]), torch.cat([target[:1], target]))
    torch.testing.assert_close(twice, copied, rtol=0, atol=1e-12)
    plain = ds.Classification(ignore, class_weights=weights)
    assert torch.equal(likelihood.log_prob(logits, target), plain.log_prob(logits, target))


def test_label_smoothing_is_for_training_only_and_saved(tmp_path):
    x, y = tiny.points()
    networks = [nn.Linear(4, 3).double() for _ in range(2)]
    laws = (ds.Classification(label_smoothing=eps) for eps in (0.1, 0))
    smooth, plain = (ds.DeepEnsemble(copy.deepcopy(networks), likelihood=law) for law in laws)
    each = [nn.functional.cross_entropy(network(x), y, label_smoothing=0.1) for network in networks]
    torch.testing.assert_close(smooth.backward(x, y), torch.stack(each).detach(), rtol=0, atol=1e-12)
    nll = [ds.evaluate(p, (x, y), progress=False).metrics["nll"] for p in (smooth, plain)]
    assert nll[0] == nll[1]
    ds.save(smooth, tmp_path / "smooth")
    assert ds.load(tmp_path / "smooth", network=nn.Linear(4, 3).double()).likelihood.label_smoothing == 0.1
    refuses(lambda: plain.load_state_dict(smooth.state_dict()), "another likelihood: arguments.label_smoothing 0.1")
    refuses(lambda: ds.Classification(label_smoothing=1.0), "label_smoothing")
