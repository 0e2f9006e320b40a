"""Langevin dynamics as a method of one's own: it samples the posterior it should, and trains, resumes and loads as others."""

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from small_chain import SGLD, Langevin


def test_the_chain_samples_the_posterior_of_a_linear_model():
    """1000 outputs with the same targets are 1000 chains; four snapshots of each, hardly correlated: n = 4000."""
    torch.manual_seed(0)
    chains, std, noise = 1000, 0.8, 0.5
    x = torch.randn(20, 2, dtype=torch.float64) @ torch.tensor([[1.0, 0.6], [0.0, 1.0]], dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-0.5]], dtype=torch.float64) + noise * torch.randn(20, 1, dtype=torch.float64)
    precision = x.T @ x / noise**2 + torch.eye(2) / std**2
    mean, covariance = torch.linalg.solve(precision, x.T @ y / noise**2)[:, 0], torch.linalg.inv(precision)

    network = nn.Linear(2, chains, bias=False).double()
    likelihood = ds.Regression(noise=noise)
    posterior = SGLD(network, members=4, likelihood=likelihood, weight_prior_std=std, data_size=20)
    largest = float(torch.linalg.eigvalsh(precision)[-1]) / 20  # curvature of the mean loss
    optimizer = posterior.chain(0.1 / largest)
    ds.fit(posterior, [(x, y.expand(20, chains))] * 200, epochs=4, optimizer=optimizer, progress=False)

    found = posterior.sample(posterior.samples)["weight"].flatten(0, -2)  # (1 · 4 · 1000, 2)
    n = len(found)
    assert n == 4000
    spread = covariance.diagonal().sqrt()
    assert bool(((found.mean(0) - mean).abs() < 4 * spread / n**0.5).all())
    # Steps of this length make variances too large by a share of at most 0.1 / (2 − 0.1); the rest is the error of n draws.
    error = (found.T.cov() - covariance).abs() / torch.outer(spread, spread)
    assert float(error.max()) < 0.1 / 1.9 + 4 * (2 / n) ** 0.5


def test_only_its_own_optimizer_may_train_it():
    posterior, (x, y) = SGLD(tiny.mlp().double(), data_size=12), tiny.points()
    with pytest.raises(TypeError, match="expected an optimizer of kind Langevin for SGLD, got SGD"):
        ds.fit(posterior, [(x, y)], epochs=1, optimizer=torch.optim.SGD(posterior.parameters(), lr=0.1), progress=False)
    ds.fit(posterior, [(x, y)], epochs=1, progress=False)


def test_it_accumulates_clips_and_resumes_as_if_it_had_not_stopped(tmp_path):
    x, y = tiny.points()

    def run(epochs, checkpoint):
        torch.manual_seed(3)
        posterior = SGLD(tiny.mlp().double(), members=3, start=1, every=1, data_size=12)
        ds.fit(
            posterior,
            ds.data.Batches(x, y, batch_size=4, shuffle=True, seed=0),
            epochs=epochs,
            optimizer=posterior.chain(0.05),
            clip=0.5,
            accumulate=2,
            checkpoint=checkpoint,
            progress=False,
        )
        return posterior

    whole = run(4, None)
    run(2, tmp_path / "run.pt")
    resumed = run(4, tmp_path / "run.pt")
    assert tiny.largest_difference(tiny.state(whole), tiny.state(resumed)) == 0


def test_it_is_saved_and_loaded(tmp_path):
    posterior, (x, y) = SGLD(tiny.mlp().double(), members=3, data_size=12), tiny.points()
    ds.fit(posterior, [(x, y)], epochs=8, progress=False)
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, tiny.mlp(), method=SGLD)
    assert torch.equal(loaded.predict(x).members, posterior.predict(x).members)
    assert loaded.predict(x).members.shape[0] == 3
    assert isinstance(loaded.default_optimizer(), Langevin)
