"""Sections of a report that consist mainly of pictures (functions, distances over training, a sweep), and their figures."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dissensus.bench.report.measures import ATTACKED, Measure, as_square, plane_limits
from dissensus.bench.report.results import Results, accuracies, sweep_of
from dissensus.evaluation.evaluation import Evaluation
from dissensus.plots import charts, segmentation_maps
from dissensus.plots.charts import INK, Array, Curve, Palette, Panel, curve_figure, marker_style, short_name


class OverEpochs(NamedTuple):
    """A section of curves over epochs."""

    title: str
    text: str
    panels: dict[str, str]  # name of an array -> title of its panel
    percent: bool = False


SEEDS = "Means over seeds; bands span the lowest to the highest seed."
OVER_EPOCHS = {  # prefix of the arrays -> its section
    "training": OverEpochs(
        "How training went",
        f"{SEEDS} Methods add different terms to their loss: compare the shapes of losses, not their heights. A curve that still "
        "falls steeply at its end asks for more epochs.",
        {"loss": "training loss", "validation": "NLL of validation rows (nats)"},
    ),
    "curves": OverEpochs(
        "What is learned, over training",
        f"Measured on up to 1,000 rows of each kind. {SEEDS}",
        {
            "train/accuracy": "training rows, labels as given",
            "test/accuracy": "test rows",
            "noise/memorised": "wrong labels: as labelled",
            "noise/recovered": "wrong labels: answered truly",
        },
        percent=True,
    ),
    "distances": OverEpochs(
        "How members differ, over training",
        "Means over pairs of members at the same training inputs: the distances of their weights and outputs, and the angle "
        f"between their input gradients (of the true class's logit, or of the mean). {SEEDS}",
        {
            "weight": "distance of weights",
            "function": "distance of outputs (rms)",
            "gradient": "angle of input gradients (rad)",
            "effective": "effective members",
        },
    ),
}


UNDER_ATTACK = {
    "accuracy": "Accuracy",
    "nll": "NLL (nats)",
    "ece": "ECE",
    "entropy": "Entropy (nats)",
    "mutual_information": "Mutual information (nats)",
}


def attack_figure(epsilons: Array, drawn: Mapping[str, Mapping[str, Array]], *, palette: Palette, title: str) -> Figure:
    """One panel per metric of UNDER_ATTACK, one curve over ε per method: drawn[metric][method]."""
    panels = []
    for metric, methods in drawn.items():
        looks = {name: {"color": palette[name], **marker_style(i)} for i, name in enumerate(methods)}
        curves = [Curve(epsilons, values, short_name(name), looks[name]) for name, values in methods.items()]
        percent = "y" * (metric in ("accuracy", "ece"))
        panels.append(Panel(curves, {"xlabel": "ε", "title": UNDER_ATTACK[metric]}, percent=percent))
    figure = curve_figure(panels, size=(13.0, 2.8))
    figure.axes[0].set_ylabel(title)
    for axes in figure.axes:
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(5))
    return figure


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
            axes: dict[str, Any] = {
                "xlabel": label,
                "ylabel": "" if column else title,
                "title": f"{measure.label}{', nats' * (measure.unit == 'nats')}",
                "xscale": "log" if log else "linear",
            }
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
    about, panels = OVER_EPOCHS[prefix], []
    names = [name for name in about.panels if any(name in several for several in rows.values())]
    for title, several in rows.items():
        for column, name in enumerate(names):
            methods = several.get(name, {})
            axes: dict[str, Any] = {"xlabel": "epochs", "ylabel": "" if column else title, "title": about.panels[name]}
            if prefix == "training" and all((values > 0).all() for _, values in methods.values()):
                axes["yscale"] = "log"
            drawn = [
                Curve(
                    epochs, values.mean(0), short_name(each), {"color": palette[each]}, (values.min(0), values.max(0))
                )
                for each, (epochs, values) in methods.items()
            ]
            panels.append(Panel(drawn, axes | ({"ylim": (0, 1)} if about.percent else {}), percent="y" * about.percent))
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
            *(
                Curve([x[0], x[-1]], [mean[name]] * 2, short_name(name), {"color": palette[name], "linestyle": "--"})
                for name in methods
                if name not in values
            ),
        ]
        panels.append(Panel(curves, {"xlabel": key, "title": title, "ymargin": 0.2}, percent="y"))
    figure = curve_figure(panels, size=(3.5 * len(panels), 2.7))
    figure.axes[0].set_ylabel("accuracy")
    for axes in figure.axes:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        low, high = axes.get_ylim()
        room = max(SPAN - (high - low), 0) / 2
        axes.set_ylim(low - room, high + room)
    return figure


Made = tuple[str, str, list[tuple[str, Figure]]]  # title, how to read it, (description, figure)


def prediction_section(first: dict[str, Evaluation], palette: Palette) -> Made | None:
    """Every method's prediction over the line or the plane."""
    known = {name: each.arrays for name, each in first.items() if "grid/positions" in each.arrays}
    if not known:
        return None
    some = next(iter(known.values()))
    positions, seen, targets = (some[f"grid/{key}"].numpy() for key in ("positions", "seen", "targets"))
    if "grid/entropy" in some:
        classes = next(iter(first.values())).notes.get("classes", "").split("\n")
        squares = {name: as_square(arrays["grid/entropy"]).numpy() for name, arrays in known.items()}
        window, largest = plane_limits(some["grid/positions"]), math.log(max(len(classes), 2))
        figure = charts.entropy_maps(squares, window=window, largest=largest, seen=(seen, targets))
        text = "Entropy of the mean prediction, from certain (dark) to uncertain (light); dots are training inputs."
        return "Where is it certain?", text, [("Entropy over the plane, method by method", figure)]
    keys = ("grid/mean", "grid/sd", "grid/members")
    bands = {name: charts.Band(*(arrays[key].numpy() for key in keys)) for name, arrays in known.items()}
    dots = (seen[:, 0], targets[:, 0])
    figure = charts.band_figure(positions[:, 0], bands, seen=dots, palette=palette)
    text = "Mean, ±3 standard deviations of the members' means, and up to ten members; dots are training data."
    return "Where is it certain?", text, [("Predictions along the line, method by method", figure)]


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
    text = (
        "Test images, the truth, and every method's prediction: the class of each pixel, its probability, and the mutual "
        "information, which measures how far members disagree (0 for a single network). Unknown classes were ignored in "
        "training; the frame marks the place with most of their pixels."
    )
    return "Where in the image is it certain?", text, figures


def attack_section(results: Results, palette: Palette) -> Made | None:
    """The effect of every attack on every method as ε grows, mean over seeds."""
    figures = []
    for attack, title in ATTACKED.items():
        if known := results.methods_with(f"attack/{attack}/accuracy"):
            epsilons = next(iter(known.values()))[0].arrays["attack/epsilons"].numpy()
            drawn = {
                metric: {
                    name: np.mean([each.arrays[f"attack/{attack}/{metric}"].numpy() for each in several], axis=0)
                    for name, several in known.items()
                }
                for metric in UNDER_ATTACK
            }
            figure = attack_figure(epsilons, drawn, palette=palette, title=title)
            figures.append((f"Test inputs {title}", figure))
    text = (
        "Test inputs are changed within a radius ε to make the averaged prediction wrong; ε = 0 is the unchanged inputs. "
        "Entropy and mutual information should rise where accuracy falls."
    )
    return ("What happens on attacked inputs?", text, figures) if figures else None


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
        figure = charts.implicit_figure(
            before, after, largest=largest, title=f"{name}: {moved:.1f} %, {explained:.0f} % explained"
        )
        figures.append((f"Implicit corruptions of {name}", figure))
    text = (
        "A drawn function predicts for an image what the mean of all functions predicts for a changed image. Shown are a test "
        "image (left), its changed image for some of the functions, and below it the change (red: brighter, blue: darker; one "
        "scale for all methods). The title gives, over all images examined, the root mean square change of a pixel in percent "
        "of its range, and the share of a function's deviation from the mean that the change explains."
    )
    return ("The noise as a change of the image", text, figures) if figures else None


def epoch_data(results: Results, prefix: str) -> MethodCurves:
    """Quantity -> method -> epochs (E,) and values (S, E), for methods whose training was recorded."""
    known = {name: results.methods_with(f"{prefix}/over/{name}") for name in OVER_EPOCHS[prefix].panels}
    return {
        name: {method: _values_by_epoch(several, prefix, name) for method, several in methods.items()}
        for name, methods in known.items()
        if methods
    }


def epoch_section(results: Results, palette: Palette, prefix: str) -> Made | None:
    """One of OVER_EPOCHS, if it was recorded."""
    if not (found := epoch_data(results, prefix)):
        return None
    title, text, *_ = OVER_EPOCHS[prefix]
    return title, text, [(title, epoch_figure({"": found}, prefix, palette=palette))]


def confusion_section(first: dict[str, Evaluation], shown: Sequence[str]) -> Made | None:
    """Which classes are mistaken for which, by some of the methods, on test inputs of one class each."""
    figures = []
    for name in dict.fromkeys(shown):
        target, said = (first[name].arrays.get(f"test/{key}") for key in ("target", "prediction"))
        if first[name].kind == "classification" and target is not None and said is not None:
            classes = [each for each in first[name].notes.get("classes", "").split("\n") if each]
            count = max(len(classes), int(max(target.max(), said.max())) + 1)
            counts = np.zeros((count, count), dtype=int)
            np.add.at(counts, (target.long().numpy(), said.long().numpy()), 1)
            figure = charts.confusion_figure(counts, classes or list(map(str, range(count))), title=name)
            figures.append((f"Confusion matrix of {name}", figure))
    text = (
        "Rows are true classes, columns predicted ones; numbers count test inputs. Darker: a larger share of its class."
    )
    return ("Which classes are confused?", text, figures) if figures else None


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
    text = (
        f"Test accuracy of {sweep.base} over {sweep.key}. The circle marks the value chosen by accuracy on validation images "
        "under other corruptions; no test image was used. Dashed lines are methods without this setting."
    )
    return f"Accuracy over {sweep.key}", text, [(f"Test accuracy over {sweep.key}", figure)]
