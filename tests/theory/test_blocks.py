"""Kernels between members of an embedded ensemble: two ways to one answer, theorems 1 and 2 at finite width."""

from functools import partial

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus import Modulation, theory

ONE, SIGN = Modulation.constant(1.0), Modulation.sign()
X = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def drawn(seed=0, **given):
    defaults = {"width": 12, "depth": 2, "members": 3, "u": Modulation.normal(0.6, 0.8), "v": Modulation.normal(1, 0.5),
                "weight_variance": 2.0, "bias_variance": 0.1}  # fmt: skip
    return theory.EmbeddedNetwork.draw(5, **(defaults | given), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_signals_and_gradients_give_the_same_blocks(activation):
    network, x2 = drawn(activation=activation, outputs=2), torch.randn(2, 5, dtype=torch.float64)
    for pair in ((X,), (X, x2)):
        by_gradients = theory.ensemble_blocks(network.member, network.shared, network.own, *pair)
        by_signals = network.blocks(*pair)
        assert by_gradients.common.shape == (3, 3, 3, len(pair[-1]), 2, 2)
        assert torch.allclose(by_gradients.common, by_signals.common, atol=1e-10)
        assert torch.allclose(by_gradients.individual, by_signals.individual, atol=1e-10)


def test_all_members_at_once_are_the_members_one_by_one():
    network = drawn(outputs=2)
    together = network(X)
    for m in range(3):
        own = {name: tensor[m] for name, tensor in network.own.items()}
        assert torch.allclose(together[m], network.member({**network.shared, **own}, X), atol=1e-12)


def test_the_whole_kernel_is_that_of_one_step_of_descent():
    """Θ·residual is what a small step with rates γ/M for shared and 1 for own tensors changes outputs by."""
    network, gamma, eta = drawn(activation="erf"), 3.0, 1e-6
    y = torch.randn(3, 1, dtype=torch.float64)
    tensors = {**network.shared, **network.own}
    leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    f = network.outputs({k: leaves[k] for k in network.shared}, {k: leaves[k] for k in network.own}, X)
    gradients = dict(zip(leaves, torch.autograd.grad(((f - y) ** 2).sum() / 2, list(leaves.values())), strict=True))
    rate = {name: gamma / 3 if name in network.shared else 1.0 for name in tensors}
    moved = {name: t - eta * rate[name] * gradients[name] for name, t in tensors.items()}
    after = network.outputs({k: moved[k] for k in network.shared}, {k: moved[k] for k in network.own}, X)
    predicted = -eta * network.blocks(X).total(gamma) @ (f - y).flatten()
    assert torch.allclose((after - f).flatten(), predicted, rtol=1e-4, atol=1e-10)


@pytest.mark.parametrize(
    ("u", "v", "activation"),
    [(SIGN, ONE, "relu"), (Modulation.normal(0.7, 0.71), Modulation.normal(1, 0.5), "erf"),
     pytest.param(Modulation.normal(0.6, 0.8), SIGN, "relu", marks=pytest.mark.slow),
     pytest.param(Modulation.bernoulli(0.8), ONE, "relu", marks=pytest.mark.slow)],
)  # fmt: skip
def test_means_over_random_networks_are_the_analytic_kernels(u, v, activation):
    """60 networks of width 256: four standard errors and the bias of order 1/N, some percent here."""
    given = {"depth": 2, "activation": activation, "u": u, "v": v, "weight_variance": 2.0, "bias_variance": 0.1}
    expected = theory.embedded_kernels(X[:2], **given)
    found = {"gp_same": [], "gp_cross": [], "common_same": [], "common_cross": [], "individual": []}
    for seed in range(60):
        network = theory.EmbeddedNetwork.draw(
            5, width=256, members=2, outputs=1, **given, generator=torch.Generator().manual_seed(seed)
        )
        f, blocks = network(X[:2])[..., 0], network.blocks(X[:2])
        for name, value in (
            ("gp_same", f[0][:, None] * f[0]),
            ("gp_cross", f[0][:, None] * f[1]),
            ("common_same", blocks.same[..., 0, 0]),
            ("common_cross", blocks.common[0, 1, ..., 0, 0]),
            ("individual", blocks.individual[0, ..., 0, 0]),
        ):
            found[name].append(value)
    for name, values in found.items():
        each, wanted = torch.stack(values), getattr(expected, name)
        allowed = 4 * each.std(0) / 60**0.5 + 0.02 * float(wanted.abs().max())
        assert ((each.mean(0) - wanted).abs() < allowed).all(), name


def test_kernels_become_deterministic_as_one_over_the_width():
    """Theorem 2: the variance of every block falls as 1/N; slope of its logarithm over four widths."""
    widths, seeds = (32, 64, 128, 256), 40
    variances = []
    for width in widths:
        each = [drawn(seed, width=width, members=2, u=SIGN, v=ONE).blocks(X) for seed in range(seeds)]
        variances.append(
            torch.stack([torch.stack([b.common[0, i, ..., 0, 0] for b in each]).var(0).mean() for i in range(2)])
        )
    logs, x = torch.stack(variances).log(), torch.tensor(widths, dtype=torch.float64).log()
    slopes = ((x - x.mean())[:, None] * logs).sum(0) / ((x - x.mean()) ** 2).sum()
    # A variance from 40 draws is off by √(2/40) = .22; the slope over log 8 by about .15.
    assert ((slopes + 1).abs() < 0.5).all()


def test_outputs_at_initialisation_are_gaussian_and_independent_when_u_has_mean_zero():
    """Theorem 1: kurtosis 3 and no correlation between members, nor between their squares, in the wide limit."""
    n = 300
    f = torch.stack([drawn(seed, width=200, members=2, u=SIGN, v=ONE)(X[:1]).flatten() for seed in range(n)])
    z = f / f.std(0)
    assert float(f.mean(0).abs().max()) < 4 * float(f.std()) / n**0.5
    assert float((z**4).mean()) == pytest.approx(3, abs=4 * (96 / (2 * n)) ** 0.5)  # Var z⁴ = 96
    assert abs(float((z[:, 0] * z[:, 1]).mean())) < 4 / n**0.5
    assert abs(float(((z[:, 0] ** 2 - 1) * (z[:, 1] ** 2 - 1)).mean())) < 4 * 2 / n**0.5
    tied = torch.stack(
        [drawn(s, width=200, members=2, u=ONE, v=Modulation.normal(1, 0.5))(X[:1]).flatten() for s in range(100)]
    )
    assert float(torch.corrcoef(tied.T)[0, 1]) > 0.5


def test_a_shared_output_bias_would_tie_members_by_exactly_one():
    network = drawn(u=SIGN, v=ONE)

    def biased(params, x):
        return network.member(params, x) + params["output_bias"]

    without = theory.ensemble_blocks(network.member, network.shared, network.own, X)
    shared = {**network.shared, "output_bias": torch.zeros(1, dtype=torch.float64)}
    with_it = theory.ensemble_blocks(biased, shared, network.own, X)
    assert torch.allclose(with_it.common, without.common + 1, atol=1e-12)


def test_too_little_memory_is_refused_with_the_size_and_axes_are_checked():
    network = drawn()
    given = partial(theory.ensemble_blocks, network.member, network.shared)
    with pytest.raises(ValueError, match=r"expected gradients of all members and their kernel within 0.977 KiB, got"):
        given(network.own, X, memory=1000)
    with pytest.raises(ValueError, match=r"one member axis first, got lengths \[2, 3\]"):
        given({**network.own, "u1": network.own["u1"][:2]}, X)


@pytest.mark.parametrize("kind", ["batch_ensemble", "talk", "dropout_ensemble"])
def test_the_blocks_of_a_posterior_predict_its_training_step(kind):
    """f after a small SGD step, of a network with convolutions, batch norm and a frozen layer: −η/B Θ(γ) (f − y)."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Tanh(), nn.Conv1d(4, 3, 1), nn.Tanh(), nn.Flatten(), nn.Linear(9, 2)
    ).double()
    network[3].requires_grad_(False)
    network[1].running_mean.normal_()
    given = {"members": 3, "likelihood": ds.Regression(noise=1.0), "regime": 1.7}
    if kind == "dropout_ensemble":
        posterior = ds.DropoutEnsemble(network, rate=0.3, **given)
    else:
        form = "talk" if kind == "talk" else "wen"
        posterior = ds.BatchEnsemble(network, modulation=Modulation.normal(0.6, 0.5), form=form, **given)
    posterior.eval()
    x, y, eta = torch.randn(4, 1, 5).double(), torch.randn(4, 2).double(), 1e-6
    f = posterior(x).detach()
    posterior.backward(x, y)
    blocks = theory.posterior_blocks(posterior, x)
    assert blocks.common.shape == (3, 3, 4, 4, 2, 2)
    with torch.no_grad():
        for parameter in posterior.parameters():
            if parameter.grad is not None:
                parameter -= eta * parameter.grad
    predicted = -eta / 4 * blocks.total(posterior.gamma) @ (f - y).flatten()
    torch.testing.assert_close((posterior(x) - f).flatten(), predicted, rtol=1e-3, atol=1e-10)
    other = theory.posterior_blocks(posterior, x[:2], x[2:])
    again = theory.posterior_blocks(posterior, x)
    torch.testing.assert_close(other.common, again.common[:, :, :2, 2:])


def test_blocks_of_members_that_share_nothing_are_refused():
    ensemble = ds.DeepEnsemble([nn.Linear(2, 1) for _ in range(2)])
    with pytest.raises(TypeError, match="members that share weights"):
        theory.posterior_blocks(ensemble, torch.randn(3, 2))
