"""How members, predictives and chains differ: identities, brute force, closed forms, and Monte Carlo with known correlation."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from dissensus import metrics
from refusals import refuses


def ensemble(m=5, n=300, classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    log_p = torch.log_softmax(2 * torch.randn(m, n, classes, dtype=torch.float64, generator=generator), dim=2)
    return log_p, torch.randint(classes, (n,), generator=generator)


def test_mixture_nll_is_member_nll_less_diversity():
    members, y = ensemble()
    gain = metrics.ensemble_gain(members, y)
    mixture = metrics.nll(metrics.mixture_log_probabilities(members), y).item()
    each = np.mean([metrics.nll(member, y).item() for member in members])
    assert gain.mixture_nll.item() == pytest.approx((gain.member_nll - gain.diversity).item(), abs=1e-14)
    assert (gain.mixture_nll.item(), gain.member_nll.item()) == pytest.approx((mixture, each), abs=1e-14)
    assert gain.diversity > 0.1
    equal = metrics.ensemble_gain(members[:1].expand(4, -1, -1), y)
    assert equal.diversity.item() == pytest.approx(0, abs=1e-14)


def test_a_class_excluded_by_all_members_gains_nothing_and_by_some_infinitely_much():
    log_likelihood = torch.tensor([[0.5, 0.0], [0.5, 0.0]], dtype=torch.float64).log()
    assert [v.item() for v in metrics.ensemble_gain_of(log_likelihood)] == [math.inf, math.inf, 0]
    log_likelihood = torch.tensor([[0.5], [0.0]], dtype=torch.float64).log()
    expected = [pytest.approx(math.log(4)), math.inf, math.inf]
    assert [v.item() for v in metrics.ensemble_gain_of(log_likelihood)] == expected


def test_the_split_holds_for_any_likelihood():
    generator = torch.Generator().manual_seed(0)
    means, y = torch.randn(3, 20, generator=generator), torch.randn(20, generator=generator)
    variances = torch.rand(3, 20, generator=generator) + 0.5
    log_likelihood = torch.distributions.Normal(means.double(), variances.double().sqrt()).log_prob(y.double())
    gain = metrics.ensemble_gain_of(log_likelihood)
    assert gain.mixture_nll.item() == pytest.approx(metrics.mixture_nll(means, variances, y).item(), abs=1e-12)
    assert gain.mixture_nll.item() == pytest.approx((gain.member_nll - gain.diversity).item(), abs=1e-14)


def test_mixture_is_the_mean_of_probabilities():
    members, _ = ensemble()
    mixture = metrics.mixture_log_probabilities(members).exp()
    torch.testing.assert_close(mixture, members.exp().mean(0), rtol=0, atol=1e-14)


def test_disagreement_equals_brute_force_over_pairs():
    members, _ = ensemble(m=4, n=50)
    votes = members.argmax(2)
    pairs = [(votes[i] != votes[j]).double().mean().item() for i in range(4) for j in range(i)]
    assert metrics.disagreement(members).item() == pytest.approx(np.mean(pairs), abs=1e-14)
    assert metrics.disagreement(members[:1].expand(3, -1, -1)).item() == 0
    assert metrics.disagreement(members[:1]).item() == 0


def test_pairwise_kl_equals_scipy():
    members, _ = ensemble(m=3, n=20)
    p = members.exp().numpy()
    expected = [[scipy.stats.entropy(p[i], p[j], axis=1).mean() for j in range(3)] for i in range(3)]
    np.testing.assert_allclose(metrics.pairwise_kl(members).numpy(), expected, rtol=0, atol=1e-13)
    # infinite only where mass is excluded
    members = torch.tensor([[[0.5, 0.5]], [[1.0, 0.0]]]).log()
    assert metrics.pairwise_kl(members).tolist() == [[0, math.inf], [pytest.approx(math.log(2)), 0]]


@pytest.mark.parametrize("m", [1, 2, 5, 20])
def test_identical_members_are_worth_one(m):
    members, y = ensemble(m=1)
    assert metrics.effective_members(members.expand(m, -1, -1), y).item() == pytest.approx(1, abs=1e-12)
    assert metrics.effective_members(members.float().expand(m, -1, -1), y).item() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("m", [2, 5, 20])
def test_members_independent_of_each_other_are_worth_m(m):
    members, y = ensemble(m=m, n=20000)
    # ρ̄ is a mean of m(m−1)/2 sample correlations of sd at most 1/√n each; M_eff ≈ M (1 − (M−1) ρ̄)
    error = 4 * m * (m - 1) * math.sqrt(2 / (m * (m - 1))) / math.sqrt(20000)
    assert metrics.effective_members(members, y).item() == pytest.approx(m, abs=error)


def test_good_members_whose_mistakes_are_independent_are_worth_m():
    # Each is right with probability 0.9, independently given the label: predictions agree a lot, mistakes do not.
    generator = torch.Generator().manual_seed(0)
    n, m, classes = 20000, 4, 3
    y = torch.randint(classes, (n,), generator=generator)
    wrong = torch.rand(m, n, generator=generator) < 0.1
    vote = torch.where(wrong, torch.randint(classes, (m, n), generator=generator), y)
    p = 0.85 * torch.eye(classes, dtype=torch.float64)[vote] + 0.05
    assert metrics.disagreement(p.log()) < 0.15
    assert metrics.effective_members(p.log(), y).item() == pytest.approx(m, abs=4 * m * math.sqrt(6 / n))


def test_members_in_identical_pairs_are_worth_half_their_number():
    members, y = ensemble(m=3, n=20000)
    error = 4 * 3 * math.sqrt(3 / 20000)
    assert metrics.effective_members(members.repeat(2, 1, 1), y).item() == pytest.approx(3, abs=error)


def test_effective_members_is_m_over_one_plus_m_minus_one_rho():
    members, y = ensemble(m=4, n=200)
    shared = torch.randn(200, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    members = torch.log_softmax(members + 2 * shared, dim=2)
    e = members.exp().numpy().copy()
    for m in range(4):
        for c in range(4):
            e[m, y.numpy() == c] -= e[m, y.numpy() == c].mean(0)
    gram = np.einsum("mnc,knc->mk", e, e)
    rho = (gram.sum() - np.trace(gram)) / 3 / np.trace(gram)
    assert 0.2 < rho < 0.9
    assert metrics.effective_members(members, y).item() == pytest.approx(4 / (1 + 3 * rho), abs=1e-12)


def test_opposed_members_are_worth_at_most_m_and_those_constant_within_classes_one():
    p = torch.tensor([0.3, 0.7, 0.6, 0.2], dtype=torch.float64)
    pair = torch.stack([torch.stack([p, 1 - p], 1), torch.stack([1 - p, p], 1)])
    assert metrics.effective_members(pair.log(), torch.zeros(4, dtype=torch.long)).item() == 2
    y = torch.tensor([0, 1, 1, 0])
    assert metrics.effective_members(torch.eye(2)[y].log().expand(3, -1, -1), y).item() == 1


def test_void_pixels_are_left_out_of_every_count():
    members, y = ensemble(m=3, n=24)
    pixels, labels = members.reshape(3, 2, 3, 4, 4).movedim(-1, 2), y.reshape(2, 3, 4).clone()
    labels[1, 2] = 9
    kept = labels.flatten() != 9
    for metric in (metrics.effective_members, lambda *a, **k: metrics.ensemble_gain(*a, **k).mixture_nll):
        expected = metric(members[:, kept], y[kept]).item()
        assert metric(pixels, labels, ignore_index=9).item() == pytest.approx(expected, abs=1e-13)


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.8, 1.0])
def test_regression_members_with_known_error_correlation(rho):
    # f_m = y + e_m with e jointly normal, correlation ρ: M_eff = M / (1 + (M − 1) ρ)
    generator = torch.Generator().manual_seed(0)
    n, m = 40000, 5
    y = 3 * torch.randn(n, 1, dtype=torch.float64, generator=generator)
    shared = torch.randn(1, n, 1, dtype=torch.float64, generator=generator)
    own = torch.randn(m, n, 1, dtype=torch.float64, generator=generator)
    value = metrics.effective_members_regression(y + math.sqrt(rho) * shared + math.sqrt(1 - rho) * own, y).item()
    expected = m / (1 + (m - 1) * rho)
    # sd of ρ̄ is at most √2/√n, and |dM_eff/dρ| = M_eff² (M − 1)/M
    assert value == pytest.approx(expected, abs=4 * expected**2 * (m - 1) / m * math.sqrt(2 / n) + 1e-12)


def test_untrained_regression_members_are_worth_m_as_well():
    generator = torch.Generator().manual_seed(0)
    means, y = torch.randn(4, 20000, generator=generator), 5 * torch.randn(20000, generator=generator)
    for targets in (y, torch.ones(20000)):
        found = metrics.effective_members_regression(means, targets).item()
        assert found == pytest.approx(4, abs=4 * 4 * math.sqrt(6 / 20000))
    refuses(lambda: metrics.effective_members_regression(means.T, y), "put the members on axis 0")


# --------------------------------------------------------------------------------------- agreement and total variation
def test_agreement_and_total_variation_are_sums_by_hand():
    p = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.5, 0.4], [0.3, 0.3, 0.4]])
    q = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.3, 0.3, 0.4]])
    assert float(metrics.agreement(p, q)) == pytest.approx(2 / 3)
    assert metrics.total_variation_values(p, q).tolist() == pytest.approx([0.2, 0.2, 0.0], abs=1e-7)
    assert float(metrics.total_variation(p, q)) == pytest.approx(0.4 / 3)
    assert float(metrics.total_variation(p, p)) == 0
    assert float(metrics.total_variation(torch.eye(3), torch.eye(3).roll(1, 0))) == 1


def test_segmentations_count_every_pixel():
    p, q = torch.randn(2, 2, 3, 4, 5).softmax(2)
    flat = [each.movedim(1, -1).reshape(-1, 3) for each in (p, q)]
    assert float(metrics.total_variation(p, q)) == pytest.approx(float(metrics.total_variation(*flat)))
    assert float(metrics.agreement(p, q)) == pytest.approx(float(metrics.agreement(*flat)))


@pytest.mark.parametrize("apart", [0.0, 0.5, 3.0, 40.0])
def test_two_gaussians_have_the_total_variation_of_the_closed_form(apart):
    """2 Φ(d / 2σ) − 1 of N(0, σ²) and N(d, σ²)."""
    sigma = 0.7
    means, variances = torch.zeros(1, 2, 1), torch.full((1, 2, 1), sigma**2)
    expected = math.erf(apart / (2 * sigma) / math.sqrt(2))
    found = metrics.mixture_total_variation(means, variances, means + apart, variances)
    assert float(found) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("mode", "variance"), [(5.0, 1.0), (500.0, 0.01)])
def test_one_of_two_modes_is_half_the_distribution_though_narrow_and_far_apart(mode, variance):
    means, variances = torch.tensor([-mode, mode]).view(2, 1, 1), torch.full((2, 1, 1), variance)
    found = metrics.mixture_total_variation(means, variances, means[1:], variances[1:])
    assert float(found) == pytest.approx(0.5, abs=1e-4)


def test_shapes_that_differ_are_refused():
    refuses(lambda: metrics.agreement(torch.ones(2, 1), torch.ones(3, 1)), "same shape")
    two, three = ([torch.ones(1, n, 1)] * 2 for n in (2, 3))
    refuses(lambda: metrics.mixture_total_variation(*two, *three), "same N inputs")


# --------------------------------------------------------------------------------------- R̂ and effective sample sizes
def autoregressive(rho, chains=4, count=5000, seed=0):
    """(chains, count) of x_t = ρ x_{t−1} + √(1 − ρ²) ξ_t, stationary."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, chains, generator=generator, dtype=torch.float64)
    rows = [noise[0]]
    for each in noise[1:]:
        rows.append(rho * rows[-1] + (1 - rho**2) ** 0.5 * each)
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_the_effective_size_of_an_autoregression_is_its_closed_form(rho):
    """n (1 − ρ) / (1 + ρ): estimated within 20 %, about three standard errors at ρ = 0.9."""
    found = float(metrics.effective_sample_size(autoregressive(rho)))
    assert found == pytest.approx(20000 * (1 - rho) / (1 + rho), rel=0.2)


def test_rhat_is_one_for_chains_that_mix_and_large_for_chains_in_two_modes():
    good = autoregressive(0.5)
    assert float(metrics.split_rhat(good)) < 1.005
    modes = torch.tensor([-1.0, -1.0, 1.0, 1.0], dtype=torch.float64)[:, None]
    # Means ±m and variance 1 within: √(1 + m² · 8/7), of 8 halves.
    for apart in (0.5, 3.0):
        expected = (1 + apart**2 * 8 / 7) ** 0.5
        assert float(metrics.split_rhat(good + apart * modes)) == pytest.approx(expected, rel=0.02)
    assert float(metrics.split_rhat(good + 0.5 * modes)) > 1.1
    assert float(metrics.effective_sample_size(good + 3 * modes)) < 20
    drift = autoregressive(0.0) + torch.linspace(0, 3, 5000, dtype=torch.float64)
    assert float(metrics.split_rhat(drift)) > 1.1  # seen by its halves


def test_draws_keep_their_axes_constants_count_as_converged_and_alternating_draws_as_their_number():
    draws = torch.stack([autoregressive(0.2), torch.ones(4, 5000)], dim=-1)
    assert metrics.split_rhat(draws).shape == metrics.effective_sample_size(draws).shape == (2,)
    assert float(metrics.split_rhat(draws)[1]) == 1
    assert float(metrics.effective_sample_size(draws)[1]) == 20000
    stuck = torch.arange(4.0)[:, None].expand(4, 10)
    assert float(metrics.split_rhat(stuck)) == float("inf")
    assert float(metrics.effective_sample_size(stuck)) < 10
    assert float(metrics.effective_sample_size(autoregressive(-0.8))) == 20000
    refuses(lambda: metrics.split_rhat(torch.randn(4, 3)), "S ≥ 4")
