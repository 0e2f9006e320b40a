"""Members read from a saved posterior one at a time: an ensemble that does not fit in memory still predicts."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from dissensus.core.likelihood import Likelihood
from dissensus.core.posterior import Posterior
from dissensus.methods import MAP
from dissensus.numerics.layout import laid_out, rows
from dissensus.storage.folder import checked_strides, fill, load, unique_tensors
from dissensus.storage.sealed import TENSORS, Header, damaged, opened
from dissensus.storage.skeletons import build_parts

OWN, SHARED = "particles.own.", "particles.shared."


def read_members(
    folder: Path,
    network: nn.Module | None = None,
    *,
    likelihood: Likelihood | None = None,
    method: type[Posterior] | None = None,
) -> Iterator[Posterior]:
    """One posterior per stored member, each read from the file when its turn comes.

    The whole posterior, once, where no members are stored, or where a member is more than its network's tensors: methods
    of one's own, and those that cut the network or have tensors beside it.
    """
    path = folder / TENSORS
    while True:
        with opened(folder) as (config, header, file):
            strides = checked_strides(config, header, path)
            if method is not None or not _of_plain_networks(config, header):
                yield load(folder, network, likelihood=likelihood, method=method)
                return
            template, meaning = build_parts(config, header, path, network, likelihood)
            try:
                tensors = safe_open(path, framework="pt")
                failed = None
            except (SafetensorError, RuntimeError) as error:  # the second: a file of another size came in between
                failed = error
            # The path is opened several times. A file that is still there after the last time was there all the while.
            if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                continue
            if failed is not None:
                raise damaged(path, failed) from failed
            with tensors as file:
                for index in range(config["arguments"]["members"]):
                    yield _member(MAP(template, likelihood=meaning), index, file, header.shapes, strides)
            return


def _member(
    member: MAP, index: int, file: Any, shapes: Mapping[str, tuple[int, ...]], strides: Mapping[str, list[int]]
) -> Posterior:
    """The posterior filled with one member's rows of what is own, and with what is shared."""
    expected, ties = unique_tensors(member)  # a stack has tied tensors once
    sources = {SHARED + name.removeprefix(OWN) if _own(name) else name: name for name in shapes}
    if {name for name in expected if SHARED in name} != {name for name in sources if SHARED in name}:
        raise ValueError(
            "expected a network whose tensors are tied as in the saved one, got other ties; pass a network built as the "
            "saved one was"
        )
    found = {}
    for mine, name in sources.items():
        if mine in expected:
            tensor = file.get_slice(name)[index : index + 1][0] if _own(name) else file.get_tensor(name)
            lying = strides.get(name, rows(shapes[name]))
            found[mine] = laid_out(tensor, lying[1:] if _own(name) else lying)
    with torch.no_grad():
        fill(member, {**found, **{name: found[source] for name, source in ties.items()}})
    return member.eval()


def _of_plain_networks(config: Mapping[str, Any], header: Header) -> bool:
    """Whether the file's members are networks like the one the caller has, each with rows of its own."""
    inner = [name.removeprefix(OWN).removeprefix(SHARED) for name in header.shapes if name.startswith((OWN, SHARED))]
    return (
        isinstance(config["arguments"].get("members"), int)
        and "networks" not in config["arguments"]  # of those, members are snapshots
        and any(map(_own, header.shapes))
        and "class" not in config
        and not config["network"].get("cut")
        and all(name.startswith(("network.", "likelihood.")) for name in inner)
    )


def _own(name: str) -> bool:
    return name.startswith(OWN)
