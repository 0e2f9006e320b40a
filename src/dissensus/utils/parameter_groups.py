"""Parameter groups for optimisers, the learning rate schedule, clipping, and checks of optimisers."""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from dissensus.utils.sharding import gather_full_tensor, is_divided, local_part
from dissensus.utils.torch_private import LOCAL_TENSOR, version_of

# Posterior -> the optimiser it last saw, with its step count. Not an attribute, because copies and pickles would hold it.
_shown: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[Optimizer], list[int]]] = weakref.WeakKeyDictionary()
# id of an optimiser's first tensor -> the tensor, steps in this process. Wrappers of the optimiser (Accelerate) share it.
_steps: dict[int, tuple[weakref.ref[Tensor], list[int]]] = {}
# Optimisers (by the name of the class or a base class) that mix the entries of a tensor.
MIXING = frozenset(("Adafactor", "LAMB", "LARS", "Lamb", "Lars", "Muon", "NovoGrad", "SOAP", "Shampoo"))

TAIL = 0.75  # recorders start after this share of a run, when training has settled


@dataclass(frozen=True)
class Group:
    """Parameters by name that share a learning rate, weight decay and prior."""

    name: str
    parameters: Mapping[str, Tensor]
    factor: float = 1.0  # times the optimiser's rate
    rate: float | None = None  # its own rate, instead of the optimiser's
    momentum: float | None = None  # its own momentum
    decay: bool = True  # whether weight decay acts on them
    decayed: str | None = None  # the effect of weight decay from a user's optimiser, for `fit`'s warning
    prior: bool = True  # whether the weight prior acts on them; norm layers and tensors of no member never have one


def disjoint_groups(groups: Iterable[Group]) -> list[Group]:
    """The groups, with each parameter only in the last group that holds it."""
    taken: set[int] = set()
    found: list[Group] = []
    for group in reversed(list(groups)):
        mine = {name: each for name, each in group.parameters.items() if id(each) not in taken}
        taken |= {id(each) for each in mine.values()}
        found.insert(0, replace(group, parameters=mine))
    return found


def optimizer_groups(
    module: nn.Module, groups: Iterable[Group], *, lr: float, weight_decay: float, rates: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Optimiser groups of the module's trained parameters. `rates`: group name -> rate, instead of the group's own."""
    apart = disjoint_groups(groups)
    held = {id(each) for group in apart for each in group.parameters.values()}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in held:
            raise ValueError(f"expected a group for every parameter, got {name} in none; begin with super().groups()")
    made = [
        {
            "params": [each for each in group.parameters.values() if each.requires_grad],
            "lr": rates.get(group.name, lr * group.factor if group.rate is None else group.rate),
            "weight_decay": weight_decay if group.decay else 0.0,
            **({} if group.momentum is None else {"momentum": group.momentum}),
        }
        for group in apart
    ]
    return [group for group in made if group["params"]] or made[:1]


def decay_warnings(optimizer: Optimizer, groups: Iterable[Group]) -> list[str]:
    """Warnings about an optimiser whose weight decay acts on groups that should not decay."""
    drawn = {id(each) for group in optimizer.param_groups if group.get("weight_decay") for each in group["params"]}
    return [
        f"the optimizer {group.decayed} by its weight decay; build it on posterior.parameter_groups(lr, decay)"
        for group in groups
        if group.decayed is not None and any(id(each) in drawn for each in group.parameters.values())
    ]


def plateau_linear(t: float, *, start: float = 0.5, end: float = 0.9, floor: float = 0.01) -> float:
    """Factor of the learning rate at the share t of the run: 1 until `start`, linear to `floor` at `end`."""
    return 1.0 + (floor - 1.0) * min(max((t - start) / (end - start), 0.0), 1.0)


def constant_tail(t: float, *, tail: float = TAIL, floor: float = 0.5) -> float:
    """Factor of the learning rate at the share t of a run: 1, then linear to `floor`, then constant (Maddox et al. 2019)."""
    return plateau_linear(t / tail, floor=floor)


def optimizer_refusal(posterior: nn.Module, kind: type[Optimizer]) -> str | None:
    """Why this kind of optimiser cannot train the posterior and its watchers; None if it can."""
    # Only these: an attribute `optimizers` of a network, as of a LightningModule, means something else.
    for each in (posterior, *getattr(posterior, "watchers", ())):
        accepted: tuple[type[Optimizer], ...] | None = getattr(each, "optimizers", None)
        if accepted is not None and not issubclass(kind, accepted):
            kinds = " or ".join(one.__name__ for one in accepted)
            return f"expected an optimizer of kind {kinds} for {type(each).__name__}, got {kind.__name__}"
    return None


def mixing_warnings(optimizer: Optimizer, stacked: Iterable[Tensor]) -> list[str]:
    """Warnings about an optimiser that would mix the members of stacked tensors."""
    rows = {id(each) for each in stacked if each.requires_grad and len(each) > 1}
    held = any(id(each) in rows for group in optimizer.param_groups for each in group["params"])
    if not held or MIXING.isdisjoint(kind.__name__ for kind in type(optimizer).__mro__):
        return []
    why = "mixes the entries of each tensor, and members are stacked in one tensor: members influence each other"
    return [f"{type(optimizer).__name__} {why}; use SGD or Adam, or train the members one by one, each in a MAP"]


def clip_members(particles: Any, largest: float) -> Tensor:
    """Scales gradients in place, each member's own ones separately, to norms of at most `largest`; (M,) norms before."""
    own = [p.grad for p in particles.own_parameters().values() if p.grad is not None]
    shared = [p.grad for p in particles.shared_parameters().values() if p.grad is not None]
    if not own and not shared:
        return torch.zeros(particles.members)
    found = []
    for gradients in (own, [g.unsqueeze(0) for g in shared]):  # (M, ...), (1, ...)
        if gradients:
            norms = _squared_norms(gradients).sum(0).sqrt()
            factor = (largest / norms.clamp(min=1e-12)).clamp(max=1.0)
            for gradient in map(local_part, gradients):
                gradient.mul_(factor.to(gradient.dtype).reshape(-1, *[1] * (gradient.ndim - 1)))
            found.append(norms)
    return found[0]


def _squared_norms(gradients: list[Tensor]) -> Tensor:
    """(T, M) squares of each tensor's norm, member by member."""
    # In float32 at least: a norm that overflows in float16 would clip every gradient to zero.
    full = [gradient.to(torch.promote_types(gradient.dtype, torch.float32)) for gradient in gradients]
    flat = [each if is_divided(each) else each.reshape(len(each), -1) for each in full]
    return torch.stack([gather_full_tensor(each.square().sum(tuple(range(1, each.ndim)))) for each in flat])


def check_optimizer(posterior: nn.Module, optimizer: Optimizer) -> None:
    """Raises if the posterior does not accept this kind of optimiser, or the optimiser holds none of its parameters."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"expected an optimizer, got {optimizer!r}; build one on posterior.parameters()")
    if (refused := optimizer_refusal(posterior, type(optimizer))) is not None:
        raise TypeError(f"{refused}; build one, or use posterior.default_optimizer()")
    held = {id(parameter) for parameter in _optimizer_tensors(optimizer)}
    if held.isdisjoint(id(parameter) for parameter in posterior.parameters()):
        hint = "ensembles copy their networks: build it on posterior.parameters()"
        raise ValueError(f"expected an optimizer over the posterior's parameters, got one over other tensors; {hint}")


def check_rates(optimizer: Any) -> None:
    """Raises for relative rates, as those of a `default_optimizer` with `lr="curvature"`: only `fit` measures them."""
    if any(group.get("relative") for group in getattr(optimizer, "param_groups", ())):
        hint = "leave it out, or use posterior.parameter_groups(lr)"
        raise ValueError(f"expected an optimizer with absolute rates, got relative ones; {hint}")


def count_optimizer_step(optimizer: Optimizer, *_: object) -> None:
    """Counts a step of any optimiser in the process; called by torch, and where a step is not torch's own."""
    if held := _optimizer_tensors(optimizer):
        _step_counter(held[0])[0] += 1


register_optimizer_step_post_hook(count_optimizer_step)


def has_stepped(posterior: nn.Module, optimizer: Optimizer) -> bool:
    """Whether the optimiser stepped, or weights were set, since the last call; checks it the first time, reads no tensor."""
    if torch.compiler.is_compiling() or not isinstance(optimizer, Optimizer):
        return True
    known, before = _shown.get(posterior, (None, []))
    new = known is None or known() is not optimizer
    if new:
        check_optimizer(posterior, optimizer)
        check_rates(optimizer)
        _shown[posterior] = weakref.ref(optimizer), (before := [])
    held = _optimizer_tensors(optimizer)
    # Fused optimisers change weights without a new version; weights set by hand change without an optimiser step.
    now = [*_step_counter(held[0]), *map(version_of, held)]
    stepped = now[0] > 0 if new else now != before
    before[:] = now  # in place: the dictionary is slow to write
    return stepped or all(each.grad is None for each in held)


def _step_counter(first: Tensor) -> list[int]:
    """[steps of optimisers with this first tensor]."""
    # Of one that processes have parts of the part: torch cannot move a module with a weak reference to the tensor itself.
    first = getattr(first, LOCAL_TENSOR, first)
    known, counter = _steps.get(key := id(first), (None, []))
    if known is None or known() is not first:
        _steps[key] = weakref.ref(first, lambda _: _steps.pop(key, None)), (counter := [0])
    return counter


def _optimizer_tensors(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
