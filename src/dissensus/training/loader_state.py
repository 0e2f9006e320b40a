"""The state of a loader, saved so that a resumed run sees the batches that it would have seen."""

import logging
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("dissensus")

GENERATORS = ("generator", "sampler.generator", "batch_sampler.generator", "batch_sampler.sampler.generator")


def loader_state(loader: Iterable[Any]) -> dict[str, Any]:
    """{"own": its state_dict(), or None; "generators": path -> state of a torch.Generator it holds}.

    Loaders that draw from torch's global generator, as a DataLoader does by default, need neither.
    """
    own = loader.state_dict() if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") else None
    if not _holds_no_code(own):
        what = "the loader's state_dict() holds more than numbers, text and tensors and is not in the checkpoint"
        log.warning("%s: a resumed run may see other batches", what)
        own = None
    return {"own": own, "generators": {path: each.get_state() for path, each in _generators(loader).items()}}


def restore_loader(loader: Iterable[Any], state: dict[str, Any]) -> None:
    """Restores a loader's state; warns if that is not possible, because the batches will then differ."""
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
        text = "the loader does not accept the %s in the checkpoint: the resumed run sees other batches; build it alike"
        log.warning(text, missing[0])


def _generators(loader: Iterable[Any]) -> dict[str, torch.Generator]:
    """Path -> generator held by the loader or its sampler."""
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
    """Whether this can be stored in a file without code."""
    if isinstance(value, dict):
        return all(_holds_no_code(key) and _holds_no_code(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(_holds_no_code(each) for each in value)
    return value is None or type(value) in (bool, int, float, str, bytes) or isinstance(value, Tensor)
