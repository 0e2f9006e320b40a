"""The user's code in a task: methods, networks and data named as package.module:name.

Importing runs code. So names are imported only when something is built, not when settings are read or reports are made.
"""

import ast
import hashlib
import importlib
import os
import sys
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

_added: list[str] = []  # folders appended to sys.path for tasks
_read: WeakKeyDictionary[ModuleType, bytes] = WeakKeyDictionary()  # module -> contents of its file when imported


def is_import_path(name: str) -> bool:
    """Whether a name has the form package.module:name."""
    return ":" in name


def import_object(name: str, what: str, beside: str = "") -> Any:
    """Imports the object of that name. Modules are searched in Python's path, then in `beside`, then in the current folder."""
    module, _, attributes = name.partition(":")
    try:
        found = _import_module(module, beside)
        if (file := _user_file(found)) is not None:
            top, seen = _import_root(module, file), {(file, "")}
            _needed_statements(file, {attributes.partition(".")[0]}, top, seen)
            # Its imports may belong to another task.
            for path in {path for path, _ in seen if path.is_relative_to(top)}:
                parts = path.relative_to(top).with_suffix("").parts
                _check_module_file(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path)
        return reduce(getattr, attributes.split("."), found)
    except Exception as error:  # an import may raise anything
        if str(error).startswith("expected"):
            raise
        missing = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        got = f"{name!r} ({type(error).__name__}: {error})"
        remedy = "install it, or put its file beside the task" if missing else "correct the name, or the file"
        raise ValueError(f"expected {what} that can be imported, as module:name, got {got}; {remedy}") from error


def code_digest(name: str, beside: str = "") -> str:
    """Twelve digits that change with the code behind a name: its definition and all user code it uses.

    "" for an installed package.
    """
    module, _, attributes = name.partition(":")
    if (file := _user_file(_import_module(module, beside))) is None:
        return ""
    code = _needed_statements(file, {attributes.partition(".")[0]}, _import_root(module, file), set())
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:12]


def _import_module(name: str, beside: str) -> ModuleType:
    """The module; the user's file if one of the user's folders has it."""
    places = [str(Path(folder).absolute()) for folder in (beside, os.getcwd()) if folder]
    # Appended last, so that no user file replaces an installed module; this task's folders come before those of other tasks.
    others = [each for each in sys.path if each not in _added]
    _added[:] = [each for each in dict.fromkeys([*places, *_added]) if each not in others]
    sys.path[:] = [*others, *_added]
    importlib.invalidate_caches()  # a file may have been written a moment ago
    found = importlib.import_module(name)
    for folder in map(Path, places):
        if here := [(each, path) for each in (name.partition(".")[0], name) for path in _module_files(folder, each)]:
            for each, path in here:
                _check_module_file(each, path)
            break
    return found


def _module_files(folder: Path, name: str) -> list[Path]:
    """The file of a module in the folder, if it is there."""
    base = folder.joinpath(*name.split("."))
    return [path for path in (base / "__init__.py", Path(f"{base}.py")) if path.is_file()][:1]


def _user_file(module: ModuleType) -> Path | None:
    """The module's file; None for an installed package, or if it is not Python source."""
    file = Path(getattr(module, "__file__", None) or "")
    return file if file.suffix == ".py" and not {"site-packages", "dist-packages"} & set(file.parts) else None


def _import_root(name: str, file: Path) -> Path:
    """The folder from which a module's imports start."""
    return file.parents[name.count(".") + (file.name == "__init__.py")]


def _check_module_file(name: str, path: Path) -> None:
    """Raises if an imported module of that name is not this file, or the file was changed since."""
    if (module := sys.modules.get(name)) is None:
        return
    got = getattr(module, "__file__", None) or "a built-in module"
    if not (os.path.exists(got) and os.path.samefile(path, got)):
        raise ValueError(f"expected the module {name!r} of {path}, got {got}, found first; rename your file")
    now = path.read_bytes()
    if _read.setdefault(module, now) != now:
        raise ValueError(f"expected {path} as it was imported, got a file changed since; restart Python")


def _needed_statements(file: Path, names: set[str], top: Path, seen: set[tuple[Path, str]]) -> list[str]:
    """The statements of a file, and of its imports, that the names need, directly or not; statements without a name count too.

    `top`: the folder from which imports start; modules elsewhere are installed, and are not followed.
    """
    body = ast.parse(file.read_bytes()).body
    statements = [node for node in body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    waiting, kept = set(names), set[int]()
    while True:
        others = {i: _defined_names(node) for i, node in enumerate(statements) if i not in kept}
        new = [i for i, defined in others.items() if not defined or defined & waiting]
        if not new:
            break
        kept.update(new)
        # In bodies, decorators, bases and annotations.
        waiting |= {each.id for i in new for each in ast.walk(statements[i]) if isinstance(each, ast.Name)}
    code = [ast.unparse(statements[i]) for i in sorted(kept)]
    for node in (each for i in sorted(kept) for each in ast.walk(statements[i])):
        if isinstance(node, ast.ImportFrom):
            start = top if node.level == 0 else file.parents[node.level - 1]
            base = start.joinpath(*(node.module or "").split("."))
            wanted = {alias.name for alias in node.names}
            targets = [(base, None if "*" in wanted else wanted), *((base / alias, None) for alias in sorted(wanted))]
        elif isinstance(node, ast.Import):
            targets = [(top.joinpath(*alias.name.split(".")), None) for alias in node.names]
        else:
            continue
        for base, wanted_names in targets:
            for path in (base.with_suffix(".py"), base / "__init__.py"):
                key = (path, ",".join(sorted(wanted_names or ["*"])))
                if path.is_file() and key not in seen:
                    seen.add(key)
                    everything = set().union(*(_defined_names(each) for each in ast.parse(path.read_bytes()).body))
                    code += _needed_statements(path, wanted_names or everything, top, seen)
    return code


def _defined_names(node: ast.stmt) -> set[str]:
    """The names that a statement defines; empty for other statements, which always count."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
    return set()
