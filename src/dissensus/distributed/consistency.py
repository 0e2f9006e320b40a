"""What must be alike in processes that train together: batches, tensors after an epoch, and rows whatever lies beside them."""

from typing import Any

import torch
from torch import Tensor

from dissensus.core.batch import Batch, Inputs, call_network, map_tensors
from dissensus.core.likelihood import expand_weight
from dissensus.core.posterior import Posterior, inference_context
from dissensus.distributed.mesh import Mesh
from dissensus.distributed.mesh_collectives import UNDIVIDED
from dissensus.distributed.work_split import tree_checksum


def check_batches(mesh: Mesh, batch: Batch, *, parts: bool) -> None:
    """Raises where processes that should read the same batch do not: all, or those of one place on the data axis."""
    mine = tree_checksum(batch)
    others = mesh.members.gather_objects(mine) if parts else mesh.gather_objects(mine)
    if any(other != mine for other in others):
        advice = 'give shuffling loaders one seed, or pass mesh(..., batches="parts")'
        raise ValueError(f"expected the same batches in every process, got different ones; {advice}")


@torch.no_grad()
def check_equal_tensors(mesh: Mesh, posterior: Posterior) -> None:
    """Raises where a tensor is not the same in all processes after an epoch: something in training saw its rows alone."""
    named = [*posterior.named_buffers(), *posterior.named_parameters()]
    plain = {name: each.sum(dtype=torch.float64) for name, each in named if not hasattr(each, "full_tensor")}
    mine = {name: repr(float(each)) for name, each in plain.items()}  # "nan" is "nan"
    for other in mesh.gather_objects(mine):
        if off := [name for name, value in mine.items() if other.get(name) != value]:
            advice = f"use the same optimizer and callbacks everywhere; if the network sums over rows, {UNDIVIDED}"
            raise ValueError(f"expected '{off[0]}' to be the same in all processes, got different values; {advice}")


def check_independent_rows(posterior: Posterior, batch: Batch) -> None:
    """Raises where a network's output for a row depends on the other rows of the batch: it would see some of them alone."""
    particles, few = posterior.particles, min(batch.size, 8)  # as many as one process has room for in any case
    if any(hasattr(each, "full_tensor") for each in particles.parameters()):
        return

    def outputs(x: Any) -> Tensor:
        found: Tensor = particles.call(lambda member: call_network(member.network, x), *particles.member_tensors(0))[0]
        return found[: (few + 1) // 2].double()

    with inference_context(posterior):
        alone, among = (outputs(select_rows(batch.x, batch.size, slice(count))) for count in ((few + 1) // 2, few))
    # Rounding is far below; what mixes rows is far above.
    close = (alone - among).abs() <= 0.01 * among.abs().max()
    if not (posterior.network_is_random or bool((close | among.isnan()).all())):
        raise ValueError(f"expected outputs that do not depend on other rows of a batch, got some that do; {UNDIVIDED}")


def select_rows(x: Inputs, size: int, rows: slice) -> Inputs:
    """These rows of every tensor of x that has as many as the batch."""
    return map_tensors(x, lambda tensor: tensor[rows] if tensor.ndim and len(tensor) == size else tensor)


def example_weights(posterior: Posterior, batch: Batch) -> Tensor:
    """(B,) how much each example counts in a mean over the batch: its weight, over entries that count."""
    weight = torch.ones(batch.size, device=batch.y.device) if batch.weight is None else batch.weight
    weight, entries = weight.double(), posterior.likelihood.training_weight(batch.y)
    if entries is None:
        return weight
    return (expand_weight(weight, entries.double()) * entries).reshape(batch.size, -1).sum(1)
