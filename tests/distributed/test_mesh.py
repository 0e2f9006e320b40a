"""The mesh: who has which members and rows, and what is exchanged."""

import pytest
import torch
from workers import workers

import dissensus as ds
from dissensus.distributed.mesh import Axis


@pytest.mark.parametrize(("count", "size"), [(7, 3), (2, 4), (8, 2), (0, 2), (5, 1)])
def test_parts_put_together_are_the_whole(count, size):
    axes = [Axis(rank, size) for rank in range(size)]
    whole = list(range(count))
    assert [i for axis in axes for i in whole[axis.part_slice(count)]] == whole
    sizes = axes[0].sizes(count)
    assert sizes == [len(whole[axis.part_slice(count)]) for axis in axes]
    assert max(sizes) - min(sizes) <= 1


def test_one_process_has_everything_and_exchanges_nothing():
    mesh = ds.distributed.mesh()
    assert (mesh.size, mesh.rank, mesh.is_first, mesh.device_mesh) == (1, 0, True, None)
    assert repr(mesh) == "Mesh(rank 0 of 1: part 1 of 1 of the members, part 1 of 1 of the rows)"
    assert mesh.member_slice(5) == slice(0, 5)
    assert mesh.row_slice(7) == slice(0, 7)
    x = torch.arange(3.0)
    assert mesh.data.sum(x) is x
    assert mesh.members.gather(x, 3) is x
    assert mesh.gather_objects("here") == ["here"]
    with pytest.raises(ValueError, match="expected a mesh of 1 processes, got 2 × 1"):
        ds.distributed.mesh(members=2)


def on_a_rank(members, data):
    mesh = ds.distributed.mesh(members, data)
    axes = mesh.members, mesh.data
    mine = torch.arange(5.0)[mesh.member_slice(5)]
    return {
        "rank": mesh.rank,
        "at": [axis.rank for axis in axes],
        "gathered": mesh.members.gather(torch.stack([mine, -mine]), 5, axis=1),
        "sum": mesh.data.sum(torch.tensor([float(mesh.rank)])),
        "largest": mesh.members.maximum(torch.tensor([float(mesh.rank)])),
        "objects": mesh.gather_objects(mesh.rank),
        "sent": mesh.data.bytes_sent,
    }


def test_four_processes_lie_in_a_grid():
    found = workers().run(4, on_a_rank, 2, None)
    for rank, each in enumerate(found):
        assert each["rank"] == rank
        assert each["at"] == [rank // 2, rank % 2]
        assert torch.equal(each["gathered"], torch.stack([torch.arange(5.0), -torch.arange(5.0)]))
        assert float(each["sum"]) == [1, 1, 5, 5][rank]  # 0 + 1, 2 + 3
        assert float(each["largest"]) == 2 + rank % 2
        assert each["objects"] == [0, 1, 2, 3]
        assert each["sent"] == {"sum": 4, "gather": 0}


def failing():
    if ds.distributed.mesh().rank == 1:
        raise KeyError("lost")


def test_a_failing_rank_is_named_with_its_traceback():
    with pytest.raises(RuntimeError, match=r"(?s)rank 1:\nTraceback.*KeyError: 'lost'"):
        workers().run(2, failing)
