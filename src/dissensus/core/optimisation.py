"""What optimisers are given: parameters in groups, and the schedule of the learning rate."""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

# Posterior -> the optimiser it was last shown, and how far that one was. No attribute: copies and pickles would carry it.
_shown: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[Optimizer], list[int]]] = weakref.WeakKeyDictionary()
# An optimiser's first tensor -> steps in this process. By a tensor, which those that wrap an optimiser (Accelerate's) share.
_steps: Any = WeakTensorKeyDictionary()
# Optimisers, by the name of a class or of one that it derives from, that mix the numbers of a tensor.
MIXING = frozenset(("Adafactor", "LAMB", "LARS", "Lamb", "Lars", "Muon", "NovoGrad", "SOAP", "Shampoo"))


@dataclass(frozen=True)
class Group:
    """Parameters, by name, with one rate, and with decay and prior or without."""

    name: str
    parameters: Mapping[str, Tensor]
    factor: float = 1.0  # times the optimiser's rate
    rate: float | None = None  # a rate of its own instead
    momentum: float | None = None  # a momentum of its own
    decay: bool = True  # whether weight decay draws them to 0
    decayed: str | None = None  # what an optimiser that decays them all the same does: `fit` warns of it
    prior: bool = True  # whether the weight prior does; norm layers and what is no member's have none in any case


def disjoint(groups: Iterable[Group]) -> list[Group]:
    """The groups, each parameter left in the last one that holds it."""
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
    """Parameter groups for an optimiser over what the module trains. `rates`: by name of group, in place of its own."""
    apart = disjoint(groups)
    held = {id(each) for group in apart for each in group.parameters.values()}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in held:
            raise ValueError(
                f"expected every trained parameter in a group, got {name} in none; begin groups() with super().groups()"
            )
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


def decayed_groups(optimizer: Optimizer, groups: Iterable[Group]) -> list[str]:
    """What is wrong with an optimiser that decays groups which say what that does to them."""
    drawn = {id(each) for group in optimizer.param_groups if group.get("weight_decay") for each in group["params"]}
    return [
        f"the optimizer {group.decayed} by its weight decay; build it on posterior.parameter_groups(lr, decay)"
        for group in groups
        if group.decayed is not None and any(id(each) in drawn for each in group.parameters.values())
    ]


def plateau_linear(t: float, *, start: float = 0.5, end: float = 0.9, floor: float = 0.01) -> float:
    """Factor of the learning rate at the share t of the run: 1 until `start`, linear to `floor` at `end`."""
    return 1.0 + (floor - 1.0) * min(max((t - start) / (end - start), 0.0), 1.0)


def refusal(posterior: nn.Module, kind: type[Optimizer]) -> str | None:
    """What is wrong with this kind of optimiser for the posterior and those that track its run; None where nothing is."""
    for each in posterior.modules():
        accepted: tuple[type[Optimizer], ...] | None = getattr(each, "optimizers", None)
        if accepted is not None and not issubclass(kind, accepted):
            kinds = " or ".join(one.__name__ for one in accepted)
            return f"expected an optimizer of kind {kinds} for {type(each).__name__}, got {kind.__name__}"
    return None


def mixed_members(optimizer: Optimizer, stacked: Iterable[Tensor]) -> list[str]:
    """What is wrong with an optimiser that would mix the rows of stacked tensors, one a member's."""
    rows = {id(each) for each in stacked if each.requires_grad and len(each) > 1}
    held = any(id(each) in rows for group in optimizer.param_groups for each in group["params"])
    if not held or MIXING.isdisjoint(kind.__name__ for kind in type(optimizer).__mro__):
        return []
    return [
        f"{type(optimizer).__name__} mixes the numbers of each tensor, and the members' tensors are stacked: members do not "
        "train as they would alone; use SGD or Adam, or train the members one by one, each in a MAP"
    ]


def check_optimizer(posterior: nn.Module, optimizer: Optimizer) -> None:
    """Raises where the posterior does not accept this kind of optimiser, or the optimiser holds none of its parameters."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"expected an optimizer, got {optimizer!r}; build one on posterior.parameters(), or leave it out"
        )
    if (refused := refusal(posterior, type(optimizer))) is not None:
        raise TypeError(f"{refused}; build one, or take posterior.default_optimizer()")
    held = {id(parameter) for parameter in _held(optimizer)}
    if held.isdisjoint(id(parameter) for parameter in posterior.parameters()):
        raise ValueError(
            "expected an optimizer over the posterior's parameters, got one over other tensors; ensembles copy the networks "
            "they are given: build the optimizer on posterior.parameters()"
        )


def note_step(optimizer: Optimizer, *_: object) -> None:
    """Counts a step of any optimiser in the process; torch calls this, and who replays steps from a graph."""
    if held := _held(optimizer):
        _steps[_first(held)] = _steps.get(_first(held), 0) + 1


register_optimizer_step_post_hook(note_step)


def has_stepped(posterior: nn.Module, optimizer: Optimizer) -> bool:
    """Whether the optimiser has stepped, or weights were set by hand, since this posterior was last shown it.

    Calls `check_optimizer` the first time; reads no tensor. True where nobody can tell (compiled code).
    """
    if torch.compiler.is_compiling() or not isinstance(optimizer, Optimizer):
        return True
    known, before = _shown.get(posterior, (None, []))
    new = known is None or known() is not optimizer
    if new:
        check_optimizer(posterior, optimizer)
    held = _held(optimizer)
    # Fused optimisers change weights without a new version; who sets weights by hand takes no step of an optimiser.
    now = [_steps.get(_first(held), 0), *(each._version for each in held)]
    _shown[posterior] = weakref.ref(optimizer), now
    return (now[0] > 0 if new else now != before) or all(each.grad is None for each in held)


def _first(held: list[Tensor]) -> Tensor:
    # Of one that processes have parts of the part: torch cannot move a module with a weak reference to the tensor itself.
    return getattr(held[0], "_local_tensor", held[0])


def _held(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
