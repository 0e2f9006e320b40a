"""Losses on planes of weights: through three members, and along two random directions from one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dissensus.core.posterior import Posterior
from dissensus.landscape.points import Anchors, Statistics
from dissensus.utils.checks import integer, number


@dataclass(frozen=True, eq=False)
class Surface:
    """Losses on a grid in a plane of weights; made by `plane` and `directions`. `loss[i, j]` is at `first[i]`, `second[j]`.

    Args:
        first, second: (P,), (Q,) coordinates. From `plane`, members are at (0, 0), (1, 0) and (0, 1); from `directions`,
            one member is at (0, 0), and in each filter a step of 1 has the norm of its weights.
        loss: (P, Q) mean negative log-likelihood in nats; NaN or inf where the network overflows.
        accuracy: (P, Q), or None if targets are not class indices.
        marks: coordinates of the members.
        frame: (2, 2) the steps of both coordinates in an orthonormal basis of the plane (Gram–Schmidt); `plot` uses it,
            so that distances in the figure are distances of weights.
    """

    first: Tensor
    second: Tensor
    loss: Tensor
    accuracy: Tensor | None
    marks: dict[str, tuple[float, float]]
    frame: Tensor

    def drawing_coordinates(self) -> tuple[Tensor, Tensor, Tensor, dict[str, tuple[float, float]]]:
        """(x, y, loss, marks) in the orthonormal basis; x, y and loss are (P, Q)."""
        along, across = torch.meshgrid(self.first, self.second, indexing="ij")
        x, y = (along * self.frame[0, i] + across * self.frame[1, i] for i in range(2))
        marks = {
            name: (a * float(self.frame[0, 0]) + b * float(self.frame[1, 0]), b * float(self.frame[1, 1]))
            for name, (a, b) in self.marks.items()
        }
        return x, y, self.loss, marks

    def plot(self) -> Any:
        """A matplotlib Figure: contours of the loss on a logarithmic scale, with the members marked."""
        from dissensus.plots.charts import surface_figure  # loads matplotlib

        several = len(self.marks) > 1
        xlabel = "distance of weights" if several else "in norms of filters"
        return surface_figure({"": self.drawing_coordinates()}, xlabel=xlabel)


def plane(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    members: tuple[int, int, int] = (0, 1, 2),
    steps: int = 10,
    margin: float = 0.5,
    statistics: Statistics = "recomputed",
    together: int = 1,
) -> Surface:
    """Computes the loss on the plane through three members (Garipov et al., NeurIPS 2018); returns a `Surface`.

        θ(a, b) = (1 − a − b) θ_0 + a θ_1 + b θ_2

    Args:
        posterior: a posterior with at least three drawn functions, whose weights and learned noise are combined.
        loader: (x, y) batches for the mean losses; read once.
        members: indices of the drawn functions at (0, 0), (1, 0) and (0, 1).
        steps: grid steps from one member to the next.
        margin: how far the grid extends beyond the members, as a share of the distance between them, rounded to whole
            steps.
        statistics: batch norm statistics at points other than the members. "recomputed": from the inputs of `loader`, for
            every point (the default, since with the statistics of another network a point looks worse than it is);
            another loader: from its inputs; "stored": those of the nearest member. Members always use their own.
        together: points that run at once, by vmap; more are faster on a GPU.
    """
    anchors = Anchors(posterior, members, loader, statistics)
    around = round(number("margin", margin, least=0) * integer("steps", steps))
    line = torch.arange(-around, steps + around + 1, dtype=torch.float64) / steps
    a, b = torch.meshgrid(line, line, indexing="ij")
    found = anchors.losses(torch.stack([1 - a - b, a, b], -1).flatten(0, 1), together=together)
    offsets = anchors.flat_weights()[1:] - anchors.flat_weights()[0]  # (2, P)
    length = offsets[0].norm()
    along = offsets[1] @ offsets[0] / length
    across = (offsets[1] - along * offsets[0] / length).norm()
    frame = torch.tensor([[float(length), 0.0], [float(along), float(across)]], dtype=torch.float64)
    marks = {str(member): at for member, at in zip(members, ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)), strict=True)}
    return Surface(line, line, *found.reshape(len(line), len(line)), marks, frame)


def directions(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    member: int = 0,
    points: int = 21,
    reach: float = 1.0,
    seed: int = 0,
    statistics: Statistics = "stored",
    together: int = 1,
) -> Surface:
    """Computes the loss along two random, filter-normalised directions from a member (Li et al., NeurIPS 2018).

        θ(a, b) = θ + a δ + b η,    δ_f = d_f ‖θ_f‖ / ‖d_f‖,  d ~ N(0, I), for every filter f

    Returns a `Surface`. A filter is all weights of one output channel or unit. Biases and norm layers do not change, as in
    the paper's code. Scaling a filter before a norm layer also scales its noise, so it does not change the result.

    Args:
        member: index of the drawn function in the middle.
        points: P on each axis; odd, so that the member is one of them.
        reach: the axes go from −reach to reach.
        seed: seed of the directions, which are the same for networks of equal shapes.
        statistics: as in `plane`; by default "stored", as in the paper.
        posterior, loader, together: as in `plane`.
    """
    if integer("points", points) % 2 == 0:
        raise ValueError(f"expected an odd number of points, got {points}; pass {points + 1} to centre the member")
    anchors = Anchors(posterior, (member,), loader, statistics)
    generator = torch.Generator().manual_seed(seed)
    anchors.append(anchors.filter_noise(generator))
    anchors.append(anchors.filter_noise(generator))
    half = points // 2
    line = number("reach", reach, above=0) * torch.arange(-half, half + 1, dtype=torch.float64) / max(half, 1)
    a, b = torch.meshgrid(line, line, indexing="ij")
    found = anchors.losses(torch.stack([torch.ones_like(a), a, b], -1).flatten(0, 1), together=together)
    at_member, axes = {str(member): (0.0, 0.0)}, torch.eye(2, dtype=torch.float64)
    return Surface(line, line, *found.reshape(points, points), at_member, axes)
