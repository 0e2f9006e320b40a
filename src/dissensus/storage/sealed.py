"""posterior.safetensors: tensors, and in its header the config that explains them and a checksum over both.

One file is all that is believed, so that one rename replaces a saved posterior. config.json beside it is a copy to read.

Layout of safetensors: the header's length in 8 bytes, the header as JSON (name -> dtype, shape, place; "__metadata__" ->
strings), the tensors' bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from safetensors.torch import save as format_tensors
from torch import Tensor

FORMAT = 1
CONFIG, TENSORS = "config.json", "posterior.safetensors"
FIELDS = {
    "format": int,
    "method": str,
    "arguments": dict,
    "likelihood": dict,
    "network": dict,
    "tied": dict,
    "strides": dict,
}
NETWORK_FIELDS = {"structure": list, "attributes": dict, "name": str | None, "arguments": dict | None}
LIKELIHOOD_FIELDS = {"name": str, "arguments": dict}
METADATA, CHECKSUM = "dissensus", "checksum"
LONGEST_HEADER = 100_000_000  # the limit of safetensors itself
CHUNK = 1 << 20


@dataclass(frozen=True)
class Header:
    """What a file says of its tensors."""

    shapes: dict[str, tuple[int, ...]]
    entries: dict[str, Any]  # as they stand in the file
    metadata: dict[str, Any]
    start: int  # of the tensors' bytes


def is_posterior(folder: Path) -> bool:
    """Whether a posterior was saved in the folder; nothing of it is read."""
    return (folder / TENSORS).is_file()


def sealed(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[bytes, str]:
    """(bytes of posterior.safetensors, text of config.json): the same config in both."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    plain = format_tensors(whole)
    header = parse_header(plain[:8], plain[8 : 8 + int.from_bytes(plain[:8], "little")], len(plain))
    digest = _digest(config, header.entries)
    digest.update(memoryview(plain)[header.start :])
    del plain
    signed = {**config, CHECKSUM: digest.hexdigest()}
    return format_tensors(whole, metadata={METADATA: json.dumps(signed)}), json.dumps(signed, indent=1)


@contextmanager
def opened(folder: Path) -> Iterator[tuple[dict[str, Any], Header, BufferedReader]]:
    """(config, header, the open file) of a saved posterior, checked against each other."""
    path = folder / TENSORS
    if not path.is_file():
        raise FileNotFoundError(f"expected {path}, got no such file; pass a folder that save() wrote")
    with path.open("rb") as file:
        size, length = os.fstat(file.fileno()).st_size, file.read(8)
        try:
            header = parse_header(length, file.read(min(int.from_bytes(length, "little"), size, LONGEST_HEADER)), size)
        except (ValueError, RecursionError) as error:
            raise damaged(path, error) from error
        config = _checked(header.metadata.get(METADATA), path)
        checksum = config.pop(CHECKSUM, None)
        digest = _digest(config, header.entries)
        file.seek(header.start)
        while chunk := file.read(CHUNK):
            digest.update(chunk)
        if digest.hexdigest() != checksum:
            raise ValueError(
                f"expected {path} with the checksum in its header, got another; the file is truncated or was changed"
            )
        yield config, header, file


def parse_header(length: bytes, text: bytes, size: int) -> Header:
    """The header of a safetensors file of `size` bytes; ValueError where its tensors do not fill the rest exactly."""
    if len(length) < 8 or len(text) != int.from_bytes(length, "little"):
        raise ValueError(f"its header ends after {len(length) + len(text)} bytes")
    entries = json.loads(text)
    if not isinstance(entries, dict):
        raise ValueError("its header is no table")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise ValueError("its metadata are no table")
    shapes = {}
    for name, entry in entries.items():
        check_fields(entry, {"dtype": str, "shape": list, "data_offsets": list})
        shape = entry["shape"]
        if len(shape) > 64 or not all(type(each) is int and 0 <= each < 2**62 for each in shape):
            raise ValueError(f"{name} has an impossible shape")
        if len(entry["data_offsets"]) != 2 or not all(type(each) is int for each in entry["data_offsets"]):
            raise ValueError(f"{name} has an impossible place")
        shapes[name] = tuple(shape)
    start, end = 8 + len(text), 0
    for begin, stop, name in sorted((*entry["data_offsets"], name) for name, entry in entries.items()):
        # No type has more than 16 bytes: what a shape promises is compared with what is there before anything is built.
        if begin != end or stop < begin or math.prod(shapes[name]) > 8 * (stop - begin):
            raise ValueError(f"{name} does not lie where it should")
        end = stop
    if start + end != size:
        raise ValueError(f"its tensors end after {start + end} bytes, the file after {size}: truncated or changed")
    return Header(shapes, entries, metadata, start)


def damaged(path: Path, error: object) -> ValueError:
    return ValueError(f"expected a whole {path}, got a damaged one ({error}); save the posterior again")


def check_fields(saved: Any, fields: Mapping[str, Any]) -> None:
    """Raises where saved is not a dict with these keys and types of values."""
    if not isinstance(saved, dict):
        raise ValueError(f"{type(saved).__name__} where named values belong")
    for name, kind in fields.items():
        if name not in saved:
            raise ValueError(f"without {name}")
        if not isinstance(saved[name], kind):
            raise ValueError(f"{name} of type {type(saved[name]).__name__}")


def _digest(config: Mapping[str, Any], entries: Mapping[str, Any]) -> hashlib._Hash:
    """A checksum begun with the config and with what the header says of the tensors; their bytes are to follow."""
    return hashlib.sha256(json.dumps([config, entries], sort_keys=True).encode())


def _checked(text: Any, path: Path) -> dict[str, Any]:
    """A config from its text, its fields checked."""
    try:
        config = json.loads(text)
        check_fields(config, FIELDS)
        check_fields(config["network"], NETWORK_FIELDS)
        check_fields(config["likelihood"], LIKELIHOOD_FIELDS)
    except (ValueError, TypeError, RecursionError) as error:
        raise damaged(path, error) from error
    if config["format"] != FORMAT:
        raise ValueError(f"expected format {FORMAT}, got {config['format']}; load it with the version that wrote it")
    checked: dict[str, Any] = config
    return checked
