"""Convolutions of few channels by own kernels: values and gradients of torch's. On a CPU they run in Triton's interpreter."""

import os
import platform
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dissensus as ds
from dissensus.core.batch import Batch
from dissensus.kernels import cpu_products, fused_conv
from dissensus.kernels.cpu_products import has_small_products
from dissensus.kernels.fused_norm import fuse_layers
from dissensus.kernels.layer_overrides import LayerOverrides
from dissensus.utils.torch_private import without_onednn
from refusals import refuses

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter, see below")),
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch) -> str:
    monkeypatch.setattr(fused_conv, "LEAST", 0)
    if request.param == "cpu":
        import triton.language as tl

        from dissensus.kernels import triton_first_conv

        monkeypatch.setattr(triton_first_conv, "HALF", tl.float32)
        monkeypatch.setattr(fused_conv, "DEVICE", "cpu")
        monkeypatch.setattr(fused_conv, "can_run_kernels", lambda device: True)
    return request.param


# inputs, outputs, kernel, stride, padding, dilation, bias, channels side by side
CASES = {
    "a first layer": (3, 64, 3, 1, 1, 1, False, True),
    "one channel": (1, 20, (5, 3), (2, 1), (2, 0), 1, True, False),
    "dilated": (4, 70, 3, (1, 2), 2, 2, True, False),
    "no patch": (2, 8, 1, 1, 0, 1, True, True),
    "wide": (3, 16, 5, 1, "valid", 1, False, True),
}


def made(case: str, device: str) -> tuple[nn.Conv2d, Tensor]:
    torch.manual_seed(0)
    inputs, outputs, kernel, stride, padding, dilation, bias, beside = CASES[case]
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, bias=bias).to(device)
    x = torch.randn(3, inputs, 11, 9, device=device)
    return layer, x.contiguous(memory_format=torch.channels_last) if beside else x


def half(layer: nn.Conv2d) -> torch.autocast:
    return torch.autocast(layer.weight.device.type, dtype=torch.bfloat16, cache_enabled=False)


def counted(monkeypatch) -> list[int]:
    """A list that grows with every use of the kernels."""
    from dissensus.kernels import triton_first_conv

    calls: list[int] = []
    run = triton_first_conv.convolution
    counted = lambda *args, **kwargs: (calls.append(1), run(*args, **kwargs))[1]  # noqa: E731
    monkeypatch.setattr(triton_first_conv, "convolution", counted)
    return calls


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_torch(case: str, device: str, monkeypatch) -> None:
    layer, x = made(case, device)
    calls = counted(monkeypatch)
    with half(layer), fuse_layers():
        y = layer(x)
    assert len(calls) == (case != "wide")  # padding by name stays torch's
    assert y.dtype == torch.bfloat16
    g = torch.randn_like(y)
    ours = torch.autograd.grad(y, list(layer.parameters()), g)
    exact = layer.double()(x.double())
    theirs = torch.autograd.grad(exact, list(layer.parameters()), g.double())
    torch.testing.assert_close(y.double(), exact, rtol=0.02, atol=0.02)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == torch.float32
        rounded = device == "cuda" or not calls  # the interpreter multiplies in single precision
        assert (one.double() - other).norm() < (1e-2 if rounded else 1e-5) * other.norm()


def test_without_gradients_bias_and_relu_are_part_of_the_kernel(device: str, monkeypatch) -> None:
    if device == "cpu":
        pytest.skip("convolutions wait on a GPU only")
    layer, x = made("one channel", device)
    calls = counted(monkeypatch)
    with torch.no_grad(), half(layer), fuse_layers():
        waits = layer(x)
        assert not calls
        y = waits.relu()
    assert calls
    torch.testing.assert_close(y.double(), layer.double()(x.double()).relu().detach(), rtol=0.02, atol=0.02)


def test_inputs_that_need_gradients_many_channels_and_single_precision_stay_torchs(device: str, monkeypatch) -> None:
    layer, x = made("a first layer", device)
    monkeypatch.setattr(
        "dissensus.kernels.triton_first_conv.convolution", lambda *_, **__: pytest.fail("expected torch's")
    )
    with fuse_layers():
        assert layer(x).dtype == torch.float32
        with half(layer):
            layer(x.requires_grad_())
            nn.Conv2d(8, 4, 3).to(device)(torch.randn(2, 8, 5, 5, device=device))
            nn.Conv2d(4, 4, 3, groups=2).to(device)(torch.randn(2, 4, 5, 5, device=device))


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        (nn.Conv2d(3, 4, 3), (2, 1, 9, 9), "to have 3 channels, but got 1"),
        (nn.Conv2d(3, 4, 3, dilation=5), (2, 3, 9, 9), "can't be greater than actual input size"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_torch(layer, shape, message: str, device: str) -> None:
    with half(layer.to(device)), fuse_layers(), pytest.raises(RuntimeError, match=message):
        layer(torch.randn(shape, device=device))


def test_a_second_derivative_raises(device: str) -> None:
    layer, x = made("a first layer", device)
    with half(layer), fuse_layers():
        y = layer(x)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(y.float().square().sum(), layer.weight, create_graph=True)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.skipif(INTERPRETED, reason="runs the other tests of this file")
def test_kernels_in_tritons_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__)), "-k", "cpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout


# ---------------------------------------------------------------------------------------------------- overridden layers
def test_the_innermost_is_asked_first_and_what_it_calls_goes_outwards_to_torch() -> None:
    calls = []

    def noted(name):
        def run(function, x: Tensor, *args, **kwargs) -> Tensor:
            calls.append((name, function))
            return function(x, *args, **kwargs) + 1

        return run

    x = torch.tensor([-1.0, 2.0])
    with LayerOverrides({F.relu: noted("outer")}), LayerOverrides({F.relu: noted("inner")}):
        assert F.relu(x).tolist() == [2.0, 4.0]
        assert torch.add(x, 1.0, alpha=2).tolist() == [1.0, 4.0]  # in neither table
    assert calls == [("inner", F.relu), ("outer", F.relu)]
    assert F.relu(x).tolist() == [0.0, 2.0]


DENSE = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


@pytest.fixture
def arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)


def enabled() -> bool:
    return bool(torch._C._get_mkldnn_enabled())


@pytest.mark.usefixtures("arm")
def test_only_networks_of_small_linear_layers_do_without_it() -> None:
    assert has_small_products(DENSE)
    assert has_small_products(nn.TransformerEncoderLayer(8, 2))
    assert not has_small_products(nn.Linear(1024, 1024, device="meta"))
    assert not has_small_products(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2, 2)))
    assert not has_small_products(nn.LSTM(3, 4))
    assert not has_small_products(nn.ReLU())


def test_other_processors_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert not has_small_products(DENSE)


def test_the_switch_is_put_back_even_after_an_error() -> None:
    before = enabled()
    inside = []

    def fails() -> None:
        with without_onednn():
            inside.append(enabled())
            raise ValueError("within")

    refuses(lambda: fails(), "within")
    assert inside == [False]
    assert enabled() == before


@pytest.mark.usefixtures("arm")
def test_training_and_prediction_run_without_it_and_leave_it_on() -> None:
    seen: list[bool] = []

    class Looking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(enabled())
            return super().forward(x)

    before = enabled()
    posterior = ds.DeepEnsemble([nn.Sequential(Looking(4, 3)) for _ in range(2)])
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    posterior.check_batch(Batch(x, y))
    seen.clear()
    posterior.backward(x, y)
    posterior.predict(x)
    assert seen
    assert not any(seen)
    assert enabled() == before


def test_results_are_the_same_to_rounding() -> None:
    torch.manual_seed(0)
    posterior, x, y = ds.DeepEnsemble([ds.nets.MLP(30, 4) for _ in range(3)]), torch.randn(9, 30), torch.arange(9) % 4
    found = []
    for wanted in (True, False):
        posterior.particles.runner.small_products = wanted
        posterior.zero_grad()
        losses = posterior.backward(x, y)
        found.append([losses, *(parameter.grad.clone() for parameter in posterior.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert cpu_products.SMALL == 2**19
