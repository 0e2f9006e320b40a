"""Checkpoints of a training run: everything needed to continue as without an interruption."""

import copy
import math
import os
import time
import zipfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from dissensus.core.loader import Loader
from dissensus.core.posterior import Posterior
from dissensus.distributed.init import check_shared_folder
from dissensus.distributed.single_process import TrainingPartition
from dissensus.storage.atomic_files import replace_file
from dissensus.training.checkpoint_match import (
    checkpoint_mismatches,
    describe_run,
    warn_of_overridden,
    without_stale_draws,
)
from dissensus.training.distributed_checkpoint import (
    has_only_checkpoints,
    newest_checkpoint,
    read_distributed,
    write_distributed,
)
from dissensus.training.epochs import PartialEpoch
from dissensus.training.history import Best, Epoch, History
from dissensus.utils.file_errors import read_errors
from dissensus.utils.sharding import is_divided


@dataclass
class RunSoFar:
    """A run up to now. `told`: steps done and steps per epoch, for `RunLength`; `part`: the part done of the next epoch."""

    history: History = field(default_factory=History)
    best: Best = field(default_factory=Best)
    told: dict[str, Any] = field(default_factory=dict)
    part: PartialEpoch | None = None


ALONE = TrainingPartition()
OVERLAPPING = 1 << 26  # most bytes that expanded buffers (which repeat a value) may represent
REMEDY = "remove it, or pass another checkpoint="


class Checkpoints:
    """Writes the checkpoint of a run, and resumes the run from it. `path`: None writes nothing.

    One process writes a file, several write a folder; an existing file or folder keeps its form. `seconds`: least time between
    two epochs' writes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        posterior: Posterior,
        optimizer: Optimizer,
        scheduler: LRScheduler | None = None,
        loader: Loader | None = None,
        division: TrainingPartition = ALONE,
        seconds: float = 0.0,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.posterior, self.optimizer, self.scheduler = posterior, optimizer, scheduler
        self.loader, self.division, self.seconds = Loader(()) if loader is None else loader, division, seconds
        self._written, self._is_due = -math.inf, False  # time of the last write, and whether there are unsaved changes

    def write(self, history: History, best: Best, part: PartialEpoch | None = None) -> None:
        """Writes everything needed to continue, first under a temporary name. `part`: of an interrupted epoch."""
        if self.path is None or (part is not None and self.posterior.steps_per_epoch is None):
            return  # the rest of an epoch of unknown length cannot be planned
        path, posterior, optimizer, division = self.path, self.posterior, self.optimizer, self.division
        folder = path.is_dir() if division.active_mesh is None else not division.broadcast_object(path.is_file())
        folder = folder or posterior.particles.divided
        with nullcontext() if folder else division.full_optimizer_state(optimizer):
            done = int(posterior.steps) - posterior.steps_before_run
            state = _training_state(posterior, optimizer, self.scheduler) | {
                "run": describe_run(posterior, optimizer, self.scheduler),
                "told": {"done": done, "steps_per_epoch": posterior.steps_per_epoch},
                "loader": self.loader.state() if part is None else part.loader,
                "part": None if part is None else {**vars(part), "loader": None},
                "history": [asdict(epoch) for epoch in history.epochs],
                "engine": history.engine,
                "best": {"score": best.score, "epoch": best.epoch, "state": best.state, "kept": history.best},
            }
            if folder:
                own = _member_row_ids(state, posterior, optimizer)
                write_distributed(path, state, division.active_mesh, posterior.particles.members, own)
            elif division.is_first:
                path.parent.mkdir(parents=True, exist_ok=True)
                with replace_file(path) as temporary:
                    torch.save(state, temporary)
        self._written, self._is_due = time.monotonic(), False

    def end_epoch(self, history: History, best: Best) -> None:
        """Writes the epoch, if the last write is long enough ago."""
        if self.path is not None:
            self._is_due = True
            if self.division.broadcast_object(time.monotonic() - self._written >= self.seconds):
                self.write(history, best)

    def end_run(self, history: History, best: Best) -> None:
        """Writes what is not yet written."""
        if self._is_due:
            self.write(history, best)

    def resume(self) -> RunSoFar:
        """Restores what `write` wrote. A damaged file, or one of another run, raises and changes nothing."""
        if self.path is None:
            return RunSoFar()
        path, posterior, optimizer, scheduler = self.path, self.posterior, self.optimizer, self.scheduler
        folder = path.is_dir() and newest_checkpoint(path) is not None
        # a folder has the moments of this process's members
        whole = nullcontext() if folder else self.division.full_optimizer_state(optimizer)
        with whole, read_errors(path, REMEDY, kind="a checkpoint of this posterior in"):
            if folder:
                divided = _sharded_tensors(posterior, optimizer)
                state = read_distributed(path, self.division.active_mesh, posterior.device, divided)
            else:
                check_archive(path)
                state = torch.load(path, map_location=posterior.device, weights_only=True)
            check_tensors(state)
            kept = state["best"].pop("kept")
            history = History([Epoch(**epoch) for epoch in state["history"]], kept, state["engine"])
            part = None if state.get("part") is None else PartialEpoch(**{**state["part"], "loader": state["loader"]})
            resumed = RunSoFar(history, Best(**state["best"]), state["told"], part)
            if (misfit := next(checkpoint_mismatches(state, posterior, optimizer, scheduler), None)) is not None:
                got = f"one of another run ({misfit})"
                raise ValueError(f"expected a checkpoint of this posterior in {path}, got {got}; {REMEDY}")
            warn_of_overridden(state, optimizer, scheduler)
            _restore_state(state, posterior, optimizer, scheduler)
        self.loader.restore(state["loader"])
        return resumed


def checkpoint_exists(given: str | os.PathLike[str] | None, division: TrainingPartition = ALONE) -> bool:
    """Whether there is a checkpoint to resume. Raises if not all processes see it, or if a folder holds other files."""
    if given is None:
        return False
    path = Path(given)
    if division.active_mesh is not None:
        check_shared_folder(path.parent)
    found = path.exists()
    if path.is_dir() and has_only_checkpoints(path) and (division.active_mesh is not None or any(path.iterdir())):
        found = newest_checkpoint(path) is not None
    elif path.is_dir() and division.active_mesh is not None:
        raise IsADirectoryError(f"expected a folder of checkpoints, got {path} with other files; pass another")
    return bool(division.broadcast_object(found))


def _member_row_ids(state: dict[str, Any], posterior: Posterior, optimizer: Optimizer) -> set[int]:
    """Ids of the state's tensors with a row per member of this process: the optimiser's moments of own tensors."""
    own = {id(parameter) for parameter in posterior.particles.own_parameters().values()}
    order = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    states = state["optimizer"]["state"].items()
    return {id(value) for number, each in states if order[number] in own for value in each.values() if _has_rows(value)}


def _sharded_tensors(posterior: Posterior, optimizer: Optimizer) -> dict[str, Tensor]:
    """Name in a state -> tensor that processes have parts of; the optimiser's moments by their parameter's number."""
    if not posterior.particles.divided:
        return {}
    named = posterior.state_dict().items()
    states = {f"{part}/{name}": tensor for part in ("posterior", "best/state") for name, tensor in named}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states |= {f"optimizer/state/{number}": parameter for number, parameter in enumerate(parameters)}
    return {name: tensor.detach() for name, tensor in states.items() if is_divided(tensor)}


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _restore_state(
    state: dict[str, Any], posterior: Posterior, optimizer: Optimizer, scheduler: LRScheduler | None
) -> None:
    """Restores a checkpoint's state, either all of it or nothing."""
    before = copy.deepcopy(_training_state(posterior, optimizer, scheduler))
    try:
        fitting = without_stale_draws(state["posterior"], posterior)
        _load_state({**state, "posterior": fitting}, posterior, optimizer, scheduler)
    except BaseException:
        _load_state(before, posterior, optimizer, scheduler)
        raise


def _training_state(posterior: Posterior, optimizer: Optimizer, scheduler: LRScheduler | None) -> dict[str, Any]:
    """Everything that training changes."""
    return {
        "posterior": posterior.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
        "random": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(posterior.device) if posterior.device.type == "cuda" else None,
    }


def _load_state(
    state: dict[str, Any], posterior: Posterior, optimizer: Optimizer, scheduler: LRScheduler | None
) -> None:
    posterior.load_state_dict(state["posterior"])
    optimizer.load_state_dict(state["optimizer"])
    if state["scheduler"] is not None and scheduler is not None:
        scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["random"].cpu())
    if posterior.device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"].cpu(), posterior.device)


def check_archive(path: Path) -> None:
    """Raises unless a file is one that torch writes: an uncompressed archive of tensors and plain values."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if sum(entry.file_size for entry in entries) > path.stat().st_size:  # such a file could unpack to any size
            raise ValueError("its entries are larger than the file")
        if (damaged := archive.testzip()) is not None:  # torch does not check the checksums it writes
            raise ValueError(f"{damaged} is damaged")
        values = [archive.read(entry) for entry in entries if entry.filename.lower().endswith("data.pkl")]
        if any(b"bytearray" in each for each in values):  # torch's reader would allocate one of any length
            raise ValueError("it asks for a bytearray")


def check_tensors(state: Any) -> None:
    """Raises if tensors are far larger than their storage, because copies of them would take too much memory."""
    tensors = [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]
    plain = [t for t in tensors if not is_divided(t)]
    overlapping = sum(t.nbytes for t in plain if t.nbytes > t.untyped_storage().nbytes())
    if overlapping > OVERLAPPING:
        raise ValueError(f"tensors of {overlapping} bytes in a much smaller storage")
