"""What `fit` checks and prepares before training: errors, warnings, and standardised regression targets."""

import logging
import math
from collections.abc import Iterable
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from dissensus.core.loader import Loader
from dissensus.core.objective import check_trainable
from dissensus.core.posterior import Posterior
from dissensus.core.regression import RealTargets
from dissensus.methods.embedded_ensembles import gamma_note
from dissensus.utils.checks import integer, number, one_of
from dissensus.utils.parameter_groups import check_optimizer, check_rates, decay_warnings, mixing_warnings

log = logging.getLogger("dissensus")

_told: WeakSet[Posterior] = WeakSet()


def check_arguments(
    epochs: int,
    accumulate: int,
    patience: int | None,
    clip: float | None,
    checkpoint_seconds: float,
    ranks: str | None,
    targets: str | None,
) -> None:
    """Raises if one of `fit`'s numbers or words is none that it can use."""
    integer("epochs", epochs)
    integer("accumulate", accumulate, hint="1 steps after every batch")
    integer("patience", 0 if patience is None else patience, least=0)
    number("clip", 1.0 if clip in (None, math.inf) else clip, above=0, hint="None does not clip")
    number("checkpoint_seconds", 0.0 if checkpoint_seconds == math.inf else checkpoint_seconds)
    one_of("ranks", ranks, (None, "independent"))
    one_of("targets", targets, (None, "standardised"))


def check_run(
    posterior: Posterior, optimizer: object, scheduler: object, *, patience: int | None, validation: object
) -> None:
    """Raises if nothing would be trained, or if arguments conflict; otherwise some of it would fail after an epoch."""
    check_trainable(posterior)
    check_rates(optimizer)
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


def check_can_train(posterior: Posterior, optimizer: Optimizer) -> None:
    """Raises if no parameter is trainable, or if this optimiser cannot train the posterior."""
    if not any(parameter.requires_grad for parameter in posterior.parameters()):
        hint = "set requires_grad (a posterior that was saved frozen is loaded frozen)"
        raise ValueError(f"expected a posterior with trainable parameters, got only frozen ones; {hint}")
    check_optimizer(posterior, optimizer)
    if isinstance(optimizer, LBFGS):  # it needs the loss several times per step
        raise TypeError("expected an optimizer with one gradient per step, got LBFGS; use SGD or Adam")


def check_schedule(scheduler: object, epochs: int) -> None:
    """Raises if a OneCycleLR ends before the remaining epochs, where torch would raise in the middle of training."""
    if isinstance(scheduler, OneCycleLR) and (needed := scheduler.last_epoch + epochs) > scheduler.total_steps:
        wanted = f"a OneCycleLR of at least {needed} steps, one per epoch"
        raise ValueError(f"expected {wanted}, got {scheduler.total_steps}; set total_steps")


def log_remarks(
    posterior: Posterior, optimizer: Optimizer, scheduler: LRScheduler | None, *, epochs: int, batches: int | None
) -> None:
    """Logs the posterior's remarks on the optimiser, and warns about a schedule planned in batches instead of epochs."""
    if scheduler is not None and (length := _length_in_batches(scheduler, epochs, batches)) is not None:
        text = "%s was built for %d steps, but fit steps it once per epoch, %d times; plan it in epochs"
        log.warning(text, type(scheduler).__name__, length, epochs)
    if (word := gamma_note(posterior, optimizer)) is not None:
        log.info("%s", word)
    mixed = mixing_warnings(optimizer, posterior.particles.own_parameters().values())
    for mistake in (*mixed, *decay_warnings(optimizer, posterior.groups())):
        log.warning("%s", mistake)


def _length_in_batches(scheduler: LRScheduler, epochs: int, batches: int | None) -> int | None:
    """The length of a schedule that seems to count batches, not epochs, judged by its length; else None."""
    within = getattr(scheduler, "_schedulers", [])
    lengths = [getattr(scheduler, name, None) for name in ("total_steps", "T_max", "total_iters")]
    whole = [each for each in lengths if isinstance(each, int) and each > epochs]
    # A length equal to the number of batches is no coincidence; a cycle of another length is a mistake in any case.
    found = [each for each in whole if isinstance(scheduler, OneCycleLR) or each == epochs * (batches or 0)]
    inner = (_length_in_batches(each, epochs, batches) for each in within)
    return next(iter([*found, *(each for each in inner if each is not None)]), None)


def warn_of_data_size(posterior: Posterior, examples: int) -> None:
    """Warns once if an epoch has less than half or more than twice `data_size` examples."""
    told = posterior.data_size
    if told is None or examples == 0 or 0.5 <= told / examples <= 2 or posterior in _told:
        return
    _told.add(posterior)
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
    if loader.can_be_read_once:
        raise ValueError("expected a loader that can be read twice, got a generator; pass a list of its batches")
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
