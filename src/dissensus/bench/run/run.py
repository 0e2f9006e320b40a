"""One run of a bench: train, predict, measure. Each stage reads the files of the stage before; finished stages are kept.

runs/ID/config.toml                     the run's settings and provenance
        log.jsonl                       one line per epoch
        checkpoint.pt                   while training: to continue a stopped run
        posterior/                      `dissensus.load` reads it
        calibrated/                     the posterior with the task's [calibration]
        training.json                   seconds, the epoch kept, the temperature
        warnings.json                   warnings logged by the run, if there were any
        predictions/SPLIT.safetensors   the members' predictions
        metrics.json, arrays.safetensors
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from dissensus import storage
from dissensus.bench import torchrun_ranks
from dissensus.bench.rows.dataset_rows import SetKind, TaskRows, standardised_batches
from dissensus.bench.rows.task_rows import DataCache, TaskData
from dissensus.bench.run import build, prediction_splits, run_folder
from dissensus.bench.run.evaluate_run import evaluation_of_run
from dissensus.bench.run.training_watch import DISTANCE_ROWS, distance_callback, learning_callback
from dissensus.bench.task.config import RunConfig, run_config_from_table
from dissensus.bench.task.objects import parse_object
from dissensus.calibration.calibrate import OF_CLASSES, OF_REGRESSIONS, calibrate, temperature_scale
from dissensus.calibration.conformal import CLASS_SCORES, FORMER_SCORES, INTERVAL_SCORES, conformal
from dissensus.calibration.selective import selective
from dissensus.core.posterior import Posterior
from dissensus.data import Batches
from dissensus.data.catalogue import data_folder
from dissensus.engine.break_even import decide_by_count
from dissensus.engine.prediction_loop import draw_once
from dissensus.evaluation.evaluate import checked_score
from dissensus.evaluation.evaluation import Evaluation
from dissensus.evaluation.loader_predictions import Predictions
from dissensus.numerics.randomness import preserve_random_state
from dissensus.storage.atomic_files import read_toml, write_json, write_text
from dissensus.training.fit import fit, refresh
from dissensus.training.history import Epoch
from dissensus.utils.checks import one_of

CALIBRATED = "calibrated"  # folder of the calibrated posterior


def check_calibration(settings: Mapping[str, Any], data: Mapping[str, Any], kind: SetKind) -> None:
    """Raises if [calibration] has nothing to fit, or does not fit this kind of task."""
    if kind == "segmentation":
        raise ValueError("expected rows with one label for [calibration], got masks; set training.temperature = true")
    if not data.get("calibration"):
        raise ValueError("expected rows held out for [calibration], got none; set rows to their number")
    if not settings.keys() & {"method", "level", "risk"}:
        raise ValueError("expected something to fit in [calibration], got none; set method, level or risk")
    regression = kind == "regression"
    if "method" in settings:
        one_of("calibration.method", settings["method"], OF_REGRESSIONS if regression else OF_CLASSES)
    if "score" in settings:
        one_of("calibration.score", settings["score"], INTERVAL_SCORES if regression else CLASS_SCORES)
    if regression and "risk" in settings:
        raise ValueError("expected a classification for calibration.risk, got a regression; leave it out")


def fit_calibration(
    posterior: Posterior, settings: Mapping[str, Any], rows: TaskRows, loader: Callable[[TaskRows], Batches]
) -> None:
    """Calibrates the posterior and fits promises: `conformal` if there is a level, `selective` if there is a risk.

    If both are requested, half of the rows are for the calibration and the others for promises, because rows used for a
    calibration are no longer held out. A temperature from training is fitted again: it may have used all rows.
    """
    own = None if float(posterior.temperature) == 1.0 else "temperature"
    promised, method = settings.keys() & {"level", "risk"}, settings.get("method", own)
    halve = promised and method
    first, second = (rows.select(torch.arange(start, len(rows.y), 2)) if halve else rows for start in (0, 1))
    if method:
        calibrate(posterior, loader(first), method)
    if "level" in settings:
        conformal(posterior, loader(second), level=settings["level"], score=settings.get("score"))
    if "risk" in settings:
        selective(posterior, loader(second), risk=settings["risk"], confidence=settings.get("confidence", 0.95))


ON_DEVICE = 1 << 31  # bytes: training rows up to this size lie on the device, where a batch is made faster
Tell = Callable[[str], object]
TIMED_BATCHES = 3  # by which the time of a training is estimated, after as many that warm up
CHECKPOINT_SECONDS = 30.0  # between two checkpoints of a training: a stopped run loses at most this


def ignore_message(text: str) -> None:
    """Ignores a message."""


class Run:
    """A run folder and its config. `load` reads the data when a stage needs them; several runs may share one."""

    def __init__(self, folder: Path, config: RunConfig, *, load: DataCache | None = None) -> None:
        self.folder, self.config = folder, config
        self.is_shared = False  # whether all processes started by `torchrun` share the run
        self.load = load or DataCache()
        self.is_new = False  # whether `begin` made the folder

    @classmethod
    def open(cls, folder: Path, *, source: str | None = None) -> Run:
        """Opens the run in a folder made by `begin`; source: the folder of the user's data."""
        path = folder / "config.toml"
        if not path.is_file():
            raise run_folder.no_run_error(folder)
        table = read_toml(path)
        table.pop("provenance", None)
        asked = table.get("evaluation", {})
        asked |= {"score": FORMER_SCORES.get(asked["score"], asked["score"])} if "score" in asked else {}
        return cls(folder, run_config_from_table(table, str(path)), load=DataCache(source))

    def check(self) -> None:
        """Raises if a setting is wrong or missing; nothing is written."""
        for split in (prediction_splits.CORRUPT, prediction_splits.CHOOSE):
            prediction_splits.corruptions(self.config, split)
        prediction_splits.attack_curves(self.config)
        if self.config.calibration:
            check_calibration(self.config.calibration, self.config.data, self.kind)
            if self.config.precision != "float32":
                got = f'evaluation.precision = "{self.config.precision}"'
                raise ValueError(f"expected float32 predictions for [calibration], got {got}; leave one out")
        checked_score(self.config.evaluation.get("score"), self.kind, members=2)
        build.check_complete(self.config)
        if self.kind != "classification" and "curves_every" in self.config.evaluation:
            raise ValueError(f"expected classes for evaluation.curves_every, got a {self.kind}; leave the key out")
        with preserve_random_state(self.device):
            build.try_network(self.config, lambda: self.data, folders=self.folders)
            build.try_method(self.config, lambda: self.data, folders=self.folders)

    def begin(self) -> None:
        """Checks the settings, then makes the folder, or checks that an existing one belongs to the same run."""
        self.check()
        path = self.folder / "config.toml"
        digest = build.weights_digest(self.config, self.folders)
        if path.is_file():
            there = Run.open(self.folder).config.table() | {key: self.provenance.get(key) for key in digest}
            run_folder.check_same_settings(self.folder, self.config.table() | digest, there)
            self._check_own_code(lambda: self.data, done=(self.folder / "metrics.json").is_file())
            return
        import tomli_w  # Python's tomllib only reads

        code = build.own_digests(self.config, lambda: self.data)
        made = run_folder.provenance(self.device) | digest | ({"code": code} if code else {})
        write_text(path, tomli_w.dumps(self.config.table() | {"provenance": made}))
        self.is_new = True

    @property
    def data(self) -> TaskData:
        return self.load(self.config.data, self.config.kind, self.config.folder)

    @property
    def kind(self) -> SetKind:
        return self.config.kind

    @property
    def folders(self) -> list[Path]:
        """The folders in which the task's files are searched, in order."""
        beside = Path(self.config.folder) if self.config.folder else None
        return [folder for folder in (data_folder(self.load.folder), beside) if folder is not None]

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def provenance(self) -> dict[str, Any]:
        table = read_toml(self.folder / "config.toml").get("provenance", {})
        return table if isinstance(table, dict) else {}

    def loader(self, rows: TaskRows, *, shuffle: bool = False) -> Batches:
        training, scenes = self.config.training, self.kind == "segmentation"
        if shuffle and (scenes or rows.x.nbytes <= ON_DEVICE):
            rows = TaskRows(rows.x.to(self.device), rows.y.to(self.device))
        asked = self.config.evaluation.get("batch_size", 4 if scenes else 250)
        how = {"shuffle": shuffle, "batch_size": training.get("batch_size", 64) if shuffle else asked}
        augment = parse_object("augment", training.get("augment", "none") if shuffle else "none").build()
        return standardised_batches(rows, self.data.standardiser, targets=self.data.targets, augment=augment, **how)

    @property
    def is_writer(self) -> bool:
        """Whether this process writes the run's files: the first, if several share it."""
        return not self.is_shared or torchrun_ranks.rank() == 0

    @property
    def training_mesh(self) -> Literal["independent"] | None:
        """The `mesh` argument of `fit`: processes that do not share the run train alone."""
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

    @property
    def is_trained(self) -> bool:
        return (self.folder / "training.json").is_file()

    def train_alone(self, *, progress: bool = False) -> None:
        """Trains and saves the posterior; continues from a checkpoint if there is one. `train_runs` calls it."""
        if self.is_trained:
            self.remove(self.folder / "checkpoint.pt")  # left by a run that was stopped at its very end
            return
        training, checkpoint = self.config.training, self.folder / "checkpoint.pt"
        validation = self.loader(self.data.validation)
        with self.seeded_context(), run_folder.keep_warnings([self.folder]):
            posterior = build.posterior(self.config, self.data, folders=self.folders).to(self.device)
            if training["epochs"] == 0:
                refresh(posterior.eval(), self.loader(self.data.train))  # on rows without augmentation
                return self.save_results(posterior, [], seconds=0.0, best=None, engine="none")
            optimizer, scheduler = build.optimizer(posterior, training)
            history = fit(
                posterior,
                self.loader(self.data.train, shuffle=True),
                epochs=training["epochs"],
                validation=validation if training.get("keep_best", True) else None,
                optimizer=optimizer,
                scheduler=scheduler,
                clip=training.get("clip"),
                patience=training.get("patience"),
                precision=training.get("precision", "auto"),
                engine=training.get("engine", "auto"),
                callback=self._callbacks(posterior),
                progress=self.config.method if progress else False,  # the variant's name, not its method's
                checkpoint=checkpoint,
                checkpoint_seconds=CHECKPOINT_SECONDS,
                mesh=self.training_mesh,
            )
            seconds = sum(epoch.seconds for epoch in history.epochs) + history.drawing
            best = None if history.best is None else history.best.epoch
            self.save_results(posterior, history.epochs, seconds=seconds, best=best, engine=history.engine)
        self.remove(checkpoint)

    def expected_seconds(self) -> float:
        """Seconds of training, scaled up from a few batches with a posterior that is thrown away."""
        training, rows = self.config.training, self.data.train
        if training["epochs"] == 0:
            return 0.0
        used = rows.select(torch.arange(min(len(rows.y), TIMED_BATCHES * training.get("batch_size", 64))))
        how = {key: training[key] for key in ("clip", "precision", "engine") if key in training}
        level = run_folder.log.level
        run_folder.log.setLevel(logging.CRITICAL)  # warnings of so short a training say nothing
        try:
            with self.seeded_context():
                posterior = build.posterior(self.config, self.data, folders=self.folders).to(self.device)
                optimizer, batches = build.optimizer(posterior, training)[0], self.loader(used, shuffle=True)
                timed = fit(posterior, batches, epochs=2, optimizer=optimizer, progress=False, draw=False, **how)
        finally:
            run_folder.log.setLevel(level)
        return float(timed.epochs[-1].seconds * training["epochs"] * len(rows.y) / len(used.y))

    @contextmanager
    def seeded_context(self) -> Iterator[None]:
        """Context with the run's seed and threads; torch's are restored afterwards."""
        with preserve_random_state(self.device), self._threads(), decide_by_count():
            torch.manual_seed(self.config.seed)
            yield

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """Context with the run's number of processor threads."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.config.training.get("threads", before))
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def save_results(self, posterior: Posterior, epochs: Sequence[Epoch], **facts: Any) -> None:
        """Writes the results of training: posterior/, log.jsonl and training.json; fits the temperature if requested."""
        scaled = self.config.training.get("temperature", False)
        held_out = self.data.calibration if len(self.data.calibration.y) else self.data.validation
        temperature = temperature_scale(posterior, self.loader(held_out)) if scaled else 1.0
        if self.is_writer:
            storage.save(posterior, self.folder / "posterior")
            # Written again as a whole: a stopped run may have lost or duplicated its last line.
            write_text(self.folder / "log.jsonl", "".join(json.dumps(asdict(epoch)) + "\n" for epoch in epochs))
            facts |= prediction_splits.image_facts(self.data)
            write_json(self.folder / "training.json", {"epochs": len(epochs), "temperature": temperature, **facts})
        self.wait_until_written()

    def _callbacks(self, posterior: Posterior) -> list[Callable[[Epoch], None]]:
        """After each epoch: writes a line of the log, and measures members' distances and learning curves."""
        asked = self.config.evaluation if self.is_writer else {}
        watching: list[Callable[[Epoch], None] | None] = [self.log]
        if "distances_every" in asked:
            every = asked["distances_every"]
            watching.append(distance_callback(self.folder, posterior, self._comparison_batches, every=every))
        if "curves_every" in asked:
            rows = (self.data.train, self.data.test)
            watching.append(learning_callback(self.folder, posterior, *rows, self.loader, every=asked["curves_every"]))
        return [each for each in watching if each is not None]

    @property
    def _comparison_batches(self) -> Batches:
        """The training rows at which members are compared."""
        return self.loader(self.data.train.sample(DISTANCE_ROWS, seed=0))

    def posterior(self) -> Posterior:
        """The trained posterior."""
        with preserve_random_state(self.device):  # building the networks draws random weights
            found = build.load_saved_posterior(self.folder, self.config, lambda: self.data).to(self.device).eval()
            self._check_own_code()
            return found

    def _check_own_code(self, load: Callable[[], TaskData] | None = None, *, done: bool = False) -> None:
        """Raises if the user's code or rows changed since the run; only warns if the run is done."""
        now, then = build.own_digests(self.config, load), self.provenance.get("code", {})
        run_folder.check_own_code(self.folder, now, then, done=done)

    def calibrate(self, settings: Mapping[str, Any]) -> Posterior:
        """Fits these settings of [calibration] to the trained posterior and saves it in calibrated/."""
        posterior = self.posterior()
        with self._threads():
            fit_calibration(posterior, settings, self.data.calibration, self.loader)
        storage.save(posterior, self.folder / CALIBRATED)
        return posterior

    def predict(self, *, tell: Tell = ignore_message) -> None:
        """Writes the members' predictions for every split; existing files are kept."""
        waiting = {split: path for split, path in self._splits().items() if not path.is_file()}
        if not waiting:
            return
        self._check_own_code(lambda: self.data)
        posterior = self.posterior()
        posterior.mesh = torchrun_ranks.mesh() if self.is_shared else None
        with self._threads(), decide_by_count(), draw_once(posterior, self.config.precision) as functions:
            for split, path in waiting.items():
                write = prediction_splits.split_writer(split, self, functions, tell)
                if self.is_writer:
                    write(path)
        self.wait_until_written()

    def measure(self) -> Evaluation:
        """The run's Evaluation; unless stored, it is computed from the files of `predict`, and stored."""
        if not all((self.folder / name).is_file() for name in ("metrics.json", "arrays.safetensors")):
            if self.is_writer:
                # Always fitted again: the folder's posterior may be calibrated differently. On the CPU, like the predictions.
                calibrated = self.calibrate(self.config.calibration).cpu() if self.config.calibration else None
                found = evaluation_of_run(self, self._splits(), self.posterior(), self._comparison_batches, calibrated)
                run_folder.write_evaluation(self.folder, found)
            self.wait_until_written()
        return run_folder.read_evaluation(self.folder)

    def evaluate(self, *, tell: Tell = ignore_message) -> Evaluation:
        """Predicts and measures a trained run; returns its Evaluation."""
        if not self.is_trained:
            raise run_folder.untrained_error(self.folder)
        with run_folder.keep_warnings([self.folder]):
            self.predict(tell=tell)
            return self.measure()

    def predictions(self) -> Predictions:
        """The members' predictions for the test rows."""
        return run_folder.read_predictions(self.folder / "predictions" / "test.safetensors")

    def remove_evaluation(self) -> None:
        """Removes predictions and metrics, so that `evaluate` computes them again."""
        for path in (*self._splits().values(), self.folder / "metrics.json", self.folder / "arrays.safetensors"):
            self.remove(path)
        self.wait_until_written()

    def _splits(self) -> dict[str, Path]:
        """Split -> file of its predictions."""
        names = prediction_splits.split_names(self.config, lambda: self.data)
        return {name: self.folder / "predictions" / f"{name}.safetensors" for name in names}
