"""Which method to take, why, how sure that is, and at what price."""

from collections.abc import Mapping
from typing import NamedTuple

from dissensus.bench.report.comparisons import SIGNIFICANT, Family, ResampledMeasure, compare_methods, comparison_family
from dissensus.bench.report.measures import number_text
from dissensus.bench.report.results import Results
from dissensus.bench.report.tables import Cell, MeasureDraws, Row, Table, overlap_by_method, p_text, row_precision

PRICES = ("cost/train_seconds", "cost/predict_ms", "cost/memory_mb")


class Recommendation(NamedTuple):
    """The method to take (None: no advice), and sentences by the question they answer."""

    method: str | None
    title: str
    sentences: dict[str, str]


def recommend(results: Results, draws: MeasureDraws, baseline: str) -> Recommendation | None:
    """The method with the lowest NLL of those better than the baseline in a paired test; None for a single method.

    Better means p < 0.05 after Holm's correction, and by enough to matter. A method near chance is never taken.
    """
    each, family = draws["nll"], nll_family(results, draws, baseline)
    able = [name for name in each if name not in results.near_chance]
    if len(each) < 2:
        return None
    if "own" in overlap_by_method(each).values():
        return Recommendation(None, "No advice: methods were tested on different examples", {})
    if not able:
        return Recommendation(None, "Take none: no method is better than a constant answer", {})
    if not family.comparisons:
        return Recommendation(None, "No advice: no paired test is possible", {})
    better = [
        name
        for (name,), compared in family.comparisons.items()
        if compared.difference < 0 and family.p_values[name,] < SIGNIFICANT
        if not each[name].measure.is_negligible(compared.first, compared.second)
    ]
    lowest = min(better or able, key=lambda name: each[name].estimate)
    taken, seeds = lowest if better else baseline, min(map(len, results.methods.values()))
    title = f"Take {taken}" if better else f"None is better than {baseline}"
    sure = f"Tests count test examples and at least {seeds} seeds of every method."
    if seeds == 1:
        title += ", on one seed"
        sure = (
            "Every method was trained once: tests count test examples, not the variation of training. Run five seeds."
        )
    said = {"Why": _reason(draws, family, lowest, baseline), "How sure": sure}
    said |= {"Price": price} if (price := _price_text(draws, taken, baseline)) else {}
    return Recommendation(taken if taken in able else None, title, said)


def featured_methods(results: Results, draws: MeasureDraws) -> list[str]:
    """The method to take and the baseline, for figures that have no room for all."""
    baseline = results.baseline or next(iter(results.methods))
    advice = recommend(results, draws, baseline)
    return list(dict.fromkeys([(advice and advice.method) or baseline, baseline]))


def nll_family(results: Results, draws: MeasureDraws, baseline: str) -> Family:
    """Every other method, except those near chance, against the baseline in NLL; adjusted for their number (Holm)."""
    each = draws["nll"]
    others = [name for name in each if name not in results.near_chance and name != baseline]
    return comparison_family({(name,): compare_methods(each[name], each[baseline]) for name in others}, holm=True)


def summary_table(results: Results, draws: MeasureDraws, baseline: str, taken: str | None) -> Table:
    """One row per method: its quality, its NLL against the baseline's, and its price in multiples of the baseline's."""
    family, units, rows = nll_family(results, draws, baseline), _prices(draws, baseline), []
    quality = list(dict.fromkeys([_quality_key(draws), "nll"]))
    for name in results.methods:
        texts = [_estimate_text(draws[key], name) if name in draws[key] else "–" for key in quality]
        if (name,) in family.comparisons:
            texts += [_difference_text(draws, family, name), p_text(family.p_values[name,])]
        else:
            texts += ["–", "near chance" if name in results.near_chance else "–"]
        spent = _prices(draws, name)
        texts += [_ratio_text(spent[key] / units[key]) if key in spent else "–" for key in units]
        rows.append(Row(name, "", "", [Cell(text, best=name == taken, clear=name == taken) for text in texts]))
    labels = {key: next(iter(draws[key].values())).measure for key in (*quality, *units)}
    columns = [", ".join(filter(None, (labels[key].label, labels[key].unit))) for key in quality]
    columns += [f"NLL minus {baseline}'s", "Paired test", *(labels[key].label for key in units)]
    return Table(columns, rows)


def _reason(draws: MeasureDraws, family: Family, name: str, baseline: str) -> str:
    """A method's NLL against the baseline's with its test, and its quality beside it."""
    if name == baseline:
        return f"{baseline} has the lowest NLL, {_estimate_text(draws['nll'], name)} nats."
    if (name,) not in family.comparisons:
        return f"{name} has the lowest NLL, which no paired test can compare with {baseline}'s."
    key, tested = _quality_key(draws), f"paired test, {p_text(family.p_values[name,])}"
    pairs = {k: " against ".join(_estimate_text(draws[k], each) for each in (name, baseline)) for k in ("nll", key)}
    measure = draws[key][name].measure
    beside = f"; {measure.label} {pairs[key]} {measure.unit}".rstrip() if key != "nll" else ""
    return f"{name} has NLL {pairs['nll']} nats: {_difference_text(draws, family, name)} ({tested}){beside}."


def _difference_text(draws: MeasureDraws, family: Family, name: str) -> str:
    """The difference in NLL to the baseline and the half-width of its interval."""
    interval = family.comparisons[name,].interval(family.level)
    half = (interval.upper - interval.lower) / 2
    return f"{draws['nll'][name].measure.text(interval.estimate, half, signed=True)} ± {number_text(half, half)}"


def _estimate_text(each: Mapping[str, ResampledMeasure], name: str) -> str:
    return each[name].measure.text(each[name].estimate, row_precision(each))


def _quality_key(draws: MeasureDraws) -> str:
    return next(key for key in ("miou", "accuracy", "rmse", "nll") if key in draws)


def _prices(draws: MeasureDraws, name: str) -> dict[str, float]:
    """Key -> cost of a method, where it is known and not zero."""
    known = {key: draws[key][name].estimate for key in PRICES if name in draws.get(key, {})}
    return {key: value for key, value in known.items() if value > 0}


def _price_text(draws: MeasureDraws, name: str, baseline: str) -> str:
    """The costs of a method; if it is not the baseline, with their multiples of the baseline's."""
    units, parts = _prices(draws, baseline), []
    for key, value in _prices(draws, name).items():
        measure = draws[key][name].measure
        times = f" ({_ratio_text(value / units[key])} {baseline}'s)" if name != baseline and key in units else ""
        parts.append(f"{measure.label} {number_text(value, value)} {measure.unit}{times}")
    return f"{'; '.join(parts)}." if parts else ""


def _ratio_text(ratio: float) -> str:
    return f"{number_text(ratio, ratio)} ×"
