"""Where a loader stands: what it needs to go on with the batches it would have given."""

import logging
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("dissensus")

GENERATORS = ("generator", "sampler.generator", "batch_sampler.generator", "batch_sampler.sampler.generator")


def loader_state(loader: Iterable[Any]) -> dict[str, Any]:
    """{"own": what its state_dict() gives, or None; "generators": path -> state of a torch.Generator it holds}.

    Loaders that draw from torch's global generator, as a DataLoader does by itself, need neither.
    """
    own = loader.state_dict() if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") else None
    if not _holds_no_code(own):
        log.warning(
            "the loader's state_dict() holds more than numbers, text and tensors, so the checkpoint leaves it out: a run "
            "that is resumed may see other batches"
        )
        own = None
    return {"own": own, "generators": {path: each.get_state() for path, each in _generators(loader).items()}}


def restore_loader(loader: Iterable[Any], state: dict[str, Any]) -> None:
    """Puts a loader where another of its kind stood; says so where it cannot, since the batches are then others."""
    found = _generators(loader)
    missing = sorted(state["generators"].keys() - found.keys())
    for path in state["generators"].keys() & found.keys():
        found[path].set_state(state["generators"][path].cpu())
    if state["own"] is not None:
        try:
            loader.load_state_dict(state["own"])  # type: ignore[attr-defined]
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            missing.append(f"state ({error})" if hasattr(loader, "load_state_dict") else "state")
    if missing:
        log.warning(
            "the loader does not take the %s in the checkpoint: the run goes on with other batches than it would have had; "
            "build the loader as it was for the same ones",
            missing[0],
        )


def _generators(loader: Iterable[Any]) -> dict[str, torch.Generator]:
    """Path -> generator that the loader or its sampler holds."""
    found = {}
    for path in GENERATORS:
        try:
            value = attrgetter(path)(loader)
        except AttributeError:
            continue
        if isinstance(value, torch.Generator):
            found[path] = value
    return found


def _holds_no_code(value: Any) -> bool:
    """Whether a file that holds no code can hold this."""
    if isinstance(value, dict):
        return all(_holds_no_code(key) and _holds_no_code(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(_holds_no_code(each) for each in value)
    return value is None or type(value) in (bool, int, float, str, bytes) or isinstance(value, Tensor)
