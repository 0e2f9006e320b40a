"""What this library means to cost, beside what was measured: the first table of docs/results/speed.md, made from the files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from rows import Row, markdown

Read = Callable[[str], list[Row]]  # the rows of a file


class Aim(NamedTuple):
    """What is measured, its limit, and where; a limit is an upper one, unless `least`."""

    what: str
    limit: float
    file: str
    found: Callable[[list[Row]], list[float]]
    unit: str = ""
    least: bool = False


def column(key: str, **where: str) -> Callable[[list[Row]], list[float]]:
    """The column's numbers in the rows that have these entries."""
    return lambda rows: [float(row[key]) for row in rows if all(row[name] == value for name, value in where.items())]


def over(key: str, below: str, **where: str) -> Callable[[list[Row]], list[float]]:
    """The same of two rows, named by `name`, as a quotient."""

    def found(rows: list[Row]) -> list[float]:
        named = {row["name"]: row for row in rows if all(row[each] == value for each, value in where.items())}
        return [float(named[key]["reserved_gib"]) / float(named[below]["reserved_gib"])]

    return found


def apart(a: float, b: float) -> float:
    return max(a, b) / min(a, b)


GPU, CPU, PEERS = "gpu_h200.csv", "latency_cpu.csv", "peers_cpu.csv"
STATED = {"reserved": "stated_reserved", "tensors": "stated_tensors"}
AIMS = (
    Aim("ten ResNet-18, a step", 16, GPU, column("ms", what="steps", name="deep ensemble"), "ms"),
    Aim("FoRDE over the deep ensemble, short run", 4, GPU, column("ratio", what="steps", name="FoRDE")),
    Aim("FoRDE over the deep ensemble, long run", 2.5, GPU, column("ratio", what="compiled", name="FoRDE")),
    Aim("FoRDE over the deep ensemble, memory taken", 2, GPU, over("FoRDE", "deep ensemble", what="steps")),
    Aim("gradients from torch's, float64", 1e-10, GPU, column("error", what="gradients", run="float64")),
    Aim("TRADI over a plain step", 1.05, GPU, column("ratio", what="watching", name="TRADI")),
    Aim("SWAG over a plain step", 1.03, GPU, column("ratio", what="watching", name="SWAG")),
    Aim("predictions in bf16, times as fast as the float32 loop; 10,000 and 50,000 images", 5, GPU,
        column("ratio", what="prediction", name="predict, bf16"), least=True),
    Aim("predictions in float32, times as fast", 1.5, GPU,
        column("ratio", what="prediction", name="predict, float32"), least=True),
    Aim("memory stated and taken, the larger over the smaller", 1.1, "training_memory.csv",
        lambda rows: [max(apart(float(row[key]), float(row[stated])) for key, stated in STATED.items()) for row in rows]),
    Aim("memory stated and taken on a CPU, the larger over the smaller", 1.25, "training_memory_cpu.csv",
        lambda rows: [apart(float(row["tensors"]), float(row["stated_tensors"])) for row in rows]),
    Aim("MAP, one input, over the bare MLP", 0.15, CPU,
        column("over_ms", method="MAP", what="prediction of one input", network="MLP 784-200-200-200-10"), "ms"),
    Aim("MAP, one input, over the bare ResNet-20", 1.1, CPU,
        column("ratio", method="MAP", what="prediction of one input", network="ResNet-20")),
    Aim("ensembles, one input, over their loop; MLP and ResNet-20", 1, CPU, column("ratio", method="DeepEnsemble, M = 5")),
    Aim("MC dropout, one input, over its loop; MLP and ResNet-20", 1, CPU, column("ratio", method="MCDropout, 10 samples")),
    Aim("small networks, a step with SGD, over a bare loop", 1, CPU, column("ratio", what="training step, SGD")),
    Aim("small networks, a step with Adam, over a bare loop", 1, CPU, column("ratio", what="training step, Adam")),
    Aim("BatchEnsemble of an MLP over a plain step of as many rows, not compiled", 1.3, "embedded_step_cpu.csv",
        column("ratio", case="mlp, eager")),
    Aim("analytic kernels, times as fast as neural-tangents; dense and convolutional", 1, PEERS,
        column("ratio", operation="analytic kernel", library="neural-tangents"), least=True),
    Aim("empirical kernels, times as fast as neural-tangents", 1, PEERS,
        column("ratio", operation="empirical kernel", library="neural-tangents"), least=True),
)  # fmt: skip


def lines(read: Read) -> Iterator[list[str]]:
    for aim in AIMS:
        found = aim.found(read(aim.file))
        met = [value >= aim.limit if aim.least else value <= aim.limit for value in found]
        word = "yes" if all(met) else "in part" if any(met) else "no"
        unit = f" {aim.unit}" if aim.unit else ""
        limit = f"{'≥' if aim.least else '≤'} {aim.limit:g}{unit}"
        each = [f"{value:.3g}{unit}" for value in (found if len(found) < 3 else (min(found), max(found)))]
        yield [aim.what, limit, (", " if len(found) < 3 else " to ").join(each), word]


def page(read: Read) -> str:
    files = ", ".join(f"`{name}`" for name in dict.fromkeys(aim.file for aim in AIMS))
    return f"{markdown(['what', 'aim', 'measured', 'reached'], list(lines(read)))}\n\n*From {files}.*"
