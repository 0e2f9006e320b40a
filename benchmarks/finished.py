"""Results of whatever runs in a folder are finished, and rows of their comparisons."""

from collections.abc import Iterator
from pathlib import Path

from rows import Row

from dissensus.bench.report.comparisons import Family
from dissensus.bench.report.results import Results
from dissensus.bench.run import jobs
from dissensus.bench.run.jobs import results_of_runs
from dissensus.bench.run.run import Run
from dissensus.bench.task.config import load_task


def finished(folder: Path) -> Results:
    """The results of all evaluated runs in a folder that `dissensus bench` or `train` wrote, in the order of the task."""
    runs = [Run.open(each) for each in jobs.find_runs([folder]) if (each / "metrics.json").is_file()]
    if not runs:
        raise SystemExit(f"expected evaluated runs in {folder}, got none; run `dissensus bench` first")
    order = load_task(runs[0].config.task, size=runs[0].config.size).methods
    methods = [*order, *sorted({run.config.method for run in runs} - set(order))]
    runs.sort(key=lambda run: (methods.index(run.config.method), run.config.seed))
    return results_of_runs(runs, [run.measure() for run in runs])


def comparison_rows(every: Family) -> Iterator[tuple[tuple[str, ...], Row]]:
    """(key, row) of every comparison; a key ends in measure and method."""
    for key, one in every.comparisons.items():
        low, high = one.interval(every.level)[1:]
        yield (
            key,
            {
                "metric": key[-2],
                "method": key[-1],
                "seeds": one.seeds,
                "difference": one.difference,
                "lower": low,
                "upper": high,
                "p_value": every.p_values[key],
                "comparisons": len(every.comparisons),
                "counted": one.counted_text,
            },
        )
