"""Attacks: gradients of the mixture, balls and bounds, the best iterate, a closed form; in evaluations and their reports."""

import math
import re
from itertools import pairwise

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus import attacks, metrics
from dissensus.attacks.gradient_attacks import Adversarial, AttackObjective, AttackPoint, Ball
from dissensus.bench.run.jobs import bench
from dissensus.bench.run.run import Run
from dissensus.bench.task.config import load_task
from dissensus.data import Batches, Standardiser
from refusals import refuses
from thinning import often

pytestmark = pytest.mark.usefixtures("undrawn")

FREE = {"bounds": None}


def smooth(dropout=0.0):
    """4 inputs, tanh: nothing that has a kink."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3))


def sampling():
    """Without a stored draw: every `draw()` has other masks."""
    torch.manual_seed(1)
    return ds.MCDropout(smooth(0.4), samples=5).double()


def ensemble(how=None, net=smooth):
    torch.manual_seed(0)
    return tiny.ensemble(net, how=how)


@pytest.fixture(scope="module")
def trained():
    """An ensemble that is right about most points, and these points."""
    x, _ = tiny.points(40)
    y = (x[:, :3]).argmax(1)
    posterior = ensemble()
    optimizer = torch.optim.Adam(posterior.parameters(), lr=0.1)
    ds.fit(posterior, [(x, y)], epochs=30, optimizer=optimizer, device="cpu", progress=False)
    return posterior, x, y


def loss(posterior, x, y):
    return -posterior.predict(x).log_prob(y)


def differences(posterior, x, y, h=1e-6):
    """(B, D) central differences of −log p̄(y) by every coordinate of x (B, D)."""
    columns = []
    for i in range(x.shape[1]):
        step = torch.zeros_like(x)
        step[:, i] = h
        columns.append((loss(posterior, x + step, y) - loss(posterior, x - step, y)) / (2 * h))
    return torch.stack(columns, 1)


@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("make", [ensemble, sampling, lambda: ensemble("loop")])
def test_gradients_are_finite_differences_of_the_mixture(make, temperature):
    """Of a method without a stored draw, too: `predict` and the attack look at the same next draw."""
    posterior, (x, y) = make(), tiny.points()
    posterior.temperature.fill_(temperature)
    found = attacks.gradient(posterior, x, y)
    assert torch.allclose(found, differences(posterior, x, y), atol=1e-8)
    assert float(found.abs().max()) > 0.01


def test_the_way_up_is_known_where_probabilities_round_to_one():
    """In float32, log p̄ of sure networks is flat; the signs of its gradient are those of float64."""
    torch.manual_seed(0)
    networks, x = [nn.Linear(6, 4) for _ in range(3)], torch.rand(20, 6)
    for network in networks:  # nearly alike
        network.weight.data = 300 * (networks[0].weight.data + 0.01 * network.weight.data)
    y = networks[0](x).argmax(1)
    single, double = (ds.DeepEnsemble(networks).to(dtype) for dtype in (torch.float32, torch.float64))
    sure = loss(single, x, y) == 0
    assert sure.sum() > 5
    aim = AttackObjective(single, x, y, draw="fixed", targeted=False, at_once=1000)
    exact = AttackObjective(double, x.double(), y, draw="fixed", targeted=False, at_once=1000)
    assert torch.equal(aim.evaluate(x).direction.sign(), exact.evaluate(x.double()).direction.float().sign())
    assert attacks.pgd(single, x, y, 0.5).success[sure].any()


def test_fgsm_of_a_linear_softmax_is_the_closed_form():
    """∇ −log p(y) = Wᵀ (p − e_y)."""
    torch.manual_seed(0)
    linear, x, y = nn.Linear(5, 3).double(), torch.rand(7, 5, dtype=torch.float64), torch.arange(7) % 3
    slope = (linear(x).softmax(1) - nn.functional.one_hot(y, 3)).detach() @ linear.weight.detach()
    assert torch.allclose(attacks.gradient(ds.MAP(linear), x, y), slope, atol=1e-12)
    for epsilon in (0.1, 3.0):
        found = attacks.fgsm(ds.MAP(linear), x, y, epsilon, **FREE)
        assert torch.allclose(found.inputs, x + epsilon * slope.sign(), atol=1e-12)
        found = attacks.fgsm(ds.MAP(linear), x, y, epsilon, norm="2", **FREE)
        assert torch.allclose(found.inputs, x + epsilon * slope / slope.norm(dim=1, keepdim=True), atol=1e-12)
        towards = attacks.fgsm(ds.MAP(linear), x, y, epsilon, targeted=True)
        assert torch.allclose(towards.inputs, (x - epsilon * slope.sign()).clamp(0, 1), atol=1e-12)
        assert torch.equal(towards.success, linear(towards.inputs).argmax(1) == y)


@pytest.mark.parametrize("norm", ["inf", "2"])
@pytest.mark.parametrize("make", [ensemble, sampling])
def test_no_attack_of_radius_zero_changes_a_bit(make, norm):
    x, y = tiny.points()
    x[0, 0] = -0.0
    posterior = make()
    start = {"step_size": 0.1, "random_start": True, "generator": torch.Generator()}
    for found in (
        attacks.fgsm(posterior, x, y, 0.0, norm=norm, **FREE),
        attacks.pgd(posterior, x, y, 0.0, norm=norm, **start, **FREE),
        attacks.pgd(posterior, x, y, 0.5, norm=norm, steps=0, **FREE),
    ):
        assert torch.equal(found.inputs.view(torch.int64), x.view(torch.int64))
        assert torch.allclose(found.loss, loss(posterior, x, y))
        assert torch.equal(found.success, posterior.predict(x).mean.argmax(1) != y)


@pytest.mark.parametrize("norm", ["inf", "2"])
@pytest.mark.parametrize("random_start", [False, True])
def test_balls_and_bounds_are_kept(norm, random_start):
    posterior, y = ensemble(), torch.arange(12) % 3
    x = torch.rand(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    start = {"random_start": random_start, "generator": torch.Generator().manual_seed(3)}
    found = attacks.pgd(posterior, x, y, 0.3, norm=norm, step_size=0.2, **start).inputs
    delta = found - x
    size = delta.abs().amax(1) if norm == "inf" else delta.norm(dim=1)
    assert float(size.max()) <= 0.3 + 1e-12
    assert float(size.max()) > 0.29  # and it goes there
    assert float(found.min()) >= 0
    assert float(found.max()) <= 1
    assert bool((found == 0).any() or (found == 1).any())


def test_random_starts_are_uniform_in_the_ball():
    """Mean of the D-th power of the radius: 1/2, standard error 1/√(12 n)."""
    x, n = torch.zeros(4000, 3, dtype=torch.float64), 4000
    generator = torch.Generator().manual_seed(0)
    for norm, radii in (("2", lambda d: d.norm(dim=1) ** 3), ("inf", lambda d: d.abs().amax(1) ** 3)):
        ball = Ball.around_inputs(x, 2.0, norm=norm, bounds=None, standardiser=None)
        power = radii(ball.random_point(generator) / 2)
        assert float(power.max()) <= 1
        assert abs(float(power.mean()) - 0.5) < 4 / math.sqrt(12 * n)


@pytest.mark.parametrize("norm", ["inf", "2"])
@pytest.mark.parametrize("start", often([True], [False]))
def test_more_steps_never_raise_the_accuracy(norm, start, trained):
    posterior, x, y = trained
    clean = posterior.predict(x).mean.argmax(1) == y
    shares, losses = [], []
    for steps in (0, 1, 2, 5, 10):
        settings = {"step_size": 0.4, "norm": norm, "generator": torch.Generator().manual_seed(5), **FREE}
        found = attacks.pgd(posterior, x, y, 1.0, steps=steps, random_start=start, **settings)
        shares.append(1 - float(found.success.double().mean()))
        losses.append(found)
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < shares[0]
    assert shares[0] <= float(clean.double().mean())
    for before, after in pairwise(losses):
        assert bool((after.success >= before.success).all())
        same = after.success == before.success
        assert bool((after.loss[same] >= before.loss[same]).all())


def test_a_misclassified_iterate_comes_before_a_higher_loss():
    """With three classes p(y) = 0.4 may be right and 0.45 wrong."""

    def look(success, gain):
        gain = torch.tensor(gain)
        inputs = gain[:, None].expand(-1, 2)
        return AttackPoint(Adversarial(inputs, torch.tensor(success), gain), gain, inputs, gain)

    first = look([False, True, True, False, True], [1.0, 1, 1, 1, 1])
    best = first.best_of(look([True, False, True, False, True], [0.0, 2, 3, 4, 1])).found
    assert best.loss.tolist() == [0, 1, 3, 4, 1]
    assert best.inputs[:, 0].tolist() == [0, 1, 3, 4, 1]
    assert best.success.tolist() == [True, True, True, False, True]


def test_what_is_said_of_the_found_inputs_is_what_the_posterior_predicts():
    for posterior in (ensemble(), sampling()):
        x, y = tiny.points()
        for found in (attacks.fgsm(posterior, x, y, 0.5, **FREE), attacks.pgd(posterior, x, y, 0.5, **FREE)):
            said = posterior.predict(found.inputs)
            assert torch.allclose(found.loss, -said.log_prob(y), atol=1e-12)
            assert torch.equal(found.success, said.mean.argmax(1) != y)


@pytest.mark.parametrize("make", often([sampling], [ensemble, lambda: ensemble("loop")]))
@pytest.mark.parametrize("norm", often(["2"], ["inf"]))
def test_a_batch_is_attacked_as_its_inputs_one_at_a_time(make, norm):
    posterior, (x, y) = make(), tiny.points(3)
    whole = attacks.pgd(posterior, x, y, 0.5, norm=norm, **FREE)
    few = attacks.pgd(posterior, x, y, 0.5, norm=norm, at_once=1, **FREE)
    single = [attacks.pgd(posterior, x[i : i + 1], y[i : i + 1], 0.5, norm=norm, **FREE) for i in range(3)]
    for found in (few.inputs, torch.cat([each.inputs for each in single])):
        assert torch.allclose(found, whole.inputs, atol=1e-12)
    assert torch.equal(torch.cat([each.success for each in single]), whole.success)


def test_memory_holds_so_many_pairs_of_member_and_input():
    seen = []

    class Counting(nn.Linear):
        def forward(self, x):
            seen.append(len(x))
            return super().forward(x)

    x, y = tiny.points(20)
    attacks.pgd(ensemble("loop", net=lambda: Counting(4, 3)), x, y, 0.1, steps=2, at_once=9, **FREE)
    assert max(seen[2:]) == 3  # of 3 members; the first two look at the shape of outputs
    assert seen[2:].count(3) == 3 * 3 * 6


def test_fresh_draws_come_from_the_stream_and_a_fixed_one_leaves_it():
    posterior, (x, y) = sampling(), tiny.points()
    before = torch.get_rng_state()
    fixed = [attacks.pgd(posterior, x, y, 0.5, **FREE).inputs for _ in range(2)]
    assert torch.equal(*fixed)
    assert torch.equal(torch.get_rng_state(), before)
    fresh = [attacks.pgd(posterior, x, y, 0.5, draw="fresh", **FREE).inputs for _ in range(2)]
    assert not torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(*fresh)
    torch.set_rng_state(before)
    assert torch.equal(attacks.pgd(posterior, x, y, 0.5, draw="fresh", **FREE).inputs, fresh[0])
    drawn = posterior.draw()
    given = [attacks.pgd(posterior, x, y, 0.5, draw=drawn, **FREE).inputs for _ in range(2)]
    assert torch.equal(*given)
    assert not torch.equal(given[0], fixed[0])


def test_an_attack_leaves_modes_statistics_gradients_and_inputs_as_they_were():
    torch.manual_seed(0)
    posterior, (x, y) = tiny.ensemble(tiny.mlp), tiny.points()
    posterior.train()
    posterior.backward(x, y)
    state, grads, given = tiny.state(posterior), tiny.gradients(posterior), x.clone()
    attacks.fgsm(posterior, x, y, 0.3, **FREE)
    attacks.pgd(posterior, x.requires_grad_(), y, 0.3, **FREE)
    attacks.fool(posterior, x, 1, steps=3, **FREE)
    assert tiny.largest_difference(state, tiny.state(posterior)) == 0
    assert tiny.largest_difference(grads, tiny.gradients(posterior)) == 0
    assert posterior.training
    assert all(each.training for each in posterior.particles.template.modules())
    assert x.grad is None
    assert torch.equal(x, given)


def test_standardised_inputs_are_attacked_in_pixels():
    """As if the standardisation were the network's first layer."""
    torch.manual_seed(0)
    images = torch.randint(256, (6, 2, 3, 3), dtype=torch.uint8)
    standardiser, pixels = Standardiser.of_channels(images), images.double() / 255
    network = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(3, 3)).double()
    outer, inner = ds.MAP(network), ds.MAP(tiny.Network(lambda self, x: self.inner(standardiser(x)), inner=network))
    y, x = torch.arange(6) % 3, standardiser(pixels)
    for norm in ("inf", "2"):
        settings = {"norm": norm, "steps": 5, "step_size": 0.1}
        found = attacks.pgd(outer, x, y, 0.2, standardiser=standardiser, **settings).inputs
        expected = attacks.pgd(inner, pixels, y, 0.2, **settings).inputs
        assert torch.allclose(standardiser.inverse(found), expected, atol=1e-10)
    assert torch.equal(attacks.fgsm(outer, x, y, 0.0, standardiser=standardiser).inputs, x)
    refuses(lambda: attacks.fgsm(outer, x, y, 0.1), "pass standardiser=")


def test_noise_becomes_a_confident_class(trained):
    posterior, _, _ = trained
    start = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = attacks.fool(posterior, start, torch.tensor([0, 1, 2]), steps=40, step_size=0.3, bounds=(-4.0, 4.0))
    assert bool(found.success.all())
    assert torch.equal(posterior.predict(found.inputs).mean.argmax(1), torch.tensor([0, 1, 2]))
    before, after = (posterior.predict(each).mean.diagonal() for each in (start, found.inputs))
    assert bool((after > before).all())
    assert float(after.min()) > 0.95
    assert bool((found.inputs.abs() <= 4).all())


def test_an_attack_on_a_member_moves_to_the_mixture(trained):
    posterior, x, y = trained
    found = attacks.pgd(ds.MAP(posterior.member(0)), x, y, 1.0, **FREE)
    own, whole = (float(loss(each, found.inputs, y).mean()) for each in (ds.MAP(posterior.member(0)), posterior))
    both = attacks.pgd(posterior, x, y, 1.0, **FREE)
    assert float(loss(posterior, x, y).mean()) < whole < float(both.loss.mean())
    assert whole < own


class Rounded(nn.Linear):
    def forward(self, x):
        return super().forward(x.round())


class Detached(nn.Linear):
    forward = torch.no_grad()(nn.Linear.forward)


class Numpy(nn.Linear):
    def forward(self, x):
        return super().forward(torch.from_numpy(x.detach().numpy()))


class Steep(nn.Linear):
    """√|x| has no derivative at 0."""

    def forward(self, x):
        return super().forward((x - x.detach()).abs().sqrt())


class Dead(nn.Linear):
    """Depends on its inputs, but not where they are negative."""

    def forward(self, x):
        return super().forward(x.relu())


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("layer", [Rounded, Detached, Numpy, Steep])
def test_a_network_without_gradients_is_refused(layer, members):
    x, y = tiny.points()
    posterior = tiny.ensemble(lambda: layer(4, 3), members)
    for attack in (attacks.fgsm, attacks.pgd):
        with pytest.raises(ValueError, match="expected a network that can be differentiated by its inputs"):
            attack(posterior, x, y, 0.1, **FREE)


def test_inputs_at_which_a_network_is_flat_are_no_reason_to_refuse_it():
    x = -torch.rand(2, 4, dtype=torch.float64) - 1
    found = attacks.pgd(tiny.ensemble(lambda: Dead(4, 3)), x, torch.tensor([0, 1]), 0.1, **FREE)
    assert torch.equal(found.inputs, x)
    none = attacks.pgd(ensemble(), x[:0], torch.zeros(0, dtype=torch.int64), 0.1)
    assert none.inputs.shape == (0, 4)


@pytest.mark.parametrize(("change", "error", "said"), [
    ({"epsilon": -0.1}, ValueError, "expected epsilon of at least 0, got -0.1"),
    ({"epsilon": math.nan}, ValueError, "expected epsilon"),
    ({"x": torch.zeros(12, 4, dtype=torch.uint8)}, ValueError, "got torch.uint8, which has no gradient"),
    ({"x": (torch.zeros(12, 4),)}, ValueError, "got tuple, which has no gradient"),
    ({"x": torch.full((12, 4), math.nan)}, ValueError, "expected finite inputs"),
    ({"y": torch.zeros(11, dtype=torch.int64)}, ValueError, r"of shape \(12,\).*got torch.int64 of shape \(11,\)"),
    ({"y": torch.full((12,), 3)}, ValueError, "expected labels in 0…2, got 3"),
    ({"y": torch.full((12, 3), 1 / 3)}, ValueError, "expected one class index per input"),
    ({"y": [0] * 12}, TypeError, "expected targets as a tensor"),
    ({"norm": "1"}, ValueError, "expected norm of inf, 2, got '1'"),
    ({"draw": "fresch"}, ValueError, "did you mean 'fresh'"),
    ({"bounds": (0.0, 1.0)}, ValueError, r"expected inputs within bounds \(0.0, 1.0\)"),
    ({"at_once": 0}, ValueError, "expected at_once of at least 1"),
    ({"posterior": nn.Linear(4, 3)}, TypeError, "expected a posterior, got Linear"),
])  # fmt: skip
def test_what_cannot_be_attacked_is_said(change, error, said):
    x, y = tiny.points()
    given = {"posterior": ensemble(), "x": x, "y": y, "epsilon": 0.1, **FREE} | change
    refuses(lambda: attacks.pgd(**given), said, error)


def test_targets_and_posteriors_that_cannot_be_fooled():
    x, y = tiny.points()
    refuses(lambda: attacks.fool(ensemble(), x, 3, **FREE), "expected labels in 0…2, got 3")
    refuses(lambda: attacks.fool(ensemble(), x, -1, **FREE), "expected labels in 0…2, got -1")
    reals = tiny.ensemble(smooth, likelihood=ds.Regression())
    refuses(lambda: attacks.pgd(reals, x, y, 0.1), "expected a classification with logits")
    ignoring = tiny.ensemble(smooth, likelihood=ds.Classification(ignore_index=-1))
    refuses(lambda: attacks.pgd(ignoring, x, torch.full((12,), -1), 0.1, **FREE), "ignored labels")
    refuses(lambda: attacks.pgd(ensemble(), x, y, 0.1, steps=-1, **FREE), "expected steps")
    refuses(lambda: attacks.pgd(ensemble(), x, y, 0.1, step_size=0.0, **FREE), "expected step_size")


# -------------------------------------------------------------------- in an evaluation, in the bench and in its report

RADII = [0.1, 0.3]


def problem(members=3):
    torch.manual_seed(0)
    images = torch.randint(256, (10, 1, 4, 4), dtype=torch.uint8)
    standardiser = Standardiser.of_channels(images)
    networks = [ds.nets.MLP(16, 3, hidden=(8,)) for _ in range(members)]
    return ds.DeepEnsemble(networks), standardiser(images), torch.arange(10) % 3, standardiser


@pytest.mark.parametrize("members", [1, 3])
def test_every_number_is_that_of_the_attack_by_hand(members):
    posterior, x, y, standardiser = problem(members)
    posterior.temperature.fill_(0.5)
    curves = ds.AttackCurves(epsilons=RADII, steps=3, fool_steps=4, standardiser=standardiser)
    found = ds.evaluate(posterior, Batches(x, y, batch_size=4), attack=curves)
    member = ds.MAP(posterior.member(0))
    member.temperature.fill_(0.5)
    by_hand = {
        "fgsm": lambda e: attacks.fgsm(posterior, x, y, e, standardiser=standardiser),
        "pgd": lambda e: attacks.pgd(posterior, x, y, e, steps=3, standardiser=standardiser),
        "transfer": lambda e: attacks.pgd(member, x, y, e, steps=3, standardiser=standardiser),
    }
    for name, attack in by_hand.items():
        each = []
        for epsilon in (0, *RADII):
            said = posterior.predict(attack(epsilon).inputs if epsilon else x)
            expected = {
                "accuracy": metrics.accuracy(said.mean, y), "nll": metrics.nll(said.log_mean, y),
                "ece": metrics.ece(said.mean, y), "total": said.total.mean(),
                "epistemic": said.epistemic.mean(),
            }  # fmt: skip
            each.append(expected)
            for key, value in expected.items():
                if epsilon:
                    assert found.metrics[f"attack/{name}/{epsilon:g}/{key}"] == pytest.approx(float(value), abs=1e-5)
        for key in each[0]:
            values = torch.tensor([float(one[key]) for one in each])
            assert torch.allclose(found.arrays[f"attack/{name}/{key}"].float(), values, atol=1e-5)
            assert found.metrics[f"attack/{name}/{key}"] == pytest.approx(float(values[1:].mean()), abs=1e-5)
        mean = float(found.arrays[f"attack/{name}/example_nll"].mean())
        assert found.metrics[f"attack/{name}/nll"] == pytest.approx(mean)
        assert f"attack/{name}/accuracy" in found.table()
        assert f"attack/{name}/0.1/" not in found.table()
    assert found.arrays["attack/epsilons"].tolist() == [0, *RADII]
    if members == 1:
        assert found.metrics["attack/transfer/nll"] == pytest.approx(found.metrics["attack/pgd/nll"])


def test_fooling_inputs_are_kept_in_pixels_with_what_is_said_of_them():
    posterior, x, y, standardiser = problem()
    curves = ds.AttackCurves(epsilons=RADII, names=["fgsm"], fool_steps=30, standardiser=standardiser)
    found = ds.evaluate(posterior, [(x, y)], attack=curves)
    inputs = found.arrays["examples/fooling/inputs"]
    assert inputs.shape == (3, 1, 4, 4)
    assert float(inputs.min()) > -1e-6
    assert float(inputs.max()) < 1 + 1e-6
    said = posterior.predict(standardiser(inputs)).mean
    assert torch.allclose(found.arrays["examples/fooling/confidence"].float(), said.diagonal(), atol=1e-4)
    assert found.metrics["fool/confidence"] == pytest.approx(float(said.diagonal().mean()), abs=1e-4)
    assert torch.equal(found.arrays["examples/fooling/reached"].bool(), said.argmax(1) == torch.arange(3))
    none = ds.evaluate(posterior, [(x, y)], attack=ds.AttackCurves(RADII, ["fgsm"], standardiser=standardiser))
    assert not [key for key in (*none.metrics, *none.arrays) if "fool" in key]


def test_attacked_draws_are_those_that_are_measured():
    """Of a method that samples anew: FGSM's step of the functions that judged the clean inputs."""
    torch.manual_seed(0)
    posterior, (x, y) = ds.MCDropout(tiny.mlp(0.5), samples=4), tiny.points(30)
    before = torch.get_rng_state()
    found = ds.evaluate(posterior, [(x.float(), y)], attack=ds.AttackCurves([0.2], ["fgsm"], bounds=None))
    assert torch.equal(torch.get_rng_state(), before)
    step = attacks.fgsm(posterior, x.float(), y, 0.2, bounds=None).inputs
    expected = float(-posterior.predict(step).log_prob(y).mean())
    assert found.metrics["attack/fgsm/nll"] == pytest.approx(expected, abs=1e-5)


def test_labels_that_do_not_count_are_not_attacked():
    torch.manual_seed(0)
    networks, (x, y) = [tiny.mlp() for _ in range(2)], tiny.points(12)
    ignoring = ds.DeepEnsemble(networks, likelihood=ds.Classification(ignore_index=2))
    curves = ds.AttackCurves([0.2], ["pgd"], bounds=None)
    found = ds.evaluate(ignoring, [(x.float(), y)], attack=curves)
    kept = y != 2
    expected = ds.evaluate(ds.DeepEnsemble(networks), [(x[kept].float(), y[kept])], attack=curves)
    assert found.metrics["attack/pgd/nll"] == pytest.approx(expected.metrics["attack/pgd/nll"])


@pytest.mark.parametrize(("keywords", "said"), [
    ({"epsilons": []}, "ascending epsilons"), ({"epsilons": [0.2, 0.1]}, "ascending epsilons"),
    ({"epsilons": [0.0, 0.1]}, "epsilons above 0"), ({"names": ["pdg"]}, "did you mean 'pgd'"),
    ({"names": []}, "expected attacks and ascending"), ({"steps": 0}, "expected steps of at least 1"),
    ({"fool_steps": -1}, "expected fool_steps"),
])  # fmt: skip
def test_curves_that_cannot_be_drawn_are_said(keywords, said):
    refuses(lambda: ds.AttackCurves(**{"epsilons": [0.1]} | keywords), said)


def test_regressions_and_loaders_that_are_used_up_are_refused():
    (x, y), curves = tiny.points(), ds.AttackCurves([0.1], bounds=None)
    posterior = ds.MAP(tiny.mlp(outputs=1), likelihood=ds.Regression()).double()
    told = "expected a classification to attack, got a regression"
    refuses(lambda: ds.evaluate(posterior, [(x, x[:, :1])], attack=curves), told)
    once = ds.MAP(tiny.mlp()).double(), iter([(x, y)])
    refuses(lambda: ds.evaluate(*once, attack=curves), "expected inputs to attack, got no batch")


def test_the_task_runs_and_its_page_shows_attacks_and_fooling_inputs(tmp_path):
    task = load_task("adversarial", size="smoke")
    results, _ = bench(task, methods=["map", "batch_ensemble"], out=tmp_path)
    for several in results.methods.values():
        found = several[0].metrics
        assert {f"attack/{n}/0.1/{k}" for n in ("fgsm", "pgd", "transfer") for k in ("accuracy", "total")} <= {*found}
        assert found["attack/pgd/nll"] >= found["attack/fgsm/nll"] - 0.05
        assert 0 < found["fool/confidence"] < 1
    page, text = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    assert "What happens on attacked inputs?" in page
    assert page.count("Noise turned into a class") == 2
    assert "### Epistemic uncertainty, nats" in text.split("## By attack and radius")[1]
    row = re.search(r"\| pgd, ε = 0.1 \|(.*)\|", text)
    assert row is not None
    assert len(row[1].split("|")) == 2
    assert Run.open(tmp_path / "map-seed0").evaluate().metrics == results.methods["map"][0].metrics


@pytest.mark.parametrize(("task", "override", "said"), [
    ("adversarial", "evaluation.attack=pdg", "did you mean 'pgd'"),
    ("adversarial", "evaluation.epsilons=[-0.1]", "expected epsilon of at least 0"),
    ("adversarial", "evaluation.attack_norm=l2", "expected norm of inf, 2, got 'l2'"),
    ("cubic", "evaluation.attack=pgd", "got a regression; pass attack=None"),
])  # fmt: skip
def test_attacks_of_a_task_are_checked_before_anything_is_trained(task, override, said, tmp_path):
    given = [override, *["evaluation.epsilons=[0.1]"] * (task == "cubic")]
    refuses(lambda: bench(load_task(task, size="smoke", overrides=given), methods=["map"], out=tmp_path / "runs"), said)
    assert not list(tmp_path.rglob("*.toml"))
