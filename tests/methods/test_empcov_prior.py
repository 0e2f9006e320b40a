"""EmpCov: the Gaussian density it stands for, patches of convolutions, and its place in a member's loss."""

import copy
import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal

import dissensus as ds
import tiny
from dissensus.methods.parts.empcov_prior import EmpCov
from refusals import refuses


def test_it_is_the_density_of_the_inputs_covariance():
    network = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    x = 3 + torch.randn(50, 2, 3, dtype=torch.float64) * torch.tensor([1.0, 0.1, 2.0], dtype=torch.float64)
    prior = EmpCov(x, network, "1", alpha=0.5, epsilon=0.01)
    covariance = 0.5 * torch.cov(x.flatten(1).T) + 0.01 * torch.eye(6, dtype=torch.float64)
    law = MultivariateNormal(torch.zeros(6, dtype=torch.float64), covariance)

    def density(weight):
        return -law.log_prob(weight).sum() / 50

    a, b = network[1].weight.detach(), torch.randn(5, 6, dtype=torch.float64)
    difference = (prior.log_prob({"1.weight": b}) - prior.log_prob({"1.weight": a})) / 50
    torch.testing.assert_close(difference, density(a) - density(b), rtol=0, atol=1e-10)
    again = EmpCov([(part, None) for part in x.split(7)], network, "1", alpha=0.5, epsilon=0.01)
    torch.testing.assert_close(again.log_prob({"1.weight": a}), prior.log_prob({"1.weight": a}), rtol=0, atol=1e-8)
    assert not prior.state_dict()


def test_a_convolution_sees_patches():
    network = nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False)).double()
    x = torch.randn(4, 2, 6, 6, dtype=torch.float64)
    prior = EmpCov(x, network, "0", epsilon=0.1)
    padded = nn.functional.pad(x, (1, 1, 1, 1))
    places = itertools.product(range(4), (0, 2, 4), (0, 2, 4))
    patches = torch.stack([padded[b, :, i : i + 3, j : j + 3].flatten() for b, i, j in places])
    precision = torch.linalg.inv(torch.cov(patches.T) + 0.1 * torch.eye(18, dtype=torch.float64))
    w = network[0].weight.detach().flatten(1)
    expected = -torch.einsum("od,de,oe->", w, precision, w) / 2
    torch.testing.assert_close(prior.log_prob({"0.weight": network[0].weight}), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_draws_have_the_covariance_of_the_prior(kind):
    """20,000 outputs drawn at once: sample (co)variances within 5 of their standard errors √((Σ_ii Σ_jj + Σ_ij²) / n)."""
    count = 20_000
    if kind == "linear":
        network = nn.Sequential(nn.Linear(4, 1)).double()
        rows = x = 3 + torch.randn(50, 4, dtype=torch.float64) @ torch.randn(4, 4, dtype=torch.float64)
        like = torch.zeros(count, 4, dtype=torch.float64)
    else:
        network = nn.Sequential(nn.Conv2d(1, 1, 2)).double()
        x = torch.randn(30, 1, 3, 3, dtype=torch.float64).cumsum(3)
        rows = nn.functional.unfold(x, 2).transpose(1, 2).flatten(0, 1)
        like = torch.zeros(count, 1, 2, 2, dtype=torch.float64)
    prior = EmpCov(x, network, "0", alpha=0.5, epsilon=0.01)
    drawn = prior.draw("0.weight", like)
    assert drawn.shape == like.shape
    expected = 0.5 * torch.cov(rows.T) + 0.01 * torch.eye(4, dtype=torch.float64)
    variances = expected.diagonal()
    w = drawn.flatten(1)
    error = ((variances[:, None] * variances + expected.square()) / count).sqrt()
    assert bool(((w.T @ w / count - expected).abs() < 5 * error).all())
    assert bool((w.mean(0).abs() < 5 * (variances / count).sqrt()).all())
    assert not torch.equal(prior.draw("0.weight", like), drawn)


def test_its_weights_are_left_out_of_weight_decay():
    """Every other tensor decays, and every tensor is in one group; without decay there is but one group."""
    networks, (x, _) = [nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).double() for _ in range(2)], tiny.points()
    posterior = ds.DeepEnsemble(networks)
    names = {id(parameter): name for name, parameter in posterior.particles.own_parameters().items()}

    def decays(groups) -> dict[str, float]:
        held = [(names[id(p)], group["weight_decay"]) for group in groups for p in group["params"]]
        assert sorted(name for name, _ in held) == sorted(names.values())  # each once
        return dict(held)

    assert set(decays(posterior.default_optimizer().param_groups).values()) == {1e-4}
    posterior.use_prior(EmpCov(x, networks[0], "0"), data_size=12)
    for groups, decay in (
        (posterior.default_optimizer().param_groups, 1e-4),
        (posterior.parameter_groups(lr=0.1, weight_decay=0.3), 0.3),
    ):
        assert decays(groups) == {name: 0.0 if name == "network.0.weight" else decay for name in names.values()}
    assert set(decays(posterior.parameter_groups(lr=0.1)).values()) == {0.0}
    frozen = ds.DeepEnsemble([copy.deepcopy(n) for n in networks])
    frozen.particles.own_parameters()["network.0.weight"].requires_grad_(False)
    frozen.use_prior(EmpCov(x, networks[0], "0"), data_size=12)
    held = [p for group in frozen.parameter_groups(lr=0.1, weight_decay=0.3) for p in group["params"]]
    assert len(held) == 3
    assert all(p.requires_grad for p in held)


def test_members_feel_it_in_training():
    """As a term of each member's loss its gradient is Σ⁻¹ w / N on the first layer and nothing elsewhere."""

    nets, (x, y) = (
        [nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double() for _ in range(3)],
        tiny.points(),
    )
    plain = ds.DeepEnsemble(nets)
    posterior = ds.DeepEnsemble(nets, prior=EmpCov(x, nets[0], "0", epsilon=0.05), data_size=12)
    posterior.backward(x, y)
    plain.backward(x, y)
    precision = torch.linalg.inv(torch.cov(x.T) + 0.05 * torch.eye(4, dtype=torch.float64))
    own, other = posterior.particles.own_parameters(), plain.particles.own_parameters()
    for name in own:
        expected = torch.zeros_like(own[name])
        if name == "network.0.weight":
            expected = torch.stack([net[0].weight.detach() @ precision / 12 for net in nets])
        torch.testing.assert_close(own[name].grad - other[name].grad, expected, rtol=0, atol=1e-10, msg=name)


def test_it_takes_the_place_of_the_isotropic_prior_on_its_layer_only():
    networks, (x, y) = [nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).double() for _ in range(2)], tiny.points()
    both = ds.DeepEnsemble(networks, prior=EmpCov(x, networks[0], "0", epsilon=0.05, rest=0.7), data_size=12)
    alone = ds.DeepEnsemble(networks, prior=EmpCov(x, networks[0], "0", epsilon=0.05), data_size=12)
    rest = [sum(p.square().sum() for name, p in n.named_parameters() if name != "0.weight") for n in networks]
    expected = torch.stack(rest) / (2 * 12 * 0.7**2)
    torch.testing.assert_close(both.backward(x, y) - alone.backward(x, y), expected.detach(), rtol=1e-10, atol=1e-12)


def test_bad_input_is_a_clear_error():
    network, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), tiny.points()[0]
    refuses(lambda: EmpCov(x, network, "1"), "expected layer of 0, 2, got '1'")
    told = "expected inputs of 5 numbers for this layer, got 4; name the layer that takes"
    refuses(lambda: EmpCov(x, network, "2"), told)
    for keyword in ("alpha", "epsilon"):
        refuses(partial(EmpCov, x, network, "0", **{keyword: 0}), f"expected {keyword} above 0, got 0")
    grouped = nn.Sequential(nn.Conv2d(2, 2, 3, groups=2))
    with pytest.raises(ValueError, match="expected inputs of 9 numbers for this layer, got 18"):
        EmpCov(torch.randn(3, 2, 5, 5), grouped, "0")


def test_a_prior_that_does_not_fit_the_network_is_an_error_at_once():
    posterior = ds.DeepEnsemble([nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)) for _ in range(2)])
    wide = EmpCov(torch.randn(9, 5), nn.Sequential(nn.Linear(5, 3)), "0")
    with pytest.raises(ValueError, match=r"expected a prior over 4 weights per output of '0.weight', got one over 5"):
        posterior.use_prior(wide, data_size=9)
    deeper = EmpCov(torch.randn(9, 4), nn.Sequential(nn.Sequential(nn.Linear(4, 3))), "0.0")
    refuses(lambda: posterior.use_prior(deeper, data_size=9), r"expected a prior on one of .*, got '0.0.weight'")
    assert (posterior.prior, posterior.data_size) == (None, None)


def test_of_weights_in_half_precision_the_prior_is_that_of_the_same_numbers_in_full():
    inputs = 1e-3 * torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    network = nn.Sequential(nn.Linear(4, 6).half())
    with torch.no_grad():
        network[0].weight.normal_(0, 10)
    posterior = ds.MAP(network, prior=EmpCov(inputs, network, "0"), data_size=10)
    found = posterior.penalty(posterior.particles.shared_parameters())
    exact = EmpCov(inputs, nn.Sequential(nn.Linear(4, 6).double()), "0")
    expected = -exact.log_prob({"0.weight": network[0].weight.double()}) / 10
    assert float(expected.detach()) > 1e5  # beyond float16
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)


def test_the_input_that_is_not_finite_is_named():
    x = torch.randn(20, 1, 4, 4)
    x[13, 0, 1, 0] = float("inf")
    for network in (nn.Conv2d(1, 2, 3), nn.Linear(16, 2)):
        for inputs in (x, [(part, None) for part in x.split(5)]):
            refuses(partial(EmpCov, inputs, network, ""), "expected finite inputs, got inf in row 13, column 4")


@pytest.mark.parametrize("regime", ["collective", "independent"])
def test_on_a_layer_that_members_share_the_prior_counts_once(regime):
    x, y = tiny.points()
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    posterior = ds.BatchEnsemble(network, members=4, modulation=ds.Modulation.normal(1, 0.5), regime=regime)
    weight = posterior.particles.shared_parameters()["network.0.weight"]
    posterior.backward(x, y)
    without = weight.grad.clone()
    posterior.zero_grad()
    prior = EmpCov(x, network, "0", epsilon=0.05)
    posterior.use_prior(prior, data_size=12)
    posterior.backward(x, y)
    alone = weight.detach().clone().requires_grad_()
    (-prior.log_prob({"0.weight": alone}) / 12).backward()
    torch.testing.assert_close(weight.grad - without, alone.grad, rtol=0, atol=1e-12)
