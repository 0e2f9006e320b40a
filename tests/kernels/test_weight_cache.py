"""What is computed from weights alone is kept while they stay the same, with the bits that it has without."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dissensus as ds
import tiny
from dissensus.core.posterior import inference_context
from dissensus.engine.training_step import autocast
from dissensus.kernels import weight_cache as module
from dissensus.kernels.weight_cache import WeightCache, compute_cached, use_weight_cache

CPU, HALF = torch.device("cpu"), torch.bfloat16


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST", 1)


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
def test_casts_are_those_of_plain_autocast_and_none_is_made_twice(kind: str) -> None:
    make, shape = MADE[kind]
    posterior = make()
    with inference_context(posterior):
        drawn = posterior.draw()
    weights = [*drawn.parameters(), *drawn.buffers()]
    kept, counts = WeightCache(weights), []
    for _ in range(3):
        x = torch.randn(6, *shape)
        with inference_context(posterior), autocast(CPU, HALF):
            with Uses(weights) as plainly:
                expected = drawn.describe(x)
            with Uses(weights) as uses, use_weight_cache(kept, casts=True):
                found = drawn.describe(x)
        assert all(map(torch.equal, found, expected))
        counts.append(uses.count)
    assert counts == [len(kept._found), 0, 0]
    assert plainly.count >= len(kept._found) >= 2
    assert kept.has_casts
    assert kept.is_fresh()


def test_only_weights_are_kept_and_only_while_they_stay_the_same() -> None:
    w, other, made = torch.randn(2, 3, 4), torch.randn(3, 4), []

    def doubled(tensor: Tensor, what: str = "doubled") -> Tensor:
        def make(tensor: Tensor, _: None) -> Tensor:
            made.append(what)
            return 2 * tensor

        return compute_cached(what, (tensor, None), make)

    kept = WeightCache([w])
    for _ in range(2):
        doubled(w[1])
    assert len(made) == 2  # outside of the context
    with use_weight_cache(kept, casts=False):
        assert doubled(w[1]) is doubled(w[1])
        assert torch.equal(doubled(w[1].T), 2 * w[1].T)
        assert torch.equal(doubled(w[0]), 2 * w[0])
        doubled(w[1], "otherwise")
        assert len(made) == 6
        for _ in range(2):
            doubled(other)  # memory of a tensor that comes and goes may be another tensor's later
        assert len(made) == 8
    assert kept.is_fresh()
    w.add_(1)
    assert not kept.is_fresh()
    kept = WeightCache([w])
    with use_weight_cache(kept, casts=False):
        assert torch.equal(doubled(w[1]), 2 * w[1])


def test_a_network_that_writes_to_a_cast_weight_gets_another_the_next_time() -> None:
    w = torch.randn(3, 4)
    kept = WeightCache([w])
    with use_weight_cache(kept, casts=True):
        for _ in range(3):
            mine = w.to(HALF)
            assert torch.equal(mine, w.clone().to(HALF))
            mine.mul_(2)
    assert not kept.is_fresh()


def test_what_follows_row_by_row_is_computed_once_for_all_members() -> None:
    w, scale, common = torch.randn(3, 4, 2, 2), torch.randn(3, 4), torch.randn(4)
    last = torch.randn(3, 4, 2, 5).movedim(-1, -2)  # the memory of rows need not be in order
    made: list[torch.Size] = []

    def scaled(w: Tensor, bias: None, scale: Tensor) -> tuple[Tensor, Tensor]:
        made.append(w.shape)
        return w * scale[:, None, None], 2 * scale

    def found(*given: Tensor | None) -> tuple[Tensor, Tensor]:
        return compute_cached("scaled", given, scaled, by_rows=True)

    kept = WeightCache([w, scale, common, last])
    with use_weight_cache(kept, casts=False):
        for _ in range(2):
            for i in (1, 0, 2):
                product, doubled = found(w[i], None, scale[i])
                assert torch.equal(product, w[i] * scale[i][:, None, None])
                assert torch.equal(doubled, 2 * scale[i])
        assert made == [(12, 2, 2)]
        for i in range(3):
            assert torch.equal(found(last[i], None, scale[i])[0], last[i] * scale[i][:, None, None])
        assert made[1:] == [(12, 5, 2)]
        # Not the same rows of all: a tensor for itself, another member's, a transposed one.
        found(w[1], None, common)
        found(w[1], None, scale[0])
        found(w[1].transpose(1, 2), None, scale[1])
        assert made[2:] == [(4, 2, 2)] * 3
    assert kept.is_fresh()
    kept._made[0][0].add_(1)  # by a network that writes to what it gets
    assert not kept.is_fresh()
    with use_weight_cache(kept, casts=False):
        assert torch.equal(found(w[2], None, scale[2])[0], w[2] * scale[2][:, None, None])


def test_rows_of_one_number_are_packed_where_their_stacks_are_not() -> None:
    flat, read = torch.randn(3, 7), []

    def doubled(row: Tensor) -> tuple[Tensor]:
        read.append(row.is_contiguous())  # as kernels read it
        return (2 * row,)

    cut = flat[:, 2:3]
    with use_weight_cache(WeightCache([cut]), casts=False):
        for i in range(3):
            assert torch.equal(compute_cached("doubled", (cut[i],), doubled, by_rows=True)[0], 2 * cut[i])
    assert read == [True]
