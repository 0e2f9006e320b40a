"""Dynamics of wide ensembles: closed forms against step-by-step integration and against trained networks."""

from functools import partial

import pytest
import torch

from dissensus import Modulation, theory
from thinning import thinned

ONE, SIGN = Modulation.constant(1.0), Modulation.sign()
GENERATOR = torch.Generator().manual_seed(3)
X, POINTS = (torch.randn(n, 4, generator=GENERATOR, dtype=torch.float64) for n in (6, 3))
Y = torch.randn(6, 1, generator=GENERATOR, dtype=torch.float64)
KERNELS = partial(
    theory.embedded_kernels, depth=2, activation="relu", u=Modulation.normal(0.6, 0.8), v=ONE, weight_variance=2.0
)


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
        tolerance = 1e-10 if descent == "steps" else 1e-2
        assert torch.allclose(row.flatten(), seen[when], atol=tolerance)


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
    given = partial(theory.embedded_kernels, depth=2, activation="relu", u=SIGN, v=ONE, weight_variance=2.0)
    made = {m: theory.ensemble_dynamics(X, Y, POINTS, kernels=given, members=m, gamma=float(m)) for m in (1, 8)}
    assert torch.allclose(made[8].mean_eigenvalues, made[8].difference_eigenvalues)
    assert torch.allclose(made[8].mean_eigenvalues, made[1].mean_eigenvalues)
    one, eight = (made[m].law([20.0], learning_rate=0.1) for m in (1, 8))
    assert torch.allclose(eight.variance, one.variance / 8)
    assert torch.allclose(eight.mean, one.mean)


def test_collective_members_have_a_floor_and_frozen_differences():
    """Dropout's masks: the mean's variance stays above K_o's part, differences move slower as M grows at γ = 1."""
    given = partial(
        theory.embedded_kernels, depth=2, activation="relu", u=Modulation.bernoulli(0.8), v=ONE, weight_variance=2.0,
        trained="none",
    )  # fmt: skip
    made = {m: theory.ensemble_dynamics(X, Y, kernels=given, members=m, gamma=1.0) for m in (4, 400)}
    assert float(made[400].difference_eigenvalues[-1] / made[4].difference_eigenvalues[-1]) == pytest.approx(0.01)
    assert float(made[400].mean_eigenvalues[-1] / made[4].mean_eigenvalues[-1]) > 0.7
    assert (made[400].law([0.0], learning_rate=0.1).variance > 0.6 * given(X).gp_cross.diagonal()).all()


@pytest.mark.parametrize(
    ("u", "gamma"),
    [
        (SIGN, 4.0),
        (Modulation.normal(0.7, 0.714), 1.0),
        pytest.param(Modulation.bernoulli(0.8), 1.0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_trained_wide_ensemble_follows_the_prediction(u, gamma):
    """Width 1500, 60 steps at .1·B/λ_max: largest error over time under 10 % of the initial residual."""
    trained = "none" if u.law == "bernoulli" else "both"
    law = {"depth": 2, "activation": "relu", "u": u, "v": ONE, "weight_variance": 2.0}
    dynamics = theory.ensemble_dynamics(
        X, Y, kernels=partial(theory.embedded_kernels, **law, trained=trained), members=4, gamma=gamma
    )
    rate = 0.1 * dynamics.largest_rate / 2
    network = theory.EmbeddedNetwork.draw(
        4, width=1500, members=4, **law, generator=torch.Generator().manual_seed(0), dtype=torch.float32
    )
    outputs, after = theory.train_embedded(
        network, X.float(), Y.float(), steps=60, learning_rate=rate, gamma=gamma, train_modulations=trained == "both"
    )
    predicted = dynamics.members(outputs[0], range(61), learning_rate=rate, descent="steps")
    for mode in (lambda f: f.mean(1, keepdim=True).expand_as(f), lambda f: f - f.mean(1, keepdim=True)):
        error = (mode(outputs) - mode(predicted)).flatten(1).norm(dim=1).max()
        assert float(error / (outputs[0] - Y).norm()) < 0.1
    # The kernel stays what it was (in order 1/√N), and the finite network's own predicts better than the limit.
    before, now = (each.blocks(X.float()).total(gamma) for each in (network, after))
    assert float((before - now).norm() / before.norm()) < 0.05


def test_descent_under_a_measured_kernel():
    network = theory.EmbeddedNetwork.draw(
        4, width=200, depth=2, members=2, u=SIGN, v=ONE, weight_variance=2.0, generator=torch.Generator().manual_seed(0)
    )
    theta = network.blocks(X).total(2.0)
    start = (network(X) - Y).flatten()
    found = theory.residuals(theta, start, [0, 3], learning_rate=0.1, batch=6, descent="steps")
    step = torch.eye(12, dtype=torch.float64) - 0.1 / 6 * theta
    assert torch.allclose(found[1], step @ step @ step @ start, atol=1e-10)


def test_bad_input_is_refused():
    given = partial(theory.ensemble_dynamics, X, Y, kernels=KERNELS)
    with pytest.raises(ValueError, match="expected gamma above 0, got 0"):
        given(members=2, gamma=0)
    with pytest.raises(ValueError, match="expected targets for 6 inputs"):
        theory.ensemble_dynamics(X, Y[:5], kernels=KERNELS, members=2, gamma=1)
    dynamics = given(members=2, gamma=1)
    with pytest.raises(ValueError, match=r"expected initial outputs \(2, 6, 1\), got \(3, 6, 1\)"):
        dynamics.members(torch.zeros(3, 6, 1), [0], learning_rate=0.1)
    with pytest.raises(ValueError, match="expected whole numbers of steps"):
        dynamics.members(torch.zeros(2, 6, 1), [0.5], learning_rate=0.1, descent="steps")
    with pytest.raises(ValueError, match="expected a kernel without negative eigenvalues, got -1"):
        theory.residuals(torch.diag(torch.tensor([1.0, -1.0])), torch.ones(2), [1], learning_rate=0.1, batch=2)
