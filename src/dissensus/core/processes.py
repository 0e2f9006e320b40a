"""What a posterior asks of the other processes that predict and evaluate with it (`posterior.mesh`); nothing without them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dissensus.core.drawn_functions import DrawnFunctions, FunctionPartition
from dissensus.core.trainable import TrainableModule


def connected_mesh(posterior: TrainableModule) -> Any:
    """The posterior's mesh, if it has other processes that are still connected; else None."""
    mesh = posterior.mesh
    return mesh if mesh is not None and mesh.size > 1 and mesh.is_alive else None


def partition_functions(posterior: TrainableModule, drawn: DrawnFunctions) -> FunctionPartition:
    """The drawn functions, the same on all processes, of which each runs some where they share a batch."""
    if (mesh := connected_mesh(posterior)) is None:
        return FunctionPartition(drawn)
    return mesh.partition_functions(drawn, posterior.temperature.device, lambda: not posterior.network_is_random)  # type: ignore[no-any-return]


def map_batches(
    posterior: TrainableModule,
    work: Callable[[Any], Any],
    given: Iterable[Any],
    portion: FunctionPartition,
    device: Any = "cpu",
) -> Iterator[tuple[Any, Any]]:
    """(batch, work(batch)) for every batch, in order. Processes of the mesh share the work; each gets all results.

    Args:
        portion: the functions used by `work`; those that run here, while it is done.
        device: device for the results of other processes.
    """
    mesh = connected_mesh(posterior)
    if mesh is None or posterior.particles.divided:  # whose processes all run each network together
        return ((batch, work(batch)) for batch in given)
    standing: list[Any] = [each for each in (posterior.calibration, *posterior.promises.values()) if each is not None]
    seen_by = (posterior.temperature, *((repr(each.config()), *each.buffers()) for each in standing))
    found: Iterator[tuple[Any, Any]] = mesh.map_batches(work, given, portion=portion, seen_by=seen_by, device=device)
    return found
