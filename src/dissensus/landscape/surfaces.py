"""Losses on planes of weights: through three members, and along random directions from one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dissensus.core.posterior import Posterior
from dissensus.landscape.points import Anchors, Statistics
from dissensus.numerics.checks import number, whole


@dataclass(frozen=True, eq=False)
class Surface:
    """Losses on a grid of a plane of weights. `loss[i, j]` is at `first[i]`, `second[j]`.

    Args:
        first, second: (P,), (Q,) coordinates. Of a plane, members are at (0, 0), (1, 0) and (0, 1); of directions, one
            member is at (0, 0) and one step is as long, filter by filter, as the weights.
        loss: (P, Q) mean negative log-likelihood in nats; NaN or inf where the network overflows.
        accuracy: (P, Q), or None where targets are not class indices.
        marks: coordinates of the members.
        frame: (2, 2) where one step of each coordinate leads in an orthonormal basis of the plane (Gram–Schmidt): what
            `plot` draws, so that distances are those of weights.
    """

    first: Tensor
    second: Tensor
    loss: Tensor
    accuracy: Tensor | None
    marks: dict[str, tuple[float, float]]
    frame: Tensor

    def drawn(self) -> tuple[Tensor, Tensor, Tensor, dict[str, tuple[float, float]]]:
        """(x, y, loss, marks) in the orthonormal basis, x, y and loss (P, Q)."""
        along, across = torch.meshgrid(self.first, self.second, indexing="ij")
        x, y = (along * self.frame[0, i] + across * self.frame[1, i] for i in range(2))
        marks = {
            name: (a * float(self.frame[0, 0]) + b * float(self.frame[1, 0]), b * float(self.frame[1, 1]))
            for name, (a, b) in self.marks.items()
        }
        return x, y, self.loss, marks

    def plot(self) -> Any:
        """A matplotlib Figure: contours of the loss on a logarithmic scale, with the members marked."""
        from dissensus.drawing.panels import surfaces  # loads matplotlib

        several = len(self.marks) > 1
        return surfaces({"": self.drawn()}, xlabel="distance of weights" if several else "in norms of filters")


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
    """The Surface of losses on the plane through three members (Garipov et al., NeurIPS 2018).

        θ(a, b) = (1 − a − b) θ_0 + a θ_1 + b θ_2

    Args:
        posterior: with three drawn functions or more, whose weights are combined; learned noise as well.
        loader: (x, y) batches that losses are means over; read once.
        members: which functions of the draw are at (0, 0), (1, 0) and (0, 1).
        steps: from one member to the next.
        margin: how far the grid goes beyond the members, as a share of the way between them, rounded to whole steps.
        statistics: running statistics of batch norm off the members. "recomputed": from the inputs of `loader`, for every
            point; another loader: from its inputs; "stored": those of the nearest member. Recomputed by default: weights
            between two networks have the statistics of neither, and would look worse than they are. At the members they
            are always the stored ones.
        together: points that run at once, by vmap; more are quicker on a GPU.
    """
    anchors = Anchors(posterior, members, loader, statistics)
    around = round(number("margin", margin, least=0) * whole("steps", steps))
    line = torch.arange(-around, steps + around + 1, dtype=torch.float64) / steps
    a, b = torch.meshgrid(line, line, indexing="ij")
    found = anchors.losses(torch.stack([1 - a - b, a, b], -1).flatten(0, 1), together=together)
    offsets = anchors.flat()[1:] - anchors.flat()[0]  # (2, P)
    length = offsets[0].norm()
    along = offsets[1] @ offsets[0] / length
    across = (offsets[1] - along * offsets[0] / length).norm()
    frame = torch.tensor([[float(length), 0.0], [float(along), float(across)]], dtype=torch.float64)
    marks = {str(member): at for member, at in zip(members, ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)), strict=True)}
    return Surface(line, line, *found.shaped(len(line), len(line)), marks, frame)


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
    """The Surface of losses along two random directions from a member, filter-normalised (Li et al., NeurIPS 2018).

        θ(a, b) = θ + a δ + b η,    δ_f = d_f ‖θ_f‖ / ‖d_f‖,  d ~ N(0, I), for every filter f

    A filter is all that leads to one output channel or unit. Biases and norm layers stay as they are, as in the paper's
    code. Scaling a filter before a norm layer scales its noise with it, and leaves the picture as it was.

    Args:
        member: which function of the draw is in the middle.
        points: P on each axis; odd, so that the member is one of them.
        reach: the axes go from −reach to reach.
        seed: of the directions; the same for networks of equal shapes.
        statistics: as in `plane`; "stored" by default, as in the paper: the picture is of one network, at its statistics.
        posterior, loader, together: as in `plane`.
    """
    if whole("points", points) % 2 == 0:
        raise ValueError(f"expected an odd number of points, got {points}; the member is in the middle of {points + 1}")
    anchors = Anchors(posterior, (member,), loader, statistics)
    generator = torch.Generator().manual_seed(seed)
    anchors.append(anchors.filter_noise(generator))
    anchors.append(anchors.filter_noise(generator))
    half = points // 2
    line = number("reach", reach, above=0) * torch.arange(-half, half + 1, dtype=torch.float64) / max(half, 1)
    a, b = torch.meshgrid(line, line, indexing="ij")
    found = anchors.losses(torch.stack([torch.ones_like(a), a, b], -1).flatten(0, 1), together=together)
    return Surface(
        line, line, *found.shaped(points, points), {str(member): (0.0, 0.0)}, torch.eye(2, dtype=torch.float64)
    )
