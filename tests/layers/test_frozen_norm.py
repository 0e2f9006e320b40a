"""Frozen batch norm: which activations a kernel may have; what the kernels compute is in test_channel_kernels_gpu."""

import pytest
import torch
from torch import nn

from dissensus.layers import batch_norm
from dissensus.layers import channel_launch as kernels
from dissensus.layers.conversion import convert_layer


class OnGPU(torch.Tensor):
    is_cuda = True


@pytest.fixture
def layer(monkeypatch):
    """A frozen norm of 3 channels whose kernel says that it was called."""

    def called(*_):
        raise AssertionError("the kernel was called")

    monkeypatch.setattr(batch_norm._NormaliseFunction, "apply", called)
    monkeypatch.setattr(kernels, "find_triton", lambda: kernels)
    return convert_layer(nn.BatchNorm2d(3).eval(), batch_norm.FrozenNorm)


def test_activations_that_torch_refuses_do_not_reach_the_kernel(layer):
    with pytest.raises(AssertionError, match="the kernel was called"):
        layer(torch.randn(64, 3, 2, 2).as_subclass(OnGPU))
    with pytest.raises(RuntimeError, match="running_mean should contain 4 elements"):
        layer(torch.randn(64, 4, 2, 2).as_subclass(OnGPU))
    with pytest.raises(ValueError, match="expected 4D input"):
        layer(torch.randn(64, 3, 2).as_subclass(OnGPU))


def test_a_norm_without_a_shift_is_torchs_own(layer):
    layer.register_parameter("bias", None)
    x = torch.randn(64, 3, 2, 2)
    torch.testing.assert_close(torch.Tensor(layer(x.as_subclass(OnGPU))), x / (1 + layer.eps) ** 0.5)
