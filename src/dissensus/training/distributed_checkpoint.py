"""Checkpoints of several processes: a folder by torch.distributed.checkpoint, which any number of them can resume.

    run.ckpt/00000012/run.pt        all values that are not tensors of members, and the places of those tensors
    run.ckpt/00000012/*.distcp      tensors; each member has its own keys, so that any rank can read any member

A folder is written under a temporary name and renamed when all ranks are done; then the one before is removed. Leftovers of
killed processes are never read, and the next write removes them.
"""

import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from dissensus.distributed.mesh import Mesh

# Parts of a state whose tensors all ranks write; the first rank writes the others.
SPREAD = ("posterior", "optimizer", "best")
RUN = "run.pt"
OURS = re.compile(r"\.?\d{8}")  # names of checkpoints, finished or being written
MARK = "tensor in the folder"
CHAINS = "optimizer/generators"  # a list with one for each member


def has_only_checkpoints(path: Path) -> bool:
    """Whether the folder holds only checkpoints, finished or not."""
    return all(OURS.fullmatch(each.name) for each in path.iterdir())


def newest_checkpoint(path: Path) -> Path | None:
    """The last finished checkpoint in the folder."""
    return max((each for each in path.iterdir() if _is_checkpoint(each)), default=None) if path.is_dir() else None


def write_distributed(path: Path, state: dict[str, Any], mesh: Mesh | None, members: int, own: set[int]) -> None:
    """Writes a state as the newest in the folder; call it on all ranks, with their mesh, or None for one process.

    Args:
        members: M over all ranks.
        own: ids of the state's tensors with a row per member of this rank. Other tensors are equal on all ranks, and one
            rank writes them.
    """
    # Imported here, since a run on one process does not need it.
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    first = mesh is None or mesh.is_first
    here = range(members)[slice(None) if mesh is None else mesh.member_slice(members)]
    tensors: dict[str, Tensor] = {}
    spread = {key: _extract_tensors(state[key], key, tensors, here, own) for key in state if key in SPREAD}
    rest = {**state, **spread}
    before = newest_checkpoint(path) if first else None
    number = [0 if before is None else int(before.name) + 1]
    if first:
        path.mkdir(parents=True, exist_ok=True)
        for each in path.iterdir():
            if each != before and OURS.fullmatch(each.name):  # left by killed processes
                shutil.rmtree(each)
        (path / f".{number[0]:08d}").mkdir()
        torch.save({**rest, "members": members}, path / f".{number[0]:08d}" / RUN)
    if mesh is not None:
        distributed.broadcast_object_list(number)
    temporary = path / f".{number[0]:08d}"
    with _hide_warnings():
        save(tensors, storage_writer=FileSystemWriter(temporary, overwrite=True), no_dist=mesh is None)
    if first:
        temporary.rename(path / temporary.name[1:])
        if before is not None:
            shutil.rmtree(before)


def read_distributed(
    path: Path, mesh: Mesh | None, device: torch.device, divided: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """The newest state in the folder, with only this rank's rows of tensors per member. Call it on all ranks.

    `divided`: tensors divided by `fully_shard`, by name or by the name of their parameter; they give the layout to read into.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    chosen = [str(newest_checkpoint(path)) if mesh is None or mesh.is_first else ""]
    if mesh is not None:
        distributed.broadcast_object_list(chosen)
    folder = path / Path(chosen[0]).name
    state = torch.load(folder / RUN, map_location=device, weights_only=True)
    here = range(state.pop("members"))
    here = here if mesh is None else here[mesh.member_slice(len(here))]
    tensors: dict[str, Tensor] = {}
    whole = {key: _insert_tensors(value, tensors, here, device, divided or {}) for key, value in state.items()}
    with _hide_warnings():
        load(tensors, storage_reader=FileSystemReader(folder), no_dist=mesh is None)
    return whole


@contextmanager
def _hide_warnings() -> Iterator[None]:
    """Inside, torch does not warn that there is only one process, since that is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _is_checkpoint(path: Path) -> bool:
    return path.name.isdigit() and (path / ".metadata").exists() and (path / RUN).exists()


def _extract_tensors(value: Any, name: str, tensors: dict[str, Tensor], here: range, own: set[int]) -> Any:
    """The value with placeholders for its tensors, which are added to `tensors`."""
    if isinstance(value, dict):
        return {key: _extract_tensors(each, f"{name}/{key}", tensors, here, own) for key, each in value.items()}
    if isinstance(value, list | tuple):
        found = [_extract_tensors(each, f"{name}/{i}", tensors, here, own) for i, each in enumerate(value)]
        if name == CHAINS:  # this rank does not know the state of other ranks' chains
            for i in {*range(len(found))} - {*here}:
                tensors.pop(f"{name}/{i}", None)
        return found
    if not isinstance(value, Tensor):
        return value
    rows = id(value) in own
    tensors.update({f"{name}/{row}": value[i] for i, row in enumerate(here)} if rows else {name: value})
    return {MARK: name, "rows": rows, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}


def _insert_tensors(
    value: Any, tensors: dict[str, Tensor], here: range, device: torch.device, divided: Mapping[str, Tensor]
) -> Any:
    """The value with empty tensors in place of the placeholders; they are added to `tensors` to be filled."""
    if isinstance(value, list):
        return [_insert_tensors(each, tensors, here, device, divided) for each in value]
    if not isinstance(value, dict):
        return value
    if MARK not in value:
        return {key: _insert_tensors(each, tensors, here, device, divided) for key, each in value.items()}
    name, rows, shape = value[MARK], value["rows"], value["shape"]
    shape = [len(here), *shape[1:]] if rows else shape
    like = divided.get(name, divided.get(name.rpartition("/")[0]))
    if like is not None and list(like.shape) == shape:
        made = torch.empty_like(like)
    else:
        made = torch.empty(shape, dtype=getattr(torch, value["dtype"]), device=device)
    tensors.update({f"{name}/{row}": made[i] for i, row in enumerate(here)} if rows else {name: made})
    return made
