"""Targets of regressions: standardised ones, and where a noise that is learned from them starts."""

import copy
import math

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.bench.report.measures import measures
from dissensus.core.batch import Batch
from dissensus.core.likelihood import FAR, untrained_noise
from refusals import refuses

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
    rmse = (one.predict(x).mean - y).square().mean().sqrt()
    assert evaluation.metrics["rmse"] == pytest.approx(float(rmse), rel=1e-5)
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
    refuses(lambda: ds.fit(ensemble(), iter([(x, y)]), epochs=1, progress=False, targets="standardised"), "read twice")
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


QUIET = {"progress": False}


def rows(scale: float = 1.0, offset: float = 0.0, n: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=generator)
    y = x.mean(1, keepdim=True) * 2 + 0.3 * torch.randn(n, 1, generator=generator)
    return x, scale * y + offset


def noise(posterior) -> torch.Tensor:
    return posterior.likelihood.log_noise.detach().exp()


@pytest.mark.parametrize(
    ("scale", "offset"),
    [(10.0, 22.0), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((100.0, 0.0), (1.0, 100.0)))],
)
def test_intervals_on_raw_targets_are_honest_from_the_first_epochs(scale, offset):
    torch.manual_seed(0)
    x, y = rows(scale, offset)
    posterior = ds.MAP(ds.nets.MLP(4, 1, hidden=(20,)), likelihood=ds.Regression())
    ds.fit(posterior, ds.data.Batches(x, y, batch_size=20), epochs=10, **QUIET)
    assert ds.evaluate(posterior, [(x, y)]).metrics["coverage90"] > 0.8


def test_raw_targets_start_the_noise_at_the_first_error_and_are_warned_of(caplog):
    network = nn.Linear(4, 1)
    nn.init.zeros_(network.weight)
    nn.init.zeros_(network.bias)
    x, y = rows(10.0, 22.0)
    posterior = ds.MAP(network, likelihood=ds.Regression())
    posterior.loss(x, y)
    assert float(noise(posterior)) == pytest.approx(float(y.square().mean().sqrt()), rel=1e-5)
    assert "the learned noise starts there instead of at 1; standardise the targets" in caplog.text


def test_variances_of_a_head_that_start_far_too_narrow_are_warned_of(caplog):
    for scale, warned in ((1.0, False), (100.0, True)):
        network = nn.Linear(4, 2)
        nn.init.zeros_(network.weight)
        nn.init.zeros_(network.bias)  # variance softplus(0) = log 2
        x, y = rows(scale)
        ds.MAP(network, likelihood=ds.HeteroscedasticRegression()).loss(x, y)
        off = float((y.square().mean() / math.log(2)).sqrt())
        text = f"outputs differ from targets by {off:.3g} standard deviations in the first batch: intervals start too narrow"
        assert (text in caplog.text) == warned


def test_every_member_starts_at_the_error_and_weights_count():
    x, y = rows(1.0, 50.0)
    weight = (torch.arange(len(y)) < 100).float()
    y[100:] = 1e6  # does not count
    posterior = ds.DeepEnsemble([nn.Linear(4, 1) for _ in range(3)], likelihood=ds.Regression())
    posterior.backward(x, y, weight)
    found = posterior.particles.own_parameters()["likelihood.log_noise"].exp()
    assert found.shape == (3,)
    assert ((found > 45) & (found < 55)).all()


def test_standardised_targets_and_a_start_that_was_asked_for_are_left_alone(caplog):
    for initial, scale in ((None, 1.0), (0.1, 1.0), (2.0, 100.0)):
        posterior = ds.MAP(nn.Linear(4, 1), likelihood=ds.Regression(initial=initial))
        posterior.loss(*rows(scale))
        assert float(noise(posterior)) == pytest.approx(initial or 1.0, rel=1e-6)
    fixed = ds.MAP(nn.Linear(4, 1), likelihood=ds.Regression(0.5))
    fixed.loss(*rows(100.0))
    frozen = ds.MAP(nn.Linear(4, 1), likelihood=ds.Regression())
    frozen.likelihood.log_noise.requires_grad_(False)
    frozen.loss(*rows(100.0))
    assert float(noise(frozen)) == 1
    assert not caplog.records


def test_a_noise_is_started_once(tmp_path):
    x, y = rows(10.0)
    posterior = ds.MAP(nn.Linear(4, 1), likelihood=ds.Regression())
    ds.fit(posterior, [(x, y)], epochs=3, checkpoint=tmp_path / "run.pt", **QUIET)
    trained = float(noise(posterior))
    posterior.loss(x, 100 * y)
    assert float(noise(posterior)) == trained
    resumed = ds.MAP(nn.Linear(4, 1), likelihood=ds.Regression())
    ds.fit(resumed, [(x, 100 * y)], epochs=3, checkpoint=tmp_path / "run.pt", **QUIET)
    assert float(noise(resumed)) == trained
    resumed.loss(x, 100 * y)
    assert float(noise(resumed)) == trained


@pytest.mark.parametrize("how", ["node_bnn", "track"])
def test_methods_that_prepare_their_steps_themselves_start_it_too(how):
    x, y = rows(10.0, 22.0)
    make = {
        "node_bnn": lambda: ds.NodeBNN(tiny.mlp(outputs=1), likelihood=ds.Regression(), data_size=200),
        "track": lambda: ds.track(tiny.mlp(outputs=1), [ds.SWAG, ds.MAP], likelihood=ds.Regression()),
    }[how]
    posterior = make()
    posterior.before_step(Batch(x, y))
    assert untrained_noise(posterior.particles) is None
    tensors = {**posterior.particles.shared_parameters(), **posterior.particles.own_parameters()}
    assert (tensors["likelihood.log_noise"] > math.log(FAR)).all()


@pytest.mark.parametrize("use", [
    lambda posterior, x, y: posterior.predict(x),
    lambda posterior, x, y: ds.predict(posterior, [(x, y)]),
    lambda posterior, x, y: ds.summarise(posterior, [(x, y)]),
    lambda posterior, x, y: ds.evaluate(posterior, [(x, y)]),
], ids=["predict", "ds.predict", "summarise", "evaluate"])  # fmt: skip
def test_a_noise_that_was_never_trained_is_warned_of_once_where_it_predicts(use, caplog):
    x, y = rows()
    posterior = ds.DeepEnsemble([nn.Linear(4, 1) for _ in range(2)], likelihood=ds.Regression())
    use(posterior, x, y)
    posterior.predict(x)
    assert caplog.text.count("the learned noise was never trained and is still 1") == 1
    caplog.clear()
    trained = ds.DeepEnsemble([nn.Linear(4, 1) for _ in range(2)], likelihood=ds.Regression())
    ds.fit(trained, [(x, y)], epochs=1, validation=[(x, y)], **QUIET)
    use(trained, x, y)
    assert "never trained" not in caplog.text
