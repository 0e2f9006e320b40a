"""Snapshot ensembles: the members are the networks that training passed through."""

import copy

import pytest
import torch

import dissensus as ds
import tiny
from dissensus.methods import SnapshotEnsemble


def run(posterior, steps, x, y):
    """The network after every step, in eval mode."""
    optimizer, networks = torch.optim.SGD(posterior.parameters(), lr=0.1), []
    posterior.train()
    for _ in range(steps):
        optimizer.zero_grad()
        posterior.backward(x, y)
        optimizer.step()
        posterior.observe(optimizer)
        networks.append(copy.deepcopy(posterior.network).eval())
    return networks


def test_members_are_the_networks_of_the_run_with_their_batch_statistics():
    posterior, (x, y) = SnapshotEnsemble(tiny.mlp().double(), members=3), tiny.points()
    posterior.begin(steps_per_epoch=4, epochs=3)
    networks = run(posterior, 12, x, y)
    outputs = posterior.eval()(x)
    for i, step in enumerate((3, 7, 11)):  # the last of each of three equal parts
        torch.testing.assert_close(outputs[i], networks[step](x), rtol=0, atol=1e-12)


def test_the_last_ones_are_held():
    posterior, (x, y) = SnapshotEnsemble(tiny.mlp().double(), members=2, start=1, every=2), tiny.points()
    networks = run(posterior, 8, x, y)  # snapshots after 1, 3, 5, 7
    outputs = posterior.eval()(x)
    torch.testing.assert_close(outputs[0], networks[5](x), rtol=0, atol=1e-12)
    torch.testing.assert_close(outputs[1], networks[7](x), rtol=0, atol=1e-12)


def test_those_that_are_held_come_in_the_order_of_the_run():
    posterior, (x, y) = SnapshotEnsemble(tiny.mlp().double(), members=3, start=0, every=1), tiny.points()
    networks = run(posterior, 5, x, y)
    outputs = posterior.eval()(x)
    for found, network in zip(outputs, networks[2:], strict=True):
        torch.testing.assert_close(found, network(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("networks", [1, 2])
def test_every_snapshot_has_the_noise_that_was_learned_then(networks, tmp_path):
    def make():
        return torch.nn.Linear(1, 1).double()

    given = make() if networks == 1 else [make() for _ in range(networks)]
    posterior = SnapshotEnsemble(given, members=3, likelihood=ds.Regression("learned"))
    x, y = (torch.linspace(-1, 1, 8, dtype=torch.float64)[:, None] * factor for factor in (1.0, 0.5))
    posterior.begin(steps_per_epoch=1, epochs=3)
    optimizer, learned = torch.optim.SGD(posterior.parameters(), lr=0.2), []
    for _ in range(3):
        optimizer.zero_grad()
        posterior.backward(x, y)
        optimizer.step()
        posterior.observe(optimizer)
        learned.append(posterior.current().predict(x).variances[:, 0, 0])  # (M,)
    wanted = torch.stack(learned).mT.flatten()  # network by network
    assert wanted.unique().numel() == 3 * networks
    torch.testing.assert_close(posterior.predict(x).variances[:, 0, 0], wanted, rtol=0, atol=1e-12)
    ds.save(posterior, tmp_path)
    torch.testing.assert_close(ds.load(tmp_path, make()).predict(x).variances[:, 0, 0], wanted, rtol=0, atol=1e-12)


def test_fewer_snapshots_than_members_are_fewer_functions():
    posterior, (x, y) = SnapshotEnsemble(tiny.mlp().double(), members=5), tiny.points()
    run(posterior, 2, x, y)
    assert posterior.draw().members == 2
    assert posterior.predict(x).member_means.shape == (2, 12, 3)


def test_the_schedule_has_a_cycle_for_every_member():
    schedule = SnapshotEnsemble(tiny.mlp(), members=3).default_schedule(12)
    factors = [schedule(epoch) for epoch in range(12)]
    assert factors[0] == factors[4] == factors[8] == pytest.approx(1.0)
    assert factors[2] == factors[6] == pytest.approx(0.5)


def test_refresh_leaves_the_members_alone(tmp_path):
    posterior, (x, y) = SnapshotEnsemble(tiny.mlp().double(), members=3), tiny.points()
    ds.fit(posterior, [(x, y)], epochs=6, progress=False)
    before = posterior(x)
    ds.refresh(posterior, [])
    assert torch.equal(posterior(x), before)
    ds.save(posterior, tmp_path)
    assert torch.equal(ds.load(tmp_path, tiny.mlp())(x), before)


def test_drawing_before_the_first_snapshot_is_refused():
    with pytest.raises(ValueError, match="expected at least one snapshot of the weights, got none"):
        SnapshotEnsemble(tiny.mlp(), members=2).draw()
    with pytest.raises(ValueError, match="expected members of at least 1, got 0"):
        SnapshotEnsemble(tiny.mlp(), members=0)
