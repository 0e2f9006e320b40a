"""Checkpoints of a training run: everything needed to continue as without an interruption.

One process writes a file. Several write a folder by torch.distributed.checkpoint, which any number of them can resume:

    run.ckpt/00000012/run.pt        all values that are not tensors of members, and the places of those tensors
    run.ckpt/00000012/*.distcp      tensors; each member has its own keys, so that any rank can read any member

A folder is written under a temporary name and renamed when all ranks are done; then the one before is removed. Leftovers of
killed processes are never read, and the next write removes them.
"""

import copy
import logging
import math
import os
import re
import shutil
import time
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dissensus.core.calibrated import STATE
from dissensus.core.description import complete_config, config_as_json, describe_likelihood, differences, to_json_values
from dissensus.core.posterior import Posterior
from dissensus.distributed.init import check_shared_folder
from dissensus.distributed.partition import TrainingPartition
from dissensus.engine.loader import Loader
from dissensus.numerics.randomness import generator_states
from dissensus.storage.atomic_files import replace_file
from dissensus.training.history import Best, Epoch, History, PartialEpoch
from dissensus.utils.file_errors import read_errors
from dissensus.utils.sharding import is_divided
from dissensus.utils.torch_private import pytree

log = logging.getLogger("dissensus")

OVERLAPPING = 1 << 26  # most bytes that expanded buffers (which repeat a value) may represent
REMEDY = "remove it, or pass another checkpoint="
# What a state says of calibrations and promises, which training drops, and its description, which is compared as such.
FITTED = re.compile(rf"(watchers\.\d+\.)*((calibration|promises)\.|{STATE}$)")
STORED = re.compile(r"(watchers\.\d+\.)*(stored|curvature)\.")  # draws of an earlier run: not needed to continue
HOW = {"params", "param_names", "relative", "lr", "initial_lr"}
HOW |= {"fused", "foreach", "capturable", "differentiable", "maximize"}
MOVING = {"last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i", "base_lrs", "lr_lambdas"}
# Parts of a state whose tensors all ranks write; the first rank writes the others.
SPREAD = ("posterior", "optimizer", "best")
RUN = "run.pt"
OURS = re.compile(r"\.?\d{8}")  # names of checkpoints, finished or being written
MARK = "tensor in the folder"
CHAINS = "optimizer/generators"  # a list with one for each member


@dataclass
class RunSoFar:
    """A run up to now. `told`: steps done and steps per epoch; `part`: the part done of the next epoch."""

    history: History = field(default_factory=History)
    best: Best = field(default_factory=Best)
    told: dict[str, Any] = field(default_factory=dict)
    part: PartialEpoch | None = None


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
        division: TrainingPartition | None = None,
        seconds: float = 0.0,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.posterior, self.optimizer, self.scheduler = posterior, optimizer, scheduler
        self.division, self.seconds = division or TrainingPartition(posterior, Loader(())), seconds
        self._written, self._is_due = -math.inf, False  # time of the last write, and whether there are unsaved changes

    def write(self, history: History, best: Best, part: PartialEpoch | None = None) -> None:
        """Writes everything needed to continue, first under a temporary name. `part`: of an interrupted epoch."""
        if self.path is None or (part is not None and self.posterior.steps_per_epoch is None):
            return  # the rest of an epoch of unknown length cannot be planned
        path, posterior, optimizer, division = self.path, self.posterior, self.optimizer, self.division
        folder = not division.broadcast_object(path.is_file()) if division.is_shared else path.is_dir()
        folder = folder or posterior.particles.divided
        with nullcontext() if folder else division.full_optimizer_state(optimizer):
            done = int(posterior.steps) - posterior.steps_before_run
            state = self._training_state() | {
                "run": describe_run(posterior, optimizer, self.scheduler),
                "told": {"done": done, "steps_per_epoch": posterior.steps_per_epoch},
                "loader": self.division.loader.state() if part is None else part.loader,
                "part": None if part is None else {**vars(part), "loader": None},
                "history": [asdict(epoch) for epoch in history.epochs],
                "engine": history.engine,
                "best": {**vars(best)},
            }
            if folder:
                write_distributed(path, state, division, self._member_row_ids(state))
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
                state = read_distributed(path, self.division, posterior.device, self._sharded_tensors())
            else:
                check_archive(path)
                state = torch.load(path, map_location=posterior.device, weights_only=True)
            check_tensors(state)
            epochs = [Epoch(**epoch) for epoch in state["history"]]
            shift = 1 - epochs[0].epoch if epochs else 0  # earlier versions counted from 0
            best = Best(**{key: state["best"][key] for key in ("score", "epoch", "state")})
            for each in epochs:
                each.epoch += shift
            best.epoch += shift
            history = History(epochs, None if best.state is None else epochs[best.epoch - 1], state["engine"])
            part = None if state.get("part") is None else PartialEpoch(**{**state["part"], "loader": state["loader"]})
            resumed = RunSoFar(history, best, state["told"], part)
            if (misfit := next(checkpoint_mismatches(state, posterior, optimizer, scheduler), None)) is not None:
                got = f"one of another run ({misfit})"
                raise ValueError(f"expected a checkpoint of this posterior in {path}, got {got}; {REMEDY}")
            warn_of_overridden(state, optimizer, scheduler)
            before = copy.deepcopy(self._training_state())
            try:  # all of it, or nothing
                self._load_state({**state, "posterior": without_stale_draws(state["posterior"], posterior)})
            except BaseException:
                self._load_state(before)
                raise
        self.division.loader.restore(state["loader"])
        return resumed

    def _training_state(self) -> dict[str, Any]:
        """Everything that training changes."""
        host, device = generator_states(self.posterior.device)
        return {
            "posterior": self.posterior.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "random": host,
            "cuda": device,
            "largest_input": self.posterior._known.largest,
        }

    def _load_state(self, state: dict[str, Any]) -> None:
        self.posterior.load_state_dict(state["posterior"])
        self.posterior._known.largest = state.get("largest_input", -math.inf)
        self.optimizer.load_state_dict(state["optimizer"])
        if state["scheduler"] is not None and self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"].cpu())
        if self.posterior.device.type == "cuda" and state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"].cpu(), self.posterior.device)

    def _member_row_ids(self, state: dict[str, Any]) -> set[int]:
        """Ids of the state's tensors with a row per member of this process: the optimiser's moments of own tensors."""
        own = {id(parameter) for parameter in self.posterior.particles.own_parameters().values()}
        order = [id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]]
        states = [each for number, each in state["optimizer"]["state"].items() if order[number] in own]
        return {id(value) for each in states for value in each.values() if isinstance(value, Tensor) and value.ndim}

    def _sharded_tensors(self) -> dict[str, Tensor]:
        """Name in a state -> tensor that processes have parts of; the optimiser's moments by their parameter's number."""
        if not self.posterior.particles.divided:
            return {}
        named = self.posterior.state_dict().items()
        states = {f"{part}/{name}": tensor for part in ("posterior", "best/state") for name, tensor in named}
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        states |= {f"optimizer/state/{number}": parameter for number, parameter in enumerate(parameters)}
        return {name: tensor.detach() for name, tensor in states.items() if is_divided(tensor)}


def checkpoint_exists(given: str | os.PathLike[str] | None, division: TrainingPartition) -> bool:
    """Whether there is a checkpoint to resume. Raises if not all processes see it, or if a folder holds other files."""
    if given is None:
        return False
    path = Path(given)
    if division.is_shared:
        check_shared_folder(path.parent)
    found, names = path.exists(), [each.name for each in path.iterdir()] if path.is_dir() else []
    if path.is_dir() and all(map(OURS.fullmatch, names)) and (division.is_shared or names):
        found = newest_checkpoint(path) is not None
    elif path.is_dir() and division.is_shared:
        raise IsADirectoryError(f"expected a folder of checkpoints, got {path} with other files; pass another")
    return bool(division.broadcast_object(found))


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


# ------------------------------------------------------------------ whether a checkpoint belongs to a run


def describe_run(posterior: Posterior, optimizer: Optimizer, scheduler: LRScheduler | None) -> dict[str, Any]:
    """Description of a run: method, settings, network, likelihood, optimiser with its tensors, kind of schedule."""
    return {
        "posterior": config_as_json(lambda: training_settings(posterior)),
        "likelihood": describe_likelihood(posterior.likelihood),
        "network": posterior.initial_network,
        "prior": None if posterior.prior is None else to_json_values(posterior.prior.config()),
        "optimizer": type(optimizer).__name__,
        "parameters": [[_dtype_and_shape(p) for p in group["params"]] for group in optimizer.param_groups],
        "scheduler": None if scheduler is None else type(scheduler).__name__,
    }


def training_settings(posterior: Posterior) -> dict[str, Any]:
    """The method and its training settings, as JSON values; a checkpoint can be resumed only if they are equal."""
    left, every = posterior.draw_only_settings, complete_config(posterior).items()
    described: dict[str, Any] = {"method": posterior.name, "class": type(posterior).__name__}
    described |= {key: value for key, value in every if key not in left}
    watchers = [training_settings(watcher) for watcher in posterior.watchers]
    return {**described, "watchers": watchers} if watchers else described


def checkpoint_mismatches(
    state: dict[str, Any], posterior: Posterior, optimizer: Optimizer, scheduler: LRScheduler | None
) -> Iterator[str]:
    """Descriptions of what in a checkpoint's state does not belong to this run; empty if all of it does."""
    yield from differences(state["run"], describe_run(posterior, optimizer, scheduler))
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


# ------------------------------------------------------------------ folders of several processes


def newest_checkpoint(path: Path) -> Path | None:
    """The last finished checkpoint in the folder."""
    every = path.glob("*/.metadata") if path.is_dir() else ()
    finished = (each.parent for each in every if each.parent.name.isdigit() and (each.parent / RUN).exists())
    return max(finished, default=None)


def write_distributed(path: Path, state: dict[str, Any], division: TrainingPartition, own: set[int]) -> None:
    """Writes a state as the newest in the folder; call it on all ranks.

    `own`: ids of the state's tensors with a row per member of this rank; others are equal on all.
    """
    # Imported here, since a run on one process does not need it.
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    first, members = division.is_first, division.posterior.particles.members
    here = range(members)[division.member_slice]
    tensors: dict[str, Tensor] = {}
    spread = {key: _extract_tensors(state[key], key, tensors, here, own) for key in state if key in SPREAD}
    rest = {**state, **spread}
    before = newest_checkpoint(path) if first else None
    number = 0 if before is None else int(before.name) + 1
    if first:
        path.mkdir(parents=True, exist_ok=True)
        for each in path.iterdir():
            if each != before and OURS.fullmatch(each.name):  # left by killed processes
                shutil.rmtree(each)
        (path / f".{number:08d}").mkdir()
        torch.save({**rest, "members": members}, path / f".{number:08d}" / RUN)
    temporary = path / f".{division.broadcast_object(number):08d}"
    with _hide_warnings():
        save(tensors, storage_writer=FileSystemWriter(temporary, overwrite=True), no_dist=not division.is_shared)
    if first:
        temporary.rename(path / temporary.name[1:])
        if before is not None:
            shutil.rmtree(before)


def read_distributed(
    path: Path, division: TrainingPartition, device: torch.device, divided: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """The newest state in the folder, with only this rank's rows of tensors per member. Call it on all ranks.

    `divided`: tensors divided by `fully_shard`, by name or by the name of their parameter; they give the layout to read into.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    chosen = str(newest_checkpoint(path)) if division.is_first else ""
    folder = path / Path(division.broadcast_object(chosen)).name
    state = torch.load(folder / RUN, map_location=device, weights_only=True)
    here = range(state.pop("members"))[division.member_slice]
    tensors: dict[str, Tensor] = {}
    whole = {key: _insert_tensors(value, tensors, here, device, divided or {}) for key, value in state.items()}
    with _hide_warnings():
        load(tensors, storage_reader=FileSystemReader(folder), no_dist=not division.is_shared)
    return whole


@contextmanager
def _hide_warnings() -> Iterator[None]:
    """Inside, torch does not warn that there is only one process, since that is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


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
