"""Runs a task over a grid: settings, or the width, each at several values; trains and measures all cells, then reports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from dissensus.bench.report import figure_sections, tables
from dissensus.bench.report.comparisons import Family, compare_methods, comparison_family
from dissensus.bench.report.html_report import CellsPage, comparison_sentence, write_page
from dissensus.bench.report.measures import Measure
from dissensus.bench.report.results import Results, table_text
from dissensus.bench.report.tables import MeasureDraws, Row, Table
from dissensus.bench.rows.task_rows import DataCache
from dissensus.bench.run import jobs
from dissensus.bench.run.run import Run, ignore_message
from dissensus.bench.task.config import Task, apply_override, run_config
from dissensus.bench.task.objects import base_name, setting_path
from dissensus.bench.task.schema import GridAxis, check_task, fields_of
from dissensus.bench.width_axis import rows_of_runs, width_cells, width_page
from dissensus.plots.charts import colours
from dissensus.utils.checks import number, one_of


@dataclass(frozen=True)
class Axis:
    name: str
    label: str
    log: bool
    values: list[float]
    settings: dict[str, list[Any]]  # setting, as on the command line -> one value for each of `values`


class GridCell(NamedTuple):
    """A task at one point of the grid."""

    name: str
    axis_values: dict[str, float]  # axis -> value
    task: Task


def axes_of(task: Task) -> list[Axis]:
    """The axes of a task, in its order."""
    return [_axis(name, table, task) for name, table in task.settings["grid"].items()]


def cells_of(task: Task, methods: Sequence[str]) -> list[GridCell]:
    """All cells, the last axis varying fastest; settings of methods that do not run are left out."""
    axes, found, running = axes_of(task), [], {*methods, *map(base_name, methods)}
    plain = {key: value for key, value in task.settings.items() if key != "grid"}
    for places in product(*(range(len(axis.values)) for axis in axes)):
        settings, here = plain, list(zip(axes, places, strict=True))
        for axis, i in here:
            for key, values in axis.settings.items():
                path = setting_path(key, running)
                if path[0] != "method" or len(path) < 3 or path[1] in running:  # method.NAME.key is for NAME only
                    change = f"{key}={json.dumps(values[i])}"
                    settings = apply_override(settings, change, methods=methods, beside=str(task.folder or ""))
        at = {axis.name: axis.values[i] for axis, i in here}
        name = "-".join(f"{axis}{value:g}" for axis, value in at.items())
        check_task(settings, f"{task.name}, {name}")
        found.append(GridCell(name, at, replace(task, settings=settings)))
    return found


def _axis(name: str, table: Mapping[str, Any], task: Task) -> Axis:
    settings = {key: value for key, value in table.items() if "." in key}
    for key in table.keys() - settings.keys():
        one_of(f'a key of [grid.{name}], or a setting as "data.train"', key, fields_of(GridAxis))
    if not settings:
        raise ValueError(f'expected a setting in [grid.{name}], got none; write for example "data.train" = [100, 1000]')
    values = table.get("values", next(iter(settings.values())))
    for key, several in settings.items():
        if not isinstance(several, list) or not isinstance(values, list) or len(several) != len(values):
            raise ValueError(f"expected a {key} for each of {values!r} in [grid.{name}], got {several!r}; pass a list")
        _check_set_once(key, task.settings, f"[grid.{name}]")
    numbers = [float(number(f"grid.{name}: a value of the axis", each)) for each in values]
    return Axis(name, str(table.get("label", name)), bool(table.get("log", False)), numbers, settings)


def _check_set_once(key: str, settings: Mapping[str, Any], where: str) -> None:
    """Raises if the task also sets a setting of the grid: one of the two would be ignored silently."""
    section, *rest = key.split(".")
    every_method = section == "method" and len(rest) == 1
    known = list(settings.get("method", {}).values()) if every_method else [settings.get(section, {})]
    for table in known:
        for part in rest:
            table = table.get(part) if isinstance(table, Mapping) else None
        if table is not None:
            raise ValueError(f"expected {key} in {where} only, got it elsewhere in the task too; remove one")


SHOWN = ("accuracy", "nll", "ece", "noise/memorised", "noise/recovered", "rmse", "coverage90")
QUALITY = "Quality over {label}: means over seeds; bands are 95 % intervals (seeds and test examples), cut where a panel ends."
RESULTS = "Bold: best in its row. ≈: not distinguishable from the best (p ≥ 0.05). In brackets: 95 % intervals."
DIFFERENCES = "On the same test examples and seeds; bold: better with p < 0.05 over several seeds."
LEARNING = "Accuracy over epochs, on up to 1,000 rows of each kind: means over seeds; bands from lowest to highest."


class MeasuredCell(NamedTuple):
    """A cell with its results, the measures to show, and their resamples."""

    cell: GridCell
    results: Results
    measures: list[Measure]
    draws: MeasureDraws


def bench_grid(
    task: Task,
    *,
    methods: Sequence[str] | None = None,
    seeds: int = 1,
    out: str | Path | None = None,
    baseline: str | None = None,
    holm: bool = False,
    **options: Unpack[jobs.RunOptions],
) -> tuple[list[str], list[Path]]:
    """(sentences, files) of a task over a grid; arguments as in `jobs.bench`. Finished stages are not repeated."""
    chosen, folder = jobs.methods_and_folder(task, methods, out, seeds, baseline, options.get("jobs", 1))
    source, tell, count = options.get("source"), options.get("tell", ignore_message), options.get("jobs", 1)
    if "widths" in task.settings:
        if methods is not None or baseline is not None or holm:
            raise ValueError("expected no --methods, --baseline or --holm for a task over widths, got one; omit it")
        widths = width_cells(task, range(seeds))
        runs = jobs.begin_runs(task, [cell.config for cell in widths], folder, source=source)
        jobs.refuse_narrower(folder, runs)
        jobs.run_in_processes([[run] for run in runs], count, source=source, tell=tell, keep_going=True)
        tell("writing the report")
        return write_page(width_page(rows_of_runs(widths, runs), task.title, task.description), folder)
    cells = cells_of(task, chosen)
    asked = begin_cells(cells, chosen, range(seeds), folder, source=source)
    runs = list({id(run): run for several in asked for run in several}.values())
    jobs.refuse_narrower(folder, runs)
    evaluations = dict(zip(map(id, runs), jobs.finish_runs(runs, **options), strict=True))
    tell("writing the report")
    measured = []
    for cell, several in zip(cells, asked, strict=True):
        results = jobs.results_of_runs(several, [evaluations[id(run)] for run in several])
        results = results.with_baseline(None, holm=holm)
        measured.append(MeasuredCell(cell, results, *tables.measures_and_draws(results, SHOWN)))
    beside = baseline or measured[0].results.baseline or chosen[0]
    return write_page(grid_page(task, axes_of(task), measured, beside), folder)


def begin_cells(
    cells: Sequence[GridCell], methods: Sequence[str], seeds: Sequence[int], out: Path, *, source: str | None
) -> list[list[Run]]:
    """The runs of every cell, method by method; cells with equal settings share a run."""
    load, there, found = DataCache(source), dict[str, Run](), []
    for cell in cells:
        configs = [run_config(cell.task, method, seed) for method in methods for seed in seeds]
        keys = [json.dumps(config.table(), sort_keys=True) for config in configs]
        new = {key: config for key, config in zip(keys, configs, strict=True) if key not in there}
        if new:
            runs = jobs.begin_runs(cell.task, list(new.values()), out / cell.name, source=source, load=load)
            there |= dict(zip(new, runs, strict=True))
        found.append([there[key] for key in keys])
    return found


def grid_page(task: Task, axes: Sequence[Axis], measured: Sequence[MeasuredCell], baseline: str) -> CellsPage:
    """The page of a grid: quality over the first axis, learning curves, results and differences in every cell."""
    first, first_axis = measured[0].results, axes[0]
    palette, (every, against) = colours(list(first.methods)), compare_cells(measured, baseline)
    shown = quality_rows(axes, measured)
    drawn = figure_sections.setting_figure(shown, label=first_axis.label, log=first_axis.log, palette=palette)
    figures = {"grid.png": (drawn, QUALITY.format(label=first_axis.label))}
    learning = {cell_label(axes, each.cell): figure_sections.epoch_data(each.results, "curves") for each in measured}
    if learned := {label: found for label, found in learning.items() if found}:
        figures["curves.png"] = (figure_sections.epoch_figure(learned, "curves", palette=palette), LEARNING)
    count = len(next(iter(first.methods.values())))
    results = [tables.main_table(*each[1:]) for each in measured]
    pairs = zip(measured, against, strict=True)
    differences = [tables.difference_table(*each[1:3], found, baseline) for each, found in pairs]
    told = f"{DIFFERENCES} {comparison_sentence(first, every)}"
    sections = [
        (f"Results{f' of {count} seeds' if count > 1 else ''}", RESULTS, join_tables(axes, measured, results)),
        (f"Differences to {baseline}", told, join_tables(axes, measured, differences)),
    ]
    said = focus_sentences(axes, measured, against, first.focus, baseline)
    texts = {"results.csv": results_csv(measured)}
    return CellsPage(task.title, first.description, said, first.facts, sections, figures, texts)


def compare_cells(measured: Sequence[MeasuredCell], baseline: str) -> tuple[Family, list[Family]]:
    """All methods against the baseline: one family over all cells, by cell, measure and method; and one family per cell."""
    pairs = [(each.cell.name, measure, each.draws[measure.key]) for each in measured for measure in each.measures]
    found: dict[tuple[str, ...], Any] = {
        (cell, measure.key, name): compare_methods(one, draws[baseline])
        for cell, measure, draws in pairs
        for name, one in draws.items()
        if measure.best is not None and name != baseline and baseline in draws
    }
    every = comparison_family(found, holm=measured[0].results.holm)
    both: tuple[dict[tuple[str, ...], Any], ...] = every.comparisons, every.p_values
    names = [each.cell.name for each in measured]
    parts = [[{key[1:]: value for key, value in table.items() if key[0] == name} for table in both] for name in names]
    return every, [Family(compared, p_values, every.level) for compared, p_values in parts]


def join_tables(axes: Sequence[Axis], measured: Sequence[MeasuredCell], each_table: Sequence[Table]) -> Table:
    """The cells' tables joined into one, measure by measure."""
    rows: dict[str, list[Row]] = {}
    for each, table in zip(measured, each_table, strict=True):
        for row in table.rows:
            rows.setdefault(row.label, []).append(replace(row, label=cell_label(axes, each.cell), group=row.label))
    return replace(each_table[0], rows=[row for several in rows.values() for row in several])


def cell_label(axes: Sequence[Axis], cell: GridCell) -> str:
    return ", ".join(f"{axis.label} {cell.axis_values[axis.name]:g}" for axis in axes)


def quality_rows(axes: Sequence[Axis], measured: Sequence[MeasuredCell]) -> figure_sections.OverValues:
    """Draws every measure against the first axis, with one row of panels per place on the other axes."""
    rows: figure_sections.OverValues = {}
    known = {measure.key: measure for each in measured for measure in each.measures}
    for each in measured:
        row = rows.setdefault(cell_label(axes[1:], each.cell), {measure: {} for measure in known.values()})
        for measure in each.measures:
            for name, draws in each.draws[measure.key].items():
                interval = draws.interval()
                ends = (draws.estimate,) * 2 if interval is None else (interval.lower, interval.upper)
                points = row[known[measure.key]].setdefault(name, {})
                points[each.cell.axis_values[axes[0].name]] = (draws.estimate, *ends)
    return rows


def focus_sentences(
    axes: Sequence[Axis], measured: Sequence[MeasuredCell], against: Sequence[Family], focus: str | None, baseline: str
) -> list[str]:
    """Sentences on the task's focus against the baseline, in every cell; empty if the task has no focus."""
    said: dict[str, list[str]] = {}
    for each, found in zip(measured, against, strict=True):
        for measure in each.measures:
            if (one := found.comparisons.get((measure.key, focus or ""))) is not None:
                values = f"{measure.text(one.first)} against {measure.text(one.second)}"
                p_value = tables.p_text(found.p_values[measure.key, focus or ""])
                told = said.setdefault(f"{measure.label}{f', {measure.unit}' if measure.unit else ''}", [])
                told.append(f"{cell_label(axes, each.cell)}: {values} ({p_value})")
    return [f"{label}, {focus} against {baseline}: {'; '.join(cells)}." for label, cells in said.items()]


def results_csv(measured: Sequence[MeasuredCell]) -> str:
    """results.csv: one row per cell, method and seed, every metric in full precision."""
    rows = [
        each.cell.axis_values | origin | {key: repr(value) for key, value in evaluation.metrics.items()}
        for each in measured
        for origin, evaluation in each.results.iterate_evaluations()
    ]
    return table_text(list(dict.fromkeys(key for row in rows for key in row)), rows)
