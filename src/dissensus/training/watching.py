"""watching: methods record a training loop that is not `fit`, by a hook on its optimiser."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from dissensus.core.likelihood import Likelihood
from dissensus.core.posterior import Posterior
from dissensus.core.trainable import Watchers
from dissensus.engine.loader import Loader
from dissensus.methods.track import track
from dissensus.utils.batch_norm_names import statistics_layers
from dissensus.utils.checks import integer
from dissensus.utils.parameter_groups import check_optimizer


@contextmanager
def watching(
    network: nn.Module,
    optimizer: Optimizer,
    methods: Sequence[Callable[..., Posterior] | Posterior] = (),
    *,
    steps: int,
    done: int = 0,
    loader: Iterable[Any] | None = None,
    likelihood: Likelihood | None = None,
) -> Iterator[Watchers]:
    """Methods record any training loop inside the block, after every step of the optimiser, and are drawn at its end.

        with ds.watching(network, optimizer, [ds.SWAG, ds.TRADI], steps=epochs * len(loader)) as watched:
            ...  # any loop, without begin, observe and refresh
        swag, tradi = watched  # or watched["swag"]

    Args:
        network: the one that the loop trains; or a posterior that it trains by `loss` or `backward`.
        optimizer: that of the loop, or a wrapper of it. Steps that a wrapper or a GradScaler skips are not recorded.
        methods: as in `track`; for a network, posteriors of it, too. May be empty for a posterior.
        steps, done: optimiser steps of the whole run, which plans snapshots, and those already done in a resumed one.
        loader: the training batches (x, y), to estimate statistics of batch norm; else not needed.
        likelihood: for a network only, since a posterior has its own; None is `Classification()`.

    Yields:
        The posteriors, by position or by name: those of `methods`, or the given one if there are none.
    """
    if isinstance(network, Posterior):
        runs = [track(network, methods, likelihood=likelihood) if methods else network]
        watched = network.watchers[-len(methods) :] if methods else Watchers(runs)
    else:
        runs = [each if isinstance(each, Posterior) else each(network, likelihood=likelihood) for each in methods]
        watched = Watchers(runs)
    if not runs:
        raise ValueError("expected methods for a network, got none; pass them, [ds.SWAG, ds.TRADI]")
    loaders: dict[Posterior, Loader] = {}  # of those drawn at the end; what is wrong with them is said before the run
    for each in dict.fromkeys(each for each in (*runs, *watched) if each.recorders or loader is not None):
        norms = [] if getattr(each, "records_all", False) else [*statistics_layers(each.particles.template.network)]
        if loader is None and norms:
            raise ValueError(f"expected a loader, for statistics of '{norms[0]}' at the end, got none; pass loader=")
        loaders[each] = Loader.complete(() if loader is None else loader, each)
    for run in runs:
        check_optimizer(run, optimizer)
        run.begin(integer("steps", steps), 1, done=done)

    def observe(stepped: Optimizer, *_: object) -> None:
        skipped = getattr(stepped, "found_inf", None)  # set by a GradScaler around a fused optimiser
        if stepped.param_groups is optimizer.param_groups and (skipped is None or not skipped.item()):
            for run in runs:
                run.observe(stepped)

    # One hook for all optimisers: wrappers call no hooks of their own, and torch calls it after that which counts steps.
    with register_optimizer_step_post_hook(observe):
        yield watched
    for each, batches in loaders.items():
        each.store_draw(batches)
