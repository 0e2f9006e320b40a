"""calibrate against scikit-learn, closed forms and finite differences, and what it must leave alone."""

import copy
import json
import logging
import math

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve
from sklearn.isotonic import IsotonicRegression
from torch import nn

import dissensus as ds
import tiny
from dissensus.calibration.calibrate import fit_correction, predict_held_out
from dissensus.core.calibrated import Correction
from dissensus.core.predictive import ClassificationSummary
from dissensus.metrics import ece
from dissensus.numerics.isotonic import between_knots, isotonic_knots
from refusals import refuses
from thinning import often, thinned

F64 = torch.float64
CLASS_METHODS = ("temperature", "vector", "isotonic", "histogram")


def shifted(k, b):
    """Logits = k x + b."""
    k, b = (nn.Parameter(torch.as_tensor(each, dtype=F64)) for each in (k, b))
    return tiny.Network(lambda self, x: self.k * x + self.b, k=k, b=b)


def overconfident(n=1500, seed=0):
    """(an ensemble of two, too sure by 2 to 3 and with biases, inputs, labels drawn from softmax(x))."""
    generator = torch.Generator().manual_seed(seed)
    x = 1.5 * torch.randn(n, 3, dtype=F64, generator=generator)
    y = torch.multinomial(x.softmax(1), 1, generator=generator)[:, 0]
    networks = [shifted([2.0, 2.5, 3.0], [1.0, 0.0, -1.0]), shifted([2.2, 2.0, 3.0], [0.5, 0.0, -0.5])]
    return ds.DeepEnsemble(networks).double(), x, y


def raw_mean(posterior, x):
    return posterior.eval()(x).detach().softmax(2).mean(0)


def normalised(found, weight):
    """What the class says it does: uniform where all are 0, and one more row of every class in equal parts."""
    total, c = found.sum(1, keepdims=True), found.shape[1]
    shares = np.where(total > 0, found / np.where(total > 0, total, 1), 1 / c)
    return (weight * shares + 1 / c) / (weight + 1)


def test_isotonic_agrees_with_scikit_learn():
    posterior, x, y = overconfident()
    posterior_of_ties = copy.deepcopy(posterior)
    tied = (x * 2).round() / 2  # many equal probabilities
    for each, inputs in ((posterior, x), (posterior_of_ties, tied)):
        ds.calibrate(each, [(inputs[:900], y[:900])], "isotonic")
        before = raw_mean(each, inputs).numpy()
        fits = [IsotonicRegression(out_of_bounds="clip").fit(before[:900, k], y[:900].numpy() == k) for k in range(3)]
        found = np.stack([each.predict(before[:, k]) for k, each in enumerate(fits)], axis=1)
        np.testing.assert_allclose(each.predict(inputs).mean.numpy(), normalised(found, 900), rtol=0, atol=1e-10)


@pytest.mark.parametrize("rows", [1, 2, 40])
def test_isotonic_knots_with_weights_agree_with_scikit_learn(rows):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randint(0, 12, (rows,), generator=generator).double()
    y, w = torch.rand(2, rows, dtype=F64, generator=generator)
    w[rows // 2 :: 7] = 0 if rows > 2 else w[rows // 2 :: 7]
    theirs = IsotonicRegression(out_of_bounds="clip").fit(x[w > 0].numpy(), y[w > 0].numpy(), w[w > 0].numpy())
    at = torch.linspace(-1, 13, 57, dtype=F64)
    knots = (each[None] for each in isotonic_knots(x, y, w))
    np.testing.assert_allclose(between_knots(at[None], *knots)[0].numpy(), theirs.predict(at.numpy()), atol=1e-12)


def test_histogram_bins_agree_with_scikit_learn():
    posterior, x, y = overconfident()
    ds.calibrate(posterior, [(x, y)], "histogram")
    before = raw_mean(posterior, x).numpy()
    found = np.empty_like(before)
    for k in range(3):
        shares, _ = calibration_curve(y.numpy() == k, before[:, k], n_bins=15)
        index = np.searchsorted(np.linspace(0, 1, 16)[1:-1], before[:, k])
        table = np.full(15, np.nan)
        table[np.unique(index)] = shares
        found[:, k] = table[index]
    np.testing.assert_allclose(posterior.predict(x).mean.numpy(), normalised(found, 1500), rtol=0, atol=1e-10)


def test_an_empty_bin_leaves_probabilities_as_they_are():
    posterior, x, y = overconfident(400)
    mean = raw_mean(posterior, x)
    outer = ((mean < 0.2) | (mean > 0.8)).all(1)
    ds.calibrate(posterior, [(x[outer], y[outer])], "histogram")
    assert posterior.calibration.value[:, 4:11].isnan().all()
    inner = mean[((mean > 0.3) & (mean < 0.7)).sum(1) == 2]  # at least two classes in empty bins
    found = posterior.calibration.one_against_rest(inner.T).T
    kept = (inner > 0.3) & (inner < 0.7)
    assert torch.equal(found[kept], inner[kept])


def test_temperature_beats_other_temperatures_and_vector_beats_it():
    posterior, x, y = overconfident()
    rows = predict_held_out(posterior, [(x, y)])
    found = {method: ds.calibrate(posterior, [(x, y)], method) for method in CLASS_METHODS}
    others = [rows.nll(Correction(math.exp(at / 10), None)) for at in range(-20, 30)]
    assert found["temperature"].nll <= min(others) + 1e-9
    assert found["vector"].nll < found["temperature"].nll - 0.01  # the biases are real
    assert all(each.nll < each.nll_before - 0.05 and each.ece < each.ece_before for each in found.values())
    assert found["vector"].rows == 1500


def test_vector_scaling_is_at_the_optimum_of_its_objective():
    """Gradients of mean NLL + |log scale − log 1/T|²/2N + |bias|²/2N vanish, by finite differences in the stored tensors."""
    posterior, x, y = overconfident(600)
    rows = predict_held_out(posterior, [(x, y)])
    calibration = fit_correction(rows, "vector").calibration
    start = -math.log(fit_correction(rows, "temperature").temperature)

    def objective(log_scale, bias):
        moved = copy.deepcopy(calibration)
        moved.scale, moved.bias = log_scale.exp(), bias
        prior = (log_scale - start).square().sum() + bias.square().sum()
        return rows.nll(Correction(1.0, moved)) + 0.5 * float(prior) / 600

    log_scale, bias, step = calibration.scale.log(), calibration.bias, 1e-4
    for way in torch.eye(6, dtype=F64).reshape(6, 2, 3):
        up, down = (objective(log_scale + s * way[0], bias + s * way[1]) for s in (step, -step))
        assert abs(up - down) / (2 * step) < 1e-6


def test_vector_scaling_undoes_what_was_done_to_logits():
    """Of one network with logits s x + b, the optimum is near 1/s and −b/s, up to what log-probabilities leave open."""
    _, x, y = overconfident(20_000)
    alone = ds.MAP(shifted(2.0, [1.0, 0.0, -1.0])).double()
    ds.calibrate(alone, [(x, y)], "vector")
    assert (alone.calibration.scale - 0.5).abs().max() < 0.05
    assert (alone.calibration.bias - torch.tensor([-0.5, 0.0, 0.5])).abs().max() < 0.1
    assert ece(alone.predict(x).mean, y) < 0.01


@pytest.mark.parametrize("method", ["vector", "isotonic", "histogram"])
def test_weights_and_ignored_labels_count_as_they_should(method):
    """A weight of two is the row twice, one of zero and an ignored label are no row at all."""
    posterior, x, y = overconfident(300)
    masked = ds.DeepEnsemble([posterior.member(i) for i in range(2)], likelihood=ds.Classification(ignore_index=-1))
    weight = torch.tensor([2.0, 1.0, 0.0]).repeat(100)
    twice = torch.cat([torch.arange(300)[weight == 2]] * 2 + [torch.arange(300)[weight == 1]])
    void = torch.arange(300) % 5 == 4
    ds.calibrate(masked.double(), [(x, torch.where(void, -1, y), weight)], method)
    kept = twice[~void[twice]]
    ds.calibrate(posterior, [(x[kept], y[kept])], method)
    torch.testing.assert_close(masked.predict(x).mean, posterior.predict(x).mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", often(["isotonic"], ["temperature", "vector", "histogram"]))
def test_pixels_are_calibrated_as_rows_are(method):
    """A segmentation whose pixels are the rows, some of them void, has the rows' probabilities."""
    posterior, x, y = overconfident(480)
    pixels = x.reshape(10, 6, 8, 3).movedim(-1, 1).contiguous()
    labels = y.reshape(10, 6, 8).clone()
    labels[:, 0] = 255
    by_pixel = lambda self, x: self.inner(x.movedim(1, -1)).movedim(-1, 1)  # noqa: E731
    networks = [tiny.Network(by_pixel, inner=posterior.member(i)) for i in range(2)]
    scenes = ds.DeepEnsemble(networks, likelihood=ds.Classification(ignore_index=255))
    ds.calibrate(scenes.double(), [(pixels[:6], labels[:6]), (pixels[6:], labels[6:])], method)
    kept = (labels != 255).flatten()
    ds.calibrate(posterior, [(x[kept], y[kept])], method)
    by_row = scenes.predict(pixels).mean.movedim(1, -1).reshape(-1, 3)
    torch.testing.assert_close(by_row, posterior.predict(x).mean, rtol=0, atol=1e-7)
    metrics = ds.evaluate(scenes, [(pixels, labels)], ood={"o": [(pixels, (labels == 0).long())]}).metrics
    nll = -posterior.predict(x[kept]).log_prob(y[kept]).mean()
    assert metrics["nll"] == pytest.approx(float(nll), abs=1e-6)


@pytest.mark.parametrize("method", ["isotonic", "histogram"])
def test_no_class_is_ruled_out_and_none_known_is_uniform(method, caplog):
    posterior, x, _ = overconfident(60)
    y = torch.zeros(60, dtype=torch.long)  # classes 1 and 2 never happen
    ds.calibrate(posterior, [(x, y)], method)
    assert "class 1, 2 has no calibration row (2 classes in all)" in caplog.text
    mean = posterior.predict(x).mean
    torch.testing.assert_close(mean.amin(), torch.tensor(1 / (3 * 61), dtype=F64))  # one row more, in equal parts
    found = ClassificationSummary(*[torch.zeros(1, 2, 3, dtype=F64).log_softmax(2), *torch.zeros(2, 1, 2, dtype=F64)])
    posterior.calibration.value.zero_()
    calibrated = posterior.calibration.calibrate_mixture(found).mean
    torch.testing.assert_close(calibrated, torch.full((2, 3), 1 / 3, dtype=F64))


def test_what_members_disagree_on_stays_theirs():
    posterior, x, y = overconfident(400)
    before = posterior.predict(x)
    ds.calibrate(posterior, [(x, y)], "isotonic")
    after = posterior.predict(x)
    assert isinstance(after, ds.SummaryPredictive)
    entropy = torch.special.entr(after.mean).sum(1)
    torch.testing.assert_close(after.total, entropy, rtol=0, atol=1e-12)
    torch.testing.assert_close(after.epistemic, torch.minimum(before.epistemic, entropy), rtol=0, atol=1e-12)
    refuses(lambda: after.member_means, "a calibration of the members", TypeError)


@pytest.mark.parametrize("method", often(["isotonic"], ["vector", "temperature", "histogram"]))
def test_one_calibration_wherever_predictions_are_made(method, tmp_path):
    """predict, loaders, summaries, folders, evaluate, deepcopy and an exported program say the same."""
    posterior, x, y = overconfident(300)
    x, loader = x.float(), [(x[:200].float(), y[:200]), (x[200:].float(), y[200:])]
    posterior = posterior.float()
    ds.calibrate(posterior, loader, method)
    wanted = posterior.predict(x).mean
    ds.save(posterior, tmp_path / "p")
    loaded = ds.load(tmp_path / "p", shifted([1.0] * 3, [1.0] * 3).float())
    assert torch.equal(loaded.predict(x).mean, wanted)
    kind = (json.loads((tmp_path / "p" / "config.json").read_text())["calibration"] or {}).get("kind")
    assert kind == (None if method == "temperature" else method)
    program = torch.export.export(posterior.predictor(), (x,), strict=False)
    torch.export.save(program, tmp_path / "p.pt2")
    means = {
        "loader": ds.predict(posterior, loader).mean,
        "summary": ds.summarise(posterior, loader).mean,
        "folder": ds.summarise(tmp_path / "p", loader, network=shifted([1.0] * 3, [1.0] * 3).float()).mean,
        "copy": copy.deepcopy(posterior).predict(x).mean,
        "program": torch.export.load(tmp_path / "p.pt2").module()(x)["mean"],
    }
    near = 1e-4 if method == "isotonic" else 2e-6  # steep in places, where it enlarges rounding
    for way, mean in means.items():
        torch.testing.assert_close(mean, wanted, rtol=0, atol=near, msg=lambda text, way=way: f"{way}: {text}")
    found = ds.evaluate(posterior, loader, ood={"far": [(5 * x, y)]}, shift={"s": loader}, score="epistemic")
    nll = -wanted.log().gather(1, y[:, None]).mean()
    assert found.metrics["nll"] == pytest.approx(float(nll), abs=1e-5)
    assert ("calibrated: " in repr(found)) == (method != "temperature")
    assert found.metrics["shift/s/ece"] == pytest.approx(float(ece(wanted, y)), abs=1e-5)
    assert 0 <= found.metrics["ood/far/auroc"] <= 1


def test_a_calibrated_posterior_is_evaluated_on_corruptions_and_attacks():
    torch.manual_seed(0)
    images, y = torch.rand(24, 1, 8, 8), torch.arange(24) % 3
    posterior = ds.DeepEnsemble([nn.Sequential(nn.Flatten(), nn.Linear(64, 3)) for _ in range(2)])
    for method in ("vector", "isotonic"):
        ds.calibrate(posterior, [(images, y)], method)
        changed = {"attack": ds.AttackCurves([0.1], ["fgsm"], bounds=(0, 1))}
        changed["corrupt"] = ds.Corruptions(["gaussian_noise"], severities=(1,))
        found = ds.evaluate(posterior, [(images, y)], **changed)
        assert found.arrays["attack/fgsm/nll"][0] == pytest.approx(found.metrics["nll"], abs=1e-6)
        assert np.isfinite(found.metrics["corrupt/nll"])


def test_soft_labels_are_calibrated_to():
    posterior, x, _ = overconfident(2000)
    for method in ("vector", "isotonic"):
        found = ds.calibrate(posterior, [(x, x.softmax(1))], method)
        assert found.ece is None
        assert found.nll < found.nll_before - 0.1
    assert (posterior.predict(x).mean - x.softmax(1)).abs().mean() < 0.06


def test_calibrating_again_starts_from_the_networks(caplog):
    posterior, x, y = overconfident(300)
    first = ds.calibrate(posterior, [(x, y)], "isotonic")
    assert ds.calibrate(posterior, [(x, y)], "isotonic") == first
    ds.temperature_scale(posterior, [(x, y)])
    assert posterior.calibration is None
    assert float(posterior.temperature) != 1
    ds.calibrate(posterior, [(x, y)], "vector")
    assert float(posterior.temperature) == 1
    assert not caplog.records


def test_whoever_predicts_while_a_calibration_is_sought_sees_the_one_before():
    """Also between two batches, and with a calibration there: what is fitted sees the networks alone."""
    posterior, x, y = overconfident(400)
    alone = ds.calibrate(copy.deepcopy(posterior), [(x, y)], "vector")
    ds.calibrate(posterior, [(x, y)], "isotonic")
    before, seen = posterior.predict(x[:5]).mean, []

    def batches():
        for part in (slice(0, 200), slice(200, 400)):
            seen.append(posterior.predict(x[:5]).mean)
            yield x[part], y[part]
        seen.append(posterior.predict(x[:5]).mean)

    assert ds.calibrate(posterior, batches(), "vector").nll == pytest.approx(alone.nll, abs=1e-9)
    assert all(torch.equal(each, before) for each in seen)


def test_a_watcher_has_a_calibration_of_its_own():
    torch.manual_seed(0)
    x, y = torch.randn(64, 2), torch.arange(64) % 2
    run = ds.track(ds.nets.MLP(2, 2, hidden=(4,)), [ds.SWAG])
    ds.fit(run, [(x, y)] * 4, epochs=4, progress=False)
    swag = run.watchers["swag"]
    ds.calibrate(swag, [(x, y)], "isotonic")
    assert run.calibration is None
    assert isinstance(swag.predict(x), ds.SummaryPredictive)
    ds.fit(run, [(x, y)], epochs=1, progress=False)
    assert swag.calibration is None


def regression(n=2000, noise=0.3, outputs=1):
    """(two lines with a noise of 0.3, inputs, targets 1.5 x + a Gumbel's or a Gaussian's noise of twice that)."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, outputs, dtype=F64, generator=generator)
    y = 1.5 * x + 0.6 * torch.randn(n, outputs, dtype=F64, generator=generator)
    return ds.DeepEnsemble([tiny.Scaled(1.3), tiny.Scaled(1.7)], likelihood=ds.Regression(noise)).double(), x, y


def test_scale_stretches_the_mixture_about_its_mean():
    posterior, x, y = regression()
    before = posterior.predict(x)
    found = ds.calibrate(posterior, [(x, y)], "scale")
    after, factor = posterior.predict(x), float(posterior.calibration.factor)
    torch.testing.assert_close(after.mean, before.mean)
    torch.testing.assert_close(after.total, factor**2 * before.total)
    torch.testing.assert_close(after.epistemic, factor**2 * before.epistemic)
    rows = predict_held_out(posterior, [(x, y)])
    others = []
    for at in range(-20, 20):
        other = copy.deepcopy(posterior.calibration)
        other.factor.fill_(math.exp(at / 10))
        others.append(rows.nll(Correction(1.0, other)))
    assert found.nll <= min(others) + 1e-9
    torch.testing.assert_close(ds.summarise(posterior, [(x, y)]).total, after.total)
    torch.testing.assert_close(after.cdf(after.quantile(0.3)), torch.full_like(y, 0.3), atol=1e-9, rtol=0)


def test_the_scale_of_float32_predictions_is_that_of_float64():
    """The search is in float64 with a tolerance of 1e-5 in the logarithm; the factor is stored in float32."""
    posterior, x, y = regression(n=200)
    ds.calibrate(posterior, [(x, y)], "scale")
    wide = float(posterior.calibration.factor)
    posterior.float()
    for seed in range(4):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        ds.calibrate(posterior, [(x[order].float(), y[order].float())], "scale")
        assert posterior.calibration.factor.dtype == torch.float32
        assert float(posterior.calibration.factor) == pytest.approx(wide, rel=2e-5)


@pytest.mark.parametrize("outputs", often([2], [1]))
def test_a_recalibrated_distribution_is_one(outputs):
    """Moments, density, quantiles, samples and coverage against each other and against integrals on a fine grid."""
    posterior, x, y = regression(outputs=outputs)
    ds.calibrate(posterior, [(x[:1000], y[:1000])], "isotonic")
    after = posterior.predict(x[1000:1003])
    grid = torch.linspace(-9, 9, 901, dtype=F64)
    one = after[0]
    cdf = posterior.predict(x[1000].expand(901, -1)).cdf(grid[:, None].expand(901, outputs))  # (G, D)
    assert (cdf.diff(dim=0) >= 0).all()
    mass = cdf.diff(dim=0)
    middle = (grid[1:] + grid[:-1])[:, None] / 2
    mean = (mass * middle).sum(0)
    variance = (mass * middle**2).sum(0) - mean**2
    torch.testing.assert_close(one.mean[0], mean, rtol=0, atol=1e-4)
    torch.testing.assert_close(one.total[0], variance, rtol=0, atol=1e-4)
    at = y[1000:1003]
    step = 1e-5
    slope = (after.cdf(at + step) - after.cdf(at - step)) / (2 * step)  # (3, D)
    torch.testing.assert_close(after.log_prob(at), slope.log().sum(1), rtol=0, atol=1e-4)
    for q in (0.01, 0.3, 0.95):
        torch.testing.assert_close(after.cdf(after.quantile(q)), torch.full_like(at, q), rtol=0, atol=1e-9)
    samples = after.sample(2000, generator=torch.Generator().manual_seed(0))
    assert ((samples.mean(0) - after.mean).abs() < (4 * (after.total / 2000).sqrt())).all()
    assert (after.aleatoric >= 0).all()
    # new rows: 1,000 of them, a binomial's three standard errors for each of them and of the calibration rows
    new = posterior.predict(x[1000:])
    for level in (0.5, 0.9):
        lower, upper = new.interval(level)
        covered = ((y[1000:] >= lower) & (y[1000:] <= upper)).double().mean()
        assert abs(covered - level) < 3 * (2 * level * (1 - level) / 1000) ** 0.5 + 0.005


def test_the_recalibrated_cdf_is_the_share_of_rows_at_its_knots():
    posterior, x, y = regression(n=500)
    before = posterior.predict(x).cdf(y)[:, 0]
    ranks = (before.argsort().argsort().double() + 0.5) / 500
    theirs = IsotonicRegression(out_of_bounds="clip").fit(before.numpy(), ranks.numpy())
    ds.calibrate(posterior, [(x, y)], "isotonic")
    at, value = (torch.special.ndtr(each[:, 0]) for each in (posterior.calibration.at, posterior.calibration.value))
    np.testing.assert_allclose(value.numpy(), theirs.predict(at.numpy()), rtol=0, atol=1e-9)
    torch.testing.assert_close(value, torch.linspace(0, 1, 21, dtype=F64), rtol=0, atol=1 / 500)


def test_a_noise_that_is_half_of_what_it_should_be_is_doubled():
    """Of one line, y ~ N(1.5 x, 0.6²) predicted with a noise of 0.3, the recalibrated deviation is near 0.6, the mean 1.5 x."""
    _, x, y = regression(n=4000)
    posterior = ds.MAP(tiny.Scaled(1.5), likelihood=ds.Regression(0.3)).double()
    ds.calibrate(posterior, [(x, y)], "isotonic")
    after = posterior.predict(x[:5])
    error = 4 * 0.6 / 4000**0.5
    assert ((after.mean - 1.5 * x[:5]).abs() < error).all()
    assert ((after.total.sqrt() - 0.6).abs() < error).all()  # a deviation's error is less than the mean's


@pytest.mark.parametrize("method", often(["scale"], ["temperature", "isotonic"]))
def test_one_calibration_of_a_regression_wherever_predictions_are_made(method, tmp_path):
    posterior, x, y = regression(n=100)
    found = ds.calibrate(posterior, [(x, y)], method)
    assert found.nll < found.nll_before
    after = posterior.predict(x)
    ds.save(posterior, tmp_path)
    assert torch.equal(ds.load(tmp_path, tiny.Scaled(1.0)).predict(x).mean, after.mean)
    exported = torch.export.export(posterior.predictor(), (x,), strict=False).module()(x)
    for name in ("mean", "total", "epistemic"):
        torch.testing.assert_close(exported[name], getattr(after, name), rtol=0, atol=1e-9)
    joined = ds.predict(posterior, [(x[:50], y[:50]), (x[50:], y[50:])])
    torch.testing.assert_close(joined.log_prob(y), after.log_prob(y))
    metrics = ds.evaluate(posterior, [(x, y)]).metrics
    assert metrics["nll"] == pytest.approx(found.nll, abs=1e-6)
    assert metrics["coverage90"] == pytest.approx(0.9, abs=0.05)
    # CRPS by its definition, 2 E_u of the pinball loss
    levels = (torch.arange(20, dtype=F64) + 0.5) / 20
    crps = torch.stack([ds.metrics.pinball_loss(after.quantile(float(u)), y, level=float(u)) for u in levels])
    assert metrics["crps"] == pytest.approx(2 * float(crps.mean()), rel=0.03)
    assert abs(float(ds.summarise(posterior, [(x, y)]).mean.mean() - after.mean.mean())) < 0.01


@pytest.mark.parametrize(("noise", "dtype"), thinned([0.06, 0.006], [torch.float32, F64], every=2))
def test_a_noise_that_is_far_too_small_is_made_what_it_is(noise, dtype):
    """y ~ N(1.5 x, 0.6²), predicted with a noise 10 and 100 times too small: F(y) is 0 or 1 but for what no float holds."""
    _, x, y = regression(n=2000)
    posterior, (x, y) = ds.MAP(tiny.Scaled(1.5), likelihood=ds.Regression(noise)).to(dtype), (x.to(dtype), y.to(dtype))
    found = ds.calibrate(posterior, [(x, y)], "isotonic")
    after = posterior.predict(x)
    exact = torch.distributions.Normal(1.5 * x, 0.6)
    assert found.nll == pytest.approx(-float(exact.log_prob(y).mean()), abs=0.01)  # 20 pieces take a little more off
    assert ((after.total.sqrt() - 0.6).abs() < 4 * 0.6 / 2000**0.5).all()
    assert ((after.cdf(y) - exact.cdf(y)).abs() < 4 * 0.5 / 2000**0.5).all()
    lower, upper = after.interval(0.9)
    assert abs(float(((lower <= y) & (y <= upper)).double().mean()) - 0.9) < 0.005


def test_a_factor_at_the_end_of_what_is_looked_at_is_named(caplog):
    _, x, y = regression(n=50)
    ds.calibrate(ds.MAP(tiny.Scaled(1.5), likelihood=ds.Regression(0.001)).double(), [(x, y)], "scale")
    assert "the scale 50 is the highest one tried" in caplog.text


def test_bad_input_is_refused_and_changes_nothing():
    posterior, x, y = overconfident(30)
    posterior.temperature.fill_(1.5)
    line, inputs, values = regression(n=30)
    told = "expected method of temperature, vector, isotonic, histogram, got 'platt'"
    refuses(lambda: ds.calibrate(posterior, [(x, y)], "platt"), told)
    refuses(lambda: ds.calibrate(posterior, [(x, y)], "scale"), "got 'scale'; this posterior is a classification")
    told = "got 'histogram'; this posterior is a regression"
    refuses(lambda: ds.calibrate(line, [(inputs, values)], "histogram"), told)
    refuses(lambda: ds.calibrate(posterior, [(x, y + 1)], "isotonic"), r"expected labels in 0…2, got 3")
    refuses(lambda: ds.calibrate(posterior, [(x, values[:, 0])], "vector"), "expected integer class indices")
    refuses(lambda: ds.calibrate(tiny.Scaled(1.0), [(x, y)], "vector"), "expected a posterior", TypeError)
    assert posterior.calibration is None
    assert float(posterior.temperature) == 1.5


def test_rows_without_a_mistake_are_suspected(caplog):
    posterior, x, _ = overconfident(200)
    y = posterior.predict(x).mean.argmax(1)
    with caplog.at_level(logging.WARNING):
        ds.calibrate(posterior, [(x, y)], "isotonic")
    assert "all 200 calibration rows are predicted right; was the network trained on them?" in caplog.text
