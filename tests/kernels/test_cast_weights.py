"""Weights cast to half precision all at once: the bits that autocast gives, whatever the network does with its weights."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dissensus as ds
from dissensus.core.batch import Batch
from dissensus.core.gradients import Gradients, looped_gradients, looped_keeping_graphs
from dissensus.kernels import cast_weights
from dissensus.kernels.fused_norm import fuse_layers

GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)


@pytest.fixture(params=["cpu", GPU])
def device(request, monkeypatch) -> str:
    monkeypatch.setattr(cast_weights, "DEVICE", request.param)
    return request.param


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).relu()).relu().mean((2, 3)))


class Tied(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.second(self.first(x)).relu()).mean((2, 3)))


class AlsoPenalised(Plain):
    """Uses a weight in single precision, too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.second.weight.square().sum().rsqrt()


class InSinglePrecision(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            x = self.second(self.first(x)).relu()
        return self.last(x.mean((2, 3)))


class Changed(Plain):
    """Writes to a weight before it uses it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.second.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class OfWeights(Plain):
    """Differentiates by a weight inside the forward."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        (g,) = torch.autograd.grad(out.float().sum(), self.last.weight, create_graph=True)
        return out + g.square().sum()


class Transformed(Plain):
    """Differentiates by its input with a function transform."""

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda inputs: super(Transformed, self).forward(inputs).float().sum())(x)
        return super().forward(x) + slope.square().mean()


class Normed(Plain):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.second)


class Unused(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).mean((2, 3)))


NETWORKS = [Plain, Tied, AlsoPenalised, InSinglePrecision, Changed, OfWeights, Transformed, Normed, Unused]


def found(posterior: ds.Posterior, batch: Batch, *, at_once: bool) -> Gradients:
    kind = batch.x.device.type
    with torch.autocast(kind, dtype=torch.bfloat16, cache_enabled=False), fuse_layers() if at_once else nullcontext():
        return (looped_keeping_graphs if posterior.interaction == "couple" else looped_gradients)(posterior, batch)


METHODS = {
    "one network": lambda network: ds.MAP([network()]),  # not the caller's own, which trains as it is on a CPU
    "ensemble": lambda network: ds.DeepEnsemble([network() for _ in range(2)]),
    "shared weights": lambda network: ds.BatchEnsemble(network(), members=2, modulation=ds.Modulation.sign()),
    "two derivatives": lambda network: ds.LIT([network() for _ in range(2)], strength=0.1),
}
CASES = [(network, method) for network in NETWORKS for method in METHODS]
CASES.remove((Normed, "shared weights"))  # which takes no parametrised layers
CASES.remove((OfWeights, "two derivatives"))  # three in all
CASES.remove((Transformed, "two derivatives"))


@pytest.mark.parametrize(("network", "method"), CASES)
def test_gradients_have_the_bits_of_autocast(network, method: str, device: str, monkeypatch) -> None:
    torch.manual_seed(0)
    posterior = METHODS[method](network).to(device).train()
    batch = Batch(torch.randn(6, 3, 5, 5, device=device), torch.arange(6, device=device) % 4)
    made = []
    monkeypatch.setattr(cast_weights.CastWeights, "__init__", _noting(made, cast_weights.CastWeights.__init__))
    plain = found(posterior, batch, at_once=False)
    assert not made
    ours = found(posterior, batch, at_once=True)
    assert made
    assert ours.gradients.keys() == plain.gradients.keys()
    assert torch.equal(ours.losses, plain.losses)
    for name, gradient in plain.gradients.items():
        assert ours.gradients[name].dtype == gradient.dtype == torch.float32
        assert torch.equal(ours.gradients[name], gradient), name


def _noting(made: list, init):
    def noted(self, *args) -> None:
        made.append(self)
        init(self, *args)

    return noted


def test_in_single_precision_and_outside_of_fused_layers_nothing_is_cast(device: str, monkeypatch) -> None:
    monkeypatch.setattr(cast_weights.CastWeights, "__init__", lambda self, *args: pytest.fail("expected no copies"))
    posterior = ds.DeepEnsemble([Plain() for _ in range(2)]).to(device).train()
    batch = Batch(torch.randn(6, 3, 5, 5, device=device), torch.arange(6, device=device) % 4)
    with fuse_layers():
        looped_gradients(posterior, batch)
    found(posterior, batch, at_once=False)


def test_one_copy_serves_all_uses_and_gradients_come_back_in_half_precision(device: str) -> None:
    weight = torch.randn(4, 5, device=device, requires_grad=True)
    x = torch.randn(3, 5, device=device)
    with torch.autocast(device, dtype=torch.bfloat16), cast_weights.use_cast_weights({"w": weight}, usable=True) as its:
        first, second = cast_weights.cast_weight(weight), cast_weights.cast_weight(weight)
        assert first.data_ptr() == second.data_ptr()
        assert first.dtype == torch.bfloat16
        loss = F.linear(x, first).sum()
        other = cast_weights.cast_weight(torch.randn(4, 5))
        assert other.dtype == torch.float32
    assert cast_weights.cast_weight(weight) is weight
    its.wanted = True
    (g,) = torch.autograd.grad(loss, [weight], allow_unused=True)
    assert g is None
    joined = its.merge_gradients({})
    assert joined["w"].dtype == torch.bfloat16
    torch.testing.assert_close(joined["w"].float(), x.bfloat16().float().sum(0).expand(4, 5), rtol=0.02, atol=0.02)
