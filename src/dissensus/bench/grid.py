"""What members say on the grid of a data set one can look at: numbers by region, and what figures are drawn from."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from dissensus.bench.geometry import Geometry
from dissensus.core.predictive import ClassificationPredictive, Predictive
from dissensus.evaluate import Evaluation

SHOWN = 10  # members drawn one by one
POINTS = 2000  # training rows drawn at most


def with_grid(evaluation: Evaluation, predictive: Predictive, geometry: Geometry, targets: Tensor) -> Evaluation:
    """The evaluation with region/NAME/sd or region/NAME/entropy, and arrays grid/…; targets: of the training rows.

    sd: mean over the region of the standard deviation of the members' means, √epistemic. entropy: mean of the entropy of
    the mean probabilities, in nats.
    """
    arrays = {"positions": geometry.positions, "seen": geometry.seen[:POINTS], "targets": targets[:POINTS]}
    if isinstance(predictive, ClassificationPredictive):
        quantity, values = "entropy", predictive.total  # (n,)
        arrays["entropy"] = values
    else:
        quantity, values = "sd", predictive.epistemic[:, 0].sqrt()  # (n,)
        arrays |= {"mean": predictive.mean[:, 0], "sd": values, "members": predictive.members[:SHOWN, :, 0]}
    found = {
        f"region/{name}/{quantity}": float(values[where].double().mean()) for name, where in geometry.regions.items()
    }
    single = {
        f"grid/{name}": tensor.float() if tensor.is_floating_point() else tensor for name, tensor in arrays.items()
    }
    return replace(evaluation, metrics=evaluation.metrics | found, arrays=evaluation.arrays | single)


def region_keys(evaluation: Evaluation) -> list[str]:
    """The keys of an evaluation's regions, in order."""
    return [key for key in evaluation.metrics if key.startswith("region/")]


def spoken(key: str) -> tuple[str, str]:
    """(region, quantity) of a key in words: ("off the data", "entropy")."""
    _, region, quantity = key.split("/")
    names = {
        "off_data": "off the data",
        "at_data": "at the data",
        "between": "between the data",
        "outside": "outside the data",
    }
    return names.get(region, region.replace("_", " ")), {"sd": "standard deviation"}.get(quantity, quantity)


def as_square(values: Tensor) -> Tensor:
    """(side, side) of values (side²,) on a plane's grid, the first axis going up: what an image shows with its origin below."""
    side = round(len(values) ** 0.5)
    return values.reshape(side, side).T


def window(positions: Tensor) -> tuple[float, float, float, float]:
    """(left, right, bottom, top) of a plane's grid."""
    (left, bottom), (right, top) = positions.amin(0).tolist(), positions.amax(0).tolist()
    return left, right, bottom, top


__all__ = ["as_square", "region_keys", "spoken", "window", "with_grid"]
