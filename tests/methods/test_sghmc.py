"""SGHMC: it samples the posterior it should, cycle by cycle, and resumes, saves and runs beside others as it would alone."""

import copy
import math

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.methods.hmc import CycleSnapshots

STD, NOISE, SIZE = 0.8, 0.5, 20


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
        nn.Linear(2, chains, bias=False).double(),
        members=4,
        cycles=0,
        exploration=0.5,
        lr=rate,
        friction=friction,
        posterior_temperature=temperature,
        seed=1,
        likelihood=ds.Regression(noise=NOISE),
        weight_prior_std=scale,
        data_size=SIZE,
    )
    ds.fit(posterior, [(x, y.expand(SIZE, chains))] * 240, epochs=1, progress=False)
    found = posterior.sample(posterior.samples)["weight"].flatten(0, -2)  # (1 · 4 · 500, 2)
    n = len(found)
    assert n == 2000
    variances = temperature / (SIZE * curvature) / (1 - rate * curvature / (2 * (2 - friction)))
    along = (found - mean) @ directions
    assert bool((along.mean(0).abs() < 4 * (variances / n).sqrt()).all())
    errors = along.T.cov() / torch.outer(variances.sqrt(), variances.sqrt()) - torch.eye(2)
    assert float(errors.abs().max()) < 4 * (2 / n) ** 0.5


def run(networks, *, epochs=6, stop=None, checkpoint=None, **keywords):
    x, y = tiny.points()
    settings = {"members": 4, "cycles": 2, "exploration": 0.5, "lr": 0.05, "seed": 3, "data_size": 12} | keywords
    posterior = ds.SGHMC(networks, weight_prior_std=1.0, **settings)
    loader = ds.data.Batches(x, y, batch_size=4, shuffle=True, seed=0)
    after = None if stop is None else lambda epoch: epoch.epoch + 1 == stop
    ds.fit(posterior, loader, epochs=epochs, checkpoint=checkpoint, callback=after, clip=5.0, progress=False)
    return posterior


def networks(count=4):
    torch.manual_seed(0)
    return [tiny.mlp().double() for _ in range(count)]


def test_four_chains_together_are_four_alone():
    together = run(networks()).sample(4)
    for number, network in enumerate(networks()):
        alone = run(network, first_chain=number).sample(4)
        for name, rows in together.items():
            torch.testing.assert_close(rows[number], alone[name][0], rtol=0, atol=1e-8)
    # Each has noise of its own.
    same = run([copy.deepcopy(each).requires_grad_() for each in networks(1)], first_chain=1).sample(4)
    assert not torch.allclose(same["0.weight"], together["0.weight"][:1])


@pytest.mark.parametrize("count", [1, 2])
def test_a_chain_that_was_stopped_goes_on_as_if_it_had_not(tmp_path, count):
    def begun(seed, **keywords):
        made = networks(count)
        torch.manual_seed(seed)
        return run(made[0] if count == 1 else made, seed=None, **keywords)

    whole = begun(1)
    begun(1, stop=3, checkpoint=tmp_path / "run.pt")
    resumed = begun(77, checkpoint=tmp_path / "run.pt")  # the noise goes on from the checkpoint
    assert tiny.largest_difference(tiny.state(whole), tiny.state(resumed)) == 0


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
    with pytest.raises(
        TypeError, match=r"expected an optimizer of kind Langevin for SGHMC, got SGD; .*default_optimizer"
    ):
        ds.fit(posterior, [(x, y)], epochs=1, optimizer=sgd, progress=False)


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
        [tiny.mlp(outputs=2) for _ in range(2)],
        members=3,
        lr=0.01,
        cycles=1,
        likelihood=ds.Regression(),
        weight_prior_std=1.0,
        data_size=12,
    ).double()
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
