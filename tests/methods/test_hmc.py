"""HMC and SGHMC: posteriors that are known, chains beside others, files, and what they refuse."""

import copy
import math

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.methods.hmc import CycleSnapshots
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
    settings = {"samples": 50, "warmup": 30, "leapfrog": 3, "seed": 1} | keywords
    posterior = ds.HMC(
        [nn.Linear(2, 1) for _ in range(4)], posterior_temperature=temperature, likelihood=ds.Regression(noise=NOISE),
        weight_prior_std=STD, data_size=SIZE, **settings,
    )  # fmt: skip
    posterior.fit_posthoc([(x[:7], y[:7]), (x[7:], y[7:])])
    mean = torch.linalg.solve(precision, design.T @ y.double() / NOISE**2)[:, 0]
    return posterior, mean, torch.linalg.inv(precision), x


@pytest.mark.parametrize("temperature", often([0.25], [1.0]))
def test_chains_have_mean_and_covariance_of_a_linear_model(temperature):
    posterior, mean, covariance, x = linear(temperature)
    draws = posterior.chains.draws  # (4, 50, 3)
    whitened = (draws - mean) @ torch.linalg.cholesky(torch.linalg.inv(temperature * covariance))
    n = ds.metrics.effective_sample_size(whitened)
    assert bool((n > 50).all())
    flat = whitened.flatten(0, 1)
    assert bool((flat.mean(0).abs() < 4 / n.sqrt()).all())
    products = whitened.unsqueeze(-1) * whitened.unsqueeze(-2)
    error = (flat.T @ flat / len(flat) - torch.eye(3)) / products.flatten(0, 1).std(0)
    assert bool((error.abs() < 4 / ds.metrics.effective_sample_size(products).sqrt()).all())
    # What is drawn are these samples, chain by chain.
    said = posterior.predict(x).member_means  # (200, 20, 1)
    expected = draws.flatten(0, 1) @ torch.cat([x, torch.ones(SIZE, 1)], dim=1).double().T
    torch.testing.assert_close(said[..., 0].double(), expected, rtol=0, atol=1e-5)
    found = ds.convergence(posterior, x[:3])
    assert found.rhat.shape == found.effective_samples.shape == (3, 1)
    assert float(found.rhat.max()) < 1.1
    torch.testing.assert_close(found.rhat, ds.metrics.split_rhat(expected.reshape(4, 50, SIZE)[..., :3])[:, None])
    assert "split-R̂ at most" in str(found)


def classifier(networks, **keywords):
    settings = {
        "samples": 5, "warmup": 5, "leapfrog": 3, "seed": 0, "weight_prior_std": 1.0, "data_size": 12,
    } | keywords  # fmt: skip
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
    posterior = ds.HMC([nn.Linear(2, 1) for _ in range(2)], samples=40, warmup=25, leapfrog=3, seed=0,
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

    def square(w):
        return tiny.Network(lambda self, x: torch.where(x > 0, self.w**2, -self.w), w=nn.Parameter(torch.tensor([w])))

    x, y = torch.ones(10, 1), torch.full((10, 1), 1.0)
    settings = {"samples": 50, "warmup": 25, "leapfrog": 3, "seed": 0, "likelihood": ds.Regression(noise=0.5)}
    posterior = ds.HMC([square(w) for w in (-1.0, 1.0)], weight_prior_std=1.0, data_size=10, **settings)
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
    told = f"got about {6.0 * gradients * 12 * weights:.0e}: 1 chains".replace("+", r"\+")
    refuses(lambda: posterior.fit_posthoc([tiny.points()]), told)


def test_what_is_no_distribution_is_warned_of_or_refused(caplog):
    classifier(tiny.mlp().double(), weight_prior_std=None).fit_posthoc([tiny.points()])
    assert "without a prior" in caplog.text
    refuses(lambda: ds.HMC(tiny.mlp()), "expected data_size")
    refuses(lambda: classifier(tiny.mlp()).predict(tiny.points()[0]), "samples of a chain")

    class Random(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.randn(3)

    refuses(lambda: classifier(Random(4, 3).double()).fit_posthoc([tiny.points()]), "random numbers")


def conjugate():
    """(x, y, mean, covariance) of a linear model with a Gaussian posterior, N = 20, two weights."""
    torch.manual_seed(0)
    x = torch.randn(SIZE, 2, dtype=torch.float64) @ torch.tensor([[1.0, 0.6], [0.0, 1.0]], dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-0.5]], dtype=torch.float64) + NOISE * torch.randn(SIZE, 1, dtype=torch.float64)
    precision = x.T @ x / NOISE**2 + torch.eye(2) / STD**2
    return x, y, torch.linalg.solve(precision, x.T @ y / NOISE**2)[:, 0], torch.linalg.inv(precision)


@pytest.mark.parametrize(
    ("friction", "temperature"),
    [(0.3, 0.25), *(pytest.param(each, 1.0, marks=pytest.mark.slow) for each in (0.3, 1.0))],
)
def test_full_batches_sample_the_posterior_of_a_linear_model(friction, temperature):
    """500 outputs with the same targets are 500 chains; the 4 snapshots of each are hardly correlated: n = 2000.

    In each eigendirection of the covariance the variance is that of the posterior times T / (1 − ηλ / (2 (2 − α))).
    """
    x, y, mean, covariance = conjugate()
    chains, scale = 500, STD
    curvature, directions = torch.linalg.eigh(torch.linalg.inv(covariance) / SIZE)  # of the mean loss
    rate = 0.6 / float(curvature[-1])  # ηλ = 0.6 in the stiff direction: a factor of 1.43 at α = 1
    posterior = ds.SGHMC(
        nn.Linear(2, chains, bias=False).double(), members=4, cycles=0, exploration=0.5, lr=rate, friction=friction,
        posterior_temperature=temperature, seed=1, likelihood=ds.Regression(noise=NOISE), weight_prior_std=scale,
        data_size=SIZE,
    )  # fmt: skip
    ds.fit(posterior, [(x, y.expand(SIZE, chains))] * 240, epochs=1, progress=False)
    found = posterior.sample(posterior.samples)["weight"].flatten(0, -2)  # (1 · 4 · 500, 2)
    n = len(found)
    assert n == 2000
    variances = temperature / (SIZE * curvature) / (1 - rate * curvature / (2 * (2 - friction)))
    along = (found - mean) @ directions
    assert bool((along.mean(0).abs() < 4 * (variances / n).sqrt()).all())
    errors = along.T.cov() / torch.outer(variances.sqrt(), variances.sqrt()) - torch.eye(2)
    assert float(errors.abs().max()) < 4 * (2 / n) ** 0.5


def run(networks, **keywords):
    x, y = tiny.points()
    settings = {"members": 4, "cycles": 2, "exploration": 0.5, "lr": 0.05, "seed": 3, "data_size": 12} | keywords
    posterior = ds.SGHMC(networks, weight_prior_std=1.0, **settings)
    loader = ds.data.Batches(x, y, batch_size=4, shuffle=True, seed=0)
    ds.fit(posterior, loader, epochs=4, clip=5.0, progress=False)
    return posterior


def test_three_chains_together_are_three_alone():
    together = run(networks()).sample(4)
    for number, network in enumerate(networks()):
        alone = run(network, first_chain=number).sample(4)
        for name, rows in together.items():
            torch.testing.assert_close(rows[number], alone[name][0], rtol=0, atol=1e-8)
    # Each has noise of its own.
    same = run([copy.deepcopy(each).requires_grad_() for each in networks(1)], first_chain=1).sample(4)
    assert not torch.allclose(same["0.weight"], together["0.weight"][:1])


def test_the_noise_depends_on_the_seed():
    first, again, other = (run(networks(1)[0], seed=seed).sample(4)["0.weight"] for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    torch.manual_seed(5)
    drawn = run(networks(1)[0], seed=None).sample(4)["0.weight"]  # from torch's generator
    assert not torch.allclose(first, drawn)


@pytest.mark.parametrize(("cycles", "expected"), [(1, [8, 11]), (2, [4, 5, 10, 11]), (3, [3, 7, 11])])
def test_rate_and_noise_follow_the_cycles(cycles, expected):
    """12 steps; the last half of each cycle is sampled."""
    wanted = len(expected)
    posterior = ds.SGHMC(tiny.mlp().double(), members=wanted, cycles=cycles, exploration=0.5, data_size=12)
    posterior.begin(4, 3)
    optimizer, (x, y) = posterior.default_optimizer(), tiny.points()
    seen, taken = [], []
    for step in range(12):
        seen.append([float(each) for each in posterior.phase()])
        before = int(posterior.recorder.snapshots.taken)
        posterior.backward(x, y)
        optimizer.step()
        posterior.observe(optimizer)
        posterior.zero_grad()
        taken += [step] * (int(posterior.recorder.snapshots.taken) - before)
    length = 12 // cycles
    assert taken == expected
    for step, (factor, hot) in enumerate(seen):
        share = step % length / length
        assert factor == pytest.approx(0.5 * (1 + math.cos(math.pi * share)), abs=1e-6)
        assert hot == (share >= 0.5)


def test_snapshots_of_cycles_of_unequal_length_are_the_last_ones_of_each():
    snapshots = CycleSnapshots(6, cycles=3, tail=0.8)
    snapshots.begin(100)
    due = [step for step in range(100) if snapshots.count_step()]
    assert due == [30, 33, 63, 66, 96, 99]  # cycles of 34, 33 and 33 steps, of which 6 are sampled


@pytest.mark.parametrize(("wanted", "expected"), [(9, [1, 1, 1, 1, 1, 1, 1, 2]), (3, [0, 0, 1, 0, 0, 1, 0, 1])])
def test_a_number_that_cycles_do_not_divide_is_spread_over_them(wanted, expected):
    snapshots = CycleSnapshots(wanted, cycles=8, tail=0.5)
    snapshots.begin(80)
    due = [step for step in range(80) if snapshots.count_step()]
    assert [sum(10 * cycle <= step < 10 * (cycle + 1) for step in due) for cycle in range(8)] == expected


def test_at_temperature_zero_there_is_no_noise():
    cold = [run(networks(1)[0], posterior_temperature=0.0, seed=seed).sample(4)["0.weight"] for seed in (1, 2)]
    assert torch.equal(*cold)


def test_only_its_own_optimizer_may_train_it():
    posterior, (x, y) = ds.SGHMC(tiny.mlp().double(), data_size=12), tiny.points()
    sgd = torch.optim.SGD(posterior.parameters(), lr=0.1)
    told = r"expected an optimizer of kind Langevin for SGHMC, got SGD; .*default_optimizer"
    refuses(lambda: ds.fit(posterior, [(x, y)], epochs=1, optimizer=sgd, progress=False), told, TypeError)


def test_a_flag_on_the_device_stops_a_step():
    """As captured steps stop: gradients that are not finite move nothing."""
    posterior, (x, y) = ds.SGHMC(tiny.mlp().double(), data_size=12, cycles=0), tiny.points()
    optimizer = posterior.default_optimizer()
    posterior.backward(x, y)
    optimizer.step()
    before = {**tiny.state(posterior)}
    velocity = [state["velocity"].clone() for state in optimizer.state.values()]
    for parameter in posterior.parameters():
        parameter.grad.fill_(math.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert tiny.largest_difference(before, tiny.state(posterior)) == 0
    assert all(torch.equal(a, s["velocity"]) for a, s in zip(velocity, optimizer.state.values(), strict=True))
    optimizer.found_inf = torch.zeros(())
    posterior.zero_grad()
    posterior.backward(x, y)
    optimizer.step()
    assert tiny.largest_difference(before, tiny.state(posterior)) > 0


def test_it_is_saved_and_loaded_with_the_noise_of_each_snapshot(tmp_path):
    x, _ = tiny.points()
    y = torch.randn(12, 2, dtype=torch.float64)
    posterior = ds.SGHMC(
        [tiny.mlp(outputs=2) for _ in range(2)], members=3, lr=0.01, cycles=1, likelihood=ds.Regression(),
        weight_prior_std=1.0, data_size=12,
    ).double()  # fmt: skip
    ds.fit(posterior, [(x, y)], epochs=20, progress=False)
    predictive = posterior.predict(x)
    noise = posterior.sample(3)["likelihood.log_noise"].double().flatten()  # (2 · 3,)
    assert len(noise.unique()) == 6
    torch.testing.assert_close(predictive.defining_tensors()[1][:, 0, 0], (2 * noise).exp(), rtol=0, atol=1e-12)
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, tiny.mlp(outputs=2))
    assert torch.equal(loaded.predict(x).member_means, predictive.member_means)
    assert torch.equal(loaded.predict(x).aleatoric, predictive.aleatoric)


def test_a_chain_without_a_prior_is_warned_of(caplog):
    ds.SGHMC(tiny.mlp(), data_size=12).default_optimizer()
    assert "without a prior" in caplog.text
