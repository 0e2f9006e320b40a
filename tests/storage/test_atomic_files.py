"""Files are whole or not there, whoever else writes and whoever is killed."""

import os
import subprocess
import sys
import threading

import pytest

from dissensus.storage import atomic_files
from dissensus.storage.atomic_files import STRAY_SECONDS, remove_strays, replace_file, temporary_name, write_atomically


@pytest.fixture
def dead() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def left(folder, name: str, *, seconds: float) -> None:
    """A file that was last written so many seconds ago."""
    (folder / name).write_bytes(b"half")
    then = os.stat(folder / name).st_mtime - seconds
    os.utime(folder / name, (then, then))


def test_files_are_renamed_in_order_and_only_when_all_are_written(tmp_path, monkeypatch):
    renamed = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (renamed.append(new.name), replace(old, new)))
    write_atomically({tmp_path / "a": b"1", tmp_path / "b": b"2"})
    assert renamed == ["a", "b"]
    with pytest.raises(TypeError):
        write_atomically({tmp_path / "a": b"3", tmp_path / "b": "not bytes"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"1", "b": b"2"}


def test_names_are_of_one_process_thread_and_call(tmp_path, monkeypatch):
    names = [temporary_name(tmp_path / "a") for _ in range(5)]
    thread = threading.Thread(target=lambda: names.append(temporary_name(tmp_path / "a")))
    thread.start()
    thread.join()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    names.append(temporary_name(tmp_path / "a"))
    assert len({*names}) == 7


def test_threads_that_write_one_file_do_not_meet(tmp_path):
    errors = []

    def write(value: int) -> None:
        try:
            for _ in range(100):
                write_atomically({tmp_path / "a": bytes([value]) * 1000})
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert os.listdir(tmp_path) == ["a"]
    assert len({*(tmp_path / "a").read_bytes()}) == 1


def test_what_killed_writers_left_is_removed_when_the_file_is_written_again(tmp_path, dead):
    left(tmp_path, f".a.{dead}-7-3.tmp", seconds=2 * STRAY_SECONDS)
    with replace_file(tmp_path / "a") as temporary:
        temporary.write_bytes(b"1")
    assert os.listdir(tmp_path) == ["a"]


def test_what_may_be_written_by_somebody_is_left_alone(tmp_path, dead):
    names = {
        f".a.{os.getpid()}-7-3.tmp": 2 * STRAY_SECONDS,  # a thread of a live process
        f".a.{dead}-7-3.tmp": STRAY_SECONDS / 2,  # perhaps of a process on another machine
        f".ab.{dead}-7-3.tmp": 2 * STRAY_SECONDS,  # of another file
        ".a.notes.tmp": 2 * STRAY_SECONDS,  # nothing of ours
    }
    for name, seconds in names.items():
        left(tmp_path, name, seconds=seconds)
    remove_strays(tmp_path / "a")
    assert {*os.listdir(tmp_path)} == {*names}


def test_a_process_of_somebody_else_is_alive(monkeypatch):
    def refused(process: int, signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refused)
    assert atomic_files._is_running(1)
