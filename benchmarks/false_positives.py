"""How often two equal methods are said to differ (p < 0.05), and how often real differences are found; CSV out.

    python benchmarks/false_positives.py --csv benchmarks/results/false_positives.csv
    python benchmarks/false_positives.py --few --csv benchmarks/results/false_positives_few.csv

Nothing is trained. Two methods of equal quality are drawn again and again, with S seeds each, and compared as a report compares
them. Example i has the latent value

    b_i + u_s + c_i + e_si,

b for both methods, u by method and seed, c by method and example, e by method, seed and example (half of c's size). The NLL of
an example is softplus(−latent), it is right where the latent value is positive, foreign inputs have latent values lower by 1.5.
`noise`: the standard deviation of u over that of the mean of c over the examples; 0 is no seed noise, inf no example noise.
Beside the report's p: Student's t over seeds alone, the bootstrap over examples alone, and resampling the seeds like the
examples. `found_k`: share of p < 0.05 where the true difference is k times the standard deviation of the measured one.

`--few`: one seed, 2 to 30 test examples, as many foreign ones. `without`: share with no p, as nothing varies; `normal`: p < .05
by the bootstrap's variance and the normal distribution instead of Student's t. "skewed": methods of equal mean NLL that are not
exchangeable; the first one's is larger by e^z − e^½ with a standard normal z for each example.
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from rows import Row, made_on, write_rows
from torch import Tensor

import dissensus
from dissensus.bench.report.comparisons import MethodComparison, Spread, compare_methods, resample_measure
from dissensus.bench.report.measures import Measure, measures
from dissensus.evaluation.evaluation import Evaluation

SEEDS = (2, 3, 5, 10)
NOISES = (0.0, 0.3, 1.0, 3.0, math.inf)
SIZES = (3, 5, 10)
FEW = (2, 3, 5, 10, 20, 30)
FEW_METRICS = ("nll", "accuracy", "ece", "aurc", "rmse", "ood/far/auroc", "ood/far/aupr", "ood/far/fpr95", "skewed")
ALPHA = 0.05
SCORE = "max_probability"
METRICS = {  # the share of the simulations it gets, and the noises; AUROC takes twenty times longer than a mean
    "nll": (1.0, NOISES),
    "accuracy": (0.5, NOISES),
    "ood/far/auroc": (0.25, (0.0, 1.0, math.inf)),
}


class Simulated(NamedTuple):
    """One comparison of two equal methods."""

    difference: float
    spread: Spread
    naive: float  # p-value of resampling seeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=1600)
    parser.add_argument("--metrics", default=None)
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--resamples", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, default=None)
    given = parser.parse_args()
    origin = {"seed": given.seed, "dissensus": dissensus.__version__, **made_on("cpu")}
    rows: list[Row] = []
    for key in (given.metrics or ",".join(FEW_METRICS)).split(",") if given.few else ():
        for examples in FEW:
            shown = few(key, examples, given.simulations, given.resamples, given.seed)
            about = {"metric": key, "seeds": 1, "examples": examples, "resamples": given.resamples}
            rows.append({**about, "simulations": given.simulations, **shown, **origin})
            print(f"{key:14s} examples {examples:2d}: {shown['false_positives']:.3f}", flush=True)
    for key in (given.metrics or ",".join(METRICS)).split(",") if not given.few else ():
        share, noises = METRICS[key]
        count = max(1, round(share * given.simulations))
        for noise in noises:
            for seeds in SEEDS:
                generator = torch.Generator().manual_seed(given.seed)
                pairs = (drawn(key, seeds, noise, given.examples, generator) for _ in range(count))
                found = [simulated(key, pair, given.resamples, generator) for pair in pairs]
                about = {"metric": key, "noise": noise, "seeds": seeds, "examples": given.examples}
                rows.append({**about, "resamples": given.resamples, "simulations": count, **shares(found), **origin})
                print(f"{key:14s} noise {noise:3} seeds {seeds:2d}: {rows[-1]['false_positives']:.3f}", flush=True)
    if given.csv is not None:
        write_rows(given.csv, rows)


def drawn(key: str, seeds: int, noise: float, examples: int, generator: torch.Generator) -> list[list[Evaluation]]:
    """Two methods that are equal, one evaluation per seed."""
    of_examples = 0.0 if math.isinf(noise) else 1.0
    of_seeds = 0.3 if math.isinf(noise) else noise / examples**0.5

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shape = 2, seeds, 2 * examples  # methods, seeds, test and foreign inputs
    base = 1 + 2 * normal(2 * examples)
    base[examples:] -= 1.5
    latent = base + of_examples * (normal(2, 1, 2 * examples) + 0.5 * normal(*shape))
    better = of_seeds * normal(
        2, seeds, 1
    )  # foreign inputs are told apart better where test inputs are predicted better
    latent = latent + torch.cat([better.expand(-1, -1, examples), -better.expand(-1, -1, examples)], 2)
    return [[evaluation(key, each[:examples], each[examples:]) for each in method] for method in latent]


def evaluation(key: str, inside: Tensor, outside: Tensor) -> Evaluation:
    """With the metric that is looked at."""
    arrays = {
        "test/nll": torch.nn.functional.softplus(-inside),
        "test/correct": (inside > 0).double(),
        "test/confidence": inside.abs().sigmoid(),
        "test/squared_error": inside.square(),
        f"test/score/{SCORE}": -inside.abs().sigmoid() if key == "aurc" else -inside,
        f"ood/far/score/{SCORE}": -outside,
    }
    return measured(
        Evaluation("regression" if key == "rmse" else "classification", {key: 0.0}, arrays, SCORE, ("far",))
    )


def measured(given: Evaluation) -> Evaluation:
    """With the value of its one metric."""
    (measure,) = measures(given)
    weights = [torch.ones(1, len(given.arrays[group[0]]), dtype=torch.float64) for group in measure.samples]
    value = measure.statistic(weights, *(given.arrays[name] for group in measure.samples for name in group))
    return replace(given, metrics={measure.key: float(value)})


def few(key: str, examples: int, count: int, resamples: int, seed: int) -> Row:
    """Shares of p < 0.05 with one seed and few examples, by Student's t and by the normal distribution."""
    generator = torch.Generator().manual_seed(seed)
    found: list[MethodComparison | None] = []
    for _ in range(count):
        (first,), (second,) = drawn("nll" if key == "skewed" else key, 1, 0.0, examples, generator)
        if key == "skewed":
            more = torch.randn(examples, generator=generator, dtype=torch.float64).exp() - math.exp(0.5)
            first = measured(replace(first, arrays={"test/nll": second.arrays["test/nll"] + more}))
        pair = (resample_measure(*measures(each), [each], resamples=resamples) for each in (first, second))
        found.append(compare_methods(*pair))
    known = [each for each in found if each is not None]
    naive = [
        Spread(0.0, 0, each.spread.examples * (1 - 1 / examples) ** 0.5).p_value(each.difference) for each in known
    ]
    return {
        "false_positives": sum(each.p_value < ALPHA for each in known) / count,
        "error": round(math.sqrt(ALPHA * (1 - ALPHA) / count), 5),
        "without": 1 - len(known) / count,
        "normal": sum(p < ALPHA for p in naive) / count,
    }


def simulated(key: str, pair: list[list[Evaluation]], resamples: int, generator: torch.Generator) -> Simulated:
    """The report's comparison, and the p-value of resampling seeds with the examples."""
    measure: Measure = next(m for m in measures(pair[0][0]) if m.key == key)
    first, second = (resample_measure(measure, each, resamples=resamples) for each in pair)
    comparison = compare_methods(first, second)
    if comparison is None or first.draws is None or second.draws is None:
        raise SystemExit(f"expected a comparison of {key}, got none; look at the drawn numbers")
    draws = first.draws - second.draws  # (S, R)
    chosen = torch.randint(len(draws), draws.shape, generator=generator)
    beyond = (draws.gather(0, chosen).mean(0) - comparison.difference).abs() >= abs(comparison.difference)
    return Simulated(comparison.difference, comparison.spread, (1 + int(beyond.sum())) / (1 + resamples))


def shares(found: list[Simulated]) -> Row:
    """Shares of p < 0.05 by four ways, and of differences found."""

    def below(p_values: list[float]) -> float:
        return sum(p < ALPHA for p in p_values) / len(p_values)

    rate = below([each.spread.p_value(each.difference) for each in found])
    deviation = statistics.pstdev(each.difference for each in found)
    return {
        "false_positives": rate,
        "error": round(math.sqrt(ALPHA * (1 - ALPHA) / len(found)), 5),
        "seeds_alone": below([each.spread._replace(examples=0.0).p_value(each.difference) for each in found]),
        "examples_alone": below([Spread(0.0, 0, each.spread.examples).p_value(each.difference) for each in found]),
        "resampled_seeds": below([each.naive for each in found]),
        **{
            f"found_{k}": below([each.spread.p_value(each.difference + k * deviation) for each in found]) for k in SIZES
        },
    }


if __name__ == "__main__":
    main()
