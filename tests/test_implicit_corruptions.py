"""Implicit corruptions: the minimum itself where it is known, and a descent that never rises."""

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from thinning import often


def linear(**keywords):
    torch.manual_seed(0)
    return ds.NodeBNN(nn.Linear(6, 4).double(), data_size=10, mode="both", samples=12, prior_std=0.5, **keywords)


def test_of_linear_functions_it_is_the_ridge_regression():
    """With f_m(x) = A_m x + b_m: x_s = (ĀᵀĀ + λ)⁻¹ (Āᵀ (f_s(x) − b̄) + λ x)."""
    posterior, x = linear(), torch.randn(5, 6, dtype=torch.float64)
    drawn = posterior.draw()
    found = ds.attacks.implicit_corruptions(posterior, x, penalty=0.2, functions=3, steps=200, draw=drawn)
    weights, biases = (
        torch.stack([getattr(drawn.member(i), key).detach() for i in range(12)]) for key in ("weight", "bias")
    )
    mean, bias = weights.mean(0), biases.mean(0)
    assert found.functions.tolist() == [0, 4, 8]  # one of each of three of the four components
    for s, i in enumerate(found.functions.tolist()):
        aim = x @ weights[i].T + biases[i]
        right = mean.T @ (aim - bias).T + 0.2 * x.T
        expected = torch.linalg.solve(mean.T @ mean + 0.2 * torch.eye(6, dtype=torch.float64), right).T
        torch.testing.assert_close(found.inputs[s], expected, rtol=0, atol=1e-6)
        apart = (aim - expected @ mean.T - bias).square().sum(1)
        share = 1 - apart / (aim - x @ mean.T - bias).square().sum(1)
        torch.testing.assert_close(found.explained[s], share, rtol=0, atol=1e-6)


def conv():
    return ds.nets.LeNet(3, size=16)


MADE = [
    lambda: ds.NodeBNN(conv(), data_size=10, samples=4, prior_std=0.5),
    lambda: ds.DeepEnsemble([conv() for _ in range(2)]),
    lambda: ds.MCDropout(conv(), rate=0.3, samples=3),
]


@pytest.mark.parametrize("make", often(MADE[1:2], MADE[::2]))
def test_the_objective_falls_and_nothing_else_moves(make):
    torch.manual_seed(0)
    posterior, x = make(), torch.randn(3, 1, 16, 16)
    before, drawn = tiny.state(posterior), posterior.draw()

    def objective(found):
        aims = drawn(x)[found.functions]
        said = torch.stack([drawn(each).mean(0) for each in found.inputs])
        apart, moved = (t.flatten(2).square().sum(2) for t in (aims - said, found.inputs - x))
        return (apart + 1e-3 * moved).detach() / 2

    last = None
    for steps in (0, 3, 30):
        found = ds.attacks.implicit_corruptions(posterior, x, penalty=1e-3, steps=steps, draw=drawn)
        now = objective(found)
        assert last is None or bool((now < last).all())
        last = now
    assert found.inputs.shape == (drawn.members, *x.shape)
    assert bool((found.explained > 0.1).all())
    alone = ds.attacks.implicit_corruptions(posterior, x[1:2], penalty=1e-3, steps=30, draw=drawn, at_once=1)
    torch.testing.assert_close(alone.inputs[:, 0], found.inputs[:, 1], rtol=1e-3, atol=1e-4)  # every input by itself
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny.state(posterior).items())
    assert all(parameter.grad is None for parameter in posterior.parameters())


def test_a_single_function_is_its_own_mean():
    posterior, x = ds.MAP(conv()), torch.randn(2, 1, 16, 16)
    found = ds.attacks.implicit_corruptions(posterior, x, steps=5)
    assert torch.equal(found.inputs[0], x)
    assert torch.equal(found.explained, torch.ones(1, 2))


def test_wrong_arguments_are_refused():
    posterior, x = linear(), torch.randn(2, 6, dtype=torch.float64)
    for inputs, settings, message in (
        (x.long(), {}, r"expected one floating-point tensor of inputs, got torch\.int64"),
        (x, {"penalty": 0}, "expected penalty above 0, got 0"),
        (x, {"functions": 0}, "expected functions of at least 1, got 0"),
        (x, {"draw": "new"}, "expected draw of fixed, fresh, got 'new'"),
    ):
        with pytest.raises(ValueError, match=message):
            ds.attacks.implicit_corruptions(posterior, inputs, **settings)
