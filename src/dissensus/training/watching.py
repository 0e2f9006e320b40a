"""watching: methods record a training loop that is not `fit`, by a hook on its optimiser."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from dissensus.core.likelihood import Likelihood
from dissensus.core.loader import Loader
from dissensus.core.posterior import Posterior, refresh
from dissensus.core.trainable import Watchers
from dissensus.methods.track import track
from dissensus.utils.batch_norm_names import statistics_layers
from dissensus.utils.checks import integer
from dissensus.utils.parameter_groups import check_optimizer


@contextmanager
def watching(
    base: nn.Module,
    optimizer: Optimizer,
    methods: Sequence[Callable[..., Posterior] | Posterior] = (),
    *,
    steps: int,
    done: int = 0,
    loader: Iterable[Any] | None = None,
    likelihood: Likelihood | None = None,
) -> Iterator[Watchers]:
    """Methods record any training loop inside the block, after every `optimizer.step()`, and are drawn at its end.

    The loop needs no `begin`, `observe` or `refresh`. Accumulated gradients, schedulers, steps that a GradScaler skips and
    wrapped optimisers (Accelerate's) are handled: only steps that change weights count.

        with ds.watching(network, optimizer, [ds.SWAG, ds.TRADI], steps=epochs * len(loader)) as watched:
            ...  # any loop that steps this optimizer
        swag, tradi = watched  # or watched["swag"]

    Args:
        base: the network that the optimiser trains; or a posterior, such as a deep ensemble, that the loop trains with
            `loss` or `backward`.
        optimizer: the optimiser of the loop, or a wrapper with the same `param_groups`.
        methods: classes that record weights (SWAG, TRADI, SnapshotEnsemble, …), functions that build one, such as
            `functools.partial(SWAG, rank=5)`, or, for a network, posteriors of it. None for a posterior that records.
        steps: optimiser steps of the whole run; SWAG takes its snapshots in the last quarter.
        done: steps of the run that are already done, in a resumed run.
        loader: the training batches (x, y), for batch statistics of sampled networks; needed with batch norm only.
        likelihood: for a network only, since a posterior has its own; None is `Classification()`.

    Yields:
        The posteriors, by position or by name: those of `methods`, or `base` itself if there are none.
    """
    if isinstance(base, Posterior):
        runs = [track(base, methods, likelihood=likelihood) if methods else base]  # type: ignore[arg-type]
        watched = base.watchers if methods else Watchers(runs)
    else:
        built = [each if isinstance(each, Posterior) else each(base, likelihood=likelihood) for each in methods]
        runs, watched = built, Watchers(built)
    if not runs:
        raise ValueError("expected methods for a network, got none; pass them, [ds.SWAG, ds.TRADI]")
    drawn = [each for each in {*runs, *watched} if each.recorders or loader is not None]
    for each in drawn:
        _check_loader(each, loader)
    for run in runs:
        check_optimizer(run, optimizer)
        run.begin(integer("steps", steps), 1, done=done)

    def observe(stepped: Optimizer, *_: object) -> None:
        skipped = getattr(stepped, "found_inf", None)  # set by a GradScaler around a fused optimiser
        if stepped.param_groups is optimizer.param_groups and (skipped is None or not skipped.item()):
            for run in runs:
                run.observe(stepped)

    # One hook for all optimisers, since wrappers do not pass on their own; torch calls it after that which counts steps.
    hook = register_optimizer_step_post_hook(observe)
    try:
        yield watched
    finally:
        hook.remove()
    for each in drawn:
        refresh(each, () if loader is None else loader)


def _check_loader(posterior: Posterior, loader: Iterable[Any] | None) -> None:
    """Raises before the run if the draw at its end would fail for want of batches."""
    sampled = not getattr(posterior, "records_all", False)
    if loader is not None:
        Loader.complete(loader, posterior)
    elif sampled and (norms := statistics_layers(posterior.particles.template.network)):
        hint = "pass the training batches, loader="
        raise ValueError(f"expected a loader to estimate statistics of '{min(norms)}' at the end, got none; {hint}")
