"""Which method to take, why, how sure that is, and at what price."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dissensus.bench.report import comparisons
from dissensus.bench.report.comparisons import Family, ResampledMeasure
from dissensus.bench.report.measures import number_text
from dissensus.bench.report.results import Results
from dissensus.bench.report.tables import Cell, MeasureDraws, Row, Table, overlap_by_method, p_text, row_precision

QUALITY = ("miou", "accuracy", "rmse", "nll")
OTHERS = re.compile(r"ece|rmse|coverage90|corrupt/(accuracy|nll|ece|rmse)|ood/.*/auroc")  # in which it may be the worst
PRICES = ("cost/train_seconds", "cost/predict_ms", "cost/memory_mb")
ONCE = "Every method was trained once: tests count test examples, not the variation of training. Run five seeds."


class Recommendation(NamedTuple):
    """The method to take (None: no advice), sentences by the question they answer, and a table of all methods."""

    method: str | None
    featured: list[str]  # the method to take and the baseline, for figures that have no room for all
    title: str = ""
    sentences: Mapping[str, str] = {}
    table: Table | None = None


def recommend(results: Results, draws: MeasureDraws) -> Recommendation:
    """The method with the lowest NLL of those better than the baseline in a paired test; no title for a single method.

    Better means p < 0.05 after Holm's correction, and by enough to matter. A method near chance is never taken.
    """
    each, baseline = draws["nll"], results.baseline or next(iter(results.methods))
    able = [name for name in each if name not in results.near_chance]
    others, compare = [name for name in able if name != baseline], comparisons.compare_methods
    family = comparisons.comparison_family({(name,): compare(each[name], each[baseline]) for name in others}, holm=True)
    if len(each) < 2:
        return Recommendation(None, [baseline])
    if not able:
        return Recommendation(None, [baseline], "Take none: no method is better than a constant answer")
    if "own" in overlap_by_method(each).values() or not family.comparisons:
        return Recommendation(None, [baseline], "No advice: no paired test on the same test examples is possible")
    better = [
        name
        for (name,), compared in family.comparisons.items()
        if compared.difference < 0 and family.p_values[name,] < comparisons.SIGNIFICANT
        if not each[name].measure.is_negligible(compared.first, compared.second)
    ]
    lowest = min(better or able, key=lambda name: each[name].estimate)
    taken, seeds = lowest if better else baseline, min(map(len, results.methods.values()))
    title = f"Take {taken}" if better else f"None is better than {baseline}"
    said = {
        "Why": _reason(draws, family, lowest, baseline),
        "How sure": ONCE if seeds == 1 else f"Tests count test examples and at least {seeds} seeds of every method.",
        "Price": _price(draws, taken, baseline),
    }
    if lost := _worst_measures(draws, taken, able):
        said["Against it"] = f"{taken} is worse than every other method in {', '.join(lost)}."
    title, featured = f"{title}{', on one seed' * (seeds == 1)}", list(dict.fromkeys([taken, baseline]))
    method = taken if taken in able else None  # the baseline may be near chance, and none better
    return Recommendation(method, featured, title, said, _method_table(results, draws, family, baseline, method))


def _reason(draws: MeasureDraws, family: Family, name: str, baseline: str) -> str:
    """A method's quality and NLL against the baseline's, with the paired test of the latter."""
    said = []
    for each in _quality(draws):
        measure, beside = each[name].measure, f" against {_text(each, baseline)}" * (name != baseline)
        said.append(f"{measure.label} {_text(each, name)}{beside} {measure.unit}".rstrip())
    difference, p_value = _test_texts(draws, family, name)
    tested = f": {difference} (paired test, {p_value})" if (name,) in family.comparisons else ""
    return f"{name} has {', '.join(said)}{tested}{', the lowest' * (name == baseline)}."


def _worst_measures(draws: MeasureDraws, name: str, able: Sequence[str]) -> list[str]:
    """Other measures in which all of at least two other methods are better: a paired test tells even the nearest apart."""
    tested: dict[tuple[str, ...], comparisons.MethodComparison | None] = {}
    for key, each in draws.items():
        others = [other for other in able if other in each and other != name]
        if OTHERS.fullmatch(key) and name in each and len(others) > 1:
            measure, own = each[name].measure, each[name].estimate
            nearest = min((each[other].estimate for other in others), key=measure.goodness)
            if measure.goodness(nearest) > measure.goodness(own) and not measure.is_negligible(nearest, own):
                by = min(others, key=lambda other: measure.goodness(each[other].estimate))
                tested[f"{measure.label} ({measure.group})",] = comparisons.compare_methods(each[name], each[by])
    family = comparisons.comparison_family(tested, holm=True)
    return [said for (said,), p_value in family.p_values.items() if p_value < comparisons.SIGNIFICANT]


def _price(draws: MeasureDraws, name: str, baseline: str) -> str:
    """The costs of a method; if it is not the baseline, with their multiples of the baseline's."""
    units, said = _known_costs(draws, baseline), []
    for key, value in _known_costs(draws, name).items():
        times = f" ({_times(value, units[key])} {baseline}'s)" if name != baseline and key in units else ""
        measure = draws[key][name].measure
        said.append(f"{measure.label} {number_text(value, value)} {measure.unit}{times}")
    return f"{'; '.join(said) or 'not measured'}."


def _method_table(results: Results, draws: MeasureDraws, family: Family, baseline: str, taken: str | None) -> Table:
    """One row per method: its quality, its NLL against the baseline's, and its price in multiples of the baseline's."""
    units, quality, rows = _known_costs(draws, baseline), _quality(draws), []
    for name in results.methods:
        spent = _known_costs(draws, name)
        texts = [_text(each, name) if name in each else "–" for each in quality] + _test_texts(draws, family, name)
        texts[-1] = "near chance" if name in results.near_chance else texts[-1]
        texts += [_times(spent[key], units[key]) if key in spent else "–" for key in units]
        rows.append(Row(name, "", "", [Cell(text, best=name == taken, clear=name == taken) for text in texts]))
    columns = [", ".join(filter(None, (each[baseline].measure.label, each[baseline].measure.unit))) for each in quality]
    columns += [f"NLL minus {baseline}'s", "Paired test", *(draws[key][baseline].measure.label for key in units)]
    return Table(columns, rows)


def _quality(draws: MeasureDraws) -> list[dict[str, ResampledMeasure]]:
    keys = dict.fromkeys([next(key for key in QUALITY if key in draws), "nll"])
    return [draws[key] for key in keys]


def _text(each: Mapping[str, ResampledMeasure], name: str) -> str:
    return each[name].measure.text(each[name].estimate, row_precision(each))


def _test_texts(draws: MeasureDraws, family: Family, name: str) -> list[str]:
    """The difference in NLL to the baseline with the half-width of its interval, and the p-value of the paired test."""
    if (name,) not in family.comparisons:
        return ["–", "–"]
    _, lower, upper = family.comparisons[name,].interval(family.level)
    difference = draws["nll"][name].measure.text((lower + upper) / 2, (upper - lower) / 2, signed=True)
    return [f"{difference} ± {number_text((upper - lower) / 2, (upper - lower) / 2)}", p_text(family.p_values[name,])]


def _known_costs(draws: MeasureDraws, name: str) -> dict[str, float]:
    """Key -> cost of a method, where it is known and not zero."""
    known = {key: draws[key][name].estimate for key in PRICES if name in draws.get(key, {})}
    return {key: value for key, value in known.items() if value > 0}


def _times(value: float, unit: float) -> str:
    return f"{number_text(value / unit, value / unit)} ×"
