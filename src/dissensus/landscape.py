"""The loss around and between members: planes through three of them, random directions from one, ways from one to another.

Every point is Σ_k c_k θ_k, a combination of members' weights and, for directions, of filter-normalised noise. Combinations are
taken in this form because it gives the members themselves back exactly, where θ_0 + 1 · (θ_1 − θ_0) would round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from dissensus.core.batch import Batch
from dissensus.core.functions import MemberFunctions
from dissensus.core.likelihood import log_prob_sum
from dissensus.core.particles import Member, Particles, member_index
from dissensus.core.posterior import Posterior, expect_posterior, left_as_found
from dissensus.core.predictive import ClassificationPredictive
from dissensus.core.statistics import statistics_layers
from dissensus.numerics.checks import number, one_of, whole
from dissensus.numerics.tree import Tensors
from dissensus.surgery.normalization import estimating, refresh_statistics

Statistics = Literal["stored", "recomputed"] | Iterable[Any]


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
        from dissensus.reporting.panels import surfaces  # loads matplotlib

        several = len(self.marks) > 1
        return surfaces({"": self.drawn()}, xlabel="distance of weights" if several else "in norms of filters")


@dataclass(frozen=True, eq=False)
class Path:
    """Losses along a way from one member (t = 0) to another (t = 1).

    Args:
        t: (P,) from 0 to 1.
        loss: (P,) mean negative log-likelihood in nats.
        accuracy: (P,), or None where targets are not class indices.
    """

    t: Tensor
    loss: Tensor
    accuracy: Tensor | None

    @property
    def barrier(self) -> float:
        """How far the loss rises above the straight line between the losses at the ends, at most."""
        line = (1 - self.t) * self.loss[0] + self.t * self.loss[-1]
        return float((self.loss - line).max())

    def plot(self) -> Any:
        """A matplotlib Figure: the loss over t."""
        from dissensus.reporting.plots import PALETTE, Curve, Panel, curve_figure, marked  # loads matplotlib

        curve = Curve(self.t, self.loss, "loss", {"color": PALETTE[0], **marked(0)})
        axes = {"xlabel": "from one member (0) to the other (1)", "ylabel": "loss (nats)"}
        return curve_figure([Panel([curve], axes)])


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
    anchors = _Anchors(posterior, members, loader, statistics)
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
    anchors = _Anchors(posterior, (member,), loader, statistics)
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


def path(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    members: tuple[int, int] = (0, 1),
    points: int = 21,
    statistics: Statistics = "recomputed",
    together: int = 1,
) -> Path:
    """The Path of losses along the straight line from one member to another: (1 − t) θ_0 + t θ_1.

    Args:
        points: P, both ends among them.
        posterior, loader, members, statistics, together: as in `plane`.
    """
    anchors = _Anchors(posterior, members, loader, statistics)
    t = torch.linspace(0, 1, whole("points", points, least=2), dtype=torch.float64)
    return Path(t, *anchors.losses(torch.stack([1 - t, t], -1), together=together).shaped(len(t)))


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
    """The Path of losses along a curve between two members that is bent to where the loss is low (Garipov et al. 2018).

        φ(t) = (1 − t)² θ_0 + 2 t (1 − t) ω + t² θ_1,    ω = argmin E_{t ~ U(0, 1)} loss(φ(t)), from (θ_0 + θ_1) / 2

    Args:
        epochs, lr: of Adam on ω, over the batches of `loader` as they were read once; batch norm at each batch's statistics.
        seed: of t.
        posterior, loader, members, points, statistics, together: as in `path`.
    """
    anchors = _Anchors(posterior, members, loader, statistics)
    t = torch.linspace(0, 1, whole("points", points, least=2), dtype=torch.float64)
    anchors.append(
        anchors.bent(whole("epochs", epochs), number("lr", lr, above=0), torch.Generator().manual_seed(seed))
    )
    bent = torch.stack([(1 - t) ** 2, t**2, 2 * t * (1 - t)], -1)
    return Path(t, *anchors.losses(bent, together=together).shaped(len(t)))


class _Losses(NamedTuple):
    loss: Tensor  # (N,)
    accuracy: Tensor | None

    def shaped(self, *shape: int) -> tuple[Tensor, Tensor | None]:
        return self.loss.reshape(shape), None if self.accuracy is None else self.accuracy.reshape(shape)


class _Anchors:
    """K trees of weights that points are combinations of, the first ones members, and the batches that losses are of."""

    def __init__(
        self, posterior: Posterior, members: Sequence[int], loader: Iterable[Any], statistics: Statistics
    ) -> None:
        if isinstance(statistics, str):
            one_of("statistics", statistics, ("stored", "recomputed"), hint="or pass a loader")
        with left_as_found(expect_posterior(posterior)):
            drawn = posterior.draw()
            self.networks = [drawn.member(index).eval().requires_grad_(True) for index in members]
            self.kept = [posterior.take(batch) for batch in posterior.read(loader, anywhere=True)]
        if not self.kept:
            raise ValueError("expected at least one batch from the loader, got none; pass a loader with data")
        given = () if isinstance(statistics, str) else posterior.read(statistics)
        self.seen: list[Batch] | None = {"stored": None, "recomputed": self.kept}.get(str(statistics), list(given))
        # Learned noise is a member's own; functions of one network share its.
        particles, each = posterior.particles, drawn.members // drawn.networks
        of = [member_index(index, drawn.members) // each for index in members]
        self.likelihood = particles.copied_part(particles.template.likelihood, "likelihood.", of[0])
        self.particles, self.members = self._stacked(self.networks), len(members)
        own = self.particles.own_parameters()
        for name in [name for name in own if name.startswith("likelihood.")]:
            own[name].data.copy_(torch.stack([particles.at(index)[0][name] for index in of]))
        self.weights: Tensors = {name: tensor.detach() for name, tensor in own.items()}  # (K, ...)
        self.rooms: dict[int, Particles] = {}

    def _stacked(self, networks: Sequence[nn.Module]) -> Particles:
        return Particles.stack(networks, self.likelihood, own=lambda name: True).eval()

    def flat(self) -> Tensor:
        """(K, P) in float64."""
        return torch.cat([tensor.double().flatten(1) for tensor in self.weights.values()], 1)

    def append(self, weights: Tensors) -> None:
        self.weights = {name: torch.cat([tensor, weights[name][None]]) for name, tensor in self.weights.items()}

    def filter_noise(self, generator: torch.Generator) -> Tensors:
        """Noise as long as the first member's weights, filter by filter; zero for tensors with one axis or none."""
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

    def bent(self, epochs: int, lr: float, generator: torch.Generator) -> Tensors:
        """The weights ω of `curve` between the first two."""
        middle = {name: ((rows[0] + rows[1]) / 2).requires_grad_() for name, rows in self.weights.items()}
        optimizer = torch.optim.Adam(list(middle.values()), lr=lr)
        buffers = self.particles.at(0)[1]
        with torch.enable_grad(), estimating(self.particles, statistics_layers(self.particles.template)):
            for batch in epochs * self.kept:
                t = float(torch.rand((), generator=generator, dtype=torch.float64))
                point = {
                    name: (1 - t) ** 2 * rows[0] + 2 * t * (1 - t) * middle[name] + t**2 * rows[1]
                    for name, rows in self.weights.items()
                }
                loss, _ = self.particles.call(Member.nll, point, buffers, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return {name: tensor.detach() for name, tensor in middle.items()}

    def _room(self, points: int) -> Particles:
        """Particles for so many points, to be overwritten."""
        if points not in self.rooms:
            self.rooms[points] = self._stacked([self.networks[0]] * points)
        return self.rooms[points]

    @torch.no_grad()
    def losses(self, coefficients: Tensor, *, together: int) -> _Losses:
        """Of points (N, K), so many of which run at once."""
        whole("together", together)
        exact = ((coefficients == 0) | (coefficients == 1)).all(1) & (coefficients.sum(1) == 1)
        loss = torch.empty(len(coefficients), dtype=torch.float64)
        accuracy = torch.empty_like(loss)
        for stored, rows in ((True, exact.nonzero()[:, 0]), (False, (~exact).nonzero()[:, 0])):
            for some in torch.split(rows, together) if len(rows) else ():
                particles = self._room(len(some))
                self._place(particles, coefficients[some])
                if not stored and self.seen is not None:
                    refresh_statistics(particles, self.seen, particles.device)
                loss[some], accuracy[some] = self._measured(particles)
        return _Losses(loss, None if accuracy.isnan().all() else accuracy)

    def _place(self, particles: Particles, coefficients: Tensor) -> None:
        """Puts the points (S, K) into the particles, with the buffers of the nearest member."""
        for name, tensor in particles.own_parameters().items():
            rows = self.weights[name]
            for s, each in enumerate(coefficients.tolist()):
                tensor.data[s] = sum(c * row for c, row in zip(each, rows, strict=True))
        nearest = coefficients[:, : self.members].argmax(1)
        mine = self.particles.own_buffers()
        for name, buffer in particles.own_buffers().items():
            buffer.copy_(mine[name][nearest.to(buffer.device)])

    def _measured(self, particles: Particles) -> tuple[Tensor, Tensor]:
        """(S,), (S,) mean negative log-likelihood and accuracy, NaN where targets are no classes."""
        functions, likelihood = MemberFunctions(particles), particles.likelihood
        sums = torch.zeros(
            4, particles.members, dtype=torch.float64
        )  # log-probabilities, their weights, right answers, places
        for x, y, weight in self.kept:
            described = functions.describe(x)
            for s in range(particles.members):
                one = likelihood.predictive(*(tensor[s : s + 1] for tensor in described))
                found = (*log_prob_sum(likelihood, one, y, weight), *_right(one, y, likelihood.counted(y)))
                sums[:, s] += torch.stack([each.double().cpu() for each in found])
        return -sums[0] / sums[1], sums[2] / sums[3]


def _right(predictive: Any, y: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor]:
    """() how many classes are right, and () of how many that count; 0 of 0 where targets are no class indices."""
    if not isinstance(predictive, ClassificationPredictive) or y.is_floating_point():
        return torch.zeros(()), torch.zeros(())
    counted = torch.ones_like(y, dtype=torch.bool) if counted is None else counted
    return ((predictive.mean.argmax(1) == y) & counted).sum(), counted.sum()
