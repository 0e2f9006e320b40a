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
from dissensus.bench.report.recommendation import recommend
from dissensus.bench.report.report_figures import Section
from dissensus.bench.report.results import CONTROL, Results, csv_text, sweep_of, table_text
from dissensus.storage.atomic_files import write_text
from dissensus.utils.progress import is_reporting_process

NAMES = {".csv": "results.csv", ".md": "report.md", ".html": "report.html"}
SUFFIXES = (*NAMES, ".tex")
MEASURES = (  # of each corruption (the first two) and of each attack
    Measure("accuracy", "Accuracy, %", "", "high", 100, 2),
    Measure("nll", "NLL, nats", "", "low", 1, 3),
    Measure("ece", "ECE, %", "", "low", 100, 2),
    Measure("total", "Total uncertainty, nats", "", None, 1, 3),
    Measure("epistemic", "Epistemic uncertainty, nats", "", None, 1, 3),
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
    results = results.with_class_names()
    found, draws = tables.measures_and_draws(results)
    advice, baseline = recommend(results, draws), results.baseline or next(iter(results.methods))
    family = tables.compare_with_baseline(results, found, draws, baseline)
    against = family if family.comparisons else None
    alike = "own" not in tables.overlap_by_method(draws["nll"]).values()
    drawn = report_figures.sections(results, advice.featured) if with_figures else []
    shown = [(name, report_figures.pictures(each[0])) for name, each in results.methods.items() if with_figures]
    return {
        "results": results,
        "title": results.title,
        "baseline": baseline,
        "first": next(iter(results.methods.values()))[0],
        "smoke": any(each.get("size") == "smoke" for each, _ in results.iterate_evaluations()),
        "advice": advice,
        "headline": prose.headline(results, draws),
        "cautions": prose.cautions(results, draws),
        "claims": prose.question_sentences(results) if alike else [],
        "against_cost": report_figures.cost_section(results, draws) if with_figures else None,
        "chapters": [*_table_sections(results, found, draws, against, baseline), *drawn],
        "reference_says": reference_sentences(results, found),
        "pictures": {name: groups for name, groups in shown if groups},
        "seed_counts": [len(several) for several in results.methods.values()],
        "comparing": comparison_sentence(results, against),
        "sweep": sweep_of(results),
        "shown_names": {name for measure in found for name in (measure.label, measure.group)},
    }


def _table_sections(
    results: Results, found: list[Measure], draws: tables.MeasureDraws, against: Family | None, baseline: str
) -> list[Section]:
    made = {
        "Results": tables.main_table(results, found, draws),
        f"Differences to {baseline}": against and tables.difference_table(results, found, against, baseline),
        "Beside published numbers": reference_table(results, found),
    }
    if results.metrics:
        return [Section(title, tables={"": table}) for title, table in made.items() if table]
    made["Mixtures and their members"] = tables.member_table(results)
    made["How far members are apart"] = tables.distance_table(results)
    made["AUROC by score"] = tables.score_table(results)
    several = {title: {"": table} for title, table in made.items()}
    several["By type of corruption"] = {m.label: tables.corruption_table(results, m) for m in MEASURES[:2]}
    several["By attack and radius"] = {m.label: tables.attack_table(results, m) for m in MEASURES}
    known = {title: {label: t for label, t in named.items() if t} for title, named in several.items()}
    return [Section(title, tables=named) for title, named in known.items() if named]


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
    environment.filters |= {"cell": _markdown, "grid_csv": grid_csv, "slug": report_figures.slug}
    signs = "|".join(map(re.escape, LATEX))  # escaped, so that a text contains no command
    environment.filters["tex"] = lambda text: re.sub(signs, lambda sign: LATEX[sign[0]], " ".join(str(text).split()))
    environment.filters["svg"] = lambda *drawn: report_figures.svg(*drawn)
    uri = "data:text/{};base64,{}"  # for download
    environment.filters["as_link"] = lambda text, kind: uri.format(kind, base64.b64encode(text.encode()).decode())
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
    kept = [key for key in dict.fromkeys(key for row in rows for key in row) if any(row[key] for row in rows)]
    return table_text(kept, [*rows, *({kept[0]: note} for note in table.notes)])


LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "−": "$-$", "–": "--", "≈": r"$\approx$",
    "≥": r"$\ge$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "→": r"$\rightarrow$", "ε": r"$\varepsilon$", "σ": r"$\sigma$",
    "\N{NO-BREAK SPACE}": "~", "R̂": r"$\hat R$", "<": r"$<$", ">": r"$>$", "|": r"$|$",
    "≤": r"$\le$", "α": r"$\alpha$", "γ": r"$\gamma$", "λ": r"$\lambda$", "√": r"$\surd$", "∞": r"$\infty$",
    **{mark: rf"\textsuperscript{{{digit}}}" for digit, mark in zip("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹", strict=True)},
    **{each: f"\\{each}" for each in "&%$#_{}"},
}  # fmt: skip
