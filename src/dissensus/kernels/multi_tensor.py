"""One launch for many tensors: kernels in Triton on a GPU that has it. Callers also have a plain form of what they do."""

import functools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dissensus.utils.torch_private import unseen_by_function_modes

log = logging.getLogger("dissensus")

BLOCK = 4096  # entries of a chunk, the work of one program
KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@functools.cache
def load_kernels() -> tuple[Any, Any] | None:
    """(the module of kernels, Triton's language); None where Triton is not installed."""
    try:
        import triton.language as language

        from dissensus.kernels import triton_multi_tensor
    except ImportError:
        return None
    return triton_multi_tensor, language


@functools.cache
def can_run_kernels(device: torch.device) -> bool:
    """Whether kernels can be compiled and run on the device: Triton also needs a C compiler."""
    if load_kernels() is None:
        return False
    zero = torch.zeros((), device=device)
    numbers = torch.zeros(2, dtype=torch.int64, device=device)  # one chunk of a tensor without entries
    try:
        _launch("clear", device, 1, numbers, numbers, numbers, 1, zero, KIND=torch.float32)
    except Exception as error:  # of the compiler, of the driver
        log.info("kernels in Triton are not used: %s", str(error).strip().partition("\n")[0])
        return False
    return True


def _launch(name: str, device: torch.device, programs: int, *args: Any, **constants: Any) -> None:
    kernels, language = load_kernels()  # type: ignore[misc]
    kinds = {key: getattr(language, KINDS[each]) if each in KINDS else each for key, each in constants.items()}
    with torch.cuda.device(device if device.type == "cuda" else -1):  # Triton takes the current one
        getattr(kernels, name)[(programs,)](*args, **kinds, BLOCK=BLOCK, num_warps=8)


def clear_if_flagged(flag: Tensor, tensors: Sequence[Tensor], chunks: "Chunks") -> None:
    """Sets the tensors to 0 if the flag () is above 0, without waiting for the device."""
    # To load Triton takes longer than a short run: its kernel is used where others of it have been.
    if tensors and can_run_kernels.cache_info().currsize and chunks.find(tensors):
        chunks.launch("clear", flag, KIND=tensors[0].dtype)
        return
    bad = flag > 0
    for tensor in tensors:
        tensor.masked_fill_(bad, 0.0)


class Layout(NamedTuple):
    """What must be equal for the same chunks."""

    device: torch.device
    dtypes: list[torch.dtype]
    sizes: list[torch.Size]
    strides: list[tuple[int, ...]]


class Chunks:
    """Lists of tensors cut into chunks, which one launch goes over; tables on the device are made when tensors have moved."""

    def __init__(self) -> None:
        self._layout: list[Layout] = []
        self._usable = False
        self._rows: list[list[int]] = []

    def find(self, *lists: Sequence[Tensor], rows: Sequence[Sequence[int]] = (), on: str = "cuda") -> bool:
        """Reads where the tensors lie; returns whether a kernel can go over them.

        Each list must have one dtype, and the lists the same memory layout, without holes. `rows`: of the kernel's table,
        between the addresses and the sizes; each has a number for each tensor. `on`: the kind of device.
        """
        layout = [
            Layout(each[0].device, [t.dtype for t in each], [t.shape for t in each], [t.stride() for t in each])
            for each in lists
        ]
        if layout != self._layout:
            self._layout, self._rows = layout, []
            self._usable = self._is_supported(lists, on) and can_run_kernels(layout[0].device)
            if self._usable:
                with unseen_by_function_modes():
                    self._divide_into_chunks()
        if not self._usable:
            return False
        found = [*([tensor.data_ptr() for tensor in each] for each in lists), *map(list, rows)]
        if found != self._rows:
            sizes = [shape.numel() for shape in layout[0].sizes]
            with unseen_by_function_modes():  # which would take the table for a constant of the network
                self._rows, self._table = found, self._copy_to_device(torch.tensor([*found, sizes]))
        return True

    def launch(self, name: str, *args: Any, **constants: Any) -> None:
        """Runs the kernel of this name, once for all tensors. Constants that are dtypes become Triton's."""
        if len(self._which):  # not all tensors are empty
            table = (self._table, self._which, self._start, len(self._rows[0]))
            _launch(name, self._layout[0].device, len(self._which), *table, *args, **constants)

    def _is_supported(self, lists: Sequence[Sequence[Tensor]], on: str) -> bool:
        first, *others = self._layout
        return (
            all(each.device.type == on and set(each.dtypes) <= KINDS.keys() for each in self._layout)
            and all(len(set(each.dtypes)) == 1 for each in self._layout)
            and all(
                (each.device, each.sizes, each.strides) == (first.device, first.sizes, first.strides) for each in others
            )
            and all(tensor.device == first.device for each in lists for tensor in each)
            and all(torch.empty_like(tensor, device="meta").stride() == tensor.stride() for tensor in lists[0])
        )

    def _divide_into_chunks(self) -> None:
        counts = torch.tensor([-(-shape.numel() // BLOCK) for shape in self._layout[0].sizes])
        which = torch.repeat_interleave(counts)
        start = torch.arange(len(which)) - (counts.cumsum(0) - counts)[which]
        self._which, self._start = self._copy_to_device(which), self._copy_to_device(start)

    def _copy_to_device(self, numbers: Tensor) -> Tensor:
        """A copy on the tensors' device, for which the host does not wait."""
        device = self._layout[0].device
        return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers
