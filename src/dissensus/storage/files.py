"""Files of a run: written under a temporary name and renamed, so one that exists is whole; damage is one clear error."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save as format_tensors
from torch import Tensor

from dissensus.storage.atomic import write_whole


def damaged(path: Path, why: object) -> ValueError:
    """The error for a file that cannot be what it should be."""
    return ValueError(f"expected a whole {path}, got a damaged one ({why}); delete it and run the command again")


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Writes one file, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole({path: content})


def read_json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise damaged(path, error) from error
    if not isinstance(table, dict):
        raise damaged(path, f"{type(table).__name__} instead of a table")
    return table


def write_json(path: Path, table: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(table, indent=1) + "\n")


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode())
    except (ValueError, RecursionError) as error:  # not TOML, or not text
        raise damaged(path, error) from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Tensors with a few JSON facts about them, as safetensors."""
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_bytes(path, format_tensors(whole, metadata={"facts": json.dumps(facts)}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, facts) of a file that `write_tensors` wrote."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            facts = json.loads((file.metadata() or {})["facts"])
    except FileNotFoundError:
        raise
    except Exception as error:  # whatever the parsers underneath raise
        raise damaged(path, error) from error
    if not isinstance(facts, dict):
        raise damaged(path, f"{type(facts).__name__} instead of facts")
    return tensors, facts


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
