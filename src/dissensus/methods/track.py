"""track: several methods record the same training run, for the cost of one run."""

import copy
from collections.abc import Callable, Sequence
from typing import Unpack

from torch.optim import Optimizer

from dissensus.core.likelihood import Likelihood
from dissensus.core.networks import Networks
from dissensus.core.posterior import Posterior, has_converted_layers
from dissensus.core.prior import PriorKeywords
from dissensus.methods.laplace import Laplace
from dissensus.methods.map import MAP


def track(
    networks: Networks | Posterior,
    methods: Sequence[Callable[..., Posterior]],
    *,
    likelihood: Likelihood | None = None,
    **prior: Unpack[PriorKeywords],
) -> Posterior:
    """Attaches methods to one training run as its `watchers`: each records the weights after every step.

    All methods record the same weights and use the run's likelihood and prior. Train the run, then use the watchers:

        run = track(network, [TRADI, SWAG])
        fit(run, loader, epochs=10)
        tradi, swag = run.watchers  # or run.watchers["swag"]

    Args:
        networks: a posterior with stored members (a deep ensemble, a repulsive one, a BatchEnsemble, …), whose training the
            watchers do not change; or one or several networks, which train as MAP does.
        methods: classes that sample around trained weights (TRADI, SWAG, …), or functions such as `partial(SWAG, rank=5)`.
        likelihood: for networks only, since a posterior has its own; None is `Classification()`.
        prior, weight_prior_std, data_size: as in `Posterior`; for networks only.
    """
    if not methods or not all(map(callable, methods)):
        raise TypeError(f"expected methods, got {methods!r}; pass classes or functions of the network, [TRADI, SWAG]")
    if isinstance(networks, Posterior) and (likelihood is not None or prior):
        raise ValueError("expected no likelihood or prior with a posterior, which has its own, got one; leave it out")
    run = networks if isinstance(networks, Posterior) else MAP(networks, likelihood=likelihood, **prior)
    if list(run.particles.template.latents.parameters()):
        raise ValueError(f"expected a posterior without latents, got {type(run).__name__}; train it without track")
    watchers = [method(run.particles, likelihood=run.likelihood) for method in methods]
    for watcher in watchers:
        if not isinstance(watcher, Posterior) or watcher.particles is not run.particles:
            kind = type(watcher).__name__
            raise TypeError(f"expected methods that can record another's weights, got {kind}; train it on its own")
        if has_converted_layers(run) and isinstance(watcher, Laplace):
            advice = "fit it afterwards: Laplace([run.member(i) for i in range(members)]).fit_posthoc(loader)"
            raise ValueError(f"expected an ordinary last layer for Laplace, got {type(run).__name__}'s; {advice}")
        watcher.use_prior(run.prior, data_size=run.data_size)
        watcher.base = (run,)
    run.watchers.extend(watchers)
    return run


def branch(posterior: Posterior, optimizer: Optimizer) -> tuple[Posterior, Optimizer]:
    """Copies a posterior and its optimiser in the middle of training; returns (posterior, optimiser).

    Weights, recorded statistics and the optimiser's state are copied. A scheduler is not: build one for the copy.

    Args:
        posterior: any posterior; it is not changed.
        optimizer: its optimiser, which must hold no other parameters; it is not changed.
    """
    held = {id(parameter) for parameter in posterior.parameters()}
    if not all(id(p) in held for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("expected an optimizer of posterior.parameters() only, got other tensors; leave them out")
    other: tuple[Posterior, Optimizer] = copy.deepcopy((posterior, optimizer))
    # A scheduler wraps the original optimiser's step; the copy must not call that wrapper.
    other[1].__dict__.pop("step", None)
    return other
