"""Convolutions of few channels by own kernels: values and gradients of torch's. On a CPU they run in Triton's interpreter."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dissensus.kernels import fused_conv
from dissensus.kernels.fused_norm import fuse_layers

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
    monkeypatch.setattr(
        triton_first_conv, "convolution", lambda *args, **kwargs: (calls.append(1), run(*args, **kwargs))[1]
    )
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
