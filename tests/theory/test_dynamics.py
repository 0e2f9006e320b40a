"""Training of wide networks: closed forms, kernel regression as its limit, the linear toy model, and sharpness."""

import math
from functools import partial

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus import Modulation, theory
from dissensus.theory import sharpness
from refusals import refuses
from thinning import thinned

ONE, SIGN = Modulation.constant(1.0), Modulation.sign()
GENERATOR = torch.Generator().manual_seed(3)
X, POINTS = (torch.randn(n, 4, generator=GENERATOR, dtype=torch.float64) for n in (6, 3))
Y = torch.randn(6, 1, generator=GENERATOR, dtype=torch.float64)
LAW = {"depth": 2, "activation": "relu", "u": Modulation.normal(0.6, 0.8), "v": ONE, "weight_variance": 2.0}
KERNELS = partial(theory.embedded_kernels, **LAW)


@pytest.mark.parametrize(("gamma", "descent"), thinned([1.0, 4.0], ["steps", "flow"], every=2))
def test_modes_are_descent_on_the_whole_kernel(gamma, descent):
    """Θ over members and inputs built as a matrix and descended in steps (or 400 tiny ones for the flow)."""
    members, steps = 4, 30
    dynamics = theory.ensemble_dynamics(X, Y, POINTS, kernels=KERNELS, members=members, gamma=gamma)
    eta = 0.5 * dynamics.largest_rate
    f, g = (torch.randn(members, n, 1, dtype=torch.float64) for n in (6, 3))
    found = dynamics.members(f, [0, 7, steps], learning_rate=eta, at_points=g, descent=descent)

    def whole(kernels):
        cross = gamma / members * kernels.common_cross
        own = gamma / members * (kernels.common_same - kernels.common_cross) + kernels.individual
        ones, eye = torch.ones(members, members, dtype=torch.float64), torch.eye(members, dtype=torch.float64)
        return torch.kron(ones, cross) + torch.kron(eye, own)

    theta, towards = whole(KERNELS(X)), whole(KERNELS(POINTS, X))
    fine = 1 if descent == "steps" else 400
    at_x, at_points, y = f.flatten(), g.flatten(), Y.flatten().repeat(members)
    seen = {0: at_points}
    for step in range(1, steps * fine + 1):
        change = eta / 6 / fine * (at_x - y)
        at_x, at_points = at_x - theta @ change, at_points - towards @ change
        if step % fine == 0:
            seen[step // fine] = at_points
    for row, when in zip(found, (0, 7, steps), strict=True):
        assert torch.allclose(row.flatten(), seen[when], atol=1e-10 if descent == "steps" else 1e-2)


def test_the_largest_rate_is_where_descent_turns():
    dynamics = theory.ensemble_dynamics(X, Y, kernels=KERNELS, members=3, gamma=3.0)
    f = torch.randn(3, 6, 1, dtype=torch.float64)
    for factor, grows in ((0.99, False), (1.01, True)):
        late = dynamics.members(f, [3000], learning_rate=factor * dynamics.largest_rate, descent="steps")
        assert bool(late.abs().max() > 1e3) == grows


def test_the_law_is_that_of_random_starts():
    """Mean, variance and spread over 20,000 Gaussian starts with the kernels' covariance."""
    members, n = 3, 20_000
    dynamics = theory.ensemble_dynamics(X, Y, POINTS, kernels=KERNELS, members=members, gamma=3.0)
    eta, times = 0.2 * dynamics.largest_rate, [0.0, 5.0, 50.0]
    law = dynamics.law(times, learning_rate=eta)
    kernels = KERNELS(torch.cat([X, POINTS]))
    ones, eye = torch.ones(members, members, dtype=torch.float64), torch.eye(members, dtype=torch.float64)
    covariance = torch.kron(ones, kernels.gp_cross) + torch.kron(eye, kernels.gp_same - kernels.gp_cross)
    root = torch.linalg.cholesky(covariance + 1e-10 * torch.eye(len(covariance), dtype=torch.float64))
    starts = (root @ torch.randn(27, n, dtype=torch.float64)).view(members, 9, n)
    many = theory.ensemble_dynamics(X, Y.expand(6, n), POINTS, kernels=KERNELS, members=members, gamma=3.0)
    f = many.members(starts[:, :6], times, learning_rate=eta, at_points=starts[:, 6:])  # (T, M, 3, n)
    centre = f.mean(1)
    spread = (f - centre[:, None]).square().mean(1)
    for expected, draws in ((law.mean[..., 0], centre), (law.variance, (centre - law.mean) ** 2), (law.spread, spread)):
        assert ((draws.mean(-1) - expected).abs() < 4 * draws.std(-1) / n**0.5 + 1e-9).all()


def test_independent_members_are_a_deep_ensemble_in_law():
    """u of mean 0 and γ = M: both modes follow one kernel, and the mean's variance falls as 1/M."""
    given = partial(KERNELS, u=SIGN)
    made = {m: theory.ensemble_dynamics(X, Y, POINTS, kernels=given, members=m, gamma=float(m)) for m in (1, 8)}
    assert torch.allclose(made[8].mean_eigenvalues, made[8].difference_eigenvalues)
    assert torch.allclose(made[8].mean_eigenvalues, made[1].mean_eigenvalues)
    one, eight = (made[m].law([20.0], learning_rate=0.1) for m in (1, 8))
    assert torch.allclose(eight.variance, one.variance / 8)
    assert torch.allclose(eight.mean, one.mean)


def test_collective_members_have_a_floor_and_frozen_differences():
    """Dropout's masks: the mean's variance stays above K_o's part, differences move slower as M grows at γ = 1."""
    given = partial(KERNELS, u=Modulation.bernoulli(0.8), trained="none")
    made = {m: theory.ensemble_dynamics(X, Y, kernels=given, members=m, gamma=1.0) for m in (4, 400)}
    assert float(made[400].difference_eigenvalues[-1] / made[4].difference_eigenvalues[-1]) == pytest.approx(0.01)
    assert float(made[400].mean_eigenvalues[-1] / made[4].mean_eigenvalues[-1]) > 0.7
    assert (made[400].law([0.0], learning_rate=0.1).variance > 0.6 * given(X).gp_cross.diagonal()).all()


@pytest.mark.parametrize(
    ("u", "gamma"),
    [(SIGN, 4.0), (Modulation.normal(0.7, 0.714), 1.0),
     pytest.param(Modulation.bernoulli(0.8), 1.0, marks=pytest.mark.slow)],
    ids=str,
)  # fmt: skip
def test_a_trained_wide_ensemble_follows_the_prediction(u, gamma):
    """Width 1500, 20 steps at .1·B/λ_max: largest error over time under 10 % of the initial residual."""
    trained = "none" if u.law == "bernoulli" else "both"
    law = {"depth": 2, "activation": "relu", "u": u, "v": ONE, "weight_variance": 2.0}
    kernels = partial(theory.embedded_kernels, **law, trained=trained)
    dynamics = theory.ensemble_dynamics(X, Y, kernels=kernels, members=4, gamma=gamma)
    rate = 0.1 * dynamics.largest_rate / 2
    start = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float32}
    network = theory.EmbeddedNetwork.draw(4, width=1500, members=4, **law, **start)
    training = {"steps": 20, "learning_rate": rate, "gamma": gamma, "train_modulations": trained == "both"}
    outputs, after = theory.train_embedded(network, X.float(), Y.float(), **training)
    predicted = dynamics.members(outputs[0], range(21), learning_rate=rate, descent="steps")
    for mode in (lambda f: f.mean(1, keepdim=True).expand_as(f), lambda f: f - f.mean(1, keepdim=True)):
        error = (mode(outputs) - mode(predicted)).flatten(1).norm(dim=1).max()
        assert float(error / (outputs[0] - Y).norm()) < 0.1
    # The kernel stays what it was (in order 1/√N), and the finite network's own predicts better than the limit.
    before, now = (each.blocks(X.float()).total(gamma) for each in (network, after))
    assert float((before - now).norm() / before.norm()) < 0.05


def test_descent_under_a_measured_kernel():
    law = {"depth": 2, "u": SIGN, "v": ONE, "weight_variance": 2.0}
    generator = torch.Generator().manual_seed(0)
    network = theory.EmbeddedNetwork.draw(4, width=200, members=2, **law, generator=generator)
    theta = network.blocks(X).total(2.0)
    start = (network(X) - Y).flatten()
    found = theory.residuals(theta, start, [0, 3], learning_rate=0.1, batch=6, descent="steps")
    step = torch.eye(12, dtype=torch.float64) - 0.1 / 6 * theta
    assert torch.allclose(found[1], step @ step @ step @ start, atol=1e-10)


def test_bad_input_is_refused():
    given = partial(theory.ensemble_dynamics, X, Y, kernels=KERNELS)
    refuses(lambda: given(members=2, gamma=0), "expected gamma above 0, got 0")
    fewer = partial(theory.ensemble_dynamics, X, Y[:5], kernels=KERNELS, members=2, gamma=1)
    refuses(fewer, "expected targets for 6 inputs")
    members = partial(given(members=2, gamma=1).members, learning_rate=0.1)
    refuses(lambda: members(torch.zeros(3, 6, 1), [0]), r"expected initial outputs \(2, 6, 1\), got \(3, 6, 1\)")
    refuses(lambda: members(torch.zeros(2, 6, 1), [0.5], descent="steps"), "expected whole numbers of steps")
    residuals = partial(theory.residuals, torch.tensor([1.0, -1.0]).diag(), torch.ones(2), [1])
    negative = "expected a kernel without negative eigenvalues, got -1"
    refuses(lambda: residuals(learning_rate=0.1, batch=2), negative)


INPUTS, TARGETS = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
OTHERS = torch.randn(4, 3, dtype=torch.float64)
LAYERS = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1, bias=False))
KERNEL = partial(theory.kernel, LAYERS, weight_variance=2.0, bias_variance=0.1)


def test_a_linear_network_is_bayesian_linear_regression():
    """f = wx/√3, w ~ N(0, 2): the posterior over w by hand."""
    linear = partial(theory.kernel, nn.Sequential(nn.Linear(3, 1, bias=False)), weight_variance=2.0)
    found = theory.gp_predict(linear, INPUTS, TARGETS, OTHERS, noise=0.5)
    design, at = INPUTS / 3**0.5, OTHERS / 3**0.5
    precision = design.T @ design / 0.25 + torch.eye(3, dtype=torch.float64) / 2
    mean = torch.linalg.solve(precision, design.T @ TARGETS / 0.25)
    assert torch.allclose(found.mean[:, 0], at @ mean, atol=1e-10)
    assert torch.allclose(found.epistemic[:, 0], ((at @ precision.inverse()) * at).sum(1), atol=1e-10)
    assert torch.allclose(found.total, found.aleatoric + found.epistemic)
    assert torch.allclose(found.aleatoric, torch.full((4, 1), 0.25, dtype=torch.float64))
    assert isinstance(found, ds.SummaryPredictive)


def test_tangent_regression_is_the_end_of_training_and_passes_through_the_data():
    given = partial(KERNELS, depth=1, u=ONE, bias_variance=0.1, trained="none")
    dynamics = theory.ensemble_dynamics(INPUTS, TARGETS, OTHERS, kernels=given, members=1, gamma=1.0)
    law = dynamics.law([1e9], learning_rate=1.0)
    found = theory.gp_predict(KERNEL, INPUTS, TARGETS, OTHERS, noise=0.0, kind="ntk")
    assert torch.allclose(found.mean[:, 0], law.mean[0], atol=1e-6)
    assert torch.allclose(found.epistemic[:, 0], law.variance[0], atol=1e-6)
    at_data = theory.gp_predict(KERNEL, INPUTS, TARGETS, INPUTS, noise=0.0, kind="ntk")
    assert torch.allclose(at_data.mean[:, 0], TARGETS, atol=1e-8)
    assert float(at_data.epistemic.max()) < 1e-8


def test_a_kernel_that_cannot_be_factorised_is_refused_with_the_jitter_that_would_do():
    twice, targets = torch.cat([INPUTS, INPUTS]), torch.cat([TARGETS, TARGETS])
    with pytest.raises(ValueError, match=r"expected a positive definite kernel, .* pass jitter=(\S+),") as error:
        theory.gp_predict(KERNEL, twice, targets, OTHERS, noise=0.0)
    jitter = float(str(error.value).split("jitter=")[1].split(",")[0])
    found = theory.gp_predict(KERNEL, twice, targets, OTHERS, noise=0.0, jitter=jitter)
    assert torch.allclose(found.mean, theory.gp_predict(KERNEL, INPUTS, TARGETS, OTHERS, noise=0.0).mean, atol=1e-5)


def test_bad_input_of_a_regression_is_refused():
    given = partial(theory.gp_predict, KERNEL)
    good, fewer = (INPUTS, TARGETS, OTHERS), (INPUTS, TARGETS[:5], OTHERS)
    narrow = (INPUTS[:, :2], TARGETS, OTHERS[:, :2])
    refuses(lambda: given(*good, noise=0.1, kind="gp"), "expected kind of nngp, ntk, got 'gp'")
    refuses(lambda: given(*fewer, noise=0.1), r"expected 6 targets, \(N,\) or \(N, D\), got \(5,\)")
    refuses(lambda: given(*narrow, noise=0.1), "expected inputs of width 3, got 2")
    refuses(lambda: given(*good, noise=-1), "expected noise of at least 0, got -1")


@pytest.mark.parametrize("p", [0.0, 0.084, 0.168, 0.5])
def test_the_largest_eigenvalue_is_that_of_random_matrices(p):
    generator = torch.Generator().manual_seed(0)
    found, overlap = theory.toy_spectrum(100, 1000, p=p, draws=20, generator=generator)
    assert found == pytest.approx(theory.largest_eigenvalue(100, 1000, p), rel=0.03)
    assert (overlap < 0.1) if p == 0 else (overlap > 0.6)


def test_the_transition_is_where_the_two_formulas_meet():
    point = theory.transition(100, 1000)
    assert point == pytest.approx(0.056, abs=1e-3)
    below, above = (theory.largest_eigenvalue(100, 1000, point + step) for step in (-1e-6, 1e-6))
    assert below == pytest.approx(above, abs=1e-4)
    assert theory.largest_eigenvalue(100, 1000, 1.0) == 100


def test_losses_are_those_of_descent_on_random_weights():
    """Gradient flow by small steps on drawn weights, for one draw of modulations."""
    members, width, t = 5, 40, torch.tensor([0.0, 1.5], dtype=torch.float64)
    found = theory.toy_losses(members, width, t, p=0.3, draws=1, generator=torch.Generator().manual_seed(4))
    generator = torch.Generator().manual_seed(4)
    u = 0.3 + (1 - 0.09) ** 0.5 * torch.randn(members, width, generator=generator, dtype=torch.float64)
    n = 20_000
    f = u @ torch.randn(width, n, generator=generator, dtype=torch.float64) / width**0.5
    a = u @ u.T / width
    left = torch.linalg.matrix_exp(-1.5 * a / torch.linalg.eigvalsh(a)[-1])
    for when, residual in ((0, f - 1), (1, left @ (f - 1))):
        single, joint = residual.square().mean(0), residual.mean(0).square()
        for expected, draws in ((found.individual[when], single), (found.ensemble[when], joint)):
            assert float(draws.mean()) == pytest.approx(float(expected), abs=4 * float(draws.std()) / n**0.5)


def test_the_best_size_grows_as_the_cube_root_of_the_width():
    assert theory.optimal_members(8000, 1.0) / theory.optimal_members(1000, 1.0) == pytest.approx(2)
    assert theory.optimal_members(1000, 1.0) == pytest.approx(6.3, abs=0.01)
    sizes, generator = range(1, 11), torch.Generator().manual_seed(0)
    times, best = torch.tensor([1.0], dtype=torch.float64), {}
    for width in (100, 1000):
        losses = [float(theory.toy_losses(m, width, times, draws=100, generator=generator).ensemble) for m in sizes]
        best[width] = sizes[losses.index(min(losses))]
    assert best[100] in (2, 3)
    assert best[1000] in (4, 5, 6)
    refuses(lambda: theory.optimal_members(100, 0), "expected time above 0, got 0")


def test_losses_before_training_began_are_an_error():
    with pytest.raises(ValueError, match=r"expected times of at least 0, got -1.0"):
        theory.toy_losses(2, 4, torch.tensor([0.0, -1.0], dtype=torch.float64))


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
    for _ in range(60):
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
