"""Checkpoints of several processes, which any number of them resumes, and ranks that hang or see other folders."""

import logging
import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import distributed
from torch.distributed.distributed_c10d import _get_default_store
from torch.optim import Adam
from workers import said, workers

import dissensus as ds
import tiny
from dissensus.distributed.init import check_shared_folder
from dissensus.distributed.interruptions import SLACK, STATUS, HangDetector, Interruptions
from dissensus.distributed.partition import MeshTrainingPartition, TrainingPartition
from dissensus.engine.loader import Loader
from dissensus.training.checkpoint import newest_checkpoint, read_distributed, write_distributed
from dissensus.utils.process_group import run_collective
from dissensus.utils.torch_private import set_group_timeout
from thinning import often

HERE = Path(__file__).parent


def state_of(mesh, members):
    """A state of M members: (what this rank knows, ids of tensors with a row for each member that lies here)."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(members, 3, 2, dtype=torch.float64, generator=generator)
    moment = torch.randn(members, 3, 2, generator=generator)[mesh.member_slice(members)].clone()
    shared, count = torch.randn(4, generator=generator).bfloat16(), torch.tensor(7)
    optimizer = {"state": {0: {"step": count, "exp_avg": moment}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    state = {
        "posterior": {"own.weight": weight, "shared.bias": shared},
        "optimizer": optimizer,
        "best": {"state": {"own.weight": weight + 1}, "score": 0.5},
        "random": torch.get_rng_state(),
        "history": [{"loss": 1.5}],
    }
    return state, {id(moment)}


def partition_of(mesh, members):
    with torch.random.fork_rng():  # the random state is a part of what is compared
        posterior = ds.DeepEnsemble(tiny.mlp, members=members)
    return (
        MeshTrainingPartition(posterior, Loader(()), mesh)
        if mesh.size > 1
        else TrainingPartition(posterior, Loader(()))
    )


def write(path, members, shape=(None, None)):
    mesh = ds.distributed.mesh(*shape)
    state, own = state_of(mesh, members)
    write_distributed(path, state, partition_of(mesh, members), own)


def read(path, members, shape=(None, None), rewrite=False):
    """Whether the state is this rank's part of what was written."""
    mesh = ds.distributed.mesh(*shape)
    together = partition_of(mesh, members)
    found, (expected, _) = read_distributed(path, together, torch.device("cpu")), state_of(mesh, members)
    if rewrite:
        write_distributed(path, found, together, {id(found["optimizer"]["state"][0]["exp_avg"])})
    return tiny.same(expected, found)


def test_four_ranks_then_two_then_one_then_four(tmp_path):
    """Five members: ranks have two, or one, or none that another rank has."""
    path = tmp_path / "run.ckpt"
    workers().run(4, write, path, 5, (2, 2))
    assert all(workers().run(2, read, path, 5, (2, 1), True))
    assert read(path, 5, rewrite=True)  # here, without a group
    assert all(workers().run(4, read, path, 5, (4, 1)))
    assert [each.name for each in path.iterdir()] == ["00000002"]


def test_what_killed_processes_left_is_not_read_and_goes_with_the_next_write(tmp_path):
    path = tmp_path / "run.ckpt"
    write(path, 3)
    (path / ".00000001").mkdir()
    (path / ".00000001" / "run.pt").write_bytes(b"half")
    (path / "00000004").mkdir()  # being removed
    (path / "notes.txt").write_text("somebody else's")
    assert newest_checkpoint(path).name == "00000000"
    write(path, 3)
    assert {each.name for each in path.iterdir()} == {"00000001", "notes.txt"}


# ---------------------------------------------------------------------------------------------------- runs

BUILD = {
    "deep_ensemble": lambda: ds.DeepEnsemble([tiny.mlp().double() for _ in range(4)]),
    "sghmc": lambda: ds.SGHMC([tiny.mlp().double() for _ in range(4)], members=4, data_size=1200),
    "batch_ensemble": lambda: ds.BatchEnsemble(tiny.mlp().double(), members=4, modulation=ds.Modulation.sign()),
}


def fit(name, path, epochs, shape=(None, None)):
    """Everything that the run has after so many epochs: state, optimiser's state of all members, losses, random state."""
    torch.manual_seed(2)
    mesh, posterior = ds.distributed.mesh(*shape), BUILD[name]()
    optimizer = posterior.default_optimizer() if name == "sghmc" else Adam(posterior.parameters(), lr=0.01)
    x, y = tiny.points(24)
    settings = {"optimizer": optimizer, "checkpoint": path, "checkpoint_seconds": 1e6, "progress": False, "draw": False}
    loader = ds.data.Batches(x, y, batch_size=8, shuffle=True, seed=1)
    history = ds.fit(posterior, loader, epochs=epochs, validation=[(x, y)], mesh=mesh, **settings)
    moments = [
        mesh.members.gather(value, 4) if value.ndim and len(value) == len(range(4)[mesh.member_slice(4)]) else value
        for state in optimizer.state.values()
        for value in state.values()
    ]
    losses = [epoch.loss for epoch in history.epochs]
    return tiny.state(posterior), moments, losses, torch.get_rng_state()


@pytest.mark.parametrize("name", often(["deep_ensemble"], ["sghmc", "batch_ensemble"]))
def test_a_run_of_four_ranks_goes_on_with_two_and_with_one(name, tmp_path):
    path = tmp_path / "run.ckpt"
    four = workers().run(4, fit, name, path, 1, (2, 2))
    for found in workers().run(2, fit, name, path, 1, (2, 1)):  # resumed and not trained
        assert tiny.same(found, four[0])
    assert tiny.same(fit(name, path, 2), workers().run(2, fit, name, path, 2, (1, 2))[0])
    found = fit(name, path, 4)  # on to the end by one
    # Alone, broken off at the same epochs: chains plan their snapshots anew for every length of a run.
    *_, expected = (fit(name, tmp_path / "alone.pt", epochs) for epochs in (1, 2, 4))
    assert len(list(path.iterdir())) == 1
    assert tiny.largest_difference(expected[0], found[0]) < 1e-8
    assert found[2] == pytest.approx(expected[2], abs=1e-8)
    assert torch.equal(found[3], expected[3])


def test_a_file_of_one_process_is_resumed_by_several_and_stays_a_file(tmp_path):
    path = tmp_path / "run.pt"
    alone = fit("deep_ensemble", path, 1)
    assert tiny.same(workers().run(2, fit, "deep_ensemble", path, 1, (2, 1))[0], alone)
    two = workers().run(2, fit, "deep_ensemble", path, 2, (2, 1))
    assert path.is_file()
    assert tiny.same(fit("deep_ensemble", path, 2), two[0])


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    for word in workers().run(2, said, fit, "deep_ensemble", tmp_path, 1):
        assert word.startswith("IsADirectoryError: expected a folder of checkpoints, got")


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
    [("busy", r"does not join the others: rank 1 on .*test_ranks"), ("silent", "gives no sign of life: rank 1")],
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


def absent(kind, shape, away):
    """What a rank says of those in `away`, which do not come to the exchange."""
    mesh, rank = ds.distributed.mesh(*shape), distributed.get_rank()
    posterior, (x, y) = BUILD["deep_ensemble"](), tiny.points(24)
    if kind == "save":  # whose parts lie in different ranks
        posterior = ds.MAP(ds.distributed.shard(tiny.mlp(), mesh))
    posterior.mesh = mesh
    for group in {distributed.group.WORLD, mesh.members.group, mesh.data.group} - {None}:
        set_group_timeout(group, timedelta(seconds=0.5))
    if rank in away:
        time.sleep(1.6)
        return None

    def closed(group):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:43429")  # gloo, of a process that has ended

    calls = {"fit": lambda: ds.fit(posterior, (x, y), epochs=1, progress=False), "sum": lambda: mesh.data.sum(x[0])}
    calls |= {"evaluate": lambda: ds.evaluate(posterior, (x, y)), "closed": lambda: run_collective(closed)}
    calls["save"] = lambda: ds.save(posterior, "nowhere")
    return said(calls[kind])


@pytest.mark.parametrize(
    ("kind", "shape", "away"),
    [
        ("evaluate", (2, 1), [1]), ("closed", (1, 2), [1]), ("sum", (1, 3), [0, 2]), ("fit", (2, 1), [0]),
        pytest.param("evaluate", (2, 2), [3], marks=pytest.mark.slow),
        pytest.param("save", (1, 2), [1], marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_rank_that_waits_names_those_that_are_missing(kind, shape, away):
    begun = time.monotonic()
    found = workers().run(shape[0] * shape[1], absent, kind, shape, away)
    assert time.monotonic() - begun < 60  # torch's own limits are 300 s and more
    # The first rank that gives up closes its connections: others that wait hear that before their own limit.
    got = "a closed connection" if kind == "closed" else "(no answer in 0.5 s|a closed connection)"
    words = f"got {got} from rank {', '.join(map(str, away))}; call .* on every rank, never inside `if mesh.is_first:`"
    for rank, word in enumerate(found):
        assert word is None if rank in away else re.search(f"^MissingRankError: expected .*{words}", word), word


def test_every_collective_goes_through_the_function_that_names_missing_ranks():
    direct = re.compile(r"distributed\.(all_\w+|broadcast\w*|barrier|gather\w*|scatter\w*|reduce\w*|send|recv)\(")
    for path in (HERE.parents[1] / "src").rglob("*.py"):
        assert not [line for line in path.read_text().splitlines() if direct.search(line)], path


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
    for rank, word in enumerate(workers().run(4, seeing, tmp_path, True)):
        assert f"got {tmp_path / str(rank // 2)}, which rank 2 (" in word
        assert ", 3 (" in word
    assert workers().run(4, seeing, tmp_path, False) == [None] * 4
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]


def test_alone_nothing_is_started(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert ds.distributed.start() is False
    assert not distributed.is_initialized()
