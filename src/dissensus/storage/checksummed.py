"""posterior.safetensors: tensors, with their config and a checksum over both in the metadata.

`load` reads only this file, so that one rename replaces a saved posterior; config.json is a copy for people to read. The
safetensors library reads the file and refuses tensors that do not fill it exactly; it cannot contain code.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save as format_tensors
from torch import Tensor

from dissensus.core.description import translate_settings
from dissensus.utils.file_errors import read_errors

FORMAT = 2
CONFIG, TENSORS = "config.json", "posterior.safetensors"
FIELDS = {
    "format": int,
    "method": str,
    "arguments": dict,
    "likelihood": {"name": str, "arguments": dict},
    "network": {"structure": list, "attributes": dict, "name": str | None, "arguments": dict | None},
    "tied": dict,
    "strides": dict,
    "kept": {"frozen": list, "eval": list, "loop": list},
    "checksum": str,
}
METADATA, CHECKSUM = "dissensus", "checksum"
SAVE_AGAIN = "save the posterior again"


def is_posterior(folder: Path) -> bool:
    """Whether a posterior was saved in the folder; its content is not read."""
    return (folder / TENSORS).is_file()


def serialise_posterior(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[bytes, str]:
    """(bytes of posterior.safetensors, text of config.json), with the same config in both."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    signed = {**config, CHECKSUM: checksum(config, whole)}
    return format_tensors(whole, metadata={METADATA: json.dumps(signed)}), json.dumps(signed, indent=1)


def read_posterior(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config, name -> tensor) of a saved posterior, after checking the checksum.

    The file is memory-mapped: tensors take memory only when they are copied.
    """
    path = folder / TENSORS
    if not path.is_file():
        raise FileNotFoundError(f"expected {path}, got no such file; pass a folder that save() wrote")
    while True:
        # `safe_open` opens the path twice, for the header and for the tensors, and another process may save in between.
        # Then header and tensors do not belong together, the checksum differs, and the new file is read. A new file is
        # recognised by its inode number, which no other file can get while this one is open. So an error means damage, and
        # no error means that everything came from one save.
        with path.open("rb") as first:
            try:
                return _read_checked(path)
            except ValueError:
                if os.path.samestat(os.fstat(first.fileno()), os.stat(path)):
                    raise


def _read_checked(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with read_errors(path, SAVE_AGAIN), safe_open(path, framework="pt") as file:
        config: dict[str, Any] = json.loads(file.metadata()[METADATA])
        check_fields(config, FIELDS)
        if config["format"] != FORMAT:
            hint = "load it with the version that wrote it"
            raise ValueError(f"expected format {FORMAT}, got {config['format']}; {hint}")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        if config.pop(CHECKSUM) != checksum(config, tensors):
            hint = "the file is truncated or was changed"
            raise ValueError(f"expected {path} to have the checksum in its header, got another; {hint}")
        for each in (config, *filter(None, [config.get("base")])):
            if "class" not in each:  # a method of the library
                each["arguments"] = translate_settings(each["method"], each["arguments"])
    return config, tensors


def checksum(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Checksum of the config and of the tensors' names, dtypes, shapes and bytes, independent of their order in the file."""
    described = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    digest = hashlib.sha256(json.dumps([config, described], sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(tensors[name].flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_fields(saved: Any, fields: Mapping[str, Any]) -> None:
    """Raises unless `saved` is a dict with these keys and types of values, including nested dicts."""
    for name, kind in fields.items():
        if isinstance(kind, dict):
            check_fields(saved[name], kind)
        elif not isinstance(saved[name], kind):
            raise ValueError(f"{name} of type {type(saved[name]).__name__}")
