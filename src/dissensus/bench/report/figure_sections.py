"""Sections of a report that consist mainly of pictures (functions, distances over training, a sweep), and their figures."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dissensus.bench.report.measures import ATTACKED, Measure, as_square, plane_limits
from dissensus.bench.report.results import Results, accuracies, sweep_of
from dissensus.evaluation.evaluation import Evaluation
from dissensus.plots import charts, segmentation_maps
from dissensus.plots.charts import INK, Array, Curve, Palette, Panel, curve_figure, marker_style, short_name

OVER_EPOCHS = {  # prefix of arrays -> title of its section, and array -> title of its panel
    "training": ("How training went", {"loss": "training loss", "validation": "NLL of validation rows (nats)"}),
    "curves": ("What is learned, over training", {
        "train/accuracy": "training rows, labels as given", "test/accuracy": "test rows",
        "noise/memorised": "wrong labels: as labelled", "noise/recovered": "wrong labels: answered truly",
    }),
    "distances": ("How members differ, over training", {
        "weight": "distance of weights", "function": "distance of outputs (rms)",
        "gradient": "angle of input gradients (rad)", "effective": "effective members",
    }),
}  # fmt: skip
UNDER_ATTACK = {
    "accuracy": "Accuracy", "nll": "NLL (nats)", "ece": "ECE", "total": "Total uncertainty (nats)",
    "epistemic": "Epistemic uncertainty (nats)",
}  # fmt: skip
Interval = tuple[float, float, float]  # estimate, lower, upper
# title -> measure -> method -> value of the setting
OverValues = dict[str, dict[Measure, dict[str, dict[float, Interval]]]]


def setting_figure(rows: OverValues, *, label: str, log: bool, palette: Palette) -> Figure:
    """Measures over the values of a setting, one line per method with intervals; one row of panels per title."""
    each = (points for several in rows.values() for methods in several.values() for points in methods.values())
    panels, ticks = [], sorted({value for points in each for value in points})
    for title, several in rows.items():
        for column, (measure, methods) in enumerate(several.items()):
            drawn = []
            for i, (name, points) in enumerate(methods.items()):
                mean, lower, upper = np.array(list(points.values())).T
                look = {"color": palette[name], **marker_style(i)}
                drawn.append(Curve(list(points), mean, short_name(name), look, band=(lower, upper)))
            about = f"{measure.label}{', nats' * (measure.unit == 'nats')}"
            axes: dict[str, Any] = {"xlabel": label, "ylabel": "" if column else title, "title": about}
            axes["xscale"] = "log" if log else "linear"
            if not drawn and len(ticks) > 1:
                axes["xlim"] = (ticks[0], ticks[-1])
            if drawn:  # a cell may lack a measure: without wrong labels none is memorised
                ends = np.concatenate([curve.y for curve in drawn])
                room = 0.35 * (np.nanmax(ends) - np.nanmin(ends)) or 0.01 / measure.scale
                least, most = measure.possible_range
                axes["ylim"] = (max(np.nanmin(ends) - room, least), min(np.nanmax(ends) + room, most))
            panels.append(Panel(drawn, axes, percent="y" * (measure.scale == 100), ticks=ticks))
    columns = max(len(several) for several in rows.values())
    return curve_figure(panels, size=(3.1 * columns, 2.8 * len(rows)), rows=len(rows))


MethodCurves = Mapping[str, Mapping[str, tuple[Array, Array]]]  # quantity -> method -> epochs (E,) and values (S, E)


def epoch_figure(rows: Mapping[str, MethodCurves], prefix: str, *, palette: Palette) -> Figure:
    """Curves over epochs, means over seeds and their range: one row of panels per title, one panel per quantity."""
    titles, panels = OVER_EPOCHS[prefix][1], []
    names = [name for name in titles if any(name in several for several in rows.values())]
    for title, several in rows.items():
        for column, name in enumerate(names):
            methods = several.get(name, {})
            axes: dict[str, Any] = {"xlabel": "epochs", "ylabel": "" if column else title, "title": titles[name]}
            if prefix == "training" and all((values > 0).all() for _, values in methods.values()):
                axes["yscale"] = "log"
            drawn = [
                Curve(epochs, y.mean(0), short_name(each), {"color": palette[each]}, (y.min(0), y.max(0)))
                for each, (epochs, y) in methods.items()
            ]
            share = prefix == "curves"
            panels.append(Panel(drawn, axes | ({"ylim": (0, 1)} if share else {}), percent="y" * share))
    figure = curve_figure(panels, size=(max(3.3 * len(names), 9.2), 2.7 * len(rows)), rows=len(rows))
    for axes_of_panel in figure.axes:
        axes_of_panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    return figure


SPAN = 0.01  # least span of an accuracy axis: a smaller one would magnify noise


def sweep_figure(
    titles: Mapping[str, Mapping[str, Sequence[float]]],
    values: Mapping[str, float],
    *,
    key: str,
    label: str,
    chosen: str,
    palette: Palette,
) -> Figure:
    """Accuracies over a setting: mean over seeds with their spread, the chosen value marked, other methods as lines.

    titles[title][method]: one number per seed. values: the setting's value for each method that has it, ascending.
    """
    x, colour = list(values.values()), palette[next(iter(values))]
    circle = {"marker": "o", "markersize": 11, "markerfacecolor": "none", "color": INK, "linestyle": "none"}
    panels = []
    for title, methods in titles.items():
        mean = {name: float(np.mean(each)) for name, each in methods.items()}
        sd = [np.std(methods[name], ddof=1) for name in values] if min(map(len, methods.values())) > 1 else None
        look = {"color": colour, "yerr": sd, "capsize": 2.5, **marker_style(0)}
        curves = [
            Curve(x, [mean[name] for name in values], short_name(label), look),
            Curve([values[chosen]], [mean[chosen]], f"chosen, {key} = {values[chosen]:g}", circle),
        ]
        others = {name: {"color": palette[name], "linestyle": "--"} for name in methods if name not in values}
        curves += [Curve([x[0], x[-1]], [mean[name]] * 2, short_name(name), each) for name, each in others.items()]
        panels.append(Panel(curves, {"xlabel": key, "title": title, "ymargin": 0.2}, percent="y"))
    figure = curve_figure(panels, size=(3.5 * len(panels), 2.7))
    figure.axes[0].set_ylabel("accuracy")
    for axes in figure.axes:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        low, high = axes.get_ylim()
        room = max(SPAN - (high - low), 0) / 2
        axes.set_ylim(low - room, high + room)
    return figure


Made = tuple[str, list[tuple[str, Figure]]]  # title, (description, figure); the templates say how to read them


def prediction_section(first: dict[str, Evaluation], palette: Palette) -> Made | None:
    """Every method's prediction over the line or the plane."""
    known = {name: each.arrays for name, each in first.items() if "grid/positions" in each.arrays}
    if not known:
        return None
    some = next(iter(known.values()))
    positions, seen, targets = (some[f"grid/{key}"].numpy() for key in ("positions", "seen", "targets"))
    if "grid/total" in some:
        classes = next(iter(first.values())).notes.get("classes", "").split("\n")
        squares = {name: as_square(arrays["grid/total"]).numpy() for name, arrays in known.items()}
        window, largest = plane_limits(some["grid/positions"]), math.log(max(len(classes), 2))
        figure = charts.plane_maps(squares, window=window, largest=largest, seen=(seen, targets))
        return "Where is it certain?", [("Total uncertainty over the plane, method by method", figure)]
    keys = ("grid/mean", "grid/sd", "grid/members")
    bands = {name: charts.Band(*(arrays[key].numpy() for key in keys)) for name, arrays in known.items()}
    figure = charts.band_figure(positions[:, 0], bands, seen=(seen[:, 0], targets[:, 0]), palette=palette)
    return "Where is it certain?", [("Predictions along the line, method by method", figure)]


def segmentation_section(first: dict[str, Evaluation]) -> Made | None:
    """Every method's prediction for each pixel of some test images, the same images for all methods."""
    known = {name: each.arrays for name, each in first.items() if "scenes/image" in each.arrays}
    if not known:
        return None
    some = next(iter(known.values()))
    classes = next(iter(first.values())).notes.get("classes", "").split("\n")
    figures = []
    for i, (image, truth) in enumerate(zip(some["scenes/image"], some["scenes/truth"], strict=True)):
        fields = segmentation_maps.PixelMaps._fields
        said = {
            name: segmentation_maps.PixelMaps(*(arrays[f"scenes/{key}"][i].numpy() for key in fields))
            for name, arrays in known.items()
        }
        figure = segmentation_maps.scene_figure(image.movedim(0, -1).numpy(), truth.numpy(), said, classes=classes)
        figures.append((f"Test image {i + 1}: truth, predictions, confidence and mutual information", figure))
    return "Where in the image is it certain?", figures


def mean_array(several: Sequence[Evaluation], name: str) -> Any:
    return np.mean([each.arrays[name].numpy() for each in several], axis=0)


def attack_section(results: Results, palette: Palette) -> Made | None:
    """The effect of every attack on every method as ε grows, mean over seeds: one panel per metric of UNDER_ATTACK."""
    figures, looks = [], {name: {"color": palette[name], **marker_style(i)} for i, name in enumerate(results.methods)}
    for attack, title in ATTACKED.items():
        if known := results.methods_with(f"attack/{attack}/accuracy"):
            epsilons, panels = next(iter(known.values()))[0].arrays["attack/epsilons"].numpy(), []
            for metric, label in UNDER_ATTACK.items():
                means = {name: mean_array(several, f"attack/{attack}/{metric}") for name, several in known.items()}
                curves = [Curve(epsilons, mean, short_name(name), looks[name]) for name, mean in means.items()]
                percent = "y" * (metric in ("accuracy", "ece"))
                panels.append(Panel(curves, {"xlabel": "ε", "title": label}, percent=percent))
            figure = curve_figure(panels, size=(13.0, 2.8))
            figure.axes[0].set_ylabel(title)
            for axes in figure.axes:
                axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
                axes.yaxis.set_major_locator(MaxNLocator(5))
            figures.append((f"Test inputs {title}", figure))
    return ("What happens on attacked inputs?", figures) if figures else None


def implicit_section(first: dict[str, Evaluation]) -> Made | None:
    """Implicit corruptions of some test images by drawn functions; the same images for all methods."""
    known = {
        name: (each.arrays["implicit/original"].numpy(), each.arrays["implicit/inputs"].numpy(), each.metrics)
        for name, each in first.items()
        if "implicit/inputs" in each.arrays and each.arrays["implicit/inputs"].ndim == 5
    }
    changes = [np.abs(after - before[:, None]).ravel() for before, after, _ in known.values()]
    largest = float(np.quantile(np.concatenate(changes), 0.995)) if changes else 0.0
    figures = []
    for name, (before, after, numbers) in known.items():
        moved, explained = (100 * numbers[f"implicit/{key}"] for key in ("distance", "explained"))
        title = f"{name}: {moved:.1f} %, {explained:.0f} % explained"
        figure = charts.implicit_figure(before, after, largest=largest, title=title)
        figures.append((f"Implicit corruptions of {name}", figure))
    return ("The noise as a change of the image", figures) if figures else None


def epoch_data(results: Results, prefix: str) -> MethodCurves:
    """Quantity -> method -> epochs (E,) and values (S, E), for methods whose training was recorded."""
    found = {name: results.methods_with(f"{prefix}/over/{name}") for name in OVER_EPOCHS[prefix][1]}
    known = {name: methods.items() for name, methods in found.items() if methods}
    return {name: {m: _values_by_epoch(each, prefix, name) for m, each in methods} for name, methods in known.items()}


def epoch_section(results: Results, palette: Palette, prefix: str) -> Made | None:
    """One of OVER_EPOCHS, if it was recorded."""
    if not (found := epoch_data(results, prefix)):
        return None
    title = OVER_EPOCHS[prefix][0]
    return title, [(title, epoch_figure({"": found}, prefix, palette=palette))]


def confusion_section(first: dict[str, Evaluation], shown: Sequence[str]) -> Made | None:
    """Which classes are mistaken for which, by some of the methods; only of inputs with one class each."""
    figures = []
    for name, (kind, arrays, notes) in {n: (first[n].kind, first[n].arrays, first[n].notes) for n in shown}.items():
        if kind == "classification" and {"test/target", "test/prediction"} <= arrays.keys():
            pairs = torch.stack([arrays["test/target"].long(), arrays["test/prediction"].long()])
            named = notes.get("classes")
            classes = named.split("\n") if named else list(map(str, range(int(pairs.max()) + 1)))
            counts = torch.bincount(pairs[0] * len(classes) + pairs[1], minlength=len(classes) ** 2)
            figure = charts.confusion_figure(counts.reshape(len(classes), -1), classes, title=name)
            figures.append((f"Confusion matrix of {name}", figure))
    return ("Which classes are confused?", figures) if figures else None


def _values_by_epoch(several: Sequence[Evaluation], prefix: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Epochs (E,) recorded for every seed (a stopped run may lack some), and values (S, E)."""
    arrays = [(each.arrays[f"{prefix}/epochs"], each.arrays[f"{prefix}/over/{name}"]) for each in several]
    looks = [dict(zip(epochs.tolist(), values.tolist(), strict=True)) for epochs, values in arrays]
    common = [epoch for epoch in looks[0] if all(epoch in look for look in looks)]
    return np.asarray(common), np.array([[look[epoch] for epoch in common] for look in looks])


def sweep_section(results: Results, palette: Palette) -> Made | None:
    """Accuracy over the values of the task's swept setting."""
    sweep = sweep_of(results)
    if sweep is None:
        return None
    each = {name: [accuracies(e) for e in several] for name, several in results.methods.items()}
    titles = {
        title: {name: [found[title] for found in several] for name, several in each.items()}
        for title in next(iter(each.values()))[0]
    }
    about = {"key": sweep.key, "label": sweep.base, "chosen": sweep.chosen}
    figure = sweep_figure(titles, sweep.values, **about, palette=palette)
    return f"Accuracy over {sweep.key}", [(f"Test accuracy over {sweep.key}", figure)]
