"""Imports point one way, and `import dissensus` is quick and brings nothing heavy along."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import dissensus

SOURCE = Path(dissensus.__file__).parent

# part of the package -> the parts it may import from
ALLOWED = {
    "core": {"core"},
    "metrics": {"metrics"},
    "data": {"data"},
    "nets": {"nets"},
    "progress": set(),
    "version": set(),
    "engine": {"core", "engine"},
    "methods": {"core", "engine", "methods", "surgery"},
    "surgery": {"core", "nets", "surgery"},  # the NTK form of a linear layer is cut as the plain one is
    "theory": {"core", "nets", "surgery", "theory"},
    "sealed": set(),
    "skeletons": {"core", "methods", "nets", "sealed"},  # a posterior is built again when it is loaded
    "storage": {"core", "nets", "sealed", "skeletons"},
    "stored": {"core", "methods", "sealed", "skeletons", "storage"},
    "history": {"engine"},
    "checks": {"core"},
    "length": {"core"},
    "loaderstate": set(),
    "belonging": {"core"},
    "checkpoint": {"core", "history", "belonging", "loaderstate"},
    "train": {"core", "engine", "metrics", "data", "progress", "history", "checkpoint", "checks", "length"},
    "predict": {"core", "engine", "metrics", "data", "progress", "stored"},
    "temperature": {"core", "engine", "metrics", "data", "progress", "predict"},
    "evaluation": {"core", "engine", "metrics", "data", "progress", "predict", "evaluation"},
    "evaluate": {"core", "engine", "metrics", "data", "progress", "predict", "evaluation"},
    "report": {"evaluate", "bench"},  # bench only inside the function: see the test of what import loads
    "export": {"core", "methods"},
    "__main__": {"bench"},
}
HEAVY = {"matplotlib", "typer", "jinja2", "rich", "torchmetrics"}
# the only files that may name them
HEAVY_ALLOWED = {
    ("progress.py", "rich"),
    ("metrics/modular.py", "torchmetrics"),
    ("bench/cli.py", "typer"),
    ("bench/cli.py", "rich"),
    ("bench/theory_cli.py", "typer"),
    ("bench/report.py", "jinja2"),
    *(
        (f"bench/{name}.py", "matplotlib")
        for name in ("plots", "curves", "panels", "scenes", "figures", "theory_figures", "width_figures")
    ),
}

# the floors of bench: a file may import from its own and from those below
FLOORS = {
    "tools": "names files toml units geometry choice training_rows provenance spread threads",
    "what is to be run": "fitting objects arguments variants sources schema config weights same sets loaders build widths",
    "runs": "records grid watch splits sharing together run results processes width_rows theory_runs",
    "numbers": "measures statistics tables sweep claims sentences reference width_claims width_verdicts",
    "pictures": "plots curves panels scenes figures theory_figures width_figures",
    "the page": "report",
    "the doors": "jobs width_report theory_cli cli",
}
FLOOR = {name: height for height, names in enumerate(FLOORS.values()) for name in names.split()}


def imported(path: Path, *, types: bool = True) -> list[tuple[int, str]]:
    """(line, dotted name) of every import in a file, also inside functions; `types`: those for type checkers too."""
    found: list[tuple[int, str]] = []
    tree = ast.parse(path.read_text())
    if not types:
        tree.body = [
            node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


FILES = sorted(SOURCE.rglob("*.py"))


def fault(relative: str, name: str) -> str | None:
    """What is wrong with a file of the package that imports this dotted name."""
    mine, parts = relative.split("/")[0].removesuffix(".py"), name.split(".")
    if parts[0] in HEAVY:
        return None if (relative, parts[0]) in HEAVY_ALLOWED else f"imports {parts[0]}"
    if parts[0] != "dissensus":
        return None
    if mine == "bench":
        return bench_fault(relative.removeprefix("bench/").removesuffix(".py"), parts[1:])
    if mine == "__init__":
        return "imports bench" if parts[1] == "bench" else None
    if mine not in ALLOWED:
        return f"{mine} is new: say in ALLOWED what it may import"
    return None if parts[1] in ALLOWED[mine] else f"{mine} may not import {parts[1]}"


def bench_fault(mine: str, parts: list[str]) -> str | None:
    if mine == "__init__":
        return "bench/__init__.py imports nothing"
    if mine not in FLOOR:
        return f"bench/{mine}.py is new: say in FLOORS on which floor it stands"
    if parts[:1] == ["report"]:
        return "imports dissensus.report, which imports bench"
    if parts[:1] != ["bench"] or len(parts) < 2:
        return None  # may import everything that is not bench
    if parts[1] not in FLOOR:
        return f"imports bench.{parts[1]}, which is on no floor"
    return None if FLOOR[parts[1]] <= FLOOR[mine] else f"{mine} may not import {parts[1]}, which stands above it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    relative = path.relative_to(SOURCE).as_posix()
    for line, name in imported(path):
        assert fault(relative, name) is None, f"{relative}:{line}: {fault(relative, name)}"


def test_a_wrong_import_would_be_seen(tmp_path):
    """The test above can fail: an import inside a function counts, whatever its form."""
    (tmp_path / "a.py").write_text("def f():\n    from dissensus import bench\n    import dissensus.data.toy\n")
    assert imported(tmp_path / "a.py") == [(2, "dissensus.bench"), (3, "dissensus.data.toy")]


@pytest.mark.parametrize(
    ("relative", "name", "found"),
    [
        ("core/batch.py", "dissensus.methods.MAP", "core may not import methods"),
        ("core/batch.py", "rich.table", "imports rich"),
        ("__init__.py", "dissensus.bench", "imports bench"),
        ("attic.py", "dissensus.core.batch", "attic is new"),
        ("bench/names.py", "dissensus.bench.config.load_task", "names may not import config"),
        ("bench/tables.py", "dissensus.bench.report.write", "tables may not import report"),
        ("bench/attic.py", "dissensus.core.batch", "say in FLOORS"),
        ("bench/tables.py", "dissensus.bench.attic.old", "which is on no floor"),
        ("bench/tables.py", "matplotlib.pyplot", "imports matplotlib"),
        ("bench/tables.py", "dissensus.report.report", "which imports bench"),
    ],
)
def test_what_points_the_wrong_way_is_a_fault(relative, name, found):
    assert found in fault(relative, name)


# Rings of files that import each other, types included. There are none, and none may come.
KNOWN_RINGS: list[set[str]] = []


def rings(root: Path) -> list[set[str]]:
    """The largest sets of a package's files in which each imports, by way of others, every other.

    Counts every import: at the top, inside functions and below `if TYPE_CHECKING`.
    """
    files = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {}
    for name, path in files.items():
        found = {_file(target, files) for _, target in imported(path) if target.split(".")[0] == root.name}
        graph[name] = found - {name}
    behind = {name: _reached(graph, name) for name in graph}
    unique = {frozenset(n for n in behind[name] if name in behind[n]) for name in graph if name in behind[name]}
    return sorted(map(set, unique), key=sorted)


def _file(name: str, files: dict[str, Path]) -> str:
    """The file that a dotted name is in: a.b of a.b and of a.b.Class."""
    return name if name in files else _file(name.rpartition(".")[0], files)


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def test_no_files_import_each_other_in_a_ring():
    assert rings(SOURCE) == KNOWN_RINGS


def test_a_ring_would_be_seen(tmp_path):
    """By way of a third file, below `if TYPE_CHECKING`, inside a function, and through a package's own file."""
    package = tmp_path / "dissensus"
    texts = {
        "__init__": "from dissensus.a import f",
        "a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dissensus.b import B",
        "b": "def g():\n    from dissensus import c\nclass B: ...",
        "c": "import dissensus.a",
        "d": "import dissensus",
        "sub/__init__": "",
        "sub/e": "from dissensus.sub import g",
        "sub/g": "from dissensus.sub.e import something",
    }
    for name, text in texts.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / f"{name}.py").write_text(text)
    assert rings(package) == [
        {"dissensus.a", "dissensus.b", "dissensus.c"},
        {"dissensus.sub.e", "dissensus.sub.g"},
    ]


PROBE = """
import json, sys, time
import torch
start = time.perf_counter()
import dissensus
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "loaded": sorted(sys.modules)}))
"""


def test_import_is_quick_and_light():
    """Best of a few: other work on the machine, and a collection of garbage in the middle, can only make it slower."""
    best = 10.0
    for _ in range(12):
        done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        assert not {name.split(".")[0] for name in found["loaded"]} & HEAVY
        assert not any(name.startswith(("dissensus.bench", "dissensus.theory")) for name in found["loaded"])
        best = min(best, found["seconds"])
        if best < 0.4:
            return
    pytest.fail(f"import dissensus takes {best:.2f} s on top of torch, more than 0.4 s")


def test_every_public_name_is_there():
    assert len(set(dissensus.__all__)) == len(dissensus.__all__)
    for name in dissensus.__all__:
        assert hasattr(dissensus, name), name
