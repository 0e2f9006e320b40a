"""Whether a folder holds the run that is asked for: the same settings, from the same weights; or nothing that counts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def check_same(folder: Path, asked: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    """Raises where what the run in the folder depends on is not what is asked for, and names the first that differs.

    Published numbers, [reference], and the folder of the task may differ.
    """
    mine, other = _leaves(asked), _leaves(there)
    for key in {**mine, **other}:
        if mine.get(key) != other.get(key) and not key.startswith("reference.") and key != "folder":
            asked_for = f"with {key} = {mine[key]!r}" if key in mine else f"without {key}"
            found = f"with {other[key]!r}" if key in other else "without it"
            raise ValueError(
                f"expected {folder} to hold a run {asked_for}, got one {found}; choose another --out, or delete that folder"
            )


def withdraw(folder: Path) -> None:
    """Removes a run's folder that has a config alone: nothing came of it, and other settings may be tried in its place."""
    path = folder / "config.toml"
    if list(folder.iterdir()) == [path]:
        path.unlink()
        folder.rmdir()


def _leaves(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
