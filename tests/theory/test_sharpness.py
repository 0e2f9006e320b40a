"""The sharpness of a loss at an optimiser's rates, beside closed forms."""

import math

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.theory import sharpness


def linear(rate: float):
    torch.manual_seed(0)
    x, network = torch.randn(40, 5, dtype=torch.float64), nn.Linear(5, 1, bias=False).double()
    posterior = ds.MAP(network, likelihood=ds.Regression(0.5))
    curvature = float(torch.linalg.eigvalsh(x.T @ x / 40)[-1]) / 0.5**2  # of the mean of (y − wx)²/2σ²
    return posterior, torch.optim.SGD(posterior.parameters(), lr=rate), x, torch.randn(40, 1).double(), curvature


def test_of_a_linear_network_it_is_the_rate_times_the_largest_eigenvalue():
    posterior, optimizer, x, y, curvature = linear(0.03)
    before = [p.clone() for p in posterior.parameters()]
    state = torch.get_rng_state()
    assert sharpness(posterior, optimizer, x, y) == pytest.approx(0.03 * curvature, rel=2e-2)
    assert all(map(torch.equal, posterior.parameters(), before))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("share", "diverges"), [(0.9, False), (1.1, True)])
def test_descent_diverges_where_it_is_above_two(share, diverges):
    posterior, optimizer, x, y, _ = linear(1.0)
    rate = share * 2 / sharpness(posterior, optimizer, x, y)
    optimizer = torch.optim.SGD(posterior.parameters(), lr=rate)
    losses = []
    for _ in range(300):
        optimizer.zero_grad()
        losses.append(float(posterior.backward(x, y).sum()))
        optimizer.step()
    assert (losses[-1] > losses[0]) == diverges


def test_rates_of_groups_count_and_noise_is_the_same_at_both_ends():
    torch.manual_seed(0)
    x, y = torch.randn(30, 4), torch.randint(3, (30,))
    posterior = ds.NodeBNN(ds.nets.MLP(4, 3, hidden=(8,)), data_size=30, latent_lr=0.05)
    slow = torch.optim.SGD(posterior.parameter_groups(0.01), lr=0.01)
    found = sharpness(posterior, slow, x, y)
    assert 0 < found < math.inf
    for group in slow.param_groups:
        group["lr"] *= 3
    assert sharpness(posterior, slow, x, y) == pytest.approx(3 * found, rel=2e-2)
