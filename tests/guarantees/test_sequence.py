"""Thresholds with a risk: exact p-values, fixed sequences, and a promise that holds in simulated calibrations."""

import math

import pytest
import torch
from scipy.stats import beta, binom

from dissensus.guarantees.sequence import (
    binomial_bound,
    binomial_tail,
    errorless_rows,
    least_risk,
    safe_threshold,
)


def test_the_fewest_rows_without_an_error():
    assert [errorless_rows(*each) for each in ((0.01, 0.05), (0.05, 0.05), (0.1, 0.1), (0.5, 0.5), (0.5, 0.25))] == [
        299,
        59,
        22,
        1,
        2,
    ]


def test_p_values_and_bounds_are_scipys():
    rows = torch.tensor([299, 299, 500, 2000, 0])
    errors = torch.tensor([0, 1, 3, 12, 0])
    expected = torch.from_numpy(binom.cdf(errors.numpy(), rows.numpy(), 0.01))
    torch.testing.assert_close(binomial_tail(errors, rows, 0.01), expected, rtol=1e-10, atol=0)
    for k, n in ((0, 299), (3, 50), (49, 50)):
        assert binomial_bound(k, n, 0.05) == pytest.approx(beta.ppf(0.95, k + 1, n - k), rel=1e-9)
    assert binomial_bound(50, 50, 0.05) == 1.0


def by_hand(score, error, risk, delta):
    """The fixed sequence, one threshold after the other."""
    pairs = sorted(zip(score.tolist(), error.tolist(), strict=True))
    best = (-math.inf, 0, 0)
    for j in range(1, len(pairs) + 1):
        limit = pairs[j][0] if j < len(pairs) else math.inf
        below = [e for s, e in pairs if s < limit]
        if (1 - risk) ** len(below) > delta:
            continue
        if binom.cdf(sum(below), len(below), risk) > delta:
            break
        best = (limit, len(below), sum(below))
    return best


@pytest.mark.parametrize("values", [10_000, 25])
def test_the_sequence_is_that_of_the_definition_with_and_without_ties(values):
    for _ in range(4):
        score = torch.randint(values, (150,)).double() / values
        error = torch.rand(150) < 0.5 * score
        for risk in (0.05, 0.15, 0.3):
            assert tuple(safe_threshold(score, error, risk, 0.1)) == pytest.approx(by_hand(score, error, risk, 0.1))


def broken(error_rate, risk_below, risk, *, runs, rows, ordered, delta=0.05):
    """The share of calibrations whose threshold has a larger risk than promised; and the mean share accepted."""
    count, accepted = 0, 0.0
    for _ in range(runs):
        score = torch.rand(rows, dtype=torch.float64)
        error = torch.rand(rows, dtype=torch.float64) < error_rate(score)
        found = safe_threshold(score, error, risk, delta, ordered=ordered)
        reach = min(max(found.threshold, 0.0), 1.0)
        count += reach > 0 and risk_below(reach) > risk
        accepted += reach / runs
    return count / runs, accepted


# P(error | score) of scores U(0, 1), and its mean below a threshold; errors become more frequent, and, in the second, first fewer
STEEP = (lambda s: 0.1 * s**3, lambda t: 0.1 * t**3 / 4)
BOWL = (lambda s: torch.where(s < 0.02, 0.05, 0.1 * s**3), lambda t: (0.05 * min(t, 0.02) + 0.1 * (t**4 - min(t, 0.02) ** 4) / 4) / t)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("law", [STEEP, BOWL], ids=["steep", "bowl"])
def test_the_promise_is_broken_no_more_often_than_confidence_allows(law, ordered):
    """In 1,000 calibrations at most 5 % and two standard errors, 6.4 %."""
    share, accepted = broken(*law, 0.01, runs=1000, rows=1000, ordered=ordered)
    assert share <= 0.064
    assert accepted > 0.4  # and something is accepted: 0.73 is the most that keeps the risk


def test_an_uncorrected_search_breaks_it():
    """What the sequence is for: the loosest threshold whose own test passes, of all that there are."""
    count = 0
    for _ in range(300):
        score = torch.rand(1000, dtype=torch.float64)
        error = torch.rand(1000, dtype=torch.float64) < STEEP[0](score)
        wrong = error[score.argsort()].long().cumsum(0)
        passed = binomial_tail(wrong, torch.arange(1, 1001), 0.01) <= 0.05
        reach = float(score.sort().values[int(passed.nonzero()[-1])]) if passed.any() else 0.0
        count += STEEP[1](max(reach, 1e-9)) > 0.01
    assert count / 300 > 0.08


def test_where_nothing_can_be_promised_nothing_is_accepted():
    score, error = torch.rand(400), torch.zeros(400, dtype=torch.bool)
    assert safe_threshold(score, error, 0.01, 0.05).threshold == math.inf  # 400 without an error
    assert safe_threshold(score[:298], error[:298], 0.01, 0.05).accepted == 0
    error[score.argsort()[0]] = True  # one error among the surest: 299 + 1 do not pass, and the sequence ends there
    assert safe_threshold(score, error, 0.01, 0.05).threshold == -math.inf
    assert 0.01 < least_risk(score, error, 0.05) < 0.016
    assert least_risk(score, torch.ones(400, dtype=torch.bool), 0.05) is None


def test_equal_scores_are_accepted_together_or_not_at_all():
    score = torch.cat([torch.zeros(500), torch.ones(100)])
    error = torch.cat([torch.zeros(500), torch.ones(100)]).bool()
    assert safe_threshold(score, error, 0.01, 0.05) == (1.0, 500, 0)
