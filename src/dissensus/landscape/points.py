"""Points of a landscape: combinations Σ_k c_k θ_k of members' weights, and the losses of these networks.

This form reproduces the members exactly, while θ_0 + 1 · (θ_1 − θ_0) would round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from dissensus.core.batch import Batch
from dissensus.core.drawn_functions import MemberFunctions
from dissensus.core.likelihood import log_prob_sum
from dissensus.core.particles import Particles
from dissensus.core.posterior import Posterior, expect_posterior, inference_context
from dissensus.core.predictive import ClassificationPredictive
from dissensus.layers.reestimate_batch_norm import refresh_statistics
from dissensus.utils.checks import integer, one_of
from dissensus.utils.tensor_tree import Tensors

Statistics = Literal["stored", "recomputed"] | Iterable[Any]


class Losses(NamedTuple):
    loss: Tensor  # (N,)
    accuracy: Tensor | None

    def reshape(self, *shape: int) -> tuple[Tensor, Tensor | None]:
        return self.loss.reshape(shape), None if self.accuracy is None else self.accuracy.reshape(shape)


class Anchors:
    """K sets of weights that points combine (the first ones are members), and the batches for the losses."""

    def __init__(
        self, posterior: Posterior, members: Sequence[int], loader: Iterable[Any], statistics: Statistics
    ) -> None:
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

    def _point_particles(self, points: int) -> Particles:
        """Particles for this many points, to be overwritten."""
        if points not in self.particles_by_count:
            self.particles_by_count[points] = self._stack_networks([self.networks[0]] * points)
        return self.particles_by_count[points]

    @torch.no_grad()
    def losses(self, coefficients: Tensor, *, together: int) -> Losses:
        """Losses of points with these coefficients (N, K); `together`: how many run at once."""
        integer("together", together)
        exact = ((coefficients == 0) | (coefficients == 1)).all(1) & (coefficients.sum(1) == 1)
        loss = torch.empty(len(coefficients), dtype=torch.float64)
        accuracy = torch.empty_like(loss)
        for stored, rows in ((True, exact.nonzero()[:, 0]), (False, (~exact).nonzero()[:, 0])):
            for some in torch.split(rows, together) if len(rows) else ():
                particles = self._point_particles(len(some))
                self._write_points(particles, coefficients[some])
                if not stored and self.statistics_batches is not None:
                    refresh_statistics(particles, self.statistics_batches, particles.device)
                loss[some], accuracy[some] = self._measure_losses(particles)
        return Losses(loss, None if accuracy.isnan().all() else accuracy)

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
    counted = torch.ones_like(y, dtype=torch.bool) if counted is None else counted
    return ((predictive.mean.argmax(1) == y) & counted).sum(), counted.sum()
