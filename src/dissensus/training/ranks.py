"""Checkpoints of several processes: a folder by torch.distributed.checkpoint, which any number of them can resume.

    run.ckpt/00000012/run.pt        what is no tensor of the members, and where tensors go; as one process writes it
    run.ckpt/00000012/*.distcp      tensors; each member's under keys of its own, so that any rank can read any member

A folder of that name is written under another one and renamed when all ranks are done; then the one before is removed. What
killed processes leave is never read, and goes with the next write.
"""

import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from dissensus.distributed.joining import connected
from dissensus.distributed.mesh import Mesh

SPREAD = ("posterior", "optimizer", "best")  # parts of a state whose tensors all ranks write; of others the first alone
RUN = "run.pt"
OURS = re.compile(r"\.?\d{8}")  # names of checkpoints, and of those that are being written
MARK = "tensor in the folder"


def is_ranks(path: Path) -> bool:
    """Whether the path is a folder that several processes have begun to write checkpoints into, or an empty one."""
    return path.is_dir() and all(OURS.fullmatch(each.name) for each in path.iterdir())


def newest(path: Path) -> Path | None:
    """The last whole checkpoint in the folder."""
    return max((each for each in path.iterdir() if _is_one(each)), default=None) if path.is_dir() else None


def write_ranks(path: Path, state: dict[str, Any], mesh: Mesh, members: int, own: set[int]) -> None:
    """Writes a state of which every rank has a part, as the newest in the folder; to be called by all ranks.

    Args:
        members: M over all ranks.
        own: ids of the tensors in it of which this rank has the rows of its own members.
    """
    from torch.distributed import checkpoint as dcp  # imported here: a run on one process needs none of it

    tensors: dict[str, Tensor] = {}
    rest = {
        key: _taken_out(value, key, tensors, mesh, members, own) if key in SPREAD else value
        for key, value in state.items()
    }
    before = newest(path) if mesh.is_first else None
    number = [0 if before is None else int(before.name) + 1]
    if mesh.is_first:
        path.mkdir(parents=True, exist_ok=True)
        for each in path.iterdir():
            if each != before and OURS.fullmatch(each.name):  # of processes that were killed
                shutil.rmtree(each)
        (path / f".{number[0]:08d}").mkdir()
        torch.save(rest, path / f".{number[0]:08d}" / RUN)
    if connected():
        distributed.broadcast_object_list(number)
    temporary = path / f".{number[0]:08d}"
    with _quiet():
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(temporary, overwrite=True), no_dist=not connected())
    if mesh.is_first:
        temporary.rename(path / temporary.name[1:])
        if before is not None:
            shutil.rmtree(before)


def read_ranks(path: Path, mesh: Mesh, device: torch.device) -> dict[str, Any]:
    """The newest state in the folder, of own tensors the rows of this rank's members; to be called by all ranks."""
    from torch.distributed import checkpoint as dcp

    chosen = [newest(path).name if mesh.is_first else ""]  # type: ignore[union-attr]
    if connected():
        distributed.broadcast_object_list(chosen)
    folder = path / chosen[0]
    state = torch.load(folder / RUN, map_location=device, weights_only=True)
    tensors: dict[str, Tensor] = {}
    whole = {key: _put_in(value, tensors, mesh, device) for key, value in state.items()}
    with _quiet():
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=not connected())
    return whole


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, torch does not warn that there is one process: that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _is_one(path: Path) -> bool:
    return path.name.isdigit() and (path / ".metadata").exists() and (path / RUN).exists()


def _taken_out(value: Any, name: str, tensors: dict[str, Tensor], mesh: Mesh, members: int, own: set[int]) -> Any:
    """The value with words in place of its tensors, which are put among `tensors`."""
    if isinstance(value, dict):
        return {key: _taken_out(each, f"{name}/{key}", tensors, mesh, members, own) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_taken_out(each, f"{name}/{i}", tensors, mesh, members, own) for i, each in enumerate(value)]
    if not isinstance(value, Tensor):
        return value
    rows = members if id(value) in own else None
    if rows is None:
        tensors[name] = value
    else:
        tensors.update({f"{name}/{row}": value[i] for i, row in enumerate(range(members)[mesh.rows(members)])})
    return {MARK: name, "rows": rows, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}


def _put_in(value: Any, tensors: dict[str, Tensor], mesh: Mesh, device: torch.device) -> Any:
    """The value with empty tensors in place of words, which are put among `tensors` to be filled."""
    if isinstance(value, list):
        return [_put_in(each, tensors, mesh, device) for each in value]
    if not isinstance(value, dict):
        return value
    if MARK not in value:
        return {key: _put_in(each, tensors, mesh, device) for key, each in value.items()}
    name, rows, shape = value[MARK], value["rows"], value["shape"]
    here = range(0) if rows is None else range(rows)[mesh.rows(rows)]
    shape = shape if rows is None else [len(here), *shape[1:]]
    made = torch.empty(shape, dtype=getattr(torch, value["dtype"]), device=device)
    tensors.update({name: made} if rows is None else {f"{name}/{row}": made[i] for i, row in enumerate(here)})
    return made
