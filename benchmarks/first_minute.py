"""Short runs beside loops by hand: training and prediction of 1 to 1,000 batches, from the first call on; CSV out.

    OMP_NUM_THREADS=1 python benchmarks/first_minute.py --csv benchmarks/results/first_minute_cpu.csv
    python benchmarks/first_minute.py --device cuda --cases "MAP|FoRDE ResNet" --rounds 2 --minutes 7 --csv FILE
    python benchmarks/first_minute.py --profile --cases "MAP MLP" --lengths 10

MAP, a deep ensemble of ten, FoRDE, SWAG and NodeBNN with the library's defaults, and what a user writes in plain torch in
their place (`loops_by_hand.py`), on the same networks, batches and precision. Every measurement has a process of its own,
forked from one that has imported both sides; its clock starts when data and networks are there and the GPU has a context.
`cold`: caches on disk (Triton's, Inductor's, CUDA's) are empty; `first`: they are those that an earlier process has left;
`second`: the same call again in the same process. Of the library each length is a run of its own; by hand it is one run with
time stamps, beyond the last of them extrapolated. On a CPU the clock is the processor's. Both sides take turns; medians.
`--minutes` stops in between; rows that the file has are not measured again. `--page` prints what the results page says.
"""

import argparse
import cProfile
import gc
import json
import math
import os
import pstats
import re
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from loops_by_hand import LOOPS
from rows import Row, grouped, made_by, made_on, markdown, read_rows, write_rows
from torch import Tensor, nn

import dissensus as ds

HERE = Path(__file__).parent
FILES = ("first_minute_cpu.csv", "first_minute_h200.csv")
LENGTHS = (1, 5, 10, 50, 200, 1000)
MEMBERS = 10
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (partial(ds.nets.MLP, 784, 10, hidden=(200, 200, 200)), (784,)),
    "ResNet-18": (partial(ds.nets.ResNet, 18), (3, 32, 32)),
    "ResNet-20": (partial(ds.nets.ResNet, 20), (3, 32, 32)),
    "tiny": (partial(ds.nets.MLP, 4, 3, hidden=(8,)), (4,)),
}
METHODS: dict[str, Callable[[list[nn.Module], int], ds.Posterior]] = {
    "MAP": lambda networks, _: ds.MAP(networks[0]),
    "DeepEnsemble": lambda networks, _: ds.DeepEnsemble(networks),
    "FoRDE": lambda networks, _: ds.FoRDE(networks),
    "SWAG": lambda networks, _: ds.SWAG(networks[0]),
    "NodeBNN": lambda networks, examples: ds.NodeBNN(networks[0], data_size=examples),
}
VERBS = (ds.fit, ds.predict)  # imported before the clock starts
WHAT = ("training", "prediction")
LIMITS = {"first": (1.05, 0.25), "second": (1.05, 0.0), "unknown": (2.0, 0.0)}  # times by hand, and seconds more
SINGLE_ON_CPU, SET_UP = 1.10, 15.0
KEY = ("network", "method", "what", "length", "state", "batches", "precision", "device")


@dataclass(frozen=True)
class Case:
    """A method on a network. `most`: batches of the longest loop by hand; `longest`: of the longest run."""

    method: str
    network: str
    device: str
    batch: int
    known: bool = True
    precision: str = "auto"
    most: int = 1000
    longest: int = 1000
    cudnn_benchmark: bool = True

    def __str__(self) -> str:
        return f"{self.method} {self.network}{'' if self.known else ', length unknown'}"

    @property
    def members(self) -> int:
        return MEMBERS if self.method in ("DeepEnsemble", "FoRDE") else 1

    def networks(self) -> list[nn.Module]:
        return [NETWORKS[self.network][0]() for _ in range(self.members)]

    def loader(self, batches: int) -> ds.data.Batches:
        count, shape = batches * self.batch, NETWORKS[self.network][1]
        x = torch.randn(count, *shape, device=self.device)
        y = torch.randint(3 if self.network == "tiny" else 10, (count,), device=self.device)
        return ds.data.Batches(x, y, batch_size=self.batch)

    def clock(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        compilers = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + compilers.ru_utime + compilers.ru_stime


class Unsized:
    """A loader that does not say how many batches it has."""

    def __init__(self, loader: ds.data.Batches) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def cases(device: str) -> list[Case]:
    """Every case of a device; on a GPU the shortest first."""
    if device == "cpu":
        mlps = [Case(method, "MLP", "cpu", 32) for method in METHODS]
        resnets = [Case(method, "ResNet-20", "cpu", 16, most=10, longest=50) for method in METHODS]
        unknown = [Case(method, "MLP", "cpu", 32, known=False) for method in ("MAP", "DeepEnsemble")]
        return [*mlps, *unknown, *resnets]
    mlps = [Case(method, "MLP", "cuda", 128, most=200) for method in METHODS]
    most = {"FoRDE": 50, "SWAG": 50}
    resnets = [
        Case(method, "ResNet-18", "cuda", 128, most=most.get(method, 200), longest=200 if method == "SWAG" else 1000)
        for method in METHODS
    ]
    unknown = [Case("MAP", "MLP", "cuda", 128, most=200, known=False)]
    unknown.append(Case("DeepEnsemble", "ResNet-18", "cuda", 128, most=200, known=False))
    return [*mlps, *resnets, *unknown]


# ------------------------------------------------------------------ in a process of its own


def start(case: Case) -> None:
    """What is there before the clock starts."""
    if case.device == "cuda":
        torch.backends.cudnn.benchmark = case.cudnn_benchmark
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    torch.manual_seed(0)


def time_library(case: Case, batches: int) -> Row:
    """Seconds of a first and a second call of `fit`, then of `predict`."""
    start(case)
    networks, loader = case.networks(), case.loader(batches)
    given = loader if case.known else Unsized(loader)
    begin = case.clock()
    posterior = METHODS[case.method](networks, batches * case.batch)
    found: Row = {"made": case.clock() - begin}
    for state in ("first", "second"):
        history = ds.fit(posterior, given, epochs=1, progress=False, precision=case.precision, device=case.device)
        found[f"training {state}"] = case.clock() - begin
        found |= {f"drawing {state}": history.drawing, "engine": history.engine}
        begin = case.clock()
    for state in ("first", "second"):
        probabilities = ds.predict(posterior, given).mean
        found[f"prediction {state}"] = case.clock() - begin
        assert probabilities.shape[0] == batches * case.batch
        begin = case.clock()
    return found


def time_by_hand(case: Case, lengths: Sequence[int]) -> dict[str, Row]:
    """The same by hand: length -> seconds, from one run with time stamps."""
    start(case)
    networks, loader = case.networks(), case.loader(max(lengths))
    half = case.device == "cuda" and case.precision != "float32"
    how = {"device": case.device, "half": half, "examples": len(loader.y), "steps": len(loader)}
    loop = LOOPS[case.method](networks, **how)
    found: dict[str, Row] = {str(length): {} for length in lengths}
    for state in ("first", "second"):
        begin = case.clock()
        loop.begin()
        stamps = stamped(case, loader, loop.step, lengths, begin)
        before = case.clock()
        loop.end(loader)
        after = case.clock() - before
        for length, seconds in stamps.items():
            found[str(length)] |= {f"training {state}": seconds + after, f"drawing {state}": after}
    outputs: list[Tensor] = []
    with torch.no_grad():
        for state in ("first", "second"):
            outputs.clear()
            stamps = stamped(case, loader, lambda x, _: outputs.append(loop.predict(x)), lengths, case.clock())
            begin = case.clock()
            assert len(torch.cat(outputs)) == len(loader.y)
            joining = case.clock() - begin
            for length, seconds in stamps.items():
                found[str(length)][f"prediction {state}"] = seconds + joining
    return found


def stamped(
    case: Case, loader: ds.data.Batches, work: Callable[[Tensor, Tensor], object], lengths: Sequence[int], begin: float
) -> dict[int, float]:
    """Seconds since `begin` after so many batches."""
    found = {}
    for number, (x, y) in enumerate(loader, 1):
        work(x, y)
        if number in lengths:
            found[number] = case.clock() - begin
    return found


def profile(case: Case, batches: int, folder: Path) -> dict[str, float]:
    """What each call takes; the folder gets a profile of each, which makes calls about twice as long."""
    start(case)
    networks, loader = case.networks(), case.loader(batches)
    posterior = METHODS[case.method](networks, batches * case.batch)
    train = partial(ds.fit, posterior, loader, epochs=1, progress=False, precision=case.precision, device=case.device)
    calls = {"training": train, "prediction": lambda: ds.predict(posterior, loader).mean}
    found, place = {}, Path(tempfile.mkdtemp(dir=folder))
    for what, call in calls.items():
        for state in ("first", "second"):
            run = cProfile.Profile(time.process_time if case.device == "cpu" else time.perf_counter)
            begin = case.clock()
            run.runcall(call)
            found[f"{what} {state}"] = case.clock() - begin
            run.dump_stats(place / f"{what} {state}")
    return found


def print_profiles(case: Case, batches: int, rounds: int, shown: int = 60) -> None:
    """Where the library's time goes in each call: milliseconds, means over processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [in_child(partial(profile, case, batches, Path(folder)), Path(folder) / "caches") for _ in range(rounds)]
        for key in next(iter(runs)):
            stats = pstats.Stats(*map(str, Path(folder).glob(f"*/{key}")))
            per = 1e3 / rounds
            print(f"\n{case}, {batches} batches, {key} call: {median(run[key] for run in runs):.4f} s")
            print("     ms   own ms     calls")
            every: dict[tuple[str, int, str], tuple[Any, ...]] = stats.stats  # type: ignore[attr-defined]
            ranked = sorted(every.items(), key=lambda item: -item[1][3])
            for (file, line, name), (_, calls, own, whole, _) in ranked[:shown]:
                short = re.sub(r".*/(src|site-packages)/", "", file)
                print(f"{whole * per:7.2f} {own * per:8.2f} {calls / rounds:9.1f}  {short}:{line} {name}")


def in_child(work: Callable[[], Any], caches: Path, seconds: float = 600.0) -> Any:
    """The result of `work` in a forked process, whose caches on disk are there; {"failed": why} if there is none."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        caches.mkdir(parents=True, exist_ok=True)
        os.environ |= {name: str(caches / name.lower()) for name in CACHES}
        try:
            answer = work()
        except BaseException as error:
            traceback.print_exc()
            answer = {"failed": f"{type(error).__name__}: {error}"[:200]}
        with os.fdopen(writing, "w") as pipe:
            json.dump(answer, pipe)
        sys.stdout.flush()
        os._exit(0)
    os.close(writing)
    said, until = b"", time.monotonic() + seconds
    while select.select([reading], [], [], max(until - time.monotonic(), 0.0))[0] and (part := os.read(reading, 65536)):
        said += part
    with suppress(ProcessLookupError):
        if time.monotonic() >= until:
            os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)
    return json.loads(said) if said else {"failed": f"no answer within {seconds:.0f} s"}


# ------------------------------------------------------------------ rounds


def measured(case: Case, lengths: Sequence[int], rounds: int, caches: Path, until: float) -> list[Row]:
    """Rows of a case; with fewer rounds, or none, once the time is over."""
    stamps = [length for length in lengths if length <= case.most] or [min(case.most, max(lengths))]
    stamps = sorted({*stamps, *(given for given in (5, 10, case.most) if given < max(lengths))})
    stamps = [length for length in stamps if length <= case.most]
    patience = 240.0 if case.device == "cuda" else 1800.0
    apart = case.method == "SWAG"  # its schedule depends on the length of the run
    ours: dict[tuple[str, int], list[Row]] = {}
    theirs: dict[int, list[Row]] = {}

    def folder(length: int) -> Path:
        return caches / f"{case}-{case.precision}-{length}".replace(" ", "_")

    def library(state: str, length: int) -> None:
        found = in_child(partial(time_library, case, length), folder(length), patience)
        ours.setdefault((state, length), []).append(found)

    def by_hand() -> None:
        for part in [[length] for length in stamps] if apart else [stamps]:
            found = in_child(partial(time_by_hand, case, part), caches / "by hand", patience)
            for length in part:
                theirs.setdefault(length, []).append(found if "failed" in found else found[str(length)])

    # The first of all runs fills the caches; a long run on a CPU keeps nothing on disk.
    cold = [length for length in lengths if not folder(length).exists() and (case.device == "cuda" or length <= 50)]
    states = {length: ("cold", "warm") if length in cold else ("warm",) for length in lengths}
    warm_up = partial(in_child, partial(time_by_hand, case, [1]), caches / "by hand", patience)  # with cold caches
    jobs = [warm_up, by_hand, *(partial(library, state, length) for length in lengths for state in states[length])]
    for i in range(1, rounds):
        turns = [by_hand, *(partial(library, "warm", length) for length in lengths)]
        jobs += turns if i % 2 == 0 else turns[::-1]
    for job in jobs:
        if time.monotonic() > until:
            break
        job()
    return [row for length in lengths for row in rows_of(case, length, ours, theirs)]


def rows_of(
    case: Case, length: int, ours: dict[tuple[str, int], list[Row]], theirs: dict[int, list[Row]]
) -> Iterator[Row]:
    """Rows of one length: cold, first and second call of training and prediction."""
    about = {"network": case.network, "method": case.method, "members": case.members, "batch": case.batch}
    for what in WHAT:
        for state in ("cold", "first", "second"):
            key = "cold" if state == "cold" else "warm"
            call = "second" if state == "second" else "first"
            runs = ours.get((key, length), [])
            by_hands = [run for several in theirs.values() for run in several]
            failed = next((run["failed"] for run in [*runs, *by_hands] if "failed" in run), "")
            precision = "float32" if what == "prediction" or case.device == "cpu" else case.precision
            row = about | {
                "what": what, "length": "known" if case.known else "unknown", "state": state, "batches": length,
                "precision": "bf16" if precision == "auto" else precision, "cudnn_benchmark": case.cudnn_benchmark,
            }  # fmt: skip
            if failed:
                yield row | {"note": failed}
            elif runs and theirs:
                times = [run[f"{what} {call}"] for run in runs]
                by_hand, how = seconds_by_hand(theirs, f"{what} {call}", length)
                row |= compared(times, by_hand, limit_of(case, state)) | {"by_hand": how, "rounds": len(runs)}
                row |= {"made_s": round(median(run["made"] for run in runs), 4)} if call == "first" else {}
                if what == "training":
                    row["drawing_s"] = round(median(run[f"drawing {call}"] for run in runs), 4)
                    row["engine"] = runs[0]["engine"]
                row["set_up_s"] = round(median(times) - median(run[f"{what} second"] for run in runs), 4)
                if state == "cold" and row["set_up_s"] > SET_UP:
                    row["reached"] = "no"
                yield row


def seconds_by_hand(theirs: dict[int, list[Row]], key: str, length: int) -> tuple[list[float], str]:
    """(seconds of each round, "measured"); beyond the last time stamp by the speed between the last two."""
    if length in theirs:
        return [run[key] for run in theirs[length]], "measured"
    before, last = sorted(theirs)[-2:]
    both = zip(theirs[before], theirs[last], strict=True)
    found = [b[key] + (length - last) * (b[key] - a[key]) / (last - before) for a, b in both]
    return found, f"from {last}"


def compared(times: Sequence[float], by_hand: Sequence[float], limit: tuple[float, float]) -> Row:
    """Medians over rounds; ratio, excess and whether the limit is reached are of pairs, one of each side, in a round."""
    pairs = list(zip(times, by_hand, strict=False))
    factor, seconds = limit
    return {
        "ours_s": round(median(times), 5), "by_hand_s": round(median(by_hand), 5),
        "ratio": round(median(a / b for a, b in pairs), 3),
        "excess_s": round(median(a - 1.05 * b for a, b in pairs), 5),
        "spread": round(max(times) / min(times), 2), "by_hand_spread": round(max(by_hand) / min(by_hand), 2),
        "reached": "yes" if median(a - factor * b for a, b in pairs) <= seconds else "no",
    }  # fmt: skip


def limit_of(case: Case, state: str) -> tuple[float, float]:
    """(times by hand, seconds more) that a call may take; cold ones any, since only their set-up has a limit."""
    if state == "cold":
        return (math.inf, 0.0)
    if not case.known:
        return LIMITS["unknown"]
    factor, seconds = LIMITS[state]
    return SINGLE_ON_CPU if case.device == "cpu" and case.members == 1 else factor, seconds


def line_of(row: Row) -> str:
    name = f"{row['method']} {row['network']}, {row['what']}, {row['length']}, {row['state']}, {row['batches']}"
    if row.get("note"):
        return f"{name}: {row['note']}"
    numbers = f"{float(row['ours_s']):.4g} s, by hand {float(row['by_hand_s']):.4g} s, {row['ratio']} times"
    return f"{name}: {numbers}, excess {float(row['excess_s']):.3g} s{'' if row['reached'] == 'yes' else '  <- over'}"


# ------------------------------------------------------------------ page


def page(rows: Sequence[Row]) -> str:
    """How many rows of each kind are within their limits, and the worst of them."""
    lines = []
    kinds = {
        "first call": lambda row: row["state"] == "first" and row["length"] == "known",
        "second call": lambda row: row["state"] == "second" and row["length"] == "known",
        "unknown length": lambda row: row["state"] != "cold" and row["length"] == "unknown",
    }
    there = [row for row in rows if not row.get("note")]
    for (device, what), several in grouped(there, ("device", "what")).items():
        short = "H200" if "H200" in device else "CPU"
        for kind, belongs in kinds.items():
            mine = [row for row in several if belongs(row)]
            if not mine:
                continue
            worst = max(mine, key=lambda row: float(row["excess_s"]))
            inside = sum(row["reached"] == "yes" for row in mine)
            name = f"{worst['method']}, {worst['network']}, {int(worst['batches']):,}"
            seconds = f"{float(worst['ours_s']):.3g} ({float(worst['by_hand_s']):.3g})"
            lines.append([f"{short}, {what}, {kind}", f"{inside} of {len(mine)}", name, seconds])
    cold = [row for row in there if row["state"] == "cold"]
    most = max(cold, key=lambda row: float(row["set_up_s"]))
    more = f"longest set-up with cold caches {float(most['set_up_s']):.3g} s ({most['method']}, {most['network']})"
    (factor, seconds), (second, _), (twice, _) = LIMITS.values()
    limits = f"Limits: {factor:g} times by hand and {seconds:g} s in a first call, {second:g} times in a second "
    limits += f"({SINGLE_ON_CPU:g}: one network, CPU), {twice:g} times where no length is known."
    table = markdown(["", "within limits", "worst: method, network, batches", "s (by hand)"], lines)
    command = "python benchmarks/first_minute.py --csv FILE"
    return f"{limits}\n\n{table}\n\n{made_by(command, there, 'medians of rounds in turns', more)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--cases", default="", help="a regular expression for method and network")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=600.0, help="no process is started after so many")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU's operations")
    parser.add_argument("--precision", default="auto", choices=("auto", "float32"), help="of training on a GPU")
    parser.add_argument("--no-cudnn-benchmark", action="store_true", help="on both sides; else both have it")
    parser.add_argument("--caches", type=Path, help="a folder for the caches; None is a temporary one")
    parser.add_argument("--profile", action="store_true", help="only print where the library's time goes")
    parser.add_argument("--page", action="store_true", help="only print the results page's table of the file")
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    if given.page:
        return print(page(read_rows(given.csv)))
    until = time.monotonic() + 60 * given.minutes
    if given.device == "cpu":
        torch.set_num_threads(given.threads)  # with several, waiting counts as processor time
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a process that forks must not initialise CUDA
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))], fused=True).zero_grad()  # torch imports its compiler here
    gc.freeze()  # else a collection in a process touches, and thereby copies, all that it was forked with: 0.2 s, now and then
    more = {"precision": given.precision, "cudnn_benchmark": not given.no_cudnn_benchmark}
    chosen = [Case(**{**vars(each), **more}) for each in cases(given.device) if re.search(given.cases, str(each))]
    with tempfile.TemporaryDirectory() as folder:
        caches = given.caches or Path(folder)
        facts = in_child(lambda: made_on(given.device), caches)
        if "failed" in facts:
            raise SystemExit(f"expected a {given.device} device, got none: {facts['failed']}")
        facts |= {"threads": torch.get_num_threads()}
        for case in chosen:
            measure(case, given, caches, facts, until)
    if given.csv:
        summarise(read_rows(given.csv))


def measure(case: Case, given: argparse.Namespace, caches: Path, facts: Row, until: float) -> None:
    """Measures what the file does not have of a case, and adds it."""
    lengths = [length for length in map(int, given.lengths.split(",")) if length <= case.longest]
    if given.profile:
        for length in lengths:
            print_profiles(case, length, given.rounds)
        return
    known = read_rows(given.csv) if given.csv else []
    half = "float32" if case.device == "cpu" or case.precision == "float32" else "bf16"
    same = {
        "network": case.network, "method": case.method, "length": "known" if case.known else "unknown",
        "device": facts["device"], "what": "training", "state": "second", "precision": half,
    }  # fmt: skip
    kept = [row for row in known if not row.get("note") and all(row[name] == value for name, value in same.items())]
    done = {int(row["batches"]) for row in kept}
    if lengths := [length for length in lengths if length not in done]:
        rows = [row | facts for row in measured(case, lengths, given.rounds, caches, until)]
        for row in rows:
            print(line_of(row), flush=True)
        mine = {tuple(str(row[name]) for name in KEY) for row in rows}
        others = [row for row in known if tuple(row[name] for name in KEY) not in mine]
        if given.csv:
            write_rows(given.csv, [*others, *rows])


def summarise(rows: Sequence[Row]) -> None:
    """Prints the rows that are over their limits, the worst first."""
    there = [row for row in rows if not row.get("note")]
    over = sorted((row for row in there if row["reached"] == "no"), key=lambda row: -float(row["excess_s"]))
    print(f"\n{len(over)} of {len(there)} rows are over their limits:")
    for row in over:
        print(line_of(row))


if __name__ == "__main__":
    main()
