"""Batch norm fused with what follows: values, statistics, first and second derivatives of torch's layers.

The kernels run here in Triton's interpreter, if it is installed, and compiled on a GPU; how layers wait for each other is also
tried with kernels written in plain torch.
"""

import copy
import os
import subprocess
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dissensus as ds
import dissensus.numerics
import tiny
from dissensus.core.batch import Batch
from dissensus.core.gradients import looped_keeping_graphs
from dissensus.kernels import double_backward, fused_norm
from refusals import refuses

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)


def statistics(x, running_mean, running_var, momentum, eps):
    over = [0, *range(2, x.ndim)]
    mean, var = x.mean(over), x.var(over, correction=0)
    if running_mean is not None:
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(x.var(over), momentum)
    return mean, (var + eps).rsqrt()


def channels(c: Tensor, x: Tensor) -> Tensor:
    return c.view(-1, *[1] * (x.ndim - 2))


def normalise_rows(x, added, mean, spread, weight, bias, *, relu, eps=None):
    rstd = spread if eps is None else (spread + eps).rsqrt()
    y = (x - channels(mean, x)) * channels(weight * rstd, x) + channels(bias, x)
    y = y if added is None else y + added
    return y.relu() if relu else y


def pull(t, x, weight, eps):
    """J t as a function whose derivatives autograd knows."""
    over = [0, *range(2, x.ndim)]
    mean = x.mean(over, keepdim=True)
    rstd = ((x - mean).square().mean(over, keepdim=True) + eps).rsqrt()
    unit = (x - mean) * rstd
    return channels(weight, x) * rstd * (t - t.mean(over, keepdim=True) - unit * (unit * t).mean(over, keepdim=True))


def passing(g, x, y, mean, rstd, weight, bias, relu):
    z = normalise_rows(x, None, mean, rstd, weight, bias, relu=False) if y is None else y
    return (z > 0).to(g.dtype) if relu else torch.ones_like(g)


def eps_of(x, rstd):
    return (rstd**-2 - x.var([0, *range(2, x.ndim)], correction=0)).mean()


def gradients(g, x, y, mean, rstd, weight, bias, *, relu):
    t = g * passing(g, x, y, mean, rstd, weight, bias, relu)
    over = [0, *range(2, x.ndim)]
    unit = (x - channels(mean, x)) * channels(rstd, x)
    sums = torch.stack([(unit * t).sum(over), t.sum(over)])
    return pull(t, x, weight, eps_of(x, rstd)), (g if y is None else t), sums


def input_gradient(g, x, y, mean, rstd, weight, bias, sums, *, relu):
    return gradients(g, x, y, mean, rstd, weight, bias, relu=relu)[0]


def second_gradients(u, v, g, x, y, mean, rstd, weight, bias, sums, *, relu):
    mask = passing(g, x, y, mean, rstd, weight, bias, relu)
    with torch.enable_grad():
        at = [each.detach().requires_grad_() for each in (g, x, weight)]
        total = (u * pull(at[0] * mask, at[1], at[2], eps_of(x, rstd))).sum()
        total = total if v is None else total + (v * at[0] * mask).sum()
    return torch.autograd.grad(total, at)


PLAIN = (statistics, normalise_rows, gradients, input_gradient, second_gradients)


@pytest.fixture(params=["cpu", GPU])
def device(request, monkeypatch):
    monkeypatch.setattr(fused_norm, "LEAST", 0)
    monkeypatch.setattr(double_backward, "SMALL", 0)
    if request.param == "cpu":
        monkeypatch.setattr(fused_norm, "DEVICE", "cpu")
        monkeypatch.setattr(fused_norm, "can_run_kernels", lambda device: True)
        if not INTERPRETED:
            plain = types.SimpleNamespace(**{each.__name__: each for each in PLAIN})
            monkeypatch.setitem(sys.modules, "dissensus.kernels.norm_launch", plain)
            monkeypatch.setattr(dissensus.kernels, "norm_launch", plain, raising=False)
    # cuDNN keeps channels side by side in memory only in single precision.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return torch.device(request.param)


def precision(device: torch.device) -> torch.dtype:
    return torch.float64 if device.type == "cpu" else torch.float32


def images(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(6, 5, 4, 3, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last)


def near(found: list[Tensor], plain: list[Tensor], exact: list[Tensor]) -> bool:
    """Whether results are as close to those in double precision as torch's own layers are."""
    return all(
        (one.double().cpu() - right).abs().max()
        <= 10 * (other.double().cpu() - right).abs().max()
        + (1e-10 if one.dtype == torch.float64 else 1e-5) * (1 + right.abs().max())
        for one, other, right in zip(found, plain, exact, strict=True)
    )


class Block(nn.Module):
    """A convolution, batch norm, and what `then` makes of its result and of the block's input."""

    def __init__(self, then, channels: int = 5) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.norm(self.conv(x)), x)


def relu_of_a_kept_one(z: Tensor, x: Tensor) -> Tensor:
    return F.relu(z) + 0.5 * z


def changed_in_place(z: Tensor, x: Tensor) -> Tensor:
    before = z
    F.relu(z, inplace=True)
    return before * 2 + z


def added_in_place(z: Tensor, x: Tensor) -> Tensor:
    before = z
    z += x
    return F.relu(before)


def measured(z: Tensor, x: Tensor) -> Tensor:
    assert z.shape == x.shape
    assert (z.dtype, z.ndim, z.size(1), len(z)) == (x.dtype, 4, x.size(1), len(x))
    return torch.cat([z[:, :2], F.gelu(z[:, 2:])], 1)


THEN = {
    "relu": lambda z, x: F.relu(z), "nothing": lambda z, x: z, "sum and relu": lambda z, x: torch.relu(z + x),
    "sum the other way": lambda z, x: (x + z).relu(), "sum": lambda z, x: z + x,
    "sum with a number": lambda z, x: F.relu(z + 1.0), "sum with a broadcast": lambda z, x: F.relu(z + x[:1]),
    "two sums": lambda z, x: F.relu(z + x + x), "relu of a kept one": relu_of_a_kept_one,
    "changed in place": changed_in_place, "added in place": added_in_place, "read and cut": measured,
}  # fmt: skip


def network(then, dtype: torch.dtype, device: torch.device) -> nn.Module:
    layers = [Block(then), Block(then), Block(THEN["relu"]), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3)]
    made = nn.Sequential(*layers, nn.BatchNorm1d(3)).to(device, dtype, memory_format=torch.channels_last)
    for part in made.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_var.uniform_(0.5, 2)
    return made


def results(made: nn.Module, x: Tensor, v: Tensor) -> list[Tensor]:
    """Outputs, input gradients, gradients of both by the weights, and buffers."""
    x = x.clone().requires_grad_()
    out = made(x)
    (g,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    by = torch.autograd.grad(out.tanh().sum() + (g * v).sum(), list(made.parameters()), allow_unused=True)
    return [out.detach(), g.detach(), *(each for each in by if each is not None), *made.buffers()]


@pytest.mark.parametrize("then", THEN)
def test_values_and_two_derivatives_are_those_of_torch(then: str, device: torch.device) -> None:
    torch.manual_seed(0)
    plain = network(THEN[then], precision(device), device)
    x = images(device, precision(device))
    v, fast, slow = torch.randn_like(x), copy.deepcopy(plain), copy.deepcopy(plain).double().cpu()
    with fused_norm.fuse_layers():
        found = results(fast, x, v)
    assert near(found, results(plain, x, v), results(slow, x.double().cpu(), v.double().cpu()))


def same_gradients(posterior: ds.Posterior, device: torch.device) -> None:
    batch = Batch(images(device, precision(device)), torch.randint(3, (6,), device=device))
    expected = looped_keeping_graphs(posterior, batch)
    with fused_norm.fuse_layers():
        found = looped_keeping_graphs(posterior, batch)
    tolerance = {"rtol": 1e-9, "atol": 1e-10} if device.type == "cpu" else {"rtol": 1e-3, "atol": 1e-4}
    for part in ("gradients", "buffers"):
        for name, wanted in getattr(expected, part).items():
            torch.testing.assert_close(getattr(found, part)[name], wanted, **tolerance)


@pytest.mark.parametrize(("then", "again"), [("sum and relu", 0), ("relu", 4), ("nothing", 4)])
def test_gradients_of_forde_are_those_of_torchs_layers(
    then: str, again: int, device: torch.device, monkeypatch
) -> None:
    """Activations before convolutions are not kept but computed again, two of each network, unless something was added."""
    calls, real = [], fused_norm._normalise
    monkeypatch.setattr(fused_norm, "_normalise", lambda *given, relu: calls.append(relu) or real(*given, relu=relu))
    torch.manual_seed(0)
    posterior = ds.FoRDE([network(THEN[then], precision(device), device) for _ in range(2)]).to(device).train()
    for parameter in posterior.parameters():
        if parameter.ndim == 5:
            parameter.data = parameter.data.movedim(-3, -1).contiguous().movedim(-1, -3)
    same_gradients(posterior, device)
    assert len(calls) == again


def kerneled() -> nn.Module:
    """The kernel of a convolution behind batch norm depends on the input."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(x * 1))
        return self.last(F.conv2d(h, self.kernel * h.mean()).mean((2, 3)))

    kernel = nn.Parameter(torch.randn(4, 5, 1, 1))
    return tiny.Network(forward, norm=nn.BatchNorm2d(5), kernel=kernel, last=nn.Linear(4, 3))


def clipped() -> nn.Module:
    """An activation is changed past the version that torch counts."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(x * 1))
        h.data.clamp_(max=0.5)
        return self.last(self.conv(h).mean((2, 3)))

    return tiny.Network(forward, norm=nn.BatchNorm2d(5), conv=nn.Conv2d(5, 4, 1), last=nn.Linear(4, 3))


@pytest.mark.parametrize("make", [kerneled, clipped])
def test_activations_that_cannot_be_computed_again_are_kept(make, device: torch.device) -> None:
    torch.manual_seed(0)
    same_gradients(ds.FoRDE([make().to(device, precision(device)) for _ in range(2)]).to(device).train(), device)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


PAST_PYTHON = {
    "a custom function": lambda z, x: Doubled.apply(z),
    "a scripted function": lambda z, x: SCRIPTED(z),
    "read without a graph": lambda z, x: z * _mean(z),
}


def _mean(z: Tensor) -> Tensor:
    with torch.no_grad():
        return z.mean()


@torch.jit.script
def SCRIPTED(z: Tensor) -> Tensor:
    return z * 2


@pytest.mark.parametrize("then", PAST_PYTHON)
def test_what_would_lose_gradients_raises(then: str, device: torch.device) -> None:
    made = network(PAST_PYTHON[then], precision(device), device).train()
    x = images(device, precision(device))
    with fused_norm.fuse_layers(), pytest.raises(RuntimeError, match=r"a layer's result|TorchScript"):
        made(x)


UNSEEN = {
    "data": lambda x: x.data,
    "data of a view": lambda x: x.permute(0, 2, 3, 1).data,
    "numpy": lambda x: torch.from_numpy(x.numpy()),
}


@pytest.mark.parametrize("changed", ["input", "added"])
@pytest.mark.parametrize("by", UNSEEN)
def test_a_result_read_after_its_input_was_changed_unseen_is_that_from_before(by: str, changed: str, device) -> None:
    if by == "numpy" and device.type == "cuda":
        pytest.skip("an array shares no memory of a GPU")
    x = images(device)
    other, norm = torch.randn_like(x), nn.BatchNorm2d(5).to(device)
    expected = F.relu(norm(x) + other)
    with fused_norm.fuse_layers():
        waits = norm(x) + other
        UNSEEN[by](x if changed == "input" else other).mul_(3)
        found = F.relu(waits)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changed", ["input", "added"])
def test_a_result_read_after_its_input_was_changed_in_place_raises(changed: str, device: torch.device) -> None:
    x = images(device)
    other, norm = torch.randn_like(x), nn.BatchNorm2d(5).to(device)
    with fused_norm.fuse_layers():
        waits = norm(x) + other
        (x if changed == "input" else other).add_(1)
        refuses(lambda: F.relu(waits), "changed in place", RuntimeError)


def test_other_layouts_and_small_batches_stay_torchs(device: torch.device) -> None:
    norm = nn.BatchNorm2d(3).to(device)
    x = torch.randn(4, 3, 5, 5, device=device).contiguous(memory_format=torch.channels_last)
    one = torch.ones(1, device=device)
    with fused_norm.fuse_layers():
        assert type(norm(x)) is not Tensor
        assert type(F.batch_norm(x, None, None, one.expand(3), one.expand(3), True)) is Tensor  # one number for all
        assert type(norm(torch.randn(4, 3, 5, 5, device=device))) is Tensor  # channels apart in memory
        assert type(norm.eval()(torch.randn(4, 3, 5, 5, device=device))) is Tensor
        refuses(lambda: nn.BatchNorm1d(3).to(device)(torch.randn(1, 3, device=device)), "more than 1 value")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_predictions_with_batch_norm_folded_into_convolutions_are_those_of_torch(precision) -> None:
    torch.manual_seed(0)
    made = ds.nets.ResNet(18).cuda().to(memory_format=torch.channels_last).eval()
    for part in made.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_(), part.running_var.uniform_(0.5, 2), nn.init.normal_(part.weight, 1, 0.2)
    x = torch.randn(8, 3, 32, 32, device="cuda")
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        exact = copy.deepcopy(made).double()(x.double())
        with torch.autocast("cuda", dtype=precision or torch.bfloat16, enabled=precision is not None):
            plain = made(x)
            with fused_norm.fuse_layers():
                found = made(x)
    size = exact.norm()
    assert (found - exact).norm() < 1.5 * (plain - exact).norm() + 1e-6 * size
    assert (found - exact).norm() < (0.1 if precision else 1e-4) * size


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.skipif(INTERPRETED, reason="runs the other tests of this file")
def test_kernels_in_tritons_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options = ["-q", "-p", "no:cacheprovider", "-k", "torch and cpu"]
    command = [sys.executable, "-m", "pytest", *options, str(Path(__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-3000:]
