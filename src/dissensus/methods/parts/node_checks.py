"""What a NodeBNN looks at before it trains with batches of a new shape: how the network calls its layers."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from numbers import Integral

from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.batch import Inputs
from dissensus.core.particles import Member, Particles
from dissensus.core.statistics import statistics_layers
from dissensus.methods.parts.node_inputs import repeated_inputs
from dissensus.numerics.randomness import same_random_state
from dissensus.surgery.nodes import Noded, Site, by_layer, standing, watched, written_into

log = logging.getLogger("dissensus")
WIDE = 0.2  # with 0.3 a CIFAR-10 ResNet-20 falls from 92 to 77 % before the first step, with 0.1 it does not


def check_layers(
    particles: Particles, sites: Sequence[Site], x: Inputs, *, whole: Collection[int], like: Tensor, again: bool
) -> None:
    """Raises where a layer's first axis is not the batch, though it may be as long as this one: asked with 2 and 3 rows.

    Tells each layer whether others write into its outputs, and says which are not called: latents there do nothing.
    `whole`: tensors in x without rows of examples. `again`: batches of other shapes were looked at before. Called in eval
    mode, which the particles do not keep: whoever calls this puts it back.
    """
    ones = like.new_ones(3, sum(site.width for site in sites))

    def look(rows: int) -> tuple[set[str], set[str]]:
        """(layers that so many rows pass, those of them whose outputs were written into)."""
        some, nodes = repeated_inputs(x, rows, first=1, whole=whole), by_layer(sites, ones[:rows])

        def run(member: Member) -> tuple[set[str], set[str]]:
            layers = {name: part for name in nodes if isinstance(part := member.network.get_submodule(name), Noded)}
            with watched(list(layers.values())), standing(member.network, nodes):
                batches.call(member.network, some)
                passed = {name for name, layer in layers.items() if layer.seen}
                return passed, {name for name in passed if written_into(layers[name])}

        found: tuple[set[str], set[str]] = particles.call(run, *particles.at(0))[0]
        return found

    network, names = particles.template.network, list(by_layer(sites, ones))
    look(2)
    passed, written = look(3)
    _check_passed(network, names, passed, again=again)
    try:
        with same_random_state(like.device):
            particles.train()  # dropout, and noise of one's own, may write in training alone
            passed, written = (before | now for before, now in zip((passed, written), look(3), strict=True))
    except Exception:  # a network may want other batches in training; the batch itself will show whether it can
        written = set(names)
    for name in passed:
        layer = network.get_submodule(name)
        layer.rewritten = name in written or (again and layer.rewritten)  # type: ignore[assignment]


def _check_passed(network: nn.Module, names: Sequence[str], passed: Collection[str], *, again: bool) -> None:
    unmet = [name for name in names if name not in passed]
    if len(unmet) == len(names):
        raise ValueError(
            f"expected a network that calls its layers, got {type(network).__name__}, which calls none of those with latents "
            "and at most reads their weights: latents would do nothing; call the layers, or name others with layers=[...]"
        )
    if unmet and not again:
        log.warning(
            "latents do nothing in %s, which a batch does not pass in eval mode; if the forward reads the weights alone, leave "
            "these layers out with layers=[...]",
            ", ".join(unmet[:3]) + (", …" if len(unmet) > 3 else ""),
        )


def warn_of_start(network: nn.Module, std: float | None) -> None:
    """Says where a start does not suit frozen statistics: those a layer was built with would normalise nothing, for good.

    `std`: the latents' mean deviation before any training, None after; a wide one drowns what a trained network knows.
    """
    blank = [
        name
        for name, layer in statistics_layers(network).items()
        if bool((layer.running_mean == 0).all()) and bool((layer.running_var == 1).all())  # type: ignore[union-attr]
    ]
    if blank:
        log.warning(
            'batch_norm="frozen" keeps statistics that no data have passed in %s; "trained" suits a network from scratch',
            ", ".join(blank[:3]) + (", …" if len(blank) > 3 else ""),
        )
    elif std is not None and std > WIDE:
        log.warning(
            'latents start with a deviation of %.2g; with batch_norm="frozen", on a network that was trained before, that '
            "drowns what it knows: init_std=0.1 suits it",
            std,
        )


def check_component(component: object, components: int) -> None:
    whole = isinstance(component, Integral) and not isinstance(component, bool)
    if not whole or not -components <= component < components:  # type: ignore[operator]
        raise ValueError(
            f"expected a component from 0 to {components - 1}, got {component!r}; this posterior has {components}"
        )


def warn_of_old_draw() -> None:
    log.warning(
        "the draw that is stored has latents from before the last steps and would run with the weights of now; call "
        "ds.refresh(posterior, loader) after training on"
    )
