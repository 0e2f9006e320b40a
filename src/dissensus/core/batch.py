"""Batches: x is a tensor, a tuple of tensors or a dict of tensors; a batch is (x, y), (x, y, weight) or a dict with labels."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dissensus.utils.arrays import as_tensor
from dissensus.utils.network_outputs import output_tensor
from dissensus.utils.torch_private import version_of

Inputs = Tensor | tuple[Any, ...] | dict[str, Any]

LABELS = ("labels", "label")  # entries of a mapping that are its targets
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # torch lacks their min
PINNED = 2**26  # bytes of a tensor up to which it goes to a GPU through pinned memory, which torch keeps


class Batch(NamedTuple):
    """Inputs, targets and optional example weights. Made and checked by `of` when a loader yields a batch."""

    x: Inputs
    y: Tensor
    weight: Tensor | None = None

    @classmethod
    def from_tuple(cls, given: Any, *, anywhere: bool = False, look: Callable[[float], object] = float) -> "Batch":
        """A batch from what a loader yields, checked; `look` is called with the largest input (`check_finite`)."""
        if isinstance(given, cls):  # checked when it was made
            return given
        given = split_labels(given, required=True)
        if not isinstance(given, tuple | list) or len(given) not in (2, 3):
            what = type(given).__name__ + (f" of length {len(given)}" if hasattr(given, "__len__") else "")
            raise TypeError(f"expected batches (x, y) or (x, y, weight), got {what}; let the loader yield such tuples")
        x, y, weight = (*given, None)[:3]
        x = x if isinstance(x, Tensor) else convert_inputs(x)
        y = y if isinstance(y, Tensor) else as_tensor(y)
        weight = weight if weight is None or isinstance(weight, Tensor) else as_tensor(weight)
        for what, each in (("targets", y), ("example weights", y if weight is None else weight)):
            if not isinstance(each, Tensor):
                raise TypeError(f"expected {what} as a tensor, got {type(each).__name__}; use torch.as_tensor")
        check_weight(weight)
        look(check_finite(x, anywhere=anywhere))
        return cls(x, y.long() if y.dtype in UNSIGNED else y, weight)

    @property
    def size(self) -> int:
        """Number of examples."""
        return count_examples(self.x)

    def tensors(self) -> list[Tensor]:
        """All its tensors, in a fixed order."""
        return [*input_tensors(self.x), self.y, *(() if self.weight is None else (self.weight,))]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """The batch with function applied to every tensor in it."""
        weight = None if self.weight is None else function(self.weight)
        return Batch(map_tensors(self.x, function), function(self.y), weight)

    def to(self, device: torch.device) -> "Batch":
        """The batch on the device."""
        here = all(each.device == device for each in self.tensors())
        return self if here else self.map(lambda tensor: _move_tensor(tensor, device))


def split_labels(given: Any, labels: str | None = None, *, required: bool = False) -> Any:
    """(x, y) of a mapping, such as transformers' BatchEncoding: its entry `labels` and the rest; anything else unchanged.

    `labels`: None is "labels" or "label". `required`: whether a mapping without that entry is refused.
    """
    if isinstance(given, tuple) or not isinstance(given, Mapping):  # the quicker question first
        return given
    names = LABELS if labels is None else (labels,)
    if (name := next((each for each in names if each in given), None)) is not None:
        return {key: value for key, value in given.items() if key != name}, given[name]
    if required:
        wanted, got = " or ".join(map(repr, names)), ", ".join(map(repr, given)) or "no entries"
        raise TypeError(f"expected batches with an entry {wanted}, got {got}; pass ds.Loader(loader, labels=...)")
    return given


def drop_labels(network: nn.Module, x: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping without its labels, since it may be a loader's batch; those that the network's forward needs are kept."""
    parameters = inspect.signature(network.forward).parameters.items()
    dropped = {*LABELS} - {name for name, each in parameters if each.default is each.empty}
    return {name: value for name, value in x.items() if name not in dropped}


def check_input_names(network: nn.Module, x: Inputs) -> None:
    """Raises if a tuple or dict of inputs has an entry that the network's forward does not take."""
    if isinstance(x, Tensor):
        return
    parameters = inspect.signature(network.forward).parameters
    kinds = [each.kind.name for each in parameters.values()]
    if not isinstance(x, Mapping):
        if len(x) > (most := sum("POSITIONAL_" in kind for kind in kinds)) and "VAR_POSITIONAL" not in kinds:
            got = f"{len(x)} tensors, but {type(network).__name__}.forward takes {most}"
            raise ValueError(f"expected one batch of inputs, got {got}; stack a list of examples, torch.stack(x)")
    elif extra := [repr(name) for name in x if name not in parameters and "VAR_KEYWORD" not in kinds]:
        got = f"{', '.join(extra)}, which {type(network).__name__}.forward does not take"
        raise ValueError(f"expected inputs that the network takes, got {got}; rename or remove them")


def call_network(network: nn.Module, x: Inputs) -> Tensor:
    """The output tensor of the network for x."""
    outputs = all_outputs(network, x)
    return outputs if isinstance(outputs, Tensor) else output_tensor(outputs)


def all_outputs(network: nn.Module, x: Inputs) -> Any:
    """What the network returns for x: a tuple is passed as positional arguments, a dict as keyword arguments."""
    if isinstance(x, Tensor):  # first, here and below: it is the usual case and the quickest question
        return network(x)
    if isinstance(x, Mapping):
        return network(**x)
    return network(*x) if isinstance(x, tuple | list) else network(x)


def convert_inputs(x: Any) -> Inputs:
    """x with arrays and DataFrames as tensors."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, Mapping):
        return {name: as_tensor(value) for name, value in x.items()}
    return tuple(map(as_tensor, x)) if isinstance(x, tuple | list) else as_tensor(x)


def input_tensors(x: Inputs) -> list[Tensor]:
    """The tensors in x, in a fixed order; raises if one is sparse."""
    if isinstance(x, Tensor):
        found = [x]
    else:
        values = x.values() if isinstance(x, Mapping) else x if isinstance(x, tuple | list) else ()
        found = [value for value in values if isinstance(value, Tensor)]
    for tensor in found:
        if tensor.layout != torch.strided:
            raise ValueError(f"expected dense inputs, got {tensor.layout}; pass x.to_dense()")
    return found


def map_tensors(x: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    """x with function applied to every tensor in it."""
    if isinstance(x, Tensor):
        return function(x)

    def one(value: Any) -> Any:
        return function(value) if isinstance(value, Tensor) else value

    if isinstance(x, Mapping):
        return {name: one(value) for name, value in x.items()}
    return tuple(one(value) for value in x)


def split_rows(x: Inputs, count: int | None) -> Iterator[Inputs]:
    """x in parts of so many rows, the last of what is left; None: as it is."""
    if count is None or count >= (size := count_examples(x)):
        return iter((x,))
    return (map_tensors(x, itemgetter(slice(i, i + count))) for i in range(0, size, count))


def move_to_device(x: Inputs, device: torch.device) -> Inputs:
    """x on the device."""
    return map_tensors(x, lambda tensor: _move_tensor(tensor, device))


def _move_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; to a GPU from pinned memory: from ordinary memory the copy would wait for the step before."""
    if tensor.device == device:
        return tensor
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.nbytes <= PINNED and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    # Copies to the host block: otherwise the values could be read before the copy is done.
    return tensor.to(device, non_blocking=device.type != "cpu")


def count_examples(x: Inputs) -> int:
    """Number of examples: the length of the first tensor's first axis."""
    if isinstance(x, Tensor) and x.layout == torch.strided and (shape := x.shape):
        return shape[0]
    return _batched_tensors(x)[0].shape[0]


def _batched_tensors(x: Inputs) -> list[Tensor]:
    """The tensors in x; raises if there is none, or the first has no batch axis."""
    found = input_tensors(x)
    if not found:
        hint = "convert x with torch.as_tensor, or pass a loader to ds.predict"
        raise TypeError(f"expected inputs as a tensor, tuple or dict of tensors, got {_describe_types(x)}; {hint}")
    if found[0].ndim == 0:
        raise ValueError("expected inputs with a batch axis first, got a scalar; pass tensors of shape (B, ...)")
    return found


def _describe_types(x: object) -> str:
    """The type of inputs that hold no tensor, with the types in a tuple or dict."""
    held = x.values() if isinstance(x, Mapping) else x if isinstance(x, tuple | list) else ()
    kinds = ", ".join(dict.fromkeys(type(each).__name__ for each in held))
    return f"{type(x).__name__} of {kinds}" if kinds else type(x).__name__


class UnchangedInputs:  # not a generator, which takes three times as long
    """Raises at exit if x was modified in place: the next member would get other inputs."""

    def __init__(self, x: Inputs) -> None:
        # inference tensors count no versions
        self.given = [(each, version_of(each)) for each in input_tensors(x) if not each.is_inference()]

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object = None, *_: object) -> None:
        for tensor, version in self.given:
            if kind is None and version_of(tensor) != version:
                advice = "write x = x / 255, not x /= 255, or nn.ReLU() instead of nn.ReLU(inplace=True)"
                got = f"one that changes them in place; {advice}"
                raise ValueError(f"expected a network that does not change its inputs, got {got}")


class SmallBatchGuard:  # not a generator, which takes three times as long
    """Turns torch's error for batch norm on a batch of one, which has no variance, into one with a remedy."""

    def __init__(self, x: Inputs) -> None:
        self.x = x

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError) and "more than 1 value per channel" in str(error):
            got = f"a batch of {count_examples(self.x)}; pass drop_last=True to the loader, or another size"
            raise ValueError(f"expected at least two examples per batch for batch norm, got {got}") from error


def check_finite(x: Inputs, *, anywhere: bool = False) -> float:
    """The largest value; raises if x has no tensor, or one, on the host or `anywhere`, with NaN or +∞ (masks use −∞)."""
    largest = -math.inf
    for tensor in _batched_tensors(x):
        if not (anywhere or tensor.is_cpu) or not tensor.is_floating_point() or not (size := tensor.numel()):
            continue
        quicker = Tensor.amax if size > 2**14 else Tensor.max
        if not (most := quicker(tensor).item()) < math.inf:  # NaN is the largest where there is one
            bad = (~(tensor < math.inf)).nonzero()  # (number, axes)
            row = f" in row {int(bad[0, 0])} of a batch" if tensor.ndim else ""
            raise ValueError(f"expected finite inputs, got NaN or infinity{row}; clean them (−inf is fine, for masks)")
        largest = max(largest, most)
    return largest


def check_weight(weight: Tensor | None) -> None:
    """Raises if weights are integers or a scalar, or (checked on the host only) negative or not finite. All may be 0."""
    if weight is None:
        return
    mask = weight.dtype == torch.bool
    if weight.ndim == 0 or not (mask or weight.is_floating_point()):
        hint = "use .float(), or remove a third tensor that is no weight (an index)"
        got = f"{weight.dtype} of shape {tuple(weight.shape)}"
        raise ValueError(f"expected one floating-point weight per example, got {got}; {hint}")
    if weight.device.type != "cpu" or not weight.numel() or mask:
        return
    smallest, largest = weight.aminmax()  # both NaN where there is one
    if not (bool(smallest >= 0) and bool(largest < math.inf)):
        bad = (~((weight >= 0) & (weight < math.inf))).nonzero()  # (number, axes)
        at = f"{float(weight[tuple(bad[0])]):g} in row {int(bad[0, 0])} of a batch"
        raise ValueError(f"expected finite example weights of at least 0, got {at}; use 0 for rows that do not count")
