"""Reads the members of a saved posterior one at a time, to predict with an ensemble that does not fit into memory."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dissensus.core.calibrated import restore_fitted
from dissensus.core.likelihood import Likelihood
from dissensus.core.posterior import Posterior
from dissensus.methods import MAP
from dissensus.numerics.randomness import preserve_random_state
from dissensus.storage.blueprints import build_parts
from dissensus.storage.checksummed import SAVE_AGAIN, TENSORS, read_posterior
from dissensus.storage.folder import fill_tensors, load, restore_transforms, saved_strides, tie_error, unique_tensors
from dissensus.utils.file_errors import read_errors
from dissensus.utils.memory_layout import copy_with_strides

OWN, SHARED = "particles.own.", "particles.shared."


def read_members(
    folder: Path,
    network: nn.Module | None = None,
    *,
    likelihood: Likelihood | None = None,
    method: type[Posterior] | None = None,
) -> Iterator[Posterior]:
    """Yields one posterior per stored member, each read from the file when it is needed.

    Yields the whole posterior once if no members are stored, or if members are more than the tensors of a network: for your
    own methods, and for methods that cut the network or have other tensors.
    """
    config, tensors = read_posterior(folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if method is not None or not _has_plain_networks(config, shapes):
        yield load(folder, network, likelihood=likelihood, method=method)
        return
    with read_errors(folder / TENSORS, SAVE_AGAIN), preserve_random_state(torch.device("cpu")):
        strides = saved_strides(config, shapes)
        template, meaning = build_parts(config, shapes, network, likelihood)
    for index in range(config["arguments"]["members"]):
        member = MAP(template, likelihood=meaning)
        with read_errors(folder / TENSORS, SAVE_AGAIN):
            restore_fitted(member, {**config, "promises": {}}, tensors)
        restore_transforms(member, config)
        yield _fill_member(member, index, tensors, strides)


def _fill_member(
    member: MAP, index: int, tensors: Mapping[str, Tensor], strides: Mapping[str, Sequence[int]]
) -> Posterior:
    """The posterior filled with one member's rows of own tensors, and with the shared tensors."""
    expected, ties = unique_tensors(member)  # a stack stores tied tensors once
    sources = {SHARED + name.removeprefix(OWN) if _is_own(name) else name: name for name in tensors}
    if {name for name in expected if SHARED in name} != {name for name in sources if SHARED in name}:
        raise tie_error()
    found = {
        mine: copy_with_strides(tensors[name][index], strides[name][1:])
        if _is_own(name)
        else copy_with_strides(tensors[name], strides[name])
        for mine, name in sources.items()
        if mine in expected
    }
    with torch.no_grad():
        fill_tensors(member, {**found, **{name: found[source] for name, source in ties.items()}})
    return member.eval()


def _has_plain_networks(config: Mapping[str, Any], shapes: Iterable[str]) -> bool:
    """Whether the file's members are plain networks, each with its own rows."""
    inner = [name.removeprefix(OWN).removeprefix(SHARED) for name in shapes if name.startswith((OWN, SHARED))]
    return (
        isinstance(config["arguments"].get("members"), int)
        and "networks" not in config["arguments"]  # with that argument, members are snapshots
        and any(map(_is_own, shapes))
        and "class" not in config
        and not config["network"].get("cut")
        and all(name.startswith(("network.", "likelihood.")) for name in inner)
    )


def _is_own(name: str) -> bool:
    return name.startswith(OWN)
