"""The cost model of docs/results/many-machines.md: checked against processes on this machine, and used to predict clusters.

    python benchmarks/scaling.py measure --csv benchmarks/results/scaling_measured.csv
    python benchmarks/scaling.py time --csv benchmarks/results/scaling_times.csv
    python benchmarks/scaling.py predict --csv benchmarks/results/scaling_predicted.csv

`predict` simulates, with seconds of a step on one H200 from speed_h200.csv and gpu_h200.csv in benchmarks/results. `measure`
trains with 1, 2 and 4 gloo processes and counts what they send: in the program, and on the wire where Linux lets it have a
network of its own. `time` takes the time of their steps; run it on a machine with more cores than processes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import scaling_model as model
import torch
from rows import Row, markdown, read_rows, write_rows

import dissensus as ds
from dissensus.bench.run.run_folder import provenance

RESULTS = Path(__file__).parent / "results"
MEASURED, TIMES, PREDICTED = "scaling_measured.csv", "scaling_times.csv", "scaling_predicted.csv"
GPUS = (8, 32, 128, 512, 1024)
SHOWN = (8, 128, 1024)  # on the page
RESNET18 = 11_173_962  # parameters, of 10 classes


def resnet18() -> tuple[float, float]:
    """(seconds that a step takes at least, seconds for each member and example): a line through the two measured batches."""
    rows = [row | {"name": row["case"]} for row in read_rows(RESULTS / "speed_h200.csv")]
    found = {
        int(row["batch"]): float(row["ms"]) / 1e3
        for row in [*rows, *read_rows(RESULTS / "gpu_h200.csv")]
        if (row["what"], row["name"]) in {("training step", "resnet18"), ("steps", "deep ensemble")}
        and (row["members"], row.get("run", "short")) == ("10", "short")
    }
    (small, quick), (large, slow) = sorted(found.items())
    each = (slow - quick) / (10 * (large - small))
    return quick - each * 10 * small, each


def works(ranks: int) -> list[model.Work]:
    """What the page shows: one network and ways to make a distribution of it, and a member too large for one device."""
    start, each = resnet18()
    base = model.Work("deep ensemble", 64, RESNET18, batch=128, start=start, each=each, activations=12_000_000)
    # 6 FLOPs for each parameter and token, at 400 of the 989 TFLOP/s that an H200 has in bfloat16.
    tokens, large = 2048, 7_000_000_000
    return [
        replace(base, name="deep ensemble, 8 members a GPU", members=8 * ranks),
        replace(base, name="the same, agreeing once an epoch", members=8 * ranks, agrees=False),
        base,
        replace(base, name="repulsion of outputs", compared_each=10),
        replace(base, name="repulsion of weights, SVGD", compared=2 * RESNET18),
        replace(base, name="BatchEnsemble", own=9_610, shared=RESNET18),
        model.Work(
            "one network of 7 billion", 1, large, batch=1024, start=2e-3, each=6 * large * tokens / 400e12,
            activations=1_200_000_000, fully=True,
        ),
    ]  # fmt: skip


def predict() -> list[Row]:
    cluster, rows = model.Cluster(), []
    for place in range(len(works(1))):
        for ranks in GPUS:
            work = works(ranks)[place]
            layout = model.chosen(work, ranks)
            found = model.predicted(work, layout, cluster)
            rows.append(
                {
                    "method": work.name,
                    "members": work.members,
                    "batch": work.batch,
                    "gpus": ranks,
                    "mesh": f"{layout.members} × {layout.data}",
                    "step_ms": round(1e3 * found.step, 4),
                    "compute_ms": round(1e3 * found.compute, 4),
                    "exchange_ms": round(1e3 * found.exchange, 4),
                    "waiting_ms": round(1e3 * found.waiting, 4),
                    "sent_mb": round(found.sent / 1e6, 3),
                    "memory_gb": round(found.memory / 1e9, 3),
                    "kept": round(found.kept, 5),
                    "interval_min": round(found.interval / 60, 2),
                    "efficiency": round(found.efficiency, 4),
                    "seed": 0,
                }
            )
    return rows


def predicted_page(rows: list[Row]) -> str:
    """The table of predictions."""
    lines = [
        [
            row["method"] if row["gpus"] == str(GPUS[0]) else "",
            row["gpus"],
            row["mesh"],
            *(f"{ms:,.0f}" if ms >= 100 else f"{ms:.2g}" for ms in map(float, (row["step_ms"], row["exchange_ms"]))),
            f"{float(row['memory_gb']):.3g}{' (too many)' if float(row['memory_gb']) > 141 else ''}",
            f"{100 * float(row['efficiency']):.0f}",
        ]
        for row in rows
        if int(row["gpus"]) in SHOWN and row["method"] != "repulsion of outputs"  # costs what a deep ensemble does
    ]
    header = ["method", "GPUs", "members × data", "ms per step", "exchanging", "GB kept", "efficiency, %"]
    table = markdown(header, lines)
    first = rows[0]
    facts = f"seed {first['seed']}; commit {first['commit']}, numpy {first['numpy']}, {first['device']}"
    made = "*`python benchmarks/scaling.py predict --csv FILE`; simulated"
    return f"{table}\n\n{made}, {facts}; other sizes in `{PREDICTED}`.*"


# ---------------------------------------------------------------------------------------------------- measured here

MEMBERS, BATCH, INPUTS, CLASSES, SKIPPED, STEPS = 8, 64, 64, 10, 10, 60
LAYOUTS = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 4: [(4, 1), (1, 4), (2, 2)]}
HIDDEN = 100
ALONE = [
    (8, 256),
    (4, 256),
    (2, 256),
    (8, 128),
    (8, 64),
]  # members and examples that are timed; of several ranks the first


def network() -> torch.nn.Module:
    return ds.nets.MLP(INPUTS, CLASSES, hidden=(HIDDEN, HIDDEN))


def networks() -> list[torch.nn.Module]:
    return [network() for _ in range(MEMBERS)]


METHODS: dict[str, Callable[[], ds.Posterior]] = {
    "deep_ensemble": lambda: ds.DeepEnsemble(networks()),
    "function_rde": lambda: ds.FunctionRDE(networks(), data_size=4000),
    "forde": lambda: ds.FoRDE(networks(), data_size=4000),
    "weight_rde": lambda: ds.WeightRDE(networks(), data_size=4000),
    "svgd": lambda: ds.SVGD(networks(), data_size=4000),
    "batch_ensemble": lambda: ds.BatchEnsemble(network(), members=MEMBERS, modulation=ds.Modulation.sign()),
}


def work_of(name: str, posterior: ds.Posterior) -> model.Work:
    """What the model is told of a method: numbers that its tensors and its paper give."""
    particles = posterior.particles
    own = sum(p[0].numel() for p in particles.own_parameters().values())
    shared = sum(p.numel() for p in particles.shared_parameters().values())
    compared = {"weight_rde": 2 * own, "svgd": 2 * own}.get(name, 0)
    each = {"function_rde": CLASSES, "forde": INPUTS}.get(name, 0)
    return model.Work(name, MEMBERS, own, shared, BATCH, compared, each)


class Looking(ds.data.Batches):
    """Batches that note, before each one, what was sent so far, and the time."""

    def watch(self, mesh: ds.distributed.Mesh) -> "Looking":
        self.mesh, self.seen = mesh, []
        return self

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            axes = (self.mesh.members, self.mesh.data)
            sent = [axis.bytes_sent[kind] for axis in axes for kind in ("sum", "gather")]
            self.seen.append((sent, time.perf_counter(), time.process_time(), wire()))
            yield batch


def wire() -> int:
    """Bytes sent over the loopback device of this process's network."""
    (line,) = [line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split()[9])


def rank(folder: Path, *, times: bool) -> None:
    """One of several processes: counts bytes of every method on every mesh of as many, or takes the time of one."""
    ds.distributed.start(timeout=300)
    torch.set_num_threads(1)
    size = int(os.environ["WORLD_SIZE"])
    cases = ALONE if size == 1 else ALONE[:1]
    found = [timed(*each, shape) for shape in LAYOUTS[size] for each in cases] if times else counted(size)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def counted(size: int) -> list[Row]:
    rows = []
    for name, build in METHODS.items():
        for shape in LAYOUTS[size]:
            torch.manual_seed(0)
            mesh, posterior = ds.distributed.mesh(*shape), build()
            x, y = torch.randn(BATCH * STEPS, INPUTS), torch.arange(BATCH * STEPS) % CLASSES
            loader = Looking(x, y, batch_size=BATCH).watch(mesh)
            work = work_of(name, posterior)
            optimizer = torch.optim.Adam(posterior.parameter_groups(1e-3))
            ds.fit(posterior, loader, epochs=1, optimizer=optimizer, mesh=mesh, progress=False, draw=False)
            rows.append(measured(work, model.Layout(*shape), loader.seen))
    return rows


def timed(members: int, batch: int, shape: tuple[int, int]) -> Row:
    """Time of a step of larger networks, by the members and examples that lie here."""
    torch.manual_seed(0)
    mesh, steps = ds.distributed.mesh(*shape), 64
    posterior = ds.DeepEnsemble([ds.nets.MLP(INPUTS, CLASSES, hidden=(256, 256)) for _ in range(members)])
    x, y = torch.randn(batch * steps, INPUTS), torch.arange(batch * steps) % CLASSES
    loader = Looking(x, y, batch_size=batch).watch(mesh)
    ds.fit(posterior, loader, epochs=1, mesh=mesh, progress=False, draw=False)
    pairs = list(zip(loader.seen[4:], loader.seen[5:], strict=False))
    work = model.Work(
        "", members, sum(p[0].numel() for p in posterior.particles.own_parameters().values()), batch=batch
    )
    return {
        "what": "time",
        "mesh": f"{shape[0]} × {shape[1]}",
        "members": members // shape[0],
        "batch": batch // shape[1],
        "sent": model.sent(work, model.Layout(*shape)),
        "processor_ms": round(1e3 * median(b[2] - a[2] for a, b in pairs), 3),
        "step_ms": round(1e3 * median(b[1] - a[1] for a, b in pairs), 3),
    }


def measured(work: model.Work, layout: model.Layout, seen: list[Any]) -> Row:
    """Counted and predicted bytes of one rank in one step."""
    (first, *_, before), (last, *_, after) = seen[SKIPPED], seen[-1]
    steps = len(seen) - 1 - SKIPPED
    counted = [(b - a) / steps for a, b in zip(first, last, strict=True)]
    expected = dict.fromkeys(
        [(axis, kind) for axis in ("members", "data") for kind in ("all_reduce", "all_gather")], 0.0
    )
    for each in model.collectives(work, layout):
        # A rank puts a whole tensor into a sum, and its part into a gather.
        expected[each.axis, each.kind] += each.payload / (each.ranks if each.kind == "all_gather" else 1)
    pairs = list(zip(seen[SKIPPED:], seen[SKIPPED + 1 :], strict=False))
    return {
        "what": "bytes",
        "method": work.name,
        "mesh": f"{layout.members} × {layout.data}",
        "members": MEMBERS,
        "batch": BATCH,
        "parameters": work.own,
        "shared": work.shared,
        **dict(zip(("members_sum", "members_gather", "data_sum", "data_gather"), counted, strict=True)),
        "counted": sum(counted),
        "model": sum(expected.values()),
        "equal": counted == [*expected.values()],
        "wire_model": layout.ranks * model.sent(work, layout),
        "wire": (after - before) / steps,
        "step_ms": round(1e3 * median(b[1] - a[1] for a, b in pairs), 3),
        "processor_ms": round(1e3 * median(b[2] - a[2] for a, b in pairs), 3),
    }


def measure(*, times: bool = False) -> list[Row]:
    """Rows of rank 0, of 1, 2 and 4 processes, each in a network of its own where that is allowed."""
    rows: list[Row] = []
    alone = subprocess.run(["unshare", "-n", "sh", "-c", "ip link set lo up"], check=False).returncode == 0
    for size in LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            launch = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node {size}"
            command = f"{launch} {__file__} {'rank-times' if times else 'rank'} --folder {folder}"
            inside = ["unshare", "-n", "sh", "-c", f"ip link set lo up && {command}"]
            subprocess.run(inside if alone else command.split(), check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            found = json.loads((Path(folder) / "0.json").read_text())
        rows += found if times else [{**row, "wire": row.get("wire", "") if alone else ""} for row in found]
    return rows


def measured_page(rows: list[Row]) -> str:
    """The table of bytes, beside the model's."""
    lines = [
        [
            row["method"],
            row["mesh"],
            f"{float(row['model']):,.0f}",
            "the same" if row["equal"] == "True" else f"{float(row['counted']):,.0f}",
            f"{float(row['wire_model']):,.0f}",
            f"{float(row['wire']):,.0f}" if row["wire"] else "–",
        ]
        for row in rows
        if row["mesh"] in ("4 × 1", "1 × 4") and row["method"] not in ("forde", "svgd")  # the others are in the file
    ]
    header = [
        "method",
        "members × data",
        "bytes put into collectives by a rank, model",
        "counted",
        "all on the wire, model",
    ]
    first = rows[0]
    facts = f"{first['members']} members, batch {first['batch']}, {STEPS - 1 - SKIPPED} steps, seed 0"
    made = f"commit {first['commit']}, torch {first['torch']}, {first['device']}"
    made = f"*`python benchmarks/scaling.py measure --csv FILE`; {facts}; {made}.*"
    return f"{markdown([*header, 'counted'], lines)}\n\n{made}"


def times_page(rows: list[Row]) -> str:
    """The table of times beside the model's, and a sentence about one member row of four ranks.

    a + c m b is fitted to the rows of one process, e of the bytes that a rank sends to the row of two; they predict the rest.
    """
    sizes = np.array([[1.0, int(row["members"]) * int(row["batch"])] for row in rows])
    bytes_sent = np.array([float(row["sent"]) for row in rows])
    found = np.array([float(row["processor_ms"]) for row in rows])
    alone = np.array([row["mesh"] == "1 × 1" for row in rows])
    line, *_ = np.linalg.lstsq(sizes[alone], found[alone], rcond=None)
    two, four = (next(i for i, row in enumerate(rows) if row["mesh"] == mesh) for mesh in ("1 × 2", "1 × 4"))
    computing, has_cores = sizes @ line, int(rows[0]["cores"]) > 4  # with fewer, ranks take turns
    each = float((found - computing)[two] / bytes_sent[two])
    predicted = computing + each * bytes_sent
    shown = [
        [
            row["mesh"],
            row["members"],
            row["batch"],
            f"{sent / 1e6:.2f}",
            f"{a:.1f}",
            f"{b:.1f}",
            f"{float(row['step_ms']):.1f}" if has_cores else "–",
        ]
        for i, (row, sent, a, b) in enumerate(zip(rows, bytes_sent, predicted, found, strict=True))
        if i == 0 or row["mesh"] != "1 × 1"  # the others are in the file
    ]
    header = [
        "members × data",
        "members of a rank",
        "examples of a rank",
        "MB sent by a rank",
        "processor ms of a step, model",
    ]
    table = markdown([*header, "measured", "ms of a step"], shown)
    off, took = 100 * (predicted[four] / found[four] - 1), [float(rows[i]["step_ms"]) for i in (0, four)]
    sentence = (
        f"On 1 × 4 the model says {predicted[four]:.1f} ms, {predicted[four] - computing[four]:.1f} of them for sums of "
        f"gradients, and {found[four]:.1f} were measured ({off:+.0f} %)."
    )
    if has_cores:
        sentence += f" Four processes take {took[1]:.1f} ms for a step that one does in {took[0]:.1f}."
    constants = (
        f"a = {line[0]:.2f} ms, c = {1e3 * line[1]:.2f} µs (fitted to one process), e = {1e6 * each:.2f} ms per MB"
    )
    first = rows[0]
    made = f"commit {first['commit']}, torch {first['torch']}, {first['device']}, {first['cores']} cores"
    return (
        f"{sentence}\n\nDeep ensembles of MLPs 64-256-256-10: {constants} (fitted to 1 × 2); the other rows are predicted.\n\n"
        f"{table}\n\n*`python benchmarks/scaling.py time --csv FILE`; {made}.*"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "time", "predict", "rank", "rank-times"))
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--folder", type=Path, help="of one process of a measurement")
    given = parser.parse_args()
    if given.what.startswith("rank"):
        rank(given.folder, times=given.what == "rank-times")
        return
    facts: dict[str, Any] = provenance(torch.device("cpu")) | {"cores": os.cpu_count()}
    rows = [row | facts for row in (predict() if given.what == "predict" else measure(times=given.what == "time"))]
    for row in rows:
        print({key: row[key] for key in row if key not in facts})
    if given.csv:
        write_rows(given.csv, rows)


if __name__ == "__main__":
    main()
