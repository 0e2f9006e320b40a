"""predict: a posterior over a whole loader, with one draw for all of it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dissensus.core import batch as batches
from dissensus.core.posterior import Posterior, evaluation
from dissensus.core.predictive import Predictive


def predict(posterior: Posterior, loader: Iterable[Any]) -> tuple[Predictive, Tensor]:
    """(predictive of all inputs, targets) over a loader of (x, y); one draw for all batches."""
    parts, targets = [], []
    with evaluation(posterior):
        drawn = posterior.draw()
        for batch in loader:
            x, y, _ = batches.unpack(batch)
            batches.check_finite(x)
            parts.append(posterior.tempered(drawn.predict(batches.to(x, posterior.device))))
            targets.append(y)
    if not parts:
        raise ValueError("expected at least one batch from the loader, got none; pass a loader with data")
    return Predictive.cat(parts), torch.cat(targets).to(posterior.device)
