"""The optimiser of a run and its schedule: those given, or the method's default ones, with rates measured where needed."""

import logging
from typing import cast

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from dissensus.core.loader import Loader
from dissensus.core.posterior import Posterior
from dissensus.distributed.single_process import TrainingPartition
from dissensus.landscape.sharpness import sharpness_on_batch
from dissensus.numerics.randomness import preserve_random_state
from dissensus.training import fit_checks
from dissensus.training.history import Epoch

log = logging.getLogger("dissensus")


class Optimisation:
    """An optimiser, and a schedule that steps once per epoch. `resumes`: whether a checkpoint has their states."""

    def __init__(
        self,
        posterior: Posterior,
        optimizer: Optimizer | None,
        scheduler: LRScheduler | None,
        loader: Loader,
        division: TrainingPartition,
        *,
        epochs: int,
        resumes: bool,
    ) -> None:
        self.is_default = optimizer is None
        if optimizer is None:
            optimizer = posterior.default_optimizer()
            if not resumes:
                set_relative_rates(posterior, optimizer, loader, division)
            scheduler = LambdaLR(optimizer, posterior.default_schedule(epochs))
        self.optimizer, self.scheduler = optimizer, scheduler
        fit_checks.check_can_train(posterior, optimizer)
        fit_checks.log_remarks(posterior, optimizer, scheduler, epochs=epochs, batches=loader.length)

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def set_rates(self, epochs: int) -> None:
        """Sets the default schedule's rates, since a resumed run may be longer now; `epochs`: how many are left."""
        if self.is_default:
            schedule = cast(LambdaLR, self.scheduler)
            groups = self.optimizer.param_groups
            for group, rate, factor in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
                group["lr"] = rate * factor(schedule.last_epoch)
        fit_checks.check_schedule(self.scheduler, epochs)

    def end_epoch(self, epoch: Epoch) -> None:
        """Steps the schedule."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(epoch.loss if epoch.validation is None else epoch.validation)
        elif self.scheduler is not None:
            self.scheduler.step()


def set_relative_rates(posterior: Posterior, optimizer: Optimizer, loader: Loader, division: TrainingPartition) -> None:
    """Multiplies the rates of an optimiser with `relative` groups by one number, at which the sharpness is 1 − momentum.

    Nobody knows the curvature at trained weights. It is measured on the loader's first batch, which is read in a pass of its
    own; loader and random streams are left as found.
    """
    groups = optimizer.param_groups
    if not any(group.get("relative") for group in groups):
        return
    loader = division.complete_loader(loader)
    with preserve_random_state(posterior.device):
        state = loader.state()
        batches = iter(loader)
        if batches is loader.given:
            hint = "pass a list of its batches, or an optimizer"
            raise ValueError(f"expected a loader to read twice, to measure a rate, got a generator; {hint}")
        first = next(iter(posterior.read(batches)), None)
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
