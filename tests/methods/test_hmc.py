"""HMC: posteriors that are known, chains beside others, files, and what it refuses."""

import math

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from refusals import refuses
from thinning import often

STD, NOISE, SIZE = 0.8, 0.5, 20


def linear(temperature=1.0, **keywords):
    """(posterior with chains, mean, covariance) of a linear model with one bias."""
    torch.manual_seed(0)
    x = torch.randn(SIZE, 2)
    y = x @ torch.tensor([[1.0], [-0.5]]) + 0.3 + NOISE * torch.randn(SIZE, 1)
    design = torch.cat([x, torch.ones(SIZE, 1)], dim=1).double()
    precision = design.T @ design / NOISE**2 + torch.eye(3) / STD**2
    settings = {"samples": 120, "warmup": 40, "leapfrog": 3, "seed": 1} | keywords
    posterior = ds.HMC(
        [nn.Linear(2, 1) for _ in range(4)],
        posterior_temperature=temperature,
        likelihood=ds.Regression(noise=NOISE),
        weight_prior_std=STD,
        data_size=SIZE,
        **settings,
    )
    posterior.fit_posthoc([(x[:7], y[:7]), (x[7:], y[7:])])
    mean = torch.linalg.solve(precision, design.T @ y.double() / NOISE**2)[:, 0]
    return posterior, mean, torch.linalg.inv(precision), x


@pytest.mark.parametrize("temperature", often([0.25], [1.0]))
def test_chains_have_mean_and_covariance_of_a_linear_model(temperature):
    posterior, mean, covariance, x = linear(temperature)
    draws = posterior.chains.draws  # (4, 120, 3)
    whitened = (draws - mean) @ torch.linalg.cholesky(torch.linalg.inv(temperature * covariance))
    n = ds.metrics.effective_sample_size(whitened)
    assert bool((n > 100).all())
    flat = whitened.flatten(0, 1)
    assert bool((flat.mean(0).abs() < 4 / n.sqrt()).all())
    products = whitened.unsqueeze(-1) * whitened.unsqueeze(-2)
    error = (flat.T @ flat / len(flat) - torch.eye(3)) / products.flatten(0, 1).std(0)
    assert bool((error.abs() < 4 / ds.metrics.effective_sample_size(products).sqrt()).all())
    # What is drawn are these samples, chain by chain.
    said = posterior.predict(x).member_means  # (480, 20, 1)
    expected = draws.flatten(0, 1) @ torch.cat([x, torch.ones(SIZE, 1)], dim=1).double().T
    torch.testing.assert_close(said[..., 0].double(), expected, rtol=0, atol=1e-5)
    found = ds.convergence(posterior, x[:3])
    assert found.rhat.shape == found.effective_samples.shape == (3, 1)
    assert float(found.rhat.max()) < 1.1
    torch.testing.assert_close(found.rhat, ds.metrics.split_rhat(expected.reshape(4, 120, SIZE)[..., :3])[:, None])
    assert "split-R̂ at most" in str(found)


def classifier(networks, **keywords):
    settings = {
        "samples": 5,
        "warmup": 5,
        "leapfrog": 3,
        "seed": 0,
        "weight_prior_std": 1.0,
        "data_size": 12,
    } | keywords
    return ds.HMC(networks, **settings)


def networks(count=3):
    torch.manual_seed(0)
    return [tiny.mlp().double() for _ in range(count)]


def test_chains_together_are_chains_alone():
    loader = [tiny.points()]
    together = classifier(networks()).fit_posthoc(loader)
    for number, network in enumerate(networks()):
        alone = classifier(network, first_chain=number).fit_posthoc(loader)
        torch.testing.assert_close(alone.chains.draws[0], together.chains.draws[number], rtol=0, atol=1e-8)


def test_the_network_stays_as_it_is_and_a_float32_network_runs_in_float64():
    (x, y), network = tiny.points(), tiny.mlp().float()
    before = tiny.state(network)
    posterior = classifier(network).fit_posthoc([(x.float(), y)])
    assert tiny.largest_difference(before, tiny.state(network)) == 0
    assert posterior.chains.draws.dtype == torch.float64
    assert posterior.predict(x.float()).mean.dtype == torch.float32


def test_a_learned_noise_is_sampled_with_the_weights(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(40, 2)
    y = x[:, :1] + 0.3 * torch.randn(40, 1)
    prior = ds.GaussianPrior(1.0)
    posterior = ds.HMC([nn.Linear(2, 1) for _ in range(2)], samples=40, warmup=40, leapfrog=4, seed=0,
                       likelihood=ds.Regression(), prior=prior, data_size=40).fit_posthoc([(x, y)])  # fmt: skip
    noise = posterior.chains.draws[..., -1].exp().flatten()  # σ (80,)
    # With N = 40 and two weights σ has a relative deviation of about 1 / √(2 · 38) around 0.3.
    assert 0.2 < float(noise.mean()) < 0.4
    assert 0.02 < float(noise.std()) < 0.08
    predictive = posterior.predict(x)
    torch.testing.assert_close(predictive.defining_tensors()[1][:, 0, 0].sqrt().double(), noise, rtol=1e-5, atol=0)
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, nn.Linear(2, 1))
    assert torch.equal(loaded.predict(x).total, predictive.total)
    assert ds.convergence(loaded, x).draws == 80


def test_fit_trains_the_networks_and_runs_the_chains():
    posterior = classifier(networks())
    ds.fit(posterior, [tiny.points()], epochs=2, progress=False)
    assert posterior.predict(tiny.points()[0]).member_means.shape[0] == 15
    assert int(posterior.steps) == 2


def test_a_bimodal_posterior_has_chains_in_both_modes():
    """y = w² at x > 0, and −w is asked for at x < 0: the posterior of w has two modes, known by quadrature."""

    class Square(nn.Module):
        def __init__(self, w):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([w]))

        def forward(self, x):
            return torch.where(x > 0, self.w**2, -self.w)

    x, y = torch.ones(10, 1), torch.full((10, 1), 1.0)
    settings = {"samples": 150, "warmup": 50, "leapfrog": 3, "seed": 0, "likelihood": ds.Regression(noise=0.5)}
    posterior = ds.HMC([Square(w) for w in (-1.0, 1.0)], weight_prior_std=1.0, data_size=10, **settings)
    posterior.fit_posthoc([(x, y)])
    w = posterior.chains.draws[..., 0]
    grid = torch.linspace(0, 3, 3001, dtype=torch.float64)
    density = torch.exp(-10 * (1 - grid**2) ** 2 / (2 * 0.25) - grid**2 / 2)
    mean = float((grid * density).sum() / density.sum())
    std = math.sqrt(float((grid**2 * density).sum() / density.sum()) - mean**2)
    sizes = ds.metrics.effective_sample_size(w[:1].abs()), ds.metrics.effective_sample_size(w[1:].abs())
    for chain, size in zip(w.abs(), sizes, strict=True):
        assert abs(float(chain.mean()) - mean) < 4 * std / float(size) ** 0.5
    elsewhere = ds.convergence(posterior, -torch.ones(1, 1))
    assert float(elsewhere.rhat) > 1.1  # the chains stay in their modes, and the prediction there shows it


def test_a_network_too_large_is_refused_with_its_cost():
    posterior = classifier(tiny.mlp().double(), budget=1e4)
    gradients, weights = 10 * 3, sum(each.numel() for each in posterior.parameters())
    with pytest.raises(
        ValueError, match=f"got about {6.0 * gradients * 12 * weights:.0e}: 1 chains".replace("+", r"\+")
    ):
        posterior.fit_posthoc([tiny.points()])


def test_what_is_no_distribution_is_warned_of_or_refused(caplog):
    classifier(tiny.mlp().double(), weight_prior_std=None).fit_posthoc([tiny.points()])
    assert "without a prior" in caplog.text
    refuses(lambda: ds.HMC(tiny.mlp()), "expected data_size")
    refuses(lambda: classifier(tiny.mlp()).predict(tiny.points()[0]), "samples of a chain")

    class Random(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.randn(3)

    refuses(lambda: classifier(Random(4, 3).double()).fit_posthoc([tiny.points()]), "random numbers")
