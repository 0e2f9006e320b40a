"""The speed table's rows of two checkouts of this repository, in processes that take turns; CSV out.

    git worktree add ../before 838e17a
    python benchmarks/versions.py ../before . --rounds 3 --csv benchmarks/results/versions.csv
    python benchmarks/versions.py ../before . -- --cases mlp --engines vectorised+compiled   # what follows goes to speed.py

Each process runs `benchmarks/speed.py` of its own checkout. `ratio` is the median of before over that of after: at least 0.95
is asked of a change that is not about speed. `--commits` names checkouts that came without their history.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from rows import read_rows, write_rows

KEY = ("case", "members", "batch", "engine", "what")


def run(tree: Path, commit: str, options: list[str]) -> list[dict[str, str]]:
    """The rows that speed.py of this checkout gives."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        # The interpreter's own path first: a checkout that is installed must not be the one that is measured.
        paths = os.pathsep.join([str(tree / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": paths} | ({"DISSENSUS_COMMIT": commit} if commit else {})
        command = [sys.executable, str(tree / "benchmarks" / "speed.py"), "--csv", str(path), *options]
        subprocess.run(command, check=True, cwd=tree, env=environment, stdout=subprocess.DEVNULL)
        return read_rows(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commits", nargs=2, default=("", ""), metavar=("BEFORE", "AFTER"))
    parser.add_argument("--csv", type=Path)
    known, rest = parser.parse_known_args()
    options = [word for word in rest if word != "--"]
    times: dict[tuple[str, ...], dict[str, list[float]]] = {}
    about: dict[tuple[str, ...], dict[str, str]] = {}
    for _ in range(known.rounds):
        sides = zip(("before", "after"), (known.before, known.after), known.commits, strict=True)
        for side, tree, commit in sides:
            for row in run(tree.resolve(), commit, options):
                if row["what"].startswith("epoch"):
                    continue
                key = tuple(row[name] for name in KEY)
                times.setdefault(key, {"before": [], "after": []})[side].append(float(row["ms"]))
                about.setdefault(key, {})[side] = row["ran"]
                about[key].update(
                    {name: row[name] for name in ("torch", "device")}, **{f"{side}_commit": row["commit"]}
                )
    rows = []
    for key, found in times.items():
        before, after = median(found["before"]), median(found["after"])
        rows.append(
            {
                **dict(zip(KEY, key, strict=True)),
                "ran": about[key]["after"],
                "ran_before": about[key]["before"],
                "before_ms": before,
                "after_ms": after,
                "ratio": round(before / after, 3),
                "before_each": " ".join(map(str, found["before"])),
                "after_each": " ".join(map(str, found["after"])),
                **{name: about[key][name] for name in ("before_commit", "after_commit", "torch", "device")},
            }
        )
        print("  ".join(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
    if known.csv:
        write_rows(known.csv, [*read_rows(known.csv), *rows])


if __name__ == "__main__":
    main()
