"""Results of members on several streams: in place, complete, and looked at on the way."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import dissensus as ds
import tiny
from dissensus.core.batch import Batch
from dissensus.core.divergence import amax
from dissensus.core.gradients import Gradients, compute_gradients, looped_gradients, looped_keeping_graphs
from dissensus.engine.training_step import EagerStep

LANES = (lambda index: nullcontext(), lambda: None)  # two functions of their own, as with streams


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


def batch(size: int = 6) -> Batch:
    return Batch(torch.randn(size, 1, 3, 3), torch.randint(3, (size,)))


def same(a: Gradients, b: Gradients) -> bool:
    pairs = [(a.losses, b.losses)]
    for mine, other in ((a.gradients, b.gradients), (a.buffers, b.buffers)):
        assert list(mine) == list(other)
        pairs += [(mine[name], other[name]) for name in mine]
    return all(torch.equal(*pair) and pair[0].stride() == pair[1].stride() for pair in pairs)


@pytest.mark.parametrize(
    ("method", "run"),
    [
        (ds.DeepEnsemble, looped_gradients),
        (ds.FoRDE, looped_gradients),
        (ds.FoRDE, looped_keeping_graphs),
        (partial(ds.FunctionRDE, data_size=20), looped_keeping_graphs),
    ],
)
def test_results_in_lanes_are_those_one_after_the_other(method, run) -> None:
    posterior, given = method([conv() for _ in range(3)]).train(), batch()
    expected, found = run(posterior, given), run(posterior, given, lanes=LANES)
    assert same(found, expected)
    assert expected.largest is None
    own = posterior.particles.own_parameters()
    sizes = [each.abs().flatten(1).amax(1) for name, each in found.gradients.items() if name in own]
    assert torch.equal(found.largest, torch.stack(sizes).amax(0))


class Partly(nn.Module):
    """Uses one of its layers only if its number is 1, and changes the shape of a buffer."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(2, 3), nn.Linear(2, 3)
        self.register_buffer("number", torch.tensor(float(number)))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = torch.cat([self.seen, x[:1, 0].detach()])
        return self.layer(x) + (self.other(x) if self.number == 1 else 0)


def test_missing_gradients_and_buffers_of_other_shapes_are_joined() -> None:
    posterior = ds.DeepEnsemble([Partly(number) for number in range(3)]).train()
    given = Batch(torch.randn(5, 2), torch.randint(3, (5,)))
    expected, found = looped_gradients(posterior, given), looped_gradients(posterior, given, lanes=LANES)
    assert same(found, expected)
    assert found.buffers["network.seen"].shape == (3, 2)
    assert not found.gradients["network.other.weight"][[0, 2]].any()


class Steep(nn.Module):
    """Its loss is finite, and so is its gradient, unless it is marked: the root of 0 has none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 3), nn.BatchNorm1d(3)
        self.register_buffer("mark", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.layer(x))
        return out + (0 * self.layer.weight).sqrt().sum() if self.mark else out


@pytest.mark.parametrize("bad", [0, 2])
def test_a_member_whose_gradient_is_not_finite_is_named_and_nothing_changes(bad: int) -> None:
    posterior = ds.DeepEnsemble([Steep() for _ in range(3)]).train()
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1)
    step = EagerStep(posterior, optimizer, strategy=partial(looped_gradients, lanes=LANES))
    given = Batch(torch.randn(5, 2), torch.randint(3, (5,)))
    step(given)
    posterior.particles.own_buffers()["network.mark"][bad] = 1.0
    before = {name: each.clone() for name, each in posterior.state_dict().items()}
    with pytest.raises(ds.Diverged, match="gradient") as error:
        step(given)
    assert error.value.members == [bad]
    assert all(torch.equal(each, before[name]) for name, each in posterior.state_dict().items())


def test_gradients_that_are_mixed_are_looked_at_again() -> None:
    posterior = ds.SVGD([tiny.mlp().float() for _ in range(3)], data_size=10).train()
    given = Batch(torch.randn(5, 4), torch.randint(3, (5,)))
    assert compute_gradients(posterior, given, partial(looped_gradients, lanes=LANES)).largest is None


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_the_largest_value_is_not_finite_if_one_number_is_not(bad: str, dtype: torch.dtype, device: str) -> None:
    tensors = [torch.zeros(3, dtype=dtype, device=device), torch.zeros(70_001, dtype=dtype, device=device)]
    assert amax(tensors, tensors[0].device) == 0
    tensors[1][-1] = float(bad)
    assert not amax(tensors, tensors[0].device).isfinite()
    assert amax([], torch.device(device)) == 0
