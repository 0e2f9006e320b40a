"""Fast optimisers: fused kernels, and within a CUDA graph learning rates and counters on the device."""

from collections.abc import Callable

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer


def can_be_captured(optimizer: Optimizer) -> bool:
    """Whether the optimiser's step can be part of a CUDA graph."""
    return type(optimizer) in (SGD, Adam, AdamW)


def can_skip(optimizer: Optimizer) -> bool:
    """Whether a flag on the device can make the optimiser skip its step: if all its kernels are fused."""
    return can_be_captured(optimizer) and all(group.get("fused") for group in optimizer.param_groups)


def fuse(optimizer: Optimizer) -> Callable[[], None]:
    """What undoes it: a function. SGD, Adam and AdamW get fused kernels where the caller left the choice open.

    Results are the same to rounding.
    """
    groups = [
        group
        for group in optimizer.param_groups
        if type(optimizer) in (SGD, Adam, AdamW)
        and group.get("fused") is None
        and group.get("foreach") is None
        and not group.get("differentiable")
        and all(parameter.is_floating_point() for parameter in group["params"])
    ]
    for group in groups:
        group["fused"], group["foreach"] = True, False
    _lay_out(optimizer)

    def restore() -> None:
        for group in groups:
            group["fused"], group["foreach"] = None, None

    return restore


def make_capturable(optimizer: Optimizer, device: torch.device) -> Callable[[], None]:
    """What undoes it: a function. The optimiser gets fused kernels, learning rates and counters that a graph can read.

    Schedulers go on working: torch's write into a learning rate that is a tensor in place, which the graph then reads.
    """
    settings = [{key: group.get(key) for key in ("fused", "foreach", "capturable")} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        # float32 is what fused kernels read.
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(device).clone()
        group["fused"], group["foreach"] = True, False
        if "capturable" in group:
            group["capturable"] = True
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(device=parameter.device, dtype=torch.float32)
    _lay_out(optimizer)

    def restore() -> None:
        for group, saved in zip(optimizer.param_groups, settings, strict=True):
            group.update({key: value for key, value in saved.items() if key in group})
            group["lr"] = float(group["lr"])

    return restore


def _lay_out(optimizer: Optimizer) -> None:
    """Gives states the memory layout of their parameter: fused kernels go through both in order."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if (
                isinstance(value, torch.Tensor)
                and value.shape == parameter.shape
                and value.stride() != parameter.stride()
            ):
                state[key] = torch.empty_like(parameter).copy_(value)
