"""Regions of one- and two-dimensional data sets: their metric keys, their names in words, and the window of a plane."""

from torch import Tensor

from dissensus.evaluation.evaluation import Evaluation


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
    """(side, side) image of values (side²,) on a plane's grid; the first row is the bottom (matplotlib's origin="lower")."""
    side = round(len(values) ** 0.5)
    return values.reshape(side, side).T


def window(positions: Tensor) -> tuple[float, float, float, float]:
    """(left, right, bottom, top) limits of a plane's grid."""
    (left, bottom), (right, top) = positions.amin(0).tolist(), positions.amax(0).tolist()
    return left, right, bottom, top
