"""A run's folder; only one process writes into it, even if several share the run."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from dissensus.bench import ranks
from dissensus.training.history import Epoch


class Folder:
    """Base class of `Run`. `shared`: whether all processes started by `torchrun` share the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shared = False

    @property
    def writes(self) -> bool:
        """Whether this process writes the run's files: the first, if several share it."""
        return not self.shared or ranks.rank() == 0

    @property
    def ranks(self) -> Literal["independent"] | None:
        """The `ranks` argument of `fit`: processes that do not share the run train alone."""
        return "independent" if ranks.size() > 1 and not self.shared else None

    def written(self) -> None:
        """Waits until the first process has written its files, if several share the run."""
        if self.shared:
            ranks.wait()

    def remove(self, path: Path) -> None:
        """Removes a file or a folder if it exists."""
        if self.writes and path.is_dir():
            shutil.rmtree(path)
        elif self.writes:
            path.unlink(missing_ok=True)

    def log(self, epoch: Epoch) -> None:
        """Adds a line to log.jsonl."""
        if self.writes:
            with (self.folder / "log.jsonl").open("a") as file:
                file.write(json.dumps(asdict(epoch)) + "\n")
