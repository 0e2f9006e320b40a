"""Thresholds with a risk: exact p-values, fixed sequences, and a promise that holds in simulated calibrations."""

import math

import pytest
import torch

from dissensus.calibration.selective import binomial_bound, binomial_tail, errorless_rows, least_risk, safe_threshold


def test_the_fewest_rows_without_an_error():
    assert [errorless_rows(*each) for each in ((0.01, 0.05), (0.05, 0.05), (0.1, 0.1), (0.5, 0.5), (0.5, 0.25))] == [
        299,
        59,
        22,
        1,
        2,
    ]


def tail(errors, rows, risk):
    """P(Bin(rows, risk) ≤ errors), term by term."""
    return sum(math.comb(rows, i) * risk**i * (1 - risk) ** (rows - i) for i in range(errors + 1))


def test_p_values_are_the_sums_they_stand_for_and_bounds_their_inverse():
    rows, errors = torch.tensor([299, 299, 500, 900, 0]), torch.tensor([0, 1, 3, 12, 0])
    expected = torch.tensor([tail(*each, 0.01) for each in zip(errors.tolist(), rows.tolist(), strict=True)])
    torch.testing.assert_close(binomial_tail(errors, rows, 0.01).float(), expected, rtol=1e-6, atol=0)
    for k, n in ((0, 299), (3, 50), (49, 50)):
        assert tail(k, n, binomial_bound(k, n, 0.05)) == pytest.approx(0.05, rel=1e-9)
    assert binomial_bound(50, 50, 0.05) == 1.0


def by_hand(score, error, risk, delta):
    """The fallback procedure, one threshold after the other."""
    pairs = sorted(zip(score.tolist(), error.tolist(), strict=True))
    count = max(
        j for j in range(1, 12) if j == 1 or math.log(delta / j) / math.log(1 - risk) * 2 ** (j - 1) <= len(pairs)
    )
    least = math.ceil(math.log(delta / count) / math.log(1 - risk))
    starts = [least * 2**i for i in range(count)]
    best, level, before = (-math.inf, 0, 0), 0.0, 0
    for j in range(1, len(pairs) + 1):
        limit = pairs[j][0] if j < len(pairs) else math.inf
        below = [e for s, e in pairs if s < limit]
        if len(below) == before:
            continue
        level += delta / count * sum(before < start <= len(below) for start in starts)
        if tail(sum(below), len(below), risk) <= level:
            best = (limit, len(below), sum(below))
        else:
            level = 0.0
        before = len(below)
    return best


@pytest.mark.parametrize("values", [10_000, 25])
def test_the_sequences_are_those_of_the_definition_with_and_without_ties(values):
    for _ in range(4):
        score = torch.randint(values, (150,)).double() / values
        error = torch.rand(150) < 0.5 * score
        for risk in (0.05, 0.15, 0.3):
            assert tuple(safe_threshold(score, error, risk, 0.1)) == by_hand(score, error, risk, 0.1)


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


# P(error | score) of scores U(0, 1), and its mean below a threshold
STEEP = (lambda s: 0.5 * s**3, lambda t: 0.5 * t**3 / 4)
FLAT = (lambda s: 0.0501, lambda t: 0.0501)  # every threshold has too large a risk, by little
BOWL = (  # the surest are wrong more often
    lambda s: torch.where(s < 0.02, 0.3, 0.5 * s**3),
    lambda t: (0.3 * min(t, 0.02) + 0.5 * (t**4 - min(t, 0.02) ** 4) / 4) / t,
)
LOW = (lambda s: 0.1 * s**3, lambda t: 0.1 * t**3 / 4)


@pytest.mark.parametrize(
    ("law", "risk", "ordered", "least"),  # least: share accepted, of 0.73 at most (0.62 of BOWL)
    [
        (STEEP, 0.05, True, 0.45),
        pytest.param(FLAT, 0.05, True, 0.0, marks=pytest.mark.slow),
        pytest.param(STEEP, 0.05, False, 0.3, marks=pytest.mark.slow),
        pytest.param(FLAT, 0.05, False, 0.0, marks=pytest.mark.slow),
        pytest.param(BOWL, 0.05, True, 0.1, marks=pytest.mark.slow),
        pytest.param(BOWL, 0.05, False, 0.05, marks=pytest.mark.slow),
        pytest.param(LOW, 0.01, True, 0.45, marks=pytest.mark.slow),
        pytest.param(LOW, 0.01, False, 0.3, marks=pytest.mark.slow),
    ],
)
def test_the_promise_is_broken_no_more_often_than_confidence_allows(law, risk, ordered, least):
    """In 1,000 calibrations at most 5 % and two standard errors, 6.4 %."""
    share, accepted = broken(*law, risk, runs=1000, rows=400 if risk == 0.05 else 2000, ordered=ordered)
    assert share <= 0.064
    assert accepted >= least


def test_an_uncorrected_search_breaks_it():
    """What the sequence is for: the loosest threshold whose own test passes, of all that there are."""
    count = 0
    for _ in range(300):
        score = torch.rand(400, dtype=torch.float64)
        error = torch.rand(400, dtype=torch.float64) < 0.055
        wrong = error[score.argsort()].long().cumsum(0)
        count += bool((binomial_tail(wrong, torch.arange(1, 401), 0.05) <= 0.05).any())
    assert count / 300 > 0.08  # the risk is 0.055 everywhere


def test_where_nothing_can_be_promised_nothing_is_accepted():
    score, error = torch.rand(400), torch.zeros(400, dtype=torch.bool)
    assert safe_threshold(score, error, 0.01, 0.05).threshold == math.inf  # 400 without an error
    assert safe_threshold(score[:298], error[:298], 0.01, 0.05).accepted == 0
    error[score.argsort()[0]] = True  # one error among the surest: 473 rows would pass
    assert safe_threshold(score, error, 0.01, 0.05).threshold == -math.inf
    assert 0.01 < least_risk(score, error, 0.05) < 0.02
    assert least_risk(score, torch.ones(400, dtype=torch.bool), 0.05) is None


def test_equal_scores_are_accepted_together_or_not_at_all():
    score = torch.cat([torch.zeros(500), torch.ones(100)])
    error = torch.cat([torch.zeros(500), torch.ones(100)]).bool()
    assert safe_threshold(score, error, 0.01, 0.05) == (1.0, 500, 0)
