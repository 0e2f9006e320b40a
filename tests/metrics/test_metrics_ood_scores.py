"""OOD scores against their definitions, and where a softmax saturates."""

import math

import pytest
import scipy.special
import scipy.stats
import torch

from dissensus import metrics


def members(m=4, n=30, classes=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(2 * torch.randn(m, n, classes, dtype=torch.float64, generator=generator), dim=2)


def test_scores_equal_their_definitions():
    log_p = members()[0]
    torch.testing.assert_close(metrics.max_probability_score(log_p), -log_p.amax(1), rtol=0, atol=1e-14)
    entropy = scipy.stats.entropy(log_p.exp().numpy(), axis=1)
    torch.testing.assert_close(metrics.entropy_score(log_p), torch.from_numpy(entropy), rtol=0, atol=1e-14)
    logits = 3 * log_p + 1
    energy = -2 * scipy.special.logsumexp(logits.numpy() / 2, axis=1)
    torch.testing.assert_close(
        metrics.energy_score(logits, temperature=2.0), torch.from_numpy(energy), rtol=0, atol=1e-13
    )


def test_mutual_information_is_the_entropy_of_the_mixture_less_that_of_the_members():
    log_p = members()
    mixture = scipy.stats.entropy(log_p.exp().mean(0).numpy(), axis=1)
    own = scipy.stats.entropy(log_p.exp().numpy(), axis=2).mean(0)
    torch.testing.assert_close(
        metrics.mutual_information_score(log_p), torch.from_numpy(mixture - own), rtol=0, atol=1e-14
    )


def test_mutual_information_of_equal_members_is_zero_and_of_opposed_ones_log_m():
    same = members(m=1).expand(3, -1, -1)
    assert metrics.mutual_information_score(same).abs().max() < 1e-15
    opposed = torch.eye(3).log().unsqueeze(1)  # three members, each sure of its own class
    assert metrics.mutual_information_score(opposed).item() == pytest.approx(math.log(3), abs=1e-14)


def test_float32_log_probabilities_of_a_saturated_softmax_do_not_tie():
    margin = torch.arange(5.0, 80.0)  # from 1 − 0.007 to 1 − 1e-34: all but the first dozen round to 1 in float32
    log_p = torch.log_softmax(torch.stack([margin, torch.zeros_like(margin)], 1), dim=1)
    assert (log_p.exp().amax(1) == 1).sum() > 50
    exact = torch.log1p(torch.exp(-margin.double()))
    score = metrics.max_probability_score(log_p)
    assert len(score.unique()) == len(margin)
    torch.testing.assert_close(score, exact, rtol=1e-5, atol=0)
    p = torch.exp(-margin.double()) / (1 + torch.exp(-margin.double()))
    exact_entropy = p * (margin.double() + exact) + (1 - p) * exact
    torch.testing.assert_close(metrics.entropy_score(log_p), exact_entropy, rtol=1e-5, atol=0)


def test_certain_predictions_have_score_zero():
    log_p = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    assert metrics.max_probability_score(log_p).item() == 0
    assert metrics.entropy_score(log_p).item() == 0
    assert metrics.mutual_information_score(log_p.expand(2, 1, 3)).item() == 0


def test_pixels_keep_their_places():
    log_p = members(m=3, n=2 * 4 * 6).reshape(3, 2, 4, 6, 5)
    pixels = log_p.movedim(-1, 2)  # (M, N, C, H, W)
    for score in (metrics.max_probability_score, metrics.entropy_score, metrics.energy_score):
        maps = score(pixels[0])
        assert maps.shape == (2, 4, 6)
        torch.testing.assert_close(maps[1, 2, 3], score(log_p[0, 1, 2, 3].unsqueeze(0))[0], rtol=0, atol=1e-14)
    information = metrics.mutual_information_score(pixels)
    torch.testing.assert_close(
        information[1, 2, 3], metrics.mutual_information_score(log_p[:, 1, 2, 3].unsqueeze(1))[0], rtol=0, atol=1e-14
    )


def test_energy_refuses_a_temperature_of_zero():
    with pytest.raises(ValueError, match="expected temperature above 0"):
        metrics.energy_score(torch.zeros(2, 3), temperature=0.0)
