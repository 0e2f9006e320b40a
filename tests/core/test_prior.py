"""The Gaussian prior: on weights and biases, not on norm layers, ‖θ‖² / (2 N σ²) per member."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.core.prior import check_prior, negative_log_prior, norm_parameters


def test_norm_layers_are_found_wherever_they_are():
    network = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True))
    )
    assert norm_parameters(network) == {"1.weight", "1.bias", "2.0.weight", "2.0.bias", "2.1.weight", "2.1.bias"}
    assert norm_parameters(nn.LayerNorm(3)) == {"weight", "bias"}
    assert norm_parameters(nn.RMSNorm(3)) == {"weight"}

    class HomeMade(nn.Module):
        """None of torch's, but it keeps running statistics."""

        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))
            self.register_buffer("running_mean", torch.zeros(3))

    assert norm_parameters(nn.Sequential(nn.Linear(3, 3), HomeMade())) == {"1.gain"}


@pytest.mark.parametrize("how", ["loop", "vectorised"])
def test_the_penalty_is_the_sum_of_squares_of_each_member(how):
    networks = [tiny.mlp().double() for _ in range(3)]
    x, y = tiny.points()
    plain = ds.DeepEnsemble(networks)
    prior = ds.DeepEnsemble(networks, weight_prior_std=0.7, data_size=50, likelihood=ds.Classification())
    plain.particles.how = prior.particles.how = how
    difference = prior.eval().backward(x, y) - plain.eval().backward(x, y)
    squares = torch.stack([sum(net.get_parameter(n).square().sum() for n in WEIGHTS) for net in networks])
    torch.testing.assert_close(difference, squares.detach() / (2 * 50 * 0.7**2), rtol=1e-12, atol=0)


WEIGHTS = ("0.weight", "0.bias", "3.weight", "3.bias")  # not "1.*", the batch norm


def test_learned_noise_has_no_weight_prior():
    network = nn.Linear(4, 1).double()
    posterior = ds.MAP(network, likelihood=ds.Regression(initial=5.0), weight_prior_std=1.0, data_size=1).double()
    params = {**posterior.particles.shared_parameters()}
    expected = sum(p.square().sum() for p in network.parameters()) / 2
    torch.testing.assert_close(posterior.penalty(params), expected, rtol=1e-12, atol=0)


def test_frozen_weights_do_not_count():
    network = nn.Linear(4, 3).double()
    network.weight.requires_grad_(False)
    posterior = ds.MAP(network, weight_prior_std=1.0, data_size=1)
    params = posterior.particles.shared_parameters()
    torch.testing.assert_close(posterior.penalty(params), network.bias.square().sum() / 2, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_prior_of_weights_in_half_precision_is_that_of_the_same_numbers_in_full(dtype):
    """Σ θ² = 4e6 leaves float16; bfloat16 would have two digits of it."""
    weights = {"a": (200 * torch.randn(50, 2)).to(dtype), "b": torch.randn(7).to(dtype)}
    found = negative_log_prior(weights, 0.7, 30)
    exact = negative_log_prior({name: tensor.double() for name, tensor in weights.items()}, 0.7, 30)
    assert float(found) == pytest.approx(float(exact), rel=1e-5)
    single = {name: tensor.float() for name, tensor in weights.items()}
    assert torch.equal(negative_log_prior(single, 0.7, 30), found)


@pytest.mark.parametrize("value", [2.5, 10.0, True, "600", float("nan")])
def test_a_number_of_examples_is_whole(value):
    with pytest.raises(TypeError, match="expected data_size as a whole number, got"):
        check_prior(None, value)
    with pytest.raises(TypeError, match="expected data_size as a whole number, got"):
        ds.MAP(tiny.mlp(), weight_prior_std=1.0, data_size=value)


@pytest.mark.parametrize("value", [0, -3])
def test_a_number_of_examples_is_at_least_one(value):
    with pytest.raises(ValueError, match="expected a positive data_size, got"):
        check_prior(1.0, value)


@pytest.mark.parametrize("value", [True, "1"])
def test_a_deviation_is_a_number(value):
    with pytest.raises(TypeError, match="expected weight_prior_std as a number, got"):
        check_prior(value, 10)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0])
def test_a_deviation_is_positive_and_finite(value):
    with pytest.raises(ValueError, match=r"expected a positive weight_prior_std, got .*; pass a finite number above 0"):
        check_prior(value, 10)


def test_numbers_of_numpy_are_numbers():
    posterior = ds.MAP(ds.nets.MLP(4, 3, hidden=(6,)), weight_prior_std=np.float64(0.5), data_size=np.int64(12))
    plain = ds.MAP(posterior.particles.member(0), weight_prior_std=0.5, data_size=12)
    x, y = tiny.points()
    assert torch.equal(posterior.float().loss(x.float(), y), plain.float().loss(x.float(), y))
