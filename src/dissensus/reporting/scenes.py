"""Sections of a report that are pictures first: the functions themselves, how members part, a setting's sweep."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from dissensus.drawing import maps, panels
from dissensus.evaluation.evaluation import Evaluation
from dissensus.reporting import curves
from dissensus.reporting.measures import ATTACKED
from dissensus.reporting.regions import as_square, window
from dissensus.reporting.results import Results
from dissensus.reporting.sweep import accuracies, sweep_of

Made = tuple[str, str, list[tuple[str, Figure]]]  # title, how to read it, (what it shows in words, figure)


def looked_at(first: dict[str, Evaluation], palette: dict[str, str]) -> Made | None:
    """What every method says over the line or the plane."""
    known = {name: each.arrays for name, each in first.items() if "grid/positions" in each.arrays}
    if not known:
        return None
    some = next(iter(known.values()))
    positions, seen, targets = (some[f"grid/{key}"].numpy() for key in ("positions", "seen", "targets"))
    if "grid/entropy" in some:
        classes = next(iter(first.values())).notes.get("classes", "").split("\n")
        figure = panels.entropy_maps(
            {name: as_square(arrays["grid/entropy"]).numpy() for name, arrays in known.items()},
            window=window(some["grid/positions"]),
            largest=math.log(max(len(classes), 2)),
            seen=(seen, targets),
        )
        text = "Entropy of the mean prediction over the plane, from sure (dark) to at a loss (light); dots are training inputs."
        return "Where is it sure?", text, [("Entropy over the plane, method by method", figure)]
    figure = panels.bands(
        positions[:, 0],
        {
            name: panels.Band(*(arrays[f"grid/{key}"].numpy() for key in ("mean", "sd", "members")))
            for name, arrays in known.items()
        },
        seen=(seen[:, 0], targets[:, 0]),
        palette=palette,
    )
    text = "Mean, ±3 standard deviations of the members' means, and up to ten members; dots are training data."
    return "Where is it sure?", text, [("Predictions along the line, method by method", figure)]


def segmented(first: dict[str, Evaluation]) -> Made | None:
    """What every method says of each pixel of some test images, the same ones for all."""
    known = {name: each.arrays for name, each in first.items() if "scenes/image" in each.arrays}
    if not known:
        return None
    some = next(iter(known.values()))
    classes = next(iter(first.values())).notes.get("classes", "").split("\n")
    figures = []
    for i, (image, truth) in enumerate(zip(some["scenes/image"], some["scenes/truth"], strict=True)):
        said = {
            name: maps.PixelMaps(*(arrays[f"scenes/{key}"][i].numpy() for key in maps.PixelMaps._fields))
            for name, arrays in known.items()
        }
        figure = maps.scene(image.movedim(0, -1).numpy(), truth.numpy(), said, classes=classes)
        figures.append((f"Test image {i + 1}: truth, predictions, confidence and mutual information", figure))
    text = (
        "Test images, the truth, and what every method says: the class of each pixel, its probability, and the mutual "
        "information, by which the members differ (none with a single network). Unknown classes did not count in training; "
        "the frame is where most of their pixels are."
    )
    return "Where in the image is it sure?", text, figures


def over_training(results: Results, palette: dict[str, str]) -> Made | None:
    """How members part while they train, mean over seeds."""
    known = {
        name: several
        for name, several in results.methods.items()
        if all("distances/epochs" in each.arrays for each in several)
    }
    if not known:
        return None
    drawn: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {space: {} for space in curves.SPACES}
    for name, several in known.items():
        for space in curves.SPACES:
            epochs, values = _looks(several, "distances", space)
            drawn[space][name] = (epochs, values.mean(0))
    text = (
        "Means over pairs of members at the same training inputs: how far apart their weights are, what they say, and the "
        "angle between what they look at (the derivative of the true class's logit, or of the mean, by the input)."
    )
    figure = curves.distances_over_training(drawn, palette=palette)
    return "How members differ, over training", text, [("Distances between members over training", figure)]


def attacked(results: Results, palette: dict[str, str]) -> Made | None:
    """What every attack does to every method as ε grows, mean over seeds."""
    figures = []
    for attack, title in ATTACKED.items():
        known = {
            name: several
            for name, several in results.methods.items()
            if all(f"attack/{attack}/accuracy" in each.arrays for each in several)
        }
        if known:
            epsilons = next(iter(known.values()))[0].arrays["attack/epsilons"].numpy()
            drawn = {
                metric: {
                    name: np.mean([each.arrays[f"attack/{attack}/{metric}"].numpy() for each in several], axis=0)
                    for name, several in known.items()
                }
                for metric in curves.UNDER_ATTACK
            }
            figures.append((f"Test inputs {title}", curves.under_attack(epsilons, drawn, palette=palette, title=title)))
    text = (
        "Test inputs changed within a radius ε so that the averaged prediction is wrong; ε = 0 is the same inputs, unchanged. "
        "Entropy and mutual information should rise where accuracy falls."
    )
    return ("What happens to attacked inputs?", text, figures) if figures else None


def corrupted_by_itself(first: dict[str, Evaluation]) -> Made | None:
    """What drawn functions amount to as corruptions of some test images, the same ones for all methods."""
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
        figure = panels.implicit(
            before, after, largest=largest, title=f"{name}: {moved:.1f} %, {explained:.0f} % explained"
        )
        figures.append((f"Implicit corruptions of {name}", figure))
    text = (
        "What a drawn function says of an image, the mean of all functions says of another one: a test image (left), what it "
        "becomes for some of the functions, and under it the change (red: brighter, blue: darker; one scale for all methods). "
        "In the title, over all images looked at: the root mean square change of a pixel in percent of its range, and the "
        "share of a function's deviation from the mean that the change explains."
    )
    return ("What its noise does to an image", text, figures) if figures else None


def learned(results: Results) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """What is looked at -> method -> epochs (E,) and values (S, E), of methods whose training was looked at."""
    return {
        name: known
        for name in curves.LEARNED
        if (
            known := {
                method: _looks(several, "curves", name)
                for method, several in results.methods.items()
                if all(f"curves/over/{name}" in each.arrays for each in several)
            }
        )
    }


def learning(results: Results, palette: dict[str, str]) -> Made | None:
    """Accuracy while methods train."""
    if not (found := learned(results)):
        return None
    text = "At up to 1,000 rows of each kind: means over seeds, in bands from the lowest to the highest."
    figure = curves.learning_curves({"": found}, palette=palette)
    return "What is learned, over training", text, [("Accuracies over training", figure)]


def _looks(several: Sequence[Evaluation], prefix: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Epochs (E,) at which every seed was looked at (a run that was stopped may lack one), and values (S, E)."""
    arrays = [(each.arrays[f"{prefix}/epochs"], each.arrays[f"{prefix}/over/{name}"]) for each in several]
    looks = [dict(zip(epochs.tolist(), values.tolist(), strict=True)) for epochs, values in arrays]
    common = [epoch for epoch in looks[0] if all(epoch in look for look in looks)]
    return np.asarray(common), np.array([[look[epoch] for epoch in common] for look in looks])


def swept(results: Results, palette: dict[str, str]) -> Made | None:
    """Accuracy over the values of the setting that a task sweeps."""
    sweep = sweep_of(results)
    if sweep is None:
        return None
    each = {name: [accuracies(e) for e in several] for name, several in results.methods.items()}
    titles = {
        title: {name: [found[title] for found in several] for name, several in each.items()}
        for title in next(iter(each.values()))[0]
    }
    about = {"key": sweep.key, "label": sweep.base, "chosen": sweep.chosen}
    figure = curves.sweep(titles, sweep.values, **about, palette=palette)
    text = (
        f"Test accuracy of {sweep.base} over {sweep.key}; the circle is the value chosen by the accuracy on validation images "
        "under other corruptions, before any test image was seen. Dashed: methods without that setting."
    )
    return f"Accuracy over {sweep.key}", text, [(f"Test accuracy over {sweep.key}", figure)]
