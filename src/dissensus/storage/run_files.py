"""Files of a run: written under a temporary name and renamed, so existing ones are complete; damage raises one clear error."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save as format_tensors
from torch import Tensor

from dissensus.storage.atomic_files import write_atomically
from dissensus.utils.file_errors import read_errors


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Writes one file and creates its folder if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically({path: content})


def read_json(path: Path) -> dict[str, Any]:
    with read_errors(path):
        return _as_table(json.loads(path.read_bytes()))


def write_json(path: Path, table: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(table, indent=1) + "\n")


def read_toml(path: Path) -> dict[str, Any]:
    with read_errors(path):
        return tomllib.loads(path.read_bytes().decode())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Writes tensors with some JSON facts about them, as safetensors."""
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_bytes(path, format_tensors(whole, metadata={"facts": json.dumps(facts)}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, facts) of a file that `write_tensors` wrote."""
    with read_errors(path), safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        return tensors, _as_table(json.loads(file.metadata()["facts"]))


def _as_table(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError(f"{type(found).__name__} instead of a table")
    return found


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
