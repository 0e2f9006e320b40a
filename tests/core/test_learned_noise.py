"""A learned noise before its first step: where it starts, and who is told that it was never trained."""

import math

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.core.batch import Batch
from dissensus.core.likelihood import FAR, untrained_noise

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


@pytest.mark.parametrize(
    "use",
    [
        lambda posterior, x, y: posterior.predict(x),
        lambda posterior, x, y: ds.predict(posterior, [(x, y)]),
        lambda posterior, x, y: ds.summarise(posterior, [(x, y)]),
        lambda posterior, x, y: ds.evaluate(posterior, [(x, y)]),
    ],
    ids=["predict", "ds.predict", "summarise", "evaluate"],
)
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
