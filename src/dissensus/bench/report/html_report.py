"""results.csv, report.md, one self-contained report.html, and the tables as LaTeX and CSV."""

import base64
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from dissensus.bench.report import prose, report_figures, tables
from dissensus.bench.report.comparisons import LEVEL, Family
from dissensus.bench.report.measures import Measure
from dissensus.bench.report.published_numbers import reference_sentences, reference_table
from dissensus.bench.report.results import CONTROL, Results, csv_text, table_text
from dissensus.storage.atomic_files import write_text
from dissensus.utils.progress import is_reporting_process

NAMES = {".csv": "results.csv", ".md": "report.md", ".html": "report.html"}
SUFFIXES = (*NAMES, ".tex")
PICTURES = {
    "most": "Most certain",
    "least": "Least certain",
    "mistakes": "Most certain mistakes",
    "fooling": "Noise turned into a class",
}


DETAILED = (  # measures of each corruption (the first two) and of each attack
    Measure("accuracy", "Accuracy, %", "", "high", 100, 2),
    Measure("nll", "NLL, nats", "", "low", 1, 3),
    Measure("ece", "ECE, %", "", "low", 100, 2),
    Measure("entropy", "Entropy, nats", "", None, 1, 3),
    Measure("mutual_information", "Mutual information, nats", "", None, 1, 3),
)


def write_report(results: Results, path: str | Path) -> list[Path]:
    """Writes results.csv, report.md and report.html into the folder `path`, or one file by its suffix; returns the paths."""
    path = Path(path)
    if path.suffix and path.suffix not in SUFFIXES and not path.is_dir():
        raise ValueError(f"expected a folder or a .csv, .md, .html or .tex file, got {path}; choose one of them")
    targets = {path.suffix: path} if is_single_file(path) else {end: path / name for end, name in NAMES.items()}
    if not is_reporting_process():  # the first process of a mesh writes
        return list(targets.values())
    content = None if list(targets) == [".csv"] else report_content(results, with_figures=".html" in targets)
    for end, target in targets.items():
        csv = end == ".csv"
        text = csv_text(results).translate(CONTROL) if csv else render_template(f"report{end}.j2", content or {})
        write_text(target, text)
    return list(targets.values())


def is_single_file(path: Path) -> bool:
    """Whether the path's suffix names one file; otherwise it is a folder."""
    return path.suffix in SUFFIXES and not path.is_dir()


def report_content(results: Results, *, with_figures: bool = True) -> dict[str, Any]:
    """The variables of the templates."""
    found, draws = tables.measures_and_draws(results)
    baseline, whole = results.baseline or next(iter(results.methods)), not results.metrics
    family = tables.compare_with_baseline(results, found, draws, baseline)
    against = family if family.comparisons else None
    alike = "own" not in tables.overlap_by_method(draws["nll"]).values()
    corruptions, attacks = (
        [(m.label, table) for m in of if (table := make(results, m.key, m, marked=alike and m.best is not None))]
        for make, of in ((tables.corruption_table, DETAILED[:2]), (tables.attack_table, DETAILED))
    )
    details = [
        ("By type of corruption", "Mean over severities.", corruptions),
        ("By attack and radius", "Uncertainty should grow where accuracy falls.", attacks),
    ]
    return {
        "title": results.title,
        "description": results.description,
        "banner": prose.SMOKE if any(each.get("size") == "smoke" for each, _ in results.iterate_evaluations()) else "",
        "headline": prose.headline(results, found, draws, against),
        "cautions": prose.cautions(results, draws),
        "claims": prose.question_sentences(results) if alike else [],
        "against_cost": report_figures.cost_section(results, draws) if with_figures else None,
        "main": tables.main_table(results, found, draws),
        "baseline": baseline,
        "differences": tables.difference_table(results, found, against, baseline) if against else None,
        "members": tables.member_table(results) if whole else None,
        "reference": reference_table(results, found),
        "reference_source": results.reference.get("source", "published numbers"),
        "reference_says": reference_sentences(results, found),
        "distances": tables.distance_table(results) if whole else None,
        "details": [each for each in details if each[2] and whole],
        "scores": tables.score_table(results) if whole else None,
        "score": next(iter(results.methods.values()))[0].score,
        "sections": report_figures.sections(results) if with_figures else [],
        "pictures": _pictures(results) if with_figures else {},
        "groups": PICTURES,
        "facts": results.facts,
        "seeds": max(len(several) for several in results.methods.values()),
        "main_text": "Bold marks the best number. ≈: not distinguishable from the best (p ≥ 0.05). With each number: its 95 % "
        f"interval and the p-value of no difference to the best. {_counting_sentence(results)} ↑ higher, ↓ lower is better.",
        "differences_text": f"Each method minus {baseline}, on the same test examples and the seeds that both have, with "
        "interval and p-value of no difference. Bold: better with p < 0.05 over several seeds, and by enough to matter. An "
        f"interval excludes zero exactly if p < 0.05. {comparison_sentence(results, against)}",
        "glossary": _glossary(found),
    }


def _counting_sentence(results: Results) -> str:
    """A sentence on what intervals and p-values count."""
    counts = sorted({len(several) for several in results.methods.values()})
    adjusted = " p-values are adjusted for the comparisons of the table (Holm)." if results.holm else ""
    if counts == [1]:
        only = "Intervals and p-values reflect test-set size only; run more seeds to include training variation."
        return f"{only}{adjusted}"
    several = f"{counts[0]} seeds" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    few = " With so few seeds, intervals are wide." if counts[0] < 4 else ""
    alone = " A method with one seed has only its test examples counted." if counts[0] == 1 else ""
    text = f"Intervals and p-values count test examples and {several}."
    return f"{text}{few}{alone}{adjusted}"


def comparison_sentence(results: Results, against: Family | None) -> str:
    """A sentence on the number of comparisons and their correction."""
    if against is None:
        return ""
    count, expected = len(against.comparisons), (1 - LEVEL) * len(against.comparisons)
    if results.holm:
        return (
            f"p-values are adjusted for the {count} comparisons of the table (Holm); intervals are at "
            f"{100 * against.level:.4g} %, the level at which they exclude zero exactly if p < 0.05."
        )
    return f"No correction for many comparisons: of {count} without any difference, {expected:.1f} have p < 0.05 by chance."


def _pictures(results: Results) -> dict[str, dict[str, list[report_figures.Picture]]]:
    shown = {name: report_figures.pictures(several[0]) for name, several in results.methods.items()}
    return {name: groups for name, groups in shown.items() if groups}


def _glossary(found: list[Measure]) -> Mapping[str, str]:
    """The meaning of each number in the tables."""
    shown = {name for measure in found for name in (measure.label, measure.group)}
    return {name: text for name, text in MEANINGS.items() if name in shown}


MEANINGS = {
    "Accuracy": "share of test inputs whose most probable class is the true one",
    "NLL": "mean of −log p(truth): low when the truth gets high probability; it judges the whole predictive distribution",
    "Brier score": "mean squared distance between the predicted probabilities and the truth, summed over classes (0 to 2)",
    "ECE": "expected calibration error: how far confidence is from accuracy, over 15 bins of confidence",
    "AURC": "mean error over all coverages when the least certain inputs are refused first: low when certainty ranks well",
    "mIoU": "overlap of predicted and true regions, mean over classes",
    "AUROC": "probability that a foreign input gets a higher score than a test input; 50 % is chance",
    "AUPR": "mean precision of flagging foreign inputs; its chance level is their share in the data",
    "FPR at 95 % TPR": "share of test inputs flagged at the threshold that flags 95 % of the foreign inputs",
    "AUPR, adjusted": "AUPR reweighted to another share of foreign inputs: one half, or the share set by the task",
    "FPR, test inputs positive": "share of foreign inputs accepted at the threshold that accepts 95 % of the test inputs",
    "ECE, foreign inputs included": "calibration error of test and foreign inputs together; every answer to a foreign input "
    "counts as wrong, so it is low when the network is uncertain there",
    "NLL of one Gaussian": "NLL of the Gaussian with the mixture's mean and variance, as deep-ensemble papers report it",
    "RMSE": "root of the mean squared error of the predicted mean",
    "CRPS": "mean distance between the predicted distribution and the target, in the target's units",
    "Coverage of 90 % intervals": "share of targets inside intervals that should contain 90 % of them",
    "Width of 90 % intervals": "mean width of these intervals, in the target's units",
    "Temperature": "every member's logits were divided by it (regression: the noise's deviation was multiplied) before these "
    "numbers were measured; fitted on held-out data, 1 if none was fitted",
    "Answered as labelled": "share of the training inputs with a wrong label that get this wrong label: memorised",
    "Answered truly": "share of the training inputs with a wrong label that get their true class anyway",
    "regions": "means over parts of the input space: the standard deviation of the members' means, or the entropy of the "
    "mean prediction. It should be large off the data and small at the data",
    "attacked by FGSM": "test inputs after one step up the loss of the averaged prediction, mean over radii",
    "attacked by PGD": "test inputs after several steps up that loss, keeping the worst step of each input, mean over radii",
    "attacked through one member": "PGD on the first member only, measured on the whole mixture",
    "Confidence": "probability of the class that noise was turned into, mean over classes: should be low",
    "corrupted inputs": "all test inputs, or as many as the task sets, damaged by noise, blur, weather and other corruptions; "
    "each severity is measured on all types together, then severities are averaged",
}


class CellsPage(NamedTuple):
    """The page of a task over a grid."""

    title: str
    description: str
    sentences: list[str]
    facts: Mapping[str, str]  # provenance
    tables: list[tuple[str, str, tables.Table]]  # heading, text below it, table
    figures: Mapping[str, tuple[Any, str]]  # file -> figure and its text
    texts: Mapping[str, str]  # other files


def write_page(page: CellsPage, folder: Path) -> tuple[list[str], list[Path]]:
    """(sentences, files): the figures, report.md, report.html and the other files."""
    figures = [(name, text, report_figures.svg(figure, name[0])) for name, (figure, text) in page.figures.items()]
    content = page._asdict() | {"figures": figures}
    texts = {f"report.{end}": render_template(f"cells.{end}.j2", content) for end in ("md", "html")}
    drawn = {name: figure for name, (figure, _) in page.figures.items()}
    return page.sentences, report_figures.write_files(folder, drawn, {**texts, **page.texts})


def render_template(template: str, content: Mapping[str, Any]) -> str:
    """Fills in a template of this package; control characters in names and titles are removed."""
    environment = _environment(autoescape=template.endswith(".html.j2"))
    return environment.get_template(template).render(**content).translate(CONTROL)


@cache  # compiling the templates takes longer than filling them in, and a page does that for every table
def _environment(*, autoescape: bool) -> Environment:
    environment = Environment(
        loader=PackageLoader("dissensus.bench.report"),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"cell": _markdown, "tex": _latex, "grid_csv": grid_csv, "as_link": _data_uri}
    environment.filters |= {"slug": report_figures.slug, "svg": lambda *drawn: report_figures.svg(*drawn)}
    name = "grid.tex.j2"
    environment.globals["latex"] = lambda table, caption, text="": render_template(name, {**locals()})
    return environment


def _markdown(text: object) -> str:
    """Escapes text for Markdown, so that it contains no link, picture, HTML or end of a cell."""
    plain = re.sub(r"&(?=#?\w+;)", "&amp;", " ".join(str(text).split()))
    plain = re.sub(r"<(?=[a-zA-Z/!?])", "&lt;", plain)  # "p < 0.05" is no tag
    return re.sub(r"[\\|\[\]*`]", r"\\\g<0>", plain)


def grid_csv(table: tables.Table) -> str:
    """A shown table as CSV: one row per measure, three columns per method."""
    rows = []
    for row in table.rows:
        cells = {"group": row.group, "measure": row.label, "unit": row.unit}
        for name, cell in zip(table.columns, row.cells, strict=True):
            cells |= {name: cell.text, f"{name} interval": cell.interval, f"{name} note": cell.note}
        rows.append(cells)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    kept = [key for key in columns if any(row[key] for row in rows)]
    return table_text(kept, [*rows, *({kept[0]: note} for note in table.notes)])


def _data_uri(text: str, kind: str) -> str:
    """A data URI, which a page can offer for download."""
    return f"data:text/{kind};base64,{base64.b64encode(text.encode()).decode()}"


LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "−": "$-$", "–": "--", "≈": r"$\approx$",
    "≥": r"$\ge$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "→": r"$\rightarrow$", "ε": r"$\varepsilon$", "σ": r"$\sigma$",
    "\N{NO-BREAK SPACE}": "~", "R̂": r"$\hat R$", "<": r"$<$", ">": r"$>$", "|": r"$|$",
    "≤": r"$\le$", "α": r"$\alpha$", "γ": r"$\gamma$", "λ": r"$\lambda$", "√": r"$\surd$", "∞": r"$\infty$",
    **{mark: rf"\textsuperscript{{{digit}}}" for digit, mark in zip("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹", strict=True)},
    **{each: f"\\{each}" for each in "&%$#_{}"},
}  # fmt: skip


def _latex(text: object) -> str:
    """Escapes text for LaTeX, so that it contains no command."""
    return re.sub("|".join(map(re.escape, LATEX)), lambda found: LATEX[found[0]], " ".join(str(text).split()))
