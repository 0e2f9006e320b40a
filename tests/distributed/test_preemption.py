"""Bad days: ranks that hang are named, all leave after the same step, and folders that not all see are refused."""

import logging
import os
import re
import signal
import time
from unittest import mock

import pytest
import torch
from torch import distributed
from torch.distributed.distributed_c10d import _get_default_store
from workers import workers

import dissensus as ds
from dissensus.distributed.init import check_shared_folder
from dissensus.distributed.interruptions import SLACK, STATUS, HangDetector, Interruptions


def hanging(kind):
    """(what was logged, status of the end) of each rank while rank 1 hangs for a while."""
    rank, said = distributed.get_rank(), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("dissensus").addHandler(handler)
    ended = []
    store = distributed.PrefixStore("watch", _get_default_store())
    watch = HangDetector(store, rank, 3, seconds=1.0, progress=lambda: 0)
    with mock.patch.object(os, "_exit", ended.append), watch:
        if rank == 1 and kind == "silent":
            watch.stop_event.set()  # as if its process stood still
        if rank == 1:
            time.sleep(3.0)
        distributed.barrier()
    logging.getLogger("dissensus").removeHandler(handler)
    return said, ended


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words"),
    [("busy", r"does not join the others: rank 1 on .*test_days"), ("silent", "gives no sign of life: rank 1")],
)
def test_a_rank_that_hangs_is_named_by_one_of_the_others(kind, words):
    found = workers().run(3, hanging, kind)
    line = found[0][0][0]  # what is said later, while processes that should have ended go on, does not count
    assert line.startswith("after 1 s of waiting: ")
    assert re.search(words, line), line
    assert [bool(said) for said, _ in found] == [True, False, False]
    assert [set(ended) for _, ended in found] == [{STATUS}, set(), {STATUS}]


def exchanging():
    """Whether anything was said of ranks that exchange all the time and of one that waits less long than the limit."""
    count, ended = 0, []
    store = distributed.PrefixStore("watch", _get_default_store())
    watch = HangDetector(store, distributed.get_rank(), 2, seconds=0.4, progress=lambda: count)
    with mock.patch.object(os, "_exit", ended.append), watch:
        end, going = time.monotonic() + 1.2, torch.ones(())
        while bool(going):
            count += 1
            going.fill_(time.monotonic() < end)
            distributed.all_reduce(going, op=distributed.ReduceOp.MIN)
    return ended


@pytest.mark.slow
def test_ranks_that_go_on_are_left_alone():
    assert workers().run(2, exchanging) == [[], []]


def leaving(at):
    """After which step each rank leaves; rank 1 gets the signal at step `at`."""
    with Interruptions(group=distributed.group.WORLD) as leaves:
        for step in range(100):
            if distributed.get_rank() == 1 and step == at:
                os.kill(os.getpid(), signal.SIGTERM)
            if leaves.should_stop():
                return step
    return None


@pytest.mark.parametrize("at", [0, 5, 1000])
def test_all_ranks_leave_after_the_same_step(at):
    assert workers().run(2, leaving, at) == [None if at == 1000 else at + SLACK] * 2


def seeing(folder, apart):
    try:
        check_shared_folder(folder / (str(distributed.get_rank() // 2) if apart else "same"), seconds=0.2)
    except ValueError as error:
        return str(error)
    return None


def test_a_folder_that_not_all_ranks_see_is_refused_on_all(tmp_path):
    found = workers().run(4, seeing, tmp_path, True)
    for rank, word in enumerate(found):
        assert f"got {tmp_path / str(rank // 2)}, which rank 2 (" in word
        assert ", 3 (" in word
    assert workers().run(4, seeing, tmp_path, False) == [None] * 4
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]


def test_alone_nothing_is_started(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert ds.distributed.start() is False
    assert not distributed.is_initialized()
