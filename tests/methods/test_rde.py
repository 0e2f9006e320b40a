"""Repulsion in weight, function and feature space: the papers' updates written out, and posteriors that are known."""

import copy
import itertools
import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import dissensus as ds
import tiny
from dissensus.core.batch import Batch
from dissensus.methods import FeatureRDE, FunctionRDE, WeightRDE
from dissensus.methods.parts.empcov_prior import EmpCov
from dissensus.methods.parts.repulsion import Strength
from dissensus.numerics import rbf_kernels as kernels
from dissensus.numerics.annealing import Annealing
from refusals import refuses
from saved_files import config_of, reseal

ESTIMATORS = {name: partial(tiny.estimate_score, name) for name in kernels.SCORES}


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def networks(count: int = 4, make=plain) -> list[nn.Module]:
    return [make().double() for _ in range(count)]


def flat_weights(nets: list[nn.Module]) -> Tensor:
    return torch.stack([nn.utils.parameters_to_vector(net.parameters()) for net in nets])


def flat_gradients(posterior) -> Tensor:
    """(M, P) in the order of the networks' parameters."""
    own = posterior.particles.own_parameters()
    return torch.cat([tensor.grad.reshape(len(tensor), -1) for tensor in own.values()], dim=1)


def flat_derivatives(total: Tensor, nets: list[nn.Module]) -> Tensor:
    """(M, P) gradients of a number by each network's weights."""
    found = torch.autograd.grad(total, [parameter for net in nets for parameter in net.parameters()])
    return torch.cat([g.flatten() for g in found]).reshape(len(nets), -1)


def pulled_back(nets: list[nn.Module], outputs, force=None) -> Tensor:
    """(M, P) gradients of ⟨outputs_i, force_i⟩ by each network's weights; of numbers without a force."""
    force = [torch.ones(())] * len(nets) if force is None else force
    pairs = zip(outputs, force, strict=True)
    return flat_derivatives(sum((each * f.reshape(each.shape)).sum() for each, f in pairs), nets)


def flat_loss_gradients(nets: list[nn.Module], x: Tensor, y: Tensor) -> Tensor:
    return pulled_back(nets, [nn.functional.cross_entropy(net(x), y) for net in nets])


PRIOR_OF_FUNCTIONS = {
    "data_size": 7, "functional_prior": True, "weight_prior_std": 2.0, "likelihood": ds.Regression(1.0),
}  # fmt: skip


def builders() -> dict:
    at, function = torch.linspace(-1, 1, 28).double().reshape(7, 4), partial(FunctionRDE, data_size=50)
    return {
        "weight": partial(WeightRDE, data_size=50),
        "function": function,
        "function, noise": partial(function, repel_at="noise"),
        "function, inputs": partial(function, repel_at=at),
        "function, prior": partial(function, functional_prior=True, weight_prior_std=1.0),
        "feature": partial(FeatureRDE, layer="2", head="3", projection=3),
    }


@pytest.mark.parametrize("score", ESTIMATORS)
def test_the_weight_space_update_is_that_of_the_paper(score):
    """−φ/N = ∇ mean loss + ∇ log q / N."""
    nets, (x, y) = networks(), tiny.points()
    posterior = WeightRDE(nets, data_size=50, score=score)
    losses = posterior.backward(x, y)
    expected = flat_loss_gradients(nets, x, y) + ESTIMATORS[score](flat_weights(nets).detach()) / 50
    torch.testing.assert_close(flat_gradients(posterior), expected, rtol=0, atol=1e-10)
    nll = torch.stack([nn.functional.cross_entropy(net(x), y) for net in nets]).detach()
    torch.testing.assert_close(losses, nll, rtol=0, atol=1e-12)


def test_the_weight_space_update_is_the_autograd_of_the_loss():
    """L_i = nll_i + (1/N) log Σ_j k(θ_i, sg[θ_j])."""
    nets, (x, y) = networks(), tiny.points()
    posterior = WeightRDE(nets, data_size=50)
    posterior.backward(x, y)
    w = flat_weights(nets).detach().requires_grad_()
    h = kernels.median_bandwidth(kernels.squared_distances(w))
    total = torch.zeros((), dtype=torch.float64)
    for row in w:
        params, start = {}, 0
        for name, parameter in nets[0].named_parameters():
            params[name] = row[start : start + parameter.numel()].reshape(parameter.shape)
            start += parameter.numel()
        total = total + nn.functional.cross_entropy(torch.func.functional_call(nets[0], params, (x,)), y)
        total = total + torch.logsumexp(-(row - w.detach()).square().sum(1) / (2 * h), dim=0) / 50
    (expected,) = torch.autograd.grad(total, w)
    torch.testing.assert_close(flat_gradients(posterior), expected, rtol=0, atol=1e-10)


def test_the_function_space_update_is_the_autograd_of_the_loss():
    nets, (x, y) = networks(), tiny.points()
    posterior = FunctionRDE(nets, data_size=50)
    posterior.backward(x, y)
    outputs = torch.stack([net(x) for net in nets])  # (M, B, C)
    points = outputs.flatten(1)
    h = kernels.median_bandwidth(kernels.squared_distances(points.detach()))
    log_q = torch.logsumexp(-(points[:, None] - points.detach()[None]).square().sum(2) / (2 * h), dim=1)
    nll = torch.stack([nn.functional.cross_entropy(each, y) for each in outputs])
    total = (nll + log_q / 50).sum()
    torch.testing.assert_close(flat_gradients(posterior), flat_derivatives(total, nets), rtol=0, atol=1e-10)


@pytest.mark.parametrize("score", ESTIMATORS)
@pytest.mark.parametrize("outputs", ["logits", "probabilities"])
def test_the_function_space_update_pulls_the_score_back(score, outputs):
    nets, (x, y) = networks(), tiny.points()
    posterior = FunctionRDE(nets, data_size=50, score=score, outputs=outputs)
    posterior.backward(x, y)
    compared = [net(x).softmax(1) if outputs == "probabilities" else net(x) for net in nets]
    force = ESTIMATORS[score](torch.stack(compared).detach().flatten(1)) / 50
    expected = flat_loss_gradients(nets, x, y) + pulled_back(nets, compared, force)
    torch.testing.assert_close(flat_gradients(posterior), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", [WeightRDE, FunctionRDE])
def test_a_repulsion_of_one_over_the_batch_is_that_of_as_many_data_points(method, tmp_path):
    nets, (x, y) = networks(), tiny.points()
    by_batch, by_data = method(nets, data_size=5000, repulsion="1/B"), method(nets, data_size=12)
    number = method(nets, data_size=5000, repulsion=1 / 12)
    for posterior in (by_batch, by_data, number):
        posterior.backward(x, y)
    torch.testing.assert_close(flat_gradients(by_batch), flat_gradients(by_data), rtol=0, atol=1e-12)
    torch.testing.assert_close(flat_gradients(number), flat_gradients(by_data), rtol=0, atol=1e-12)
    weak = method(nets, data_size=5000)
    weak.backward(x, y)
    assert not torch.allclose(flat_gradients(weak), flat_gradients(by_data), rtol=0, atol=1e-3)
    # A partial batch afterwards repels as the full one did; gathered ones as one large batch would.
    by_batch.zero_grad()
    by_data.zero_grad()
    by_batch.backward(x[:5], y[:5])
    by_data.backward(x[:5], y[:5])
    torch.testing.assert_close(flat_gradients(by_batch), flat_gradients(by_data), rtol=0, atol=1e-12)
    gathered = method(nets, data_size=5000, repulsion="1/B")
    optimizer = torch.optim.SGD(gathered.parameters(), lr=0.0)
    ds.fit(gathered, [(x, y)] * 3, epochs=1, accumulate=3, optimizer=optimizer, progress=False)
    large = method(nets, data_size=36)
    large.backward(x, y)
    torch.testing.assert_close(flat_gradients(gathered), flat_gradients(large), rtol=0, atol=1e-12)

    saved = method(nets, data_size=5000, repulsion="1/B", batch_size=12)
    ds.save(saved, tmp_path)
    loaded = ds.load(tmp_path, plain()).train()
    assert loaded.config() == saved.config()
    loaded.backward(x[:5], y[:5])
    torch.testing.assert_close(flat_gradients(loaded), flat_gradients(by_data), rtol=0, atol=1e-12)


def test_repulsion_happens_where_it_is_asked_to():
    """The batch, the batch plus noise of the step, or inputs of one's own; the loss is on the batch in every case."""
    nets, (x, y) = networks(), tiny.points()
    elsewhere = torch.randn(5, 4, dtype=torch.float64)
    posterior = FunctionRDE(nets, data_size=50, repel_at=elsewhere)
    posterior.backward(x, y)
    force = tiny.estimate_score("kde", torch.stack([net(elsewhere) for net in nets]).detach().flatten(1)) / 50
    expected = flat_loss_gradients(nets, x, y) + pulled_back(nets, [net(elsewhere) for net in nets], force)
    torch.testing.assert_close(flat_gradients(posterior), expected, rtol=0, atol=1e-10)

    noisy = FunctionRDE(nets, data_size=50, repel_at="noise", noise=0.25)
    inputs = noisy._repulsion_inputs(x)
    assert float((inputs - x).std()) == pytest.approx(0.25, rel=0.3)  # 48 numbers
    noisy.backward(x, y)
    same = FunctionRDE(nets, data_size=50, repel_at=inputs)
    same.backward(x, y)
    torch.testing.assert_close(flat_gradients(noisy), flat_gradients(same), rtol=0, atol=1e-10)
    noisy.steps += 1
    assert not torch.allclose(noisy._repulsion_inputs(x), inputs)


def test_the_functional_prior_is_the_score_of_fresh_networks():
    """Prior outputs have the law of the prior, N(0, 4) at an input of length one; their spectral Stein score is the pull."""
    nets = networks(300, lambda: nn.Linear(4, 1, bias=False))
    x, y = torch.eye(4, dtype=torch.float64)[:1], torch.zeros(1, 1, dtype=torch.float64)
    posterior = FunctionRDE(nets, **PRIOR_OF_FUNCTIONS)

    def one(own: dict[str, Tensor]) -> dict[str, Tensor]:
        return posterior.member_loss(own, {}, Batch(x, y))[1]

    own = {name: tensor.detach() for name, tensor in posterior.particles.own_parameters().items()}
    z, again = (torch.func.vmap(one, randomness="different")(own) for _ in range(2))
    assert not torch.equal(z["prior"], again["prior"])
    assert float(z["prior"].mean()) == pytest.approx(0, abs=4 * 2 / 300**0.5)
    assert float(z["prior"].std()) == pytest.approx(2, abs=4 * 2 / 600**0.5)
    outputs = torch.stack([net(x).detach() for net in nets])
    torch.testing.assert_close(z["outputs"], outputs, rtol=0, atol=1e-12)
    f, p = outputs.flatten(1), z["prior"].flatten(1)
    expected = (tiny.estimate_score("kde", f) - kernels.spectral_stein_at(f, p)) / 7
    torch.testing.assert_close(posterior.couple(z)["outputs"].flatten(1), expected, rtol=0, atol=1e-10)


def test_the_functional_prior_draws_a_first_layer_with_empcov_from_that():
    """Outputs x·w of prior networks have the variance xᵀ(αC + εI)x where EmpCov is, and not weight_prior_std²."""
    nets = networks(400, lambda: nn.Sequential(nn.Linear(4, 1, bias=False)))
    seen = torch.randn(60, 4, dtype=torch.float64) * torch.tensor([5.0, 1.0, 1.0, 0.1], dtype=torch.float64)
    x, y = torch.eye(4, dtype=torch.float64), torch.zeros(4, 1, dtype=torch.float64)
    posterior = FunctionRDE(nets, **PRIOR_OF_FUNCTIONS)
    posterior.use_prior(EmpCov(seen, nets[0], "0", epsilon=1e-4, rest=2.0))
    own = {name: tensor.detach() for name, tensor in posterior.particles.own_parameters().items()}
    z = torch.func.vmap(lambda own: posterior.member_loss(own, {}, Batch(x, y))[1], randomness="different")(own)
    drawn = z["prior"][:, :, 0]  # (400, 4)
    variances = torch.cov(seen.T).diagonal() + 1e-4
    found = drawn.square().mean(0)
    # Var[w²] = 2 σ⁴
    assert bool(((found - variances).abs() < 4 * variances * (2 / 400) ** 0.5).all()), (found, variances)
    assert bool((drawn.mean(0).abs() < 4 * variances.sqrt() / 400**0.5).all())


@pytest.mark.parametrize("weighting", [False, True])
def test_the_feature_space_update_is_that_of_the_paper(weighting):
    """Gram matrix of slopes, orthonormal basis, kernel in the subspace and lifting back, one by one."""
    nets, (x, y) = networks(), tiny.points()
    posterior = FeatureRDE(nets, layer="1", head="2", projection=2)
    weight = torch.rand(12, dtype=torch.float64) + 0.5 if weighting else None
    w = torch.ones(12, dtype=torch.float64) if weight is None else weight
    posterior.backward(x, y, weight)
    head = copy.deepcopy(nets[0][2])
    features = [net[:2](x) for net in nets]

    def loss(feature: Tensor) -> Tensor:
        return (w * nn.functional.cross_entropy(head(feature), y, reduction="none")).sum() / w.sum()

    root = w.sqrt()[:, None]
    slopes = torch.stack([torch.func.grad(loss)(f.detach()) for f in features])  # (M, B, c)
    g = (slopes / root).flatten(1)
    _, _, v = torch.linalg.svd(g, full_matrices=False)
    basis = v[:2]  # principal directions of the slopes
    points = torch.stack([root * f for f in features]).flatten(1)
    p = (points @ basis.T).detach().requires_grad_()
    h = torch.cdist(p.detach(), p.detach()).square().quantile(0.5, dim=1) / math.log(4)
    log_q = torch.logsumexp(-(p[:, None] - p.detach()[None]).square().sum(2) / h[:, None], dim=1).sum()
    lifted = (torch.autograd.grad(log_q, p)[0] @ basis).reshape(4, 12, 6).detach()
    total = torch.zeros((), dtype=torch.float64)
    for i, feature in enumerate(features):
        prior = (w[:, None] * torch.log(1 + 0.005 * feature.square())).sum()
        total = total + (prior + (root * feature * lifted[i]).sum()) / w.sum() + loss(feature)
    found = torch.autograd.grad(total, list(head.parameters()), retain_graph=True)
    expected = flat_derivatives(total, [net[:2] for net in nets])
    torch.testing.assert_close(flat_gradients(posterior), expected, rtol=0, atol=1e-9)
    # The head's gradient is the mean over members, not the sum.
    shared = posterior.particles.shared_parameters()
    torch.testing.assert_close(shared["network.2.weight"].grad, found[-2] / 4, rtol=0, atol=1e-10)
    torch.testing.assert_close(shared["network.2.bias"].grad, found[-1] / 4, rtol=0, atol=1e-10)


def feature_forces(posterior, x, y, weight=None) -> Tensor:
    """(M, P) of what the repulsion adds to the encoders' gradients."""
    kept, found = posterior.strength, []
    for posterior.strength in (kept, Strength(0.0, None)):
        posterior.zero_grad()
        posterior.backward(x, y, weight)
        found.append(flat_gradients(posterior))
    posterior.strength = kept
    posterior.zero_grad()
    return found[0] - found[1]


def test_a_partial_batch_repels_by_features_no_more_than_a_full_one():
    """After a batch of 12, one of 5 repels with 1/12 and not 1/5; its prior stays the mean over its own rows."""
    nets, (x, y) = networks(), tiny.points()
    posterior, number = (FeatureRDE(nets, layer="1", head="2", **k) for k in ({}, {"repulsion": 1 / 12}))
    fresh = FeatureRDE(nets, layer="1", head="2")
    full = feature_forces(posterior, x, y)
    torch.testing.assert_close(full, feature_forces(number, x, y), rtol=0, atol=1e-12)
    partial = feature_forces(posterior, x[:5], y[:5])
    torch.testing.assert_close(partial, feature_forces(number, x[:5], y[:5]), rtol=0, atol=1e-12)
    torch.testing.assert_close(partial * 12 / 5, feature_forces(fresh, x[:5], y[:5]), rtol=0, atol=1e-12)
    priors = ("gaussian", "none")
    with_prior, without = (FeatureRDE(nets, layer="1", head="2", feature_prior=p, repulsion=0.0) for p in priors)
    for each in (with_prior, without):
        each.backward(x[:5], y[:5])
    features = [net[:2](x[:5]) for net in nets]
    prior = sum(0.005 / 2 * feature.square().sum() / 5 for feature in features)
    expected = flat_derivatives(prior, [net[:2] for net in nets])
    torch.testing.assert_close(flat_gradients(with_prior) - flat_gradients(without), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("weight", [None, torch.tensor([2.0, 0.0, 1.0, 1.0, 0.5])])
def test_a_cauchy_prior_on_outputs_adds_its_mean_over_examples(weight):
    nets, (x, y) = networks(), tiny.points()
    x, y = x[:5], y[:5]
    given = {"data_size": 5, "repulsion": 0.0, "prior_scale": 0.3}
    with_prior, without = (FunctionRDE(nets, output_prior=prior, **given) for prior in ("cauchy", "none"))
    for each in (with_prior, without):
        each.backward(x, y, weight)
    w = torch.ones(5) if weight is None else weight
    prior = sum((w * (1 + 0.3 * net(x) ** 2).log().sum(1)).sum() / w.sum() for net in nets)
    expected = flat_derivatives(prior, nets)
    assert float(expected.abs().max()) > 1e-3
    torch.testing.assert_close(flat_gradients(with_prior) - flat_gradients(without), expected, rtol=0, atol=1e-12)


def test_the_strength_of_feature_repulsion_is_that_of_forde():
    nets, (x, y) = networks(), tiny.points()

    def forces(weight=None, **keywords):
        return feature_forces(FeatureRDE(nets, layer="1", head="2", **keywords), x, y, weight)

    unit = forces(repulsion=1.0)
    assert float(unit.abs().max()) > 1e-3
    for keywords, c in (
        ({}, 1 / 12),
        ({"batch_size": 48}, 1 / 48),
        ({"repulsion": "1/N", "data_size": 300}, 1 / 300),
        ({"repulsion": 0.0}, 0.0),
    ):
        torch.testing.assert_close(forces(**keywords), c * unit, rtol=0, atol=1e-12)
    # A weight of two is the example twice, unless the batch is named; no weight moves nobody.
    two = torch.full((12,), 2.0, dtype=torch.float64)
    doubled = feature_forces(FeatureRDE(nets, layer="1", head="2"), x.repeat(2, 1), y.repeat(2))
    torch.testing.assert_close(forces(two), doubled, rtol=0, atol=1e-9)
    assert float(forces(torch.zeros(12, dtype=torch.float64)).abs().max()) == 0
    gathered, large = FeatureRDE(nets, layer="1", head="2"), FeatureRDE(nets, layer="1", head="2", batch_size=36)
    optimizer = torch.optim.SGD(gathered.parameters(), lr=0.0)
    ds.fit(gathered, [(x, y)] * 3, epochs=1, accumulate=3, optimizer=optimizer, progress=False)
    large.backward(x, y)
    torch.testing.assert_close(flat_gradients(gathered), flat_gradients(large), rtol=0, atol=1e-12)


def test_the_strength_of_feature_repulsion_is_saved_and_older_folders_load(tmp_path):
    nets, (x, _) = networks(), tiny.points()
    saved = FeatureRDE(nets, layer="1", head="2", repulsion="1/N", batch_size=12, data_size=70)
    ds.save(saved, tmp_path)
    loaded = ds.load(tmp_path, plain())
    assert (loaded.strength.repulsion, loaded.strength.batch_size) == ("1/N", 12)
    assert loaded.config() == saved.config()
    config = config_of(tmp_path)
    for key in ("repulsion", "batch_size"):  # what folders of before do not say
        del config["arguments"][key]
    reseal(tmp_path, config)
    older = ds.load(tmp_path, plain())
    assert (older.strength.repulsion, older.strength.batch_size) == ("1/B", None)
    assert torch.equal(older.predict(x).member_means, saved.predict(x).member_means)
    told = r'expected data_size with repulsion "1/N", got none'
    refuses(lambda: FeatureRDE(nets, layer="1", head="2", repulsion="1/N"), told)


def test_the_official_choices_of_feature_rde_can_be_had():
    nets, (x, y) = networks(), tiny.points()
    found = {}
    for order, bandwidth in itertools.product(("largest", "smallest"), ("median", "squared")):
        posterior = FeatureRDE(nets, layer="1", head="2", projection=2, order=order, bandwidth=bandwidth)
        posterior.backward(x, y)
        found[order, bandwidth] = flat_gradients(posterior)
    values = list(found.values())
    assert all(not torch.allclose(a, b) for i, a in enumerate(values) for b in values[:i])
    # with every direction kept the order does not matter
    both = []
    for order in ("largest", "smallest"):
        posterior = FeatureRDE(nets, layer="1", head="2", projection=4, order=order, feature_prior="none")
        posterior.backward(x, y)
        both.append(flat_gradients(posterior))
    torch.testing.assert_close(both[0], both[1], rtol=0, atol=1e-10)


def test_one_head_is_shared_and_encoders_are_not():
    nets = networks(3)
    posterior = FeatureRDE(nets, layer="1", head="2")
    assert set(posterior.particles.shared_parameters()) == {"network.2.weight", "network.2.bias"}
    assert set(posterior.particles.own_parameters()) == {"network.0.weight", "network.0.bias"}
    x, _ = tiny.points()
    for i, net in enumerate(nets):
        expected = nets[0][2](net[:2](x))
        torch.testing.assert_close(posterior.member(i)(x), expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(posterior(x)[i], expected, rtol=0, atol=1e-12)


def test_the_weight_prior_counts_the_shared_head_once():
    nets, (x, y) = networks(3), tiny.points()
    posterior = FeatureRDE(nets, layer="1", head="2", feature_prior="none", weight_prior_std=0.5, data_size=10)
    without = FeatureRDE(nets, layer="1", head="2", feature_prior="none")
    posterior.backward(x, y)
    without.backward(x, y)
    mine, other = (p.particles.shared_parameters()["network.2.weight"].grad for p in (posterior, without))
    torch.testing.assert_close(mine - other, nets[0][2].weight.detach() / (10 * 0.25), rtol=0, atol=1e-12)


def test_one_member_with_a_functional_prior_is_a_map_network_with_the_weight_prior():
    net, (x, y) = tiny.mlp().double(), tiny.points()
    alone = FunctionRDE([net], data_size=50, functional_prior=True, weight_prior_std=0.7)
    single = ds.MAP(copy.deepcopy(net), weight_prior_std=0.7, data_size=50)
    alone.backward(x, y)
    single.backward(x, y)
    for ours, theirs in zip(alone.parameters(), single.parameters(), strict=True):
        assert torch.equal(ours.grad[0], theirs.grad)


class Conjugate:
    """Linear regression with Gaussian noise and prior: the posterior over the two weights is Gaussian and known."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.noise, self.prior = 0.7, 1.3
        mix = torch.tensor([[1.0, 0.4], [0.0, 0.5]], dtype=torch.float64)
        self.x = torch.randn(20, 2, dtype=torch.float64, generator=generator) @ mix
        weights = torch.tensor([[0.5], [-1.0]], dtype=torch.float64)
        self.y = self.x @ weights + self.noise * torch.randn(20, 1, dtype=torch.float64, generator=generator)
        gram = self.x.T @ self.x / self.noise**2
        self.covariance = torch.linalg.inv(gram + torch.eye(2, dtype=torch.float64) / self.prior**2)
        self.mean = self.covariance @ self.x.T @ self.y / self.noise**2
        self.flat_covariance = torch.linalg.inv(gram)  # without a prior
        self.flat_mean = self.flat_covariance @ self.x.T @ self.y / self.noise**2

    def networks(self, count: int) -> list[nn.Module]:
        return [nn.Linear(2, 1, bias=False, dtype=torch.float64) for _ in range(count)]

    def settle(self, posterior, steps: int, lr: float) -> Tensor:
        """(M, 2) weights after so many steps of gradient descent."""
        optimizer = torch.optim.SGD(posterior.parameters(), lr=lr, momentum=0.8)  # which moves no fixed point
        for _ in range(steps):
            optimizer.zero_grad()
            posterior.backward(self.x, self.y)
            optimizer.step()
        return posterior.particles.own_parameters()["network.weight"].detach()[:, 0]


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.matrix_norm(found - expected) / torch.linalg.matrix_norm(expected))


# Scores by themselves are held to their laws in tests/numerics/test_score_estimates.py.
FEW = [pytest.param(each, marks=pytest.mark.slow) if each != "kde" else each for each in ESTIMATORS]


@pytest.mark.parametrize("score", FEW)
def test_weight_rde_samples_a_conjugate_posterior(score):
    """kde: covariance Σ − hI; Stein and spectral Stein: Σ."""
    model = Conjugate()
    posterior = WeightRDE(
        model.networks(100), data_size=20, score=score, likelihood=ds.Regression(noise=model.noise),
        weight_prior_std=model.prior,
    )  # fmt: skip
    w = model.settle(posterior, steps=120, lr=0.04)
    torch.testing.assert_close(w.mean(0), model.mean[:, 0], rtol=0, atol=0.01)
    covariance, expected, tolerance = torch.cov(w.T, correction=0), model.covariance, 0.15
    if score == "kde":
        h = float(kernels.median_bandwidth(kernels.squared_distances(w)))
        expected, tolerance = model.covariance - h * torch.eye(2, dtype=torch.float64), 0.10
        assert relative_error(covariance, model.covariance) > tolerance
    assert relative_error(covariance, expected) < tolerance


@pytest.mark.parametrize("score", FEW)
def test_function_rde_samples_a_conjugate_posterior(score):
    """Without a prior the functions X w have covariance σ² on the span of X; kde's is (σ² − h) there."""
    model = Conjugate()
    posterior = FunctionRDE(model.networks(100), data_size=20, score=score, likelihood=ds.Regression(noise=model.noise))
    w = model.settle(posterior, steps=90, lr=0.07)
    torch.testing.assert_close(w.mean(0), model.flat_mean[:, 0], rtol=0, atol=0.01)
    factor, tolerance = 1.0, 0.15
    if score == "kde":
        h = float(kernels.median_bandwidth(kernels.squared_distances(w @ model.x.T)))
        factor, tolerance = 1 - h / model.noise**2, 0.10
        assert factor < 0.85
    assert relative_error(torch.cov(w.T, correction=0), factor * model.flat_covariance) < tolerance


def test_schedules_are_those_of_the_paper():
    steps = torch.arange(0, 101)

    def values(**keywords) -> Tensor:
        schedule = Annealing(**keywords)
        return torch.stack([torch.as_tensor(schedule(step, 100), dtype=torch.float32) for step in steps])

    assert bool((values() == 1).all())
    torch.testing.assert_close(values(schedule="linear", steps=50), (steps / 50).clamp(max=1))
    torch.testing.assert_close(values(schedule="hyper"), torch.tanh((1.3 * steps / 100) ** 10))
    cyclic = values(schedule="cyclic")
    torch.testing.assert_close(cyclic[:20], (steps[:20] / 20) ** 10)
    torch.testing.assert_close(cyclic[20:40], cyclic[:20])
    torch.testing.assert_close(values(schedule="linear", weight=0.5)[-1], torch.tensor(0.5))


@pytest.mark.parametrize("method", ["weight", "function", "function, prior"])
def test_annealing_scales_the_driving_force_and_not_the_repulsion(method):
    nets, (x, y) = networks(), tiny.points()

    def gradients(annealing: Annealing | None, steps: int = 0) -> Tensor:
        torch.manual_seed(1)
        posterior = builders()[method](nets, annealing=annealing)
        posterior.steps += steps
        losses = posterior.backward(x, y)
        nll = torch.stack([nn.functional.cross_entropy(net(x), y) for net in nets]).detach()
        if method == "function, prior":
            torch.testing.assert_close(losses, nll, rtol=0, atol=1e-12)  # the loss that is reported is not scaled
        return flat_gradients(posterior)

    full, off = gradients(None), gradients(Annealing("linear", steps=100))
    quarter = gradients(Annealing("linear", steps=100), steps=25)
    torch.testing.assert_close(quarter, 0.25 * full + 0.75 * off, rtol=0, atol=1e-7)
    repulsion = tiny.estimate_score("kde", flat_weights(nets).detach()) / 50
    if method == "weight":
        torch.testing.assert_close(off, repulsion, rtol=0, atol=1e-10)


def test_annealing_over_the_whole_run_needs_its_length():
    nets, (x, y) = networks(), tiny.points()
    posterior = WeightRDE(nets, data_size=50, annealing=Annealing("linear"))
    refuses(lambda: posterior.backward(x, y), "expected the length of the run for annealing")
    posterior.begin(steps_per_epoch=10, epochs=2)
    posterior.backward(x, y)
    for keyword, value in {"schedule": "cosine", "steps": 0, "weight": 0.0, "cycles": 0}.items():
        refuses(partial(Annealing, **{keyword: value}), f"expected {keyword}")


def test_points_and_annealing_are_saved(tmp_path):
    nets, (x, y) = networks(3), tiny.points()
    points = torch.randn(5, 4, dtype=torch.float64)
    posterior = FunctionRDE(nets, data_size=50, repel_at=points, annealing=Annealing("cyclic", steps=7))
    ds.fit(posterior, [(x, y)], epochs=1, progress=False)
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, plain())
    assert torch.equal(loaded.repel_at.inputs(), points)
    assert loaded.annealing == Annealing("cyclic", steps=7)
    loaded.train()
    posterior.train()
    loaded.backward(x, y)
    posterior.zero_grad()
    posterior.backward(x, y)
    assert torch.equal(flat_gradients(loaded), flat_gradients(posterior))


@pytest.mark.parametrize("method", [WeightRDE, FunctionRDE])
def test_bad_input_of_either_is_a_clear_error(method):
    nets = networks(2)
    twice = [nets[0], copy.deepcopy(nets[0])]
    refuses(lambda: method([], data_size=10), "expected at least one module, got none")
    refuses(lambda: method(nets, data_size=None), "expected data_size, got none")
    refuses(lambda: method(nets, data_size=0), "expected data_size of at least 1, got 0")
    refuses(lambda: method(nets, data_size=10, score="svgd"), "score of kde, stein, spectral_stein, got 'svgd'")
    refuses(lambda: method(twice, data_size=10), "got members 0 and 1 equal")
    told = r"expected an Annealing, got 'cyclic'; pass Annealing\(\"cyclic\"\)"
    refuses(lambda: method(nets, data_size=10, annealing="cyclic"), told, TypeError)
    told = r"expected an Annealing, got 0\.5; pass one, such as Annealing"
    refuses(lambda: method(nets, data_size=10, annealing=0.5), told, TypeError)


def test_bad_input_of_function_rde_is_a_clear_error():
    made = partial(FunctionRDE, networks(2), data_size=10)
    refuses(lambda: made(repel_at="test"), r"expected repel_at of batch, noise, got .*; or pass your own inputs")
    refuses(lambda: made(repel_at=[1.0]), "expected inputs as a tensor, tuple or dict of tensors, got float", TypeError)
    refuses(lambda: made(repel_at=torch.zeros(0, 4)), r"expected inputs \(n, ...\), got shape \(0, 4\)")
    refuses(lambda: made(repel_at="noise", noise=0.0), "expected noise above 0")
    refuses(partial(made, outputs="probabilities", likelihood=ds.Regression()), "only classification has probabilities")
    refuses(lambda: made(outputs="softmax"), "expected outputs of logits, probabilities")
    refuses(lambda: made(prior="gp"), "expected a prior, got 'gp'", TypeError)
    refuses(lambda: made(functional_prior=True), "expected a prior with functional_prior=True, got none")
    rigid = made(functional_prior=True, prior=lambda params: params["0.weight"].sum())
    told = r"expected a prior that can be sampled, got FunctionPrior; define its draw\(name, like\)"
    refuses(lambda: rigid.backward(*tiny.points()), told, TypeError)


def two_inputs() -> nn.Module:
    """Numbers and a word each: what an embedding of the word and a linear layer of the numbers add up to."""
    layers = {"numbers": nn.Linear(4, 3), "words": nn.Embedding(5, 3)}
    return tiny.Network(lambda self, numbers, words: self.numbers(numbers).tanh() + self.words(words), **layers)


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_networks_of_several_inputs_repel_at_inputs_of_ones_own_also_after_loading(form, tmp_path):
    numbers, words, y = torch.randn(8, 4), torch.randint(5, (8,)), torch.randint(3, (8,))
    elsewhere = (torch.randn(6, 4), torch.randint(5, (6,)))

    def formed(first: Tensor, second: Tensor):
        return (first, second) if form == "tuple" else {"numbers": first, "words": second}

    nets = [two_inputs() for _ in range(3)]
    posterior = FunctionRDE(copy.deepcopy(nets), data_size=8, repel_at=formed(*elsewhere))
    posterior.backward(formed(numbers, words), y)
    # By hand: ∇ log q at the outputs elsewhere, pulled back, beside the loss's own gradient
    outputs = torch.stack([net(*elsewhere) for net in nets])
    force = tiny.estimate_score("kde", outputs.detach().flatten(1).double()).float().reshape(outputs.shape) / 8
    (outputs * force).sum().backward()
    for net in nets:
        nn.functional.cross_entropy(net(numbers, words), y).backward()
    own = posterior.particles.own_parameters()
    for name, parameter in own.items():
        expected = torch.stack([dict(net.named_parameters())[name.removeprefix("network.")].grad for net in nets])
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6, msg=name)
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, two_inputs()).train()
    loaded.backward(formed(numbers, words), y)
    for name, parameter in loaded.particles.own_parameters().items():
        assert torch.equal(parameter.grad, own[name].grad), name


def test_inputs_to_repel_at_fit_the_network_or_are_a_clear_error():
    nets, (x, y) = networks(2), tiny.points()
    for bad in (torch.nan, torch.inf):
        at = torch.tensor([[0.0, 0.0, 0.0, bad]])
        refuses(partial(FunctionRDE, nets, data_size=12, repel_at=at), "expected finite inputs, got NaN or infinity")
    narrow = FunctionRDE(nets, data_size=12, repel_at=torch.zeros(7, 3))
    for train in (lambda: narrow.backward(x, y), lambda: ds.fit(narrow, [(x, y)], epochs=1, progress=False)):
        refuses(train, r"that the network can take, got \(7, 3\)")
    FunctionRDE(nets[:1], data_size=12, repel_at=torch.zeros(7, 3)).backward(x, y)  # alone it repels nowhere

    # Doubles for a network of floats, as numpy gives them, are cast.
    points = torch.randn(7, 4, dtype=torch.float64)
    single = [copy.deepcopy(net).float() for net in nets]
    cast, same = (FunctionRDE(single, data_size=12, repel_at=p) for p in (points, points.float()))
    for posterior in (cast, same):
        posterior.backward(x.float(), y)
    assert torch.equal(flat_gradients(cast), flat_gradients(same))

    # What is asked is whether the network takes them: one that pools takes images of any size.
    pooling = lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3))  # noqa: E731
    anywhere = FunctionRDE(networks(2, pooling), data_size=12, repel_at=torch.randn(5, 1, 6, 6))
    anywhere.backward(torch.randn(12, 1, 4, 4, dtype=torch.float64), y)


def test_a_layer_behind_the_head_is_a_clear_error():
    nets, (x, y) = networks(2), tiny.points()
    behind = FeatureRDE(nets, layer="2", head="0")
    for train in (lambda: behind.backward(x, y), lambda: ds.fit(behind, [(x, y)], epochs=1, progress=False)):
        refuses(train, "expected a layer that runs before the head '0', got '2', which runs after it")
    assert not any(part._forward_pre_hooks for part in behind.modules())

    def reading():  # a head whose weights are read, not called
        layers = {"body": nn.Linear(4, 6), "head": nn.Linear(6, 3)}
        return tiny.Network(lambda self, x: torch.tanh(self.body(x)) @ self.head.weight.T, **layers)

    FeatureRDE(networks(2, reading), layer="body", head="head").backward(x, y)


def test_bad_layers_and_heads_are_clear_errors():
    nets = networks(2)
    refuses(lambda: FeatureRDE(nets, layer="features", head="2"), "expected layer of 0, 1, 2, got 'features'")
    refuses(lambda: FeatureRDE(nets, layer="1", head="classifier"), "expected head of 0, 1, 2, got 'classifier'")
    refuses(lambda: FeatureRDE(nets, layer="0", head="1"), "expected a head with parameters to share, got '1', which")
    same_layer = FeatureRDE(nets, layer="2", head="2")
    refuses(lambda: same_layer.backward(*tiny.points()), "before the head '2', got '2', which runs after it")
    same = [copy.deepcopy(nets[0]), copy.deepcopy(nets[0])]
    nn.init.normal_(same[1][2].weight)
    refuses(lambda: FeatureRDE(same, layer="1", head="2"), "expected encoders that start at different weights, got eq")
    tied = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    for net in tied:
        net[1].weight = net[0].weight
    refuses(lambda: FeatureRDE(tied, layer="0", head="1"), r"got '0.weight' tied to '1'")
    frozen = networks(2)
    for net in frozen:
        net[0].requires_grad_(False)
    refuses(lambda: FeatureRDE(frozen, layer="1", head="2"), "expected encoders with trainable parameters")
    odd = {"projection": 0, "feature_prior": "laplace", "prior_scale": 0, "order": "x", "bandwidth": "x"}
    for keyword, value in odd.items():
        refuses(partial(FeatureRDE, nets, layer="1", head="2", **{keyword: value}), f"expected {keyword}")


def test_features_are_those_of_the_layer_though_an_activation_works_in_place():
    (x, y), found = tiny.points(), []
    for inplace in (False, True):
        torch.manual_seed(0)
        nets = [nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace), nn.Linear(6, 3)).double() for _ in range(3)]
        posterior = FeatureRDE(nets, layer="0", head="2")
        posterior.backward(x, y)
        found.append({name: p.grad for name, p in posterior.named_parameters()})
    torch.testing.assert_close(found[0], found[1])
