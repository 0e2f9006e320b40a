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
    "engine": {"core", "engine"},
    "methods": {"core", "engine", "methods"},
    "surgery": {"core", "surgery"},
    "theory": {"core", "nets", "surgery", "theory"},
    "storage": {"core", "methods", "nets"},  # a posterior is built again when it is loaded
    "stored": {"core", "methods", "storage"},
    "history": {"engine"},
    "checkpoint": {"core", "history"},
    "train": {"core", "engine", "metrics", "data", "progress", "history", "checkpoint"},
    "predict": {"core", "engine", "metrics", "data", "progress", "stored"},
    "temperature": {"core", "engine", "metrics", "data", "progress", "predict"},
    "evaluation": {"core", "engine", "metrics", "data", "progress", "predict", "evaluation"},
    "evaluate": {"core", "engine", "metrics", "data", "progress", "predict", "evaluation"},
    "report": {"evaluate", "bench"},  # bench only inside the function: see the test of what import loads
    "export": {"core", "methods"},
}
HEAVY = {"matplotlib", "typer", "jinja2", "rich", "torchmetrics"}
# the only files that may name them
HEAVY_ALLOWED = {("progress.py", "rich"), ("metrics/modular.py", "torchmetrics")}  # and all of bench


def imported(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import in a file, also inside functions."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


FILES = sorted(SOURCE.rglob("*.py"))


def part(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    mine = part(path)
    if mine == "bench":
        return  # may import everything
    for line, name in imported(path):
        where, parts = f"{path.relative_to(SOURCE)}:{line}", name.split(".")
        if parts[0] == "dissensus":
            if mine == "__init__":
                assert parts[1] != "bench", f"{where} imports bench"
            else:
                assert mine in ALLOWED, f"{mine} is new: say in ALLOWED what it may import"
                assert parts[1] in ALLOWED[mine], f"{where}: {mine} may not import {parts[1]}"
        elif parts[0] in HEAVY:
            relative = str(path.relative_to(SOURCE))
            assert (relative, parts[0]) in HEAVY_ALLOWED, f"{where} imports {parts[0]}"


def test_a_wrong_import_would_be_seen(tmp_path):
    """The test above can fail: an import inside a function counts, whatever its form."""
    (tmp_path / "a.py").write_text("def f():\n    from dissensus import bench\n    import dissensus.data.toy\n")
    assert imported(tmp_path / "a.py") == [(2, "dissensus.bench"), (3, "dissensus.data.toy")]


PROBE = """
import json, sys, time
import torch
start = time.perf_counter()
import dissensus
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "loaded": sorted(sys.modules)}))
"""


def test_import_is_quick_and_light():
    """Best of three: other work on the machine can only make it slower."""
    best = 10.0
    for _ in range(3):
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
