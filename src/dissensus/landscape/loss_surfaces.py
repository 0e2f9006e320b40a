"""Losses on planes through three members, along random directions from one, and on paths between two.

A point is a combination Σ_k c_k θ_k of members' weights: exact at the members, where θ_0 + 1 · (θ_1 − θ_0) would round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dissensus.core.batch import Batch
from dissensus.core.drawn_functions import MemberFunctions
from dissensus.core.likelihood import log_prob_sum
from dissensus.core.particles import Member, Particles
from dissensus.core.posterior import Posterior, expect_posterior, inference_context
from dissensus.core.predictive import ClassificationPredictive
from dissensus.layers.batch_norm import refresh_statistics, statistics_mode
from dissensus.likelihoods.tokens import token_rows
from dissensus.utils.batch_norm_names import statistics_layers
from dissensus.utils.checks import integer, number, one_of
from dissensus.utils.tensor_tree import Tensors

Statistics = Literal["stored", "recomputed"] | Iterable[Any]


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
    return Path(t, *anchors.losses(torch.stack([1 - t, t], -1), together=together))


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
        epochs, lr: of Adam on ω, over the batches of `loader`, read once and kept; batch norm uses each batch's statistics.
        seed: seed of the random t.
        posterior, loader, members, points, statistics, together: as in `path`.
    """
    anchors = Anchors(posterior, members, loader, statistics)
    t = torch.linspace(0, 1, integer("points", points, least=2), dtype=torch.float64)
    epochs, lr, generator = integer("epochs", epochs), number("lr", lr, above=0), torch.Generator().manual_seed(seed)
    anchors.append(train_midpoint(anchors, epochs, lr, generator))
    coefficients = torch.stack([(1 - t) ** 2, t**2, 2 * t * (1 - t)], -1)
    return Path(t, *anchors.losses(coefficients, together=together))


def train_midpoint(anchors: Anchors, epochs: int, lr: float, generator: torch.Generator) -> Tensors:
    """The weights ω of `curve` between the first two anchors."""
    middle = {name: ((rows[0] + rows[1]) / 2).requires_grad_() for name, rows in anchors.weights.items()}
    optimizer = torch.optim.Adam(list(middle.values()), lr=lr)
    buffers = anchors.particles.member_tensors(0)[1]
    with torch.enable_grad(), statistics_mode(anchors.particles, statistics_layers(anchors.particles.template)):
        for batch in epochs * anchors.batches:
            t = float(torch.rand((), generator=generator, dtype=torch.float64))
            ends = {name: (1 - t) ** 2 * rows[0] + t**2 * rows[1] for name, rows in anchors.weights.items()}
            point = {name: each + 2 * t * (1 - t) * middle[name] for name, each in ends.items()}
            loss, _ = anchors.particles.call(Member.nll, point, buffers, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {name: tensor.detach() for name, tensor in middle.items()}


@dataclass(frozen=True, eq=False)
class Surface:
    """Losses on a grid in a plane of weights; made by `plane` and `directions`. `loss[i, j]` is at `first[i]`, `second[j]`.

    Args:
        first, second: (P,), (Q,) coordinates. From `plane`, members are at (0, 0), (1, 0) and (0, 1); from `directions`,
            one member is at (0, 0), and in each filter a step of 1 has the norm of its weights.
        loss: (P, Q) mean negative log-likelihood in nats; NaN or inf where the network overflows.
        accuracy: (P, Q), or None if targets are not class indices.
        marks: coordinates of the members.
        frame: (2, 2) the steps of both coordinates in an orthonormal basis of the plane, for true distances in `plot`.
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
        (a0, _), (b0, b1) = self.frame.tolist()
        return x, y, self.loss, {name: (a * a0 + b * b0, b * b1) for name, (a, b) in self.marks.items()}

    def plot(self) -> Any:
        """A matplotlib Figure: contours of the loss on a logarithmic scale, with the members marked."""
        from dissensus.plots.charts import surface_figure

        xlabel = "distance of weights" if len(self.marks) > 1 else "in norms of filters"
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
        margin: how far the grid extends beyond the members, as a share of their distance, rounded to whole steps.
        statistics: batch norm statistics at points other than the members. "recomputed": from the inputs of `loader`, for
            every point (the default, since with the statistics of another network a point looks worse than it is);
            another loader: from its inputs; "stored": those of the nearest member. Members always use their own.
        together: points that run at once, by vmap; more are faster on a GPU.
    """
    anchors = Anchors(posterior, members, loader, statistics)
    around = round(number("margin", margin, least=0) * integer("steps", steps))
    line = torch.arange(-around, steps + around + 1, dtype=torch.float64) / steps
    a, b = torch.meshgrid(line, line, indexing="ij")
    found = anchors.losses(torch.stack([1 - a - b, a, b], -1), together=together)
    offsets = anchors.flat_weights()[1:] - anchors.flat_weights()[0]  # (2, P)
    length = offsets[0].norm()
    along = offsets[1] @ offsets[0] / length
    across = (offsets[1] - along * offsets[0] / length).norm()
    frame = torch.tensor([[float(length), 0.0], [float(along), float(across)]], dtype=torch.float64)
    marks = {str(member): at for member, at in zip(members, ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)), strict=True)}
    return Surface(line, line, *found, marks, frame)


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
    found = anchors.losses(torch.stack([torch.ones_like(a), a, b], -1), together=together)
    at_member, axes = {str(member): (0.0, 0.0)}, torch.eye(2, dtype=torch.float64)
    return Surface(line, line, *found, at_member, axes)


class Anchors:
    """K sets of weights that points combine (the first ones are members), and the batches for the losses."""

    def __init__(self, posterior: Posterior, members: Sequence[int], loader: Any, statistics: Statistics) -> None:
        if isinstance(statistics, str):
            one_of("statistics", statistics, ("stored", "recomputed"), hint="or pass a loader")
        with inference_context(expect_posterior(posterior)):
            drawn = posterior.draw()
            self.networks = [drawn.member(index).eval().requires_grad_(True) for index in members]
            self.batches = [posterior.prepare_batch(batch) for batch in posterior.read(loader, anywhere=True)]
        if not self.batches:
            raise ValueError("expected at least one batch from the loader, got none; pass a loader with data")
        given = () if isinstance(statistics, str) else posterior.read(statistics)
        named = {"stored": None, "recomputed": self.batches}
        self.statistics_batches: list[Batch] | None = named.get(str(statistics), list(given))
        self.likelihood = posterior.particles.copy_part(posterior.likelihood, "likelihood.", 0)
        self.particles, self.members = self._stack_networks(self.networks), len(members)
        own = self.particles.own_parameters()
        if any(True for _ in self.likelihood.parameters()):  # learned noise, separate for each function
            noise: Tensors = drawn.map_members(lambda member: dict(member.likelihood.named_parameters()))
            for name, rows in noise.items():
                own[f"likelihood.{name}"].data.copy_(rows[list(members)])
        self.weights: Tensors = {name: tensor.detach() for name, tensor in own.items()}  # (K, ...)
        self.particles_by_count: dict[int, Particles] = {}

    def _stack_networks(self, networks: Sequence[nn.Module]) -> Particles:
        return Particles.stack(networks, self.likelihood, own=lambda name: True).eval()

    def flat_weights(self) -> Tensor:
        """(K, P) in float64."""
        return torch.cat([tensor.double().flatten(1) for tensor in self.weights.values()], 1)

    def append(self, weights: Tensors) -> None:
        self.weights = {name: torch.cat([tensor, weights[name][None]]) for name, tensor in self.weights.items()}

    def filter_noise(self, generator: torch.Generator) -> Tensors:
        """Noise with the norm of the first member's weights in each filter; zero for tensors with fewer than two axes."""
        found = {}
        for name, tensor in self.weights.items():
            weight = tensor[0]
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight)
            if weight.ndim < 2 or not name.startswith("network."):
                found[name] = torch.zeros_like(weight)
                continue
            norms = [each.flatten(1).norm(dim=1) for each in (weight, noise)]  # (filters,)
            found[name] = noise * (norms[0] / norms[1]).reshape(-1, *[1] * (weight.ndim - 1))
        return found

    @torch.no_grad()
    def losses(self, points: Tensor, *, together: int) -> tuple[Tensor, Tensor | None]:
        """(loss (...), accuracy (...) or None) of points with coefficients (..., K); `together`: how many run at once."""
        integer("together", together)
        coefficients = points.flatten(0, -2)
        exact = ((coefficients == 0) | (coefficients == 1)).all(1) & (coefficients.sum(1) == 1)
        loss = torch.empty(len(coefficients), dtype=torch.float64)
        accuracy = torch.empty_like(loss)
        for stored, rows in ((True, exact.nonzero()[:, 0]), (False, (~exact).nonzero()[:, 0])):
            for some in torch.split(rows, together) if len(rows) else ():
                if len(some) not in self.particles_by_count:
                    self.particles_by_count[len(some)] = self._stack_networks([self.networks[0]] * len(some))
                particles = self.particles_by_count[len(some)]
                self._write_points(particles, coefficients[some])
                if not stored and self.statistics_batches is not None:
                    refresh_statistics(particles, self.statistics_batches, particles.device)
                loss[some], accuracy[some] = self._measure_losses(particles)
        shape = points.shape[:-1]
        return loss.reshape(shape), None if accuracy.isnan().all() else accuracy.reshape(shape)

    def _write_points(self, particles: Particles, coefficients: Tensor) -> None:
        """Writes the points (S, K) into the particles, with the buffers of the nearest member."""
        for name, tensor in particles.own_parameters().items():
            rows = self.weights[name]
            for s, each in enumerate(coefficients.tolist()):
                tensor.data[s] = sum(c * row for c, row in zip(each, rows, strict=True))
        nearest = coefficients[:, : self.members].argmax(1)
        mine = self.particles.own_buffers()
        for name, buffer in particles.own_buffers().items():
            buffer.copy_(mine[name][nearest.to(buffer.device)])

    def _measure_losses(self, particles: Particles) -> tuple[Tensor, Tensor]:
        """(S,), (S,) mean negative log-likelihood and accuracy, NaN if targets are no classes."""
        functions, likelihood = MemberFunctions(particles), particles.likelihood
        # Log-probabilities, their weights, correct answers, positions.
        sums = torch.zeros(4, particles.members, dtype=torch.float64)
        for x, y, weight in self.batches:
            described = functions.describe(x)
            for s in range(particles.members):
                one = likelihood.predictive(*(tensor[s : s + 1] for tensor in described))
                found = (*log_prob_sum(likelihood, one, y, weight), *_correct_counts(one, y, likelihood.target_mask(y)))
                sums[:, s] += torch.stack([each.double().cpu() for each in found])
        return -sums[0] / sums[1], sums[2] / sums[3]


def _correct_counts(predictive: Any, y: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor]:
    """() number of correct classes, and () number of positions that count; 0 and 0 if targets are no class indices."""
    if not isinstance(predictive, ClassificationPredictive) or y.is_floating_point():
        return torch.zeros(()), torch.zeros(())
    predictive, y, counted = token_rows(predictive, y, counted)
    counted = torch.ones_like(y, dtype=torch.bool) if counted is None else counted
    return ((predictive.mean.argmax(1) == y) & counted).sum(), counted.sum()
