"""Kernels over channels on a GPU give what torch's own operations give, for every layout and type that they take."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dissensus as ds
from dissensus.engine import break_even
from dissensus.kernels import channel_launch as kernels
from dissensus.layers.batch_norm import FrozenNorm
from dissensus.layers.factored import scale_channels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here"),
]

SHAPES = [(128, 5, 7, 3), (128, 130, 5, 4), (128, 16, 70, 70), (128, 3, 9), (128, 6, 3, 5, 4)]


def activations(shape, dtype, innermost):
    x = torch.randn(shape, device="cuda", dtype=dtype)
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if innermost else x


def close(found, wanted, dtype):
    tolerance = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    assert float((found.double() - wanted).norm()) <= tolerance * float(wanted.norm()) + 1e-12


@pytest.mark.parametrize("innermost", [False, True])
@pytest.mark.parametrize("dtype", kernels.TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_with_factors_of_channels_and_their_gradients_are_those_of_double_precision(shape, dtype, innermost):
    if kernels.find_triton() is None:
        pytest.skip("needs triton, and there is none here")
    x, g = (activations(shape, dtype, innermost).requires_grad_() for _ in range(2))
    many = torch.rand(shape[0], shape[1] + 9, device="cuda", dtype=dtype) + 0.5
    factors = many[:, 4 : 4 + shape[1]].reshape(*shape[:2], *[1] * (len(shape) - 2)).requires_grad_()
    assert kernels.channel_layout(x) is not None
    y = scale_channels(x, factors, alone=False)
    found = torch.autograd.grad(y, (x, factors), g)
    exact = [tensor.detach().double() for tensor in (x, factors, g)]
    close(y, exact[0] * exact[1], dtype)
    close(found[0], exact[2] * exact[1], dtype)
    close(found[1], (exact[2] * exact[0]).sum_to_size(factors.shape), dtype)
    assert y.stride() == x.stride() == found[0].stride()


def test_a_factor_of_0_gives_no_gradient_of_its_own_and_no_nan():
    x = torch.randn(64, 4, 5, 5, device="cuda", requires_grad=True)
    factors = torch.zeros(64, 4, 1, 1, device="cuda", requires_grad=True)
    for found in torch.autograd.grad(scale_channels(x, factors, alone=False).sum(), (x, factors)):
        assert float(found.abs().max()) == 0


@pytest.mark.parametrize("innermost", [False, True])
@pytest.mark.parametrize("dtype", kernels.TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_frozen_batch_norm_and_its_gradients_are_those_of_double_precision(shape, dtype, innermost):
    if kernels.find_triton() is None:
        pytest.skip("needs triton, and there is none here")
    norm = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)](shape[1], device="cuda").eval()
    for tensor in (norm.running_mean, norm.weight.data, norm.bias.data):
        tensor.normal_()
    norm.running_var.uniform_(0.1, 2.0)
    x, g = activations(shape, dtype, innermost).requires_grad_(), activations(shape, dtype, innermost)
    exact = x.detach().double().requires_grad_()
    reference = type(norm)(shape[1], device="cuda").double().eval()
    reference.load_state_dict(norm.state_dict())
    wanted = torch.autograd.grad(reference(exact), (exact, *reference.parameters()), g.double())
    network = ds.NodeBNN(
        nn.Sequential(nn.Linear(1, 1), norm), data_size=1, batch_norm="frozen"
    ).particles.template.network
    layer = network[1].cuda()
    assert isinstance(layer, FrozenNorm)
    y = layer(x)
    close(y, reference(exact).detach(), dtype)
    found = torch.autograd.grad(y, (x, *layer.parameters()), g, create_graph=True)
    for mine, other in zip(found, wanted, strict=True):
        close(mine.detach(), other, dtype)
    for mine, other in zip(torch.autograd.grad(layer(x), (x, *layer.parameters()), g), wanted, strict=True):
        close(mine, other, dtype)


@pytest.mark.parametrize("mode", ["in", "out", "both"])
@pytest.mark.parametrize("kind", ["frozen", "trained"])
def test_a_step_of_node_noise_is_the_same_with_and_without_the_kernels(mode, kind, monkeypatch):
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    network = ds.nets.ResNet(20)
    x, y = torch.randn(64, 3, 16, 16, device="cuda"), torch.randint(10, (64,), device="cuda")
    network.cuda()(x)  # statistics that are not those of birth
    posterior = ds.NodeBNN(network, data_size=50, mode=mode, batch_norm=kind).cuda()
    found = []
    for there in (True, False):
        if not there:
            monkeypatch.setattr(kernels, "find_triton", lambda: None)
        torch.manual_seed(1)
        posterior.zero_grad()
        posterior.loss(x, y).backward()
        found.append([p.grad.clone() for p in posterior.parameters() if p.grad is not None])
    torch.backends.cudnn.deterministic = False
    for mine, other in zip(*found, strict=True):
        # A ReLU whose input is 0 to rounding may go either way.
        assert float((mine - other).norm()) <= 2e-2 * float(other.norm()) + 1e-7


def test_where_several_examples_are_batched_by_vmap_kernels_keep_out():
    x = torch.randn(3, 64, 4, 5, 5, device="cuda")
    factors = torch.rand(3, 64, 4, 1, 1, device="cuda")
    found = torch.func.vmap(lambda a, b: scale_channels(a, b, alone=False))(x, factors)
    torch.testing.assert_close(found, x * factors)
    slopes = torch.func.grad(lambda a: F.relu(scale_channels(a, factors[0], alone=False)).sum())(x[0])
    torch.testing.assert_close(slopes, (x[0] > 0) * factors[0])


@pytest.mark.parametrize("batches", [2, 200])
def test_a_run_loads_the_kernels_where_it_is_long_enough(batches, monkeypatch):
    if kernels.find_triton() is None:
        pytest.skip("needs triton, and there is none here")
    monkeypatch.setattr(kernels, "_wanting", set())
    kernels.find_triton.cache_clear()
    # A graph pays in long runs here, whatever this machine's times are.
    monkeypatch.setattr(break_even, "pays", lambda *_: batches > 100)
    network = ds.nets.ResNet(20)
    x, y = torch.randn(batches * 32, 3, 32, 32), torch.randint(10, (batches * 32,))
    posterior = ds.NodeBNN(network, data_size=len(x))
    ds.fit(posterior, ds.data.Batches(x, y, batch_size=32), epochs=1, device="cuda", draw=False, progress=False)
    assert kernels._wanting
    assert kernels.find_triton.cache_info().currsize == (batches > 100)
    assert kernels.channel_layout(torch.ones(64, 64, 8, 8, device="cuda")) is not None  # beside `fit` they load at once
