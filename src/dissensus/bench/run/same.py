"""Whether a folder holds the run that is asked for: the same settings, from the same weights; or nothing that counts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dissensus.bench.task.config import RunConfig


def check_same(folder: Path, asked: RunConfig, there: RunConfig) -> None:
    """Raises where the settings of the run in the folder are not those asked for, and names the first that differs."""
    if there == asked:
        return
    mine, other = _leaves(asked.table()), _leaves(there.table())
    key = next(k for k in {**mine, **other} if mine.get(k) != other.get(k))
    asked_for = f"with {key} = {mine[key]!r}" if key in mine else f"without {key}"
    found = f"with {other[key]!r}" if key in other else "without it"
    raise ValueError(
        f"expected {folder} to hold a run {asked_for}, got one {found}; choose another --out, or delete that folder"
    )


def check_same_weights(folder: Path, digest: Mapping[str, str], provenance: Mapping[str, Any]) -> None:
    """Raises where the run in the folder started from other contents of its file of weights."""
    for key, value in digest.items():
        if provenance.get(key) != value:
            raise ValueError(
                f"expected {folder} to hold a run from these network.weights, got one from other contents of that file; "
                "choose another --out, or delete that folder"
            )


def withdraw(folder: Path) -> None:
    """Removes a run's folder that has a config alone: nothing came of it, and other settings may be tried in its place."""
    path = folder / "config.toml"
    if list(folder.iterdir()) == [path]:
        path.unlink()
        folder.rmdir()


def _leaves(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
