"""This library beside its peers: the same networks, weights, data and precision, in processes that take turns; CSV out.

    python benchmarks/peers.py --install ENVIRONMENTS    # one virtual environment for each library, by pip
    python benchmarks/peers.py --venvs ENVIRONMENTS --csv benchmarks/results/peers_cpu.csv
    python benchmarks/peers.py --device cuda --csv FILE  # the present interpreter, with what it can import; cases of its own

Each library runs in a process of its own (`peer_workers`, one file for each), as its documentation shows and with its fastest
settings. Before anything is timed, predictions are compared with this library's. Sides take turns, in alternating order. A row
has the median and quartiles over rounds, and `ratio`, the median over rounds of its time over dissensus's: above 1, dissensus
is faster; all are medians over `--restarts` sets of processes, each of which has its own memory layout. `--clock processor`
counts processor time instead of time, for one thread on a machine that others use too. The file is written after every case;
`--resume` leaves out the cases that it has.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from rows import Row, read_rows, write_rows

ROOT = Path(__file__).parents[1]
WORKERS = ROOT / "benchmarks" / "peer_workers"


class Library(NamedTuple):
    """How a library is installed and imported; what `base` brings is not counted as its own."""

    packages: tuple[str, ...]
    import_all: str
    import_used: str = ""  # what the rows of deep ensembles (or the library's own rows) use
    base: str = "torch"
    remark: str = ""


LIBRARIES = {
    "dissensus": Library((str(ROOT),), "import dissensus", "from dissensus import DeepEnsemble, fit, predict"),
    "torch": Library((), "", ""),
    "torch-uncertainty": Library(
        ("torchvision", "torch-uncertainty[cpu]", "scikit-learn<1.7"),
        "import torch_uncertainty",
        "from torch_uncertainty import TUTrainer; from torch_uncertainty.methods import deep_ensembles; "
        "from torch_uncertainty.routines import ClassificationRoutine",
        remark="with its extra `cpu` and scikit-learn, without which it does not import",
    ),
    "lightning-uq-box": Library(
        ("torchvision", "lightning-uq-box"),
        "import lightning_uq_box",
        "from lightning import Trainer; "
        "from lightning_uq_box.uq_methods import DeepEnsembleClassification, DeterministicClassification",
        remark="the newest for Python 3.11",
    ),
    "laplace-torch": Library(("torchvision", "laplace-torch"), "import laplace", "from laplace import Laplace"),
    "posteriors": Library(("posteriors",), "import posteriors", "import posteriors, torchopt"),
    "neural-tangents": Library(
        ("jax==0.4.23", "jaxlib==0.4.23", "tf2jax==0.3.6", "numpy<2", "scipy<1.12", "neural-tangents==0.6.5"),
        "import neural_tangents",
        "from neural_tangents import stax",
        base="jax",
        remark="with jax 0.4.23; newer ones do not import it",
    ),
}
TORCH = ("torch==2.13.0", "torchvision==0.28.0")  # pinned while environments are made; a local "+cpu" build fits too
EVERYONE = tuple(LIBRARIES)
FIRST, LATER = 60.0, 25.0  # seconds that an answer may take on a GPU: that with the import, any other
TOLERANCE = {"ensemble": 1e-4, "ensemble predicts": 1e-5, "ensemble, one input": 1e-5, "single": 1e-4}
TOLERANCE |= {"single, one input": 1e-5, "dropout predicts": 0.02, "dropout, one input": 0.02}
TOLERANCE |= {"empirical kernel": 1e-3, "analytic kernel": 1e-8}  # of the largest entry
# On a GPU: of predictions, after training, and of ResNets after training, which enlarges differences of rounding.
ON_GPU = (1e-4, 1e-3, 0.05)
LAPLACE = 0.05  # ours are samples of functions, theirs the probit formula, each with the precision it chose


DEFAULTS = {"members": 1, "batch": 128, "rows": 1280, "calls": 1}


def cases(device: str = "cpu") -> Iterator[dict[str, Any]]:
    """What is measured: operation, network, members or samples, batch, inputs, calls in a round."""
    for case in on_gpu() if device == "cuda" else on_cpu():
        yield DEFAULTS | case | {"device": device}


def on_gpu() -> Iterator[dict[str, Any]]:
    """Larger ones, that a GPU is used for; the first ones matter most, where time is short."""
    yield {"operation": "ensemble", "network": "mlp", "members": 20, "rows": 2560}
    yield {"operation": "ensemble predicts", "network": "mlp", "members": 20, "batch": 256, "rows": 2560, "calls": 2}
    yield {"operation": "ensemble, one input", "network": "mlp", "members": 20, "calls": 10}
    yield {"operation": "SGHMC", "network": "mlp", "rows": 2560}
    yield {"operation": "mean-field VI", "network": "mlp", "rows": 2560}
    yield {"operation": "Laplace, kron", "network": "conv", "rows": 2560}
    yield {"operation": "Laplace, kron, predicts", "network": "conv", "rows": 2560, "calls": 3}
    yield {"operation": "Laplace, kron, one input", "network": "conv", "calls": 30}
    yield {"operation": "dropout predicts", "network": "mlp-dropout", "members": 20, "rows": 2560, "calls": 5}
    yield {"operation": "dropout, one input", "network": "mlp-dropout", "members": 20, "calls": 20}
    yield {"operation": "ensemble", "network": "resnet20", "members": 10, "rows": 2560}
    yield {"operation": "ensemble predicts", "network": "resnet20", "members": 10, "batch": 256, "rows": 2560}
    yield {"operation": "ensemble, one input", "network": "resnet20", "members": 10, "calls": 5}
    yield {"operation": "single", "network": "mlp", "rows": 2560}
    yield {"operation": "single", "network": "resnet20", "rows": 2560}
    yield {"operation": "single, one input", "network": "mlp", "calls": 100}
    yield {"operation": "single, one input", "network": "resnet20", "calls": 30}
    yield {"operation": "batch ensemble", "network": "mlp", "members": 4, "rows": 2560}
    yield {"operation": "batch ensemble predicts", "network": "mlp", "members": 4, "rows": 2560, "calls": 5}
    yield {"operation": "Laplace, kron", "network": "resnet20", "rows": 1280}
    yield {"operation": "ensemble", "network": "resnet18", "members": 5}
    yield {"operation": "ensemble predicts", "network": "resnet18", "members": 5, "batch": 256, "rows": 2560}


def on_cpu() -> Iterator[dict[str, Any]]:
    """Small enough for a core or two."""
    for members in (5, 10, 20):
        yield {"operation": "ensemble", "network": "mlp", "members": members}
    yield {"operation": "ensemble", "network": "conv", "members": 5, "rows": 640}
    yield {"operation": "ensemble", "network": "resnet20", "members": 5, "batch": 16, "rows": 48}
    yield {"operation": "ensemble predicts", "network": "mlp", "members": 5}
    yield {"operation": "ensemble predicts", "network": "mlp", "members": 20}
    yield {"operation": "ensemble predicts", "network": "conv", "members": 5, "rows": 256}
    yield {"operation": "ensemble predicts", "network": "resnet20", "members": 5, "batch": 32, "rows": 64}
    yield {"operation": "ensemble, one input", "network": "mlp", "members": 5, "calls": 30}
    yield {"operation": "ensemble, one input", "network": "resnet20", "members": 5, "calls": 5}
    yield {"operation": "single", "network": "mlp"}
    yield {"operation": "single", "network": "conv", "rows": 640}
    yield {"operation": "single, one input", "network": "mlp", "calls": 100}
    yield {"operation": "single, one input", "network": "resnet20", "calls": 20}
    yield {"operation": "dropout predicts", "network": "mlp-dropout", "members": 20}
    yield {"operation": "dropout, one input", "network": "mlp-dropout", "members": 20, "calls": 10}
    yield {"operation": "batch ensemble", "network": "mlp", "members": 4}
    yield {"operation": "batch ensemble", "network": "conv", "members": 4, "rows": 640}
    yield {"operation": "batch ensemble predicts", "network": "mlp", "members": 4}
    for structure, network, rows in (("kron", "mlp", 1280), ("full", "conv", 256)):
        yield {"operation": f"Laplace, {structure}", "network": network, "rows": rows}
        yield {"operation": f"Laplace, {structure}, predicts", "network": network, "rows": rows}
    yield {"operation": "Laplace, kron, one input", "network": "mlp", "calls": 20}
    yield {"operation": "Laplace, kron", "network": "resnet20", "rows": 128}
    yield {"operation": "SGHMC", "network": "mlp"}
    yield {"operation": "mean-field VI", "network": "mlp"}
    yield {"operation": "empirical kernel", "network": "mlp-wide", "rows": 100}
    yield {"operation": "analytic kernel", "network": "mlp", "rows": 500}
    yield {"operation": "analytic kernel", "network": "conv", "rows": 8}


class Worker:
    """A process with one library."""

    def __init__(self, python: str, library: str, threads: int) -> None:
        kept = os.sched_getaffinity(0)
        if library == "neural-tangents":  # jax takes all the cores it sees
            kept = set(sorted(kept)[:threads])
        self.patience = FIRST
        self.process = subprocess.Popen(
            [python, str(WORKERS), library],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment(threads, library, python), preexec_fn=lambda: os.sched_setaffinity(0, kept),
        )  # fmt: skip

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # `answer` says that it ended
            print(line, file=self.process.stdin, flush=True)

    def answer(self, *, patient: bool = True) -> dict[str, Any]:
        """What it says; without patience, one that takes too long is ended, so that the others get their turns."""
        assert self.process.stdout is not None
        if not patient and not select.select([self.process.stdout], [], [], self.patience)[0]:
            self.process.kill()
            return {"failed": f"no answer within {self.patience} s"}
        self.patience = LATER
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"failed": "the process ended"}

    def ask(self, line: str, *, patient: bool = True) -> dict[str, Any]:
        self.send(line)
        return self.answer(patient=patient)


def environment(threads: int, library: str, python: str) -> dict[str, str]:
    """This one's, for the library; what `PYTHONPATH` adds to this interpreter is no part of the others."""
    # This library is measured as it stands here, whatever is installed.
    paths = [str(ROOT / "src")] if library == "dissensus" else []
    if python == sys.executable:
        paths += filter(None, [os.environ.get("PYTHONPATH")])
    numbers = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return {**os.environ, **numbers, "PYTHONPATH": os.pathsep.join(paths)}


def measured(case: dict[str, Any], workers: dict[str, Worker], *, rounds: int, threads: int, timer: str) -> list[Row]:
    """Rows of one case: every library that offers it, or why there is no number."""
    case, patient = case | {"timer": timer}, case["device"] == "cpu"
    offered = [name for name in workers if offers(name, case["operation"])]
    with tempfile.TemporaryDirectory() as folder:
        arrays = {"arrays": f"{folder}/arrays.npz"} if "kernel" in case["operation"] else {}
        if arrays:
            write_arrays(case, arrays["arrays"])
        first = ready(case, {name: workers[name] for name in offered}, arrays)
        differences = compared(case["operation"], first, tolerance(case))
        running = [name for name in offered if differences[name][1] == ""]
        seconds: dict[str, list[dict[str, float]]] = {name: [] for name in running}
        for i in range(rounds):
            for name in running[:] if i % 2 == 0 else running[::-1]:
                answer = workers[name].ask("go", patient=patient)
                if "failed" in answer:
                    running.remove(name)
                    first[name], differences[name] = answer, ("", answer["failed"])
                else:
                    seconds[name].append(answer["seconds"])
        last = {name: workers[name].ask("end", patient=patient) for name in offered if "failed" not in first[name]}
    versions = {name: first.get(name, {}).get("versions", {}) for name in EVERYONE}
    rows = []
    for name in EVERYONE:
        if name not in workers and offers(name, case["operation"]):
            continue  # nobody asked
        difference, note = differences.get(name, ("", "not offered"))
        about = {
            "operation": case["operation"], "network": case["network"], "members": case["members"], "batch": case["batch"],
            "inputs": case["rows"], "library": name, "version": versions[name].get(name, ""),
            "torch": versions[name].get("torch", ""), "threads": threads, "clock": timer,
        }  # fmt: skip
        if name not in running:
            rows.append({**about, "note": note})
            continue
        for measure in seconds[name][0]:
            times = [each[measure] for each in seconds[name]]
            ours = [each[measure] for each in seconds["dissensus"]] if "dissensus" in running else []
            rows.append(
                {**about, "measure": measure, **spread(times), "rounds": rounds,
                 "peak_mb": "" if math.isnan(peak := last[name].get("peak_mb", math.nan)) else round(peak, 1),
                 "ratio": round(median(a / b for a, b in zip(times, ours, strict=True)), 3) if ours else "",
                 "difference": difference}
            )  # fmt: skip
    return rows


def pooled(several: Sequence[list[Row]]) -> list[Row]:
    """Rows of the same case by several sets of processes: medians over the sets, where all of them have a number."""
    kept = []
    for row in several[-1]:
        same = [
            each for rows in several for each in rows if all(each.get(k) == row.get(k) for k in ("library", "measure"))
        ]
        numbers = {name: [each.get(name, "") for each in same] for name in ("seconds", "lower", "upper", "ratio")}
        known = {name: [*map(float, all_)] for name, all_ in numbers.items() if "" not in all_}
        middle = {name: f"{median(all_):.4g}" for name, all_ in known.items()}
        kept.append(row | middle | ({"rounds": sum(each["rounds"] for each in same)} if "rounds" in row else {}))
    return kept


def ready(case: dict[str, Any], workers: dict[str, Worker], arrays: dict[str, str]) -> dict[str, dict[str, Any]]:
    """First answers: on a CPU all get ready at the same time; a GPU is left to one, that times its kernels to choose some."""
    lines = {name: json.dumps(case | (arrays if name == "neural-tangents" else {})) for name in workers}
    if case["device"] == "cuda":
        return {name: worker.ask(lines[name], patient=False) for name, worker in workers.items()}
    for name, worker in workers.items():
        worker.send(lines[name])
    return {name: worker.answer() for name, worker in workers.items()}


def offers(library: str, operation: str) -> bool:
    """Whether the worker's table has it; read as text, since the module can be imported in its environment only."""
    return f'"{operation}":' in (WORKERS / f"of_{library.replace('-', '_')}.py").read_text()


def spread(times: Sequence[float]) -> Row:
    lower, middle, upper = quantiles(times, n=4, method="inclusive") if len(times) > 1 else [times[0]] * 3
    return {"seconds": f"{middle:.4g}", "lower": f"{lower:.4g}", "upper": f"{upper:.4g}"}


def tolerance(case: dict[str, Any]) -> float | None:
    """How far predictions may differ before nothing is timed; None where they are not compared."""
    operation = case["operation"]
    most = TOLERANCE.get(operation, LAPLACE if operation.startswith("Laplace") else None)
    if case["device"] == "cuda" and operation.startswith(("ensemble", "single")):
        predictions, trained, trained_resnet = ON_GPU
        trains = operation in ("ensemble", "single")
        most = predictions if not trains else trained_resnet if case["network"].startswith("resnet") else trained
    return most


def compared(operation: str, first: dict[str, dict[str, Any]], most: float | None) -> dict[str, tuple[str, str]]:
    """For each library: how far its numbers are from dissensus's, and "" or why it is not timed."""
    found = {}
    ours = first.get("dissensus", {}).get("compared")
    for name, answer in first.items():
        note = answer.get("failed", "")
        theirs, difference = answer.get("compared"), ""
        if not note and theirs and ours and most is not None:
            size = max(map(abs, ours)) if "kernel" in operation else 1.0
            far = max(abs(a - b) for a, b in zip(theirs, ours, strict=True)) / size
            difference = f"{far:.1e}"
            if not far <= most:
                note = f"numbers differ by {difference}, more than {most:g}; not timed"
        found[name] = (difference, note)
    return found


def write_arrays(case: dict[str, Any], path: str) -> None:
    """Inputs and weights for a library without torch."""
    import numpy

    sys.path.insert(0, str(WORKERS))
    from tasks import Case

    task = Case(**case)
    weights = {name: p.detach().cpu().numpy() for name, p in task.networks()[0].named_parameters()}
    numpy.savez(path, x=task.data()[0].cpu().numpy(), **weights)


def imports(pythons: dict[str, str], *, rounds: int, threads: int, timer: str) -> list[Row]:
    """Seconds to import each library in a fresh process, beyond torch (jax for neural-tangents)."""
    rows = []
    for measure, key in (("import", "import_all"), ("import of what is used", "import_used")):
        times: dict[str, list[float]] = {name: [] for name in pythons}
        notes: dict[str, str] = {}
        for i in range(rounds + 1):  # the first one reads files from disk
            for name in list(pythons) if i % 2 == 0 else list(pythons)[::-1]:
                library = LIBRARIES[name]
                before = {"torch": "pass", "neural-tangents": "import jax"}.get(name, "import torch, lightning_parts")
                line = getattr(library, key) or "import torch"
                code = f"import sys; sys.path.append({str(WORKERS)!r})\n{before}\n"
                code += f"from time import {timer} as clock; start = clock()\n{line}\nprint(clock() - start)"
                around = environment(threads, name, pythons[name])
                done = subprocess.run([pythons[name], "-c", code], capture_output=True, text=True, env=around)
                if done.returncode:
                    notes[name] = done.stderr.strip().splitlines()[-1][:200]
                elif i:
                    times[name].append(float(done.stdout.splitlines()[-1]))
        for name in pythons:
            about = {"operation": "import", "measure": measure, "library": name, "threads": threads, "clock": timer}
            if name in notes:
                rows.append(about | {"note": notes[name]})
                continue
            ours = times.get("dissensus", [])
            ratio = round(median(a / b for a, b in zip(times[name], ours, strict=True)), 3) if ours else ""
            rows.append(about | spread(times[name]) | {"rounds": rounds, "ratio": ratio})
    return rows


COUNT = """
import re, sys
from importlib.metadata import distributions
key = lambda name: re.sub("[-_.]+", "-", name).lower()
held = {key(each.metadata["Name"]): each for each in distributions()}
below, waiting = {"pip"}, [sys.argv[1]]
while waiting:
    name = key(waiting.pop())
    if name in held and name not in below:
        below.add(name)
        waiting += [re.match("[A-Za-z0-9._-]+", r)[0] for r in held[name].requires or () if "extra ==" not in r]
own = [each for name, each in held.items() if name not in below]
size = sum(path.stat().st_size for each in own for f in each.files or () if (path := each.locate_file(f)).is_file())
print(len(own), size / 1e6, held[sys.argv[2]].version if sys.argv[2] in held else "")
"""


def packages(pythons: dict[str, str]) -> list[Row]:
    """What each environment holds beyond torch (or jax) and what that needs."""
    rows = []
    for name, python in pythons.items():
        if not LIBRARIES[name].packages:
            continue
        done = subprocess.run(
            [python, "-c", COUNT, LIBRARIES[name].base, name], capture_output=True, text=True, check=True
        )
        count, size, version = (done.stdout.strip("\n") + " ").split(" ")[:3]
        rows.append(
            {"operation": "packages", "library": name, "version": version, "packages": count, "mb": f"{float(size):.0f}",
             "note": LIBRARIES[name].remark}
        )  # fmt: skip
    return rows


def same(row: Row) -> tuple[str, ...]:
    """What rows of one case have in common."""
    return tuple(str(row.get(key, "")) for key in ("operation", "network", "members", "batch", "inputs", "threads"))


def install(folder: Path) -> None:
    """One environment for each library. An index may pin other versions of torch by a pip constraint file."""
    folder.mkdir(parents=True, exist_ok=True)
    pins = folder / "constraints.txt"
    pins.write_text("\n".join(TORCH))
    for name, library in LIBRARIES.items():
        if library.packages and not (folder / name).exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
            needed = (*(["torch"] if library.base == "torch" else []), *library.packages)
            subprocess.run([folder / name / "bin" / "pip", "install", "-q", "-c", pins, *needed], check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", type=Path, metavar="FOLDER", help="make the environments there, and stop")
    parser.add_argument("--venvs", type=Path, metavar="FOLDER", help="environments; without it, this interpreter")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", default="wall", choices=("wall", "processor"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--restarts", type=int, default=1, help="sets of processes: each has its own memory layout")
    parser.add_argument("--only", default="", help="a regular expression for operation and network")
    parser.add_argument("--resume", action="store_true", help="leave out cases that the file has")
    parser.add_argument("--libraries", default=",".join(EVERYONE), help="comma-separated")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    if options.install:
        return install(options.install)
    import torch

    from dissensus.bench.run.run_folder import commit, device_name

    timer = {"wall": "perf_counter", "processor": "process_time"}[options.clock]
    names = options.libraries.split(",")
    homes = {name: "dissensus" if name == "torch" else name for name in names}
    pythons = {}
    for name in names:  # where there is no environment, this interpreter says what is missing
        found = options.venvs and options.venvs.resolve() / homes[name] / "bin" / "python"
        pythons[name] = str(found) if found and found.exists() else sys.executable
    about = {"commit": commit(), "device": device_name(torch.device(options.device))}
    rows = read_rows(options.csv) if options.csv else []
    wanted = re.compile(options.only).search

    def keep(found: list[Row]) -> None:
        """Adds rows to the file, in the place of those of the same case."""
        mine = {same(row) for row in found}
        rows[:] = [row for row in rows if same(row) not in mine] + [{**row, **about} for row in found]
        for row in found:
            print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        if options.csv:
            write_rows(options.csv, rows)

    if options.venvs and wanted("packages"):
        keep(packages({name: python for name, python in pythons.items() if python != sys.executable}))
    done = {same(row) for row in rows} if options.resume else set()
    chosen = [
        case
        for case in cases(options.device)
        if wanted(f"{case['operation']} {case['network']}")
        and same({**case, "inputs": case["rows"], "threads": options.threads}) not in done
    ]
    needed = {name for name in pythons for case in chosen if offers(name, case["operation"])}
    found: list[list[list[Row]]] = [[] for _ in chosen]
    for _ in range(options.restarts):
        workers = {name: Worker(python, name, options.threads) for name, python in pythons.items() if name in needed}
        for case, several in zip(chosen, found, strict=True):
            several.append(measured(case, workers, rounds=options.rounds, threads=options.threads, timer=timer))
            keep(pooled(several))
        [worker.process.kill() for worker in workers.values()]
    if options.device == "cpu" and wanted("import"):
        keep(imports(pythons, rounds=min(options.rounds, 3), threads=options.threads, timer=timer))


if __name__ == "__main__":
    main()
