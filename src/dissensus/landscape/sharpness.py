"""Sharpness: the largest curvature of a posterior's loss in units of the learning rates: how near SGD is to divergence."""

import copy
import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dissensus.core.batch import Batch, Inputs

STEP = 1e-3  # step of the gradient differences, relative to the weights' length
ITERATIONS, TOLERANCE = 30, 1e-2


def sharpness(posterior: Any, optimizer: Optimizer, x: Inputs, y: Tensor, weight: Tensor | None = None) -> float:
    """Sharpness of the training loss on one batch: the largest |eigenvalue| of D^½ H D^½; plain SGD diverges above 2.

    H is the Hessian of the loss and D the learning rates of the optimiser's groups. Found by power iteration with differences
    of gradients under equal noise, with about 1 % error. It works on a copy: the posterior and torch's random states do not
    change. NaN if the loss is not finite, 0 if it has no curvature.

    Args:
        posterior: the posterior to measure.
        optimizer: an optimiser of its parameters, whose rates are used.
        x, y, weight: one batch of inputs and targets, and weights (B,) of its examples.
    """
    return sharpness_on_batch(posterior, optimizer, posterior.prepare_batch(next(posterior.read([(x, y, weight)]))))


def sharpness_on_batch(posterior: Any, optimizer: Optimizer, batch: Batch) -> float:
    """As `sharpness`, on a batch that the posterior has read and taken."""
    rates = {id(tensor): float(group["lr"]) for group in optimizer.param_groups for tensor in group["params"]}
    copied = copy.deepcopy(posterior).train()
    copied.mesh = "independent"  # of several processes each measures for itself
    copied.inputs = None  # they are transformed already
    both = zip(posterior.parameters(), copied.parameters(), strict=True)
    moved = [(new, math.sqrt(rates[id(old)])) for old, new in both if new.requires_grad and rates.get(id(old))]
    start = [tensor.detach().clone() for tensor, _ in moved]
    roots = [root for _, root in moved]
    devices = [posterior.device] if posterior.device.type == "cuda" else []

    def gradient(direction: list[Tensor], scale: float) -> list[Tensor]:
        with torch.no_grad():
            for (tensor, root), at, step in zip(moved, start, direction, strict=True):
                tensor.copy_(at + scale * root * step)
        copied.zero_grad()
        torch.manual_seed(0)
        copied.backward(*batch)
        return [torch.zeros_like(t) if t.grad is None else root * t.grad.detach().clone() for t, root in moved]

    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        vector, found = [torch.randn_like(tensor) for tensor in start], 0.0
        for _ in range(ITERATIONS):
            norm = euclidean_norm(vector)
            vector = [v / norm for v in vector]
            reach = euclidean_norm([root * v for root, v in zip(roots, vector, strict=True)])
            scale = STEP * euclidean_norm(start) / reach
            up, down = gradient(vector, scale), gradient(vector, -scale)
            vector = [(a - b) / (2 * scale) for a, b in zip(up, down, strict=True)]
            before, found = found, euclidean_norm(vector)
            if not 0 < found < math.inf or abs(found - before) < TOLERANCE * found:
                break
    return found if found < math.inf else math.nan


def euclidean_norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))
