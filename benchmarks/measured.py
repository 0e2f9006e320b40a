"""Tables of small measurements, each of one file or two in benchmarks/results."""

import re
from collections.abc import Mapping, Sequence

from rows import Row, grouped, markdown, origins_of, summary

Column = tuple[str, str]  # title, format of its numbers; "" for text


def measured(rows: Sequence[Row], columns: Mapping[str, Column], command: str, what: str = "") -> str:
    """The rows as they are, some of their columns, and where they come from."""
    lines = [
        [
            f"{float(row[key]):{form}}"
            if form and row.get(key, "nan") not in ("", "nan")
            else re.sub(r".*(H200|cpu).*", r"\1", row.get(key, "").replace("nan", ""))
            for key, (_, form) in columns.items()
        ]
        for row in rows
    ]
    table = markdown([title for title, _ in columns.values()], lines)
    return f"{table}\n\n*`{command}`; {what + '; ' if what else ''}{origins_of(rows)}.*"


def averaged(rows: Sequence[Row], keys: Sequence[str], columns: Sequence[str]) -> list[Row]:
    """One row for each combination of `keys`: means of `columns` where they have numbers, the rest of its first row."""
    return [
        several[0]
        | {key: summary(row[key] for row in several)[0] if several[0][key] else "" for key in columns}
        | {"seeds": str(len({row["seed"] for row in several}))}
        for several in grouped(rows, keys).values()
    ]


STEP = {
    "what": ("ResNet-20", ""),
    "beside": ("beside", ""),
    "batch": ("images", ""),
    "node_ms": ("ms", ".4g"),
    "plain_ms": ("plain, ms", ".4g"),
    "ratio": ("ratio", ".2f"),
    "device": ("device", ""),
}
EMBEDDED_STEP = {
    "case": ("network", ""),
    "batch": ("images for each of 4 members", ""),
    "engine": ("how it ran", ""),
    "ensemble_ms": ("ms", ".4g"),
    "plain_ms": ("plain, ms", ".4g"),
    "ratio": ("ratio", ".2f"),
    "device": ("device", ""),
}
TRACKED = {
    "case": ("network", ""),
    "method": ("method", ""),
    "plain_ms": ("plain step, ms", ".3g"),
    "tracked_ms": ("tracked, ms", ".3g"),
    "ratio": ("ratio", ".3f"),
    "device": ("device", ""),
}
TURNS = {
    "network": ("five members", ""),
    "alone_ms": ("alone, ms", ".3g"),
    "in_turn_ms": ("in its turn, ms", ".3g"),
    "ratio": ("ratio", ".3f"),
    "device": ("device", ""),
}
LATENCY = {
    "method": ("one input", ""),
    "network": ("network", ""),
    "by_hand_ms": ("by hand, ms", ".3g"),
    "ms": ("dissensus, ms", ".3g"),
    "ratio": ("times by hand", ".3g"),
}
LAPLACE = {
    "program": ("program", ""),
    "case": ("case", ""),
    "rows": ("rows", ""),
    "seeds": ("seeds", ""),
    "precision": ("prior precision", ".2f"),
    "evidence": ("evidence", ".2f"),
    "nll": ("NLL", ".3f"),
    "ece": ("ECE", ".3f"),
}
OOD_GATE = {
    "method": ("ResNet-20 for CIFAR-10", ""),
    "score": ("score", ""),
    "false_alarms": ("false alarms", ".3f"),
    "svhn": ("refused of SVHN", ".3f"),
    "cifar100": ("of CIFAR-100", ".3f"),
}
NEVER_EMPTY = {
    "score": ("sets at level 0.9", ""),
    "coverage": ("coverage", ".3f"),
    "size": ("mean size", ".3f"),
    "empty": ("empty", ".3f"),
}
