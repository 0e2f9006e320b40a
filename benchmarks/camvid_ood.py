"""CamVid with unknown objects: the numbers of finished runs as CSV, and what they say.

    python benchmarks/camvid_ood.py runs/camvid runs/camvid-car runs/camvid-tradi
    python benchmarks/tables.py

docs/results/segmentation.md names the commands that make the runs. The network, the recipe and the paper's numbers stand in
the task. Differences to MAP are paired image by image on the seeds that both methods have, by the report's own statistics,
with Holm's adjustment for all comparisons of a folder.
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from statistics import fmean

from finished import comparison_rows, finished
from rows import Row, by_key, markdown, origins_of, seeds_of, write_rows

from dissensus.bench.report.comparisons import SIGNIFICANT, spread_of
from dissensus.bench.report.figure_sections import segmentation_section
from dissensus.bench.report.published_numbers import published_numbers
from dissensus.bench.report.report_figures import write_png
from dissensus.bench.report.results import Results
from dissensus.bench.report.tables import compare_with_baseline, measures_and_draws
from dissensus.bench.task.config import read_task

HERE = Path(__file__).parent
NUMBERS, PAIRS = "camvid_ood.csv", "camvid_ood_pairs.csv"
PICTURE = HERE.parent / "docs" / "figures" / "camvid-ood.png"
OOD = "ood/unknown/"
COLUMNS = {  # metric -> (column, factor, digits)
    "miou": ("mIoU %", 100, 1),
    "nll": ("NLL", 1, 3),
    "ece": ("ECE %", 100, 1),
    f"{OOD}auroc": ("AUROC %", 100, 1),
    f"{OOD}aupr": ("AUPR %", 100, 1),
    f"{OOD}fpr95": ("FPR95 %", 100, 1),
    f"{OOD}ece_union": ("ECE %, union", 100, 1),
    f"{OOD}total/auroc": ("AUROC %, total", 100, 1),
    f"{OOD}epistemic/auroc": ("AUROC %, epistemic", 100, 1),
    "cost/train_seconds": ("training, s", 1, 0),
}
SHOWN = ("miou", "nll", f"{OOD}auroc", f"{OOD}fpr95")  # the others are in the file
COMPARED = ("miou", "nll", f"{OOD}auroc", f"{OOD}aupr", f"{OOD}fpr95", f"{OOD}fpr95_in")
NAMES = {
    "map": "MAP (MCP)",
    "gaussian_perturbation": "Gaussian perturbation",
    "mc_dropout": "MC dropout",
    "swag": "SWAG",
    "tradi": "TRADI",
    "tradi-wide": "TRADI, state noise 1e-2 and 5e-3",
    "tradi-diagonal": "TRADI, diagonal",
    "deep_ensemble": "Deep ensemble",
    "batch_ensemble": "BatchEnsemble",
    "node_bnn": "NodeBNN",
    "forde": "FoRDE",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders that `dissensus bench camvid-ood` wrote")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    given = parser.parse_args()
    numbers: list[Row] = []
    pairs: list[Row] = []
    for number, folder in enumerate(given.runs):
        results = finished(folder)
        config = tomllib.loads(next(folder.glob("*/config.toml")).read_text())
        unknown = "+".join(config["data"]["unknown"])
        if any(row["unknown"] == unknown for row in numbers):  # other settings on the same classes
            unknown += f" ({folder.name})"
        for origin, evaluation in results.iterate_evaluations():
            kept = [*COLUMNS, *(key for key in evaluation.metrics if key.startswith("iou/"))]
            measured = {key: evaluation.metrics[key] for key in kept if key in evaluation.metrics}
            numbers.append({"unknown": unknown} | origin | measured)
        pairs += [{"unknown": unknown} | row for row in paired_rows(results)]
        if number == 0 and (
            made := segmentation_section({method: several[0] for method, several in results.methods.items()})
        ):
            write_png(made[1][1][1], PICTURE)  # the second scene: the first is a dark street
    write_rows(given.results / NUMBERS, numbers)
    write_rows(given.results / PAIRS, pairs)


def paired_rows(results: Results) -> list[Row]:
    """Every method minus MAP, image by image."""
    found, draws = measures_and_draws(results.with_baseline("map", holm=True))
    shown = [measure for measure in found if measure.key in COMPARED]
    against = compare_with_baseline(results.with_baseline("map", holm=True), shown, draws, "map")
    return [row for _, row in comparison_rows(against)]


def page(numbers: list[Row], pairs: list[Row]) -> str:
    """Tables of every choice of unknown classes, with what the comparisons say."""
    parts = []
    for unknown, mine in by_key(numbers, "unknown").items():
        compared = [row for row in pairs if row["unknown"] == unknown]
        parts += [
            f"### Unknown: {unknown.replace('+', ' and ')}",
            number_table(mine, compared),
            *said(compared),
            f"*`python benchmarks/camvid_ood.py RUNS`; {seeds_of(mine, NAMES)}, the paper's numbers in square brackets; "
            f"{origins_of(mine)}.*",
        ]
    return "\n\n".join(parts)


def number_table(rows: list[Row], pairs: list[Row]) -> str:
    """Means over seeds; bold: differs from MAP."""
    paper = published_numbers(read_task("camvid-ood")["reference"])
    sure = {(row["method"], row["metric"]) for row in pairs if float(row["p_value"]) < SIGNIFICANT}
    lines = []
    for method, mine in by_key(rows, "method").items():
        cells = [NAMES[method]]
        for key in SHOWN:
            _, factor, digits = COLUMNS[key]
            values = [factor * float(row[key]) for row in mine if row[key]]
            half = f" ± {spread_of(values, 0.0).half_width():.{digits}f}" if len(values) > 1 else ""
            number = paper.get(method, {}).get(key)
            text = f"{fmean(values):.{digits}f}{half}"
            text = f"**{text}**" if (method, key) in sure else text
            cells.append(text + ("" if number is None else f" [{factor * number.value:.{digits}f}]"))
        lines.append(cells)
    return markdown(["method", *(COLUMNS[key][0] for key in SHOWN)], lines)


def said(rows: list[Row]) -> list[str]:
    """What the comparisons of deep ensemble and TRADI with MAP say of the paper's two claims."""
    sentences = []
    for method in ("deep_ensemble", "tradi", "tradi-wide", "tradi-diagonal"):
        mine = {row["metric"]: row for row in rows if row["method"] == method}
        found = [mine[key] for key in (f"{OOD}auroc", f"{OOD}fpr95") if key in mine]
        ends = ("difference", "lower", "upper")
        each = [[minus(100 * float(row[end]), 1) for end in ends] for row in found]
        texts = [
            f"{COLUMNS[row['metric']][0].removesuffix(' %')} {d} ({low} to {high})"
            for row, (d, low, high) in zip(found, each, strict=True)
        ]
        if found:
            counted = found[0]["counted"].replace("test examples", "test images")
            sentences.append(f"{NAMES[method]} less MAP: {', '.join(texts)} points, counting {counted}.")
    adjusted = (
        f"Bold: differs from MAP, p < {SIGNIFICANT:g} after Holm's adjustment for {rows[0]['comparisons']} comparisons, as the "
        f"intervals are (`{PAIRS}`)."
    )
    return [" ".join([adjusted, *sentences])] if sentences else []


def minus(value: float, digits: int) -> str:
    """A signed number with a minus sign; none before a zero."""
    text = f"{value:+.{digits}f}".replace("-", "−")
    return text if any(digit in text for digit in "123456789") else text[1:]


if __name__ == "__main__":
    main()
