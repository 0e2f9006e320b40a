"""Gates and the promises behind them: risks of accepted inputs, exact p-values, order statistics, files and bad input."""

import math

import pytest
import torch

import dissensus as ds
import tiny
from dissensus.calibration.conformal import least_rows, sort_with_mass, weighted_quantile
from dissensus.calibration.selective import binomial_bound, binomial_tail, errorless_rows, least_risk, safe_threshold
from refusals import refuses
from thinning import often


def classified(n, *, sharp=3.0):
    """(logits (n, 4), labels that follow their probabilities)."""
    x = sharp * torch.randn(n, 4, dtype=torch.float64)
    return x, torch.multinomial(x.softmax(1), 1)[:, 0]


@pytest.mark.parametrize("score", often(["total"], ["max_probability"]))
def test_accepted_inputs_keep_the_risk(score):
    posterior, wrong = ds.MAP(tiny.Scaled()), 0
    x, y = classified(20_000)
    for _ in range(20):
        gate = ds.selective(posterior, [classified(1000)], risk=0.1, confidence=0.9, score=score)
        accept, scores, predictive = gate(x)
        error = (predictive.mean.argmax(1) != y)[accept].double().mean()
        wrong += float(error) > 0.1
        assert 0.3 < float(accept.double().mean()) < 1
        assert torch.equal(accept, scores < gate.threshold)
    assert wrong <= 6  # 2 expected: more than 6 of 20 have a chance of 0.2 %


def test_a_gate_counts_what_its_rows_showed():
    posterior, (x, y) = ds.MAP(tiny.Scaled()), classified(500)
    gate = ds.selective(posterior, [(x[:200], y[:200]), (x[200:], y[200:])], risk=0.2)
    found = gate(x)
    assert gate.facts["accepted"] == int(found.accept.sum())
    assert gate.facts["errors"] == int((x.argmax(1) != y)[found.accept].sum())
    assert gate(posterior.predict(x)).accept.equal(found.accept)
    assert "at most 20 % are wrong, with confidence 0.95" in gate.describe()


@pytest.mark.parametrize(("former", "score"), [("entropy", "total"), ("mutual_information", "epistemic")])
def test_a_gate_saved_under_a_former_name_of_its_score_decides_alike(former, score, tmp_path):
    posterior, (x, y) = ds.DeepEnsemble([ds.nets.MLP(4, 3, hidden=(8,)) for _ in range(3)]), classified(100)
    ds.ood_gate(posterior, [(x := x.float(), y)], score=score).facts["score"] = former
    ds.save(posterior, tmp_path / "run")
    now, saved = (each.promises["ood_gate"](x) for each in (posterior, ds.load(tmp_path / "run")))
    assert torch.equal(now.score, saved.score)


def test_disagreement_can_be_the_score():
    members = [ds.nets.MLP(4, 3, hidden=(8,)) for _ in range(3)]
    posterior, x = ds.DeepEnsemble(members), torch.randn(300, 4)
    y = posterior.predict(x).mean.argmax(1)
    gate = ds.selective(posterior, [(x, y)], score="epistemic")
    assert gate.threshold == math.inf  # 300 rows without an error: everything
    assert gate(100 * x).accept.all()


def test_where_no_threshold_keeps_the_risk_that_is_said(caplog):
    x, y = classified(400, sharp=1.5)
    with caplog.at_level("WARNING", "dissensus"):
        gate = ds.selective(ds.MAP(tiny.Scaled()), [(x, y)])
    assert not gate(x).accept.any()
    assert "needs 299 accepted rows" in caplog.text
    assert "could be promised" in caplog.text
    assert "nothing is accepted" in gate.describe()


def test_a_score_that_says_nothing_is_named(caplog):
    """One member does not disagree with itself."""
    with caplog.at_level("WARNING", "dissensus"):
        ds.ood_gate(ds.MAP(tiny.Scaled()), [classified(50)], score="epistemic")
    assert "all 50 rows have the same epistemic" in caplog.text


def test_a_regression_is_wrong_beyond_its_tolerance():
    def data(n):
        x = torch.randn(n, 1, dtype=torch.float64)
        return x, x + torch.where(torch.rand_like(x) < 0.02, 3.0, 0.1) * torch.randn_like(x).sign()

    posterior = ds.MAP(tiny.Scaled(), likelihood=ds.Regression(noise=0.5))
    gate = ds.selective(posterior, [data(600)], risk=0.05, tolerance=1.0)
    assert gate.threshold == math.inf  # all variances are alike, and 2 % are wrong
    assert gate.facts["errors"] < 30
    refuses(lambda: ds.selective(posterior, [data(600)]), "tolerance")


def test_false_alarms_are_as_rare_as_asked():
    posterior, found = ds.MAP(tiny.Scaled()), []
    for _ in range(40):
        gate = ds.ood_gate(posterior, [classified(200)], false_alarm=0.1)
        found.append(float((~gate(classified(400)[0]).accept).double().mean()))
    mean = 1 - math.ceil(201 * 0.9 - 1e-9) / 201
    error = math.sqrt(mean * (1 - mean) * (1 / 200 + 1 / 400) / 40)
    assert abs(sum(found) / 40 - mean) < 3 * error
    assert float(gate(0.01 * classified(400)[0]).accept.double().mean()) < 0.1  # flat logits are foreign


def test_the_rule_of_false_alarms_is_an_order_statistic_and_labels_are_not_read():
    posterior, (x, _) = ds.MAP(tiny.Scaled()), classified(99)
    gate = ds.ood_gate(posterior, [(x, torch.full((99,), 77))], false_alarm=0.05)
    assert int(gate(x).accept.sum()) == 95
    refuses(lambda: ds.ood_gate(posterior, [(x[:18], x[:18, 0])]), "at least 19 rows")
    assert int(ds.ood_gate(posterior, [(x[:19], x[:19, 0])])(x[:19]).accept.sum()) == 19


@pytest.mark.parametrize("nudge", [-3e-7, 3e-7])
def test_equal_inputs_are_accepted_alike_in_a_batch_of_one(nudge):
    """Kernels for one row have other last digits, and where inputs repeat many rows have the score at the threshold."""

    class Rounded(tiny.Scaled):
        def forward(self, x):
            return super().forward(x) * (1 + nudge * (len(x) == 1))

    posterior = ds.MAP(Rounded().float())
    x = torch.tensor([[4.0, 0.0], [2.0, 0.0], [1.0, 0.0]]).repeat(200, 1)
    y = (x[:, 0] == 1.0).long()  # the least sure third is wrong
    gates = [ds.selective(posterior, [(x, y)], risk=0.05), ds.ood_gate(posterior, [(x, y)], false_alarm=0.5)]
    for gate in gates:
        assert torch.cat([gate(x[at : at + 1]).accept for at in range(3)]).tolist() == [True, True, False]


def test_gates_are_saved_with_the_posterior(tmp_path):
    posterior = ds.MAP(ds.nets.MLP(4, 3, hidden=(5,)))
    x = torch.randn(60, 4)
    y = posterior.predict(x).mean.argmax(1)
    gate = ds.selective(posterior, [(x, y)], risk=0.1)
    nothing = ds.selective(posterior, [(x, (y + 1) % 3)], risk=0.1, name="nothing")
    alarm = ds.ood_gate(posterior, [(x, y)])
    ds.save(posterior, tmp_path)
    again = ds.load(tmp_path)
    for name, one in (("selective", gate), ("nothing", nothing), ("ood_gate", alarm)):
        same = again.promises[name]
        assert isinstance(same, ds.Gate)
        assert (same.threshold, same.facts) == (one.threshold, one.facts)
        assert same(x).accept.equal(one(x).accept)
    assert not nothing(x).accept.any()


def test_a_gate_does_not_pass_to_a_state_that_has_none(caplog):
    """What else stands on both posteriors is in the state, and stays."""
    posteriors = [ds.MAP(ds.nets.MLP(4, 3, hidden=(5,))) for _ in range(2)]
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    for posterior in posteriors:
        ds.conformal(posterior, [(x, y)])
    gate = ds.ood_gate(posteriors[0], [(x, y)])
    posteriors[0].load_state_dict(posteriors[1].state_dict())
    sets = [posterior.promises["conformal"].set(x) for posterior in posteriors]
    assert torch.equal(*sets)
    assert "the loaded state has no ood_gate, which is dropped" in caplog.text
    refuses(lambda: gate(x), "present predictions")


def test_bad_input_is_refused():
    posterior, (x, y) = ds.MAP(tiny.Scaled()), classified(298)
    refuses(lambda: ds.selective(posterior, [(x, y)]), "at least 299 rows for a risk of 0")
    refuses(lambda: ds.selective(posterior, [(x, y)], risk=0.1, score="cqr"), "a classification has these")
    refuses(lambda: ds.ood_gate(posterior, [(x, y)], score="entropy"), "pass 'total'")
    refuses(lambda: ds.selective(posterior, [(x, y, torch.rand(298))], risk=0.1), "rows of equal weight")
    refuses(lambda: ds.selective(posterior, [(x, y)], risk=0.1, tolerance=1.0), "no tolerance")
    for name in ("risk", "confidence"):
        with pytest.raises(ValueError, match=name):
            ds.selective(posterior, [(x, y)], **{name: 1.0})
    refuses(lambda: ds.ood_gate(posterior, [(x, y)], false_alarm=0), "false_alarm")


# ---------------------------------------------------------------------------------------------- thresholds with a risk
def test_the_fewest_rows_without_an_error():
    assert [errorless_rows(*each) for each in ((0.01, 0.05), (0.05, 0.05), (0.1, 0.1), (0.5, 0.5), (0.5, 0.25))] == [
        299, 59, 22, 1, 2,
    ]  # fmt: skip


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
    least = lambda j: math.log(delta / j) / math.log(1 - risk) * 2 ** (j - 1)  # noqa: E731
    count = max(j for j in range(1, 12) if j == 1 or least(j) <= len(pairs))
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


@pytest.mark.parametrize(("law", "risk", "ordered", "least"), [
    (STEEP, 0.05, True, 0.45),
    pytest.param(FLAT, 0.05, True, 0.0, marks=pytest.mark.slow),
    pytest.param(STEEP, 0.05, False, 0.3, marks=pytest.mark.slow),
    pytest.param(FLAT, 0.05, False, 0.0, marks=pytest.mark.slow),
    pytest.param(BOWL, 0.05, True, 0.1, marks=pytest.mark.slow),
    pytest.param(BOWL, 0.05, False, 0.05, marks=pytest.mark.slow),
    pytest.param(LOW, 0.01, True, 0.45, marks=pytest.mark.slow),
    pytest.param(LOW, 0.01, False, 0.3, marks=pytest.mark.slow),
])  # fmt: skip
def test_the_promise_is_broken_no_more_often_than_confidence_allows(law, risk, ordered, least):
    """In 400 calibrations at most 5 % and two standard errors, 7.2 %."""
    share, accepted = broken(*law, risk, runs=400, rows=400 if risk == 0.05 else 2000, ordered=ordered)
    assert share <= 0.072
    assert accepted >= least


def test_an_uncorrected_search_breaks_it():
    """What the sequence is for: the loosest threshold whose own test passes, of all that there are."""
    count = 0
    for _ in range(300):
        score = torch.rand(400, dtype=torch.float64)
        wrong = (torch.rand(400, dtype=torch.float64) < 0.055)[score.argsort()].long().cumsum(0)
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


# ---------------------------------------------------------------------------------------------------- order statistics
def thresholds(scores, level, weight=None, new=None):
    """(B, P) of scores (n, P)."""
    weight = torch.ones(len(scores), dtype=torch.float64) if weight is None else weight
    new = torch.ones(1, dtype=torch.float64) if new is None else new
    return weighted_quantile(*sort_with_mass(scores, weight), level, new)


def beta_binomial_error(n, level, tests, splits):
    """Standard error of the mean coverage over splits, of one whose tests are a beta-binomial."""
    mean = math.ceil((n + 1) * level - 1e-9) / (n + 1)
    of_threshold = mean * (1 - mean) / (n + 2)  # of Beta(k, n + 1 − k)
    return mean, math.sqrt((of_threshold + (mean * (1 - mean) - of_threshold) / tests) / splits)


@pytest.mark.parametrize("level", [0.9, 0.55, 0.7, 0.95, 0.99])
def test_the_threshold_is_the_order_statistic_that_exact_arithmetic_gives(level):
    from fractions import Fraction

    for n in (*range(1, 60), 99, 199, 999):
        rank = math.ceil((n + 1) * Fraction(str(level)))
        found = float(thresholds(torch.arange(1.0, n + 1, dtype=torch.float64)[:, None], level))
        assert found == (rank if rank <= n else math.inf)
        assert (n >= least_rows(level)) == (rank <= n)


def test_nine_rows_are_the_least_at_nine_tenths():
    assert [least_rows(level) for level in (0.5, 0.8, 0.9, 0.95, 0.99, 0.999)] == [1, 4, 9, 19, 99, 999]


@pytest.mark.parametrize("n", [100, 1000])
def test_mean_coverage_of_splits_is_that_of_the_beta_binomial(n):
    scores, new = torch.randn(n, 200, dtype=torch.float64), torch.randn(1000, 200, dtype=torch.float64)
    coverage = (new <= thresholds(scores, 0.9)).double().mean(0)  # (200,)
    mean, error = beta_binomial_error(n, 0.9, 1000, 200)
    assert error * 3 == pytest.approx({100: 0.007, 1000: 0.003}[n], abs=5e-4)
    assert abs(float(coverage.mean()) - mean) < 3 * error
    assert float(coverage.std()) == pytest.approx(error * math.sqrt(200), rel=0.2)


def test_scores_that_tie_cover_no_less():
    scores, new = torch.randint(4, (100, 200)).double(), torch.randint(4, (1000, 200)).double()
    mean, error = beta_binomial_error(100, 0.7, 1000, 200)
    coverage = float((new <= thresholds(scores, 0.7)).double().mean())
    assert mean + 3 * error < coverage  # three of four values: at least 0.75


def test_weights_are_those_of_tibshirani_row_by_row():
    """By the definition: the level-quantile of Σ p_i δ(s_i) + p δ(∞)."""
    scores, weight = torch.randn(30, 1, dtype=torch.float64), torch.rand(30, dtype=torch.float64)
    new = torch.tensor([0.0, 0.1, 1.0, 3.0, 1e9, math.inf], dtype=torch.float64)
    found = thresholds(scores, 0.8, weight, new)[:, 0]
    for w, q in zip(new.tolist(), found.tolist(), strict=True):
        share = weight / (weight.sum() + w)
        fits = [s for s in scores[:, 0].tolist() if float(share[scores[:, 0] <= s].sum()) >= 0.8]
        assert q == (min(fits) if fits else math.inf)
    assert found[-2:].tolist() == [math.inf, math.inf]


def test_a_known_shift_is_covered_with_weights_and_not_without():
    """Calibration x ~ U(0, 1), new x of density 2x, errors that grow with x: y − f(x) ~ N(0, x²)."""
    n, splits, tests = 300, 200, 500
    x, moved = torch.rand(n, splits, dtype=torch.float64), torch.rand(tests, splits, dtype=torch.float64).sqrt()
    scores, new = (x * torch.randn_like(x)).abs(), (moved * torch.randn_like(moved)).abs()
    plain = (new <= thresholds(scores, 0.9)).double().mean()
    covered = [
        (new[:, j] <= thresholds(scores[:, j : j + 1], 0.9, 2 * x[:, j], 2 * moved[:, j])[:, 0]).double().mean()
        for j in range(splits)
    ]
    error = 3 * float(torch.stack(covered).std()) / math.sqrt(splits)
    assert 0.9 - error < float(torch.stack(covered).mean()) < 0.9 + error + 2 / n
    assert float(plain) < 0.85


def test_no_rows_at_all_give_no_finite_threshold():
    assert thresholds(torch.empty(0, 2, dtype=torch.float64), 0.9).tolist() == [[math.inf, math.inf]]
