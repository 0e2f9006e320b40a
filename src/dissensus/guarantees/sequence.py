"""Which thresholds keep a risk, by exact tests in a fixed sequence (Learn-then-Test, Angelopoulos et al. 2021).

Rows are sorted by how unsure they are. Threshold number j accepts what is below the (j + 1)-th smallest score, so that j rows are
accepted, and the last one everything. Given that score, the j rows below it are a sample of their own from the inputs below it:
of those the errors are binomial, and P(Bin(j, risk) ≤ errors) is a p-value of "the risk is above" although the threshold came
from the rows. The labels choose nothing but where the sequence ends.

In sequence each test may use the whole of δ = 1 − confidence, as long as all before were passed. Two ways:

- `ordered`: j = m, m + 1, …, n, where m = ⌈ln δ / ln(1 − risk)⌉ errorless rows are the fewest that pass. P(the promise is broken)
  ≤ δ where the risk passes the promised one but once as the threshold loosens, as it does when errors become more frequent
  with the score. The first threshold beyond that point then has the rows below that fixed point accepted.
- not `ordered`: any score. A few numbers of rows, each 1.25 times the one before, share δ equally (Bonferroni), and the loosest
  that passes is taken.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

STEP = 1.25


class Threshold(NamedTuple):
    """A threshold and what the calibration rows showed below it."""

    threshold: float  # −∞ where none keeps the risk
    accepted: int
    errors: int


def errorless_rows(risk: float, delta: float) -> int:
    """m, the fewest accepted rows that promise a risk, all of them right: (1 − risk)^m ≤ δ."""
    return math.ceil(math.log(delta) / math.log1p(-risk) * (1 - 1e-12))


def binomial_tail(errors: Tensor, rows: Tensor, risk: float) -> Tensor:
    """P(Bin(rows, risk) ≤ errors), the p-value of a risk above: of no rows 1."""
    from scipy.special import bdtr  # loaded only by who asks for a promise

    return torch.from_numpy(bdtr(errors.double().numpy(), rows.numpy(), risk)).reshape(errors.shape)


def binomial_bound(errors: int, rows: int, delta: float) -> float:
    """The largest risk that so few errors do not rule out at confidence 1 − δ (Clopper & Pearson 1934)."""
    from scipy.special import bdtri

    return 1.0 if errors >= rows else float(bdtri(errors, rows, delta))


def safe_threshold(score: Tensor, error: Tensor, risk: float, delta: float, *, ordered: bool = True) -> Threshold:
    """The loosest threshold whose risk is at most `risk` with confidence 1 − δ, of scores (n,) and errors (n,) boolean."""
    ordering = score.argsort(stable=True)
    sorted_score = torch.cat([score[ordering].double(), score.new_full((1,), math.inf, dtype=torch.float64)])
    errors = torch.cat([torch.zeros(1, dtype=torch.int64), error[ordering].long().cumsum(0)])
    if ordered:
        numbers, each = torch.arange(errorless_rows(risk, delta), len(score) + 1), delta
    else:
        numbers = _spread_numbers(len(score), risk, delta)
        each = delta / max(len(numbers), 1)
    thresholds = sorted_score[numbers]
    accepted = torch.searchsorted(sorted_score, thresholds)  # fewer than their number where scores tie
    able = accepted >= errorless_rows(risk, each)  # ties are seen without labels
    thresholds, accepted = thresholds[able], accepted[able]
    passed = binomial_tail(errors[accepted], accepted, risk) <= each
    if ordered:
        passed = passed.long().cumprod(0)
    found = passed.nonzero()
    if not len(found):
        return Threshold(-math.inf, 0, 0)
    last = int(found[-1])
    return Threshold(float(thresholds[last]), int(accepted[last]), int(errors[accepted[last]]))


def _spread_numbers(rows: int, risk: float, delta: float) -> Tensor:
    """Numbers of accepted rows to test, as many as can pass while δ is shared between them; all rows among them."""
    numbers = [rows]
    while (smaller := int(numbers[0] / STEP)) >= errorless_rows(risk, delta / (len(numbers) + 1)):
        numbers.insert(0, smaller)
    return torch.tensor(numbers)


def least_risk(score: Tensor, error: Tensor, delta: float, *, ordered: bool = True) -> float | None:
    """About the least risk (in steps of 5 %) that some threshold would have kept on these rows; None if there is none."""
    for risk in (1e-4 * 1.05**step for step in range(188)):
        if safe_threshold(score, error, risk, delta, ordered=ordered).accepted:
            return risk
    return None
