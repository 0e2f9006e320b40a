"""How heavy the library is: lines with and without docstrings, files, raises and guards, by room, as a Markdown table.

    python benchmarks/weight.py [folder ...]
    python benchmarks/weight.py --write        # into CONTRIBUTING.md

A guard is a line of a `raise`, of an `if` suite or an `except` handler that ends in one, of a function whose name begins
with `check`, or of a statement that calls such a function.
"""

import argparse
import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARY, PAGE = ROOT / "src" / "dissensus", ROOT / "CONTRIBUTING.md"
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


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


def write() -> None:
    """Puts the library's table between the marks in CONTRIBUTING.md."""
    head, rest = PAGE.read_text(encoding="utf-8").split("<!-- weight -->")
    tail = rest.split("<!-- /weight -->")[1]
    text = f"{head}<!-- weight -->\n{table(LIBRARY)}\n<!-- /weight -->{tail}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, default=[LIBRARY])
    parser.add_argument("--write", action="store_true", help="write the library's table into CONTRIBUTING.md")
    given = parser.parse_args()
    if given.write:
        write()
    for folder in given.folders:
        print(table(folder))
