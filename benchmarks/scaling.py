"""The cost model of docs/scaling.md: checked against processes on this machine, and used to predict clusters.

    python benchmarks/scaling.py measure --csv benchmarks/results/scaling_measured.csv
    python benchmarks/scaling.py predict --csv benchmarks/results/scaling_predicted.csv

`predict` simulates, with seconds of a step on one H200 from benchmarks/results/speed_h200.csv. `measure` trains with 1, 2 and
4 gloo processes and counts what they send: in the program, and on the wire where Linux lets it have a network of its own.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import scaling_model as model
import torch
from rows import Row, markdown, read_rows, write_rows

from dissensus.bench.run.provenance import provenance

RESULTS = Path(__file__).parent / "results"
MEASURED, PREDICTED = "scaling_measured.csv", "scaling_predicted.csv"
GPUS = (8, 32, 128, 512, 1024)
RESNET18 = 11_173_962  # parameters, of 10 classes


def resnet18() -> tuple[float, float]:
    """(seconds that a step takes at least, seconds for each member and example): a line through the two measured batches."""
    found = {
        int(row["batch"]): float(row["ms"]) / 1e3
        for row in read_rows(RESULTS / "speed_h200.csv")
        if row["case"] == "resnet18" and row["what"] == "training step" and row["members"] == "10"
    }
    (small, quick), (large, slow) = sorted(found.items())
    each = (slow - quick) / (10 * (large - small))
    return quick - each * 10 * small, each


def works() -> list[model.Work]:
    """What the page shows: one network, five ways to make a distribution of it, and a member too large for one device."""
    start, each = resnet18()
    base = model.Work("deep ensemble", 64, RESNET18, batch=128, start=start, each=each, activations=12_000_000)
    shared = replace(base, own=9_610, shared=RESNET18)
    # 6 FLOPs for each parameter and token, at 400 of the 989 TFLOP/s that an H200 has in bfloat16.
    tokens, large = 2048, 7_000_000_000
    return [
        base,
        replace(base, name="repulsive, outputs", compared_each=10),
        replace(base, name="repulsive, weights", compared=RESNET18),
        replace(base, name="SVGD, weights", compared=2 * RESNET18),
        replace(shared, name="BatchEnsemble"),
        model.Work(
            "one network of 7 billion", 1, large, batch=1024, bytes=4, start=2e-3,
            each=6 * large * tokens / 400e12, activations=1_200_000_000, fully=True,
        ),
    ]  # fmt: skip


def predict() -> list[Row]:
    cluster, rows = model.Cluster(), []
    for work in works():
        for ranks in GPUS:
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
            f"{float(row['step_ms']):.3g}",
            f"{float(row['compute_ms']):.3g}",
            f"{float(row['exchange_ms']):.2g}",
            f"{float(row['waiting_ms']):.2g}",
            f"{float(row['sent_mb']):,.3g}",
            f"{float(row['memory_gb']):.3g}",
            f"{100 * (1 - float(row['kept'])):.2g} %",
            f"{100 * float(row['efficiency']):.0f} %",
        ]
        for row in rows
    ]
    header = [
        "method",
        "GPUs",
        "members × data",
        "ms per step",
        "computing",
        "exchanging",
        "waiting",
        "MB sent",
        "GB kept",
    ]
    table = markdown([*header, "lost to failures", "efficiency"], lines)
    first = rows[0]
    facts = f"seed {first['seed']}; commit {first['commit']}, numpy {first['numpy']}, {first['device']}"
    return f"{table}\n\n*`python benchmarks/scaling.py predict --csv FILE`; simulated, {facts}.*"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "predict"))
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    facts: dict[str, Any] = provenance(torch.device("cpu"))
    rows = [row | facts for row in (predict() if given.what == "predict" else [])]
    for row in rows:
        print({key: row[key] for key in row if key not in facts})
    if given.csv:
        write_rows(given.csv, rows)


if __name__ == "__main__":
    main()
