"""The figures of a report, drawn from evaluations as SVG in the page's text colour."""

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.image import imsave
from torch import Tensor

from dissensus import metrics
from dissensus.bench.report import figure_sections
from dissensus.bench.report.figure_sections import OVER_EPOCHS, Made, mean_array
from dissensus.bench.report.recommendation import recommend
from dissensus.bench.report.results import Results, all_have_metric, mean_over_seeds
from dissensus.bench.report.tables import MeasureDraws, Table, measures_and_draws, score_pair
from dissensus.evaluation.evaluation import Evaluation
from dissensus.evaluation.guarantees import DIFFICULTIES
from dissensus.evaluation.loader_predictions import GROUPS
from dissensus.plots import charts
from dissensus.plots.charts import INK, Curve, Palette, Panel, curve_figure, marker_style, short_name
from dissensus.plots.prediction_figures import displayable_image
from dissensus.storage.atomic_files import write_bytes, write_text


def guarantee_section(results: Results, palette: Palette) -> Made | None:
    """Coverage by difficulty and severity with the promised level; risk by acceptance with the promised risk."""
    panels = [*_coverage_panels(results, palette), *_gate_panels(results, palette)]
    figures = [(str(panel.axes["title"]), curve_figure([panel])) for panel in panels]
    return ("Are promises kept?", figures) if figures else None


def _coverage_panels(results: Results, palette: Palette) -> list[Panel]:
    panels, severities = [], next(iter(results.methods.values()))[0].severities
    for name in _guarantee_names(results, "/level"):
        level = _first_metric(results, f"{name}/level")
        hard = [f"{name}/{each}/coverage" for each in DIFFICULTIES]
        corrupted = [f"{name}/coverage", *(f"corrupt/severity{s}/{name}/coverage" for s in severities)]
        for over, xlabel, x, keys in (
            ("by difficulty", "thirds of the inputs, easy to hard", [1, 2, 3], hard),
            ("under corruption", "severity of corruption (0: clean)", [0, *severities], corrupted),
        ):
            if len(x) > 1 and (drawn := _method_curves(results, palette, x, keys)):
                axes = {"xlabel": xlabel, "ylabel": "sets that hold the truth", "ylim": (None, 1.01)}
                axes["title"] = f"Coverage {over}: {name}"
                panels.append(Panel([*drawn, _level_line(x[0], max(x), level)], axes, percent="y", ticks=x))
    return panels


def _gate_panels(results: Results, palette: Palette) -> list[Panel]:
    panels = []
    for name in _guarantee_names(results, "/promised"):
        drawn = []
        for i, (method, several) in enumerate(results.methods.items()):
            first = several[0]
            if f"test/{name}/error" not in first.arrays or "risk_coverage/risk" not in first.arrays:
                continue
            x, y = (first.arrays[f"risk_coverage/{key}"].numpy() for key in ("coverage", "risk"))
            thin = np.linspace(0, len(x) - 1, min(len(x), 300)).round().astype(int)
            drawn.append(Curve(x[thin], y[thin], short_name(method), {"color": palette[method]}))
            at = [first.metrics[f"{name}/accepted"]], [first.metrics.get(f"{name}/risk", 0.0)]
            drawn.append(Curve(*at, f"_{method}", {"color": palette[method], **marker_style(i, size=7)}))
        if drawn and next(iter(results.methods.values()))[0].kind == "classification":
            label = {"xlabel": "inputs accepted, most certain first", "ylabel": "errors among accepted"}
            axes = label | {"title": f"Risk and acceptance: {name}", "xlim": (0, 1.02)}
            promised = _level_line(0, 1, _first_metric(results, f"{name}/promised"))
            panels.append(Panel([*drawn, promised], axes, percent="xy"))
    return panels


def _guarantee_names(results: Results, ending: str) -> list[str]:
    """Names of the promises for which a method has a metric with this ending."""
    found = (key for several in results.methods.values() for key in several[0].metrics if key.endswith(ending))
    return [key.removesuffix(ending) for key in dict.fromkeys(found) if "/" not in key.removesuffix(ending)]


def _method_curves(results: Results, palette: Palette, x: Sequence[float], keys: Sequence[str]) -> list[Curve]:
    """One curve per method that has all these metrics, averaged over seeds."""
    style = {name: {"color": palette[name], **marker_style(i)} for i, name in enumerate(results.methods)}
    return [
        Curve(list(x), [mean_over_seeds(key, several) for key in keys], short_name(method), style[method])
        for method, several in results.methods.items()
        if all(all_have_metric(key, several) for key in keys)
    ]


def _first_metric(results: Results, key: str) -> float:
    return next(e.metrics[key] for several in results.methods.values() for e in several if key in e.metrics)


def _level_line(left: float, right: float, height: float) -> Curve:
    return Curve([left, right], [height, height], "promised", {"color": INK, "linestyle": "--", "linewidth": 1})


@dataclass(frozen=True)
class Section:
    """Figures, or tables by name, that belong together; the templates say how to read them."""

    title: str
    figures: list[tuple[str, Figure]] = field(default_factory=list)  # with its description
    first_seed: bool = False  # whether only the first of several seeds is drawn
    wide: bool = False  # whether a figure spans the page
    tables: Mapping[str, Table] = field(default_factory=dict)


def sections(results: Results, featured: Sequence[str] = ()) -> list[Section]:
    """All figures for which the evaluations have arrays, most of them of the first seed; some show `featured` methods only."""
    first = {name: several[0] for name, several in results.methods.items()}
    palette = charts.colours(list(first))
    made: list[tuple[Made | None, dict[str, Any]]] = [
        (figure_sections.prediction_section(first, palette), {"first_seed": True, "wide": True}),
        (figure_sections.segmentation_section(first), {"first_seed": True, "wide": True}),
        (figure_sections.sweep_section(results, palette), {"wide": True}),
        *((figure_sections.epoch_section(results, palette, each), {"wide": True}) for each in OVER_EPOCHS),
        (figure_sections.confusion_section(first, featured or list(first)[:2]), {"first_seed": True}),
        (_calibration_section(first, palette), {"first_seed": True}),
        (_coverage_section(first, palette), {"first_seed": True}),
        (_foreign_section(first, palette), {"first_seed": True}),
        (_selective_section(first, palette, featured), {"first_seed": True, "wide": True}),
        (guarantee_section(results, palette), {}),
        (_corrupted_section(results, palette), {}),
        (figure_sections.implicit_section(first), {"first_seed": True}),
        (figure_sections.attack_section(results, palette), {"wide": True}),
    ]
    return [Section(*section, **how) for section, how in made if section is not None and section[1]]


LABELLED = 4  # most named curves of risk and coverage


def slug(text: str) -> str:
    """A text as a file's name: small letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def write_figures(results: Results, folder: Path) -> list[Path]:
    """Writes every figure of a report as PDF and SVG, numbered and named after what it shows; returns the paths."""
    results = results.with_class_names()
    draws, written = measures_and_draws(results)[1], []
    cost = cost_section(results, draws)
    every = ([cost] if cost else []) + sections(results, recommend(results, draws).featured)
    for i, (name, figure) in enumerate([each for section in every for each in section.figures], start=1):
        for kind, date in (("pdf", "CreationDate"), ("svg", "Date")):
            buffer, path = io.BytesIO(), folder / f"{i:02}-{slug(name)}.{kind}"
            with matplotlib.rc_context(charts.STYLE | {"svg.hashsalt": path.stem}):
                figure.savefig(buffer, format=kind, metadata={date: None})
            write_bytes(path, buffer.getvalue())
            written.append(path)
    return written


def cost_section(results: Results, draws: MeasureDraws) -> Section | None:
    """Every method as a point with its interval: the first measure and NLL against the cost of training and prediction."""
    first = next(key for key in ("miou", "accuracy", "rmse") if key in draws)
    asked = [(first, "cost/train_seconds"), ("nll", "cost/train_seconds"), ("nll", "cost/predict_ms")]
    labels = {"cost/train_seconds": "training (seconds)", "cost/predict_ms": "prediction (ms per input)"}
    palette, drawn = charts.colours(list(results.methods)), list[tuple[str, Figure]]()
    for key, cost in asked:
        costs = {name: each.estimate for name, each in draws.get(cost, {}).items() if name in draws[key]}
        spent = {name: estimate for name, estimate in costs.items() if estimate > 0}
        ends = {name: draws[key][name].interval() for name in spent}
        points = {name: (x, draws[key][name].estimate, (each := ends[name]) and each[1:]) for name, x in spent.items()}
        if points:
            measure = next(iter(draws[key].values())).measure
            quality = f"{measure.label}{f' ({measure.unit})' if measure.unit not in ('', '%') else ''}"
            about: dict[str, Any] = {"cost": labels[cost], "quality": quality, "percent": measure.scale == 100}
            better: Any = "high" if measure.best == "high" else "low"
            figure = charts.cost_scatter(points, **about, better=better, palette=palette)
            drawn.append((f"{quality} against {labels[cost]}", figure))
    return Section("Quality and cost", drawn) if drawn else None


def _calibration_section(first: dict[str, Evaluation], palette: Palette) -> Made | None:
    figures = []
    for name, evaluation in first.items():
        for prefix, about in (("", ""), ("calibrated/", ", calibrated")):
            if f"{prefix}reliability/counts" not in evaluation.arrays:
                continue
            keys = ("counts", "confidence", "accuracy", "edges")
            parts = [evaluation.arrays[f"{prefix}reliability/{key}"] for key in keys]
            title = f"{name}{about}: ECE {100 * evaluation.metrics[f'{prefix}ece']:.2f} %"
            figure = charts.reliability_figure(*parts, title=title, colour=palette[name])
            figures.append((f"Reliability diagram of {name}{about}", figure))
    return "Does confidence match accuracy?", figures


def _coverage_section(first: dict[str, Evaluation], palette: Palette) -> Made | None:
    known = {name: e.arrays["test/cumulative"] for name, e in first.items() if "test/cumulative" in e.arrays}
    figures = [("Coverage of intervals", charts.interval_coverage_figure(known, palette=palette))] if known else []
    return "Do intervals cover what they should?", figures


def _foreign_section(first: dict[str, Evaluation], palette: Palette) -> Made | None:
    figures, names = [], next(iter(first.values())).ood
    for foreign in names:
        curves = {}
        for name, e in first.items():
            if (pair := score_pair(e, foreign, e.score)) is not None:
                curve = metrics.roc_curve(*pair)
                curves[name] = (curve.fpr, curve.tpr, e.metrics[f"ood/{foreign}/auroc"])
        if curves:
            figure = charts.roc_figure(curves, title=f"{foreign} against test inputs", palette=palette)
            figures.append((f"ROC curves, {foreign} against test inputs", figure))
    for name, e in first.items():
        scores = {f: e.arrays[f"ood/{f}/score/{e.score}"] for f in names if f"ood/{f}/score/{e.score}" in e.arrays}
        if scores:
            inside = e.arrays[f"test/score/{e.score}"]
            figure = charts.ood_histogram(inside, scores, score=e.score, title=name, colour=palette[name])
            figures.append((f"Scores of {name} on test and foreign inputs", figure))
    return "Does it notice foreign inputs?", figures


def _selective_section(first: dict[str, Evaluation], palette: Palette, featured: Sequence[str]) -> Made | None:
    known = {name: e.arrays for name, e in first.items() if "risk_coverage/risk" in e.arrays}
    curves = {name: (each["risk_coverage/coverage"], each["risk_coverage/risk"]) for name, each in known.items()}
    classes = next(iter(first.values())).kind != "regression"
    risk = "errors among answered" if classes else "mean squared error"
    figures = []
    if curves:
        lowest = sorted(curves, key=lambda name: float(curves[name][1].mean()))
        labelled = [name for name in dict.fromkeys([*featured, *lowest]) if name in curves][:LABELLED]
        about: dict[str, Any] = {"risk": risk, "percent": classes, "palette": palette, "labelled": labelled}
        figures.append(("Risk and coverage of each method", charts.risk_coverage_figure(curves, **about)))
    return "How does refusing uncertain inputs help?", figures


def _corrupted_section(results: Results, palette: Palette) -> Made | None:
    first = next(iter(results.methods.values()))[0]
    figures = []
    for key, label, percent in (("accuracy", "Accuracy", True), ("nll", "NLL (nats)", False), ("ece", "ECE", True)):
        clean, corrupted = f"corrupt/clean/{key}", f"corrupt/by_severity/{key}"
        known = results.methods_with(corrupted).items()
        values = {name: (float(mean_array(several, clean)), mean_array(several, corrupted)) for name, several in known}
        if values:
            panel = charts.corruption_panel(first.severities, values, label=label, percent=percent, palette=palette)
            figures.append((f"{label} by severity of corruption", charts.curve_figure([panel])))
    return "What happens on corrupted inputs?", figures


@dataclass(frozen=True)
class Picture:
    source: str  # data URI
    caption: str
    wrong: bool


def pictures(evaluation: Evaluation) -> dict[str, list[Picture]]:
    """Group -> pictures of the most certain and least certain inputs, and of the most certain mistakes."""
    classes = evaluation.notes.get("classes", "").split("\n")
    found = {}
    for group in GROUPS:
        inputs = evaluation.arrays.get(f"examples/{group}/inputs")
        if inputs is None or not len(inputs):
            continue
        rows = evaluation.arrays[f"examples/{group}/index"]
        shown = []
        for image, row in zip(inputs, rows.tolist(), strict=True):
            target, prediction = (int(evaluation.arrays[f"test/{n}"][row]) for n in ("target", "prediction"))
            confidence = float(evaluation.arrays["test/confidence"][row])
            names = [_class_name(classes, i) for i in (target, prediction)]
            answer = names[0] if target == prediction else f"{names[0]}, said {names[1]}"
            caption = f"{answer} · {_percent_text(confidence)}"
            shown.append(Picture(image_data_uri(image), caption, target != prediction))
        found[group] = shown
    keys = ("inputs", "target", "confidence", "reached")
    fooling = [evaluation.arrays.get(f"examples/fooling/{key}") for key in keys]
    if fooling[0] is not None and fooling[0].ndim == 4:
        found["fooling"] = []
        for image, target, confidence, reached in zip(*fooling, strict=True):
            caption = f"{_class_name(classes, int(target))} · {_percent_text(float(confidence))}"
            found["fooling"].append(Picture(image_data_uri(image), caption, not reached))
    return found


def _class_name(classes: Sequence[str], index: int) -> str:
    return classes[index] if index < len(classes) and classes[index] else str(index)


def _percent_text(confidence: float) -> str:
    return f"{100 * confidence:.0f} %" if confidence < 0.995 else f"{100 * min(confidence, 0.99999):.3g} %"


def write_png(figure: Figure, path: Path) -> None:
    """Writes the figure as PNG on white, for pages that cannot show SVG."""
    write_bytes(path, charts.png_bytes(charts.notebook_figure(figure)))


def write_files(folder: Path, drawn: Mapping[str, Figure], texts: Mapping[str, str]) -> list[Path]:
    """Writes figures as PNG, and texts, under their names into a folder."""
    for name, figure in drawn.items():
        write_png(figure, folder / name)
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in (*drawn, *texts)]


def svg(figure: Figure, prefix: str) -> str:
    """The figure as an <svg> element for a page: without header and links, with unique ids, INK in the page's text colour."""
    text = io.StringIO()
    with matplotlib.rc_context(charts.STYLE | {"svg.hashsalt": prefix}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    drawn = text.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", drawn)
    for size in ("width", "height"):
        drawn = re.sub(rf'(<svg[^>]*?)\s{size}="[^"]*"', r"\1", drawn, count=1)
    drawn = re.sub(r'(\sid="|url\(#|href="#)', rf"\g<1>{prefix}-", drawn)
    return drawn.replace(charts.INK, "currentColor").strip()


def image_data_uri(image: Tensor) -> str:
    """An image (C, H, W) as a PNG data URI: uint8, in [0, 1], or rescaled to [0, 1]."""
    buffer = io.BytesIO()
    imsave(buffer, displayable_image(image), format="png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
