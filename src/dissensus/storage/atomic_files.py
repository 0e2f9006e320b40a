"""Files that are written completely or not at all: under a temporary name, then renamed. Damage raises one clear error."""

import itertools
import json
import os
import re
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save as format_tensors
from torch import Tensor

from dissensus.utils.file_errors import read_errors

STRAY_SECONDS = 3600.0

_calls = itertools.count()


def write_atomically(files: dict[Path, bytes]) -> None:
    """Writes all files under temporary names, then renames them in order, so that none is ever half-written."""
    with ExitStack() as stack:
        # Contexts close in reverse order: the first file is entered last, and renamed first.
        temporary = {path: stack.enter_context(replace_file(path)) for path in reversed(files)}
        for path, content in files.items():
            temporary[path].write_bytes(content)


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """A temporary name to write to, renamed to `path` afterwards, or removed if writing fails."""
    temporary = temporary_name(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
        remove_strays(path)


def temporary_name(path: Path) -> Path:
    """A hidden name in the folder of `path` that no other process, thread or call uses."""
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}-{next(_calls)}.tmp")


def remove_strays(path: Path) -> None:
    """Removes temporary files left by killed writers of `path`."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.(\d+)-\d+-\d+\.tmp")  # process, thread and call
    with suppress(OSError):  # the file is written: an error in cleaning up does not matter
        for entry in os.scandir(path.parent):
            found = ours.fullmatch(entry.name) if entry.name.startswith(".") else None
            # A process that runs here may write a file of any age; one of another machine or container that shares the
            # folder is not seen to run, but its file would be recent.
            age = time.time() - entry.stat(follow_symlinks=False).st_mtime
            if found is not None and age > STRAY_SECONDS and not _is_running(int(found[1])):
                os.unlink(entry.path)


def _is_running(process: int) -> bool:
    if os.name != "posix":  # there is no signal 0: os.kill would end the process
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # another user's process
    return True


@contextmanager
def lock_file(path: Path, *, wait: bool) -> Iterator[bool]:
    """Inside, True if this process has the lock, False if another has it, here or on a machine that shares the folder.

    `wait`: until the other is done. A process that ends, however it ends, loses its lock. Where there are no locks: True.
    """
    with ExitStack() as stack:
        while os.name == "posix":
            import fcntl

            file = stack.enter_context(path.open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except OSError as error:  # somebody has it, or this file system has none
                yield not isinstance(error, BlockingIOError)
                return
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):  # else its owner removed it
                stack.callback(path.unlink, missing_ok=True)
                break
        yield True


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Writes one file and creates its folder if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically({path: content})


def read_json(path: Path) -> dict[str, Any]:
    with read_errors(path):
        return _as_table(json.loads(path.read_bytes()))


def write_json(path: Path, table: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(table, indent=1) + "\n")


def read_toml(path: Path) -> dict[str, Any]:
    with read_errors(path):
        return tomllib.loads(path.read_bytes().decode())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Writes tensors with some JSON facts about them, as safetensors."""
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_bytes(path, format_tensors(whole, metadata={"facts": json.dumps(facts)}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, facts) of a file that `write_tensors` wrote."""
    with read_errors(path), safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        return tensors, _as_table(json.loads(file.metadata()["facts"]))


def _as_table(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError(f"{type(found).__name__} instead of a table")
    return found


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
