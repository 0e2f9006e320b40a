"""A run's folder: predictions and evaluations as files, and the provenance of their numbers.

One process writes into it, and a run is resumed only from a folder with the same settings and weights.
"""

import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from dissensus.core.predictive import ClassificationPredictive, Predictive, RegressionPredictive
from dissensus.evaluation.evaluation import Evaluation
from dissensus.evaluation.loader_predictions import Predictions
from dissensus.evaluation.robustness_curves import AttackedInputs, CorruptedCounts
from dissensus.storage.atomic_files import read_json, read_tensors, write_json, write_tensors
from dissensus.storage.folder import is_posterior
from dissensus.utils.file_errors import damage_error, read_errors
from dissensus.version import __version__

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
    """Removes a run's folder without results, so that other settings can be tried in its place."""
    paths = list(folder.iterdir())
    if {path.name for path in paths} <= {"config.toml", WARNINGS}:
        for path in paths:
            path.unlink()
        folder.rmdir()


WARNINGS = "warnings.json"  # logged during the run: message without its numbers -> its last text


@contextmanager
def keep_warnings(folders: Sequence[Path]) -> Iterator[None]:
    """Context that writes the library's logged warnings to warnings.json in these run folders."""

    def keep(record: logging.LogRecord) -> bool:
        said = {record.getMessage() if record.msg == "%s" else str(record.msg): record.getMessage()}
        for folder in folders if record.levelno >= logging.WARNING else ():
            write_json(folder / WARNINGS, read_warnings(folder) | said)
        return True

    log.addFilter(keep)  # not a handler: Python prints warnings by itself only if a log has none
    try:
        yield
    finally:
        log.removeFilter(keep)


def read_warnings(folder: Path) -> dict[str, str]:
    """The warnings kept with a run."""
    return read_json(folder / WARNINGS) if (folder / WARNINGS).is_file() else {}


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


COUNTS = ("nll", "counts", "confidence", "correct", "clean", "example_accuracy", "example_nll", "examples")
PROMISED = "promised/"  # prefix of the names of promises' tables
FACTS = ("kind", "score", "ood", "shift", "corruptions", "severities", "notes")


def write_predictions(path: Path, predictions: Predictions) -> None:
    classes = isinstance(predictions.predictive, ClassificationPredictive)
    names = ("log_probabilities",) if classes else ("means", "variances")
    described = dict(zip(names, predictions.predictive.defining_tensors(), strict=True))
    tensors = {"targets": predictions.targets, **described, **predictions.examples}
    if predictions.energy is not None:
        tensors["energy"] = predictions.energy
    facts = {name: getattr(predictions, name) for name in ("shapes", "milliseconds", "networks")}
    write_tensors(path, tensors, {"kind": type(predictions.predictive).__name__, **facts})


def read_predictions(path: Path) -> Predictions:
    tensors, facts = read_tensors(path)
    with read_errors(path):
        predictive: Predictive
        if facts["kind"] == "ClassificationPredictive":
            predictive = ClassificationPredictive(tensors["log_probabilities"])
        else:
            predictive = RegressionPredictive(tensors["means"], tensors["variances"])
        return Predictions(
            predictive=predictive,
            targets=tensors["targets"],
            energy=tensors.get("energy"),
            examples={name: tensor for name, tensor in tensors.items() if name.startswith("examples/")},
            shapes=tuple(map(tuple, facts["shapes"])),
            milliseconds=facts["milliseconds"],
            networks=facts["networks"],
        )


def write_counts(path: Path, counts: CorruptedCounts) -> None:
    facts = {"types": counts.types, "severities": counts.severities}
    promised = {f"{PROMISED}{name}": table for name, table in counts.promised.items()}
    write_tensors(path, {name: getattr(counts, name) for name in COUNTS} | promised, facts)


def read_counts(path: Path) -> CorruptedCounts:
    tensors, facts = read_tensors(path)
    with read_errors(path):
        sums: dict[str, Any] = {name: tensors[name] for name in COUNTS}
        sums["promised"] = {n.removeprefix(PROMISED): each for n, each in tensors.items() if n.startswith(PROMISED)}
        return CorruptedCounts(types=tuple(facts["types"]), severities=tuple(facts["severities"]), **sums)


def write_attacked(path: Path, attacked: AttackedInputs) -> None:
    facts = {"names": attacked.names, "epsilons": attacked.epsilons}
    write_tensors(path, {"values": attacked.values, **attacked.fooling}, facts)


def read_attacked(path: Path) -> AttackedInputs:
    tensors, facts = read_tensors(path)
    with read_errors(path):
        return AttackedInputs(tuple(facts["names"]), tuple(facts["epsilons"]), tensors.pop("values"), tensors)


def write_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """Writes arrays.safetensors, then metrics.json."""
    write_tensors(folder / "arrays.safetensors", evaluation.arrays, {})
    facts = {name: getattr(evaluation, name) for name in FACTS}
    write_json(folder / "metrics.json", facts | {"metrics": evaluation.metrics})


def read_evaluation(folder: Path) -> Evaluation:
    """Reads the Evaluation of a run folder; the run's warnings are in its notes."""
    path = folder / "metrics.json"
    facts: dict[str, Any] = read_json(path)
    arrays: dict[str, Tensor] = read_tensors(folder / "arrays.safetensors")[0]
    if "test/nll" not in arrays or arrays["test/nll"].ndim != 1:
        raise damage_error(folder / "arrays.safetensors", "without test/nll")
    with read_errors(path):
        names = ("ood", "shift", "corruptions", "severities")
        several: dict[str, Any] = {name: tuple(facts.pop(name)) for name in names}
        notes = facts.pop("notes") | read_warnings(folder)
        return Evaluation(arrays=arrays | read_history(folder), notes=notes, **several, **facts)


def read_history(folder: Path) -> dict[str, Tensor]:
    """training/epochs (E,), and training/over/loss and validation (E,) as far as logged, from a run's log.jsonl."""
    path = folder / "log.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    names = [name for name in ("loss", "validation") if rows and all(row.get(name) is not None for row in rows)]
    found = {f"training/over/{name}": torch.tensor([row[name] for row in rows]) for name in names}
    return found | ({"training/epochs": torch.arange(1, len(rows) + 1)} if found else {})


ORIGIN = ("commit", "torch", "device", "command")  # the facts in each row of a table


def provenance(device: torch.device) -> dict[str, Any]:
    """Facts about this program and this machine, for the run's config."""
    return {
        "dissensus": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "command": command(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def command() -> str:
    """The command line as `dissensus …`, however it was started; "python" for other programs."""
    program = Path(sys.argv[0])
    ours = program.stem == "dissensus" or program.parts[-2:] == ("dissensus", "__main__.py")
    return " ".join(["dissensus", *sys.argv[1:]]) if ours else "python"


def commit() -> str:
    """The commit of the running source, with "+ changes" if files differ from it; "none" outside a repository.

    The environment variable DISSENSUS_COMMIT gives the commit if the files came without their history.
    """
    if named := os.environ.get("DISSENSUS_COMMIT"):
        return named
    source = Path(__file__)
    if _git(source.parent, "ls-files", "--error-unmatch", source.name) is None:
        return "none"  # an installed package, perhaps inside another repository
    changed = _git(source.parent, "status", "--porcelain", "--untracked-files=no")
    return f"{_git(source.parent, 'rev-parse', '--short=12', 'HEAD')}{' + changes' if changed else ''}"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"{device.type} ({platform.processor() or platform.machine()})"


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
