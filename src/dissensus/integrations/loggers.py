"""Ready callbacks for `fit(callback=..., on_step=...)`. Where several processes train one model, only the first one writes."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any, final

from dissensus.storage.atomic_files import write_atomically
from dissensus.training.history import Epoch, TrainingStep
from dissensus.utils.extras import MissingExtra
from dissensus.utils.progress import is_reporting_process


class Logger:
    """Base class: passes the numbers of an epoch or a step to `write`."""

    def __call__(self, record: Epoch | TrainingStep) -> None:
        if is_reporting_process():
            self.write(record.row())

    def write(self, row: dict[str, Any]) -> None:
        """Writes "epoch" or "step" and its numbers by name; None where there is none, as of validation."""
        (kind, number), *rest = row.items()
        self.write_metrics(kind, number, {f"{kind}/{name}": value for name, value in rest if value is not None})

    def write_metrics(self, kind: str, number: int, metrics: dict[str, float]) -> None:
        """Writes metrics called "epoch/loss", "epoch/validation", "step/lr", and so on."""
        raise NotImplementedError


@final
class TensorBoard(Logger):
    """Scalars for TensorBoard. `target`: a folder, or a `SummaryWriter`."""

    def __init__(self, target: Any) -> None:
        own = hasattr(target, "add_scalar")
        self.writer = target if own else _import("torch.utils.tensorboard", "tensorboard").SummaryWriter(target)

    def write_metrics(self, kind: str, number: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, number)
        if kind == "epoch":
            self.writer.flush()


@final
class MLflow(Logger):
    """Metrics of MLflow's active run; MLflow starts one if there is none."""

    def __init__(self) -> None:
        self.mlflow = _import("mlflow", "mlflow")

    def write_metrics(self, kind: str, number: int, metrics: dict[str, float]) -> None:
        self.mlflow.log_metrics(metrics, step=number)


@final
class WandB(Logger):
    """Metrics of a Weights & Biases run, drawn over epochs and steps. `run`: what `wandb.init` gave; None: the active one."""

    def __init__(self, run: Any = None) -> None:
        self.run = _import("wandb", "wandb").run if run is None else run
        if self.run is None:
            raise ValueError("expected a run of Weights & Biases, got none; call wandb.init first")
        for kind in ("epoch", "step"):
            self.run.define_metric(f"{kind}/*", step_metric=kind)

    def write_metrics(self, kind: str, number: int, metrics: dict[str, float]) -> None:
        self.run.log({kind: number, **metrics})


@final
class CSV(Logger):
    """A row per epoch, or per step, in a file of its own. A resumed run continues the file, without doubling rows."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self.header = Path(path), ""

    def write(self, row: dict[str, Any]) -> None:
        header, number = ",".join(row), next(iter(row.values()))
        there = [self.header] if self.header or not self.path.is_file() else self.path.read_text().split("\n")[:-1]
        if there[:1] not in ([], [""], [header]):
            raise ValueError(f"expected {self.path} with the columns {header}, got {there[0]}; use another file")
        if not self.header:  # the first row of this run: what follows it is of a run that was stopped later
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = [header, *(line for line in there[1:] if int(line.partition(",")[0]) < number)]
            write_atomically({self.path: "".join(f"{line}\n" for line in kept).encode()})
        self.header = header
        with self.path.open("a") as file:
            file.write(",".join("" if value is None else str(value) for value in row.values()) + "\n")


@final
class Optuna:
    """Reports validation scores to a `trial` of Optuna, and raises `optuna.TrialPruned` if it should end."""

    def __init__(self, trial: Any) -> None:
        self.trial, self.optuna = trial, _import("optuna", "optuna")

    def __call__(self, epoch: Epoch) -> None:
        if epoch.selection_score is None:
            raise ValueError("expected validation data for Optuna, got none; pass validation= to fit")
        self.trial.report(epoch.selection_score, epoch.epoch)
        if self.trial.should_prune():
            raise self.optuna.TrialPruned(f"pruned after epoch {epoch.epoch}")


def _import(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtra(f"this logger needs {package}: pip install {package}", name=package) from error
