"""Chooses the epoch of a regression: the one whose means are nearest to held-out targets."""

import math
from typing import Any

import torch
from torch import Tensor

from dissensus.core.posterior import Posterior, left_as_found
from dissensus.data.batches import Batches
from dissensus.training.history import Epoch


class NearestMeans:
    """A callback of `fit` that keeps the state with the least held-out error, and stops after `patience` worse epochs.

    The likelihood is not used: a network with a variance output soon becomes overconfident on training rows, and the
    likelihood would then choose an early epoch, whose means are undertrained. A temperature sets the spread afterwards.
    """

    def __init__(self, posterior: Posterior, rows: Batches, patience: int | None) -> None:
        self.posterior, self.rows, self.patience = posterior, rows, patience
        self.scores: list[float] = []  # root mean squared error of each epoch, in deviations of the targets
        self.state: dict[str, Tensor] = {}

    def __call__(self, epoch: Epoch) -> bool:
        score = self._error()
        if score < min(self.scores, default=math.inf):
            self.state = {name: tensor.detach().clone() for name, tensor in self.posterior.state_dict().items()}
        self.scores.append(score)
        return self.patience is not None and len(self.scores) - 1 - self.best > self.patience

    @property
    def best(self) -> int:
        """The epoch kept."""
        return self.scores.index(min(self.scores))

    def _error(self) -> float:
        total = count = 0.0
        likelihood: Any = self.posterior.likelihood
        with left_as_found(self.posterior):
            drawn = self.posterior.current()
            for x, y, *weights in self.rows:
                mean = drawn.predict(x.to(self.posterior.device)).mean.cpu().double()
                each = ((mean - y) / likelihood.scale(y)[1]).square().mean(1)  # outputs count equally
                weight = weights[0].double() if weights else torch.ones_like(each)
                total, count = total + float((weight * each).sum()), count + float(weight.sum())
        return math.sqrt(total / count)
