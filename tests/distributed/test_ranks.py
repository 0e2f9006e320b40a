"""Checkpoints of several processes: any number of them resumes what another number wrote, bit for bit."""

import torch
from workers import workers

import dissensus as ds
from dissensus.training.ranks import newest, read_ranks, write_ranks


def state_of(mesh, members):
    """A state of M members: (what every rank knows, ids of own tensors)."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(members, 3, 2, dtype=torch.float64, generator=generator)[mesh.rows(members)].clone()
    moment = torch.randn(members, 3, 2, generator=generator)[mesh.rows(members)].clone()
    shared, count = torch.randn(4, generator=generator).bfloat16(), torch.tensor(7)
    optimizer = {"state": {0: {"step": count, "exp_avg": moment}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    state = {
        "posterior": {"own.weight": weight, "shared.bias": shared},
        "optimizer": optimizer,
        "best": {"state": {"own.weight": weight + 1}, "score": 0.5},
        "random": torch.get_rng_state(),
        "history": [{"loss": 1.5}],
    }
    return state, {id(weight), id(moment), id(state["best"]["state"]["own.weight"])}


def write(path, members, shape=(None, None)):
    mesh = ds.distributed.mesh(*shape)
    state, own = state_of(mesh, members)
    write_ranks(path, state, mesh, members, own)
    return mesh.rank


def read(path, members, shape=(None, None), rewrite=False):
    """Whether the state is this rank's part of what was written."""
    mesh = ds.distributed.mesh(*shape)
    found, (expected, own) = read_ranks(path, mesh, torch.device("cpu")), state_of(mesh, members)
    if rewrite:
        own = {id(found["posterior"]["own.weight"]), id(found["optimizer"]["state"][0]["exp_avg"])}
        own.add(id(found["best"]["state"]["own.weight"]))
        write_ranks(path, found, mesh, members, own)
    return same(expected, found)


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b


def test_four_ranks_then_two_then_one_then_four(tmp_path):
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
    assert newest(path).name == "00000000"
    write(path, 3)
    assert {each.name for each in path.iterdir()} == {"00000001", "notes.txt"}
