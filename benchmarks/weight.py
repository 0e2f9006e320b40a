"""How heavy the library is, by room, and how easy to find one's way in: two Markdown tables.

    python benchmarks/weight.py [folder ...]
    python benchmarks/weight.py --write        # into CONTRIBUTING.md
    python benchmarks/weight.py --check        # fails if a function is too long; `make lint` does this

A guard is a line of a `raise`, of an `if` suite or an `except` handler that ends in one, of a function whose name begins
with `check`, or of a statement that calls such a function.

The second table counts what makes a stranger lose the way; the rules are in the docstrings of the functions that count:
`shared_names`, `small_files`, `bare_participles`, `long_functions`, `complex_functions`, `overridden_hooks`,
`public_names`, `depth` and `files_of_a_step`.
"""

import argparse
import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIBRARY, PAGE = ROOT / "src" / "dissensus", ROOT / "CONTRIBUTING.md"
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

SMALL = 80  # lines: below them, a file with one importer must be an idea of its own
LONG = 60  # lines of code of a function
COMPLEX = 10  # McCabe complexity of a function
PARTICIPLE_ENDINGS = ("ed", "ing")
IRREGULAR_PARTICIPLES = frozenset(
    """bent borne bound broken brought built caught chosen cut dealt done drawn driven fallen fed felt found frozen given gone
    grown heard held hidden hung kept known laid led left lent lost made meant met paid rebuilt redrawn said seen sent shown
    shrunk spent spoken stood struck swept taken taught told torn undone unmade written""".split()  # noqa: SIM905
)
# verbs and nouns that only look like participles
NO_PARTICIPLES = {"embed", "everything", "ring", "seed"}


@dataclass(frozen=True)
class Weight:
    """What was counted in one file, or in several together."""

    files: int = 0
    lines: int = 0
    docstrings: int = 0
    raises: int = 0
    guards: int = 0

    def __add__(self, other: "Weight") -> "Weight":
        return Weight(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def row(self, room: str) -> str:
        """| room | files | lines | without docstrings | raises per thousand lines | guards in % |"""
        per_thousand, share = 1000 * self.raises / self.lines, 100 * self.guards / self.lines
        plain = self.lines - self.docstrings
        return f"| {room} | {self.files} | {self.lines:,} | {plain:,} | {per_thousand:.1f} | {share:.1f} |"


@cache
def weigh(source: str) -> Weight:
    """The weight of one file's text."""
    nodes = list(ast.walk(ast.parse(source)))
    raises = sum(isinstance(node, ast.Raise) for node in nodes)
    docstrings = {line for node in nodes for line in docstring(node)}
    guards = {line for node in nodes for line in guard(node)}
    return Weight(1, len(source.splitlines()), len(docstrings), raises, len(guards))


def docstring(node: ast.AST) -> range:
    """Lines of the docstring of a module, class or function."""
    if not isinstance(node, (ast.Module, ast.ClassDef, *DEFINITIONS)) or ast.get_docstring(node) is None:
        return range(0)
    return lines(node.body[0])


def guard(node: ast.AST) -> range:
    """Lines of this node that only guard."""
    if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
        return range(node.lineno, (node.body[-1].end_lineno or 0) + 1)
    if isinstance(node, ast.ExceptHandler) and isinstance(node.body[-1], ast.Raise):
        return lines(node)
    if isinstance(node, DEFINITIONS) and checks(node.name):
        return lines(node)
    if isinstance(node, (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return)) and any(called(node)):
        return lines(node)
    return lines(node) if isinstance(node, ast.Raise) else range(0)


def called(node: ast.AST) -> Iterator[str]:
    """Names of the checks that a statement calls."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call):
            function = each.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if checks(name):
                yield name


def checks(name: str) -> bool:
    return name.lstrip("_").startswith("check")


def lines(node: ast.stmt | ast.ExceptHandler) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def weights(library: Path) -> dict[str, Weight]:
    """Room -> its weight: the folders of the library, and the files beside them."""
    rooms: dict[str, Weight] = {}
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        room = parts[0] if len(parts) > 1 else "verbs"
        rooms[room] = rooms.get(room, Weight()) + weigh(path.read_text(encoding="utf-8"))
    return rooms


def table(library: Path) -> str:
    """The weight of each room and of all, as Markdown."""
    rooms = weights(library)
    heads = ["room", "files", "lines", "without docstrings", "raises per thousand", "guards, %"]
    ordered = sorted(rooms.items(), key=lambda item: -item[1].lines)
    total = sum(rooms.values(), Weight())
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return "\n".join([*rows, *(weight.row(room) for room, weight in ordered), total.row("all")])


def modules(library: Path) -> dict[str, Path]:
    """Dotted name -> file."""
    found = {}
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def functions(library: Path) -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function and method, also those inside others."""
    for path in sorted(library.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, DEFINITIONS):
                yield path, node


def shared_names(library: Path) -> dict[str, list[str]]:
    """Names that more than one module has, in whatever folder; `__init__` and `__main__` aside."""
    found: dict[str, list[str]] = {}
    for path in sorted(library.rglob("*.py")):
        if not path.stem.startswith("__"):
            found.setdefault(path.stem, []).append(path.relative_to(library).as_posix())
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def small_files(library: Path) -> list[str]:
    """Files of fewer than SMALL lines that one other file imports, also inside a function.

    `__init__` files do not count, nor methods and networks that only their folder's `__init__` imports.
    """
    files = modules(library)
    importers: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                targets = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for target in targets:
                while target and target not in files:
                    target = target.rpartition(".")[0]
                if target and target != name:
                    importers[target].add(name)
    found = []
    for name, path in files.items():
        small = path.stem != "__init__" and len(path.read_text(encoding="utf-8").splitlines()) < SMALL
        listed = path.parent.name in ("methods", "nets") and importers[name] == {name.rpartition(".")[0]}
        if small and len(importers[name]) == 1 and not listed:
            found.append(path.relative_to(library).as_posix())
    return found


def bare_participles(library: Path) -> list[str]:
    """Functions and methods named by one participle alone: it says neither what they do nor what they return.

    A name of one word, underscores at its ends aside, that ends in PARTICIPLE_ENDINGS or is one of IRREGULAR_PARTICIPLES.
    Words that are verbs, too (run, read, split, fit, put, set), are not in the list; NO_PARTICIPLES are excepted.
    """
    found = []
    for path, node in functions(library):
        word = node.name.strip("_")
        participle = word.endswith(PARTICIPLE_ENDINGS) or word in IRREGULAR_PARTICIPLES
        if participle and "_" not in word and not node.name.startswith("__") and word not in NO_PARTICIPLES:
            found.append(f"{path.relative_to(library).as_posix()}:{node.name}")
    return found


def long_functions(library: Path) -> list[str]:
    """Functions of more than LONG lines of code: without docstring, comments and empty lines; nested functions count."""
    found = []
    for path, node in functions(library):
        text = path.read_text(encoding="utf-8").splitlines()
        inside = set(lines(node)) - set(docstring(node))
        code = [text[i - 1].strip() for i in inside]
        if sum(bool(line) and not line.startswith("#") for line in code) > LONG:
            found.append(f"{path.relative_to(library).as_posix()}:{node.name}")
    return found


def complex_functions(library: Path) -> list[str]:
    """Functions whose McCabe complexity is above COMPLEX, by ruff's rule C901."""
    command = ["ruff", "check", "--isolated", "--select", "C901", "--config", f"lint.mccabe.max-complexity={COMPLEX}"]
    done = subprocess.run(
        [sys.executable, "-m", *command, "--output-format", "json", str(library)], capture_output=True, text=True
    )
    if done.returncode not in (0, 1):
        raise OSError(f"expected ruff beside this Python, got {done.stderr.strip()}; pip install ruff")
    return [each["message"].split("`")[1] for each in json.loads(done.stdout)]


def methods() -> list[type]:
    """The classes of all methods."""
    from dissensus.methods import METHODS

    return list(METHODS.values())


def overridden_hooks() -> set[str]:
    """Names of `Posterior` and its bases, besides torch's, that a class between it and a method defines again."""
    from torch import nn

    from dissensus.core.posterior import Posterior

    own = {name for cls in Posterior.__mro__ if cls not in nn.Module.__mro__ for name in vars(cls)}
    below = {
        cls for method in methods() for cls in method.__mro__ if issubclass(cls, Posterior) and cls is not Posterior
    }
    return {name for cls in below for name in vars(cls) if name in own and not name.startswith("_")}


def public_names() -> set[str]:
    """Public names of `Posterior` besides torch's, the hooks that methods override, and submodules."""
    from torch import nn

    from dissensus.core.posterior import Posterior

    public = {n for n in dir(Posterior) if not n.startswith("_") and not hasattr(nn.Module, n)}
    return public - overridden_hooks() - {"particles", "watchers"}


def depth() -> int:
    """Most classes on the way from `Posterior`, not counted, down to a method, counted."""
    from dissensus.core.posterior import Posterior

    def below(cls: type) -> int:
        return (
            0
            if cls is Posterior
            else 1 + max((below(b) for b in cls.__bases__ if issubclass(b, Posterior)), default=-1)
        )

    return max(below(method) for method in methods())


def files_of_a_step() -> list[str]:
    """Library files that a batch enters between the loader and `optimizer.step`, in a plain run on the CPU.

    Two small networks, the fourth of six batches: every call in between is seen by a profiler, and `fit` itself counts, but
    not what calls it.
    """
    import torch
    from torch import nn

    import dissensus as ds

    home, entered = Path(ds.__file__).parent, set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered.add(frame.f_code.co_filename)

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if sys.getprofile() is not None:
                sys.setprofile(None)
                frame = sys._getframe(1)
                while frame is not None:
                    entered.add(frame.f_code.co_filename)
                    frame = None if frame.f_code.co_name == "fit" else frame.f_back  # type: ignore[assignment]
            return super().step(closure)

    class Batches:
        def __len__(self) -> int:
            return 6

        def __iter__(self) -> Iterator[Any]:
            for number in range(6):
                if number == 3:
                    sys.setprofile(note)
                yield torch.randn(8, 4), torch.arange(8) % 3

    networks = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(2)]
    posterior = ds.DeepEnsemble(networks)
    ds.fit(
        posterior, Batches(), epochs=1, optimizer=Watched(posterior.parameters(), lr=0.1), device="cpu", progress=False
    )
    inside = [Path(each) for each in entered if home in Path(each).parents]
    return sorted(each.relative_to(home).as_posix() for each in inside)


def orientation(library: Path) -> str:
    """What makes a stranger lose the way, as Markdown; what belongs to classes is counted in the installed library."""
    counts = Counter(
        {
            "modules of one name": len(shared_names(library)),
            f"files under {SMALL} lines with one importer": len(small_files(library)),
            "functions named by a bare participle": len(bare_participles(library)),
            f"functions over {LONG} lines of code": len(long_functions(library)),
            f"functions over a complexity of {COMPLEX}": len(complex_functions(library)),
            "hooks that methods override": len(overridden_hooks()),
            "public names of `Posterior` besides hooks": len(public_names()),
            "classes below `Posterior`, at most": depth(),
            "files that a batch enters before `optimizer.step`": len(files_of_a_step()),
        }
    )
    return "\n".join(
        ["| counted | number |", "|---|---|", *(f"| {name} | {count} |" for name, count in counts.items())]
    )


def write() -> None:
    """Puts the library's table between the marks in CONTRIBUTING.md."""
    head, rest = PAGE.read_text(encoding="utf-8").split("<!-- weight -->")
    tail = rest.split("<!-- /weight -->")[1]
    text = f"{head}<!-- weight -->\n{table(LIBRARY)}\n\n{orientation(LIBRARY)}\n<!-- /weight -->{tail}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, default=[LIBRARY])
    parser.add_argument("--write", action="store_true", help="write the library's table into CONTRIBUTING.md")
    parser.add_argument("--check", action="store_true", help="only fail if a function is too long")
    given = parser.parse_args()
    if given.check:
        too_long = [name for folder in given.folders for name in long_functions(folder)]
        sys.exit(f"functions over {LONG} lines of code: {', '.join(too_long)}" if too_long else 0)
    if given.write:
        write()
    for folder in given.folders:
        print(table(folder), orientation(folder), sep="\n\n")
