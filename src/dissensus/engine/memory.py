"""Memory: what training and prediction will need, said before they start."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dissensus.core import gradients
from dissensus.core.batch import Inputs
from dissensus.core.modes import same_random_state
from dissensus.core.posterior import Posterior
from dissensus.engine.eager import autocast


@dataclass(frozen=True)
class Memory:
    """Bytes that training needs: weights, gradients, the optimiser's state, and what each member keeps for backward."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # of one member on one batch
    members: int

    @property
    def at_once(self) -> int:
        """With all members' graphs alive: vectorised and streamed."""
        return self.weights + self.gradients + self.optimizer + self.members * self.activations

    @property
    def one_at_a_time(self) -> int:
        """With one member's graph alive: the loop."""
        return self.weights + self.gradients + self.optimizer + self.activations

    def fits(self, device: torch.device) -> bool:
        """Whether all members at once fit in what the device has free; always true on the host, which can swap."""
        if device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return self.at_once - self.weights < 0.9 * (free + cached)

    def __str__(self) -> str:
        return (
            f"about {readable(self.at_once)} with all members at once, {readable(self.one_at_a_time)} one after the other "
            f"(weights {readable(self.weights)}, gradients {readable(self.gradients)}, optimiser "
            f"{readable(self.optimizer)}, activations {readable(self.activations)} a member)"
        )


def training_memory(
    posterior: Posterior,
    optimizer: torch.optim.Optimizer,
    x: Inputs,
    y: Tensor,
    weight: Tensor | None,
    *,
    precision: torch.dtype | None = None,
) -> Memory:
    """What training on batches like this one needs; activations are counted by running one member once."""
    tensors = [*posterior.parameters(), *posterior.buffers()]
    trained = [parameter for parameter in posterior.parameters() if parameter.requires_grad]
    return Memory(
        weights=_bytes(tensors),
        gradients=_bytes(trained),
        optimizer=_states(optimizer) * _bytes(trained),
        activations=_activations(posterior, x, y, weight, precision),
        members=posterior.particles.members,
    )


def prediction_bytes(members: int, inputs: int, outputs: int, *, keep_members: bool, itemsize: int = 4) -> int:
    """Bytes that the result of a prediction takes: members kept, or only mean, aleatoric and epistemic."""
    return inputs * itemsize * (members * outputs if keep_members else outputs + 2)


def readable(size: int) -> str:
    """A number of bytes for people."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def _activations(
    posterior: Posterior, x: Inputs, y: Tensor, weight: Tensor | None, precision: torch.dtype | None
) -> int:
    """Bytes that autograd keeps for one member's backward pass, its weights and the batch aside."""
    state = gradients.member_state(gradients.state_of(posterior), 0)
    own = {name: tensor.detach().requires_grad_() for name, tensor in {**state.shared, **state.own}.items()}
    params = {**state.shared_frozen, **state.own_frozen, **own}
    buffers = {**state.shared_buffers, **state.own_buffers}
    known = {t.untyped_storage().data_ptr() for t in [*posterior.parameters(), *posterior.buffers()]}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with same_random_state(posterior.device), autocast(posterior.device, precision), torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = posterior.member_loss(params, buffers, x, y, weight)
        del result
    return sum(kept.values())


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _states(optimizer: torch.optim.Optimizer) -> int:
    """Tensors of a parameter's size that the optimiser keeps per parameter."""
    settings = optimizer.param_groups[0]
    if "betas" in settings:
        return 3 if settings.get("amsgrad") else 2
    return 1 if settings.get("momentum") else 0
