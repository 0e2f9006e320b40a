"""track: one training run watched by several methods, so that all of them cost one run."""

import copy
from collections.abc import Callable, Sequence
from typing import Unpack

from torch.optim import Optimizer

from dissensus.core.likelihood import Likelihood
from dissensus.core.posterior import Posterior
from dissensus.core.prior import PriorKeywords
from dissensus.methods.laplace import Laplace
from dissensus.methods.map import MAP
from dissensus.methods.parts.networks import Networks


def track(
    base: Networks | Posterior,
    methods: Sequence[Callable[..., Posterior]],
    *,
    likelihood: Likelihood | None = None,
    **prior: Unpack[PriorKeywords],
) -> Posterior:
    """The posterior that trains, with the methods, in order, as its `watchers`: they see its weights after every step.

    All methods see the same weights and have the run's likelihood and prior. Train the run, use the watchers:

        run = track(network, [TRADI, SWAG])
        fit(run, loader, epochs=10)
        tradi, swag = run.watchers  # or run.watchers["swag"]

    Args:
        base: a posterior with stored members (a deep ensemble, a repulsive one, a BatchEnsemble, …), which trains as it
            would unwatched; or a network or a list of them, which train as MAP does.
        methods: classes that sample around trained weights (TRADI, SWAG, …), or functions that build one, such as
            `functools.partial(SWAG, rank=5)`.
        likelihood: of a network or list; a posterior has its own. None is `Classification()`.
        prior, weight_prior_std, data_size: as in `Posterior`; not beside a posterior, which has its own.

    Returns:
        `base` itself if it is a posterior, else a MAP around it.
    """
    if not methods or not all(map(callable, methods)):
        raise TypeError(f"expected methods, got {methods!r}; pass classes or functions of the network, [TRADI, SWAG]")
    if isinstance(base, Posterior) and (likelihood is not None or prior):
        raise ValueError("expected no likelihood or prior beside a posterior, got one; it has its own")
    run = base if isinstance(base, Posterior) else MAP(base, likelihood=likelihood, **prior)
    if list(run.particles.template.latents.parameters()):
        raise ValueError(
            f"expected a posterior whose functions are its networks, got {type(run).__name__}, which trains latents with "
            "them; train it unwatched"
        )
    watchers = [method(run.particles, likelihood=run.likelihood) for method in methods]
    for watcher in watchers:
        if not isinstance(watcher, Posterior) or watcher.particles is not run.particles:
            raise TypeError(
                f"expected methods that take the weights of a run as they are, got {type(watcher).__name__}, which does not; "
                "build it and train it on its own"
            )
        if run.cuts and isinstance(watcher, Laplace):
            raise ValueError(
                f"expected networks with their own last layer for Laplace, got those that {type(run).__name__} has cut; fit it "
                "afterwards: Laplace([run.member(i) for i in range(members)]).fit_posthoc(loader)"
            )
        watcher.use_prior(run.prior, data_size=run.data_size)
        watcher.base = (run,)
    run.watchers.extend(watchers)
    return run


def branch(posterior: Posterior, optimizer: Optimizer) -> tuple[Posterior, Optimizer]:
    """(a copy of the posterior, a copy of the optimiser over its parameters), to train on in another way.

    Weights, what was observed and the optimiser's moments are copied; a scheduler is not: build one for the copy.

    Args:
        posterior: left as it is; so is its optimiser.
        optimizer: over the posterior's parameters alone.
    """
    held = {id(parameter) for parameter in posterior.parameters()}
    if not all(id(p) in held for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "expected an optimizer over the posterior's parameters alone, got one that holds others; build it on "
            "posterior.parameters()"
        )
    other: tuple[Posterior, Optimizer] = copy.deepcopy((posterior, optimizer))
    # A scheduler replaces the optimiser's step by a wrapper around the original, which the copy must not step.
    other[1].__dict__.pop("step", None)
    return other
