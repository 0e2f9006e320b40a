"""Initial weights: reads a network's state dict from a .pt, .npz or .safetensors file, which may be untrusted.

No code in the file is run, nothing larger than the network needs is read, and every fault is one clear error.
"""

import logging
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from dissensus.data.file_formats import npz_arrays
from dissensus.training.checkpoint import check_archive
from dissensus.utils.batch_norm_names import statistics_layers
from dissensus.utils.checks import first_names
from dissensus.utils.file_errors import read_errors

log = logging.getLogger("dissensus")

ENTRIES = ("state_dict", "model")  # keys of the state dict in a checkpoint; the first that exists is read
WRAPPER = "module."  # prefix that nn.DataParallel adds to every name
# A file may be larger than the network: one member of an ensemble is saved with the storage of all members.
ROOM, TIMES = 2**28, 32


def load_weights(network: nn.Module, path: Path) -> None:
    """Loads the file's state dict into the network. Names and shapes must agree; dtypes are converted to the network's."""
    if path.suffix not in READERS:
        raise ValueError(f"expected weights in a file {', '.join(READERS)}, got {path}; save them as one of these")
    expected = network.state_dict()
    limit = ROOM + TIMES * sum(tensor.numel() * tensor.element_size() for tensor in expected.values())
    if (size := path.stat().st_size) > limit:
        raise ValueError(
            f"expected at most {limit:,} bytes for this network, got {size:,} in {path}; save state_dict()"
        )
    with read_errors(path, "save state_dict() again", kind=f"a whole {path.suffix} file of plain tensors at"):
        state = zero_batch_counts(network) | strip_wrapper_prefix(READERS[path.suffix](path, limit), expected, path)
        check_fits(state, expected, path)
    network.load_state_dict(state)


def check_fits(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> None:
    """Raises if names, shapes or kinds of dtypes differ from the network's, or if a number is not finite."""
    missing, extra = [k for k in expected if k not in state], [k for k in state if k not in expected]
    if missing or extra:
        differences = {"without": missing, "with unexpected": extra}
        parts = [f"{word} {first_names(names)}" for word, names in differences.items() if names]
        fix = "save the state_dict() of a network built with the same arguments"
        raise ValueError(f"expected the tensors of the network in {path}, got a file {' and '.join(parts)}; {fix}")
    for name, tensor in state.items():
        wanted = expected[name]
        like = tensor.is_floating_point() == wanted.is_floating_point() and not tensor.is_complex()
        if tensor.shape != wanted.shape or not like:
            texts = [f"{tuple(each.shape)} and {each.dtype}" for each in (wanted, tensor)]
            fix = "build the network with the sizes and types that it was saved with"
            raise ValueError(f"expected {name} of shape {texts[0]} in {path}, got {texts[1]}; {fix}")
        if not bool(tensor.to(wanted.dtype).isfinite().all()):
            raise ValueError(f"expected finite numbers in {name} of {path}, got NaN or infinity; correct them")


def strip_wrapper_prefix(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The state, with the prefix "module." of nn.DataParallel removed from all names if more names then fit the network."""
    without = {name.removeprefix(WRAPPER): tensor for name, tensor in state.items() if name.startswith(WRAPPER)}
    if len(without) < len(state) or len(without.keys() & expected.keys()) <= len(state.keys() & expected.keys()):
        return dict(state)
    log.info("%r is removed from all names in %s", WRAPPER, path)
    return without


def zero_batch_counts(network: nn.Module) -> dict[str, Tensor]:
    """Name -> 0 for the batch counts of norm layers, which are never read; files of torch 0.4 and before lack them."""
    return {
        f"{name}.{key}" if name else key: torch.zeros_like(buffer)
        for name, layer in statistics_layers(network).items()
        for key, buffer in layer.named_buffers(recurse=False)
        if key == "num_batches_tracked" and layer.momentum is not None
    }


def _read_torch(path: Path, limit: int) -> dict[str, Tensor]:
    with open(path, "rb") as file:
        packed = file.read(4) == b"PK\3\4"  # torch.save's form since 1.6, recognised as torch.load does
    if packed:
        check_archive(path)
    elif b"bytearray" in path.read_bytes():  # as in `check_archive`
        raise ValueError("it asks for a bytearray")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"expected a state dict of plain tensors in {path}, got one that asks for {asked[1]}; save network.state_dict() "
            "alone"
            if asked
            else "its pickle is damaged"
        ) from error
    entries = f"the entries {first_names(loaded)}" if isinstance(loaded, Mapping) else type(loaded).__name__
    for key in ENTRIES:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            log.info("of %s in %s %s is read", entries, path, key)
            loaded = loaded[key]
            break
    if not isinstance(loaded, Mapping) or not all(isinstance(each, Tensor) for each in loaded.values()):
        raise ValueError(f"expected a state dict of tensors in {path}, got {entries}; save network.state_dict() alone")
    return {str(name): tensor for name, tensor in loaded.items()}


def _read_numpy(path: Path, limit: int) -> dict[str, Tensor]:
    arrays = npz_arrays(path, limit)
    return {name: torch.from_numpy(array.astype(array.dtype.newbyteorder("="))) for name, array in arrays.items()}


def _read_safetensors(path: Path, limit: int) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:  # no larger than the file: nothing is compressed
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


READERS: dict[str, Callable[[Path, int], dict[str, Tensor]]] = {
    ".pt": _read_torch,
    ".pth": _read_torch,
    ".th": _read_torch,
    ".npz": _read_numpy,
    ".safetensors": _read_safetensors,
}
