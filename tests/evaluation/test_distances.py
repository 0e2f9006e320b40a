"""Parts of an evaluation: distances between members, promises put to the test, memory of segmentations."""

import itertools
import math
import subprocess
import sys

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


def test_text_has_no_input_gradients():
    posterior = ds.DeepEnsemble([nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(8, 3)) for _ in range(2)])
    found = member_distances(posterior, torch.arange(10).reshape(5, 2) % 7, torch.arange(5) % 3)
    assert math.isnan(found.gradient)
    assert found.function > 0


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
    assert record.measure(5) == member_distances(watched, x, y)
    assert record.epochs == [2, 4, 5]
    assert record.distances[0] != record.distances[1]
    assert all(torch.equal(a, b) for a, b in zip(watched.parameters(), alone.parameters(), strict=True))


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


# ------------------------------------------------------------------------------------------------------------ promises
def posterior_and_rows(n=400):
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([ds.nets.MLP(4, 3, hidden=(8,)) for _ in range(2)])
    x = 100 * torch.randn(n, 4)
    return posterior, x, torch.multinomial(posterior.predict(x).mean, 1)[:, 0]


def test_coverage_and_size_by_class_and_difficulty():
    posterior, x, y = posterior_and_rows()
    conformal = ds.conformal(posterior, [(x[:200], y[:200])], level=0.8)
    found = ds.evaluate(posterior, [(x[200:300], y[200:300]), (x[300:], y[300:])])
    sets, labels = conformal.set(x[200:]), y[200:]
    hit, size = sets.gather(1, labels[:, None])[:, 0].double(), sets.sum(1).double()
    assert found.metrics["conformal/coverage"] == pytest.approx(float(hit.mean()))
    assert found.metrics["conformal/size"] == pytest.approx(float(size.mean()))
    assert found.metrics["conformal/level"] == 0.8
    by_class = torch.stack([hit[labels == c].mean() for c in range(3)])
    torch.testing.assert_close(found.arrays["conformal/class/coverage"], by_class)
    assert found.metrics["conformal/worst_class/coverage"] == pytest.approx(float(by_class.min()))
    order = posterior.predict(x[200:]).total.argsort()
    hard = order[134:]  # the last of three parts of 200 rows: 67, 67 and 66
    assert found.metrics["conformal/hard/size"] == pytest.approx(float(size[hard].mean()), abs=0.02)
    assert found.metrics["conformal/hard/size"] > found.metrics["conformal/easy/size"]
    assert torch.equal(found.arrays["test/conformal/covered"], hit)
    assert "conformal/coverage" in found.table()


def test_foreign_inputs_without_targets_are_taken_and_sets_are_not_asked_to_cover_them(caplog):
    posterior, x, y = posterior_and_rows()
    promises = [ds.conformal(posterior, [(x[:200], y[:200])], level=0.8)]
    promises += [ds.selective(posterior, [(x[:200], y[:200])], risk=0.3)]
    flat = torch.linspace(0.01, 1, 100)[:, None] * x[:100]  # the first are flatter: half of them would be seen
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(flat), batch_size=30)
    sets = {
        "labelled": [(flat, y[:100])], "data": [flat, y[:100]], "tensor": flat, "array": flat.numpy(),
        "loader": [flat[:50], flat[50:]], "lists": loader,
    }  # fmt: skip
    caplog.clear()
    found = ds.evaluate(posterior, [(x[200:], y[200:])], ood=sets).metrics
    assert not caplog.records
    for name in sets:
        assert found[f"ood/{name}/selective/accepted"] == found["ood/labelled/selective/accepted"]
        assert found[f"ood/{name}/auroc"] == pytest.approx(
            found["ood/labelled/auroc"], abs=2e-3
        )  # rounding breaks ties
    assert repr(promises[0]) == f"Conformal({promises[0].describe()})"
    assert repr(promises[1]) == f"Gate({promises[1].score} below {promises[1].threshold:.4g}: {promises[1].describe()})"


def test_risk_and_acceptance_here_and_elsewhere():
    posterior, x, y = posterior_and_rows()
    gate = ds.selective(posterior, [(x[:200], y[:200])], risk=0.3)
    alarm = ds.ood_gate(posterior, [(x[:200], y[:200])], false_alarm=0.1)
    rest = [(x[200:], y[200:])]
    found = ds.evaluate(posterior, rest, ood={"flat": [(0.01 * x, y)]}, shift={"same": rest}).metrics
    accept = gate(x[200:]).accept
    wrong = posterior.predict(x[200:]).mean.argmax(1) != y[200:]
    assert found["selective/accepted"] == pytest.approx(float(accept.double().mean()))
    assert found["selective/risk"] == pytest.approx(float(wrong[accept].double().mean()))
    assert found["selective/promised"] == 0.3
    assert found["ood_gate/refused"] == pytest.approx(1 - float(alarm(x[200:]).accept.double().mean()))
    assert found["ood/flat/ood_gate/refused"] == pytest.approx(1 - float(alarm(0.01 * x).accept.double().mean()))
    assert found["shift/same/selective/risk"] == found["selective/risk"]


def test_regressions_have_widths_and_infinite_ones_are_counted_apart():
    posterior = ds.MAP(nn.Linear(1, 1), likelihood=ds.Regression(noise=0.5))
    x = torch.randn(60, 1)
    y = posterior.predict(x).mean + torch.randn(60, 1)
    ds.conformal(posterior, [(x, y)], by=lambda x: (x[:, 0] > 2).long())  # of the second group 9 rows are not there
    found = ds.evaluate(posterior, [(x, y)]).metrics
    assert found["conformal/infinite"] == pytest.approx(float((x > 2).double().mean()))
    assert 0 < found["conformal/size"] < 10
    assert 0.8 < found["conformal/coverage"] <= 1


def test_weights_of_the_rows_are_used_and_missing_ones_are_said(caplog):
    posterior = ds.MAP(nn.Linear(1, 1), likelihood=ds.Regression(noise=0.5))
    x = torch.randn(60, 1)
    y, weight = posterior.predict(x).mean + torch.randn(60, 1), torch.rand(60) + 0.1
    lower, upper = ds.conformal(posterior, [(x, y, weight)]).interval(x, weight=weight)
    found = ds.evaluate(posterior, [(x, y, weight)]).metrics
    assert found["conformal/coverage"] == pytest.approx(float(((lower <= y) & (y <= upper)).double().mean()))
    with caplog.at_level("WARNING", "dissensus"):
        assert "conformal/coverage" not in ds.evaluate(posterior, [(x, y)]).metrics
    assert "not known" in caplog.text


def test_corrupted_inputs_have_coverage_and_risk_by_type_and_severity():
    torch.manual_seed(0)
    posterior = ds.MAP(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 3)))
    x = torch.rand(40, 3, 32, 32)
    y = posterior.predict(x).mean.argmax(1)
    conformal = ds.conformal(posterior, [(x, y)], score="aps")
    gate = ds.selective(posterior, [(x, y)], risk=0.2)
    spec = ds.Corruptions(["gaussian_noise", "contrast"], severities=(1, 5))
    found = ds.evaluate(posterior, [(x[:25], y[:25]), (x[25:], y[25:])], corrupt=spec).metrics
    damaged = spec.apply(x, "contrast", 5, torch.arange(40))
    sets = conformal.set(damaged)
    coverage = {s: found[f"corrupt/severity{s}/conformal/coverage"] for s in (1, 5)}
    assert found["corrupt/conformal/coverage"] == pytest.approx(sum(coverage.values()) / 2)
    at = [found[f"corrupt/{kind}/conformal/size"] for kind in ("gaussian_noise", "contrast")]
    assert found["corrupt/conformal/size"] == pytest.approx(sum(at) / 2)
    mild = conformal.set(spec.apply(x, "contrast", 1, torch.arange(40)))
    assert at[1] == pytest.approx(float(sets.sum(1).double().mean() + mild.sum(1).double().mean()) / 2)
    assert gate(damaged).accept.shape == (40,)
    assert 0 <= found["corrupt/selective/accepted"] <= 1


def test_a_gate_that_accepts_nothing_has_no_risk(caplog):
    posterior, x, y = posterior_and_rows()
    ds.selective(posterior, [(x, (y + 1) % 3)], risk=0.1)
    found = ds.evaluate(posterior, [(x, y)]).metrics
    assert found["selective/accepted"] == 0
    assert "selective/risk" not in found
    assert all(math.isfinite(value) for value in found.values())


def test_two_arrays_of_one_shape_may_be_a_regressions_data():
    x = torch.linspace(-1, 1, 40)[:, None]
    posterior = ds.MAP(torch.nn.Linear(1, 1), likelihood=ds.Regression())
    sets = {"data": (x + 9, x), "alone": x + 9, "batches": [x[:25] + 9, x[25:] + 9]}
    found = ds.evaluate(posterior, (x, x), ood=sets, progress=False).arrays
    assert {len(found[f"ood/{name}/score/total"]) for name in sets} == {40}
    with pytest.raises(ValueError, match="got 2 arrays of one shape"):
        ds.evaluate(posterior, (x, x), ood={"far": [x + 9, x]}, progress=False)


# -------------------------------------------------------------------------------------------------------------- memory
PROGRAM = """
import resource
import torch
import dissensus as ds

torch.set_num_threads(1)
ensemble = ds.DeepEnsemble([ds.nets.ENet(9) for _ in range(10)], likelihood=ds.Classification(ds.data.VOID))
images = torch.randint(256, (233, 3, 180, 240), dtype=torch.uint8)
masks = torch.randint(9, (233, 180, 240), dtype=torch.uint8)
foreign = torch.randint(2, (233, 180, 240), dtype=torch.uint8)

class Loader:
    def __init__(self, y):
        self.y = y

    def __iter__(self):
        for start in range(0, 233, 4):
            rows = slice(start, start + 4)
            yield images[rows] / 255, self.y[rows]

result = ds.evaluate(ensemble, Loader(masks), ood={"odd": Loader(foreign)})
assert len(result.arrays["ood/odd/epistemic/auroc"]) == 233
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)
"""


@pytest.mark.slow
def test_evaluating_233_images_with_ten_members_takes_less_than_two_gigabytes():
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert float(found.stdout) < 2.0
