"""Sampled networks: fixed functions, stored draws that come and go with the state."""

import pickle

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.methods import SWA, SWAG, TRADI, GaussianPerturbation, SnapshotEnsemble
from thinning import thinned

METHODS = [TRADI, SWAG, SWA, SnapshotEnsemble, GaussianPerturbation]


def trained(posterior, steps=3):
    """The posterior after a few steps of gradient descent on points, each observed."""
    x, y = tiny.points(24)
    optimizer = torch.optim.SGD([p for p in posterior.network.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        posterior.backward(x, y)
        optimizer.step()
        posterior.observe(optimizer)
    return posterior


def test_functions_are_fixed_whatever_the_mode_of_the_network():
    posterior, (x, y) = GaussianPerturbation(tiny.mlp(dropout=0.5).double(), samples=3).train(), tiny.points()
    drawn = posterior.draw()
    before = tiny.state(posterior)
    outputs = drawn(x)
    assert torch.equal(drawn(x), outputs)  # dropout is off
    assert posterior.network[1].training
    assert tiny.largest_difference(before, tiny.state(posterior)) == 0  # batch norm has not moved
    posterior.backward(x, y)  # the network moves its statistics and keeps them to itself
    assert torch.equal(drawn(x), outputs)
    posterior.eval()
    assert torch.equal(drawn(x), outputs)


def test_a_state_brings_its_draw_along_and_one_without_takes_it_away():
    posterior, (x, y) = GaussianPerturbation(tiny.mlp().double(), samples=3), tiny.points()
    empty = {name: tensor.clone() for name, tensor in posterior.state_dict().items()}
    ds.refresh(posterior, [(x, y)])
    full = {name: tensor.clone() for name, tensor in posterior.state_dict().items()}
    assert full.keys() > empty.keys()
    outputs = posterior.predict(x).member_means
    posterior.load_state_dict(empty)
    assert posterior.stored is None
    posterior.load_state_dict(full)
    assert torch.equal(posterior.predict(x).member_means, outputs)


def test_a_stored_draw_is_no_parameter():
    posterior, (x, y) = GaussianPerturbation(tiny.mlp().double(), samples=3), tiny.points()
    names = [name for name, _ in posterior.named_parameters()]
    ds.refresh(posterior, [(x, y)])
    assert [name for name, _ in posterior.named_parameters()] == names


def test_a_stored_draw_follows_dtype_and_pickles():
    posterior, (x, y) = GaussianPerturbation(tiny.mlp().double(), samples=3), tiny.points()
    ds.refresh(posterior, [(x, y)])
    assert posterior.float()(x.float()).dtype == torch.float32
    copy = pickle.loads(pickle.dumps(posterior))
    assert torch.equal(copy.predict(x.float()).member_means, posterior.predict(x.float()).member_means)


def test_buffers_that_are_not_saved_stay_out_of_files(tmp_path):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.register_buffer("scale", torch.tensor(2.0), persistent=False)

        def forward(self, x):
            return self.scale * self.layer(x)

    posterior, x = GaussianPerturbation(Scaled(), samples=2), torch.randn(5, 4)
    ds.refresh(posterior, [])
    outputs = posterior.predict(x).member_means
    ds.save(posterior, tmp_path)
    assert not any("scale" in name for name in posterior.state_dict())
    assert torch.equal(ds.load(tmp_path, Scaled()).predict(x).member_means, outputs)


class Doubled(nn.BatchNorm2d):
    """Somebody's own kind of batch norm."""

    def forward(self, x):
        return 2 * super().forward(x)


# name -> (layer, shape of what it normalises)
NORMS = {
    "batch norm 1d": (lambda: nn.BatchNorm1d(3), (3, 4)),
    "batch norm 2d": (lambda: nn.BatchNorm2d(3), (3, 2, 2)),
    "batch norm 3d": (lambda: nn.BatchNorm3d(3), (3, 2, 2, 1)),
    "synchronised": (lambda: nn.SyncBatchNorm(3), (3, 2, 2)),
    "instance norm": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (3, 2, 2)),
    "own kind": (lambda: Doubled(3), (3, 2, 2)),
}


@pytest.mark.parametrize(("method", "norm"), thinned([TRADI, SWAG, SWA, GaussianPerturbation], list(NORMS), every=2))
def test_statistics_belong_to_the_samples_and_are_found_again_without_the_training_set(method, norm, tmp_path):
    layer, shape = NORMS[norm]

    def network():
        return nn.Sequential(
            nn.Linear(4, 12), nn.Unflatten(1, shape), layer(), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
        ).double()

    posterior, (x, y) = trained(method(network())), tiny.points(24)
    ds.refresh(posterior, [(x[:10], y[:10]), (x[10:], y[10:])])
    member = posterior.member(0)
    seen = [member[:2](part).detach().flatten(2) for part in (x[:10], x[10:])]
    mean = sum(len(h) * h.mean((0, 2)) for h in seen) / 24
    torch.testing.assert_close(member[2].running_mean, mean, rtol=0, atol=1e-12)
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, network())
    assert torch.equal(loaded.predict(x).member_means, posterior.predict(x).member_means)


def test_a_failed_refresh_leaves_the_draw_there_was():
    posterior, (x, y) = GaussianPerturbation(tiny.mlp().double(), samples=3), tiny.points()
    ds.refresh(posterior, [(x, y)])
    before, outputs = tiny.state(posterior), posterior.predict(x).member_means
    for loader in ([], [(x, y), (x[:, :2], y)], [(x, y), (x * torch.nan, y)]):
        with pytest.raises((ValueError, RuntimeError), match=r"at least one batch|shapes cannot be multiplied|NaN"):
            ds.refresh(posterior, loader)
        assert tiny.largest_difference(before, tiny.state(posterior)) == 0
        assert torch.equal(posterior.predict(x).member_means, outputs)


@pytest.mark.parametrize("method", METHODS)
def test_frozen_parameters_come_back_frozen_from_a_file(method, tmp_path):
    network, (x, y) = tiny.mlp().double(), tiny.points(24)
    network[0].requires_grad_(False)
    posterior = trained(method(network))
    ds.refresh(posterior, [(x, y)])
    ds.save(posterior, tmp_path)
    template = tiny.mlp()  # where nothing is frozen
    loaded = ds.load(tmp_path, template)
    assert torch.equal(loaded.predict(x).member_means, posterior.predict(x).member_means)
    assert torch.equal(loaded.member(0)[0].weight, network[0].weight)
    assert [p.requires_grad for p in loaded.network.parameters()] == [p.requires_grad for p in network.parameters()]
    assert all(p.requires_grad for p in template.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_freezing_later_changes_nothing_about_what_is_sampled(method):
    """As for a network that is only used from here on."""
    posterior, (x, y) = trained(method(tiny.mlp().double())), tiny.points(24)
    torch.manual_seed(1)
    expected = posterior.predict(x).member_means
    posterior.requires_grad_(False)
    torch.manual_seed(1)
    assert torch.equal(posterior.predict(x).member_means, expected)
    ds.refresh(posterior, [(x, y)])


@pytest.mark.parametrize("method", METHODS)
def test_training_what_was_frozen_is_refused_and_nothing_is_counted(method):
    network, (x, _) = tiny.mlp().double(), tiny.points(24)
    network[0].requires_grad_(False)
    posterior = trained(method(network))
    network[0].requires_grad_(True)
    message = (
        f"expected the same trainable parameters as when {method.__name__} was built, got '0.weight', "
        "which was frozen then"
    )
    network(x).sum().backward()
    before = tiny.state(posterior)
    if method is not GaussianPerturbation:  # which observes nothing
        with pytest.raises(ValueError, match=message):
            posterior.observe(torch.optim.SGD(network.parameters(), lr=0.0))
    with pytest.raises(ValueError, match=message):
        posterior.draw()
    assert tiny.largest_difference(before, tiny.state(posterior)) == 0


@pytest.mark.parametrize("method", [TRADI, SWAG, SWA, SnapshotEnsemble])
def test_a_step_that_is_refused_is_not_counted(method):
    posterior, (x, _) = trained(method(nn.Sequential(nn.Linear(4, 3)).double())), tiny.points(24)
    posterior.network.append(nn.Linear(3, 3).double())
    posterior.network(x).sum().backward()
    before = tiny.state(posterior)
    with pytest.raises(ValueError, match="added, removed or replaced since; change the network first"):
        posterior.observe(torch.optim.SGD(posterior.network.parameters(), lr=0.1))
    assert tiny.largest_difference(before, tiny.state(posterior)) == 0


@pytest.mark.parametrize("method", METHODS)
def test_a_network_without_anything_to_train_is_refused(method):
    with pytest.raises(ValueError, match=f"expected trainable parameters for {method.__name__}, got none"):
        method(tiny.mlp().requires_grad_(False))


@pytest.mark.parametrize("method", METHODS)
def test_targets_that_are_not_numbers_change_nothing(method):
    posterior, (x, _) = method(tiny.mlp(outputs=1).double(), likelihood=ds.Regression(noise=1.0)), tiny.points()
    y = torch.zeros(12, 1, dtype=torch.float64)
    y[3] = torch.nan
    posterior.begin(1, 1)  # as fit will: when snapshots are to be taken is part of the state
    before = tiny.state(posterior)
    for run in (lambda: posterior.backward(x, y), lambda: ds.fit(posterior, [(x, y)], epochs=1, progress=False)):
        with pytest.raises(ValueError, match="expected finite targets, got NaN or infinity; clean the data"):
            run()
        after = {**tiny.state(posterior), **{name: t for name, t in before.items() if name.endswith("plan")}}
        assert tiny.largest_difference(before, after) == 0  # when snapshots will be taken aside
        assert not tiny.gradients(posterior)
    soft = method(tiny.mlp().double())
    with pytest.raises(
        ValueError, match=r"expected soft labels ≥ 0 that sum to one over axis 1 \(classes\), got others"
    ):
        soft.backward(x, torch.full((12, 3), torch.nan, dtype=torch.float64))
