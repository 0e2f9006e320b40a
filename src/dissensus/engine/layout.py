"""Memory layout: convolution weights channels-last on a GPU, where tensor cores want them."""

import torch
from torch import Tensor, nn

from dissensus.core.posterior import Posterior


def lay_out(posterior: Posterior, optimizer: torch.optim.Optimizer) -> None:
    """Puts weights of 2-D convolutions (stacked ones member by member) channels-last in place; on a GPU only."""
    if posterior.device.type != "cuda":
        return
    particles = posterior.particles
    names = {
        f"{name}.weight" if name else "weight"
        for name, module in particles.template.named_modules()
        if isinstance(module, nn.Conv2d)
    }
    for name, parameter in {**particles.own_parameters(), **particles.shared_parameters()}.items():
        if name in names:
            parameter.data = channels_last(parameter.data)
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    optimizer.state[parameter][key] = channels_last(value)


def channels_last(weight: Tensor) -> Tensor:
    """(O, I, H, W) or (M, O, I, H, W) with the channel axis I innermost in memory."""
    return weight.movedim(-3, -1).contiguous().movedim(-1, -3)
