"""Sweeps: one variant per value of a setting. The value is chosen on validation rows only and reported on test rows.

A task names the setting in [evaluation] sweep, and the corruptions of validation rows for the choice in [evaluation] choose.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from dissensus.bench.report.results import Results, all_have_metric, base_method, mean_over_seeds
from dissensus.evaluation.evaluation import Evaluation

CRITERION = "validation/corrupt/accuracy"  # a setting is chosen by this, never by test rows
GROUPS = {"severities 1–3": (1, 2, 3), "severities 4–5": (4, 5)}


@dataclass(frozen=True)
class Sweep:
    """Variants of one method, ordered by the value of a setting; `chosen` is best on corrupted validation rows."""

    key: str
    values: dict[str, float]  # method or variant -> value, ascending
    chosen: str

    @property
    def base(self) -> str:
        return base_method(self.chosen)


def sweep_of(results: Results) -> Sweep | None:
    """The sweep of a task's results; None if it has none, or no criterion."""
    if results.sweep is None:
        return None
    values = {
        name: value
        for name, value in sorted(results.sweep.values.items(), key=lambda item: item[1])
        if all_have_metric(CRITERION, results.methods[name])
    }
    if len(values) < 2:
        return None
    # On ties the smallest value of the setting wins.
    chosen = max(values, key=lambda name: mean_over_seeds(CRITERION, results.methods[name]))
    return Sweep(results.sweep.key, values, chosen)


def accuracies(evaluation: Evaluation) -> dict[str, float]:
    """Clean accuracy, and accuracy of groups of severities (types pooled, severities averaged), as far as measured.

    Clean accuracy is that of the rows that were corrupted, which may be fewer than all test rows.
    """
    found = {"clean": float(evaluation.arrays.get("corrupt/clean/accuracy", evaluation.metrics["accuracy"]))}
    for title, severities in GROUPS.items():
        keys = [f"corrupt/severity{s}/accuracy" for s in severities]
        known = [evaluation.metrics[key] for key in keys if key in evaluation.metrics]
        if known:
            found[title] = fmean(known)
    return found


def sweep_sentence(results: Results, sweep: Sweep) -> str:
    """A sentence on the chosen value and its accuracy on test data, beside the baseline."""
    chosen = results.methods[sweep.chosen]
    text = (
        f"{sweep.base}: {sweep.key} = {sweep.values[sweep.chosen]:g} is chosen of "
        f"{', '.join(f'{value:g}' for value in sweep.values.values())}: the best accuracy on damaged validation images, "
        f"{100 * mean_over_seeds(CRITERION, chosen):.2f} %. On test images it gives {_accuracy_text(chosen)}"
    )
    others = [name for name in results.methods if name not in sweep.values]
    beside = results.baseline if results.baseline in others else next(iter(others), None)
    return f"{text}; {beside} gives {_accuracy_text(results.methods[beside])}." if beside else f"{text}."


def _accuracy_text(several: Sequence[Evaluation]) -> str:
    each = [accuracies(evaluation) for evaluation in several]
    shares = {title: fmean(found[title] for found in each) for title in each[0]}
    return ", ".join(f"{100 * share:.2f} % ({title})" for title, share in shares.items())
