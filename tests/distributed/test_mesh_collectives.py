"""What a step exchanges: so many bytes on a mesh, and on one process nothing, without an operation for it."""

import inspect

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from workers import workers

import dissensus as ds
import tiny
from dissensus.core.collectives import ALONE

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
        "average_members", "submit_gradients",
    }  # fmt: skip
