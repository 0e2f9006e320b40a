"""Weights cast once: the bits of plain autocast, with one cast of each stack."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dissensus as ds
import tiny
from dissensus.core.posterior import left_as_found
from dissensus.engine.captured_function import CapturedFunction
from dissensus.engine.casts import ALIGNMENT, Cast, Casts
from dissensus.engine.eager import autocast

CPU = torch.device("cpu")


class Uses(TorchDispatchMode):
    """Counts casts of these tensors, whole or in rows."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        cast = func is torch.ops.aten._to_copy.default
        self.count += cast and args[0].untyped_storage().data_ptr() in self.memory
        return func(*args, **(kwargs or {}))


def conv() -> nn.Module:
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(36, 3)]
    return nn.Sequential(*layers)


MADE = {
    "in a loop": (lambda: ds.DeepEnsemble([conv() for _ in range(3)]), (2, 5, 5)),
    "channels last": (
        lambda: ds.DeepEnsemble([conv().to(memory_format=torch.channels_last) for _ in range(3)]),
        (2, 5, 5),
    ),
    "vectorised": (lambda: ds.DeepEnsemble([tiny.mlp() for _ in range(3)]), (4,)),
    "held": (lambda: ds.MAP(conv()), (2, 5, 5)),
    "one network": (lambda: ds.MCDropout(tiny.mlp(0.5), samples=3), (4,)),
    "apart": (lambda: ds.MCDropout([tiny.mlp(0.5) for _ in range(2)], samples=3), (4,)),
    "sampled": (lambda: ds.GaussianPerturbation(tiny.mlp(), samples=3), (4,)),
    "modulated": (lambda: ds.BatchEnsemble(tiny.mlp(), members=3, modulation=ds.Modulation.sign()), (4,)),
}


@pytest.mark.parametrize("kind", MADE)
def test_results_are_those_of_plain_autocast_and_nothing_is_cast_twice(kind: str) -> None:
    make, shape = MADE[kind]
    posterior, x = make(), torch.randn(6, *shape)
    with left_as_found(posterior):
        drawn = posterior.draw()
    captured = CapturedFunction(drawn.describe, drawn, lanes=False, casts=True)
    tensors = captured._cast_tensors(x)
    with left_as_found(posterior), autocast(CPU, torch.bfloat16):
        with Uses(tensors) as before, Casts(tensors) as casts:
            plain = drawn.describe(x)
        captured.seen_casts |= casts.seen
        with Uses(tensors) as after:
            found = captured._captured(x)
        again = drawn.describe(x)
    assert all(map(torch.equal, found, plain))
    assert all(map(torch.equal, again, plain))
    assert before.count >= len(casts.seen) >= 2
    assert after.count == 0


def test_weights_that_change_between_calls_are_cast_again_and_those_that_change_in_one_as_usual() -> None:
    w = torch.randn(2, 3, 4)
    with Casts([w]) as casts:
        w[1].to(torch.bfloat16)
    assert [*casts.seen] == [Cast(0, torch.bfloat16, rows=True)]
    w.add_(1)
    with Casts([w], casts.seen) as answered:
        assert torch.equal(w[1].to(torch.bfloat16), w.to(torch.bfloat16)[1])
        w.add_(1)
        assert torch.equal(w[1].to(torch.bfloat16), w.to(torch.bfloat16)[1])
        assert torch.equal(w[:, :, 1].to(torch.bfloat16), w[:, :, 1].contiguous().to(torch.bfloat16))  # with holes
    answered.check()


@pytest.mark.parametrize("change", [lambda w: w.mul_(2), lambda w: w[0].zero_()])
def test_a_network_that_changes_a_cast_weight_is_not_answered_from_it(change) -> None:
    w = torch.randn(2, 3)
    with Casts([w], [Cast(0, torch.bfloat16, rows=True)]) as casts:
        casts.check()
        change(w[1].to(torch.bfloat16))
        with pytest.raises(RuntimeError, match="changes a cast weight in place"):
            casts.check()


@pytest.mark.parametrize("shape", [(3, 10), (3, 4, 2, 3, 3), (3, 64, 4)])
def test_answers_lie_in_memory_as_copies_of_their_own_would(shape: tuple[int, ...]) -> None:
    """Strides and alignment decide which algorithm a library takes, and with it the last bit."""
    w = torch.randn(shape).transpose(1, -1)  # a permuted stack, as of weights in channels_last
    casts = [Cast(0, torch.bfloat16, rows=rows) for rows in (True, False)]
    with Casts([w], casts) as answered:
        rows, whole = [row.to(torch.bfloat16) for row in w], w.to(torch.bfloat16)
    assert len(answered._answers) == 4
    assert torch.equal(torch.stack(rows), whole)
    assert torch.equal(whole, w.to(torch.bfloat16))
    assert whole.stride() == w.to(torch.bfloat16).stride()
    first = rows[0].data_ptr()
    for row, source in zip(rows, w, strict=True):
        assert row.stride() == source.to(torch.bfloat16).stride()
        assert (row.data_ptr() - first) % ALIGNMENT == 0
