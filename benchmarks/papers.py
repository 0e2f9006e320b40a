"""Runs portions of the papers' large tables on one GPU: complete (method, seed) runs, each kept as one small file.

    python benchmarks/papers.py --task cifar100-forde --methods deep_ensemble forde-pca --seeds 0 --size short \\
        --minutes 9 --jobs 2 --data DIR --out benchmarks/results/papers
    python benchmarks/papers.py --collect benchmarks/results/papers     # papers.csv and pairs.csv of all files there

DIR holds the data sets (docs/guides/data.md). A run whose file exists in OUT is skipped, so the same command continues a
portion; `--jobs 2` trains two runs side by side on the GPU, which they share best under NVIDIA's multi-process service
(`nvidia-cuda-mps-control -d`: four small runs then cost the time of one). Methods that watch one training count as one run.
A run that cannot end within the minutes is stopped as soon as its epochs show it. Each file, OUT/TASK-SIZE/METHOD-seedN.npz,
holds for every test image the confidence, correctness and NLL (clean) and the mean accuracy and NLL over corruption types
at each severity, in half precision; accuracy, NLL and ECE of each type and severity; and a row of numbers with commit,
versions, device and command. `--tables` also keeps every corrupted image's prediction. Where files came without
their history, set DISSENSUS_COMMIT.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import papers_page
import torch
from rows import Row, write_rows

from dissensus import theory
from dissensus.bench.run import jobs
from dissensus.bench.run.run import Run
from dissensus.bench.run.run_folder import provenance, read_counts
from dissensus.bench.run.shared_training import companions
from dissensus.bench.task.config import Task, load_task, run_config
from dissensus.bench.task.objects import base_name
from dissensus.data.catalogue import FOLDER_VARIABLE
from dissensus.evaluation.evaluation import Evaluation
from dissensus.utils.parameter_groups import TAIL

NUMBERS = ("accuracy", "nll", "ece", "corrupt/accuracy", "corrupt/nll", "corrupt/ece")
FOREIGN = ("auroc", "aupr", "fpr95", "ece_union")  # of each set of foreign inputs
CHOICE = ("validation/corrupt/accuracy", "validation/corrupt/nll")  # of a sweep
EMBEDDED = ("batch_ensemble", "dropout_ensemble")  # theory has a verdict about them
SEEN = 16  # test images on which their kernels are measured
EVALUATION = 45.0  # seconds that a run needs after its last epoch, to forecast its end
PATIENCE = 60.0  # seconds after which a second run may be stopped
TELL = 30.0  # seconds between two lines about a run's progress
Pair = tuple[str, int]  # methods that share a training, with spaces between them, and the seed


def main(given: Sequence[str] | None = None) -> int:
    arguments = parsed(given)
    if arguments.collect is not None:
        print(collect(arguments.collect))
        return 0
    if arguments.data is not None:
        os.environ[FOLDER_VARIABLE] = arguments.data  # for functions that make data
    task = load_task(arguments.task, size=arguments.size, overrides=arguments.set, methods=arguments.methods)
    if arguments.worker:
        keep_runs(task, arguments.methods, arguments.seeds[0], arguments)
        return 0
    left = Portion(task, arguments).run(waiting_runs(task, arguments))
    if any(arguments.out.glob("*/*.npz")):
        print(collect(arguments.out))
    for method, seed in left:
        print(f"not finished: {method}, seed {seed}; the same command runs it again")
    return bool(left)


def parsed(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="cifar100-forde")
    parser.add_argument("--methods", nargs="+", help="default: the task's")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="the seeds themselves, not their number")
    parser.add_argument("--size", default="short")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time for the portion")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side on the GPU")
    parser.add_argument("--data", help="folder of the data sets")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/papers"), help="folder of kept results")
    parser.add_argument("--runs", type=Path, default=Path("runs/papers"), help="folder of the runs' own files")
    parser.add_argument("--set", action="append", default=[], help="override a value; results go to TASK-SIZE-changed")
    parser.add_argument("--tables", action="store_true", help="keep every corrupted image's prediction, too")
    parser.add_argument("--collect", type=Path, metavar="OUT", help="only write the CSV files of what is there")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def place(task: Task, arguments: argparse.Namespace) -> str:
    """TASK-SIZE, the name of the folder."""
    return f"{task.name}-{task.size}{'-changed' * bool(arguments.set)}"


def kept_file(task: Task, method: str, seed: int, arguments: argparse.Namespace) -> Path:
    folder: Path = arguments.out / place(task, arguments)
    return folder / f"{method}-seed{seed}.npz"


def waiting_runs(task: Task, arguments: argparse.Namespace) -> list[Pair]:
    """The runs whose files are not all there, those that share a training as one; raises for a wrong method."""
    found: dict[Pair, None] = {}
    for seed in arguments.seeds:
        runs = [Run(Path(), run_config(task, method, seed)) for method in arguments.methods or task.methods]
        for run in runs:
            methods = [each.config.method for each in companions(run, runs)]
            if not all(kept_file(task, method, seed, arguments).is_file() for method in methods):
                found[" ".join(methods), seed] = None
    return [*found]


class Portion:
    """Runs of one task in processes of their own, `--jobs` at a time, until `--minutes` are over."""

    def __init__(self, task: Task, arguments: argparse.Namespace) -> None:
        self.task, self.arguments = task, arguments
        self.start = time.monotonic()
        self.running: dict[Pair, tuple[subprocess.Popen[bytes], float]] = {}
        self.stopped = -PATIENCE  # when a run was last stopped
        self.told: dict[Pair, float] = {}  # when a run's progress was last printed
        self.lasted: dict[str, float] = {}  # seconds of the last finished run of each method
        self.found: dict[Pair, int] = {}  # epochs of a run that was begun before, perhaps beside another one

    @property
    def seconds_left(self) -> float:
        return 60 * float(self.arguments.minutes) - (time.monotonic() - self.start)

    def run(self, waiting: list[Pair]) -> list[Pair]:
        """Runs these; returns those that did not finish."""
        lost = []
        try:
            while waiting or self.running:
                while waiting and len(self.running) < self.arguments.jobs:
                    pair = waiting.pop(0)
                    if self.fits(pair):
                        self.begin(pair)
                    else:
                        lost.append(pair)
                time.sleep(0.5)
                lost += self.look()
        finally:
            for process, _ in self.running.values():
                process.kill()
        return lost

    def fits(self, pair: Pair) -> bool:
        """Whether a run would end in time, by the last of its method, or else by the longest; yes if none is known."""
        known = self.lasted.get(pair[0], max(self.lasted.values(), default=0.0))
        return known < self.seconds_left

    def begin(self, pair: Pair) -> None:
        a = self.arguments
        given = ["--task", a.task, "--methods", *pair[0].split(), "--seeds", str(pair[1]), "--size", a.size, "--worker"]
        given += [
            "--jobs",
            str(a.jobs),
            "--out",
            str(a.out),
            "--runs",
            str(a.runs),
            *(["--data", a.data] if a.data else []),
        ]
        given += [*(f"--set={each}" for each in a.set), *(["--tables"] if a.tables else [])]
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // a.jobs))}
        self.found[pair] = len(self.epoch_lines(pair))
        process = subprocess.Popen([sys.executable, __file__, *given], env=threads | os.environ)
        self.running[pair] = (process, time.monotonic())
        print(f"{pair[0]}, seed {pair[1]}: begun", flush=True)

    def look(self) -> list[Pair]:
        """Looks after the running processes; returns the runs that failed or were stopped."""
        lost, now = [], time.monotonic()
        needs = {pair: seconds for pair in self.running if (seconds := self.needs(pair)) is not None}
        longest = max(needs, key=needs.__getitem__, default=None)
        for pair, (process, began) in list(self.running.items()):
            if pair in needs and now - self.told.get(pair, began) > TELL:
                self.told[pair] = now
                print(f"{pair[0]}, seed {pair[1]}: {needs[pair] / 60:.1f} minutes more", flush=True)
            # One at a time: without it the others may be fast enough.
            if pair == longest and needs[pair] > self.seconds_left and now - self.stopped > PATIENCE:
                print(f"{pair[0]}, seed {pair[1]}: stopped, it needs {needs[pair] / 60:.1f} minutes more", flush=True)
                process.kill()
                process.wait()
                self.stopped = now
            code = process.poll()
            if code is None:
                continue
            del self.running[pair]
            if code == 0:
                self.lasted[pair[0]] = time.monotonic() - began
            else:
                lost.append(pair)
            print(f"{pair[0]}, seed {pair[1]}: {'done' if code == 0 else f'exit code {code}'}", flush=True)
        return lost

    def needs(self, pair: Pair) -> float | None:
        """Seconds until the end of a run, by its epochs since it was begun here; None before the third and after the last."""
        config, lines = run_config(self.task, pair[0].split()[0], pair[1]), self.epoch_lines(pair)
        epochs = int(config.training["epochs"])
        try:
            recent = [json.loads(line) for line in lines[-3:]]
        except ValueError:  # a line that is being written
            return None
        if len(lines) < self.found.get(pair, 0) + 3 or recent[-1]["epoch"] >= epochs:
            return None
        left = epochs - recent[-1]["epoch"]
        if not all(map(self.read_log, self.logs(pair))):  # of methods on the other branch of a shared training
            left += round(epochs * (1 - config.training.get("branch_at", TAIL)))
        return float(np.median([line["seconds"] for line in recent])) * left + EVALUATION * len(pair[0].split())

    def epoch_lines(self, pair: Pair) -> list[str]:
        """The log of a run that is under way, with a line for each epoch: of methods together, the last one written."""
        logs = [path for path in self.logs(pair) if path.is_file()]
        return self.read_log(max(logs, key=lambda path: path.stat().st_mtime)) if logs else []

    def logs(self, pair: Pair) -> list[Path]:
        folder = self.arguments.runs / place(self.task, self.arguments)
        return [folder / f"{method}-seed{pair[1]}" / "log.jsonl" for method in pair[0].split()]

    def read_log(self, path: Path) -> list[str]:
        return path.read_text().splitlines() if path.is_file() else []


# ------------------------------------------------------------------------------------------- one run


def keep_runs(task: Task, methods: list[str], seed: int, arguments: argparse.Namespace) -> None:
    """Trains and evaluates one run, or those that share a training; keeps their numbers and per-image predictions."""
    began, measured = time.monotonic(), {}

    def tell(text: str) -> None:
        if "evaluating" in text:  # "[1/2] METHOD, seed N: evaluating …"
            measured.setdefault(text.partition("] ")[2].partition(",")[0], time.monotonic())
        print(f"{time.monotonic() - began:6.1f} s {text}", flush=True)

    runs_folder = arguments.runs / place(task, arguments)
    asked: dict[str, Any] = {"out": runs_folder, "source": arguments.data, "tell": tell}
    runs, evaluations = jobs.run_all(task, methods=methods, seeds=[seed], **asked)
    starts = [measured.get(method, began) for method in methods] + [time.monotonic()]
    for i, (run, evaluation) in enumerate(zip(runs, evaluations, strict=True)):
        spent = starts[i + 1] - starts[i]
        times = {"seconds": (starts[0] - began) / len(runs) + spent, "evaluation_seconds": spent}
        keep_run(task, run, evaluation, times, arguments)


def keep_run(task: Task, run: Run, evaluation: Evaluation, times: Row, arguments: argparse.Namespace) -> None:
    """Writes the file of one run, whose training is over."""
    config = run.config
    foreign = [f"ood/{name}/{key}" for name in evaluation.ood for key in FOREIGN]
    foreign += [f"shift/{name}/{key}" for name in evaluation.shift for key in NUMBERS[:3]]
    severe = [f"corrupt/severity{s}/{key}" for s in evaluation.severities for key in NUMBERS[:3]]
    row: Row = {"task": task.name, "size": task.size, "method": config.method, "seed": config.seed}
    row |= {key: evaluation.metrics[key] for key in (*NUMBERS, *CHOICE, *foreign, *severe) if key in evaluation.metrics}
    row |= {"epochs": config.training["epochs"], "members": config.settings.get("members", 1)}
    row |= {"images": len(run.data.train.y), "severities": " ".join(map(str, evaluation.severities))}
    row |= {"train_seconds": evaluation.metrics["cost/train_seconds"], **times, "side_by_side": arguments.jobs}
    row["overrides"] = " ".join(arguments.set)
    if base_name(config.method) in EMBEDDED:
        row["theory"] = verdict_of_theory(run)
    made = provenance(run.device)
    row |= {key: made[key] for key in ("commit", "dissensus", "python", "torch", "numpy", "device", "platform")}
    row["command"] = command(task, config.method, config.seed, arguments)
    arrays = per_image(evaluation.arrays, run.folder / "predictions" / "corrupt.safetensors", tables=arguments.tables)
    path = kept_file(task, config.method, config.seed, arguments)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    with temporary.open("wb") as file:
        np.savez_compressed(file, row=np.array(json.dumps(row)), **arrays)
    temporary.replace(path)
    shown = ", ".join(f"{key} {row[key]:.4f}" for key in (*NUMBERS, *foreign) if key in row)
    print(f"{config.method}, seed {config.seed}: {shown}; {row['seconds'] / 60:.1f} minutes", flush=True)


def verdict_of_theory(run: Run) -> str:
    """What theory says of an embedded ensemble's members, by their kernels on a few test images."""
    x, _ = next(iter(run.loader(run.data.test.select(torch.arange(SEEN)))))
    posterior = run.posterior()
    return str(theory.regime(posterior, x.to(posterior.device)).kind or "unknown")


def per_image(arrays: Any, corrupt: Path, *, tables: bool) -> dict[str, Any]:
    """Name -> array in half precision: clean/… (N,), corrupted/… (S, N) means over types, cells/… (T, S)."""
    found = {f"clean/{name}": arrays[f"test/{name}"].numpy() for name in ("confidence", "correct", "nll")}
    found["clean/correct"] = np.packbits(found["clean/correct"].astype(bool))
    if corrupt.is_file():
        counts = read_counts(corrupt)
        each = counts.examples  # (3, T, S, N): confidence, accuracy, nll
        _, accuracy, nll = each.float().mean(1)  # (S, N) each
        found |= {"corrupted/accuracy": accuracy.numpy(), "corrupted/nll": nll.numpy()}
        found |= {f"cells/{name}": arrays[f"corrupt/{name}"].float().numpy() for name in ("accuracy", "nll", "ece")}
        found |= {"types": np.array(counts.types), "severities": np.array(counts.severities, dtype=np.int8)}
        if tables:
            found |= {"tables": each.numpy()}
    halves = ("clean/confidence", "clean/nll", "corrupted/accuracy", "corrupted/nll")
    return {name: value.astype(np.float16) if name in halves else value for name, value in found.items()}


def command(task: Task, method: str, seed: int, arguments: argparse.Namespace) -> str:
    changed = "".join(f" --set {each}" for each in arguments.set)
    return (
        f"python benchmarks/papers.py --task {papers_page.file_of(task)} --methods {method} --seeds {seed} --size {task.size} "
        f"--data DIR{changed}"
    )


def collect(out: Path) -> Path:
    """Writes OUT/papers.csv, the rows of all files there, and OUT/pairs.csv, each method against the task's baseline."""
    rows = []
    for path in sorted(out.glob("*/*.npz")):
        with np.load(path, allow_pickle=False) as kept:
            rows.append(json.loads(str(kept["row"])))
    write_rows(out / "papers.csv", rows)
    write_rows(out / "pairs.csv", papers_page.pairs(out))
    return out / "papers.csv"


if __name__ == "__main__":
    sys.exit(main())
