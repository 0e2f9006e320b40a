"""A run's folder and who writes into it: one process, also where several share the run."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from dissensus.bench import ranks
from dissensus.training.history import Epoch


class Folder:
    """Base class of `Run`. `shared`: whether all processes that `torchrun` started work on the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shared = False

    @property
    def writes(self) -> bool:
        """Whether this process writes what comes of the run: where several share it, the first."""
        return not self.shared or ranks.rank() == 0

    @property
    def ranks(self) -> Literal["independent"] | None:
        """As `fit` takes it: processes that do not share the run each train what is theirs."""
        return "independent" if ranks.size() > 1 and not self.shared else None

    def written(self) -> None:
        """Where several processes share the run, waits until the first has written what all of them will read."""
        if self.shared:
            ranks.wait()

    def remove(self, path: Path) -> None:
        """Removes a file or a folder, where there is one."""
        if self.writes and path.is_dir():
            shutil.rmtree(path)
        elif self.writes:
            path.unlink(missing_ok=True)

    def log(self, epoch: Epoch) -> None:
        """Adds a line to log.jsonl."""
        if self.writes:
            with (self.folder / "log.jsonl").open("a") as file:
                file.write(json.dumps(asdict(epoch)) + "\n")
