"""What optimisers are given: parameters in groups, and the schedule of the learning rate."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# Who was checked against which optimiser last: not an attribute, which copies and pickles of a posterior would carry along.
_checked: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Optimizer]] = weakref.WeakKeyDictionary()


def grouped(
    parameters: Iterable[Tensor],
    named: Mapping[str, Tensor],
    *,
    first: str | None,
    rates: tuple[float, float | None],
    weight_decay: float,
) -> list[dict[str, Any]]:
    """Trainable parameters in groups: the network; weights with a prior of their own; a likelihood's learned noise.

    `named`: members' parameters by name, of which `first` has that prior. `rates`: of the network and of the noise.
    """
    lr, noise_lr = rates
    prior = [each for name, each in named.items() if name == first and each.requires_grad]
    noise = [each for name, each in named.items() if name.startswith("likelihood.") and each.requires_grad]
    apart = {id(each) for each in (*prior, *noise)}
    network = [each for each in parameters if each.requires_grad and id(each) not in apart]
    groups = [
        {"params": network, "lr": lr, "weight_decay": weight_decay},
        {"params": prior, "lr": lr, "weight_decay": 0.0},
        {"params": noise, "lr": lr if noise_lr is None else noise_lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]] or groups[:1]


def plateau_linear(t: float, *, start: float = 0.5, end: float = 0.9, floor: float = 0.01) -> float:
    """Factor of the learning rate at the share t of the run: 1 until `start`, linear to `floor` at `end`."""
    return 1.0 + (floor - 1.0) * min(max((t - start) / (end - start), 0.0), 1.0)


def check_optimizer(parameters: Iterable[Tensor], optimizer: Optimizer) -> None:
    """Raises where the optimiser holds none of a posterior's parameters: it would train nothing, without a word."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held.isdisjoint(id(parameter) for parameter in parameters):
        raise ValueError(
            "expected an optimizer over the posterior's parameters, got one over other tensors; ensembles copy the networks "
            "they are given: build the optimizer on posterior.parameters()"
        )


def check_once(posterior: nn.Module, optimizer: Optimizer) -> None:
    """`check_optimizer`, the first time this posterior meets this optimiser: on the host, reading no tensor."""
    if torch.compiler.is_compiling() or not isinstance(optimizer, Optimizer):
        return
    known = _checked.get(posterior)
    if known is None or known() is not optimizer:
        check_optimizer(posterior.parameters(), optimizer)
        _checked[posterior] = weakref.ref(optimizer)
