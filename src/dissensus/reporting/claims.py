"""Sentences about a task's question: one method's regions compared with every other method's, seed by seed."""

from collections.abc import Callable

from dissensus.evaluation.evaluation import Evaluation
from dissensus.reporting.regions import region_keys, spoken
from dissensus.reporting.results import Results, base_of, mean_over_seeds
from dissensus.reporting.sweep import sweep_of, sweep_sentence

NEAR = 0.15  # an error that is larger by at most 15 % counts as equally good
TWICE = 2.0  # this factor of entropy off the data counts as noticing it


def claims(results: Results) -> list[str]:
    """Sentences about the task's focus and the setting it sweeps; empty if it has neither."""
    said = _focused(results)
    sweep = sweep_of(results)
    return [*said, sweep_sentence(results, sweep)] if sweep is not None else said


def _focused(results: Results) -> list[str]:
    """Sentences on the method in focus, compared with all methods except its own variants."""
    if results.focus is None or not region_keys(results.methods[results.focus][0]):
        return []
    focus, several = results.focus, results.methods[results.focus]
    others = [name for name in results.methods if base_of(name) != base_of(focus)]
    if not others:
        return []
    said = []
    for key in region_keys(several[0]):
        region, quantity = spoken(key)
        said.append(
            f"{region[0].upper()}{region[1:]}, {focus} has a mean {quantity} of {mean_over_seeds(key, several):.4g}: larger "
            f"than that {_by_seeds(results, focus, others, key, _larger(key))}."
        )
    baseline = results.baseline
    off = "region/off_data/entropy"
    if baseline in others and off in several[0].metrics:
        share = mean_over_seeds(off, several) / mean_over_seeds(off, results.methods[baseline])
        said.append(
            f"Off the data, {focus}'s entropy is {share:.2f} times that of {baseline}; at least twice on "
            f"{_seeds(results, focus, baseline, lambda mine, other: mine.metrics[off] >= TWICE * other.metrics[off])}."
        )
    if "rmse" in several[0].metrics:
        said.append(
            f"The RMSE of {focus}'s mean, {mean_over_seeds('rmse', several):.4g}, is at most {100 * NEAR:.0f} % above that "
            f"{_by_seeds(results, focus, others, 'rmse', _near)}."
        )
    return said


def _larger(key: str) -> Callable[[Evaluation, Evaluation], bool]:
    return lambda mine, other: mine.metrics[key] > other.metrics[key]


def _near(mine: Evaluation, other: Evaluation) -> bool:
    return mine.metrics["rmse"] <= (1 + NEAR) * other.metrics["rmse"]


def _by_seeds(
    results: Results, focus: str, others: list[str], key: str, holds: Callable[[Evaluation, Evaluation], bool]
) -> str:
    """ "of a (0.1) and b (0.2) on 5 of 5 seeds; of c (0.3) on 0 of 5 seeds": methods by how often the condition holds."""
    groups: dict[str, list[str]] = {}
    for name in others:
        value = f"{name} ({mean_over_seeds(key, results.methods[name]):.4g})"
        groups.setdefault(_seeds(results, focus, name, holds), []).append(value)
    ordered = sorted(groups, key=lambda seeds: -int(seeds.split()[0]))
    return "; ".join(f"of {_joined(groups[seeds])} on {seeds}" for seeds in ordered)


def _seeds(results: Results, first: str, second: str, holds: Callable[[Evaluation, Evaluation], bool]) -> str:
    """ "3 of 5 seeds": how often the condition holds among the seeds that both methods have."""
    mine, other = (dict(zip(results.seeds(name), results.methods[name], strict=True)) for name in (first, second))
    pairs = [(mine[seed], other[seed]) for seed in mine if seed in other]
    return f"{sum(holds(*pair) for pair in pairs)} of {len(pairs)} seed{'s' * (len(pairs) != 1)}"


def _joined(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
