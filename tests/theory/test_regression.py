"""Kernel regression: known posteriors, the limit of training, and kernels that cannot be factorised."""

from functools import partial

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus import theory

X, Y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
POINTS = torch.randn(4, 3, dtype=torch.float64)
LAYERS = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1, bias=False))
KERNEL = partial(theory.kernel, LAYERS, weight_variance=2.0, bias_variance=0.1)


def test_a_linear_network_is_bayesian_linear_regression():
    """f = wx/√3, w ~ N(0, 2): the posterior over w by hand."""
    linear = partial(theory.kernel, nn.Sequential(nn.Linear(3, 1, bias=False)), weight_variance=2.0)
    found = theory.gp_predict(linear, X, Y, POINTS, noise=0.5)
    design, at = X / 3**0.5, POINTS / 3**0.5
    precision = design.T @ design / 0.25 + torch.eye(3, dtype=torch.float64) / 2
    mean = torch.linalg.solve(precision, design.T @ Y / 0.25)
    assert torch.allclose(found.mean[:, 0], at @ mean, atol=1e-10)
    assert torch.allclose(found.epistemic[:, 0], ((at @ precision.inverse()) * at).sum(1), atol=1e-10)
    assert torch.allclose(found.total, found.aleatoric + found.epistemic)
    assert torch.allclose(found.aleatoric, torch.full((4, 1), 0.25, dtype=torch.float64))
    assert isinstance(found, ds.SummaryPredictive)


def test_tangent_regression_is_the_end_of_training_and_passes_through_the_data():
    one = ds.Modulation.constant(1.0)
    given = partial(
        theory.embedded_kernels, depth=1, activation="relu", u=one, v=one, weight_variance=2.0, bias_variance=0.1,
        trained="none",
    )  # fmt: skip
    law = theory.ensemble_dynamics(X, Y, POINTS, kernels=given, members=1, gamma=1.0).law([1e9], learning_rate=1.0)
    found = theory.gp_predict(KERNEL, X, Y, POINTS, noise=0.0, kind="ntk")
    assert torch.allclose(found.mean[:, 0], law.mean[0], atol=1e-6)
    assert torch.allclose(found.epistemic[:, 0], law.variance[0], atol=1e-6)
    at_data = theory.gp_predict(KERNEL, X, Y, X, noise=0.0, kind="ntk")
    assert torch.allclose(at_data.mean[:, 0], Y, atol=1e-8)
    assert float(at_data.epistemic.max()) < 1e-8


def test_a_kernel_that_cannot_be_factorised_is_refused_with_the_jitter_that_would_do():
    twice, targets = torch.cat([X, X]), torch.cat([Y, Y])
    with pytest.raises(ValueError, match=r"expected a positive definite kernel, .* pass jitter=(\S+),") as error:
        theory.gp_predict(KERNEL, twice, targets, POINTS, noise=0.0)
    jitter = float(str(error.value).split("jitter=")[1].split(",")[0])
    found = theory.gp_predict(KERNEL, twice, targets, POINTS, noise=0.0, jitter=jitter)
    assert torch.allclose(found.mean, theory.gp_predict(KERNEL, X, Y, POINTS, noise=0.0).mean, atol=1e-5)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="expected kind of nngp, ntk, got 'gp'"):
        theory.gp_predict(KERNEL, X, Y, POINTS, noise=0.1, kind="gp")
    with pytest.raises(ValueError, match=r"expected 6 targets, \(N,\) or \(N, D\), got \(5,\)"):
        theory.gp_predict(KERNEL, X, Y[:5], POINTS, noise=0.1)
    with pytest.raises(ValueError, match="expected inputs of width 3, got 2"):
        theory.gp_predict(KERNEL, X[:, :2], Y, POINTS[:, :2], noise=0.1)
    with pytest.raises(ValueError, match="expected noise of at least 0, got -1"):
        theory.gp_predict(KERNEL, X, Y, POINTS, noise=-1)
