"""How members differ over a run's training: distances.jsonl in its folder, one line per look."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from dissensus.bench.run.measured import more
from dissensus.core.posterior import Posterior
from dissensus.evaluation.distances import DistancesOverTraining, MemberDistances, member_distances
from dissensus.evaluation.evaluation import Evaluation
from dissensus.numerics.damage import damaged
from dissensus.storage.files import write_text

FILE = "distances.jsonl"
ROWS = 500  # of the training set, at which members are compared

ComparedRows = Iterable[tuple[Tensor, Tensor]]


def watcher(folder: Path, posterior: Posterior, batches: ComparedRows, *, every: int) -> DistancesOverTraining | None:
    """A callback that writes the distances every so many epochs, those before training as well; None for one network.

    A run that was stopped goes on with the file it has. An epoch that is done twice writes the same line twice.
    """
    if posterior.particles.members < 2:
        return None
    path = folder / FILE

    def line(epochs: int, found: MemberDistances) -> str:
        return json.dumps({"epochs": epochs, **found._asdict()}) + "\n"

    def tell(epochs: int, found: MemberDistances) -> None:
        with path.open("a") as file:
            file.write(line(epochs, found))

    known = read_distances(folder) if path.is_file() else {}
    # Without a last line that is not whole: what is appended begins a line of its own.
    write_text(path, "".join(line(*each) for each in known.items()))
    record = DistancesOverTraining(posterior, *joined(batches), every=every, tell=tell)
    if 0 not in known:
        record.look(0)  # the networks are as they were built: a checkpoint is read later
    return record


def read_distances(folder: Path) -> dict[int, MemberDistances]:
    """Epochs done -> distances, ascending; a last line that a stopped run did not end is passed over."""
    path = folder / FILE
    whole, _, _ = path.read_bytes().decode(errors="replace").rpartition("\n")
    found = {}
    for line in whole.splitlines():
        try:
            entry = json.loads(line)
            epochs = int(entry.pop("epochs"))
            found[epochs] = MemberDistances(**{space: float(value) for space, value in entry.items()})
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise damaged(path, error) from error
    return dict(sorted(found.items()))


def with_distances(evaluation: Evaluation, folder: Path, posterior: Posterior, batches: ComparedRows) -> Evaluation:
    """The evaluation with distances/SPACE of the trained members, and arrays distances/epochs and distances/over/SPACE."""
    if posterior.particles.members < 2 or not (folder / FILE).is_file():
        return evaluation
    over = read_distances(folder)
    arrays = {"distances/epochs": torch.tensor(list(over), dtype=torch.int64)}
    for space in MemberDistances._fields:
        values = [getattr(found, space) for found in over.values()]
        arrays[f"distances/over/{space}"] = torch.tensor(values, dtype=torch.float64)
    now = member_distances(posterior, *joined(batches))
    metrics = {f"distances/{space}": value for space, value in now._asdict().items()}
    return more(evaluation, metrics, arrays)


def joined(batches: ComparedRows) -> tuple[Tensor, Tensor]:
    """(x, y) of all batches in one."""
    x, y = zip(*batches, strict=True)
    return torch.cat(x), torch.cat(y)
