"""Fast optimisers: fused kernels, channels-last weights on GPUs, and rates and counters on the device for CUDA graphs."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from dissensus.core.particles import Particles
from dissensus.utils.parameter_groups import count_optimizer_step
from dissensus.utils.sharding import is_divided
from dissensus.utils.torch_private import (
    adam_kernels,
    add_tensors,
    has_step_hooks,
    is_torchs_step,
    sgd_kernel,
    subtract_tensors,
)

KERNELS = (SGD, Adam, AdamW)  # kinds with fused kernels
FIXED = ("fused", "capturable", "differentiable", "amsgrad", "momentum", "decoupled_weight_decay")  # settings


def can_be_captured(optimizer: Optimizer) -> bool:
    """Whether the optimiser's step can be part of a CUDA graph: torch's own, and classes with `skips = True`."""
    return type(optimizer) in KERNELS or getattr(optimizer, "skips", False)


def can_skip(optimizer: Optimizer) -> bool:
    """Whether a flag on the device can make the optimiser skip its step: if all its kernels are fused, or it has `skips`."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return can_be_captured(optimizer) and (fused or getattr(optimizer, "skips", False))


def use_channels_last(particles: Particles) -> None:
    """Converts weights of 2-D convolutions, also stacked ones, to channels-last in place; only on a GPU."""
    if particles.device.type != "cuda":
        return
    layers = [name for name, module in particles.template.named_modules() if isinstance(module, nn.Conv2d)]
    names = {f"{name}.weight" if name else "weight" for name in layers}
    trained = {**particles.own_parameters(), **particles.shared_parameters()}
    for name, weight in {**trained, **particles.own_buffers()}.items():  # drawn weights are buffers
        if name in names and not is_divided(weight):
            # (O, I, H, W) or (M, O, I, H, W), with the channel axis I innermost in memory.
            weight.data = weight.data.movedim(-3, -1).contiguous().movedim(-1, -3)


def use_fused_kernels(optimizer: Optimizer) -> Callable[[], None]:
    """Gives SGD, Adam and AdamW fused kernels if the caller did not choose; returns a function that undoes it."""
    groups = [
        group
        for group in optimizer.param_groups
        if type(optimizer) in KERNELS
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


class FusedStep:
    """`optimizer.step()` of fused SGD, Adam and AdamW by their kernels alone: what torch does around them takes longer.

    The first step is torch's, which makes the states, and so is each that hooks, a profile or other settings ask more of.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.groups: list[_FusedGroup] = []
        # what they were found for; None: all steps are torch's
        self.known: list[Any] | None = [] if type(optimizer) in KERNELS else None

    def __call__(self) -> None:
        optimizer = self.optimizer
        if self.known is None:
            optimizer.step()
            return
        found = self.groups if self.known == self._facts() and not has_step_hooks(optimizer, known=1) else []
        gradients = [[each.grad for each in group.trained] for group in found]
        states = [group.states(optimizer) for group in found]  # looked up anew: the user may have put others there
        if not found or type(None) in map(type, chain(*gradients, *chain(*states))):
            optimizer.step()
            self.groups = [_FusedGroup(each, optimizer) for each in optimizer.param_groups]
            simple = is_torchs_step(optimizer.step) and all(each.is_simple for each in self.groups)
            self.known = self._facts() if simple else None
            return
        flag = getattr(optimizer, "found_inf", None)
        with torch.no_grad():
            for group, row, held in zip(found, gradients, states, strict=True):
                if row:
                    group.step(row, held, flag)
        count_optimizer_step(optimizer)

    def _facts(self) -> list[Any]:
        """What must not change: `step`, settings, and which tensors have no gradient."""
        groups = self.optimizer.param_groups
        facts = [(id(each), *map(id, each["params"]), *map(each.get, FIXED)) for each in groups]
        return [self.optimizer.step, *facts, *[each.grad is None for group in self.groups for each in group.idle]]


class _FusedGroup:
    """A parameter group, its tensors with a gradient, the names of their states, and those without."""

    def __init__(self, settings: dict[str, Any], optimizer: Optimizer) -> None:
        self.settings, self.is_adam = settings, type(optimizer) is not SGD
        self.trained = [each for each in settings["params"] if each.grad is not None]
        self.idle = [each for each in settings["params"] if each.grad is None]
        moments = {"exp_avg": True, "exp_avg_sq": True, "max_exp_avg_sq": settings.get("amsgrad"), "step": True}
        moments = moments if self.is_adam else {"momentum_buffer": settings["momentum"]}
        self.names = [name if used else None for name, used in moments.items()]
        kinds = {(each.device, each.dtype, each.grad.layout, is_divided(each)) for each in self.trained}
        plain = all(kind[2:] == (torch.strided, False) for kind in kinds) and len(kinds) < 2
        numbers = (settings["lr"], *settings.get("betas", ()))
        self.is_simple = settings.get("fused") and plain and not any(isinstance(each, Tensor) for each in numbers)

    def states(self, optimizer: Optimizer) -> list[list[Any]]:
        """Of each name, the states of all tensors with a gradient; an empty list for a name that is not used."""
        held = [optimizer.state.get(each, {}) for each in self.trained]
        return [[] if name is None else [each.get(name) for each in held] for name in self.names]

    def step(self, gradients: list[Any], states: list[list[Any]], flag: Tensor | None) -> None:
        """A step of its tensors, but not if the flag is set."""
        now, flag = self.settings, None if flag is None else flag.to(self.trained[0].device)
        how = {"lr": now["lr"], "weight_decay": now["weight_decay"], "maximize": now["maximize"], "found_inf": flag}
        if not self.is_adam:
            how |= {name: now[name] for name in ("momentum", "dampening", "nesterov")}
            sgd_kernel(self.trained, gradients, *states, is_first_step=False, grad_scale=None, **how)
            return
        (*moments, steps), (beta1, beta2) = states, now["betas"]
        how |= {"beta1": beta1, "beta2": beta2, "eps": now["eps"], "amsgrad": now["amsgrad"], "grad_scale": None}
        add_tensors(steps, 1)
        adam_kernels[now["decoupled_weight_decay"]](self.trained, gradients, *moments, steps, **how)
        if flag is not None:
            subtract_tensors(steps, [flag] * len(steps))


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
