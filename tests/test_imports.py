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
from dissensus.utils.extras import EXTRAS

SOURCE = Path(dissensus.__file__).parent
LONGEST = 600  # lines of a source file, docstrings included

# room, or file beside the rooms -> the others it may import from
ROOMS = {
    "version": "",
    "utils": "",
    "numerics": "utils",
    "kernels": "utils numerics",  # knows tensors only; what makes the same numbers faster
    "plots": "utils numerics",  # arrays as figures; the only room below the reports that loads matplotlib
    "nets": "utils numerics",
    "metrics": "utils numerics",
    "data": "utils numerics",
    "core": "utils numerics kernels plots",  # plots only inside `plot`
    "likelihoods": "utils numerics core",  # those beyond classes and values, which core has
    "layers": "utils numerics kernels nets core",  # the NTK form of a linear layer is converted as the plain one is
    "landscape": "utils numerics plots core likelihoods layers",  # plots only to draw
    "engine": "utils numerics kernels core data",  # data only where rows are given as such
    "distributed": "utils numerics kernels core engine",  # who has which members and rows
    "methods": "utils numerics kernels core likelihoods layers engine",
    "theory": "utils numerics core nets layers landscape methods",
    "storage": "utils numerics core likelihoods data nets methods",
    "predict": "utils numerics core data engine storage",
    "calibration": "utils numerics core likelihoods engine metrics",
    "attacks": "utils numerics core data methods",
    "training": "utils numerics plots core data layers landscape engine distributed methods storage",
    "evaluation": "utils numerics plots core likelihoods engine methods metrics data attacks calibration",
    "frozen_backbone": "utils core engine methods",
    "export_model": "utils numerics core layers engine methods calibration storage version",
    "sklearn": "utils numerics core layers methods nets data storage training calibration",
    "integrations": "utils numerics core storage training",  # callbacks for other people's trainers and loggers
    "bench": "utils numerics plots nets metrics data core layers engine methods theory storage training evaluation "
    "predict calibration version distributed",
    "report": "evaluation bench",  # the one door into bench, opened only inside the function
    "__main__": "utils bench",
}
OPTIONAL = {module for _, modules in EXTRAS.values() for module in modules.split()} | {"onnxruntime"}
HEAVY = {"scipy", *OPTIONAL}
# the only files that may name them; the optional ones behind `require_extra`, called there, in the room's __init__ or before
HEAVY_ALLOWED = {
    ("utils/progress.py", "rich"),
    ("metrics/bootstrap.py", "scipy"),
    ("calibration/selective.py", "scipy"),
    ("metrics/torchmetrics_classes.py", "torchmetrics"),
    ("bench/cli.py", "typer"),
    ("bench/cli.py", "rich"),
    ("bench/theory_studies.py", "matplotlib"),
    ("bench/report/html_report.py", "jinja2"),
    ("utils/arrays.py", "pandas"),
    ("bench/rows/user_data.py", "pandas"),
    *((f"plots/{name}.py", "matplotlib") for name in ("charts", "segmentation_maps", "prediction_figures")),
    *((f"bench/report/{name}.py", "matplotlib") for name in ("figure_sections", "report_figures")),
    ("bench/run/segment_images.py", "PIL"),
    ("bench/run/run.py", "tomli_w"),
    ("bench/task/schema.py", "pydantic"),
    *((f"data/{name}.py", "PIL") for name in ("images", "segmentation")),
    ("sklearn/estimators.py", "sklearn"),
    ("sklearn/table_rows.py", "pandas"),
    ("sklearn/table_rows.py", "sklearn"),
    ("integrations/hf.py", "transformers"),
    ("integrations/lightning.py", "lightning"),
    *(("export_model.py", name) for name in ("onnx", "onnxruntime")),
}

# the floors of a room: what stands on one may import from its own and from those below
FLOORS = {
    "plots": ["charts", "segmentation_maps", "prediction_figures"],
    "bench": [
        "setting_checks user_code torchrun_ranks", "report", "rows", "task", "run", "theory_studies capacity_table",
        "width_axis", "run_grid", "cli",
    ],
    "bench/report": [
        "results measures comparisons tables prose published_numbers recommendation",
        "figure_sections report_figures",
        "html_report",
    ],
    "bench/rows": ["dataset_rows", "user_data", "named_sets", "task_rows"],
    "bench/task": ["objects", "schema", "config"],
    "bench/run": [
        "run_folder training_watch",
        "build prediction_splits convert",
        "evaluate_run",
        "run",
        "shared_training",
        "jobs",
        "segment_images",
    ],
}  # fmt: skip


@functools.cache
def imported(path: Path, *, types: bool = True) -> list[tuple[int, str]]:
    """(line, dotted name) of every import in a file, also inside functions; `types`: those for type checkers too."""
    found: list[tuple[int, str]] = []
    tree = ast.parse(path.read_text())
    if not types:
        typing = lambda node: isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)  # noqa: E731
        tree.body = [node for node in tree.body if not typing(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.fixture(scope="module", autouse=True)
def parsed_once():
    walk = ast.walk
    nodes = functools.cache(lambda tree: list(walk(tree)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ast, "parse", functools.cache(ast.parse))
        patch.setattr(ast, "walk", lambda node: nodes(node) if isinstance(node, ast.Module) else walk(node))
        yield


def fault(relative: str, name: str) -> str | None:
    """What is wrong with a file of the package that imports this dotted name."""
    mine, theirs = relative.removesuffix(".py").split("/"), name.split(".")
    if theirs[0] in HEAVY:
        return None if (relative, theirs[0]) in HEAVY_ALLOWED else f"imports {theirs[0]}"
    if theirs[0] != "dissensus":
        return None
    theirs = theirs[1:]
    if mine == ["__init__"]:
        return f"imports {theirs[0]}" if theirs[0] == "bench" else None
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
        paths = (SOURCE / room).iterdir()
        there = {path.stem for path in paths if path.suffix == ".py" or (path / "__init__.py").exists()}
        assert {name for names in floors for name in names.split()} == there - {"__init__"}, room


def load_weight_program():
    """The program that counts lines, raises and guards."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    try:
        import weight
    finally:
        del sys.path[0]
    return weight


@pytest.fixture(scope="module")
def weights():
    """Room -> what the program counts in it."""
    return load_weight_program().weights(SOURCE)


def test_the_library_is_as_light_as_the_page_for_contributors_says(weights):
    weight = load_weight_program()
    total = sum(weights.values(), weight.Weight())
    assert total.guards <= 0.075 * total.lines
    assert total.raises <= 0.018 * total.lines
    cells = re.findall(r"[|] all [|] \d+ [|] ([\d,]+) [|]", weight.PAGE.read_text())
    said = [int(cell.replace(",", "")) for cell in cells]
    assert len(said) == 1
    assert abs(total.lines - said[0]) <= 0.02 * total.lines, "run python benchmarks/weight.py --write"


def test_a_stranger_finds_the_way(weights):
    """Limits of what `benchmarks/weight.py` counts; its docstrings have the rules."""
    weight = load_weight_program()
    assert len(weight.shared_names(SOURCE)) <= 12
    assert len(weight.small_files(SOURCE)) <= 15
    assert len(weight.bare_participles(SOURCE)) <= 1  # ds.watching, a context
    assert len(weight.public_names()) <= 30
    assert weight.depth() <= 4
    assert weight.long_functions(SOURCE) == []
    core = weights["core"]
    assert core.files <= 20
    assert core.lines <= 5300
    assert sum(weights.values(), weight.Weight()).lines <= 48_000


def test_a_batch_enters_few_files_before_the_optimiser_steps():
    """All of them are on the way of any batch; `docs/developing/a-batch-through-fit.md` says what each is for."""
    files = load_weight_program().files_of_a_step()
    assert {"training/fit.py", "core/batch.py", "core/gradients.py", "engine/training_step.py"} <= {*files}
    assert len(files) <= 17, files


def test_no_method_is_derived_from_another():
    methods = set(dissensus.METHODS.values())
    assert {method.__name__: methods & {*method.__mro__[1:]} for method in methods} == {
        method.__name__: set() for method in methods
    }
    assert {each.__name__ for each in methods if not getattr(each, "__final__", False)} == set()


def files_of_method(name: str) -> set[str]:
    """The file of a method, and those of `methods` that it imports, directly or not."""
    found, new = set(), {f"methods/{name}.py"}
    while new:
        found |= new
        dotted = {each.removeprefix("dissensus.") for path in new for _, each in imported(SOURCE / path)}
        files = {f"{part.replace('.', '/')}.py" for each in dotted for part in (each, each.rpartition(".")[0])}
        new = {file for file in files if file.startswith("methods/") and (SOURCE / file).is_file()} - found
    return found


@pytest.mark.parametrize("name", ["tradi", "laplace", "node_bnn"])
def test_a_method_is_read_in_three_files(name):
    assert len(files_of_method(name)) <= 3, files_of_method(name)


def test_participles_and_small_files_would_be_seen(tmp_path):
    weight = load_weight_program()
    library = tmp_path / "library"
    library.mkdir()
    (library / "a.py").write_text(
        "import library.b\n\n\ndef gathered(): ...\n\n\ndef _kept(): ...\n\n\ndef seed(): ...\n"
    )
    (library / "b.py").write_text("class A:\n    def held(self): ...\n\n    def held_rows(self): ...\n")
    (library / "sub").mkdir()
    (library / "sub" / "a.py").write_text("")
    assert weight.bare_participles(library) == ["a.py:gathered", "a.py:_kept", "b.py:held"]
    assert weight.small_files(library) == ["b.py"]
    assert weight.shared_names(library) == {"a": ["a.py", "sub/a.py"]}


def test_no_source_file_is_too_long_to_read():
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {path: count for path, count in lines.items() if count > LONGEST} == {}


def test_a_wrong_import_would_be_seen(tmp_path):
    """The test above can fail: an import inside a function counts, whatever its form."""
    (tmp_path / "a.py").write_text("def f():\n    from dissensus import bench\n    import dissensus.data.toy\n")
    assert imported(tmp_path / "a.py") == [(2, "dissensus.bench"), (3, "dissensus.data.toy")]


WRONG = [
    ("core/batch.py", "dissensus.methods.MAP", "core may not import methods"),
    ("kernels/fused_norm.py", "dissensus.core.batch", "kernels may not import core"),
    ("utils/tensor_tree.py", "dissensus.core.batch", "utils may not import core"),
    ("core/batch.py", "rich.table", "imports rich"),
    ("__init__.py", "dissensus.bench", "imports bench"),
    ("attic.py", "dissensus.core.batch", "attic is new"),
    ("attic/old.py", "dissensus.core.batch", "attic is new"),
    ("bench/setting_checks.py", "dissensus.bench.task.config.load_task", "setting_checks may not import task"),
    ("bench/rows/task_rows.py", "dissensus.bench.task.config", "rows may not import task"),
    ("bench/task/schema.py", "dissensus.bench.task.config.load_task", "schema may not import config"),
    ("bench/run/run.py", "dissensus.bench.run.jobs.bench", "run may not import jobs"),
    ("bench/theory_studies.py", "dissensus.bench.cli.main", "theory_studies may not import cli"),
    ("bench/run/__init__.py", "dissensus.bench.run.run.Run", "imports nothing"),
    ("bench/attic.py", "dissensus.bench.setting_checks", "say in FLOORS"),
    ("bench/cli.py", "dissensus.bench.attic.old", "say in FLOORS"),
    ("bench/cli.py", "dissensus.report.report", "bench may not import report"),
    ("evaluation/evaluate.py", "dissensus.bench.run.run.Run", "evaluation may not import bench"),
    ("bench/report/tables.py", "dissensus.bench.report.html_report.write", "tables may not import html_report"),
    ("bench/report/tables.py", "dissensus.bench.run.run.Run", "report may not import run"),
    ("bench/report/tables.py", "matplotlib.pyplot", "imports matplotlib"),
]  # fmt: skip
DOWN = [
    ("core/posterior.py", "dissensus.core.gradients"), ("bench/run/jobs.py", "dissensus.bench.run.run.Run"),
    ("bench/run/run.py", "dissensus.bench.rows.task_rows.TaskData"),
    ("bench/cli.py", "dissensus.bench.cli"),
    ("bench/report/html_report.py", "dissensus.bench.report.report_figures"),
]  # fmt: skip


def test_what_points_the_wrong_way_is_a_fault_and_what_points_down_is_none():
    for relative, name, found in WRONG:
        assert found in fault(relative, name), (relative, name)
    assert [each for each in DOWN if fault(*each)] == []


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
    assert rings(package) == [{"dissensus.a", "dissensus.b", "dissensus.c"}, {"dissensus.sub.e", "dissensus.sub.g"}]


PROBE = """
import json, os, sys, time
import torch, torch.utils.checkpoint  # which loads sympy before torch 2.7
for _ in range(12):  # until one is quick, each in a new process that has torch already
    if child := os.fork():
        if os.waitpid(child, 0)[1] == 0:
            break
        continue
    start = time.process_time()
    import dissensus
    seconds = time.process_time() - start
    found = {"seconds": seconds, "loaded": sorted(sys.modules)}
    sys.modules["torchmetrics"] = None  # as if it were not installed
    from dissensus import metrics
    found["by metrics"] = sorted({"matplotlib", "sklearn", "scipy"} & set(sys.modules))
    exec("from dissensus.metrics import *", star := {})
    assert star["auroc"] is metrics.auroc and "ECE" not in star
    try:
        metrics.ECE
    except ImportError as error:
        found["said"] = str(error)
    dissensus.Evaluation, dissensus.History, dissensus.Predictive, dissensus.evaluate, dissensus.fit
    found["by verbs"] = sorted({"matplotlib", "pandas"} & set(sys.modules))
    print(json.dumps(found), flush=True)
    sys.exit(seconds >= 0.2)
"""


def test_import_is_quick_and_light():
    """In time of the processor, best of a few: a collection of garbage in the middle can only make it slower. Metrics and
    verbs load nothing heavy either, and classes that need torchmetrics say so.

    Compiled as after a first start, also where the environment asks Python to write no bytecode.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout, done.stderr
    probes = [json.loads(line) for line in done.stdout.splitlines()]
    for found in probes:
        assert not {name.split(".")[0] for name in found["loaded"]} & HEAVY
        rooms = {name.split(".")[1] for name in found["loaded"] if name.startswith("dissensus.")}
        assert rooms <= {"core", "engine", "kernels", "numerics", "predict", "report", "utils", "version"}
        assert found["by metrics"] == found["by verbs"] == []
        assert found["said"] == 'a metric class needs torchmetrics: pip install "dissensus[torchmetrics]"'
    best = min(found["seconds"] for found in probes)
    assert best < 0.2, f"import dissensus takes {best:.2f} s on top of torch, more than 0.2 s"


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
