"""Geometry of one- and two-dimensional data sets: a grid of inputs on a line or in a plane, with named regions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dissensus.data import quadratic_features

Ends = tuple[float, float]


@dataclass(frozen=True, eq=False)
class Geometry:
    """The grid on which members are drawn, and its named regions."""

    positions: Tensor  # (n, 1) on a line, (side², 2) in a plane, the second coordinate running fastest
    inputs: Tensor  # (n, D) the network's inputs there, in original units
    regions: dict[str, Tensor]  # name -> (n,) boolean
    training_positions: Tensor  # (N, 1) or (N, 2) positions of the training rows


def line_geometry(
    x: Tensor,
    *,
    window: Ends,
    intervals: Sequence[Ends],
    inputs: Callable[[Tensor], Tensor] = lambda positions: positions,
    position: Callable[[Tensor], Tensor] = lambda x: x,
    points: int = 401,
) -> Geometry:
    """A Geometry on a line with the regions "at_data" (the intervals with data), "between" and "outside" them.

    `inputs` turns positions (n, 1) into the network's inputs, `position` turns them back.
    """
    where = torch.linspace(*window, points)
    at_data = torch.stack([(where >= low) & (where <= high) for low, high in intervals]).any(0)
    outside = (where < intervals[0][0]) | (where > intervals[-1][1])
    regions = {"between": ~at_data & ~outside, "outside": outside, "at_data": at_data}
    return Geometry(
        positions=where[:, None],
        inputs=inputs(where[:, None]),
        regions={name: inside for name, inside in regions.items() if inside.any()},
        training_positions=position(x),
    )


def plane_geometry(x: Tensor, *, window: Ends, far: float, side: int = 101) -> Geometry:
    """A Geometry in a square: "off_data" is farther than `far` from all training inputs, "at_data" nearer than half of it."""
    axis = torch.linspace(*window, side)
    positions = torch.cartesian_prod(axis, axis)
    distance = torch.cdist(positions, x.to(positions)).amin(1)
    return Geometry(positions, positions, {"off_data": distance > far, "at_data": distance < far / 2}, x)


# Data set -> function from its training inputs x (N, D) to its geometry.
# Intervals are those of the generating distribution, so regions do not depend on the draw.
GEOMETRIES: dict[str, Callable[[Tensor], Geometry]] = {
    "x_sin_x": partial(line_geometry, window=(0.0, 7.5), intervals=((1.5, 2.5), (4.5, 6.0))),
    "x_sin_x_features": partial(
        line_geometry,
        window=(0.0, 7.5),
        intervals=((1.5, 2.5), (4.5, 6.0)),
        inputs=quadratic_features,
        position=lambda x: 2 * x[:, :1],
    ),
    "cubic": partial(line_geometry, window=(-6.0, 6.0), intervals=((-4.0, 4.0),)),
    "cubic_gap": partial(line_geometry, window=(-4.5, 4.5), intervals=((-3.0, -1.0), (1.0, 3.0))),
    "hill": partial(line_geometry, window=(-4.0, 4.0), intervals=((-2.6, -1.4), (-0.6, 0.6), (1.4, 2.6))),
    "gp_draw": partial(line_geometry, window=(-6.0, 6.0), intervals=((-4.0, 0.0), (2.0, 4.0))),
    "three_clusters": partial(
        line_geometry,
        window=(-10.0, 10.0),
        intervals=((-7.2, -4.8), (-1.2, 1.2), (4.8, 7.2)),
        inputs=quadratic_features,
        position=lambda x: 2 * x[:, :1],
        points=801,
    ),
    "two_moons": partial(plane_geometry, window=(-4.5, 5.0), far=1.0),
    "five_blobs": partial(plane_geometry, window=(-7.0, 7.0), far=1.0),  # blobs have a standard deviation of 0.4
}
