"""A run's folder: one process writes into it, and a run is resumed only from a folder with the same settings and weights."""

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from dissensus.bench import torchrun_ranks
from dissensus.storage.folder import is_posterior
from dissensus.training.history import Epoch


class RunFolder:
    """Base class of `Run`. `shared`: whether all processes started by `torchrun` share the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_shared = False

    @property
    def is_writer(self) -> bool:
        """Whether this process writes the run's files: the first, if several share it."""
        return not self.is_shared or torchrun_ranks.rank() == 0

    @property
    def ranks(self) -> Literal["independent"] | None:
        """The `ranks` argument of `fit`: processes that do not share the run train alone."""
        return "independent" if torchrun_ranks.size() > 1 and not self.is_shared else None

    def wait_until_written(self) -> None:
        """Waits until the first process has written its files, if several share the run."""
        if self.is_shared:
            torchrun_ranks.wait()

    def remove(self, path: Path) -> None:
        """Removes a file or a folder if it exists."""
        if self.is_writer and path.is_dir():
            shutil.rmtree(path)
        elif self.is_writer:
            path.unlink(missing_ok=True)

    def log(self, epoch: Epoch) -> None:
        """Adds a line to log.jsonl."""
        if self.is_writer:
            with (self.folder / "log.jsonl").open("a") as file:
                file.write(json.dumps(asdict(epoch)) + "\n")


log = logging.getLogger("dissensus")


def check_same_settings(folder: Path, asked: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    """Raises if the run in the folder has other settings; the error names the first difference.

    Published numbers ([reference]) and the folder of the task may differ.
    """
    mine, other = _flat_settings(asked), _flat_settings(there)
    for key in {**mine, **other}:
        if mine.get(key) != other.get(key) and not key.startswith("reference.") and key != "folder":
            asked_for = f"with {key} = {mine[key]!r}" if key in mine else f"without {key}"
            found = f"with {other[key]!r}" if key in other else "without it"
            raise ValueError(f"expected {folder} to hold a run {asked_for}, got one {found}; choose another --out")


def remove_unused_run(folder: Path) -> None:
    """Removes a run's folder that contains only a config, so that other settings can be tried in its place."""
    path = folder / "config.toml"
    if list(folder.iterdir()) == [path]:
        path.unlink()
        folder.rmdir()


def _flat_settings(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat_settings(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def check_own_code(folder: Path, now: Mapping[str, str], there: Mapping[str, str], *, done: bool) -> None:
    """Raises if digests of the user's code and rows differ from those of the run; only warns if the run is done."""
    then = {name: there.get(name, "none") for name in now}
    if now == then:
        return
    changed = ", ".join(f"{name} ({then[name]}, now {now[name]})" for name in now if now[name] != then[name])
    text = f"expected {folder} to be a run of your current code and data, got one before a change of {changed}"
    if not done:
        raise ValueError(f"{text}; delete the folder to run it again, or undo the change")
    log.warning("%s. Its results are those of the earlier version; delete the folder to run it again", text)


def no_run_error(folder: Path) -> FileNotFoundError:
    """The error for a folder that is not a run's; a saved posterior alone does not name its test data."""
    advice = "pass a folder that `dissensus bench` wrote"
    if is_posterior(folder):
        inside = (folder.absolute().parent / "config.toml").is_file()
        advice = f"pass {folder.parent}" if inside else f"measure it by ds.evaluate(ds.load({str(folder)!r}), loader)"
    return FileNotFoundError(
        f"expected a run folder, got no {folder / 'config.toml'}{' beside a saved posterior' * is_posterior(folder)}; {advice}"
    )


def untrained_error(folder: Path) -> FileNotFoundError:
    fix = "run `dissensus bench` or `dissensus train` first"
    return FileNotFoundError(f"expected a trained run in {folder}, got none; {fix}")
