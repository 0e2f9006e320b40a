"""Statistical uncertainty of metrics: bootstrap intervals, paired comparisons, McNemar's test, Student's t.

The interval of one metric is the percentile interval (Efron, 1979), too narrow below some 30 examples. Differences use
Student's t, so that their interval contains zero exactly when p ≥ 1 − level. If nothing varies, interval and p are NaN. Random
numbers come from a separate generator on the CPU, seeded by `seed`.

Only the variation over test examples is counted here; `dissensus.report` of several seeds counts that of training too.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dissensus.metrics.metric_inputs import same_shape
from dissensus.utils.checks import fraction, integer

ROUNDING = 1e-12  # relative: smaller variation counts as none
_CHUNK = 2**21  # draws in memory at once in the vectorised versions: 32 MB with their counts


class Interval(NamedTuple):
    """A metric on the data and its bootstrap interval."""

    estimate: float
    lower: float
    upper: float


def bootstrap_interval(
    metric: Callable[..., Tensor], *tensors: Tensor, level: float = 0.95, resamples: int = 1000, seed: int = 0
) -> Interval:
    """Bootstrap interval of metric(*tensors). Examples lie on the first axis; all tensors are resampled together.

    For a mean of per-example values, `bootstrap_mean` gives the same much faster.

    Args:
        metric: a function of these tensors that returns a scalar tensor ().
        level: coverage of the interval.
        resamples: number of resamples of the examples, with replacement.
        seed: seed of a separate generator; the global generator is not used.
    """
    draws = _draws(metric, [tensors], resamples, seed)
    return _interval(metric(*tensors), draws, level)


def bootstrap_two_samples(
    metric: Callable[[Tensor, Tensor], Tensor],
    first: Tensor,
    second: Tensor,
    *,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """Bootstrap interval of metric(first, second) for two separate samples, such as the two sets of scores of `auroc`.

    Each sample is resampled separately. Keywords as in `bootstrap_interval`.
    """
    draws = _draws(metric, [[first], [second]], resamples, seed)
    return _interval(metric(first, second), draws, level)


def bootstrap_mean(values: Tensor, *, level: float = 0.95, resamples: int = 1000, seed: int = 0) -> Interval:
    """Bootstrap interval of the mean of per-example values (N,); keywords as in `bootstrap_interval`."""
    (values,) = same_shape(values=values)
    return _interval(values.mean(), _resampled_means(values, resamples, seed), level)


class Comparison(NamedTuple):
    """Difference of two methods, first minus second, on the same examples. The interval contains 0 exactly if p ≥ 1 − level."""

    difference: float
    lower: float
    upper: float
    p_value: float  # two-sided, for the hypothesis of no difference


def paired_bootstrap(
    metric: Callable[..., Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    *,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Comparison:
    """Compares two methods: metric(*first) − metric(*second), with both resampled on the same examples.

    With v the variance of the resampled differences d*, d / √(v n/(n − 1)) is treated as Student's t with n − 1 degrees
    of freedom. For a mean this is the paired t-test, up to the Monte Carlo error of the resamples. Keywords as in
    `bootstrap_interval`.
    """

    def difference(*tensors: Tensor) -> Tensor:
        return metric(*tensors[: len(first)]) - metric(*tensors[len(first) :])

    both = [*first, *second]
    draws = _draws(difference, [both], resamples, seed)
    return comparison(difference(*both), draws, level, examples=len(both[0]))


def paired_test(
    first: Tensor, second: Tensor, *, level: float = 0.95, resamples: int = 1000, seed: int = 0
) -> Comparison:
    """Compares the means of two methods' per-example values (N,): `paired_bootstrap` of the mean, vectorised."""
    first, second = same_shape(first=first, second=second)
    difference = first - second
    return comparison(difference.mean(), _resampled_means(difference, resamples, seed), level, examples=len(first))


class McNemar(NamedTuple):
    """Result of the exact McNemar test of equal accuracy."""

    only_first: int  # examples that only the first method gets right
    only_second: int  # examples that only the second method gets right
    p_value: float  # two-sided


def mcnemar(first_correct: Tensor, second_correct: Tensor) -> McNemar:
    """McNemar test of equal accuracy, from two methods' correctness (N,) on the same examples.

    Under equal accuracy the b + c discordant examples are fair coin tosses: p = min(1, 2 P(Bin(b + c, ½) ≤ min(b, c))).
    """
    from scipy.special import bdtr  # loaded only when a test is computed

    first, second = same_shape(first_correct=first_correct, second_correct=second_correct)
    if ((first != 0) & (first != 1) | (second != 0) & (second != 1)).any():
        raise ValueError("expected correctness of 0 or 1, got other values; pass prediction == y")
    b, c = int((first > second).sum()), int((second > first).sum())
    return McNemar(b, c, min(1.0, 2 * float(bdtr(min(b, c), b + c, 0.5))))


def _examples(tensors: Sequence[Tensor]) -> int:
    lengths = {len(t) for t in tensors}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"expected tensors of one length above zero, got {sorted(lengths)}; put examples on axis 0")
    return lengths.pop()


def _draws(metric: Callable[..., Tensor], samples: Sequence[Sequence[Tensor]], resamples: int, seed: int) -> Tensor:
    """(R,) the metric on resampled examples; the tensors of one sample use the same resample."""
    generator, sizes = torch.Generator().manual_seed(seed), [_examples(each) for each in samples]
    found = []
    for _ in range(integer("resamples", resamples)):
        drawn = (torch.randint(n, (n,), generator=generator) for n in sizes)
        found.append(metric(*(t[i.to(t.device)] for i, each in zip(drawn, samples, strict=True) for t in each)))
    return torch.stack(found)


def resample_counts(n: int, resamples: int, generator: torch.Generator) -> Tensor:
    """(R, N) how often each of n examples is drawn in each resample of n draws with replacement."""
    index = torch.randint(n, (resamples, n), generator=generator)
    one = torch.ones((), dtype=torch.float64)
    return torch.zeros(resamples, n, dtype=torch.float64).scatter_add_(1, index, one.expand_as(index))


def count_tables(sizes: Sequence[int], resamples: int, generator: torch.Generator) -> Iterator[tuple[Tensor, ...]]:
    """Yields tables (r, n) of `resample_counts`, one for each sample of n examples; splits tables that would be too large."""
    rows = max(1, _CHUNK // sum(sizes))
    for start in range(0, resamples, rows):
        yield tuple(resample_counts(n, min(rows, resamples - start), generator) for n in sizes)


def _resampled_means(values: Tensor, resamples: int, seed: int) -> Tensor:
    """(R,) means of resampled values (N,): the draws of `_draws`, vectorised."""
    values, generator = values.flatten(), torch.Generator().manual_seed(seed)
    tables = count_tables([len(values)], integer("resamples", resamples), generator)
    return torch.cat([counts.to(values.device) @ values / len(values) for (counts,) in tables])


def _interval(estimate: Tensor, draws: Tensor, level: float) -> Interval:
    tail = (1 - fraction("level", level)) / 2
    if draws.max() == draws.min():
        return Interval(float(estimate), math.nan, math.nan)
    lower, upper = torch.quantile(draws.double(), draws.new_tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Interval(float(estimate), lower, upper)


def comparison(difference: Tensor, draws: Tensor, level: float = 0.95, *, examples: int) -> Comparison:
    """The Comparison from the difference on the data and the differences (R,) on resamples: see `paired_bootstrap`."""
    d, error = float(difference), float(draws.double().std(correction=min(1, len(draws) - 1)))
    quantile = student_quantile(fraction("level", level), max(examples - 1, 1))
    if examples < 2 or error <= ROUNDING * abs(d):
        return Comparison(d, math.nan, math.nan, math.nan)
    error *= math.sqrt(examples / (examples - 1))
    return Comparison(d, d - quantile * error, d + quantile * error, student_tail(abs(d) / error, examples - 1))


MANY = 1000  # from so many degrees of freedom the normal distribution is used; t's 95 % quantile is 0.12 % larger there


def student_tail(t: float, freedom: int) -> float:
    """P(|T| > t) for Student's t with `freedom` degrees of freedom."""
    from scipy.special import stdtr  # loaded only when intervals are computed

    return 2 * float(stdtr(freedom if freedom < MANY else math.inf, -t))


@lru_cache(maxsize=256)  # every cell of a table asks for the same few values
def student_quantile(level: float, freedom: int) -> float:
    """The quantile t with P(|T| ≤ t) = level."""
    from scipy.special import ndtri, stdtrit

    tail = (1 - level) / 2
    return -float(stdtrit(freedom, tail) if freedom < MANY else ndtri(tail))


def last_before(reached: Callable[[float], bool], upper: float) -> float:
    """The largest number in 0…upper at which a monotone condition does not hold yet."""
    lower = 0.0
    for _ in range(100):
        middle = (lower + upper) / 2
        if middle in (lower, upper):
            break
        lower, upper = (lower, middle) if reached(middle) else (middle, upper)
    return lower
