"""One training run for all methods that watch the same network: trained once, watched by all, branched once.

The head, the first `branch_at` of the epochs, is shared. Then the run continues in two tails from the same state. The decayed
tail follows the task's schedule, for MAP, perturbation and dropout. The constant tail stays at `tail_rate`, or at
`tail_factor` times the rate: TRADI needs weights that still move, and weight averages (SWA, SWAG) and snapshot ensembles
spread their snapshots over it. A method with its own `tail_factor` is trained separately.

A method's result does not depend on the other watchers: batches come from the state of torch's generator at the branch, draws
from the run's seed. A method alone is trained in the same way, so its numbers are the same.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dissensus.bench.run import build
from dissensus.bench.run.run import CHECKPOINT_SECONDS, Run
from dissensus.bench.run.run_folder import keep_warnings
from dissensus.bench.task.config import RunConfig, Settings
from dissensus.bench.task.objects import method_class
from dissensus.bench.user_code import is_import_path
from dissensus.core.posterior import Posterior
from dissensus.core.trainable import Watchers
from dissensus.methods import MAP, MCDropout, track
from dissensus.methods.parts.sampling_posterior import RecordingPosterior, SamplingPosterior
from dissensus.methods.snapshots import SnapshotRecorder
from dissensus.training.fit import fit, refresh
from dissensus.training.history import Epoch
from dissensus.utils.parameter_groups import TAIL

PRIOR = ("prior", "weight_prior_std", "data_size")
FACTOR = 0.5  # default `tail_factor`, as in SWAG's schedule


def can_share_training(config: RunConfig) -> bool:
    """Whether the run takes part in a shared training."""
    asked = bool(config.training.get("together")) and config.training["epochs"] != 0
    if not asked or is_import_path(config.method):  # a watcher has no loss, but the user's method may have one
        return False
    changes = config.settings.get("rate") is not None  # dropout added by the method is active in training too
    tail = _tail_name(method_class(config.method, config.folder))
    return tail is not None and not changes and build.setting_and_count(config)[1] == 1


def companions(run: Run, runs: Sequence[Run]) -> list[Run]:
    """The runs, including this one, that share one training."""
    if not can_share_training(run.config):
        return [run]
    key = _common_settings(run.config)
    shares = [can_share_training(each.config) and _common_settings(each.config) == key for each in runs]
    return [each for each, share in zip(runs, shares, strict=True) if each is run or share]


def train_runs(runs: Sequence[Run], *, progress: bool = False) -> None:
    """Trains the untrained ones of runs that share a training; continues from checkpoints if there are some."""
    first = runs[0]
    if not can_share_training(first.config):
        first.train_alone(progress=progress)
        return
    _check_shared(first.config.training)
    whole = json.dumps([_common_settings(first.config), [(run.config.method, run.config.settings) for run in runs]])
    digest = hashlib.sha256(whole.encode()).hexdigest()[:12]  # of exactly these watchers
    folder = first.folder.parent / f".together-{digest}"  # checkpoints; the same command finds them again
    for tail in ("decayed", "constant"):
        kinds = [_tail_name(method_class(run.config.method, run.config.folder)) for run in runs]
        waiting = [run for run, kind in zip(runs, kinds, strict=True) if kind == tail and not run.is_trained]
        if waiting:
            with first.seeded_context():
                _train_branch(runs, waiting, tail, folder, progress=progress)
    if first.is_writer:
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(out: Path) -> None:
    """Removes checkpoints of stopped shared trainings, once every run in the folder is trained.

    Not earlier: another process may be training an untrained run now, or continue it later.
    """
    if all((path.parent / "training.json").is_file() for path in out.glob("*/config.toml")):
        for folder in out.glob(".together-*"):
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class WatchedRun:
    """A run with one watcher per method; of watchers with equal recorders, only the first observes."""

    run: Posterior
    watchers: Sequence[Posterior]
    leader: Sequence[int]  # for each watcher, which one observes for it

    @classmethod
    def build(cls, runs: Sequence[Run], network: nn.Module, methods: Sequence[Callable[..., Posterior]]) -> WatchedRun:
        config, data = runs[0].config, runs[0].data  # whose likelihood and prior all have
        prior = {key: value for key, value in build.method_arguments(config, data, network).items() if key in PRIOR}
        run = track(network, methods, likelihood=build.likelihood(config, data), **prior)
        run.register_buffer("seconds", torch.zeros(len(methods), dtype=torch.float64))  # in which each one observed
        keys = [_recorder_settings(each.config) for each in runs]
        return cls(run, list(run.watchers), [keys.index(key) for key in keys])

    def attach(self, tail: str | None = None) -> None:
        """Attaches the watchers of the head or of a tail. Snapshots are spread over the tail only."""
        chosen = []
        for i, watcher in enumerate(self.watchers):
            recorders = [each for each in watcher.recorders if isinstance(each, SnapshotRecorder)]
            spread = [each for each in recorders if each.snapshots.requested["start"] is None]
            for recorder in spread:
                recorder.snapshots.tail = 0.0
            mine = self.leader[i] == i and not (spread and tail is None)
            if mine and tail in (None, _tail_name(type(watcher))):
                chosen.append(watcher)
                self._time_observations(watcher, i)
        self.run.watchers = Watchers(chosen)

    def _time_observations(self, watcher: Posterior, i: int) -> None:
        """Sums the seconds of a watcher's observations, on a processor; a GPU is not synchronised for timing."""
        if watcher.device.type == "cuda":
            return

        def observe(optimizer: Optimizer) -> bool:
            start = time.perf_counter()
            stepped = type(watcher).observe(watcher, optimizer)
            self.run.get_buffer("seconds")[i] += time.perf_counter() - start
            return stepped

        watcher.__dict__["observe"] = observe

    def result(self, i: int) -> Posterior:
        """The i-th watcher with its observations."""
        watcher, leader = self.watchers[i], self.watchers[self.leader[i]]
        watcher.__dict__.pop("observe", None)
        if isinstance(watcher, RecordingPosterior) and isinstance(leader, RecordingPosterior) and watcher is not leader:
            watcher.recorder.load_state_dict(leader.recorder.state_dict())
        watcher.steps.copy_(self.run.steps)
        return watcher


def _train_branch(runs: Sequence[Run], waiting: Sequence[Run], tail: str, folder: Path, *, progress: bool) -> None:
    """Trains the head (or loads it), continues along one tail, and saves the posteriors of the waiting runs."""
    first, data = runs[0], runs[0].data
    training = first.config.training
    loader = first.loader(data.train, shuffle=True)
    head = min(max(1, round(training.get("branch_at", TAIL) * training["epochs"])), training["epochs"] - 1)
    network = build.network(first.config, data, folders=first.folders)
    methods = [build.constructor(run.config, build.method_arguments(run.config, data, network)) for run in runs]
    watched = WatchedRun.build(runs, network, methods)
    shared = watched.run.to(first.device)
    optimizer, scheduler = build.optimizer(shared, training)
    others = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
    settings: dict[str, Any] = {
        **{key: training[key] for key in ("clip", "precision", "engine") if key in training},
        "progress": f"{waiting[0].config.method}{others}" if progress else False,
        "draw": False,  # a draw at the end of the head would be discarded
        "optimizer": optimizer,
        "checkpoint_seconds": CHECKPOINT_SECONDS,
    }
    epochs: list[Epoch] = []

    def train_part(name: str, count: int, scheduler: LRScheduler | None) -> str | None:
        """Trains `count` more epochs; returns the engine that ran them."""
        done = len(epochs)

        def log(epoch: Epoch) -> None:
            for run in waiting:
                run.log(replace(epoch, epoch=done + epoch.epoch))

        how = {"checkpoint": folder / f"{name}.pt", "mesh": first.training_mesh, **settings}
        with keep_warnings([run.folder for run in waiting]):
            history = fit(shared, loader, epochs=count, scheduler=scheduler, callback=log, **how)
        epochs.extend(replace(epoch, epoch=done + epoch.epoch) for epoch in history.epochs)
        return history.engine

    watched.attach()
    train_part("head", head, scheduler)
    if tail == "constant" and optimizer is not None:
        for group in optimizer.param_groups:
            group["lr"] = training.get("tail_rate", training.get("tail_factor", FACTOR) * training.get("lr", 1e-3))
    watched.attach(tail)
    engine = train_part(tail, training["epochs"] - head, scheduler if tail == "decayed" else None)
    for i, run in enumerate(runs):
        if run not in waiting:
            continue
        posterior = watched.result(i)
        torch.manual_seed(run.config.seed)  # draws do not depend on how many methods drew before
        start = time.perf_counter()
        with keep_warnings([run.folder]):
            refresh(posterior, loader)
        drawing = time.perf_counter() - start
        run.save_results(posterior.eval(), epochs, engine=engine, **_seconds_alone(watched, runs, i, epochs, drawing))


def _seconds_alone(
    watched: WatchedRun, runs: Sequence[Run], index: int, epochs: Sequence[Epoch], drawing: float
) -> Settings:
    """Seconds that the method would have taken alone, including drawing its functions, and how they were computed."""
    total = sum(epoch.seconds for epoch in epochs) + drawing
    names = [run.config.method for run in runs]
    if watched.run.device.type == "cuda":
        return {"seconds": total, "counted": f"the whole shared run, watched by {', '.join(names)}"}
    seconds = watched.run.get_buffer("seconds").tolist()
    others = sum(s for i, s in enumerate(seconds) if i != watched.leader[index])
    how = f"a run shared by {', '.join(names)}: {total:.3f} s, less {others:.3f} s in which others observed"
    return {"seconds": total - others, "counted": how}


def _recorder_settings(config: RunConfig) -> tuple[str, Settings]:
    """The settings of a method's recorder, without settings that only affect drawing."""
    method = method_class(config.method, config.folder)
    if not issubclass(method, RecordingPosterior):
        return config.method, {}
    return method.name, {key: value for key, value in config.settings.items() if key not in method.draw_only_settings}


def _tail_name(method: type[Posterior]) -> str | None:
    """The tail for a method: recorders need weights that keep moving. None: the method cannot share a training."""
    if method.optimizers is not None:
        return None
    if issubclass(method, RecordingPosterior):
        return "constant"
    return "decayed" if issubclass(method, MAP | MCDropout | SamplingPosterior) else None


def _common_settings(config: RunConfig) -> list[Any]:
    """The settings that runs of one shared training have in common."""
    prior = {key: config.settings[key] for key in PRIOR if key in config.settings}
    return [config.seed, config.training, config.data, config.network, config.likelihood, prior]


def _check_shared(training: Settings) -> None:
    """Raises if [training] cannot be shared."""
    rules = {
        "two epochs or more, one for each part": training["epochs"] >= 2,
        "keep_best = false, since no epoch is the best for all methods": not training.get("keep_best", True),
        "no patience, since no epoch is the best for all methods": training.get("patience") is None,
        "an optimizer by name, since defaults differ between methods": training.get("optimizer") != "default",
        "tail_rate or tail_factor, not both": not {"tail_rate", "tail_factor"} <= training.keys(),
    }
    if broken := [rule for rule, kept in rules.items() if not kept]:
        raise ValueError(f"expected {broken[0]}, with training.together = true, got others; correct [training]")
