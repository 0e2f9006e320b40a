"""Optimisers inside a CUDA graph: fused kernels, learning rates and step counters as tensors on the device."""

from collections.abc import Callable

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer


def can_be_captured(optimizer: Optimizer) -> bool:
    """Whether the optimiser's step can be part of a CUDA graph."""
    return type(optimizer) in (SGD, Adam, AdamW)


def make_capturable(optimizer: Optimizer, device: torch.device) -> Callable[[], None]:
    """Prepares the optimiser for capture; the function returned puts its settings back.

    Schedulers go on working: torch's write into a learning rate that is a tensor in place, which the graph then reads.
    """
    settings = [
        {key: group.get(key) for key in ("lr", "fused", "foreach", "capturable")} for group in optimizer.param_groups
    ]
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(device).clone()  # what fused kernels read
        group["fused"], group["foreach"] = True, False
        if "capturable" in group:
            group["capturable"] = True
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(device=parameter.device, dtype=torch.float32)
        for key, value in state.items():
            # Fused kernels go through memory in order: states must lie as the parameter does.
            if (
                isinstance(value, torch.Tensor)
                and value.shape == parameter.shape
                and value.stride() != parameter.stride()
            ):
                state[key] = torch.empty_like(parameter).copy_(value)

    def restore() -> None:
        for group, saved in zip(optimizer.param_groups, settings, strict=True):
            group.update({key: value for key, value in saved.items() if key != "lr" and key in group})
            group["lr"] = float(group["lr"])

    return restore
