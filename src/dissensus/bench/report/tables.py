"""The tables of a report: cells of text with intervals; the best value and its equals are marked."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from torch import Tensor

from dissensus.bench.report import comparisons
from dissensus.bench.report.comparisons import SIGNIFICANT, Family, Overlap, ResampledMeasure
from dissensus.bench.report.measures import Measure, distance_measures, measures, member_measures
from dissensus.bench.report.results import Results, all_have_metric, mean_over_seeds
from dissensus.evaluation.evaluation import Evaluation
from dissensus.evaluation.row_metrics import OOD_SCORES
from dissensus.metrics import auroc
from dissensus.utils.checks import one_of


@dataclass(frozen=True)
class Cell:
    """One number: its text, its interval, and whether it is the best or not distinguishable from the best."""

    text: str
    interval: str = ""
    best: bool = False  # bold: no number of the row is better
    clear: bool = False  # shaded: better beyond noise (p < 0.05, over several seeds), and by enough to matter
    equal: bool = False  # p ≥ 0.05 against the best
    note: str = ""  # p-value


@dataclass(frozen=True)
class Row:
    label: str
    unit: str
    arrow: str
    cells: list[Cell]
    group: str = ""


@dataclass(frozen=True)
class Table:
    columns: list[str]
    rows: list[Row]
    below: list[str] = field(default_factory=list)  # second line of each column's heading: number of seeds
    notes: list[str] = field(default_factory=list)  # texts of the marks behind methods' names

    @property
    def headings(self) -> list[str]:
        """Headings of the columns, one line each."""
        return [f"{name} ({below})" for name, below in zip(self.columns, self.below, strict=False)] or self.columns

    def methods_as_rows(self) -> "Table":
        """The same numbers with one row per method; a measure's group is the second line of its heading."""
        columns = [", ".join(filter(None, (row.label, row.unit))) + f" {row.arrow}".rstrip() for row in self.rows]
        rows = [Row(name, "", "", [row.cells[i] for row in self.rows]) for i, name in enumerate(self.headings)]
        return Table(columns, rows, [row.group for row in self.rows], self.notes)


MeasureDraws = dict[str, dict[str, ResampledMeasure]]  # measure's key -> method -> resamples


def measures_and_draws(results: Results, only: Collection[str] | None = None) -> tuple[list[Measure], MeasureDraws]:
    """The measures that are shown, and resamples of all for every method that has them; `only`: restricts to these keys."""
    found: dict[str, Measure] = {}
    for several in results.methods.values():
        found |= {measure.key: measure for measure in measures(several[0]) if measure.key not in found}
    found = {key: measure for key, measure in found.items() if only is None or key in only}
    draws: MeasureDraws = {}
    for key, measure in found.items():
        known = {name: each for name, each in results.methods.items() if all_have_metric(key, each)}
        seeds = {name: results.seeds(name) for name in known}
        draws[key] = {n: comparisons.resample_measure(measure, known[n], seeds=seeds[n]) for n in known}
    return [found[one_of("a metric", key, found)] for key in results.metrics or found], draws


def main_table(results: Results, found: Sequence[Measure], draws: MeasureDraws) -> Table:
    """Every measure of every method; the best is marked and all others, except those near chance, are compared with it."""
    rivals = without_methods(draws, results.near_chance)
    best = {measure.key: best_method(rivals[measure.key]) for measure in found}
    compared: dict[tuple[str, ...], comparisons.MethodComparison | None] = {
        (key, name): comparisons.compare_methods(each, draws[key][str(best[key])])
        for key in best
        for name, each in rivals[key].items()
        if best[key] is not None and name != best[key]
    }
    against = comparisons.comparison_family(compared, holm=results.holm)
    rows = []
    for measure in found:
        each, first = draws[measure.key], best[measure.key]
        half = row_precision(each)
        if len({measure.text(one.estimate, half) for one in rivals[measure.key].values()}) == 1:
            first = None  # all shown values are equal: nothing to mark
        clear = first is not None and all(
            against.p_values.get((measure.key, name), 1.0) < SIGNIFICANT
            and against.comparisons[measure.key, name].seeds > 1  # one seed shows no variation over seeds
            and not measure.is_negligible(other.estimate, each[first].estimate)
            for name, other in rivals[measure.key].items()
            if other.estimate != each[first].estimate
        )
        marked = rivals[measure.key].keys() if first else ()
        cells = [
            _cell(each[name], half, each[first or name], against.p_values.get((measure.key, name)), clear=clear)
            if name in marked
            else _cell(each[name], half, None, None)
            if name in each
            else Cell("1" if measure.key == "members/count" else "–")  # a single network has no members
            for name in results.methods
        ]
        rows.append(measure_row(measure, cells))
    return _noted_table(results, list(results.methods), rows)


def without_methods(draws: MeasureDraws, methods: Collection[str]) -> MeasureDraws:
    """The resamples of all other methods."""
    return {key: {name: d for name, d in each.items() if name not in methods} for key, each in draws.items()}


def compare_with_baseline(results: Results, found: Sequence[Measure], draws: MeasureDraws, baseline: str) -> Family:
    """Every other method compared with the baseline in every measure that can be better or worse."""
    compared: dict[tuple[str, ...], comparisons.MethodComparison | None] = {
        (measure.key, name): comparisons.compare_methods(each, draws[measure.key][baseline])
        for measure in found
        for name, each in draws[measure.key].items()
        if measure.best is not None and name != baseline and baseline in draws[measure.key]
    }
    return comparisons.comparison_family(compared, holm=results.holm)


def difference_table(results: Results, found: Sequence[Measure], against: Family, baseline: str) -> Table:
    """Every other method minus the baseline, with the interval and the p-value of no difference."""
    others = [name for name in results.methods if name != baseline]
    rows = []
    for measure in found:
        pairs = [(measure.key, name) for name in others]
        if not any(pair in against.comparisons for pair in pairs):
            continue
        cells = []
        for pair in pairs:
            comparison = against.comparisons.get(pair)
            if comparison is None:
                cells.append(Cell("–"))
                continue
            interval, p_value = comparison.interval(against.level), against.p_values[pair]
            widest = measure.possible_range[1] - measure.possible_range[0]  # the largest possible difference
            lower, upper = max(interval.lower, -widest), min(interval.upper, widest)
            better = measure.goodness(comparison.first) > measure.goodness(comparison.second)
            better = better and pair[1] not in results.near_chance
            noticed = better and not measure.is_negligible(comparison.first, comparison.second)
            clear = p_value < SIGNIFICANT and noticed and comparison.seeds > 1
            half, shown = (interval.upper - interval.lower) / 2, interval._replace(lower=lower, upper=upper)
            ends = measure.interval_text(shown, half, signed=True)
            text = measure.text(interval.estimate, half, signed=True)
            cells.append(Cell(text, interval=ends, best=clear, clear=clear, note=p_text(p_value)))
        rows.append(measure_row(measure, cells))
    return _noted_table(results, others, rows)


def member_table(results: Results) -> Table | None:
    """Mixtures and their members; None if no method has several members."""
    several = {name: each for name, each in results.methods.items() if "members/count" in each[0].metrics}
    return _mean_table(results, several, [m for each in several.values() for m in member_measures(each[0])])


def distance_table(results: Results) -> Table | None:
    """Distances between the trained members of every method at training inputs; None if not measured."""
    known = {name: each for name, each in results.methods.items() if "distances/weight" in each[0].metrics}
    return _mean_table(results, known, distance_measures())


def _mean_table(results: Results, methods: Mapping[str, list[Evaluation]], found: Sequence[Measure]) -> Table | None:
    """Means over seeds for some methods, one row per measure; None without rows or methods."""
    rows = []
    for key, measure in {each.key: each for each in found}.items():
        means = [mean_over_seeds(key, each) if all_have_metric(key, each) else None for each in methods.values()]
        cells = [Cell("–" if mean is None else measure.text(mean)) for mean in means]
        rows.append(Row(measure.label, measure.unit, "", cells))
    return method_table(results, list(methods), rows) if methods and rows else None


def corruption_table(results: Results, measure: Measure) -> Table | None:
    """A measure for every type of corruption, averaged over severities and seeds."""
    kinds = next(iter(results.methods.values()))[0].corruptions
    return _mean_table(results, results.methods, [_submeasure(measure, f"corrupt/{kind}", kind) for kind in kinds])


def attack_table(results: Results, measure: Measure) -> Table | None:
    """A measure for every attack at every ε, averaged over seeds."""
    keys = dict.fromkeys(key for several in results.methods.values() for key in several[0].metrics)
    split = [key.split("/") for key in keys if key.startswith("attack/") and key.endswith(f"/{measure.key}")]
    found = [_submeasure(measure, "/".join(each[:3]), f"{each[1]}, ε = {each[2]}") for each in split if len(each) == 4]
    return _mean_table(results, results.methods, found)


def _submeasure(measure: Measure, prefix: str, label: str) -> Measure:
    return replace(measure, key=f"{prefix}/{measure.key}", label=label.replace("_", " "))


def score_table(results: Results) -> Table | None:
    """AUROC of every score on every OOD set."""
    evaluations = [several[0] for several in results.methods.values()]
    rows = []
    for foreign in evaluations[0].ood:
        for name in OOD_SCORES["classification"]:  # which are those of regressions, too
            every = [[_score_auroc(each, foreign, name) for each in several] for several in results.methods.values()]
            found = [[value for value in several if value is not None] for several in every]
            if not any(found):
                continue
            cells = [Cell(f"{100 * fmean(values):.2f}" if values else "–") for values in found]
            rows.append(Row(name.replace("_", " "), "%", "↑", cells, foreign))
    return method_table(results, list(results.methods), rows) if rows else None


def _score_auroc(evaluation: Evaluation, foreign: str, score: str) -> float | None:
    """The AUROC of a score: for pixels as measured, else computed from the scores; None if the evaluation has neither."""
    pair = score_pair(evaluation, foreign, score)
    return evaluation.metrics.get(f"ood/{foreign}/{score}/auroc") if pair is None else float(auroc(*pair))


def score_pair(evaluation: Evaluation, foreign: str, score: str) -> tuple[Tensor, Tensor] | None:
    """A score of the test inputs and of an OOD set; None if the evaluation does not have it."""
    inside, outside = map(evaluation.arrays.get, (f"test/score/{score}", f"ood/{foreign}/score/{score}"))
    return None if inside is None or outside is None else (inside, outside)


def overlap_by_method(draws: dict[str, ResampledMeasure]) -> dict[str, Overlap]:
    """Whether each method was tested on the examples of the first method."""
    first = next(iter(draws.values()))
    return {name: comparisons.example_overlap(first, each) for name, each in draws.items()}


def best_method(draws: dict[str, ResampledMeasure]) -> str | None:
    """The method with the best estimate; None if there is none, or if methods were tested on different examples."""
    if len(draws) < 2 or "own" in overlap_by_method(draws).values():
        return None
    best = max(draws.values(), key=lambda each: each.measure.goodness(each.estimate))
    return next(name for name, each in draws.items() if each is best) if best.measure.best is not None else None


def row_precision(draws: Mapping[str, ResampledMeasure]) -> float | None:
    """The smallest half-width of a row's intervals, by which all its numbers are rounded; None without intervals."""
    return min((half for each in draws.values() if (half := each.half_width)), default=None)


def measure_row(measure: Measure, cells: list[Cell]) -> Row:
    best = measure.best
    arrow = f"→ {measure.text(best)}" if isinstance(best, float) else {"high": "↑", "low": "↓"}.get(best or "", "")
    return Row(measure.label, measure.unit, arrow, cells, measure.group)


def p_text(p_value: float) -> str:
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}"


def method_table(results: Results, names: Sequence[str], rows: list[Row]) -> Table:
    """A table of rows under these methods, with their numbers of seeds if these differ."""
    counts = {name: len(several) for name, several in results.methods.items()}
    below = [f"{counts[name]} seed{'s' * (counts[name] != 1)}" for name in names]
    return Table(list(names), rows, below if len(set(counts.values())) > 1 else [])


SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def _noted_table(results: Results, names: Sequence[str], rows: list[Row]) -> Table:
    """A `method_table` whose methods carry marks for their warnings, explained below; transposed if the results ask for it."""
    made = method_table(results, names, rows)
    texts = dict.fromkeys(text for name in names for text in results.notes[name])
    marks = {text: str(i).translate(SUPERSCRIPTS) for i, text in enumerate(texts, start=1)}
    columns = [name + " ".join(marks[text] for text in texts if text in results.notes[name]) for name in names]
    noted = replace(made, columns=columns, notes=[f"{mark} {text}" for text, mark in marks.items()])
    return noted.methods_as_rows() if results.transpose else noted


def _cell(
    mine: ResampledMeasure,
    half: float | None,
    best: ResampledMeasure | None,
    p_value: float | None,
    clear: bool = False,
) -> Cell:
    """A number, marked as best (several may be) or compared with the best; `clear`: whether the best wins clearly."""
    measure, interval, text = mine.measure, mine.interval(), mine.measure.text(mine.estimate, half)
    is_best = best is not None and measure.goodness(mine.estimate) == measure.goodness(best.estimate)
    marked = is_best or (best is not None and text == measure.text(best.estimate, half))
    p_value = None if is_best else p_value
    ends = "" if interval is None or half is None else measure.interval_text(interval, half)
    equal = not marked and p_value is not None and p_value >= SIGNIFICANT
    note = "" if p_value is None else p_text(p_value)
    return Cell(text, interval=ends, best=marked, clear=is_best and clear, equal=equal, note=note)
