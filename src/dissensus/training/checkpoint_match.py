"""Whether a checkpoint belongs to a run: the description of a run, and the comparison of a file with it."""

import logging
import math
import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dissensus.core.calibrated import STATE
from dissensus.core.description import describe_likelihood, differences, to_json_values, translate_settings
from dissensus.core.posterior import Posterior

log = logging.getLogger("dissensus")

# What a state says of calibrations and promises, which training drops, and its description, which is compared as such.
FITTED = re.compile(rf"(watchers\.\d+\.)*((calibration|promises)\.|{STATE}$)")
STORED = re.compile(r"(watchers\.\d+\.)*(stored|curvature)\.")  # draws of an earlier run: not needed to continue
HOW = {"params", "param_names", "relative", "lr", "initial_lr"}
HOW |= {"fused", "foreach", "capturable", "differentiable", "maximize"}
MOVING = {"last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i", "base_lrs", "lr_lambdas"}


def describe_run(posterior: Posterior, optimizer: Optimizer, scheduler: LRScheduler | None) -> dict[str, Any]:
    """Description of a run: method, settings, network, likelihood, optimiser with its tensors, kind of schedule."""
    return {
        "posterior": _config_as_json(lambda: training_settings(posterior)),
        "likelihood": describe_likelihood(posterior.likelihood),
        "network": posterior.initial_network,
        "prior": None if posterior.prior is None else to_json_values(posterior.prior.config()),
        "optimizer": type(optimizer).__name__,
        "parameters": [[_dtype_and_shape(p) for p in group["params"]] for group in optimizer.param_groups],
        "scheduler": None if scheduler is None else type(scheduler).__name__,
    }


def training_settings(posterior: Posterior) -> dict[str, Any]:
    """The method and its training settings, as JSON values; a checkpoint can be resumed only if they are equal."""
    settings = {key: value for key, value in posterior.config().items() if key not in posterior.draw_only_settings}
    described = {"method": posterior.name, "class": type(posterior).__name__, **settings}
    watchers = [training_settings(watcher) for watcher in posterior.watchers]
    return {**described, "watchers": watchers} if watchers else described


def checkpoint_mismatches(
    state: dict[str, Any], posterior: Posterior, optimizer: Optimizer, scheduler: LRScheduler | None
) -> Iterator[str]:
    """Descriptions of what in a checkpoint's state does not belong to this run; empty if all of it does."""
    identity = translate_settings(posterior.name, state["run"]["posterior"])
    yield from differences({**state["run"], "posterior": identity}, describe_run(posterior, optimizer, scheduler))
    yield from _tensor_mismatches(state["posterior"], posterior)
    if state["best"]["state"] is not None:
        watching = {name: each for name, each in state["posterior"].items() if name.startswith("watchers.")}
        yield from _tensor_mismatches({**watching, **state["best"]["state"]}, posterior)
    if not all(isinstance(each, dict) for each in state["optimizer"]["state"].values()):
        yield "an optimizer's state that is not a dict"  # torch would accept it, and fail at the first step


def without_stale_draws(state: dict[str, Tensor], posterior: Posterior) -> dict[str, Tensor]:
    """The state without stored draws whose number of samples differs from the posterior's."""
    for prefix, module in posterior.named_modules():
        if isinstance(samples := getattr(module, "samples", None), int):
            under = f"{prefix}.stored." if prefix else "stored."
            rows: dict[str, int] = {}  # rows of each tensor, over all parts of the draw
            for name, tensor in state.items():
                if name.startswith(under) and "own." in name:
                    part = name[name.index("own.") :]
                    rows[part] = rows.get(part, 0) + len(tensor)
            if any(count != samples * module.particles.members for count in rows.values()):
                state = {name: tensor for name, tensor in state.items() if not name.startswith(under)}
    return state


def warn_of_overridden(state: dict[str, Any], optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
    """Warns about settings of the given optimiser and scheduler that are replaced by those of the checkpoint."""
    groups = zip(state["optimizer"]["param_groups"], optimizer.param_groups, strict=True)
    pairs: list[tuple[Any, ...]] = [(optimizer, *map(_group_settings, pair)) for pair in groups]
    if scheduler is not None:
        pairs.append((scheduler, state["scheduler"], scheduler.state_dict()))
    for whose, saved, mine in pairs:
        for key in [key for key in saved if key in mine and key not in MOVING and not key.startswith("_")]:
            a, b = (list(v) if isinstance(v, tuple) else v for v in (saved[key], mine[key]))
            if not (isinstance(a, bool | int | float | str | list) and isinstance(b, bool | int | float | str | list)):
                continue
            if a != b and not (isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-6)):
                log.warning(
                    "the resumed run uses %s %s = %s from its checkpoint, not the %s given now; to use that, start a new run",
                    type(whose).__name__, key, a, b,
                )  # fmt: skip


def _group_settings(group: dict[str, Any]) -> dict[str, Any]:
    """The user's settings of an optimiser's group; the rate as a number, since a captured step keeps it as a tensor."""
    rate = {} if group.get("relative") else {"lr": float(group.get("initial_lr", group["lr"]))}
    return {key: value for key, value in group.items() if key not in HOW} | rate


def _tensor_mismatches(saved: dict[str, Any], posterior: Posterior) -> Iterator[str]:
    mine = posterior.state_dict()
    for name in [name for name in {**mine, **saved} if not STORED.match(name) and not FITTED.match(name)]:
        if name not in saved:
            yield f"without the tensor {name}"
        elif name not in mine:
            yield f"with a tensor {name}"
        elif isinstance(saved[name], Tensor) and _dtype_and_shape(saved[name]) != _dtype_and_shape(mine[name]):
            yield f"{name} of {_dtype_and_shape(saved[name])}, not {_dtype_and_shape(mine[name])}"


def _dtype_and_shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _config_as_json(config: Any) -> Any:
    """The result of config() as JSON values; {} if there is none."""
    try:
        return to_json_values(config())
    except (TypeError, NotImplementedError):  # a user's method that cannot be saved
        return {}
