"""TRADI's own schedule, and validation that looks at what would be sampled."""

import copy

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.methods import TRADI
from dissensus.training.validation import can_keep_epoch, draw_for_validation, validation_nll
from dissensus.utils.parameter_groups import plateau_linear


def network():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()


def started(**keywords) -> TRADI:
    posterior = TRADI(network(), **keywords)
    posterior.filters.observed.add()
    return posterior


def looked_at(epochs: int, posterior: TRADI | None = None) -> list[int]:
    posterior = posterior or started()
    return [epoch for epoch in range(epochs) if can_keep_epoch(posterior, epoch, epochs)]


def fitted(posterior: TRADI, *, epochs: int = 16, rate: float = 0.3, validate: bool = True, **keywords):
    """The history of a run whose rate is so large that the last epoch is not the best."""
    x, y = tiny.points(24)
    optimizer = torch.optim.Adam(posterior.parameters(), lr=rate)
    keywords |= {"validation": [tiny.points(15, seed=1)]} if validate else {}
    loader = [(x[:12], y[:12]), (x[12:], y[12:])]
    return ds.fit(posterior, loader, epochs=epochs, optimizer=optimizer, progress=False, **keywords)


def test_at_most_ten_looks_are_spread_over_the_last_quarter_and_the_last_epoch_is_one():
    one = started()
    found = {epochs: looked_at(epochs, one) for epochs in range(1, 200)}
    assert (found[1], found[2]) == ([0], [1])
    assert found[30] == list(range(22, 30))
    assert found[100] == list(range(81, 100, 2))
    assert all(len(each) <= 10 and each[-1] == epochs - 1 for epochs, each in found.items())


def test_filters_that_have_observed_nothing_are_not_looked_at():
    assert looked_at(30, TRADI(network())) == []


def test_the_filters_of_the_best_look_are_kept_and_not_those_of_the_networks_best_epoch():
    torch.manual_seed(0)
    posterior, seen = TRADI(network(), state_noise=(1.0, 0.5)), []
    history = fitted(posterior, callback=lambda epoch: seen.append(copy.deepcopy(tiny.state(posterior))))
    looked = {epoch.epoch: epoch.look for epoch in history.epochs if epoch.look is not None}
    assert list(looked) == looked_at(16) == [12, 13, 14, 15]
    best = min(looked, key=looked.get)
    assert history.best == best != 15  # so that keeping the last one would be noticed
    assert best != min(history.epochs, key=lambda epoch: epoch.validation).epoch
    kept = tiny.state(posterior)
    for name, tensor in seen[best].items():
        if name != "stored":
            assert torch.equal(kept[name], tensor), name
    assert int(posterior.filters.observed) == 2 * (best + 1)
    assert posterior.filters._gains(2 * (best + 1) + 1) == TRADI(network(), state_noise=(1.0, 0.5)).filters._gains(
        2 * (best + 1) + 1
    )


def test_validation_itself_is_of_the_network_in_training_at_every_epoch():
    torch.manual_seed(0)
    posterior, expected = TRADI(network(), state_noise=(1.0, 0.5)), []
    x, y = tiny.points(15, seed=1)

    def note(epoch):
        with torch.no_grad():
            posterior.network.eval()
            expected.append(float(nn.functional.cross_entropy(posterior.network(x), y)))

    history = fitted(posterior, callback=note)
    assert [epoch.validation for epoch in history.epochs] == pytest.approx(expected, rel=1e-12)


def test_a_look_scores_sampled_networks_with_batch_statistics_of_the_validation_inputs():
    torch.manual_seed(0)
    posterior = TRADI(network(), samples=5, state_noise=(1.0, 0.5))
    fitted(posterior, validate=False)
    rows = [tiny.points(15, seed=1), tiny.points(10, seed=2)]
    drawn = draw_for_validation(posterior, 3, 4, rows)
    members = [drawn.member(i) for i in range(5)]
    for member in members:
        assert not torch.equal(member[0].weight, posterior.network[0].weight)
        hidden = [member[0](x) for x, _ in rows]
        expected = (15 * hidden[0].mean(0) + 10 * hidden[1].mean(0)) / 25
        torch.testing.assert_close(member[1].running_mean, expected.detach(), rtol=0, atol=1e-12)
    x, y = torch.cat([rows[0][0], rows[1][0]]), torch.cat([rows[0][1], rows[1][1]])
    mean = torch.stack([member(x).softmax(1) for member in members]).mean(0)
    nll = -mean[torch.arange(25), y].log().mean().detach()
    assert validation_nll(posterior, rows, drawn) == pytest.approx(float(nll), rel=1e-12)
    assert draw_for_validation(posterior, 2, 4, rows) is None  # not an epoch to look at
    assert posterior.training is posterior.network.training is False


def test_looks_change_nothing_about_the_training():
    losses = []
    for validate in (False, True):
        torch.manual_seed(0)
        posterior = TRADI(nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)).double())
        losses.append([epoch.loss for epoch in fitted(posterior, validate=validate).epochs])
    assert losses[0] == losses[1]


def test_a_stopped_run_goes_on_with_its_best_look(tmp_path):
    def run(stop=None):
        torch.manual_seed(0)
        posterior = TRADI(network(), state_noise=(1.0, 0.5))
        keywords = {"checkpoint": tmp_path / "run.pt"} if stop is not None else {}
        history = fitted(posterior, callback=lambda epoch: epoch.epoch == stop, **keywords)
        return history, posterior

    whole, expected = run()
    run(stop=13)
    history, posterior = run(stop=99)
    assert [epoch.look for epoch in history.epochs] == [epoch.look for epoch in whole.epochs]
    assert history.best == whole.best
    assert tiny.largest_difference(posterior.filters.variance, expected.filters.variance) == 0


def test_patience_waits_for_a_look():
    torch.manual_seed(0)
    posterior = TRADI(network(), state_noise=(1.0, 0.5))
    history = fitted(posterior, epochs=100, rate=0.3, patience=1)
    assert len(history) - 1 in looked_at(100)
    assert history[-1].look > history[history.best].look


def test_the_rate_does_not_die_before_sampling():
    tradi, other = started(), ds.MAP(network())
    factors = [tradi.default_schedule(100)(epoch) for epoch in range(100)]
    assert factors[0] == 1.0
    assert factors[75:] == [pytest.approx(0.1)] * 25
    assert factors == sorted(factors, reverse=True)
    assert other.default_schedule(100)(99) == plateau_linear(0.99) == pytest.approx(0.01)


def test_the_variance_is_that_of_a_network_that_still_moves():
    x, y = tiny.points(24)

    def deviation(schedule) -> float:
        torch.manual_seed(0)
        posterior = TRADI(network(), state_noise=(1.0, 0.5))  # a memory of 3 and 5 steps
        optimizer = torch.optim.Adam(posterior.parameters(), lr=0.1)
        schedule = posterior.default_schedule(200) if schedule is None else schedule
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        ds.fit(posterior, [(x, y)], epochs=200, optimizer=optimizer, scheduler=scheduler, progress=False)
        return sum(float(v.sum()) for v in posterior.filters.variance.values()) ** 0.5

    dead = deviation(lambda epoch: plateau_linear(epoch / 200))
    assert deviation(None) > 5 * dead


def test_methods_without_looks_are_judged_as_ever():
    torch.manual_seed(0)
    posterior = ds.MAP(network())
    history = fitted(posterior)
    assert all(epoch.look is None for epoch in history.epochs)
    assert history.best == min(history.epochs, key=lambda epoch: epoch.validation).epoch
