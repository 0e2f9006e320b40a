"""The optimiser of a run and its schedule: those given, or the method's default ones, with rates measured where needed."""

import logging
from typing import cast

from torch.optim import LBFGS, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from dissensus.core.posterior import Posterior
from dissensus.distributed.partition import TrainingPartition
from dissensus.landscape.sharpness import sharpness_on_batch
from dissensus.methods.embedded_ensembles import gamma_note
from dissensus.numerics.randomness import preserve_random_state
from dissensus.training.history import Epoch, History
from dissensus.utils.parameter_groups import check_optimizer, decay_warnings, mixing_warnings
from dissensus.utils.torch_private import INNER_SCHEDULERS

log = logging.getLogger("dissensus")


class Optimisation:
    """An optimiser, and a schedule that steps once per epoch. `resumes`: whether a checkpoint has their states."""

    def __init__(
        self,
        posterior: Posterior,
        optimizer: Optimizer | None,
        scheduler: LRScheduler | None,
        division: TrainingPartition,
        *,
        lr: float | None,
        epochs: int,
        resumes: bool,
    ) -> None:
        self.is_default, self.lr_given, self.posterior = optimizer is None, lr is not None, posterior
        if optimizer is None:
            optimizer = posterior.default_optimizer()
            usual = optimizer.param_groups[0]["lr"]
            for group in optimizer.param_groups if lr is not None else ():
                group["lr"] = lr if group["lr"] == usual else group["lr"]  # learned noise has its own
            if not resumes:
                set_relative_rates(posterior, optimizer, division)
            scheduler = LambdaLR(optimizer, posterior.default_schedule(epochs))
        self.optimizer, self.scheduler = optimizer, scheduler
        check_can_train(posterior, optimizer)
        log_remarks(posterior, optimizer, scheduler, epochs=epochs, batches=division.loader.length)
        for mistake in () if self.is_default else decay_warnings(optimizer, posterior.groups()):
            log.warning("%s", mistake)

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def set_rates(self, epochs: int) -> None:
        """Sets the default schedule's rates, since a resumed run may be longer now; `epochs`: how many are left."""
        if self.is_default:
            default, groups = cast(LambdaLR, self.scheduler), self.optimizer.param_groups
            for group, rate, factor in zip(groups, default.base_lrs, default.lr_lambdas, strict=True):
                group["lr"] = rate * factor(default.last_epoch)
        schedule = self.scheduler
        if isinstance(schedule, OneCycleLR) and (needed := schedule.last_epoch + epochs) > schedule.total_steps:
            wanted = f"a OneCycleLR of at least {needed} steps, one per epoch"  # torch would raise in mid-training
            raise ValueError(f"expected {wanted}, got {schedule.total_steps}; set total_steps")

    def remark_on_loss(self, history: History, epochs: int) -> str:
        """A remark if the last of all epochs brought 5 % of the whole fall of the loss, and 2 % of what is left; else ""."""
        if len(history) < max(epochs, 3) or self.posterior.judged_by is None or history.best not in (None, history[-1]):
            return ""  # stopped early, or snapshots of a rate that goes up and down
        first, before, last = (history[i].loss for i in (0, -2, -1))
        if before - last < max(0.05 * (first - last), 0.02 * abs(last)):
            return ""
        usual = self.is_default and not self.lr_given and isinstance(self.optimizer, AdamW)
        higher = f", or lr={3 * self.optimizer.param_groups[0]['initial_lr']:.2g}" if usual else ""
        return f"the loss still falls, {before:.4g} in epoch {epochs - 1} and {last:.4g} in {epochs}: try more epochs{higher}"

    def end_epoch(self, epoch: Epoch) -> None:
        """Steps the schedule."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(epoch.loss if epoch.validation is None else epoch.validation)
        elif self.scheduler is not None:
            self.scheduler.step()


def set_relative_rates(posterior: Posterior, optimizer: Optimizer, division: TrainingPartition) -> None:
    """Multiplies the rates of an optimiser with `relative` groups by one number, at which the sharpness is 1 − momentum.

    Nobody knows the curvature at trained weights. It is measured on the loader's first batch, which is read in a pass of its
    own; loader and random streams are left as found.
    """
    groups = optimizer.param_groups
    if not any(group.get("relative") for group in groups):
        return
    loader = division.complete_loader(division.loader)
    with preserve_random_state(posterior.device):
        state = loader.state()
        loader.check_rereadable(", or an optimizer")  # to measure a rate
        first = next(iter(posterior.read(loader)), None)
        loader.restore(state)
    if first is None:  # fit says so
        return
    found = division.broadcast_object(sharpness_on_batch(posterior, optimizer, posterior.prepare_batch(first)))
    if not found > 0:
        hint = "look for inputs or weights that are not finite, or pass an optimizer"
        raise ValueError(f"expected a loss with a finite curvature on the first batch, got {found}; {hint}")
    momentum = max(group.get("momentum", 0.0) for group in groups)
    for group in groups:
        group["lr"] *= (1 - momentum) / found
        del group["relative"]
    log.info("rate %.2g, from the curvature of the first batch", groups[0]["lr"])


def check_can_train(posterior: Posterior, optimizer: Optimizer) -> None:
    """Raises if no parameter is trainable, or if this optimiser cannot train the posterior."""
    if not any(parameter.requires_grad for parameter in posterior.parameters()):
        hint = "set requires_grad (a posterior that was saved frozen is loaded frozen)"
        raise ValueError(f"expected a posterior with trainable parameters, got only frozen ones; {hint}")
    check_optimizer(posterior, optimizer)
    if isinstance(optimizer, LBFGS):  # it needs the loss several times per step
        raise TypeError("expected an optimizer with one gradient per step, got LBFGS; use SGD or Adam")


def log_remarks(
    posterior: Posterior, optimizer: Optimizer, scheduler: LRScheduler | None, *, epochs: int, batches: int | None
) -> None:
    """Logs the posterior's remarks on the optimiser, and warns about a schedule planned in batches instead of epochs."""
    if scheduler is not None and (length := _length_in_batches(scheduler, epochs, batches)) is not None:
        text = "%s was built for %d steps, but fit steps it once per epoch, %d times; plan it in epochs"
        log.warning(text, type(scheduler).__name__, length, epochs)
    if (word := gamma_note(posterior, optimizer)) is not None:
        log.info("%s", word)
    for mistake in mixing_warnings(optimizer, posterior.particles.own_parameters().values()):
        log.warning("%s", mistake)


def _length_in_batches(scheduler: LRScheduler, epochs: int, batches: int | None) -> int | None:
    """The length of a schedule that seems to count batches, not epochs, judged by its length; else None."""
    within = getattr(scheduler, INNER_SCHEDULERS, [])
    lengths = [getattr(scheduler, name, None) for name in ("total_steps", "T_max", "total_iters")]
    whole = [each for each in lengths if isinstance(each, int) and each > epochs]
    # A length equal to the number of batches is no coincidence; a cycle of another length is a mistake in any case.
    found = [each for each in whole if isinstance(scheduler, OneCycleLR) or each == epochs * (batches or 0)]
    inner = (_length_in_batches(each, epochs, batches) for each in within)
    return next(iter([*found, *(each for each in inner if each is not None)]), None)
