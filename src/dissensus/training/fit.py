"""fit: one training loop for every posterior. It reads from top to bottom; copy it to write your own."""

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dissensus.core.batch import Batch, SmallBatchGuard
from dissensus.core.gradients import check_trainable
from dissensus.core.likelihood import RealTargets
from dissensus.core.member_runner import lock_for_training
from dissensus.core.posterior import Posterior, expect_posterior
from dissensus.distributed.interruptions import Interruptions
from dissensus.distributed.mesh import Mesh
from dissensus.distributed.partition import TrainingPartition, partition_training
from dissensus.engine import AdaptiveStep, build_step
from dissensus.engine.break_even import begin_plainly
from dissensus.engine.loader import Loader
from dissensus.engine.memory import training_memory
from dissensus.engine.training_step import autocast
from dissensus.numerics.randomness import generator_states
from dissensus.training.checkpoint import Checkpoints, RunSoFar, checkpoint_exists
from dissensus.training.history import Epoch, History, PartialEpoch, TrainingStep
from dissensus.training.optimisation import Optimisation
from dissensus.training.validation import Validation
from dissensus.utils.checks import available_device, integer, number, one_of, suggest_keywords
from dissensus.utils.parameter_groups import check_rates
from dissensus.utils.progress import Progress

log = logging.getLogger("dissensus")

TrainingPrecision = Literal["auto", "float32", "bf16"]
Callback = Callable[[Epoch], object]
StepCallback = Callable[[TrainingStep], object]
_warned: WeakSet[Posterior] = WeakSet()  # of their data_size


@suggest_keywords
def fit(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    epochs: int,
    validation: Iterable[Any] | None = None,
    lr: float | None = None,
    optimizer: Optimizer | None = None,
    scheduler: LRScheduler | None = None,
    clip: float | None = None,
    accumulate: int = 1,
    patience: int | None = None,
    precision: TrainingPrecision = "auto",
    engine: str = "auto",
    device: torch.device | str | None = None,
    callback: Callback | Sequence[Callback] | None = None,
    on_step: StepCallback | Sequence[StepCallback] | None = None,
    progress: bool | str = True,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_seconds: float = 0.0,
    mesh: Mesh | Literal["independent"] | None = None,
    draw: bool = True,
    targets: Literal["standardised"] | None = None,
) -> History:
    """Trains a posterior in place and returns the history of the run.

    One optimiser trains all members, each as it would train alone, unless the method couples them. Hooks on parameters
    (`register_hook`) act where the network is not copied, as in `MAP(network)`. Afterwards the posterior is in eval mode, with
    validation data in the state of its best epoch; sampling methods have a stored draw.

    Args:
        posterior: a method wrapped around a network or networks.
        loader: any iterable of (x, y) or (x, y, weight). x: a tensor, a tuple or a dict of tensors (B, ...); y: targets
            (B, ...); weight: (B,) example weights. Or such data of N rows, or arrays or DataFrames: shuffled batches of 32.
        epochs: total number of passes over the loader, including those of a resumed checkpoint.
        validation: another loader, or data. The mixture's negative log-likelihood on it decides which epoch's state is kept.
            TRADI is evaluated at up to ten epochs, by the functions it would sample; methods that collect a trajectory (SWAG,
            SWA, snapshots) keep the last state. Watchers record the whole run.
        lr: learning rate of the weights in the default optimizer; None is the method's.
        optimizer: built on `posterior.parameters()` or `posterior.parameter_groups(lr)`; None is the method's default with
            its schedule. Relative rates (`NodeBNN.of_trained`) are measured on the first batch.
        scheduler: a torch scheduler of that optimizer, stepped once per epoch.
        clip: largest gradient norm of each member; None does not clip.
        accumulate: batches per optimiser step; their gradients are averaged.
        patience: epochs without a better validation score after which training stops; None never stops early.
        precision: "auto" is bf16 on GPUs that support it, else float32.
        engine: how members run: "auto" (plainly, and faster once that pays), or words of loop, vectorised, streamed,
            compiled, captured joined by "+".
        device: device to train on; None is the GPU if there is one.
        callback: a function or a list of them (`integrations.loggers`), called with each `Epoch`; true stops training.
        on_step: the same for each `TrainingStep` of the optimiser. A GPU is waited for only if a value is read.
        progress: whether to show progress, or a title to show with it.
        checkpoint: a file, or for several processes a folder, written after each epoch, and at SIGTERM after the current step.
            If it exists, training resumes from it, on any number of processes, also within an epoch.
        checkpoint_seconds: least time in seconds between two writes; the last epoch is always written.
        mesh: how processes divide members and batches (`ds.distributed.mesh`); None chooses if there are several. All must
            call `fit` with the same posterior and loader. "independent" trains one model in each process.
        draw: whether to store a draw at the end (`ds.refresh`).
        targets: "standardised" measures mean and standard deviation of a regression's targets, in an extra pass over the
            loader, and trains the network on (y − mean) / std; losses, predictions and metrics stay in the units of y. A
            posterior keeps what its first run measured: targets on another scale need a new one.

    Returns:
        A `History`: one `Epoch` each, the epoch kept, the engine used, and the expected memory.

    Raises:
        Diverged: a member's loss, gradient or weight is no longer finite; `.members` has the indices.
    """
    check_arguments(epochs, accumulate, patience, clip, checkpoint_seconds, mesh, targets)
    # Meanwhile, using the network in another thread raises.
    with lock_for_training(expect_posterior(posterior).particles.template.network), ExitStack() as processes:
        data = Loader.for_posterior(loader, posterior, shuffle=True)
        division = processes.enter_context(partition_training(posterior, mesh, data))
        check_run(posterior, lr, optimizer, scheduler, patience=patience, validation=validation)
        if targets is not None:
            standardise_targets(posterior, division.complete_loader(data))
        _move_to_device(posterior, device)
        division.begin()
        resumes = checkpoint_exists(checkpoint, division)
        plan = Optimisation(posterior, optimizer, scheduler, division, lr=lr, epochs=epochs, resumes=resumes)
        store = Checkpoints(checkpoint, posterior, plan.optimizer, plan.scheduler, division, checkpoint_seconds)
        so_far = store.resume() if resumes else RunSoFar()
        history, choice = so_far.history, Validation(posterior, validation, division, so_far.best, epochs, patience)
        plan.set_rates(epochs - len(history))
        run = Trainer(plan, division, so_far, epochs, patience, accumulate, clip, precision, engine, callback, on_step)
        bar = Progress(epochs, data.length, title=posterior.name, show=progress)
        place = f"at epoch {len(history) + 1}" if len(history) < epochs else "after the last epoch"
        bar.note(f"resumed {place} of {epochs}" if resumes else "")
        with run, bar, Interruptions(division.active_mesh, resumable=checkpoint is not None) as interruptions:
            for index in choice.remaining_epochs(len(history) + 1):
                epoch = run.train_epoch(index, bar, interruptions)
                if epoch is None:
                    store.write(history, choice.best, run.part)
                    interruptions.terminate()
                choice.add_epoch(epoch, history)
                plan.end_epoch(epoch)
                bar.end_epoch(index, _epoch_line(epoch))
                store.end_epoch(history, choice.best)
                if run.call_back(epoch):
                    break
            store.end_run(history, choice.best)
        choice.restore_best()
        history.drawing = _store_draw(posterior, division.complete_loader(data)) if draw else history.drawing
        bar.note(plan.remark_on_loss(history, epochs), posterior.eval().extra_repr())
        return history


class Trainer:
    """Trains epoch by epoch; builds the training step at the first batch. Inside, the posterior's GPU is the current one."""

    def __init__(
        self,
        plan: Optimisation,
        division: TrainingPartition,
        so_far: RunSoFar,
        epochs: int,
        patience: int | None,
        accumulate: int,
        clip: float | None,
        precision: TrainingPrecision,
        engine: str,
        callback: Callback | Sequence[Callback] | None,
        on_step: StepCallback | Sequence[StepCallback] | None,
    ) -> None:
        self.may_stop_early = patience is not None
        self.callbacks, self.on_step = _functions(callback), _functions(on_step)
        self.unreported = list[Tensor]()  # losses of the batches since the last step
        self.posterior, self.plan, self.loader, self.division = plan.posterior, plan, division.loader, division
        self.history, self.part = so_far.history, so_far.part
        plan.posterior.batches_per_step = accumulate * division.loader_count
        self.engine, self.epochs, self.accumulate = division.choose_engine(engine), epochs, accumulate
        self._begin(so_far.told)
        dtype = _autocast_dtype(precision, plan.posterior)
        self.mixed, self._inside = partial(autocast, plan.posterior.device, dtype), ExitStack()
        self.settings: dict[str, Any] = {"clip": clip, "accumulate": accumulate, "precision": dtype}
        self.step: AdaptiveStep | None = None

    def _begin(self, told: dict[str, Any]) -> None:
        """Tells the posterior the length of the run, in steps if it is known; `told`: what a checkpoint knows of it."""
        posterior, self.length_is_unknown = self.posterior, False
        self.done, steps_per_epoch = told.get("done") or 0, told.get("steps_per_epoch")
        self.first_step = self.steps = int(posterior.steps)  # of the epochs that follow
        if (batches := self.loader.length) is not None:
            steps_per_epoch = max(1, math.ceil(batches / self.accumulate))
        if steps_per_epoch is not None:
            posterior.begin(steps_per_epoch, self.epochs, done=self.done)
        elif len(self.history) < self.epochs:
            posterior.begin(None, self.epochs)
            self.length_is_unknown = posterior.steps_per_epoch is None  # else the caller has already called `begin`

    def __enter__(self) -> Self:
        device = self.posterior.device  # the current one, because streams and graphs belong to that
        self._inside.enter_context(torch.cuda.device(device if device.type == "cuda" else -1))
        self._inside.enter_context(begin_plainly(self.engine))
        return self

    def __exit__(self, *_: object) -> None:
        self.posterior.eval()  # also when interrupted
        if self.step is not None:
            self.step.close()
        self._inside.close()

    def train_epoch(self, index: int, bar: Progress, interruptions: Interruptions) -> Epoch | None:
        """The epoch of this number, trained; None if it was interrupted after the batches of `part`."""
        self.posterior.train()
        if self.part is None:
            begun = (*generator_states(self.posterior.device), self.loader.state()) if interruptions.resumable else ()
            self.part = PartialEpoch(*begun)
        batches = self.division.training_batches(index - 1)
        losses, lr = self.run_epoch(batches, self.part, bar, interruptions), self.plan.lr
        if losses is None:
            return None
        seconds, self.part = self.part.seconds, None
        if self.length_is_unknown:  # this epoch has shown it
            self.length_is_unknown, trained = False, int(self.posterior.steps) - self.first_step
            self.posterior.begin(max(1, trained), self.epochs, done=trained + self.done)
        return Epoch(index, float(losses.mean()), losses.tolist(), lr, seconds)

    def run_epoch(
        self, batches: Iterable[Any], part: PartialEpoch, bar: Progress, interruptions: Interruptions
    ) -> Tensor | None:
        """(M,) mean losses over the batches, on the host; None if the epoch was interrupted (see `part`)."""
        posterior, start = self.posterior, time.perf_counter() - part.seconds
        total, first, left = part.total, part.batches, False
        # trained, or unknown
        counted = posterior.prior is not None or first > 0 or self.division.is_shared
        with ExitStack() as divided:
            for given in posterior.read(part.remaining_batches(batches, posterior.device, bar)):
                if given.size == 0:
                    raise ValueError("expected batches with examples, got an empty one; remove it from the loader")
                counted = counted or given.weight is None or bool(given.weight.any())
                with self.mixed():  # a first batch is tried: else with kernels that training does not load
                    batch = posterior.prepare_batch(given)
                posterior.before_step(batch)
                if part.batches == first:  # not before: the first member's first batch may set things up for all
                    divided.enter_context(self.division.local_state(self.plan.optimizer, batch))
                    total = None if total is None else total[self.division.member_slice].clone()
                rows = posterior.particles.exchange.take_rows(batch)
                with SmallBatchGuard(batch.x):
                    step = self.step or self._build_step(rows)
                    losses = step.run(rows)
                total = losses.clone() if total is None else total.add_(losses)
                part.batches += 1
                self.report_step(losses)
                part.examples += posterior.particles.exchange.batch_rows(rows.size)[0]  # of the whole batch
                bar.step()
                if left := interruptions.should_stop() and part.batches % self.accumulate == 0:
                    break
            if total is None:
                hint = "is it empty, or a generator that was read before?"
                raise ValueError(f"expected at least one batch from the loader, got none; {hint}")
            if self.step is not None and part.batches > first:
                self.step.finish()
                self.report_step(None)
                self.step.check()
                total = self.division.gather_losses(total)
        part.total, part.seconds = total, time.perf_counter() - start
        if left:
            return None
        if not counted:
            raise ValueError("expected a weight above 0 in an epoch, got none; pass other weights, or leave them out")
        self.note_engine()
        warn_of_data_size(posterior, part.examples)
        return (total / part.batches).double().cpu()

    def call_back(self, epoch: Epoch) -> bool:
        """Calls the callbacks; whether one of them, on the first process, wants to stop."""
        found = [bool(each(epoch)) for each in self.callbacks]
        return bool(found and self.division.broadcast_object(any(found)))

    def report_step(self, losses: Tensor | None) -> None:
        """Calls `on_step` if the optimiser has stepped; losses: (M,) of the last batch, or None at the end of an epoch."""
        if not self.on_step:
            return
        if losses is not None:
            self.unreported.append(losses.detach().clone())  # a captured step will overwrite them
        if self.unreported and (losses is None or len(self.unreported) == self.accumulate):
            self.steps, losses = self.steps + 1, torch.stack(self.unreported).mean(0)
            self.unreported.clear()
            step = TrainingStep(self.steps, losses, self.plan.optimizer.param_groups[0]["lr"])
            for each in self.on_step:
                each(step)

    def note_engine(self) -> None:
        """Writes to the history how members run, and what memory was measured."""
        if self.step is None:
            return
        self.history.engine = self.step.engine_name
        if self.history.memory is not None and self.step.taken.alive:
            self.history.memory = replace(self.history.memory, taken=self.step.taken)

    def _build_step(self, batch: Batch) -> AdaptiveStep:
        posterior, optimizer, length = self.posterior, self.plan.optimizer, self.loader.length
        memory = training_memory(posterior, optimizer, batch, precision=self.settings["precision"])
        count = None
        if length is not None and not self.may_stop_early:
            count = length * (self.epochs - len(self.history)) - (0 if self.part is None else self.part.batches)
        self.step = build_step(self.engine, posterior, optimizer, batch, count=count, memory=memory, **self.settings)
        self.history.memory = memory
        return self.step


def _functions(given: Any) -> list[Callable[[Any], object]]:
    """A callback, a list of them, or None, as a list."""
    found = [each for each in (given if isinstance(given, Sequence) else (given,)) if each is not None]
    if unfit := [each for each in found if not callable(each)]:
        raise TypeError(f"expected functions as callback and on_step, got {unfit[0]!r}; pass one or a list of them")
    return found


def refresh(posterior: Posterior, loader: Iterable[Any]) -> None:
    """Draws the functions of a sampling method, re-estimates their batch statistics, and stores both.

    Until the next refresh, `draw()` returns these functions, also after saving and loading. Methods that store their
    members are not changed. Watchers that are ready are refreshed, too. `fit` calls this at its end; your own loop should.

    Args:
        posterior: any.
        loader: the training batches (x, y).
    """
    loader = Loader.complete(loader, posterior)
    for each in [posterior, *(watcher for watcher in posterior.watchers if watcher.ready)]:
        each.store_draw(loader)


def _store_draw(posterior: Posterior, loader: Loader) -> float:
    """Draws and stores functions; returns the seconds it took."""
    start = time.perf_counter()
    if posterior.ready:  # after too few steps for a record the weights are trained all the same; predictions say it
        refresh(posterior, loader)
    return time.perf_counter() - start


def _move_to_device(posterior: Posterior, device: torch.device | str | None) -> None:
    """Moves the posterior to this device, or to the GPU, if something of it is elsewhere: torch takes long to see it."""
    gpu = torch.cuda.is_available() and posterior.device.type == "cpu"
    wanted = available_device(device) if device is not None else torch.device("cuda") if gpu else posterior.device
    if any(tensor.device != wanted for tensor in (*posterior.parameters(), *posterior.buffers())):
        posterior.to(wanted)


def _autocast_dtype(precision: TrainingPrecision, posterior: Posterior) -> torch.dtype | None:
    """The autocast dtype, or None for the parameters' own dtype."""
    one_of("precision", precision, ("auto", "float32", "bf16"))
    if precision == "bf16":
        return torch.bfloat16
    if precision == "float32" or posterior.device.type != "cuda":
        return None
    single = all(p.dtype == torch.float32 for p in posterior.parameters())
    return torch.bfloat16 if single and torch.cuda.is_bf16_supported() else None


def _epoch_line(epoch: Epoch) -> str:
    scores = {"loss": epoch.loss, "validation": epoch.validation, "sampled": epoch.look}
    text = "  ".join(f"{name} {value:.4f}" for name, value in scores.items() if value is not None)
    return f"{text}  {epoch.seconds:.1f} s"


def check_arguments(
    epochs: Any, accumulate: Any, patience: Any, clip: Any, checkpoint_seconds: Any, mesh: Any, targets: Any
) -> None:
    """Raises if one of `fit`'s numbers or words is none that it can use."""
    integer("epochs", epochs)
    integer("accumulate", accumulate, hint="1 steps after every batch")
    integer("patience", 0 if patience is None else patience, least=0)
    number("clip", 1.0 if clip in (None, math.inf) else clip, above=0, hint="None does not clip")
    number("checkpoint_seconds", 0.0 if checkpoint_seconds == math.inf else checkpoint_seconds)
    one_of("mesh", mesh if isinstance(mesh, str) else None, (None, "independent"))
    one_of("targets", targets, (None, "standardised"))


def check_run(
    posterior: Posterior, lr: Any, optimizer: object, scheduler: object, *, patience: int | None, validation: object
) -> None:
    """Raises if nothing would be trained, or if arguments conflict; otherwise some of it would fail after an epoch."""
    check_trainable(posterior)
    check_rates(optimizer)
    number("lr", 1.0 if lr is None else lr, above=0)
    if lr is not None and (optimizer or getattr(posterior, "lr", None)) is not None:
        got = f"lr={lr:g} and that of {type(optimizer or posterior).__name__}"
        raise ValueError(f"expected one learning rate, got {got}; leave lr out of fit, and set it there")
    if posterior.particles.fully_sharded and posterior.prior is not None:
        got = type(posterior.prior).__name__
        raise NotImplementedError(f"expected no prior with fully_shard, got {got}; use the optimizer's weight_decay")
    if scheduler is not None and optimizer is None:
        raise ValueError("expected an optimizer with the scheduler, got none; pass both")
    if scheduler is not None and (isinstance(scheduler, type) or not hasattr(scheduler, "step")):
        raise TypeError(f"expected a scheduler, got {scheduler!r}; build one on the optimizer")
    if patience is not None and posterior.judged_by is None:
        hint = "it collects weights over the whole run: leave patience out"
        raise ValueError(f"expected no patience for {type(posterior).__name__}, got {patience}; {hint}")
    if patience is not None and validation is None:
        raise ValueError("expected validation data with patience, got none; pass validation=")


def warn_of_data_size(posterior: Posterior, examples: int) -> None:
    """Warns once if an epoch has less than half or more than twice `data_size` examples."""
    told = posterior.data_size
    if told is None or examples == 0 or 0.5 <= told / examples <= 2 or posterior in _warned:
        return
    _warned.add(posterior)
    log.warning(
        "data_size is %g, but an epoch has %d examples: prior and KL weigh %.3g times as much as with data_size=%d; ignore "
        "this if the loader yields only part of the data",
        told, examples, examples / told, examples,
    )  # fmt: skip


def standardise_targets(posterior: Posterior, loader: Loader) -> None:
    """Measures mean and standard deviation of each target in one pass and sets them in the likelihood, unless it has them.

    The network's outputs are then standardised; losses, predictions and intervals are in the units of the targets.
    """
    particles = posterior.particles
    likelihoods = [template.likelihood for template in particles.templates]
    if not all(isinstance(each, RealTargets) for each in likelihoods):
        got = type(particles.likelihood).__name__
        raise TypeError(f"expected a regression for standardised targets, got {got}; leave targets out")
    if particles.likelihood.targets is not None:
        return
    if int(posterior.steps):
        what = "one that was trained on targets that are not standardised"
        raise ValueError(f"expected an untrained posterior, got {what}; build a new one, or leave targets out")
    loader.check_rereadable()
    measured = _mean_and_std(batch.y for batch in posterior.read(loader))
    for each in likelihoods:
        each.set_target_scale(measured)


def _mean_and_std(parts: Iterable[Tensor]) -> dict[str, Tensor]:
    """{"mean", "std"} of columns, each (D,), with divisor N; a column that never varies has std 1."""
    count, mean, scatter = 0, torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for y in parts:
        rows = (y if y.ndim > 1 else y[:, None]).detach().double().cpu().flatten(0, -2)  # (n, D)
        if not len(rows):
            continue
        # Chan, Golub & LeVeque 1979: no loss of digits for large means.
        total, shift = count + len(rows), rows.mean(0) - mean
        scatter = scatter + (rows - rows.mean(0)).square().sum(0) + shift**2 * (count * len(rows) / total)
        mean, count = mean + shift * (len(rows) / total), total
    if not count:
        raise ValueError("expected targets to standardise, got an empty loader; pass the training data")
    std = (scatter / count).sqrt()
    return {"mean": mean, "std": torch.where(std > 1e-12 * (1 + mean.abs()), std, 1.0)}
