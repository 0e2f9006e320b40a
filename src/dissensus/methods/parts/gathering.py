"""Gathering curvature: what each batch says of the last layer of one network."""

import torch
from torch import nn

from dissensus.core import batch as batches
from dissensus.core.batch import Batch
from dissensus.core.likelihood import Likelihood, Regression, spread
from dissensus.methods.parts.curvature import Gathered
from dissensus.methods.parts.last_layer import LastLayer, check_outputs, watching


def gather(gathered: Gathered, network: nn.Module, likelihood: Likelihood, last: LastLayer, batch: Batch) -> None:
    """Adds what one batch has to say of one network."""
    x, y, weight = batch
    with watching(last) as seen, batches.unchanged(x):
        outputs = batches.call(network, x)
    if len(seen) != 1:  # the layer was found with the first batch
        raise ValueError(
            f"expected a last layer that every batch passes once, got '{last.name}' called {len(seen)} times in one; "
            "outputs are then not linear in its weights: give the network one last layer"
        )
    features, made = seen[0]
    if not bool(outputs.isfinite().all()):
        raise ValueError("expected finite outputs, got NaN or infinity; fit a network that is whole")
    check_outputs(last, made, outputs)
    if last.channels == -1 and made.ndim > 2 and type(likelihood).curvature is not Regression.curvature:
        raise ValueError(
            f"expected outputs (B, C) of the last layer '{last.name}', got {tuple(made.shape)}, whose axis 1 is not the "
            "layer's; let a 1×1 convolution make outputs at positions"
        )
    counted = likelihood.counted(y)
    log_prob = likelihood.log_prob(outputs.double(), y)
    w = torch.ones_like(log_prob) if weight is None else spread(weight, log_prob)
    if counted is not None:
        w = w * counted
    gathered.log_likelihood += (w * log_prob).sum()
    positions = made.select(last.channels, 0)  # (B, ...)
    w = w.reshape(*w.shape, *[1] * (positions.ndim - w.ndim)).expand_as(positions)
    a, u = likelihood.curvature(outputs.double(), y)
    more = a.shape[outputs.ndim :]  # (C,) of whole Hessians, () of diagonals
    hessian = last.rows(a.reshape(*made.shape, *more)).reshape(positions.numel(), *more, -1)
    outer = None if u is None else last.rows(u.reshape(made.shape))
    gathered.add(last.inputs(features), hessian, outer, w.reshape(-1).double())
