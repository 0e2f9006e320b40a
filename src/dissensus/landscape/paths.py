"""Losses on paths from one member to another: the straight line, and a curve trained to avoid high loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dissensus.core.particles import Member
from dissensus.core.posterior import Posterior
from dissensus.landscape.points import Anchors, Statistics
from dissensus.layers.reestimate_batch_norm import statistics_mode
from dissensus.utils.batch_norm_names import statistics_layers
from dissensus.utils.checks import integer, number
from dissensus.utils.tensor_tree import Tensors


@dataclass(frozen=True, eq=False)
class Path:
    """Losses on a path from one member (t = 0) to another (t = 1); made by `path` and `curve`.

    Args:
        t: (P,) from 0 to 1.
        loss: (P,) mean negative log-likelihood in nats.
        accuracy: (P,), or None if targets are not class indices.
    """

    t: Tensor
    loss: Tensor
    accuracy: Tensor | None

    @property
    def barrier(self) -> float:
        """Largest excess of the loss over the linear interpolation between the losses at the ends, in nats."""
        line = (1 - self.t) * self.loss[0] + self.t * self.loss[-1]
        return float((self.loss - line).max())

    def plot(self) -> Any:
        """A matplotlib Figure: the loss over t."""
        from dissensus.plots.charts import PALETTE, Curve, Panel, curve_figure, marker_style  # loads matplotlib

        curve = Curve(self.t, self.loss, "loss", {"color": PALETTE[0], **marker_style(0)})
        axes = {"xlabel": "from one member (0) to the other (1)", "ylabel": "loss (nats)"}
        return curve_figure([Panel([curve], axes)])


def path(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    members: tuple[int, int] = (0, 1),
    points: int = 21,
    statistics: Statistics = "recomputed",
    together: int = 1,
) -> Path:
    """Computes the loss along the straight line from one member to another: (1 − t) θ_0 + t θ_1; returns a `Path`.

    Args:
        points: P, including both ends.
        posterior, loader, members, statistics, together: as in `plane`.
    """
    anchors = Anchors(posterior, members, loader, statistics)
    t = torch.linspace(0, 1, integer("points", points, least=2), dtype=torch.float64)
    return Path(t, *anchors.losses(torch.stack([1 - t, t], -1), together=together).reshape(len(t)))


def curve(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    members: tuple[int, int] = (0, 1),
    points: int = 21,
    epochs: int = 20,
    lr: float = 0.01,
    seed: int = 0,
    statistics: Statistics = "recomputed",
    together: int = 1,
) -> Path:
    """Trains a low-loss curve between two members and computes the loss along it (Garipov et al. 2018); returns a `Path`.

        φ(t) = (1 − t)² θ_0 + 2 t (1 − t) ω + t² θ_1,    ω = argmin E_{t ~ U(0, 1)} loss(φ(t)), from (θ_0 + θ_1) / 2

    Args:
        epochs, lr: of Adam on ω, over the batches of `loader`, which are read once and kept; batch norm uses each batch's
            statistics.
        seed: seed of the random t.
        posterior, loader, members, points, statistics, together: as in `path`.
    """
    anchors = Anchors(posterior, members, loader, statistics)
    t = torch.linspace(0, 1, integer("points", points, least=2), dtype=torch.float64)
    epochs, lr, generator = integer("epochs", epochs), number("lr", lr, above=0), torch.Generator().manual_seed(seed)
    anchors.append(train_midpoint(anchors, epochs, lr, generator))
    coefficients = torch.stack([(1 - t) ** 2, t**2, 2 * t * (1 - t)], -1)
    return Path(t, *anchors.losses(coefficients, together=together).reshape(len(t)))


def train_midpoint(anchors: Anchors, epochs: int, lr: float, generator: torch.Generator) -> Tensors:
    """The weights ω of `curve` between the first two anchors."""
    middle = {name: ((rows[0] + rows[1]) / 2).requires_grad_() for name, rows in anchors.weights.items()}
    optimizer = torch.optim.Adam(list(middle.values()), lr=lr)
    buffers = anchors.particles.member_tensors(0)[1]
    with torch.enable_grad(), statistics_mode(anchors.particles, statistics_layers(anchors.particles.template)):
        for batch in epochs * anchors.batches:
            t = float(torch.rand((), generator=generator, dtype=torch.float64))
            point = {
                name: (1 - t) ** 2 * rows[0] + 2 * t * (1 - t) * middle[name] + t**2 * rows[1]
                for name, rows in anchors.weights.items()
            }
            loss, _ = anchors.particles.call(Member.nll, point, buffers, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {name: tensor.detach() for name, tensor in middle.items()}
