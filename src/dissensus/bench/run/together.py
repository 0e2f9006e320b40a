"""One training run for all methods that hold the same network: trained once, watched by all, branched once.

The head, the first `branch_at` of the epochs, is shared. Then the run goes on in two ways from the same state: the decayed
tail follows the task's schedule, for MAP, perturbation and dropout; the constant tail stays at `tail_rate`, or at
`tail_factor` of the rate: TRADI has no variance left where the rate has died, and weight averages (SWA, SWAG) and snapshot
ensembles spread their snapshots over it. A method with a `tail_factor` of its own has a training of its own.

What a method gets does not depend on who else watches: batches come from the state of torch's generator at the branch,
draws from the run's seed. A method alone takes the same way, so its numbers are the same.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dissensus.bench.rows.sets import TaskData
from dissensus.bench.run import build
from dissensus.bench.run.sharing import SharingRun
from dissensus.bench.task.config import RunConfig, Settings
from dissensus.bench.task.toml import toml
from dissensus.bench.task.variants import base_name
from dissensus.core.posterior import Posterior, refresh
from dissensus.methods import TRADI
from dissensus.methods.track import Tracked
from dissensus.methods.trajectory import TAIL, spread
from dissensus.train import fit
from dissensus.training.history import Epoch

AnyRun = TypeVar("AnyRun", bound=SharingRun)
DECAYED, CONSTANT = "decayed", "constant"
TAILS = {
    "map": DECAYED,
    "gaussian_perturbation": DECAYED,
    "laplace": DECAYED,
    "mc_dropout": DECAYED,  # where the dropout is the network's own
    "tradi": CONSTANT,
    "swa": CONSTANT,
    "swag": CONSTANT,
    "snapshot_ensemble": CONSTANT,
}
SNAPSHOTS = {"swa": 40, "swag": 40, "snapshot_ensemble": 5}  # over the tail; 2·rank and members where these are given
SAMPLING = (
    "samples",
    "covariance",
    "correlation",
    "features",
    "bandwidth",
)  # settings of TRADI that its filters do not see
CHECKPOINT_SECONDS = 10.0  # between two checkpoints of a training: what a stopped run loses at most
FACTOR = 0.5  # of the rate in the constant tail, where a task says nothing: as in SWAG's own schedule


def shares(config: RunConfig) -> bool:
    """Whether the run is one watcher of a shared training."""
    own_rate = base_name(config.method) == "mc_dropout" and config.settings.get("rate") is not None
    asked = bool(config.training.get("together")) and config.training["epochs"] != 0
    return asked and base_name(config.method) in TAILS and not own_rate


def companions(run: AnyRun, runs: Sequence[AnyRun]) -> list[AnyRun]:
    """The runs, this one included, that one training serves."""
    key = _key(run.config)
    return [each for each in runs if each is run or (shares(each.config) and _key(each.config) == key)]


def train_together(runs: Sequence[SharingRun], *, progress: bool = False) -> None:
    """Trains what is not trained yet of runs that are companions, going on from checkpoints where there are some."""
    first = runs[0]
    _check(first.config.training)
    folder = first.folder.parent / f".together-{_name(runs)}"  # checkpoints; the same command finds them again
    for tail in (DECAYED, CONSTANT):
        waiting = [run for run in runs if TAILS[base_name(run.config.method)] == tail and not run.trained]
        if waiting:
            with first.prepared():
                _branch(runs, waiting, tail, folder, progress=progress)
    shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(out: Path) -> None:
    """Removes checkpoints of shared trainings that were stopped, once every run in the folder is trained.

    Not before: a run that was begun and is not trained may be somebody's who trains it now, or goes on with it tomorrow.
    """
    if all((path.parent / "training.json").is_file() for path in out.glob("*/config.toml")):
        for folder in out.glob(".together-*"):
            shutil.rmtree(folder, ignore_errors=True)


class SharedTraining(Tracked):
    """A tracked run that knows who observes, how long each took, and that nothing is drawn before the end."""

    def __init__(self, module: nn.Module, methods: Sequence[Callable[..., Posterior]], **keywords: Any) -> None:
        super().__init__(module, methods, **keywords)
        self.active = list(range(len(methods)))
        self.seconds = [0.0] * len(methods)  # on a processor; a GPU does not wait to be timed

    def observe(self, optimizer: Optimizer) -> bool:
        self.steps += 1
        for i in self.active:
            start = time.perf_counter()
            self[i].observe(optimizer)
            self.seconds[i] += time.perf_counter() - start
        return True

    def store_draw(self, loader: Iterable[Any]) -> None:
        """Nothing: what is drawn at the end of the head would be thrown away."""

    def identity(self) -> Settings:
        return super().identity() | {"class": "Watched"}  # its name in checkpoints, which are to be gone on from

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.seconds, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        self.seconds = state.tolist()


@dataclass(frozen=True)
class Watchers:
    """Who watches: one per run, of which TRADIs with equal filters let the first observe for all of them."""

    runs: Sequence[SharingRun]

    @property
    def leader(self) -> list[int]:
        """For each run, which one observes for it."""
        keys = [_filters(run.config) or run.config.method for run in self.runs]
        return [keys.index(key) for key in keys]

    def observing(self, tail: str | None = None) -> list[int]:
        """Positions of those that observe, in the head or in a tail."""
        mine = [tail in (None, TAILS[base_name(run.config.method)]) for run in self.runs]
        return [i for i, leader in enumerate(self.leader) if leader == i and mine[i]]


def _title(waiting: Sequence[SharingRun]) -> str:
    first, *others = [run.config.method for run in waiting]
    return f"{first} and {len(others)} more" if others else first


def _branch(
    runs: Sequence[SharingRun], waiting: Sequence[SharingRun], tail: str, folder: Path, *, progress: bool
) -> None:
    """Trains the head, or finds it, goes on along one tail, and keeps what the waiting runs' methods have got."""
    first, data = runs[0], runs[0].data
    training, watchers = first.config.training, Watchers(runs)
    loader = first.loader(data.train, shuffle=True)
    head = min(max(1, round(training.get("branch_at", TAIL) * training["epochs"])), training["epochs"] - 1)
    network = build.network(first.config, data, folders=first.folders)
    methods = []
    for run in runs:
        settings = build.arguments(run.config, data, network)
        methods.append(build.constructor(run.config, settings | _snapshots(run.config, len(loader), head, settings)))
    shared = SharedTraining(network, methods, **_prior(first.config, data))
    shared.to(first.device)
    optimizer, scheduler = build.optimizer(shared, training)
    settings = {
        "clip": training.get("clip"),
        "precision": training.get("precision", "auto"),
        "engine": training.get("engine", "auto"),
        "progress": _title(waiting) if progress else False,
    }

    def log(runs: Sequence[SharingRun], after: int) -> Callable[[Epoch], None]:
        def write(epoch: Epoch) -> None:
            for run in runs:
                run.log(replace(epoch, epoch=after + epoch.epoch))

        return write

    shared.active = watchers.observing()
    before = fit(
        shared,
        loader,
        epochs=head,
        optimizer=optimizer,
        scheduler=scheduler,
        checkpoint=folder / "head.pt",
        checkpoint_seconds=CHECKPOINT_SECONDS,
        callback=log(waiting, 0),
        **settings,
    )
    if tail == CONSTANT and optimizer is not None:
        for group in optimizer.param_groups:
            group["lr"] = _tail_rate(training)
    shared.active = watchers.observing(tail)
    after = fit(
        shared,
        loader,
        epochs=training["epochs"] - head,
        optimizer=optimizer,
        scheduler=scheduler if tail == DECAYED else None,
        checkpoint=folder / f"{tail}.pt",
        checkpoint_seconds=CHECKPOINT_SECONDS,
        callback=log(waiting, head),
        **settings,
    )
    epochs = [*before.epochs, *(replace(epoch, epoch=head + epoch.epoch) for epoch in after.epochs)]
    for i, run in enumerate(runs):
        if run not in waiting:
            continue
        posterior, leader = shared[i], shared[watchers.leader[i]]
        if posterior is not leader:
            _copy_filters(leader, posterior)
        torch.manual_seed(run.config.seed)  # draws do not depend on how many methods drew before
        refresh(posterior, loader)
        run.keep(posterior.eval(), epochs, engine=after.engine, **_cost(shared, watchers, i, epochs))


def _cost(shared: SharedTraining, watchers: Watchers, index: int, epochs: Sequence[Epoch]) -> Settings:
    """Seconds that the method would have taken alone, and how they were found."""
    total = sum(epoch.seconds for epoch in epochs)
    names = [run.config.method for run in watchers.runs]
    if shared.device.type == "cuda":
        return {"seconds": total, "counted": f"the whole shared run, watched by {', '.join(names)}"}
    others = sum(s for i, s in enumerate(shared.seconds) if i != watchers.leader[index])
    how = f"a run shared by {', '.join(names)}: {total:.3f} s, less {others:.3f} s in which others observed"
    return {"seconds": total - others, "counted": how}


def _copy_filters(leader: Posterior, follower: Posterior) -> None:
    """Gives a TRADI what another one with the same filters has observed."""
    assert isinstance(leader, TRADI)
    assert isinstance(follower, TRADI)
    follower.filters.load_state_dict(leader.filters.state_dict())
    follower.steps.copy_(leader.steps)


def _filters(config: RunConfig) -> str | None:
    """What TRADI's filters depend on; None for other methods."""
    if base_name(config.method) != TRADI.name:
        return None
    return toml({key: value for key, value in config.settings.items() if key not in SAMPLING})


def _snapshots(config: RunConfig, steps_per_epoch: int, head: int, settings: Settings) -> Settings:
    """start and every of a method that takes snapshots, spread over the tail where the task does not give them."""
    name = base_name(config.method)
    if name not in SNAPSHOTS or settings.get("start") is not None:
        return {}
    wanted = 2 * settings["rank"] if "rank" in settings else settings.get("members", SNAPSHOTS[name])
    start, every = spread((config.training["epochs"] - head) * steps_per_epoch, wanted, tail=0.0)
    return {"start": head * steps_per_epoch + start, "every": every} | (
        {"every": settings["every"]} if settings.get("every") is not None else {}
    )


def _prior(config: RunConfig, data: TaskData) -> Settings:
    """The likelihood and the prior that all watchers have."""
    std = config.settings.get("weight_prior_std")
    size = config.settings.get("data_size", len(data.train.y))
    prior = {} if std is None else {"weight_prior_std": std, "data_size": size}
    return {"likelihood": build.likelihood(config), **prior}


def _tail_rate(training: Settings) -> float:
    return float(training.get("tail_rate", training.get("tail_factor", FACTOR) * training.get("lr", 1e-3)))


def _key(config: RunConfig) -> str:
    """What companions have in common."""
    prior = {key: config.settings[key] for key in ("weight_prior_std", "data_size") if key in config.settings}
    parts = {"data": config.data, "network": config.network, "likelihood": config.likelihood, "prior": prior}
    return toml({"seed": config.seed, "training": config.training, **parts})


def _name(runs: Sequence[SharingRun]) -> str:
    """A short name for exactly these watchers of this training."""
    whole = _key(runs[0].config) + "".join(toml({run.config.method: run.config.settings}) for run in runs)
    return hashlib.sha256(whole.encode()).hexdigest()[:12]


def _check(training: Settings) -> None:
    if training["epochs"] < 2:
        raise ValueError(f"expected two epochs or more with together, got {training['epochs']}; one for each part")
    share = training.get("branch_at", TAIL)
    if not 0 < share < 1:
        raise ValueError(f"expected training.branch_at between 0 and 1, got {share}; {TAIL} is usual")
    if training.get("keep_best", True) or training.get("patience") is not None:
        raise ValueError(
            "expected training.keep_best = false and no patience with together, got others; no epoch is the best for all "
            "that watch"
        )
    if training.get("optimizer") == "default":
        raise ValueError("expected an optimizer by name with together, got default; methods would each take their own")
    if "tail_rate" in training and "tail_factor" in training:
        raise ValueError("expected tail_rate or tail_factor, got both; leave one out")
