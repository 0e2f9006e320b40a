"""Whether the standard deviations of a variational posterior have converged, judged by their gradient."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.core.batch import Batch
from dissensus.core.posterior import left_as_found
from dissensus.methods.parts.stacked import annealed
from dissensus.numerics.annealing import Annealing
from dissensus.numerics.flat import wide
from dissensus.numerics.randomness import same_random_state

LOOKS = 8


def still_growing(posterior: Any, loader: Iterable[Any], names: Sequence[str]) -> bool:
    """Whether σ = softplus(ρ) clearly still grows, measured on one batch; `names`: the tensors ρ of a member."""
    annealing: Annealing = posterior.annealing
    if annealing.schedule != "constant" and (annealing.steps or posterior.run_length) is None:
        return False  # β is unknown before a run begins
    with (
        left_as_found(posterior),
        same_random_state(posterior.device),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        batch, weight = next(iter(posterior.read(loader)), None), float(annealed(posterior, annealing))
        if batch is None or weight == 0:
            return False
        try:
            found = [growth(posterior, posterior.take(batch), names) for _ in range(LOOKS)]
        except torch.OutOfMemoryError:  # a batch that fits in half precision may not fit here
            return False
    each = torch.stack(found) / weight
    return float(each.mean() - 2 * each.std() / LOOKS**0.5) > 0.5


def growth(posterior: Any, batch: Batch, names: Sequence[str]) -> Tensor:
    """() −N ∂loss/∂log σ / T, mean over weights: 0 at the optimum, 1 where σ is too small for data or prior to matter."""
    params, buffers = posterior.particles.at(0)
    fixed = {name: each.detach() for name, each in params.items()}
    raw = {name: fixed[name].clone().requires_grad_() for name in names}
    slopes = torch.autograd.grad(posterior.member_loss(fixed | raw, buffers, batch)[0], list(raw.values()))
    each = [wide(g * F.softplus(r) / r.sigmoid()) for g, r in zip(slopes, raw.values(), strict=True)]  # by log σ
    mean = torch.cat([values.flatten() for values in each]).mean().detach()
    found: Tensor = -posterior.data_size / posterior.posterior_temperature * mean
    return found
