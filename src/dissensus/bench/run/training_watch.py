"""Measurements during a run's training: one line per measurement in a .jsonl file of its folder."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dissensus.bench.run.extra_measures import with_metrics
from dissensus.core.posterior import Posterior
from dissensus.evaluation.evaluation import Evaluation
from dissensus.evaluation.member_diagnostics import MemberDistances, member_distances
from dissensus.storage.run_files import write_text
from dissensus.evaluation.member_distances import MemberDistances, member_distances
from dissensus.storage.atomic_files import write_text
from dissensus.training.history import Epoch
from dissensus.utils.file_errors import damage_error

FILE = "distances.jsonl"
ROWS = 500  # training rows at which members are compared

ComparedRows = Iterable[tuple[Tensor, Tensor]]


class MeasurementLog:
    """A callback that writes a line of numbers every `every` epochs, and one before training.

    A stopped run continues its file. An epoch that is repeated writes the same line twice.
    """

    def __init__(
        self, path: Path, names: Sequence[str], measure: Callable[[], Mapping[str, float]], *, every: int
    ) -> None:
        self.path, self.measure, self.every = path, measure, every
        there = read_measurements(path, names) if path.is_file() else {}
        # Remove an incomplete last line, so that the next one starts on a new line.
        lines = (json.dumps({"epochs": epochs, **found}) for epochs, found in there.items())
        write_text(path, "".join(f"{line}\n" for line in lines))
        if 0 not in there:
            self.write_measurement(0)  # the networks are untrained here: a checkpoint is read later

    def __call__(self, epoch: Epoch) -> None:
        if (epoch.epoch + 1) % self.every == 0:
            self.write_measurement(epoch.epoch + 1)

    def write_measurement(self, epochs: int) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"epochs": epochs, **self.measure()}) + "\n")


def read_measurements(path: Path, names: Sequence[str]) -> dict[int, dict[str, float]]:
    """Epochs done -> numbers of these names, ascending; an incomplete last line of a stopped run is skipped."""
    whole, _, _ = path.read_bytes().decode(errors="replace").rpartition("\n")
    found = {}
    for line in whole.splitlines():
        try:
            entry = json.loads(line)
            found[int(entry["epochs"])] = {name: float(entry[name]) for name in names}
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise damage_error(path, error) from error
    return dict(sorted(found.items()))


def with_measurements(evaluation: Evaluation, path: Path, names: Sequence[str], prefix: str) -> Evaluation:
    """The evaluation with arrays PREFIX/epochs and PREFIX/over/NAME of the measurements over training."""
    over = read_measurements(path, names)
    arrays = {f"{prefix}/epochs": torch.tensor(list(over), dtype=torch.int64)}
    for name in names:
        arrays[f"{prefix}/over/{name}"] = torch.tensor([found[name] for found in over.values()], dtype=torch.float64)
    return with_metrics(evaluation, {}, arrays)


# ------------------------------------------------------------------------------------------- how members differ


def distance_callback(
    folder: Path, posterior: Posterior, batches: ComparedRows, *, every: int
) -> MeasurementLog | None:
    """A callback that writes the distances between members; None for one network."""
    if posterior.particles.members < 2:
        return None
    x, y = concatenate_batches(batches)
    names = MemberDistances._fields
    return MeasurementLog(folder / FILE, names, lambda: member_distances(posterior, x, y)._asdict(), every=every)


def with_distances(evaluation: Evaluation, folder: Path, posterior: Posterior, batches: ComparedRows) -> Evaluation:
    """The evaluation with distances/SPACE of the trained members, and arrays distances/epochs and distances/over/SPACE."""
    if posterior.particles.members < 2 or not (folder / FILE).is_file():
        return evaluation
    now = member_distances(posterior, *concatenate_batches(batches))
    metrics = {f"distances/{space}": value for space, value in now._asdict().items()}
    return with_measurements(with_metrics(evaluation, metrics), folder / FILE, MemberDistances._fields, "distances")


def concatenate_batches(batches: ComparedRows) -> tuple[Tensor, Tensor]:
    """All batches concatenated: (x, y)."""
    x, y = zip(*batches, strict=True)
    return torch.cat(x), torch.cat(y)
