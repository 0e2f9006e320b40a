"""Runs portions of the papers' large tables on one GPU: complete (method, seed) runs, each kept as one small file.

    python benchmarks/papers.py --task cifar100-forde --methods deep_ensemble forde-pca --seeds 0 --size short \\
        --minutes 9 --jobs 2 --data DIR --out benchmarks/results/papers
    python benchmarks/papers.py --collect benchmarks/results/papers     # papers.csv and pairs.csv of all files there

DIR holds the data sets (docs/guides/data.md). A run whose file exists in OUT is skipped, so the same command continues a
portion; `--jobs 2` trains two runs side by side on the GPU. A run that cannot end within the minutes is stopped as soon as
its epochs show it. Each file, OUT/TASK-SIZE/METHOD-seedN.npz, holds for every test image the confidence, correctness
and NLL (clean) and the mean accuracy and NLL over corruption types at each severity, in half precision; accuracy, NLL and ECE
of each type and severity; and a row of numbers with commit, versions, device and command. `--tables` also keeps every corrupted
image's prediction. Where files came without their history, set DISSENSUS_COMMIT.
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
from rows import Row, write_rows

from dissensus.bench.run import jobs
from dissensus.bench.run.run_folder import provenance, read_counts
from dissensus.bench.task.config import Task, load_task, run_config

NUMBERS = ("accuracy", "nll", "ece", "corrupt/accuracy", "corrupt/nll", "corrupt/ece")
CHOICE = ("validation/corrupt/accuracy", "validation/corrupt/nll")  # of a sweep
EVALUATION = 60.0  # seconds that a run needs after its last epoch, to forecast its end
PATIENCE = 60.0  # seconds after which a second run may be stopped
TELL = 30.0  # seconds between two lines about a run's progress
Pair = tuple[str, int]


def main(given: Sequence[str] | None = None) -> int:
    arguments = parsed(given)
    if arguments.collect is not None:
        print(collect(arguments.collect))
        return 0
    task = load_task(arguments.task, size=arguments.size, overrides=arguments.set, methods=arguments.methods)
    if arguments.worker:
        (method,), (seed,) = arguments.methods, arguments.seeds
        keep_run(task, method, seed, arguments)
        return 0
    pairs = [(method, seed) for seed in arguments.seeds for method in arguments.methods or task.methods]
    for method, seed in pairs:
        run_config(task, method, seed)  # raises for a wrong name before anything is trained
    left = Portion(task, arguments).run([pair for pair in pairs if not kept_file(task, *pair, arguments).is_file()])
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
        given = ["--task", a.task, "--methods", pair[0], "--seeds", str(pair[1]), "--size", a.size, "--worker"]
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
        lines = self.epoch_lines(pair)
        epochs = int(run_config(self.task, *pair).training["epochs"])
        if not self.found.get(pair, 0) + 3 <= len(lines) < epochs:
            return None
        try:
            recent = [float(json.loads(line)["seconds"]) for line in lines[-3:]]
        except ValueError:  # a line that is being written
            return None
        return float(np.median(recent)) * (epochs - len(lines)) + EVALUATION

    def epoch_lines(self, pair: Pair) -> list[str]:
        """The log of a run: a line for each epoch."""
        log = self.arguments.runs / place(self.task, self.arguments) / f"{pair[0]}-seed{pair[1]}" / "log.jsonl"
        return log.read_text().splitlines() if log.is_file() else []


# ------------------------------------------------------------------------------------------- one run


def keep_run(task: Task, method: str, seed: int, arguments: argparse.Namespace) -> None:
    """Trains and evaluates one run and keeps its numbers and per-image predictions."""
    began = time.monotonic()
    stages = {"data": began}

    def tell(text: str) -> None:
        for stage in ("training", "evaluating"):
            if stage in text:
                stages.setdefault(stage, time.monotonic())
        print(f"{time.monotonic() - began:6.1f} s {text}", flush=True)

    runs_folder = arguments.runs / place(task, arguments)
    asked: dict[str, Any] = {"out": runs_folder, "source": arguments.data, "tell": tell}
    (run,), (evaluation,) = jobs.run_all(task, methods=[method], seeds=[seed], **asked)
    ended = time.monotonic()
    config = run.config
    row: Row = {"task": task.name, "size": task.size, "method": method, "seed": seed}
    row |= {key: evaluation.metrics[key] for key in (*NUMBERS, *CHOICE) if key in evaluation.metrics}
    row |= {"epochs": config.training["epochs"], "members": config.settings.get("members", 1)}
    row |= {"images": len(run.data.train.y), "severities": " ".join(map(str, evaluation.severities))}
    row |= {"train_seconds": evaluation.metrics["cost/train_seconds"], "seconds": ended - began}
    row |= {"evaluation_seconds": ended - stages.get("evaluating", ended), "side_by_side": arguments.jobs}
    row["overrides"] = " ".join(arguments.set)
    made = provenance(run.device)
    row |= {key: made[key] for key in ("commit", "dissensus", "python", "torch", "numpy", "device", "platform")}
    row["command"] = command(task, method, seed, arguments)
    arrays = per_image(evaluation.arrays, run.folder / "predictions" / "corrupt.safetensors", tables=arguments.tables)
    path = kept_file(task, method, seed, arguments)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    with temporary.open("wb") as file:
        np.savez_compressed(file, row=np.array(json.dumps(row)), **arrays)
    temporary.replace(path)
    shown = ", ".join(f"{key} {row[key]:.4f}" for key in NUMBERS if key in row)
    print(f"{method}, seed {seed}: {shown}; {row['seconds'] / 60:.1f} minutes", flush=True)


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
        f"python benchmarks/papers.py --task {task.name} --methods {method} --seeds {seed} --size {task.size} "
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
