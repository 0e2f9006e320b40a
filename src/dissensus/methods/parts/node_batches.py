"""Batches of a NodeBNN in training: each example is repeated, and batches of a new shape are checked."""

import logging
from collections.abc import Collection, Sequence
from itertools import count

import torch
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.batch import Inputs
from dissensus.core.particles import Member, Particles
from dissensus.layers.nodes import NodeLayer, Site, has_changed_output, record_outputs, split_by_layer, use_latents
from dissensus.numerics.randomness import preserve_random_state
from dissensus.utils.batch_norm_names import statistics_layers
from dissensus.utils.checks import first_names

log = logging.getLogger("dissensus")
WIDE = 0.2  # with 0.3 a CIFAR-10 ResNet-20 falls from 92 to 77 % before the first step, with 0.1 it does not


def repeat_inputs(x: Inputs, times: int, *, first: int | None = None, whole: Collection[int] = ()) -> Inputs:
    """x, or its first rows, with each row repeated `times` times; tensors without a row per example are not changed.

    `whole`: numbers of the tensors that have no row per example, although they may be as long as the batch.
    """
    size, number = batches.count_examples(x), count()

    def one(tensor: Tensor) -> Tensor:
        mine = next(number) not in whole and tensor.ndim > 0 and len(tensor) == size
        return repeat_rows(tensor[:first], times) if mine else tensor

    return batches.map_tensors(x, one)


def repeat_rows(tensor: Tensor, times: int) -> Tensor:
    """(B · times, ...): each row `times` times in succession."""
    return tensor if times == 1 else tensor[:, None].expand(-1, times, *tensor.shape[1:]).flatten(0, 1)


def inputs_of_other_length(x: Inputs) -> set[int]:
    """Numbers of the tensors in x that are not as long as the batch, such as one row for all examples."""
    size = batches.count_examples(x)
    return {i for i, tensor in enumerate(batches.input_tensors(x)) if tensor.ndim and len(tensor) not in (1, size)}


def find_input_tables(particles: Particles, x: Inputs, whole: Collection[int]) -> list[tuple[int, ...]]:
    """Shapes of the tensors after the first, if one of them is as long as the batch but has no row per example.

    Such a tensor is a table, or belongs to pairs of examples. It is found by the outputs, which change when each example is
    repeated in the batch: x₁, x₁, x₂, x₂, ….
    """
    size = batches.count_examples(x)
    others = [t for i, t in enumerate(batches.input_tensors(x)) if i and i not in whole]
    beside = [t for t in others if t.ndim and len(t) == size > 1]
    if not beside:
        return []

    def outputs(some: Inputs) -> Tensor:
        found: Tensor = particles.call(
            lambda member: batches.call_network(member.network, some), *particles.member_tensors(0)
        )[0]
        return found

    once = repeat_rows(outputs(x), 2)
    try:
        twice = outputs(repeat_inputs(x, 2, whole=whole))
    except (RuntimeError, ValueError, IndexError):
        twice = once[:0]
    rounding = 1e-3 * float(once.nan_to_num(0.0, 0.0, 0.0).abs().max())
    same = twice.shape == once.shape and torch.allclose(twice, once, rtol=0.0, atol=rounding, equal_nan=True)
    return [] if same else [tuple(tensor.shape) for tensor in beside]


def examine_layers(
    particles: Particles, sites: Sequence[Site], x: Inputs, *, whole: Collection[int], like: Tensor, again: bool
) -> None:
    """Raises if a layer's first axis is not the batch axis, tried with 2 and 3 rows.

    Marks layers whose outputs are modified in place, and warns of layers that are not called, where latents have no effect.
    `whole`: tensors in x without a row per example. `again`: batches of other shapes were checked before. Call it in eval
    mode and set the mode again afterwards, because this changes it.
    """
    ones = like.new_ones(3, sum(site.width for site in sites))

    def find_called_layers(rows: int) -> tuple[set[str], set[str]]:
        """(layers that are called with this many rows, those of them whose outputs were modified in place)."""
        some, nodes = repeat_inputs(x, rows, first=1, whole=whole), split_by_layer(sites, ones[:rows])

        def run(member: Member) -> tuple[set[str], set[str]]:
            layers = {name: part for name in nodes if isinstance(part := member.network.get_submodule(name), NodeLayer)}
            with record_outputs(list(layers.values())), use_latents(member.network, nodes):
                batches.call_network(member.network, some)
                passed = {name for name, layer in layers.items() if layer.seen}
                return passed, {name for name in passed if has_changed_output(layers[name])}

        found: tuple[set[str], set[str]] = particles.call(run, *particles.member_tensors(0))[0]
        return found

    network, names = particles.template.network, list(split_by_layer(sites, ones))
    find_called_layers(2)
    passed, written = find_called_layers(3)
    unmet = [name for name in names if name not in passed]
    if len(unmet) == len(names):
        got = f"{type(network).__name__}, which calls no layer with latents"
        raise ValueError(f"expected a network that calls its layers, got {got}; name others with layers=[...]")
    if unmet and not again:
        why = "which forward does not call in eval mode; if it only reads their weights, exclude them with layers=[...]"
        log.warning("latents have no effect in %s, %s", first_names(unmet), why)
    try:
        with preserve_random_state(like.device):
            particles.train()  # dropout and custom noise may modify outputs in training mode only
            now = find_called_layers(3)
            passed, written = passed | now[0], written | now[1]
    except Exception:  # the network may need other batches in training mode; the real batch will show that
        written = set(names)
    for name in passed:
        layer = network.get_submodule(name)
        layer.rewritten = name in written or (again and layer.rewritten)  # type: ignore[assignment]


def warn_of_start(network: nn.Module, std: float | None) -> None:
    """Warns if frozen batch statistics are still the initial ones, or if the latents start too wide for a trained network.

    `std`: the latents' mean standard deviation before training, None afterwards.
    """
    blank = [
        name
        for name, layer in statistics_layers(network).items()
        if bool((layer.running_mean == 0).all()) and bool((layer.running_var == 1).all())  # type: ignore[union-attr]
    ]
    if blank:
        fix = 'for a network trained from scratch use "trained"'
        kept = 'batch_norm="frozen" keeps the initial batch statistics in %s, which saw no data; %s'
        log.warning(kept, first_names(blank), fix)
    elif std is not None and std > WIDE:
        why = 'with batch_norm="frozen" that is too much noise for a pretrained network: use init_std=0.1'
        log.warning("latents start with a standard deviation of %.2g; %s", std, why)
