"""SWAG and SWA: moments of snapshots, one noise vector for all layers, and files that predict the same."""

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.methods import SWA, SWAG
from refusals import refuses


def flatten(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors.values()])


def scalars():
    """Three parameters in two tensors; B outputs that are all of them."""
    a, b = (nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in (2, 1))
    return tiny.Network(lambda self, x: torch.cat([self.a, self.b]).expand(len(x), 3) + 0 * x.sum(), a=a, b=b)


def recorded(snapshots, method=SWAG, **keywords):
    """A posterior that has seen these weights (n, 3), one an observe call."""
    module = scalars()
    posterior = method(module, **keywords)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for weights in snapshots:
        with torch.no_grad():
            module.a.copy_(weights[:2])
            module.b.copy_(weights[2:])
        posterior.observe(optimizer)
    return posterior


def moments(snapshots, rank):
    """(mean, variance, deviations (held, 3)) written out: deviations are from the mean so far."""
    n = len(snapshots)
    deviations = torch.stack([snapshots[i] - snapshots[: i + 1].mean(0) for i in range(n)])[-rank:]
    return snapshots.mean(0), snapshots.var(0, correction=0), deviations


def covariance(posterior, count):
    """(3, 3) of this many samples."""
    posterior.samples = count
    drawn = tiny.sampled(posterior)
    flat = torch.cat([drawn["a"], drawn["b"]], 1)  # (S, 3)
    return flat.T.cov(), flat.mean(0)


def test_the_mean_of_equal_snapshots_is_their_value_and_the_variance_nothing():
    ones = torch.full((20, 3), 1.1, dtype=torch.float64)
    posterior = recorded(ones, rank=20)
    assert torch.equal(posterior.mean["a"], ones[0, :2])
    assert float(posterior.variance["a"].abs().max()) == 0
    assert float(posterior.recorder.deviations.abs().max()) == 0
    assert torch.equal(tiny.sampled(posterior)["b"], ones[:1, 2:].expand(30, 1))
    single = SWAG(nn.Linear(3, 2))  # and in float32
    optimizer = torch.optim.SGD(single.parameters(), lr=0.0)
    for _ in range(20):
        single.observe(optimizer)
    assert torch.equal(single.mean["weight"], single.network.weight)
    assert float(single.variance["weight"].abs().max()) == 0


@pytest.mark.parametrize("n", [1, 3, 5, 12])
def test_mean_variance_and_deviations_are_those_of_the_snapshots(n):
    snapshots = torch.randn(n, 3, dtype=torch.float64)
    posterior = recorded(snapshots, rank=5)
    mean, variance, deviations = moments(snapshots, rank=5)
    torch.testing.assert_close(flatten(posterior.mean), mean, rtol=0, atol=1e-14)
    torch.testing.assert_close(flatten(posterior.variance), variance, rtol=0, atol=1e-14)
    order = [(i % 5) for i in range(max(0, n - 5), n)]
    torch.testing.assert_close(posterior.recorder.deviations[order, 0], deviations, rtol=0, atol=1e-14)
    assert int(posterior.recorder.snapshots.taken) == n


def test_float32_variance_does_not_lose_itself_in_a_large_mean():
    """E[w²] − mean² in float32 would be rounding here: 1000² against a variance of 10⁻⁴."""
    module = nn.Linear(1, 1)
    posterior, optimizer = SWAG(module, rank=4), torch.optim.SGD(module.parameters(), lr=0.0)
    values = 1000 + 0.01 * torch.tensor([1.0, -1.0, 1.0, -1.0])
    for value in values:
        module.weight.data.fill_(value)
        posterior.observe(optimizer)
    expected = float(values.double().var(correction=0))
    assert float(posterior.variance["weight"]) == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("n", [3, 8])
def test_samples_have_half_the_sum_of_both_covariances_with_the_divisor_of_what_is_held(n):
    snapshots = torch.randn(n, 3, dtype=torch.float64) * torch.tensor([1.0, 2.0, 0.5])
    posterior, count = recorded(snapshots, rank=6), 200_000
    mean, variance, deviations = moments(snapshots, rank=6)
    expected = 0.5 * (variance.diag() + deviations.T @ deviations / (min(n, 6) - 1))
    found, centre = covariance(posterior, count)
    scale = expected.diag().sqrt()
    error = 4 * (2 / count) ** 0.5 * scale[:, None] * scale[None]  # of a Gaussian's covariance, at most
    assert bool(((found - expected).abs() < error).all())
    assert bool(((centre - mean).abs() < 4 * scale / count**0.5).all())


def test_layers_that_move_together_are_sampled_together():
    """Two perfectly correlated tensors: half of the covariance is the diagonal part, so the correlation is one half."""
    steps = torch.randn(10, 1, dtype=torch.float64)
    snapshots = steps * torch.tensor([1.0, -1.0, 3.0], dtype=torch.float64)
    posterior, count = recorded(snapshots, rank=10), 100_000
    _, variance, deviations = moments(snapshots, rank=10)
    low_rank = deviations.T @ deviations / 9
    share = float(low_rank[2, 2] / (low_rank[2, 2] + variance[2]))  # about one half: both estimate one variance
    assert 0.3 < share < 0.7
    found, _ = covariance(posterior, count)
    correlation = found / (found.diag()[:, None] * found.diag()[None]).sqrt()
    assert float(correlation[0, 2]) == pytest.approx(share, abs=4 / count**0.5)
    assert float(correlation[0, 1]) == pytest.approx(-share, abs=4 / count**0.5)


def test_the_temperature_multiplies_the_covariance():
    snapshots = torch.randn(6, 3, dtype=torch.float64)
    torch.manual_seed(1)
    whole = flatten(tiny.sampled(recorded(snapshots, posterior_temperature=1.0)))
    torch.manual_seed(1)
    quarter = flatten(tiny.sampled(recorded(snapshots, posterior_temperature=0.25)))
    centre = flatten({k: v.expand(30, -1) for k, v in recorded(snapshots).mean.items()})
    torch.testing.assert_close(quarter - centre, 0.5 * (whole - centre), rtol=0, atol=1e-12)
    nothing = tiny.sampled(recorded(snapshots, posterior_temperature=0.0))
    torch.testing.assert_close(flatten(nothing), centre, rtol=0, atol=1e-14)


def test_swa_is_swag_without_noise():
    snapshots = torch.randn(7, 3, dtype=torch.float64)
    posterior = recorded(snapshots, SWA)
    torch.testing.assert_close(flatten(posterior.mean), snapshots.mean(0), rtol=0, atol=1e-14)
    drawn = posterior.eval().draw()
    assert drawn.members == 1
    torch.testing.assert_close(drawn(torch.zeros(2, 1))[0, 0], snapshots.mean(0), rtol=0, atol=1e-14)


def test_swa_agrees_with_torch():
    module, (x, y) = tiny.mlp().double(), tiny.points(24)
    posterior, averaged = SWA(module), torch.optim.swa_utils.AveragedModel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        posterior.backward(x, y)
        optimizer.step()
        posterior.observe(optimizer)
        averaged.update_parameters(module)
    ds.refresh(posterior, [(x[:16], y[:16]), (x[16:], y[16:])])
    member = posterior.member(0)
    for ours, theirs in zip(member.parameters(), averaged.module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-12)


def test_fit_spreads_twice_the_rank_over_the_last_quarter(monkeypatch):
    posterior, (x, y) = SWAG(tiny.mlp().double(), rank=2), tiny.points(40)
    seen = []
    add = posterior.recorder.snapshots.taken.add
    noted = lambda: (seen.append(int(posterior.steps)), add())[1]  # noqa: E731
    monkeypatch.setattr(posterior.recorder.snapshots.taken, "add", noted)
    loader = [(x[i : i + 4], y[i : i + 4]) for i in range(0, 40, 4)]
    ds.fit(posterior, loader, epochs=8, progress=False)
    assert seen == [65, 70, 75, 80]
    assert posterior.draw().members == 30
    ds.fit(posterior, loader, epochs=4, progress=False)  # a second run has snapshots of its own
    assert seen[4:] == [114, 116, 118, 120]
    assert int(posterior.recorder.snapshots.taken) == 4


def test_start_and_every_count_observe_calls_from_0():
    snapshots = torch.arange(12, dtype=torch.float64)[:, None].expand(12, 3)
    posterior = recorded(snapshots, start=4, every=3)
    assert int(posterior.recorder.snapshots.taken) == 3
    assert float(posterior.mean["b"]) == pytest.approx((4 + 7 + 10) / 3)


def test_the_schedule_ends_in_a_constant_rate():
    factors = [SWAG(scalars()).default_schedule(100)(epoch) for epoch in (0, 30, 75, 99)]
    assert factors == pytest.approx([1.0, 1.0, 0.5, 0.5])
    assert SWA(scalars()).default_schedule(100)(99) == pytest.approx(0.5)


def test_norm_layers_are_sampled_with_statistics_that_belong_to_them():
    posterior, (x, y) = SWAG(tiny.mlp(dropout=0.5).double(), rank=5, samples=3), tiny.points(24)
    loader = [(x[:10], y[:10]), (x[10:], y[10:])]
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.5)
    ds.fit(posterior, loader, epochs=4, optimizer=optimizer, progress=False)
    members = [posterior.member(i) for i in range(3)]
    assert not torch.equal(members[0][1].weight, members[1][1].weight)
    for member in members:
        hidden = [member[0](a).detach() for a, _ in loader]
        mean = (10 * hidden[0].mean(0) + 14 * hidden[1].mean(0)) / 24
        variance = (10 * hidden[0].var(0) + 14 * hidden[1].var(0)) / 24
        torch.testing.assert_close(member[1].running_mean, mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(member[1].running_var, variance, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", [SWAG, SWA])
def test_drawing_before_the_first_snapshot_is_refused(method):
    posterior = method(scalars(), start=5)
    told = "expected at least one snapshot of the weights, got none after 0 observed steps"
    refuses(lambda: posterior.predict(torch.zeros(2, 1)), told)
    posterior.observe(torch.optim.SGD(posterior.parameters(), lr=0.1))
    refuses(lambda: ds.refresh(posterior, []), r"none after 1 observed steps \(the first is at call 5")
