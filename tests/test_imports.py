"""Imports point one way, and `import dissensus` is quick and brings nothing heavy along."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dissensus

SOURCE = Path(dissensus.__file__).parent
LONGEST = 300  # lines of a source file, docstrings aside

# room, or file beside the rooms -> the others it may import from
ROOMS = {
    "version": "",
    "numerics": "",
    "drawing": "numerics",  # arrays as figures; the only room below the reports that loads matplotlib
    "nets": "numerics",
    "metrics": "numerics",
    "data": "numerics",
    "core": "numerics drawing",  # drawing only inside `plot`
    "surgery": "numerics nets core",  # the NTK form of a linear layer is cut as the plain one is
    "engine": "numerics core",
    "distributed": "numerics core engine",  # who has which members and rows
    "methods": "numerics core surgery engine",
    "theory": "numerics core nets surgery methods",
    "standing": "numerics core metrics",  # calibrations and promises as data, which files hold
    "storage": "numerics core data nets methods standing",
    "training": "numerics drawing core surgery engine distributed methods storage",
    "attacks": "numerics core data",
    "evaluation": "numerics drawing core engine methods metrics data attacks standing",
    "reporting": "numerics drawing core metrics evaluation storage",
    "train": "numerics core data surgery engine distributed training",
    "predict": "numerics core data engine storage",
    "guarantees": "numerics core data metrics standing predict",  # the verbs that fit what stands on a posterior
    "exporting": "numerics core surgery engine methods standing storage version",
    "sklearn": "numerics core surgery methods nets data storage training train guarantees standing",
    "landscape": "numerics drawing core surgery",  # drawing only to draw
    "report": "evaluation reporting",  # reporting only inside the function: see the test of what import loads
    "bench": "numerics drawing nets metrics data core surgery engine methods theory storage training evaluation reporting "
    "train predict guarantees standing version distributed",
    "__main__": "bench",
}
HEAVY = {"scipy", "matplotlib", "pandas", "typer", "jinja2", "rich", "torchmetrics"}
# the only files that may name them
HEAVY_ALLOWED = {
    ("core/progress.py", "rich"),
    ("metrics/student.py", "scipy"),
    ("guarantees/sequence.py", "scipy"),
    ("metrics/modular.py", "torchmetrics"),
    ("bench/cli.py", "typer"),
    ("bench/cli.py", "rich"),
    ("bench/printing.py", "rich"),
    ("bench/theory/cli.py", "typer"),
    ("bench/theory/studies.py", "matplotlib"),
    ("reporting/report.py", "jinja2"),
    ("numerics/frame.py", "pandas"),
    ("bench/rows/own.py", "pandas"),
    *((f"drawing/{name}.py", "matplotlib") for name in ("plots", "maps", "panels", "predictions", "notebook")),
    *((f"reporting/{name}.py", "matplotlib") for name in ("curves", "scenes", "figures")),
}

# the floors of a room: what stands on one may import from its own and from those below
FLOORS = {
    "reporting": [
        "results regions measures spread estimates statistics tables sweep claims sentences reference",
        "curves scenes promises figures",
        "report",
    ],
    "drawing": ["plots notebook", "maps panels", "predictions"],
    "bench": ["names fitting printing own ranks", "rows", "task", "run", "theory width grid capacity", "cli"],
    "bench/rows": ["learned", "arrays", "scenes own", "sources geometry", "sets loaders"],
    "bench/task": ["objects variants networks", "schema", "config"],
    "bench/run": [
        "provenance records measured pixels same weights writing",
        "watch",
        "learned",
        "build splits convert",
        "evaluating calibrating",
        "run",
        "together",
        "gather processes",
        "jobs",
        "images",
    ],
    "bench/theory": ["studies", "cli"],
    "bench/grid": ["axes", "report"],
    "bench/width": ["grid", "claims", "report"],
}


@functools.cache
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
    mine, theirs = relative.removesuffix(".py").split("/"), name.split(".")
    if theirs[0] in HEAVY:
        return None if (relative, theirs[0]) in HEAVY_ALLOWED else f"imports {theirs[0]}"
    if theirs[0] != "dissensus":
        return None
    theirs = theirs[1:]
    if mine == ["__init__"]:
        return f"imports {theirs[0]}" if theirs[0] in ("bench", "reporting") else None
    if mine[0] not in ROOMS:
        return f"{mine[0]} is new: say in ROOMS what it may import"
    if theirs[0] == mine[0]:
        return floor_fault(mine, theirs)
    return None if theirs[0] in ROOMS[mine[0]].split() else f"{mine[0]} may not import {theirs[0]}"


def floor_fault(mine: list[str], theirs: list[str]) -> str | None:
    """What is wrong with an import within a room, by the floors of the innermost folder that both are in."""
    depth = 1
    while depth < len(mine) - 1 and mine[: depth + 1] == theirs[: depth + 1]:
        depth += 1
    room = "/".join(mine[:depth])
    if room not in FLOORS or len(theirs) <= depth:
        return None
    if mine[depth] == "__init__":
        return f"{room}/__init__.py imports nothing"
    height = {name: i for i, names in enumerate(FLOORS[room]) for name in names.split()}
    for name in (mine[depth], theirs[depth]):
        if name not in height:
            return f"{room}/{name} is new: say in FLOORS on which floor it stands"
    above = height[theirs[depth]] > height[mine[depth]]
    return f"{mine[depth]} may not import {theirs[depth]}, which stands above it" if above else None


def test_imports_point_one_way():
    found = [(path.relative_to(SOURCE).as_posix(), line, name) for path in FILES for line, name in imported(path)]
    assert [f"{at}:{line}: {fault(at, name)}" for at, line, name in found if fault(at, name)] == []


def test_rooms_stand_above_one_another():
    """ROOMS names those below first, so that no two may import each other, by whatever way."""
    order = list(ROOMS)
    for room, below in ROOMS.items():
        for name in below.split():
            assert order.index(name) < order.index(room), f"{room} may not stand above {name}"


def test_every_file_of_a_room_with_floors_stands_on_one():
    for room, floors in FLOORS.items():
        there = {
            path.stem for path in (SOURCE / room).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
        }
        assert {name for names in floors for name in names.split()} == there - {"__init__"}, room


def weighing():
    """The program that counts lines, raises and guards."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    try:
        import weight
    finally:
        del sys.path[0]
    return weight


def test_the_library_is_as_light_as_the_page_for_contributors_says():
    weight = weighing()
    total = sum(weight.weights(SOURCE).values(), weight.Weight())
    assert total.guards <= 0.075 * total.lines
    assert total.raises <= 0.018 * total.lines
    said = [
        int(cell.replace(",", "")) for cell in re.findall(r"[|] all [|] \d+ [|] ([\d,]+) [|]", weight.PAGE.read_text())
    ]
    assert len(said) == 1
    assert abs(total.lines - said[0]) <= 0.02 * total.lines, "run python benchmarks/weight.py --write"


def test_no_source_file_is_too_long_to_read():
    weight = weighing()
    weighed = {str(path.relative_to(SOURCE)): weight.weigh(path.read_text(encoding="utf-8")) for path in FILES}
    long = {name: found.lines - found.docstrings for name, found in weighed.items()}
    assert {name: lines for name, lines in long.items() if lines > LONGEST} == {}


def test_a_wrong_import_would_be_seen(tmp_path):
    """The test above can fail: an import inside a function counts, whatever its form."""
    (tmp_path / "a.py").write_text("def f():\n    from dissensus import bench\n    import dissensus.data.toy\n")
    assert imported(tmp_path / "a.py") == [(2, "dissensus.bench"), (3, "dissensus.data.toy")]


@pytest.mark.parametrize(
    ("relative", "name", "found"),
    [
        ("core/batch.py", "dissensus.methods.MAP", "core may not import methods"),
        ("numerics/tree.py", "dissensus.core.batch", "numerics may not import core"),
        ("core/batch.py", "rich.table", "imports rich"),
        ("__init__.py", "dissensus.bench", "imports bench"),
        ("__init__.py", "dissensus.reporting.figures", "imports reporting"),
        ("attic.py", "dissensus.core.batch", "attic is new"),
        ("attic/old.py", "dissensus.core.batch", "attic is new"),
        ("bench/names.py", "dissensus.bench.task.config.load_task", "names may not import task"),
        ("bench/rows/sets.py", "dissensus.bench.task.config", "rows may not import task"),
        ("bench/task/schema.py", "dissensus.bench.task.config.load_task", "schema may not import config"),
        ("bench/run/run.py", "dissensus.bench.run.jobs.bench", "run may not import jobs"),
        ("bench/theory/studies.py", "dissensus.bench.cli.main", "theory may not import cli"),
        ("bench/run/__init__.py", "dissensus.bench.run.run.Run", "imports nothing"),
        ("bench/attic.py", "dissensus.bench.names", "say in FLOORS"),
        ("bench/cli.py", "dissensus.bench.attic.old", "say in FLOORS"),
        ("bench/cli.py", "dissensus.report.report", "bench may not import report"),
        ("reporting/tables.py", "dissensus.reporting.report.write", "tables may not import report"),
        ("reporting/tables.py", "dissensus.bench.run.run.Run", "reporting may not import bench"),
        ("reporting/tables.py", "dissensus.methods.METHODS", "reporting may not import methods"),
        ("reporting/tables.py", "matplotlib.pyplot", "imports matplotlib"),
    ],
)
def test_what_points_the_wrong_way_is_a_fault(relative, name, found):
    assert found in fault(relative, name)


@pytest.mark.parametrize(
    ("relative", "name"),
    [
        ("core/posterior.py", "dissensus.core.seam"),
        ("bench/run/jobs.py", "dissensus.bench.run.run.Run"),
        ("bench/run/run.py", "dissensus.bench.rows.sets.TaskData"),
        ("bench/cli.py", "dissensus.bench.theory.cli"),
        ("reporting/report.py", "dissensus.reporting.figures"),
    ],
)
def test_what_points_down_is_none(relative, name):
    assert fault(relative, name) is None


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
start = time.process_time()
import dissensus
seconds = time.process_time() - start
found = {"seconds": seconds, "loaded": sorted(sys.modules)}
sys.modules["torchmetrics"] = None  # as if it were not installed
from dissensus import metrics
found["by metrics"] = sorted({"matplotlib", "sklearn", "scipy"} & set(sys.modules))
from dissensus.metrics import *
assert auroc is metrics.auroc and "ECE" not in globals()
try:
    metrics.ECE
except ImportError as error:
    found["said"] = str(error)
dissensus.Evaluation, dissensus.History, dissensus.Predictive, dissensus.evaluate, dissensus.fit
found["by verbs"] = sorted({"matplotlib", "pandas"} & set(sys.modules))
print(json.dumps(found))
"""


def test_import_is_quick_and_light():
    """In time of the processor, best of a few: a collection of garbage in the middle can only make it slower. Metrics and
    verbs load nothing heavy either, and classes that need torchmetrics say so.

    Compiled as after a first start, also where the environment asks Python to write no bytecode.
    """
    best = 10.0
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(12):
        done = subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, env=environment
        )
        found = json.loads(done.stdout)
        assert not {name.split(".")[0] for name in found["loaded"]} & HEAVY
        rooms = {name.split(".")[1] for name in found["loaded"] if name.startswith("dissensus.")}
        assert rooms <= {"core", "engine", "numerics", "predict", "report", "version"}
        assert found["by metrics"] == found["by verbs"] == []
        assert found["said"] == (
            "expected torchmetrics for dissensus.metrics.ECE, got none; pip install 'dissensus[torchmetrics]'"
        )
        best = min(best, found["seconds"])
        if best < 0.2:
            return
    pytest.fail(f"import dissensus takes {best:.2f} s on top of torch, more than 0.2 s")


def test_names_that_are_imported_when_asked_for_are_those_that_type_checkers_see():
    """`_HOMES` and the imports for type checkers say the same; rooms aside."""
    block = next(node for node in ast.parse((SOURCE / "__init__.py").read_text()).body if isinstance(node, ast.If))
    seen = {a.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for a in node.names}
    homes = {name: home for name, home in seen.items() if home not in ("dissensus", "dissensus.methods")}
    assert homes == {name: f"dissensus.{home}" for name, home in dissensus._HOMES.items()}
    assert {name for name, home in seen.items() if home == "dissensus"} == set(dissensus._ROOMS)


def test_every_public_name_is_there():
    assert len(set(dissensus.__all__)) == len(dissensus.__all__)
    for name in dissensus.__all__:
        assert hasattr(dissensus, name), name
