"""Standardised targets: the network learns z, everybody else sees y."""

import copy
import math

import pytest
import torch

import dissensus as ds
from dissensus.bench.report.measures import measures

SCALE = {"mean": [1000.0, -3.0], "std": [200.0, 0.5]}


@pytest.mark.parametrize("likelihood", [ds.Regression, ds.HeteroscedasticRegression])
def test_densities_and_predictions_are_in_the_units_of_the_targets(likelihood):
    torch.manual_seed(0)
    plain, scaled = likelihood().double(), likelihood(targets=SCALE).double()
    outputs = torch.randn(5, 4 if likelihood is ds.HeteroscedasticRegression else 2, dtype=torch.float64)
    z = torch.randn(5, 2, dtype=torch.float64)
    mean, std = (torch.tensor(SCALE[key], dtype=torch.float64) for key in ("mean", "std"))
    # p(y) = p(z) |dz/dy|
    expected = plain.log_prob(outputs, z) - std.log().sum()
    torch.testing.assert_close(scaled.log_prob(outputs, mean + std * z), expected, rtol=1e-12, atol=1e-12)
    (m, v), (m_z, v_z) = scaled.describe(outputs), plain.describe(outputs)
    torch.testing.assert_close(m, mean + std * m_z)
    torch.testing.assert_close(v, std**2 * v_z)
    # The curvature is that of the network's outputs: a shift of the density does not change it.
    torch.testing.assert_close(scaled.curvature(outputs)[0], plain.curvature(outputs)[0])


def test_a_fixed_noise_stays_in_the_units_of_the_targets():
    scaled = ds.Regression(noise=7.0, targets={"mean": [10.0], "std": [3.0]})
    assert float(scaled.describe(torch.zeros(1, 1))[1]) == pytest.approx(49.0)


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 2, generator=generator)
    return x, 5e4 + 300 * x[:, :1] + 30 * torch.randn(48, 1, generator=generator)


def ensemble(**keywords):
    torch.manual_seed(1)
    return ds.DeepEnsemble([ds.nets.MLP(2, 1, hidden=(8,)) for _ in range(2)], likelihood=ds.Regression(**keywords))


def test_fit_on_standardised_targets_is_training_on_them_by_hand(tmp_path):
    x, y = data()
    scale = ds.data.Standardiser.of_rows(y)
    by_hand, by_fit = ensemble(), ensemble()
    keywords = {"epochs": 3, "progress": False, "engine": "loop"}
    ds.fit(by_hand, ds.data.Batches(x, scale(y), batch_size=16), **keywords)
    ds.fit(by_fit, ds.data.Batches(x, y, batch_size=16), targets="standardised", **keywords)
    mean, std = by_hand.predict(x), float(scale.std)
    torch.testing.assert_close(by_fit.predict(x).mean, scale.inverse(mean.mean), rtol=1e-5, atol=0)
    torch.testing.assert_close(by_fit.predict(x).total, std**2 * mean.total, rtol=1e-3, atol=0)
    # Losses and metrics are those of y: the negative log-density of z plus log std.
    assert ds.evaluate(by_fit, (x, y)).metrics["nll"] == pytest.approx(
        ds.evaluate(by_hand, (x, scale(y))).metrics["nll"] + math.log(std), abs=1e-3
    )
    # Saved with the likelihood, or told to `save` by whoever standardised by hand: the same posterior.
    ds.save(by_fit, tmp_path / "fit", unit="kW")
    ds.save(by_hand, tmp_path / "hand", targets=scale)
    one, other = ds.load(tmp_path / "fit"), ds.load(tmp_path / "hand")
    assert torch.equal(one.predict(x).mean, by_fit.predict(x).mean)
    torch.testing.assert_close(other.predict(x).mean, one.predict(x).mean, rtol=1e-5, atol=0)
    evaluation = ds.evaluate(one, (x, y))
    assert {measure.unit for measure in measures(evaluation) if measure.key in ("rmse", "crps", "width90")} == {"kW"}
    assert evaluation.metrics["rmse"] == pytest.approx(
        float((one.predict(x).mean - y).square().mean().sqrt()), rel=1e-5
    )
    # The noise is not started anew at an error of 50,000: outputs and targets meet in one unit.
    assert float(by_fit.particles.own_parameters()["likelihood.log_noise"].detach().exp().max()) < 3


def test_a_run_is_resumed_with_the_scale_it_began_with(tmp_path):
    x, y = data()
    loader = ds.data.Batches(x, y, batch_size=16, shuffle=True, seed=0)
    keywords = {"progress": False, "targets": "standardised", "engine": "loop"}
    whole = ensemble()
    ds.fit(whole, copy.deepcopy(loader), epochs=2, **keywords)
    ds.fit(ensemble(), copy.deepcopy(loader), epochs=1, checkpoint=tmp_path / "run.pt", **keywords)
    resumed = ensemble()
    ds.fit(resumed, copy.deepcopy(loader), epochs=2, checkpoint=tmp_path / "run.pt", **keywords)
    assert resumed.likelihood.targets == whole.likelihood.targets
    assert resumed.predict(x).mean.shape == (48, 1)


def test_a_scale_is_given_once_to_a_regression_that_has_learned_nothing_yet(tmp_path):
    x, y = data()
    posterior = ensemble()
    ds.fit(posterior, (x, y / 1e4), epochs=1, progress=False)
    with pytest.raises(ValueError, match="expected an untrained posterior"):
        ds.fit(posterior, (x, y), epochs=2, progress=False, targets="standardised")
    with pytest.raises(ValueError, match="standardised once"):
        ds.save(ensemble(targets=SCALE), tmp_path, targets={"mean": [0.0], "std": [2.0]})
    with pytest.raises(TypeError, match="expected a regression"):
        ds.fit(ds.MAP(ds.nets.MLP(2, 2)), (x, y[:, 0].long() % 2), epochs=1, progress=False, targets="standardised")
    with pytest.raises(ValueError, match="read twice"):
        ds.fit(ensemble(), iter([(x, y)]), epochs=1, progress=False, targets="standardised")
    with pytest.raises(ValueError, match="one scale of the targets"):
        ds.fit(ensemble(targets=SCALE | {"mean": [0.0] * 3, "std": [1.0] * 3}), (x, y), epochs=1, progress=False)


def test_a_scale_is_kept_in_double_precision_by_files(tmp_path):
    """Seconds since 1970: float32 would move them by up to a minute."""
    regression = ds.MAP(torch.nn.Linear(2, 1), likelihood=ds.Regression(targets={"mean": [1700000123.0], "std": [3.1]}))
    ds.save(regression, tmp_path)
    loaded = ds.load(tmp_path, torch.nn.Linear(2, 1))
    assert loaded.likelihood.targets == regression.likelihood.targets == {"mean": [1700000123.0], "std": [3.1]}
    x = torch.randn(3, 2, dtype=torch.float64)
    assert torch.equal(loaded.double().predict(x).mean, regression.double().predict(x).mean)
