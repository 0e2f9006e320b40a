"""Fast optimisers: fused kernels, channels-last weights on GPUs, and rates and counters on the device for CUDA graphs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from dissensus.core.posterior import Posterior
from dissensus.utils.sharding import is_divided


def can_be_captured(optimizer: Optimizer) -> bool:
    """Whether the optimiser's step can be part of a CUDA graph: torch's own, and classes with `skips = True`."""
    return type(optimizer) in (SGD, Adam, AdamW) or getattr(optimizer, "skips", False)


def can_skip(optimizer: Optimizer) -> bool:
    """Whether a flag on the device can make the optimiser skip its step: if all its kernels are fused, or it has `skips`."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return can_be_captured(optimizer) and (fused or getattr(optimizer, "skips", False))


def use_channels_last(posterior: Posterior) -> None:
    """Converts weights of 2-D convolutions, also stacked ones, to channels-last in place; only on a GPU."""
    if posterior.device.type != "cuda":
        return
    particles = posterior.particles
    layers = [name for name, module in particles.template.named_modules() if isinstance(module, nn.Conv2d)]
    names = {f"{name}.weight" if name else "weight" for name in layers}
    for name, parameter in {**particles.own_parameters(), **particles.shared_parameters()}.items():
        if name in names and not is_divided(parameter):
            # (O, I, H, W) or (M, O, I, H, W), with the channel axis I innermost in memory.
            parameter.data = parameter.data.movedim(-3, -1).contiguous().movedim(-1, -3)


def use_fused_kernels(optimizer: Optimizer) -> Callable[[], None]:
    """Gives SGD, Adam and AdamW fused kernels if the caller did not choose; returns a function that undoes it."""
    groups = [
        group
        for group in optimizer.param_groups
        if type(optimizer) in (SGD, Adam, AdamW)
        and group.get("fused") is None
        and group.get("foreach") is None
        and not group.get("differentiable")
        # Not every optimiser has a fused kernel for divided tensors.
        and all(p.is_floating_point() and not is_divided(p) for p in group["params"])
    ]
    return _change_settings(optimizer, groups, fused=True, foreach=False)


def make_capturable(optimizer: Optimizer, device: torch.device) -> Callable[[], None]:
    """Gives the optimiser fused kernels and tensors for rates and counters, for graphs; returns a function that undoes it."""
    # Schedulers keep working: torch's schedulers write into a tensor learning rate in place, and the graph reads it.
    put_back = _change_settings(optimizer, optimizer.param_groups, fused=True, foreach=False, capturable=True)
    for group in optimizer.param_groups:
        # float32 is what fused kernels read.
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(device).clone()
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(device=parameter.device, dtype=torch.float32)

    def restore() -> None:
        put_back()
        for group in optimizer.param_groups:
            group["lr"] = float(group["lr"])

    return restore


def _change_settings(optimizer: Optimizer, groups: list[dict[str, Any]], **settings: bool) -> Callable[[], None]:
    """Changes the settings that the groups have; returns a function that undoes it."""
    # States get the memory layout of their parameter, because fused kernels read both in order.
    before = [{key: group[key] for key in settings if key in group} for group in groups]
    for group, mine in zip(groups, before, strict=True):
        group.update({key: settings[key] for key in mine})
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            same = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if same and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter).copy_(value)

    def restore() -> None:
        for group, mine in zip(groups, before, strict=True):
            group.update(mine)

    return restore
