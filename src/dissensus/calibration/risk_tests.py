"""Which thresholds keep a risk, by exact tests in a fixed sequence (Learn-then-Test, Angelopoulos et al. 2021).

Rows are sorted by uncertainty. Threshold j accepts scores below the (j + 1)-th smallest score, that is j rows; the last
threshold accepts everything. Given that score, the j rows below it are a sample of the inputs below it. Their errors are
binomial, so P(Bin(j, risk) ≤ errors) is a p-value of "the true risk is above `risk`", although the threshold came from the
rows. Labels only decide where a sequence ends. There are two ways to share δ = 1 − confidence among the tests:

- `ordered` assumes that errors become more frequent with the score, so that the risk crosses the promised one once, at t. A
  sequence starts at m = ⌈ln δ / ln(1 − risk)⌉ accepted rows, the fewest that can pass, and continues while tests pass. One
  early error would end it. With more rows, J sequences therefore start at m, 2 m, 4 m, …, (m computed for δ/J), with δ/J each;
  a sequence that reaches the next start adds its share to it (the fallback procedure of Wiens 2003). Beyond t, the first
  tested threshold accepts all rows below t, whose errors are binomial at the promised risk, and the others are starts. Hence
  P(any of them passes) ≤ δ.
- not `ordered` works for any score. The tested numbers of rows grow by a factor 1.25 and share δ equally (Bonferroni); the
  loosest threshold that passes is taken.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

STEP = 1.25


class Threshold(NamedTuple):
    """A threshold and the calibration rows' counts below it."""

    threshold: float  # −∞ if none keeps the risk
    accepted: int
    errors: int


def errorless_rows(risk: float, delta: float) -> int:
    """m, the fewest accepted rows, all predicted right, that can promise a risk: (1 − risk)^m ≤ δ."""
    return math.ceil(math.log(delta) / math.log1p(-risk) * (1 - 1e-12))


def binomial_tail(errors: Tensor, rows: Tensor, risk: float) -> Tensor:
    """P(Bin(rows, risk) ≤ errors), the p-value of "the true risk is above `risk`"; 1 without rows."""
    from scipy.special import bdtr  # loaded only when a promise is fitted

    return torch.from_numpy(bdtr(errors.double().numpy(), rows.numpy(), risk)).reshape(errors.shape)


def binomial_bound(errors: int, rows: int, delta: float) -> float:
    """Upper confidence bound of the risk at confidence 1 − δ (Clopper & Pearson 1934)."""
    from scipy.special import bdtri

    return 1.0 if errors >= rows else float(bdtri(errors, rows, delta))


def safe_threshold(score: Tensor, error: Tensor, risk: float, delta: float, *, ordered: bool = True) -> Threshold:
    """The loosest threshold whose risk is at most `risk` with confidence 1 − δ, from scores (n,) and boolean errors (n,)."""
    values, counts = torch.unique(score.double(), return_counts=True)  # sorted
    thresholds = torch.cat([values[1:], values.new_full((1,), math.inf)])
    accepted = counts.cumsum(0)  # rows below each threshold; equal scores are accepted together
    wrong = torch.zeros(len(score) + 1, dtype=torch.int64)
    wrong[1:] = error[score.argsort(stable=True)].long().cumsum(0)
    p_values = binomial_tail(wrong[accepted], accepted, risk).tolist()
    levels, last, carried = [0.0] * len(p_values), -1, 0.0
    if ordered:
        share, starts = ordered_starts(len(score), risk, delta)
        # the strictest that accepts this many
        for start in torch.searchsorted(accepted, torch.tensor(starts)).tolist():
            levels[start] += share
    else:
        share, starts = spread_starts(len(score), risk, delta)
        for start in (torch.searchsorted(accepted, torch.tensor(starts), right=True) - 1).tolist():
            levels[start] = share if start >= 0 else levels[start]  # the loosest threshold that accepts no more
    for i, (p, level) in enumerate(zip(p_values, levels, strict=True)):
        if p <= carried + level:
            last, carried = i, carried + level if ordered else 0.0
        else:
            carried = 0.0
    if last < 0:
        return Threshold(-math.inf, 0, 0)
    return Threshold(float(thresholds[last]), int(accepted[last]), int(wrong[accepted[last]]))


def ordered_starts(rows: int, risk: float, delta: float) -> tuple[float, list[int]]:
    """(share of δ, numbers of accepted rows) of the sequences' starts."""
    count = 1
    while errorless_rows(risk, delta / (count + 1)) * 2**count <= rows:
        count += 1
    first = errorless_rows(risk, delta / count)
    return delta / count, [first * 2**i for i in range(count) if first * 2**i <= rows]


def spread_starts(rows: int, risk: float, delta: float) -> tuple[float, list[int]]:
    """The same for single tests: as many as can pass while they share δ; one of them accepts all rows."""
    numbers = [rows]
    while (smaller := int(numbers[0] / STEP)) >= errorless_rows(risk, delta / (len(numbers) + 1)):
        numbers.insert(0, smaller)
    return delta / len(numbers), numbers


def least_risk(score: Tensor, error: Tensor, delta: float, *, ordered: bool = True) -> float | None:
    """Approximately the least risk (in steps of 5 %) that a threshold could promise on these rows; None if there is none."""
    for risk in (1e-4 * 1.05**step for step in range(188)):
        if safe_threshold(score, error, risk, delta, ordered=ordered).accepted:
            return risk
    return None
