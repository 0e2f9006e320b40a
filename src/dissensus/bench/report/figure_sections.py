"""Sections of a report that consist mainly of pictures: functions, distances over training, a setting's sweep."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from dissensus.bench.report import curve_figures
from dissensus.bench.report.measures import ATTACKED, as_square, plane_limits
from dissensus.bench.report.results import Results
from dissensus.bench.report.setting_sweep import accuracies, sweep_of
from dissensus.evaluation.evaluation import Evaluation
from dissensus.plots import method_panels, segmentation_maps
from dissensus.plots.charts import Palette

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
        figure = method_panels.entropy_maps(squares, window=window, largest=largest, seen=(seen, targets))
        text = "Entropy of the mean prediction, from certain (dark) to uncertain (light); dots are training inputs."
        return "Where is it certain?", text, [("Entropy over the plane, method by method", figure)]
    keys = ("grid/mean", "grid/sd", "grid/members")
    bands = {name: method_panels.Band(*(arrays[key].numpy() for key in keys)) for name, arrays in known.items()}
    dots = (seen[:, 0], targets[:, 0])
    figure = method_panels.band_figure(positions[:, 0], bands, seen=dots, palette=palette)
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


def distance_section(results: Results, palette: Palette) -> Made | None:
    """Distances between members over training, mean over seeds."""
    known = results.methods_with("distances/epochs")
    if not known:
        return None
    drawn: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {space: {} for space in curve_figures.SPACES}
    for name, several in known.items():
        for space in curve_figures.SPACES:
            epochs, values = _values_by_epoch(several, "distances", space)
            drawn[space][name] = (epochs, values.mean(0))
    text = (
        "Means over pairs of members at the same training inputs: the distances of their weights and outputs, and "
        "the angle between their input gradients (of the true class's logit, or of the mean)."
    )
    figure = curve_figures.distance_figure(drawn, palette=palette)
    return "How members differ, over training", text, [("Distances between members over training", figure)]


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
                for metric in curve_figures.UNDER_ATTACK
            }
            figure = curve_figures.attack_figure(epsilons, drawn, palette=palette, title=title)
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
        figure = method_panels.implicit_figure(
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


def learning_data(results: Results) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Quantity -> method -> epochs (E,) and values (S, E), for methods whose training was recorded."""
    known = {name: results.methods_with(f"curves/over/{name}") for name in curve_figures.LEARNED}
    return {
        name: {method: _values_by_epoch(several, "curves", name) for method, several in methods.items()}
        for name, methods in known.items()
        if methods
    }


def learning_section(results: Results, palette: Palette) -> Made | None:
    """Accuracy while methods train."""
    if not (found := learning_data(results)):
        return None
    text = "Measured on up to 1,000 rows of each kind: means over seeds; bands span the lowest to the highest seed."
    figure = curve_figures.learning_figure({"": found}, palette=palette)
    return "What is learned, over training", text, [("Accuracies over training", figure)]


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
    figure = curve_figures.sweep_figure(titles, sweep.values, **about, palette=palette)
    text = (
        f"Test accuracy of {sweep.base} over {sweep.key}. The circle marks the value chosen by accuracy on validation images "
        "under other corruptions; no test image was used. Dashed lines are methods without this setting."
    )
    return f"Accuracy over {sweep.key}", text, [(f"Test accuracy over {sweep.key}", figure)]
