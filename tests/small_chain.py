"""A small chain: stochastic gradient Langevin dynamics (Welling & Teh, ICML 2011) as a method of one's own."""

import torch
from torch.optim import Optimizer

from dissensus.methods.snapshots import SnapshotEnsemble


class Langevin(Optimizer):
    """θ ← θ − η ∇L + √(2η/N) ξ, L the mean loss over N data points with its prior: a chain whose target is exp(−N L)."""

    def __init__(self, params, lr, *, data_size):
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "data_size": data_size})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            spread = (2 * group["lr"] / group["data_size"]) ** 0.5
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])
                    parameter.add_(torch.randn_like(parameter), alpha=spread)


class SGLD(SnapshotEnsemble):
    """One chain over the caller's network. The members are snapshots of its second half, at a constant rate."""

    name = "sgld"
    optimizers = (Langevin,)

    def __init__(self, module, *, data_size, **keywords):
        super().__init__(module, data_size=data_size, **keywords)
        self.recorder.tail = 0.5  # the first half is burn-in

    def default_optimizer(self):
        return self.chain(1e-3)

    def chain(self, lr):
        return Langevin(self.parameter_groups(lr), lr, data_size=self.data_size)

    def default_schedule(self, epochs):
        return lambda epoch: 1.0
