"""Sentences of a report: summaries of the results, and answers to a task's question."""

import re
from collections.abc import Callable, Sequence
from operator import gt
from statistics import fmean

from dissensus.bench.report.comparisons import ResampledMeasure
from dissensus.bench.report.measures import region_keys, region_words
from dissensus.bench.report.results import Results, base_method, mean_over_seeds, sweep_of, sweep_sentence
from dissensus.bench.report.tables import MeasureDraws, best_method, overlap_by_method, without_methods

Condition = Callable[[float, float], bool]  # of a metric of two methods
NEAR = 0.15  # an error that is larger by at most 15 % counts as equally good
TWICE = 2.0  # this factor of uncertainty off the data counts as noticing it


def question_sentences(results: Results) -> list[str]:
    """Sentences about the task's focus and the setting it sweeps; empty if it has neither."""
    said = _focus_sentences(results)
    sweep = sweep_of(results)
    return [*said, sweep_sentence(results, sweep)] if sweep is not None else said


def _focus_sentences(results: Results) -> list[str]:
    """Sentences on the method in focus, compared with all methods except its own variants."""
    if results.focus is None or not region_keys(results.methods[results.focus][0]):
        return []
    focus, several = results.focus, results.methods[results.focus]
    others = [name for name in results.methods if base_method(name) != base_method(focus)]
    if not others:
        return []
    said = []
    for key in region_keys(several[0]):
        region, quantity = region_words(key)
        where, mean = f"{region[0].upper()}{region[1:]}", f"{mean_over_seeds(key, several):.4g}"
        smaller = _methods_by_seeds(results, focus, others, key, gt)
        said.append(f"{where}, {focus} has a mean {quantity} of {mean}: larger than that {smaller}.")
    baseline = results.baseline
    off = "region/off_data/total"
    if baseline in others and off in several[0].metrics:
        share = mean_over_seeds(off, several) / mean_over_seeds(off, results.methods[baseline])
        twice = _seed_count_text(results, focus, baseline, off, lambda a, b: a >= TWICE * b)
        more = f"{share:.2f} times that of {baseline}; at least twice on {twice}"
        said.append(f"Off the data, {focus}'s total uncertainty is {more}.")
    if "rmse" in several[0].metrics:
        mean = f"{mean_over_seeds('rmse', several):.4g}"
        near = _methods_by_seeds(results, focus, others, "rmse", lambda a, b: a <= (1 + NEAR) * b)
        said.append(f"The RMSE of {focus}'s mean, {mean}, is at most {100 * NEAR:.0f} % above that {near}.")
    return said


def _methods_by_seeds(results: Results, focus: str, others: list[str], key: str, holds: Condition) -> str:
    """ "of a (0.1) and b (0.2) on 5 of 5 seeds; of c (0.3) on 0 of 5 seeds": methods by how often the condition holds."""
    groups: dict[str, list[str]] = {}
    for name in others:
        value = f"{name} ({mean_over_seeds(key, results.methods[name]):.4g})"
        groups.setdefault(_seed_count_text(results, focus, name, key, holds), []).append(value)
    ordered = sorted(groups, key=lambda seeds: -int(seeds.split()[0]))
    return "; ".join(f"of {' and '.join(groups[seeds])} on {seeds}" for seeds in ordered)


def _seed_count_text(results: Results, first: str, second: str, key: str, holds: Condition) -> str:
    """ "3 of 5 seeds": how often the condition holds among the seeds that both methods have."""
    mine, other = (dict(zip(results.seeds(name), results.methods[name], strict=True)) for name in (first, second))
    pairs = [(mine[seed].metrics[key], other[seed].metrics[key]) for seed in mine if seed in other]
    return f"{sum(holds(*pair) for pair in pairs)} of {len(pairs)} seed{'s' * (len(pairs) != 1)}"


FEW = 30, 10  # fewest examples of one sample, and of each of two samples


def headline(results: Results, draws: MeasureDraws) -> list[str]:
    """At most three sentences: a single method's quality, and which method is best on foreign and on corrupted inputs.

    No method is called best if methods were tested on different examples. Methods near chance are left out.
    """
    draws = without_methods(draws, results.near_chance) if len(results.methods) > 1 else draws
    first = next(iter(results.methods.values()))[0]
    sentences = [_quality_sentence(draws) if len(results.methods) == 1 else "", _foreign_sentence(first.ood, draws)]
    if "corrupt/accuracy" in draws:
        sentences.append(_corrupted_sentence(results, draws["corrupt/accuracy"]))
    return [each for each in sentences if each]


def test_set_sentences(each: dict[str, ResampledMeasure]) -> list[str]:
    """Why some methods are not compared; empty if all were tested on the same examples in the same order."""
    first, rows = next(iter(each)), overlap_by_method(each)
    others = [name for name, kind in rows.items() if kind == "own"]
    moved = [name for name, kind in rows.items() if kind == "shuffled"]
    said = []
    if others:
        were = f"{', '.join(others)} {'was' if len(others) == 1 else 'were'} tested on other examples than {first}"
        said.append(f"{were}: the numbers do not say which is better. Evaluate all methods with the same loader.")
    if moved:
        saw = f"{', '.join(moved)} saw the examples in another order than {first}"
        said.append(f"{saw}: differences cannot be tested by example. Evaluate with a loader that does not shuffle.")
    return said


def few_examples_caution(draws: MeasureDraws) -> list[str]:
    """A caution if intervals rest on so few examples that skewed differences break Student's t."""
    every = [each for by_method in draws.values() for each in by_method.values() if each.example_count is not None]
    few = [each for each in every if (each.example_count or 0) < FEW[len(each.measure.samples) - 1]]
    found = "; ".join(sorted({f"{each.measure.group}: {each.example_count}" for each in few}))
    said = f"Few examples ({found}): intervals and p-values are rough, because one unusual example matters. "
    fix = f"Use {FEW[0]} test examples or more, and {FEW[1]} or more of each kind for OOD metrics."
    return [said + fix] if few else []


def cautions(results: Results, draws: MeasureDraws) -> list[str]:
    """What to be careful about: other test examples, few of them, methods' warnings, and methods near chance."""
    noted = [f"{name}: {text}" for name, texts in results.notes.items() for text in texts]
    return [*test_set_sentences(draws["nll"]), *few_examples_caution(draws), *noted]


def _quality_sentence(draws: MeasureDraws) -> str:
    """NLL, and accuracy or RMSE, of the only method."""
    (name, nll), quality = next(iter(draws["nll"].items())), draws.get("accuracy") or draws.get("rmse") or {}
    interval = nll.interval()
    ends = f"95 % interval {nll.measure.interval_text(interval, nll.half_width or 0)}" if interval else "no interval"
    beside = "".join(f", {each.measure.label} {_with_unit(each)}" for each in quality.values())
    return f"{name} has NLL {_with_unit(nll)} ({ends}){beside}."


def _foreign_sentence(names: Sequence[str], draws: MeasureDraws) -> str:
    """A sentence with one clause per set of foreign inputs."""
    clauses = []
    for name in names:
        if (best := _sentence_method(each := draws[f"ood/{name}/auroc"])) is not None:
            ranked = " best" if len(each) > 1 else ""
            clause = f"{best} separates {name} from test inputs{ranked}: AUROC {_with_unit(each[best])}"
            if each[best].estimate <= 0.5:
                chance = f"no method separates {name} from test inputs better than chance"
                clause = f"{chance}: {best} has AUROC {_with_unit(each[best])}"
            clauses.append(clause)
    said = re.sub("^no method", "No method", "; ".join(clauses))
    return f"{said} (50 % is chance, 100 % perfect)." if clauses else ""


def _corrupted_sentence(results: Results, each: dict[str, ResampledMeasure]) -> str:
    if (best := _sentence_method(each)) is None:
        return ""
    several, measure = results.methods[best], each[best].measure
    count = len(several[0].arrays["corrupt/example_accuracy"])  # may be fewer than the test set has
    changes = []
    for key, words in (("accuracy", "accuracy"), ("ece", "calibration error")):
        # Of each type and severity alone, as of clean rows: by chance bins of fewer rows have a larger calibration error.
        means = (fmean(float(e.arrays[f"corrupt/{each}{key}"].nanmean()) for e in several) for each in ("clean/", ""))
        ends = [f"{measure.text(value)}\N{NO-BREAK SPACE}%" for value in means]
        course = f"stays at {ends[0]}" if ends[0] == ends[1] else f"changes from {ends[0]} to {ends[1]}"
        changes.append(f"{words} {course}")
    are = f"{best}{', the best there' if len(each) > 1 else ''}"
    return f"{count:,} of the test inputs were corrupted ({are}): {' and '.join(changes)}."


def _sentence_method(each: dict[str, ResampledMeasure]) -> str | None:
    """The method of a sentence: the best, or the only one."""
    return next(iter(each)) if len(each) == 1 else best_method(each)


def _with_unit(each: ResampledMeasure) -> str:
    return f"{each.measure.text(each.estimate, each.half_width)}\N{NO-BREAK SPACE}{each.measure.unit}".strip()
