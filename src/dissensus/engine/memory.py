"""The memory that training will need, estimated before it starts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dissensus.core import gradients
from dissensus.core.batch import Batch
from dissensus.core.posterior import Posterior
from dissensus.core.weights import Recorder
from dissensus.engine.cuda_graphs import Lanes
from dissensus.engine.fast_optimisers import use_channels_last
from dissensus.engine.training_step import autocast, request_key
from dissensus.numerics.randomness import preserve_random_state
from dissensus.utils.text import format_bytes as format_bytes
from dissensus.utils.torch_private import pytree

EXTRA_STREAMS = 2  # one for plain steps, one for the capture of graphs
# glibc returns freed tensors above 32 MiB to the system at once; of smaller ones, allocated and freed in every step, its heap
# keeps nine tenths more than are ever alive at a time, by measurements (benchmarks/training_memory.py --device cpu).
RETURNED, HEAP, FEW = 2**25, 1.9, 8  # rows: what is kept for more of them is told by that for 2 and 3


class PeakMemory(NamedTuple):
    """Bytes of a GPU at the largest use: those of tensors, and those that torch reserved for them."""

    alive: int = 0
    reserved: int = 0


UNMEASURED = PeakMemory()


@dataclass(frozen=True)
class Memory:
    """Bytes that training needs for weights, gradients, optimiser state, recorders and each member's activations."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # of one member on one batch; on a GPU with temporaries, on a CPU with what malloc keeps of them
    members: int
    workspace: int = 0  # kept by the GPU's libraries per stream
    recorded: int = 0  # kept by recorders of the weights
    drawn: int = 0  # weights sampled after training; only in `bytes_with_draw`
    # for the gradients of all members at once, measured when ways to run them were tried
    taken: PeakMemory = UNMEASURED

    @property
    def bytes_at_once(self) -> int:
        """Bytes of all tensors if members run at once: vectorised, or streamed on up to ten streams."""
        if self.taken.alive:
            return self.weights + self.recorded + self.optimizer + self.taken.alive
        lanes = min(self.members, Lanes().most) + EXTRA_STREAMS
        return self._persistent_bytes + self.members * self.activations + lanes * self.workspace

    @property
    def reserved_bytes(self) -> int:
        """Bytes that torch takes from a GPU for that: streams, and libraries in a graph, do not share memory."""
        # Libraries allocate again within a graph, by measurements (benchmarks/training_memory.py) half as much.
        return self.bytes_at_once + self.taken.reserved - self.taken.alive + self.workspace // 2

    @property
    def bytes_with_draw(self) -> int:
        """Bytes at most, with the draw after training, of which there are two copies for a while."""
        return self.bytes_at_once + 2 * self.drawn

    @property
    def bytes_in_loop(self) -> int:
        """Bytes if the graph of one member exists at a time: in a loop."""
        return self._persistent_bytes + self.activations + (1 + EXTRA_STREAMS) * self.workspace

    @property
    def _persistent_bytes(self) -> int:
        # Gradients count twice: each member's are copied into a stack.
        return self.weights + self.recorded + 2 * self.gradients + self.optimizer

    def fits_at_once(self, device: torch.device) -> bool:
        """Whether all members fit at once; always true on the host, which can swap."""
        free = free_bytes(device)
        return free is None or self.bytes_at_once - self.weights - self.recorded < 0.9 * free

    def __str__(self) -> str:
        streams = f" ({format_bytes(self.reserved_bytes)} reserved)" if self.taken.reserved else ""
        return (
            f"about {format_bytes(self.bytes_at_once)}{streams} with all members at once, "
            f"{format_bytes(self.bytes_in_loop)} one after the other "
            f"(weights {format_bytes(self.weights)}, gradients {format_bytes(self.gradients)}, optimiser "
            f"{format_bytes(self.optimizer)}, activations {format_bytes(self.activations)} a member"
            + (f", recorders {format_bytes(self.recorded)}" if self.recorded else "")
            + (f", libraries {format_bytes(self.workspace)} a stream)" if self.workspace else ")")
            + (f"; {format_bytes(self.bytes_with_draw)} while functions are drawn afterwards, " if self.drawn else "")
            + (f"{format_bytes(self.drawn)} of which stay" if self.drawn else "")
        )


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on the device; None on the host, which can swap."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def training_memory(
    posterior: Posterior, optimizer: torch.optim.Optimizer, batch: Batch, *, precision: torch.dtype | None = None
) -> Memory:
    """The memory for training on batches like this one: measured on one member on a GPU, elsewhere counted."""
    parameters = list(posterior.parameters())
    recorded = _bytes([b for part in posterior.modules() if isinstance(part, Recorder) for b in part.buffers()])
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    key = ("activations", *request_key(posterior, batch, precision))
    if (found := posterior.particles.runner.plans.get(key)) is None:
        use_channels_last(posterior.particles)  # as in training, on a GPU
        measure = _measure_member if posterior.device.type == "cuda" else _count_kept_bytes
        found = posterior.particles.runner.plans[key] = measure(posterior, batch, precision)
    activations, workspace = found
    settings, members = optimizer.param_groups[0], posterior.particles.members
    states = 2 + bool(settings.get("amsgrad")) if "betas" in settings else int(bool(settings.get("momentum")))
    drawn = sum(each.drawn_bytes() for each in (posterior, *posterior.watchers) if hasattr(type(each), "drawn_bytes"))
    held, own = _bytes([*parameters, *posterior.buffers()]) - recorded, _bytes(trained)
    return Memory(held, own, states * own, activations, members, workspace, recorded, drawn)


@contextmanager
def measure_peak(device: torch.device) -> Iterator[list[PeakMemory]]:
    """Its list gets what is `PeakMemory` inside, besides what was there before; nothing on the host."""
    found: list[PeakMemory] = []
    reset_peak(device)
    if device.type != "cuda":
        yield found
        return
    alive, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    yield found
    most, most_reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    found.append(PeakMemory(most - alive, most_reserved - reserved))


def reset_peak(device: torch.device) -> None:
    """Frees cached memory of a GPU, and counts the largest use from now on."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _measure_member(posterior: Posterior, batch: Batch, precision: torch.dtype | None) -> tuple[int, int]:
    """(bytes for forward and backward of one member, bytes that libraries keep per stream)."""
    state = gradients.detached_state(posterior).members(1)[0]
    cotangent = None
    if posterior.interaction == "couple":  # backward goes through z, too
        with torch.no_grad(), autocast(posterior.device, precision), preserve_random_state(posterior.device):
            z = posterior.member_loss(state.parameters(), state.buffers(), batch)[1]
        cotangent = pytree.tree_map(torch.zeros_like, z)

    def run() -> int:
        """Peak bytes allocated by a run, minus those before and the member's gradients."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with autocast(posterior.device, precision):
            found = gradients.member_gradients(posterior, state, batch, cotangent)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before - _bytes(list(found.gradients.values()))

    device = posterior.device
    with preserve_random_state(device), torch.cuda.stream(torch.cuda.Stream()):
        before = torch.cuda.memory_allocated()
        run()
        workspace = torch.cuda.memory_allocated() - before
        activations = run()
    return max(activations, 0), max(workspace, 0)


def _count_kept_bytes(posterior: Posterior, batch: Batch, precision: torch.dtype | None) -> tuple[int, int]:
    """(bytes for what autograd keeps for one member's backward pass, without its weights and the batch, 0)."""
    if posterior.particles.divided:  # it would be put together once more, and `fully_shard` wants a backward pass
        return 0, 0
    state = gradients.detached_state(posterior).members(1)[0]
    params = state.parameters(state.leaves())
    known = {t.untyped_storage().data_ptr() for t in [*posterior.parameters(), *posterior.buffers()]}

    def kept_sizes(rows: int) -> list[int]:
        """Bytes of every tensor that is kept for so many rows of the batch."""
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # not the tensor: a graph that holds its own output is never freed

        some = batch.map(lambda each: each[:rows].clone() if each.ndim and len(each) == batch.size else each)
        with preserve_random_state(posterior.device), autocast(posterior.device, precision), torch.enable_grad():
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                result = posterior.member_loss(params, state.buffers(), some)
            del result
        return [*kept.values()]

    found: list[int] = []
    with suppress(Exception):  # a user's network may want all rows
        parts = [*zip(*map(kept_sizes, (2, 3)), strict=True)] if batch.size > FEW else []
        if all(a == b or 3 * a == 2 * b for a, b in parts):  # as of networks that do not compare rows
            found = [a + (batch.size - 2) * (b - a) for a, b in parts]
    return sum(size if size > RETURNED else int(HEAP * size) for size in found or kept_sizes(batch.size)), 0


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
