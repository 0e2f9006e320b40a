"""Batches of a NodeBNN in training: each example several times, and what is looked at before batches of a new shape."""

import logging
from collections.abc import Collection, Sequence
from itertools import count

import torch
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.batch import Inputs
from dissensus.core.particles import Member, Particles
from dissensus.core.statistics import statistics_layers
from dissensus.numerics.randomness import same_random_state
from dissensus.surgery.conversion import first_names
from dissensus.surgery.nodes import Noded, Site, by_layer, standing, watched, written_into

log = logging.getLogger("dissensus")
WIDE = 0.2  # with 0.3 a CIFAR-10 ResNet-20 falls from 92 to 77 % before the first step, with 0.1 it does not


def repeated_inputs(x: Inputs, times: int, *, first: int | None = None, whole: Collection[int] = ()) -> Inputs:
    """x, or its first rows, with each row so many times; what has no row per example is left as it is.

    `whole`: numbers of tensors that have none though they may be as long as the batch.
    """
    size, number = batches.size(x), count()

    def one(tensor: Tensor) -> Tensor:
        mine = next(number) not in whole and tensor.ndim > 0 and len(tensor) == size
        return repeated(tensor[:first], times) if mine else tensor

    return batches.apply(x, one)


def repeated(tensor: Tensor, times: int) -> Tensor:
    """(B · times, ...): each row so many times, in a row."""
    return tensor if times == 1 else tensor[:, None].expand(-1, times, *tensor.shape[1:]).flatten(0, 1)


def of_another_length(x: Inputs) -> set[int]:
    """Numbers of the tensors in x that are not as long as the batch. One row may stand for those of all examples."""
    size = batches.size(x)
    return {i for i, tensor in enumerate(batches.tensors(x)) if tensor.ndim and len(tensor) not in (1, size)}


def tables_beside(particles: Particles, x: Inputs, whole: Collection[int]) -> list[tuple[int, ...]]:
    """Shapes of the tensors beside the first one, where one of them has no row per example though it is as long as the batch.

    Found by the outputs: examples that stand twice in a batch, x₁, x₁, x₂, x₂, …, then have others than when they stand once.
    Such a tensor is a table, or belongs to pairs of examples.
    """
    size = batches.size(x)
    beside = [t for i, t in enumerate(batches.tensors(x)) if i and i not in whole and t.ndim and len(t) == size > 1]
    if not beside:
        return []

    def outputs(some: Inputs) -> Tensor:
        found: Tensor = particles.call(lambda member: batches.call(member.network, some), *particles.at(0))[0]
        return found

    once = repeated(outputs(x), 2)
    try:
        twice = outputs(repeated_inputs(x, 2, whole=whole))
    except (RuntimeError, ValueError, IndexError):
        twice = once[:0]
    rounding = 1e-3 * float(once.nan_to_num(0.0, 0.0, 0.0).abs().max())
    same = twice.shape == once.shape and torch.allclose(twice, once, rtol=0.0, atol=rounding, equal_nan=True)
    return [] if same else [tuple(tensor.shape) for tensor in beside]


def examine_layers(
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
            first_names(unmet),
        )
    try:
        with same_random_state(like.device):
            particles.train()  # dropout, and noise of one's own, may write in training alone
            passed, written = (before | now for before, now in zip((passed, written), look(3), strict=True))
    except Exception:  # a network may want other batches in training; the batch itself will show whether it can
        written = set(names)
    for name in passed:
        layer = network.get_submodule(name)
        layer.rewritten = name in written or (again and layer.rewritten)  # type: ignore[assignment]


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
            first_names(blank),
        )
    elif std is not None and std > WIDE:
        log.warning(
            'latents start with a deviation of %.2g; with batch_norm="frozen", on a network that was trained before, that '
            "drowns what it knows: init_std=0.1 suits it",
            std,
        )
