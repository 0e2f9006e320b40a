"""fit: one training loop for every posterior. It reads from top to bottom; copy it to write your own."""

import math
import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from dissensus.core import batch as batches
from dissensus.core.drawn_functions import DrawnFunctions
from dissensus.core.input_checks import check_loader
from dissensus.core.likelihood import log_prob_sum
from dissensus.core.locks import lock_for_training
from dissensus.core.posterior import Posterior, checked_prediction, expect_posterior, inference_context, refresh
from dissensus.core.trainable import Watchers
from dissensus.data.batches import as_loader
from dissensus.distributed.mesh import Mesh
from dissensus.distributed.partition import partition_training
from dissensus.distributed.preemption import Interruptions
from dissensus.distributed.single_process import TrainingPartition
from dissensus.distributed.work_split import exchange_results
from dissensus.engine import Step, build_step
from dissensus.engine.memory import Memory, training_memory
from dissensus.layers.reestimate_batch_norm import SmallBatchGuard
from dissensus.training import fit_checks
from dissensus.training.checkpoint import ResumedRun, checkpoint_exists, reset_rates, resume, write_checkpoint
from dissensus.training.curvature_rates import set_relative_rates
from dissensus.training.epochs import RunLength, can_keep_epoch, draw_for_validation
from dissensus.training.fit_checks import standardise_targets
from dissensus.training.history import Best, Epoch, History
from dissensus.training.partial_epoch import PartialEpoch
from dissensus.utils.checks import integer, number, one_of
from dissensus.utils.progress import Progress

TrainingPrecision = Literal["auto", "float32", "bf16"]


def fit(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    epochs: int,
    validation: Iterable[Any] | None = None,
    optimizer: Optimizer | None = None,
    scheduler: LRScheduler | None = None,
    clip: float | None = None,
    accumulate: int = 1,
    patience: int | None = None,
    precision: TrainingPrecision = "auto",
    engine: str = "auto",
    device: torch.device | str | None = None,
    callback: Callable[[Epoch], object] | None = None,
    progress: bool | str = True,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_seconds: float = 0.0,
    ranks: Literal["independent"] | None = None,
    mesh: Mesh | None = None,
    draw: bool = True,
    targets: Literal["standardised"] | None = None,
) -> History:
    """Trains a posterior in place and returns the history of the run.

    One optimiser trains all members; every member trains as it would alone, unless the method couples them. A network that
    a method does not copy, as in `MAP(network)`, trains as in a loop by hand: tensor hooks of its parameters
    (`register_hook`) change its gradients. Ensembles copy their networks, without these hooks. Afterwards
    the posterior is in eval mode. With validation data it is in the state of its best epoch; sampling methods have a
    stored draw.

    Args:
        posterior: a method wrapped around a network or networks.
        loader: any iterable of (x, y) or (x, y, weight), read once per epoch. x: a tensor, a tuple or a dict of tensors
            (B, ...); y: targets (B, ...); weight: (B,) example weights. Or the data (x, y) or (x, y, weight) themselves,
            tensors, arrays or DataFrames of N rows: batches of 32, shuffled every epoch.
        epochs: total number of passes over the loader, including those of a resumed checkpoint.
        validation: another loader, or data. After each epoch the mixture's negative log-likelihood on it decides which
            state is kept. TRADI is evaluated at up to ten epochs, by the functions it would sample; methods that collect a
            trajectory (SWAG, SWA, snapshots) keep the last state. Watchers do not change the choice, and record the whole run.
        optimizer: built on `posterior.parameters()` or `posterior.parameter_groups(lr)`; None uses the method's
            default with its schedule. Relative rates of that default (`NodeBNN.of_trained`) are measured on the first
            batch.
        scheduler: a torch scheduler of that optimizer, stepped once per epoch.
        clip: largest gradient norm of each member; None does not clip.
        accumulate: batches per optimiser step; their gradients are averaged.
        patience: epochs without a better validation score after which training stops; None never stops early.
        precision: "auto" is bf16 on GPUs that support it, else float32.
        engine: how members run: "auto", or words of loop, vectorised, streamed, compiled, captured joined by "+".
        device: device to train on; None is the GPU if there is one.
        callback: called with each `Epoch`; a true return value stops training.
        progress: whether to show progress, or a title to show with it.
        checkpoint: a file (with several processes a folder) written after each epoch; if it exists, training resumes from
            it, on any number of processes. At SIGTERM it is written after the current step, and the process ends; the
            resumed run continues within that epoch.
        checkpoint_seconds: least time in seconds between two writes; the last epoch is always written.
        ranks: "independent" makes every process of a distributed group train its own model; None trains one model with
            all processes.
        mesh: how processes divide members and batches (`ds.distributed.mesh`); None chooses if there are several. All
            processes must call `fit` with the same posterior and loader; `fit` divides the batches.
        draw: whether to store a draw at the end (`ds.refresh`).
        targets: "standardised" measures mean and standard deviation of a regression's targets, in an extra pass over the
            loader, and trains the network on (y − mean) / std; losses, predictions and metrics stay in the units of y.

    Returns:
        A `History`: one `Epoch` each, the index of the epoch kept, the engine used, and the expected memory.

    Raises:
        Diverged: a member's loss, gradient or weight is no longer finite; `.members` has the indices.
    """
    integer("epochs", epochs)
    integer("accumulate", accumulate, hint="1 steps after every batch")
    integer("patience", 0 if patience is None else patience, least=0)
    number("clip", 1.0 if clip in (None, math.inf) else clip, above=0, hint="None does not clip")
    number("checkpoint_seconds", 0.0 if checkpoint_seconds == math.inf else checkpoint_seconds)
    one_of("ranks", ranks, (None, "independent"))
    # Meanwhile, using the network in another thread raises.
    with lock_for_training(expect_posterior(posterior).particles.template.network), ExitStack() as processes:
        raw = posterior.inputs is not None
        loader, validation = as_loader(loader, shuffle=True, raw=raw), as_loader(validation, raw=raw)
        check_loader(loader, validation)
        posterior.ranks = ranks or posterior.ranks
        division = processes.enter_context(partition_training(posterior, mesh, loader))
        if one_of("targets", targets, (None, "standardised")) is not None:
            standardise_targets(posterior, division.complete_loader(loader))
        fit_checks.check_run(posterior, optimizer, scheduler, patience=patience, validation=validation)
        posterior.to(_training_device(device, posterior))
        division.begin()
        default = optimizer is None
        begun = checkpoint is not None and checkpoint_exists(Path(checkpoint), division)
        if optimizer is None:
            optimizer = posterior.default_optimizer()
            if not begun:
                complete, agreed = division.complete_loader(loader), division.broadcast_object
                set_relative_rates(posterior, optimizer, complete, agreed=agreed)
            scheduler = LambdaLR(optimizer, posterior.default_schedule(epochs))
        fit_checks.check_can_train(posterior, optimizer)
        fit_checks.log_remarks(posterior, optimizer, scheduler, epochs=epochs, batches=batches.count_batches(loader))

        history, best, told, part = ResumedRun(History(), Best(), {})
        if checkpoint is not None and begun:
            history, best, told, part = resume(Path(checkpoint), posterior, optimizer, scheduler, loader, division)
            if default and isinstance(scheduler, LambdaLR):
                reset_rates(optimizer, scheduler)
        fit_checks.check_schedule(scheduler, epochs - len(history))
        read = division.training_loader(loader)
        posterior.batches_per_step = accumulate * division.loader_count
        length = RunLength(posterior, loader, epochs=epochs, accumulate=accumulate, over=len(history), **told)
        steps = (length.batches or posterior.steps_per_epoch or 1) * epochs
        settings = {"clip": clip, "precision": _autocast_dtype(precision, posterior), "accumulate": accumulate}
        run = _TrainingRun(posterior, optimizer, division, engine, steps=steps, **settings)
        written, unwritten = -math.inf, False  # time of the last checkpoint, and whether there are unsaved changes
        bar = Progress(epochs, length.batches, title=posterior.name, show=progress)
        days = Interruptions(division.active_mesh, hears=checkpoint is not None)

        def write(best: Best, part: PartialEpoch | None = None) -> None:
            path = Path(checkpoint or "")
            write_checkpoint(path, posterior, optimizer, scheduler, history, best, loader, part, division=division)

        # The GPU is made the current device, because streams and graphs belong to that.
        with torch.cuda.device(posterior.device if posterior.device.type == "cuda" else -1), closing(run), bar, days:
            for index in range(len(history), epochs):
                judged = best.state is not None and can_keep_epoch(posterior, index - 1, epochs)
                if patience is not None and judged and index - 1 - best.epoch >= patience:
                    break
                posterior.train()
                division.begin_epoch(loader, index)
                if part is None:
                    part = PartialEpoch() if checkpoint is None else PartialEpoch.start_epoch(loader, posterior.device)
                losses = run.run_epoch(read, bar, part, days)  # (M,)
                if losses is None:
                    if posterior.steps_per_epoch is not None:
                        write(best, part)
                    days.terminate()
                seconds, part = part.seconds, None
                length.end_epoch()
                history.engine, history.memory = run.engine_name, run.memory
                lr = float(optimizer.param_groups[0]["lr"])
                score = None if validation is None else validation_nll(posterior, validation, None, division)
                drawn = None
                if validation is not None:
                    drawn = draw_for_validation(posterior, index, epochs, division.complete_loader(validation))
                sampled = None if drawn is None else validation_nll(posterior, validation or (), drawn, division)
                epoch = Epoch(index, float(losses.mean()), losses.tolist(), lr, seconds, score, sampled)
                history.epochs.append(epoch)
                if isinstance(scheduler, ReduceLROnPlateau):
                    scheduler.step(epoch.loss if score is None else score)
                elif scheduler is not None:
                    scheduler.step()
                judged, chosen = can_keep_epoch(posterior, index, epochs), epoch.selection_score
                if judged and chosen is not None and chosen < best.score:
                    own = [(k, v) for k, v in posterior.state_dict().items() if not k.startswith("watchers.")]
                    best = Best(chosen, index, {k: v.detach().clone() for k, v in own})
                    history.best = index
                bar.end_epoch(index, _epoch_line(epoch))
                unwritten = checkpoint is not None
                late = time.monotonic() - written >= checkpoint_seconds
                if checkpoint is not None and division.broadcast_object(late):
                    write(best)
                    written, unwritten = time.monotonic(), False
                if callback is not None and division.broadcast_object(callback(epoch)):
                    break
            if checkpoint is not None and unwritten:
                write(best)

        if best.state is not None:
            watchers, posterior.watchers = posterior.watchers, Watchers()  # whose records are those of the whole run
            posterior.load_state_dict(best.state)
            posterior.watchers = watchers
        if draw:
            start = time.perf_counter()
            refresh(posterior, division.complete_loader(loader))
            history.drawing = time.perf_counter() - start
        posterior.eval()
        for each in (posterior, *posterior.watchers):
            each.mesh = division.mesh  # processes that trained together also predict together
        return history


class _TrainingRun:
    """Runs the epochs of a training run; the training step is built at the first batch."""

    def __init__(
        self, posterior: Posterior, optimizer: Optimizer, division: TrainingPartition, engine: str, **settings: Any
    ) -> None:
        self.posterior, self.optimizer, self.division = posterior, optimizer, division
        self.engine = division.choose_engine(engine)
        self.settings = settings
        self.step: Step | None = None
        self.memory: Memory | None = None
        self.engine_name: str | None = None  # how members ran in the last epoch, after fallbacks

    def run_epoch(self, loader: Iterable[Any], bar: Progress, part: PartialEpoch, days: Interruptions) -> Tensor | None:
        """(M,) mean losses over the loader's batches, on the host; None if the epoch was interrupted (see `part`)."""
        posterior, start = self.posterior, time.perf_counter() - part.seconds
        total, first, left = part.total, part.batches, False
        # trained, or unknown
        counted = posterior.prior is not None or first > 0 or self.division.active_mesh is not None
        with ExitStack() as divided:
            for given in posterior.read(part.remaining_batches(loader, posterior.device, bar)):
                if given.size == 0:
                    raise ValueError("expected batches with examples, got an empty one; remove it from the loader")
                counted = counted or given.weight is None or bool(given.weight.any())
                batch = posterior.prepare_batch(given)
                posterior.before_step(batch)
                if part.batches == first:  # not before: the first member's first batch may set things up for all
                    divided.enter_context(self.division.local_state(self.optimizer, batch))
                    total = None if total is None else total[self.division.member_slice].clone()
                rows = self.division.take_local_rows(batch)
                with SmallBatchGuard(batch.x):
                    step = self.step or self._build_step(rows)
                    losses = step(rows)
                total = losses.clone() if total is None else total.add_(losses)
                part.batches += 1
                part.examples += posterior.particles.exchange.batch_rows(rows.size)[0]  # of the whole batch
                bar.step()
                if left := days.should_stop() and part.batches % self.settings["accumulate"] == 0:
                    break
            if total is None:
                hint = "is it empty, or a generator that was read before?"
                raise ValueError(f"expected at least one batch from the loader, got none; {hint}")
            if self.step is not None and part.batches > first:
                self.step.finish()
                self.step.check()
                total = self.division.gather_losses(total)
        part.total, part.seconds = total, time.perf_counter() - start
        if left:
            return None
        if not counted:
            raise ValueError("expected a weight above 0 in an epoch, got none; pass other weights, or leave them out")
        self.engine_name = self.engine_name if self.step is None else self.step.engine_name
        fit_checks.warn_of_data_size(posterior, part.examples)
        return (total / part.batches).double().cpu()

    def _build_step(self, batch: batches.Batch) -> Step:
        precision = self.settings["precision"]
        memory = training_memory(self.posterior, self.optimizer, batch, precision=precision)
        self.step, plan = build_step(self.engine, self.posterior, self.optimizer, batch, memory=memory, **self.settings)
        self.memory = replace(memory, taken=plan.taken)
        return self.step

    def close(self) -> None:
        self.posterior.eval()  # also when interrupted
        if self.step is not None:
            self.step.close()


def validation_nll(
    posterior: Posterior,
    loader: Iterable[Any],
    drawn: DrawnFunctions | None = None,
    division: TrainingPartition | None = None,
) -> float:
    """Mean negative log-likelihood of the mixture over a loader, with one draw, by default `current()`.

    With a division, each process evaluates some of the batches.
    """
    division = division or TrainingPartition()

    def sums() -> tuple[float, float]:
        total, count = 0.0, 0.0
        with inference_context(posterior):
            functions = posterior.current() if drawn is None else drawn
            for given in division.assigned_batches(posterior.read(division.complete_loader(loader), anywhere=True)):
                x, y, weight = posterior.prepare_batch(given)
                predictive = checked_prediction(posterior, functions.predict(x))
                found, counted = log_prob_sum(posterior.likelihood, predictive, y, weight)
                total, count = total + float(found), count + float(counted)
        return total, count

    # An error of one process, at its batches, is one of all: the others would wait for its sums.
    mesh = division.active_mesh
    everyone = [sums()] if mesh is None else exchange_results(mesh, sums, "validation scores")
    total, count = (math.fsum(each) for each in zip(*everyone, strict=True))
    if not count:
        raise ValueError("expected at least one example to validate on, got none; pass a loader with data")
    return -total / count


def _training_device(device: torch.device | str | None, posterior: Posterior) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda") if torch.cuda.is_available() and posterior.device.type == "cpu" else posterior.device


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
