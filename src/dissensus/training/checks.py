"""What `fit` refuses, or remarks on, before anything is trained."""

import logging
from weakref import WeakSet

from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from dissensus.core.optimisation import check_optimizer, decayed_groups, mixed_members
from dissensus.core.posterior import Posterior
from dissensus.core.seam import check_trainable
from dissensus.methods.parts.embedded import without_effect

log = logging.getLogger("dissensus")

_told: WeakSet[Posterior] = WeakSet()


def check_run(
    posterior: Posterior, optimizer: object, scheduler: object, *, patience: int | None, validation: object
) -> None:
    """Raises where nothing would be trained, or what is given does not go together: some would show after an epoch only."""
    check_trainable(posterior)
    if posterior.particles.fully and posterior.prior is not None:
        raise NotImplementedError(
            f"expected no prior of a network divided by fully_shard, got {type(posterior.prior).__name__}; use the optimizer's "
            "weight_decay"
        )
    if scheduler is not None and optimizer is None:
        raise ValueError("expected an optimizer with the scheduler, got none; pass both")
    if scheduler is not None and (isinstance(scheduler, type) or not hasattr(scheduler, "step")):
        raise TypeError(f"expected a scheduler, got {scheduler!r}; build one on the optimizer")
    if patience is not None and not posterior.goes_back:
        raise ValueError(
            f"expected no patience for {type(posterior).__name__}, got {patience}: what it collects over a run needs the whole "
            "run; leave it out"
        )
    if patience is not None and validation is None:
        raise ValueError("expected validation data with patience, got none; pass validation=")


def check_stepping(posterior: Posterior, optimizer: Optimizer) -> None:
    """Raises where there is nothing to train, or this optimiser cannot train it."""
    if not any(parameter.requires_grad for parameter in posterior.parameters()):
        raise ValueError(
            "expected a posterior with parameters to train, got all of them frozen; set requires_grad on those that should "
            "train (a posterior that was saved frozen is loaded frozen)"
        )
    check_optimizer(posterior, optimizer)
    if isinstance(optimizer, LBFGS):  # which asks for losses again and again
        raise TypeError("expected an optimizer that steps by gradients at hand, got LBFGS; use SGD or Adam")


def check_schedule(scheduler: object, epochs: int) -> None:
    """Raises where a cycle ends before the epochs that are left: torch would raise in the middle of training."""
    if isinstance(scheduler, OneCycleLR) and (needed := scheduler.last_epoch + epochs) > scheduler.total_steps:
        raise ValueError(
            f"expected a OneCycleLR of {needed} or more steps, one an epoch, got {scheduler.total_steps}; set total_steps"
        )


def say_remarks(
    posterior: Posterior, optimizer: Optimizer, scheduler: LRScheduler | None, *, epochs: int, batches: int | None
) -> None:
    """Logs what the posterior has to say of such an optimiser, and what is wrong with a schedule laid out over batches."""
    if scheduler is not None and (length := _in_batches(scheduler, epochs, batches)) is not None:
        log.warning(
            "%s was laid out for %d steps and is stepped once an epoch, %d times: it will not get far; lay it out over epochs",
            type(scheduler).__name__,
            length,
            epochs,
        )
    if (word := without_effect(posterior, optimizer)) is not None:
        log.info("%s", word)
    mixed = mixed_members(optimizer, posterior.particles.own_parameters().values())
    for mistake in (*mixed, *decayed_groups(optimizer, posterior.groups())):
        log.warning("%s", mistake)


def _in_batches(scheduler: LRScheduler, epochs: int, batches: int | None) -> int | None:
    """The length of a schedule that counts batches, not epochs; None where it does not, as far as its length tells."""
    within = getattr(scheduler, "_schedulers", [])
    lengths = [getattr(scheduler, name, None) for name in ("total_steps", "T_max", "total_iters")]
    whole = [each for each in lengths if isinstance(each, int) and each > epochs]
    # As many as the run has batches is no chance; a cycle of another length is a mistake in any case.
    found = [each for each in whole if isinstance(scheduler, OneCycleLR) or each == epochs * (batches or 0)]
    inner = (_in_batches(each, epochs, batches) for each in within)
    return next(iter([*found, *(each for each in inner if each is not None)]), None)


def say_data_size(posterior: Posterior, examples: int) -> None:
    """Warns, once, where an epoch has less than half or more than twice as many examples as the posterior was told of."""
    told = posterior.data_size
    if told is None or examples == 0 or 0.5 <= told / examples <= 2 or posterior in _told:
        return
    _told.add(posterior)
    log.warning(
        "data_size is %g and an epoch has %d examples: prior and KL count %.3g times as much as they would with "
        "data_size=%d; leave it where the loader gives a part of the data",
        told, examples, examples / told, examples,
    )  # fmt: skip
