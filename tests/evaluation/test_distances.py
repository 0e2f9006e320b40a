"""Distances between members: brute force over pairs, closed forms, and what a training run keeps of them."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import dissensus as ds
from dissensus.evaluation.member_diagnostics import DistancesOverTraining, mean_angle, mean_distance, member_distances
from refusals import refuses
from tiny import ensemble, mlp, points


def brute_force(posterior: ds.Posterior, x: Tensor, y: Tensor, *, regression: bool = False) -> dict[str, float]:
    """Every distance by a loop over pairs of ordinary modules."""
    networks = [posterior.member(i).eval() for i in range(posterior.particles.members)]
    weights, outputs, slopes = [], [], []
    for network in networks:
        leaf = x.clone().requires_grad_()
        out = network(leaf)
        chosen = out.sum() if regression else out[torch.arange(len(y)), y].sum()
        (slope,) = torch.autograd.grad(chosen, leaf)
        slopes.append(slope.flatten(1))
        outputs.append(out.detach())
        weights.append(torch.cat([p.detach().flatten() for p in network.parameters()]))
    found: dict[str, list[float]] = {"weight": [], "function": [], "gradient": []}
    for i, j in itertools.combinations(range(len(networks)), 2):
        found["weight"].append(float((weights[i] - weights[j]).norm()))
        found["function"].append(float((outputs[i] - outputs[j]).square().mean().sqrt()))
        for a, b in zip(slopes[i], slopes[j], strict=True):
            found["gradient"].append(math.acos(float(a @ b / (a.norm() * b.norm()))))
    return {name: sum(values) / len(values) for name, values in found.items()}


@pytest.mark.parametrize("how", ["vectorised", "loop"])
def test_distances_of_classifiers_equal_brute_force(how):
    posterior, (x, y) = ensemble(mlp, 4, how=how), points()
    posterior(x)  # batch norm with statistics of its own
    expected = brute_force(posterior, x, y)
    found = member_distances(posterior, x, y)
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-9), name
    assert found.effective == float(ds.metrics.effective_members(posterior.predict(x).log_probs, y))


def test_distances_of_regressions_equal_brute_force():
    posterior = ensemble(lambda: mlp(outputs=2), 3, likelihood=ds.Regression(0.5))
    x, _ = points()
    y = torch.randn(len(x), 2, dtype=torch.float64)
    found, expected = member_distances(posterior, x, y), brute_force(posterior, x, y, regression=True)
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-9), name
    assert found.effective == float(ds.metrics.effective_members_regression(posterior.predict(x).member_means, y))


def test_linear_members_have_the_distances_of_their_weights():
    """f_m(x) = w_m · x + b_m: the gradients are the weights, whatever the input."""
    angle = 0.7
    rows = torch.tensor([[2.0, 0.0], [math.cos(angle), math.sin(angle)]], dtype=torch.float64)
    networks = [nn.Linear(2, 1).double() for _ in range(2)]
    with torch.no_grad():
        for network, row in zip(networks, rows, strict=True):
            network.weight.copy_(row[None])
            network.bias.zero_()
    posterior = ds.DeepEnsemble(networks, likelihood=ds.Regression(1.0)).double()
    x = torch.randn(50, 2, dtype=torch.float64)
    found = member_distances(posterior, x, x[:, :1])
    assert found.gradient == pytest.approx(angle, abs=1e-12)
    assert found.weight == pytest.approx(float((rows[0] - rows[1]).norm()), abs=1e-12)
    assert found.function == pytest.approx(float((x @ (rows[0] - rows[1])).square().mean().sqrt()), abs=1e-12)


@pytest.mark.parametrize("angle", [1e-9, 1e-3, 1.0, math.pi / 2, math.pi])
def test_angles_are_exact_where_arccos_is_not(angle):
    first = torch.tensor([1.0, 0.0], dtype=torch.float64)
    second = 5.0 * torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
    assert float(mean_angle(torch.stack([first, second])[:, None])) == pytest.approx(angle, rel=1e-6)


def test_a_gradient_of_zero_has_no_angle():
    vectors = torch.randn(3, 5, 4, dtype=torch.float64)
    vectors[2] = 0.0
    assert float(mean_angle(vectors)) == pytest.approx(float(mean_angle(vectors[:2])), abs=1e-12)
    assert math.isnan(float(mean_angle(torch.zeros(3, 5, 4))))


def test_random_directions_are_a_right_angle_apart():
    """In D dimensions the cosine has mean 0 and variance 1/D; for D = 3 it is uniform, the angle's variance π²/4 − 2."""
    examples = 20_000
    angle = float(mean_angle(torch.randn(2, examples, 3, dtype=torch.float64)))
    assert angle == pytest.approx(math.pi / 2, abs=4 * math.sqrt((math.pi**2 / 4 - 2) / examples))


def test_the_mean_distance_of_a_simplex_is_its_edge():
    assert float(mean_distance(3.0 * torch.eye(5))) == pytest.approx(3.0 * math.sqrt(2), abs=1e-12)
    tree = {"a": torch.eye(5)[:, :2], "b": torch.eye(5)[:, 2:]}
    assert float(mean_distance(tree)) == pytest.approx(math.sqrt(2), abs=1e-12)


def test_shared_tensors_add_no_distance():
    networks = [ds.nets.MLP(4, 3, hidden=(6, 5)) for _ in range(3)]
    posterior = ds.FeatureRDE(networks, layer="layers.3", head="layers.4").double()
    x, y = points()
    encoders = [torch.cat([p.detach().flatten() for p in network.layers[:4].parameters()]) for network in networks]
    expected = torch.pdist(torch.stack(encoders).double()).mean()
    assert member_distances(posterior, x, y).weight == pytest.approx(float(expected), rel=1e-6)


def test_nothing_is_left_changed_by_looking():
    posterior, (x, y) = ensemble(mlp, 2), points()
    posterior.train()
    before = {name: tensor.clone() for name, tensor in posterior.state_dict().items()}
    torch.manual_seed(3)
    member_distances(posterior, x, y)
    after = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(3))
    assert posterior.training
    assert all(torch.equal(before[name], tensor) for name, tensor in posterior.state_dict().items())
    assert all(p.grad is None for p in posterior.parameters())


def test_a_callback_keeps_every_kth_epoch_and_training_is_the_same():
    x, y = ds.data.two_moons(40)

    def trained(look: bool) -> tuple[ds.Posterior, DistancesOverTraining]:
        torch.manual_seed(0)
        posterior = ds.DeepEnsemble([ds.nets.MLP(2, 2, hidden=(8,)) for _ in range(3)])
        record = DistancesOverTraining(posterior, x, y, every=2)
        loader = ds.data.Batches(x, y, batch_size=20, shuffle=True)
        ds.fit(posterior, loader, epochs=5, callback=record if look else None, progress=False)
        return posterior, record

    watched, record = trained(True)
    alone, _ = trained(False)
    assert record.epochs == [2, 4]
    now = record.measure(5)
    assert now == member_distances(watched, x, y)
    assert record.epochs == [2, 4, 5]
    assert record.distances[0] != record.distances[1]
    assert all(torch.equal(a, b) for a, b in zip(watched.parameters(), alone.parameters(), strict=True))


def test_what_was_seen_is_told():
    posterior, (x, y) = ensemble(mlp, 2), points()
    told = []
    record = DistancesOverTraining(posterior, x, y, tell=lambda *seen: told.append(seen))
    record.measure(0)
    assert told == [(0, record.distances[0])]


def test_single_networks_and_wrong_types_are_errors():
    x, y = points()
    refuses(lambda: member_distances(ds.MAP(mlp()).double(), x, y), "several stored members, got MAP with one")
    refuses(lambda: member_distances(ds.MCDropout(mlp(0.1)).double(), x, y), "several stored members, got MCDropout")
    refuses(lambda: member_distances(mlp(), x, y), "expected a posterior, got Sequential", TypeError)
    refuses(lambda: DistancesOverTraining(ensemble(mlp, 2), x, y, every=0), "expected every of at least 1")


def test_looking_at_many_inputs_before_training_does_not_weaken_repulsion_per_batch():
    """FoRDE divides by the largest batch it is trained on; a look at more inputs than that is none."""
    x, y = points(24)
    loader = ds.data.Batches(x, y, batch_size=6)
    trained = []
    for looks in (False, True):
        torch.manual_seed(0)
        posterior = ds.FoRDE([mlp() for _ in range(3)]).double().train()
        if looks:
            member_distances(posterior, x, y)
            assert posterior.training
        ds.fit(posterior, loader, epochs=2, progress=False)
        trained.append(posterior.state_dict())
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])
