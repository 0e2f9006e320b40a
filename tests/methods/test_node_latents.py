"""Cross-entropy, entropy bounds and KL of mixtures over node latents against golden values, closed forms and Monte Carlo."""

import math

import pytest
import torch
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal, kl_divergence

from dissensus.methods.parts.node_latents import (
    RELEASED,
    bhattacharyya,
    component_entropies,
    cross_entropy,
    entropy_bound,
    inverse_softplus,
    surrogate_kl,
)

MEAN = torch.tensor([[1.0, 0.8], [1.2, 1.1]], dtype=torch.float64)
STD = torch.tensor([[0.3, 0.2], [0.25, 0.4]], dtype=torch.float64)


def mixture(mean, std):
    weights = Categorical(torch.ones(len(mean), dtype=mean.dtype))
    return MixtureSameFamily(weights, Independent(Normal(mean, std), 1))


def random_mixture(generator, components, latents):
    mean = 1 + 0.3 * torch.randn(components, latents, dtype=torch.float64, generator=generator)
    return mean, 0.05 + 0.5 * torch.rand(components, latents, dtype=torch.float64, generator=generator)


def test_the_golden_values_of_two_components():
    assert float(bhattacharyya(MEAN, STD).sum(2)[0, 1]) == pytest.approx(0.297910, abs=1e-6)
    assert float(bhattacharyya(MEAN, STD, factor=RELEASED).sum(2)[0, 1]) == pytest.approx(0.164355, abs=1e-6)
    assert float(entropy_bound(MEAN, STD)) == pytest.approx(0.417781, abs=1e-6)
    assert float(entropy_bound(MEAN, STD, factor=RELEASED)) == pytest.approx(0.358684, abs=1e-6)


def test_the_mixture_entropy_of_the_golden_components_lies_above_both_bounds():
    torch.manual_seed(0)
    q = mixture(MEAN, STD)
    log_q = q.log_prob(q.sample((100_000,)))
    error = float(log_q.std()) / len(log_q) ** 0.5
    assert -float(log_q.mean()) == pytest.approx(0.4969, abs=4 * error + 1e-4)


def test_the_distance_of_a_component_from_itself_is_0_and_symmetric_between_two():
    distance = bhattacharyya(MEAN, STD).sum(2)
    torch.testing.assert_close(distance.diagonal(), torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(distance, distance.T, rtol=0, atol=1e-15)


def test_the_entropy_bound_lies_below_a_monte_carlo_estimate_in_random_mixtures():
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    exact_tighter = 0
    for i in range(60):
        mean, std = random_mixture(generator, components=1 + i % 6, latents=1 + i % 9)
        q = mixture(mean, std)
        log_q = q.log_prob(q.sample((2000,)))
        error = float(log_q.std()) / len(log_q) ** 0.5
        bound, loose = float(entropy_bound(mean, std)), float(entropy_bound(mean, std, factor=RELEASED))
        assert loose <= bound + 1e-12
        assert bound <= -float(log_q.mean()) + 4 * error
        exact_tighter += bound > loose + 1e-9
    assert exact_tighter > 45  # all but the mixtures of one component


def test_components_far_apart_earn_log_k_and_equal_ones_nothing():
    std = torch.full((4, 3), 0.1, dtype=torch.float64)
    alone = component_entropies(std)[0]
    far = entropy_bound(torch.arange(4.0, dtype=torch.float64)[:, None].expand(4, 3) * 100, std)
    assert float(far - alone) == pytest.approx(math.log(4), abs=1e-12)
    assert float(entropy_bound(torch.ones_like(std), std) - alone) == pytest.approx(0.0, abs=1e-12)


def test_bounding_every_layer_alone_counts_log_k_once_for_each_and_is_the_sum_over_layers():
    generator = torch.Generator().manual_seed(2)
    mean, std = random_mixture(generator, components=3, latents=7)
    layers = zip(mean.split([2, 4, 1], 1), std.split([2, 4, 1], 1), strict=True)
    expected = sum(entropy_bound(m, s) for m, s in layers)
    torch.testing.assert_close(entropy_bound(mean, std, widths=[2, 4, 1]), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy_bound(mean, std, widths=[7]), entropy_bound(mean, std), rtol=0, atol=1e-12)
    far = torch.arange(3.0, dtype=torch.float64)[:, None].expand(3, 7) * 100
    extra = entropy_bound(far, std, widths=[2, 4, 1]) - entropy_bound(far, std)
    assert float(extra) == pytest.approx(2 * math.log(3), abs=1e-9)


def test_the_kl_is_0_where_one_component_is_the_prior():
    ones, std = torch.ones(1, 5, dtype=torch.float64), torch.full((1, 5), 0.3, dtype=torch.float64)
    assert float(cross_entropy(ones, std, 0.3) - entropy_bound(ones, std)) == pytest.approx(0.0, abs=1e-12)
    assert float(surrogate_kl(ones, std, 0.3)) == pytest.approx(0.0, abs=1e-12)


def test_the_kl_of_one_component_is_that_of_two_gaussians():
    generator = torch.Generator().manual_seed(3)
    mean, std = random_mixture(generator, components=1, latents=6)
    prior = Normal(torch.ones_like(mean), torch.full_like(std, 0.3))
    expected = kl_divergence(Normal(mean, std), prior).sum()
    torch.testing.assert_close(cross_entropy(mean, std, 0.3) - entropy_bound(mean, std), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(surrogate_kl(mean, std, 0.3), expected, rtol=1e-12, atol=0)


def test_the_surrogate_is_the_kl_of_the_average_of_the_components():
    centre, deviation = MEAN.mean(0), STD.square().sum(0).sqrt() / 2
    prior = Normal(torch.ones(2, dtype=torch.float64), torch.full((2,), 0.1, dtype=torch.float64))
    expected = kl_divergence(Normal(centre, deviation), prior).sum()
    torch.testing.assert_close(surrogate_kl(MEAN, STD, 0.1), expected, rtol=1e-12, atol=0)


def test_the_cross_entropy_is_the_mean_of_the_log_prior_under_the_mixture():
    torch.manual_seed(4)
    z = mixture(MEAN, STD).sample((100_000,))
    log_p = Normal(1.0, 0.3).log_prob(z).sum(1)
    error = float(log_p.std()) / len(log_p) ** 0.5
    assert float(cross_entropy(MEAN, STD, 0.3)) == pytest.approx(-float(log_p.mean()), abs=4 * error)


def test_raw_std_is_the_inverse_of_softplus_from_small_to_large():
    std = torch.tensor([1e-4, 0.02, 0.3, 5.0, 50.0], dtype=torch.float64)
    torch.testing.assert_close(torch.nn.functional.softplus(inverse_softplus(std)), std, rtol=1e-12, atol=0)
