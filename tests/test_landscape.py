"""The loss around and between members: members are where they should be; the scale of weights before a norm is no matter."""

import copy

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.training.validation import validation_nll
from refusals import refuses

torch.manual_seed(0)
IMAGES = torch.randn(24, 2, 6, 6, dtype=torch.float64)
LABELS = torch.arange(24) % 3
LOADER = ds.data.Batches(IMAGES, LABELS, batch_size=10)


def small(seed: int) -> nn.Module:
    """Two convolutions with batch norm, and statistics that are not those of the start."""
    torch.manual_seed(seed)
    layers = nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4, eps=1e-14), nn.ReLU(), nn.Conv2d(4, 3, 3)
    network = nn.Sequential(*layers, nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    network.train()(IMAGES)
    return network.eval()


def alone(network) -> float:
    return validation_nll(ds.MAP(network), LOADER)


@pytest.fixture(scope="module")
def networks():
    return [small(seed) for seed in range(3)]


def test_members_of_a_plane_are_at_its_corners(networks):
    found = ds.landscape.plane(ds.DeepEnsemble(networks), LOADER, steps=2)
    assert found.first.tolist() == [-0.5, 0.0, 0.5, 1.0, 1.5]
    corners = [found.loss[1, 1], found.loss[3, 1], found.loss[1, 3]]
    assert list(map(float, corners)) == [pytest.approx(alone(network), rel=1e-14) for network in networks]
    assert list(found.marks.values()) == [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0)]
    right = (networks[1](IMAGES).argmax(1) == LABELS).double().mean()
    assert found.accuracy[3, 1] == right
    # In the orthonormal frame members are as far apart as their weights.
    flat = [nn.utils.parameters_to_vector(network.parameters()).detach() for network in networks]
    _, _, _, marks = found.drawing_coordinates()
    places = torch.tensor(list(marks.values()), dtype=torch.float64)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert float((places[i] - places[j]).norm()) == pytest.approx(float((flat[i] - flat[j]).norm()), rel=1e-10)


def test_points_of_a_plane_are_networks_with_statistics_of_their_own(networks):
    posterior = ds.DeepEnsemble(networks)
    middle = copy.deepcopy(networks[0])
    with torch.no_grad():
        for each, first, second in zip(middle.parameters(), *(n.parameters() for n in networks[:2]), strict=True):
            each.copy_((first + second) / 2)
    stored = alone(middle)
    found = {
        how: ds.landscape.plane(posterior, LOADER, steps=2, margin=0, statistics=how)
        for how in ("stored", "recomputed")
    }
    assert float(found["stored"].loss[1, 0]) == pytest.approx(stored, rel=1e-12)
    for layer in middle.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None  # the mean over all batches
            layer.reset_running_stats()
    once = ds.data.Batches(
        IMAGES, LABELS, batch_size=24
    )  # batches of one size: means over batches and over sizes agree
    middle.train()(IMAGES)
    whole = ds.landscape.plane(posterior, LOADER, steps=2, margin=0, statistics=once)
    assert float(whole.loss[1, 0]) == pytest.approx(alone(middle.eval()), rel=1e-10)
    assert float(whole.loss[1, 0]) != pytest.approx(stored, rel=1e-3)
    corners = [float(each.loss[2, 0]) for each in (*found.values(), whole)]
    assert corners[0] == corners[1] == corners[2]  # at the members nothing is recomputed


def test_a_path_begins_and_ends_at_its_members(networks):
    posterior = ds.DeepEnsemble(networks)
    found = ds.landscape.path(posterior, LOADER, members=(2, 0), points=5)
    assert float(found.loss[0]) == pytest.approx(alone(networks[2]), rel=1e-14)
    assert float(found.loss[-1]) == pytest.approx(alone(networks[0]), rel=1e-14)
    side = ds.landscape.plane(posterior, LOADER, members=(2, 0, 1), steps=4, margin=0).loss[:, 0]
    assert torch.equal(found.loss, side)
    line = torch.linspace(float(found.loss[0]), float(found.loss[-1]), 5, dtype=torch.float64)
    assert found.barrier == pytest.approx(float((found.loss - line).max()), abs=1e-12)
    together = ds.landscape.path(posterior, LOADER, members=(2, 0), points=5, together=3)
    torch.testing.assert_close(together.loss, found.loss, rtol=1e-12, atol=0)


def test_a_curve_goes_around_what_the_straight_line_goes_over(networks):
    posterior = ds.DeepEnsemble(networks[:2])
    ds.fit(posterior, LOADER, epochs=30, progress=False, optimizer=torch.optim.Adam(posterior.parameters(), lr=0.02))
    straight = ds.landscape.path(posterior, LOADER, points=7)
    bent = ds.landscape.curve(posterior, LOADER, points=7, epochs=20, lr=0.03)
    assert torch.equal(bent.loss[[0, -1]], straight.loss[[0, -1]])
    assert straight.barrier > 0.1
    assert bent.barrier < 0.5 * straight.barrier
    assert torch.equal(*(ds.landscape.curve(posterior, LOADER, points=3, epochs=2).loss for _ in range(2)))


@pytest.mark.parametrize("statistics", ["stored", "recomputed"])
def test_scaling_a_filter_before_batch_norm_leaves_the_picture_as_it_was(networks, statistics):
    scaled, factors = copy.deepcopy(networks[0]), torch.tensor([0.1, 3.0, 10.0, 0.5], dtype=torch.float64)
    with torch.no_grad():
        convolution, norm = scaled[0], scaled[1]
        convolution.weight *= factors[:, None, None, None]
        norm.running_mean *= factors
        norm.running_var *= factors**2
    assert alone(scaled) == pytest.approx(alone(networks[0]), rel=1e-9)
    first, second = (
        ds.landscape.directions(ds.MAP(each), LOADER, points=3, seed=4, statistics=statistics).loss
        for each in (networks[0], scaled)
    )
    torch.testing.assert_close(first, second, rtol=1e-9, atol=0)
    assert float(first.max()) > 1.01 * float(first.min())
    assert float(first[1, 1]) == pytest.approx(alone(networks[0]), rel=1e-14)


def test_directions_are_as_long_as_filters_and_spare_biases(networks):
    from dissensus.landscape.loss_surfaces import Anchors

    anchors = Anchors(ds.MAP(networks[0]), (0,), LOADER, "stored")
    noise = anchors.filter_noise(torch.Generator().manual_seed(0))
    weight = networks[0][3].weight
    lengths = noise["network.3.weight"].flatten(1).norm(dim=1)
    torch.testing.assert_close(lengths, weight.detach().flatten(1).norm(dim=1), rtol=1e-12, atol=0)
    assert not noise["network.3.bias"].any()
    assert not noise["network.1.weight"].any()


def test_the_posterior_is_left_as_it_was_and_every_kind_of_function_has_a_place(networks):
    posterior, (x, y) = ds.NodeBNN(tiny.mlp().double(), data_size=30, components=2, samples=4), tiny.points(30)
    loader = ds.data.Batches(x, y, batch_size=10)
    ds.fit(posterior, loader, epochs=1, progress=False)
    before = {name: tensor.clone() for name, tensor in posterior.state_dict().items()}
    found = ds.landscape.path(posterior, loader, members=(0, 3), points=3)
    assert float(found.loss[0]) == pytest.approx(validation_nll(ds.MAP(posterior.member(0)), loader), rel=1e-6)
    assert all(torch.equal(tensor, before[name]) for name, tensor in posterior.state_dict().items())


def test_learned_noise_belongs_to_its_member():
    torch.manual_seed(1)
    likelihood = ds.Regression(noise="learned")
    posterior = ds.DeepEnsemble([nn.Linear(1, 1) for _ in range(2)], likelihood=likelihood)
    loader = ds.data.Batches(torch.randn(20, 1), torch.randn(20, 1), batch_size=20)
    with torch.no_grad():
        name = next(name for name in posterior.particles.own_parameters() if name.startswith("likelihood."))
        posterior.particles.own_parameters()[name][1] += 2.0
    found = ds.landscape.path(posterior, loader, points=3)
    x, y = next(iter(loader))
    members = posterior.predict(x)
    for i, loss in ((0, found.loss[0]), (1, found.loss[-1])):
        alone = ds.RegressionPredictive(members.member_means[i : i + 1], members.variances[i : i + 1])
        assert float(loss) == pytest.approx(-float(alone.log_prob(y).mean()), rel=1e-6)
    assert found.accuracy is None


def test_noise_that_was_sampled_belongs_to_its_function():
    torch.manual_seed(1)
    posterior = ds.SGHMC(nn.Linear(1, 1), members=2, lr=0.5, data_size=20, weight_prior_std=1.0, seed=0,
                         likelihood=ds.Regression(noise="learned"))  # fmt: skip
    loader = ds.data.Batches(torch.randn(20, 1), torch.randn(20, 1), batch_size=20)
    ds.fit(posterior, loader, epochs=10, progress=False)
    (x, y), found = next(iter(loader)), ds.landscape.path(posterior, loader, points=2)
    said = posterior.predict(x)
    assert said.variances[0, 0] != said.variances[1, 0]
    alone = [ds.RegressionPredictive(said.member_means[i : i + 1], said.variances[i : i + 1]) for i in range(2)]
    assert found.loss.tolist() == pytest.approx([-float(each.log_prob(y).mean()) for each in alone], rel=1e-6)


def test_figures_are_drawn_and_mistakes_are_named(networks):
    posterior = ds.DeepEnsemble(networks)
    surface = ds.landscape.plane(posterior, LOADER, steps=1, margin=0)
    surface.loss[1, 1] = float("inf")
    assert surface.plot().axes
    assert ds.landscape.path(posterior, LOADER, points=2).plot().axes
    refuses(lambda: ds.landscape.directions(posterior, LOADER, points=4), "expected an odd number of points, got 4")
    refuses(lambda: ds.landscape.path(posterior, LOADER, statistics="new"), "expected statistics")
    refuses(lambda: ds.landscape.path(posterior, LOADER, members=(0, 3)), "expected a member from 0 to 2, got 3")
