"""The mesh: who has which members and rows, what is exchanged, who reports, and that one process changes nothing."""

import contextlib
import inspect
import io
import logging
import pickle
from pathlib import Path

import pytest
import torch
from test_division import METHODS, small
from torch import distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode
from workers import workers

import dissensus as ds
import tiny
from dissensus.bench import torchrun_ranks
from dissensus.core.collectives import ALONE
from dissensus.data import Batches
from dissensus.distributed.mesh import Axis
from refusals import refuses
from thinning import often


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
    refuses(lambda: ds.distributed.mesh(members=2), "expected a mesh of 1 processes, got 2 × 1")


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
    for rank, each in enumerate(workers().run(4, on_a_rank, 2, None)):
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
    refuses(lambda: workers().run(2, failing), r"(?s)rank 1:\nTraceback.*KeyError: 'lost'", RuntimeError)


P = 4 * 5 + 5 + 5 * 3 + 3  # parameters of a member without batch norm
NUMBER, FLAG = 8, 4  # bytes of a float64, and of the flag by which processes agree that all is finite


def network(norm):
    return nn.Sequential(nn.Linear(4, 5), *([nn.BatchNorm1d(5)] if norm else []), nn.Tanh(), nn.Linear(5, 3))


def sent(method, which, norm):
    """Bytes that a step puts into the collectives of the members and of the data axis, by kind."""
    posterior = ds.METHODS[method]([network(norm) for _ in range(3)], **SETTINGS.get(method, {})).double()
    mesh = ds.distributed.mesh(*which)
    counts = []
    for steps in (1, 2, 4):  # the first run also looks at things that are looked at once
        before = [dict(axis.bytes_sent) for axis in (mesh.members, mesh.data)]
        ds.fit(posterior, [tiny.points()] * steps, epochs=1, progress=False, mesh=mesh)
        after = [axis.bytes_sent for axis in (mesh.members, mesh.data)]
        counts.append([{kind: a[kind] - b[kind] for kind in b} for a, b in zip(after, before, strict=True)])
    return [{kind: (more[kind] - less[kind]) / 2 for kind in less} for less, more in zip(*counts[1:], strict=True)]


SETTINGS = {"svgd": {"data_size": 12}, "function_rde": {"data_size": 12}}
NOTHING = {"sum": 0, "gather": 0}
# method, mesh, batch norm -> (along members, along data) on the first rank, which has two of three members or six of 12 rows
BYTES = [
    ("deep_ensemble", (2, 1), False, {"sum": FLAG, "gather": 0}, NOTHING),
    ("deep_ensemble", (1, 2), False, NOTHING, {"sum": NUMBER * 3 * (P + 1), "gather": 0}),
    # of five channels: sums and their count, then squares; the same again in the backward pass
    ("deep_ensemble", (1, 2), True, NOTHING, {"sum": NUMBER * 3 * (P + 10 + 1 + 2 * (6 + 5)), "gather": 0}),
    ("svgd", (2, 1), False, {"sum": FLAG, "gather": NUMBER * 2 * 2 * P}, NOTHING),  # weights and gradients
    ("function_rde", (2, 1), False, {"sum": FLAG, "gather": NUMBER * 2 * 12 * 3}, NOTHING),  # outputs
    ("function_rde", (1, 2), False, NOTHING, {"sum": NUMBER * 3 * (P + 1), "gather": NUMBER * 3 * 6 * 3}),
]


@pytest.mark.parametrize(("method", "which", "norm", "members", "data"), BYTES)
def test_a_step_exchanges_as_many_bytes_as_the_model_says(method, which, norm, members, data):
    assert workers().run(2, sent, method, which, norm)[0] == [members, data]


class Count(TorchDispatchMode):
    """Inside, operations are counted."""

    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        return func(*args, **(kwargs or {}))


def test_on_one_process_nothing_is_exchanged_and_no_operation_dispatched_for_it():
    """What a step asks of an exchange, it is given back as it is; `averaged` is the mean that it was before."""
    value, tree = torch.ones(3), {"a": torch.ones(3)}
    with Count() as count, ALONE.gradient_context(None, None), ALONE.loop_context():
        assert ALONE.batch_rows(5) == (5, slice(0, 5))
        assert ALONE.batch_fraction is None
        assert (
            ALONE.couple_members(lambda z: z, tree)
            is ALONE.mix_gradients(lambda z: z, tree)
            is ALONE.reduce_gradients(None, tree)
            is ALONE.submit_gradients(tree)
            is tree
        )
        assert ALONE.scale_by_fraction(value) is ALONE.total_batch_weight(value) is ALONE.gather_members(value) is value
        assert ALONE.any_process(True) is True
        ALONE.reduce_flag(value)
    assert count.operations == 0
    asked = {name for name, _ in inspect.getmembers(type(ALONE)) if not name.startswith("_")} - {"members", "ranks"}
    assert asked == {
        "gradient_context", "loop_context", "batch_rows", "batch_fraction", "couple_members", "mix_gradients",
        "reduce_gradients", "scale_by_fraction", "total_batch_weight", "gather_members", "any_process", "reduce_flag",
        "average_members", "submit_gradients", "take_rows",
    }  # fmt: skip


NO_GPU = not torch.cuda.is_available()


def run(method, mesh, device):
    torch.manual_seed(0)
    posterior = METHODS[method](small).double()
    x, y = tiny.points()
    loader = ds.data.Batches(x, y, batch_size=7, shuffle=True, seed=3)
    engine = "loop" if posterior.particles.members == 1 else "vectorised"
    torch.manual_seed(1)
    settings = {"engine": engine, "device": device, "validation": (x, y), "progress": False}
    history = ds.fit(posterior, loader, epochs=3, mesh=mesh, **settings)
    state = {name: tensor.cpu() for name, tensor in posterior.state_dict().items() if not name.endswith(".vectors")}
    return state, [epoch.validation for epoch in history.epochs]


def check(method, backend, device, folder):
    wanted, scores = run(method, None, device)
    distributed.init_process_group(backend, init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    try:
        mesh = ds.distributed.mesh(members=1, data=1)
        found, validation = run(method, mesh, device)
    finally:
        distributed.destroy_process_group()
    assert mesh.data.bytes_sent["sum"] > 0
    assert validation == pytest.approx(scores, abs=1e-10)
    for name, tensor in wanted.items():
        told = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-10, msg=told)


SOME = ["map", "deep_ensemble", "multi_mc_dropout", "function_rde", "svgd", "batch_ensemble", "multi_swag", "node_bnn"]
# A GPU's fused dropout numbers entries as they lie in memory, and activations lie otherwise on a mesh: docs/distributed.md.
NCCL = [method for method in SOME if method != "multi_mc_dropout"]


@pytest.mark.parametrize("method", often(SOME[1::2], SOME[::2]))
def test_a_mesh_of_one_process_is_that_process(method, tmp_path):
    check(method, "gloo", "cpu", tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU, reason="needs a CUDA device, and there is none here")
@pytest.mark.parametrize("method", [*NCCL, "feature_rde", "forde", "tradi", "mean_field_vi", "multi_sghmc"])
def test_a_mesh_of_one_process_is_that_process_with_nccl(method, tmp_path):
    check(method, "nccl", "cuda", tmp_path)


def done_by_all(folder, together):
    """(what was printed, what was logged, whether files came of it, what report says it wrote) in this process."""
    torch.manual_seed(0)
    rank, folder = distributed.get_rank(), Path(folder)
    posterior = ds.DeepEnsemble([nn.Linear(2, 3) for _ in range(2)])
    data = Batches(torch.randn(24, 2), torch.arange(24) % 3, batch_size=8)
    heard, printed = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(heard)
    logging.getLogger("dissensus").addHandler(handler)
    mine = folder / ("all" if together else str(rank))
    mesh = ds.distributed.mesh(data=2) if together else None
    with contextlib.redirect_stderr(printed):
        ds.fit(posterior, data, epochs=1, mesh=mesh or "independent")
        evaluation = ds.evaluate(posterior, data)
        logging.getLogger("dissensus").warning("mind this")
        # A rank's own folder, so that a file that it must not write would be seen.
        ds.save(posterior, mine / f"saved{rank}")
        files = ds.report({"ensemble": evaluation}, mine / f"page{rank}.csv")
    logging.getLogger("dissensus").removeHandler(handler)
    there = sorted(path.name for path in mine.iterdir()) if mine.is_dir() else []
    sent = pickle.loads(pickle.dumps(posterior))
    return "epoch 1/1" in printed.getvalue(), "mind this" in heard.getvalue(), there, len(files), sent.mesh


def test_the_first_process_of_a_mesh_speaks_for_all(tmp_path):
    first, second = workers().run(2, done_by_all, str(tmp_path), True)
    assert first[:2] == (True, True)
    assert second[:2] == (False, False)
    assert not {"saved1", "page1.csv"} & {*first[2], *second[2]}
    assert {path.name for path in (tmp_path / "all").iterdir()} == {"saved0", "page0.csv"}
    assert first[3:] == second[3:] == (1, None)


def test_independent_processes_speak_for_themselves(tmp_path):
    found = workers().run(2, done_by_all, str(tmp_path), False)
    for rank, (showed, logged, there, _, kept) in enumerate(found):
        assert showed
        assert logged
        assert there == [f"page{rank}.csv", f"saved{rank}"]
        assert kept == "independent"  # also in a copy that was sent


def of_a_bench(trainings):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), torchrun_ranks.print_on_first_rank():
        print("a table")
        logging.getLogger("dissensus").warning("a remark")
    torchrun_ranks.wait()
    return (
        torchrun_ranks.rank(), list(torchrun_ranks.groups_of_this_rank(trainings)),
        torchrun_ranks.is_training_shared(len(trainings)), out.getvalue(),
    )  # fmt: skip


@pytest.mark.parametrize(("trainings", "dealt", "shared"), [("abc", ["ac", "b"], False), ("a", ["a", ""], True)])
def test_a_bench_deals_out_trainings_or_shares_each(trainings, dealt, shared):
    found = workers().run(2, of_a_bench, list(trainings))
    assert [each[0] for each in found] == [0, 1]
    assert ["".join(each[1]) for each in found] == dealt
    assert {each[2] for each in found} == {shared}
    assert [each[3] for each in found] == ["a table\n", ""]


def test_a_bench_on_one_process_waits_for_nobody():
    assert (torchrun_ranks.rank(), torchrun_ranks.size(), torchrun_ranks.mesh()) == (0, 1, None)
    assert torchrun_ranks.groups_of_this_rank([1, 2]) == [1, 2]
    assert not torchrun_ranks.is_training_shared(0)
    torchrun_ranks.exit_other_ranks()
    torchrun_ranks.connect()
    assert not distributed.is_initialized()
