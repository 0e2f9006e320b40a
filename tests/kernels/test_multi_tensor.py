"""Kernels over many tensors against plain operations: in Triton's interpreter here, compiled on a GPU."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from dissensus.kernels import multi_tensor
from dissensus.kernels.multi_tensor import BLOCK, Chunks
from dissensus.methods.tradi import WeightFilters

HAS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def filters_agree(
    device, dtype=torch.float32, drift="gradient", *, groups=1, missing=(), maximize=False, bad=False, flagged=False
):
    """Three steps of the fused and of the plain filters give the same means and variances."""
    shapes = [(BLOCK + 3,), (5, 3), (), (2, 4, 3, 3), (0, 2)]
    parameters = [torch.nn.Parameter(torch.randn(shape).to(device, dtype)) for shape in shapes]
    parameters[3].data = parameters[3].data.to(memory_format=torch.channels_last)
    named = {str(i): p for i, p in enumerate(parameters)}
    noise = {"state_noise": (0.2, 0.1), "measurement_noise": (1.0, 2.0)}
    plain, fast = (WeightFilters(named, **noise, drift=drift).to(device) for _ in range(2))
    for each in (plain, fast):
        each.start(named, dict.fromkeys(named, 0.5))
    given = [{"params": parameters[g::groups], "lr": 0.3 / (1 + g)} for g in range(groups)]
    optimizer = torch.optim.SGD(given, lr=0.1, maximize=maximize)
    for step in range(3):
        for i, p in enumerate(parameters):
            p.data.add_(torch.randn_like(p))
            p.grad = None if i in missing else torch.randn_like(p)
        if bad and step == 1:
            parameters[0].grad[-1] = float("nan")
        weights = [p.detach() for p in parameters]
        for each in (plain, fast):
            k, l = each._gains(each.observed.add())
            given = (weights, each._group_gradients(optimizer), k, 1 - l, l * (1 - k) ** 2)
            if each is fast:
                skipped = torch.tensor(float(bad and step == 1), device=device) if flagged else None
                assert each._filter_state(weights).step_fused(*given, skipped=skipped, on=device)
            else:
                each._filter_state(weights).step(*given)
    for name, mean in plain.mean.items():
        torch.testing.assert_close(fast.mean[name], mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(fast.variance[name], plain.variance[name], rtol=2e-6, atol=1e-7)
        assert mean.isfinite().all()


def everything(device):
    """All kernels on a device; called in another process, where Triton interprets them."""
    torch.manual_seed(0)
    filters_agree(device)
    filters_agree(device, groups=2, missing=(1,), maximize=True)
    filters_agree(device, bad=True)
    filters_agree(device, bad=True, flagged=True)
    filters_agree(device, drift="none")
    filters_agree(device, torch.bfloat16, missing=(0,))
    tensors, chunks = [torch.ones(2 * BLOCK + 1, device=device), torch.ones(3, 2, device=device)], Chunks()
    for on in (0.0, 1.0):
        assert chunks.find(tensors, on=device)
        chunks.launch("clear", torch.tensor(on, device=device), KIND=torch.float32)
        assert [float(each.mean()) for each in tensors] == [1 - on] * 2


@HAS_TRITON
@pytest.mark.slow
def test_interpreted_kernels_equal_plain_operations():
    here = Path(__file__).parent
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{here.parents[1] / 'src'}{os.pathsep}{here}"}
    command = [sys.executable, "-c", "import test_multi_tensor; test_multi_tensor.everything('cpu')"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compiled_kernels_equal_plain_operations():
    everything("cuda")


def test_tensors_that_no_kernel_may_go_over_are_refused(monkeypatch):
    """Holes and overlaps would be written to, other dtypes misread."""
    monkeypatch.setattr(multi_tensor, "can_run_kernels", lambda device: True)
    whole = [torch.zeros(4, 6), torch.zeros(3)]
    assert Chunks().find(whole, on="cpu")
    assert not Chunks().find(whole)  # not on a GPU
    assert not Chunks().find([torch.zeros(4, 6)[:, ::2]], on="cpu")
    assert not Chunks().find([torch.zeros(1).expand(5)], on="cpu")
    assert not Chunks().find(whole, [torch.zeros(6, 4).T, torch.zeros(3)], on="cpu")
    assert not Chunks().find([torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)], on="cpu")
    assert not Chunks().find([torch.zeros(3, dtype=torch.float64)], on="cpu")
    monkeypatch.setattr(multi_tensor, "can_run_kernels", lambda device: False)
    assert not Chunks().find(whole, on="cpu")


def test_where_triton_cannot_compile_the_plain_form_is_used_and_the_reason_logged(monkeypatch, caplog):
    def failing(*args, **kwargs):
        raise RuntimeError("Failed to find C compiler\nand more")

    monkeypatch.setattr(multi_tensor, "load_kernels", lambda: (None, None))
    monkeypatch.setattr(multi_tensor, "_launch", failing)
    multi_tensor.can_run_kernels.cache_clear()
    with caplog.at_level("INFO", logger="dissensus"):
        assert not Chunks().find([torch.zeros(3)], on="cpu")
    multi_tensor.can_run_kernels.cache_clear()
    told = ["kernels in Triton are not used: Failed to find C compiler"]
    assert [record.message for record in caplog.records] == told
    gradients = [torch.ones(3)]
    multi_tensor.clear_if_flagged(torch.ones(()), gradients, Chunks())
    assert gradients[0].tolist() == [0, 0, 0]


def test_tables_follow_tensors_that_move(monkeypatch):
    monkeypatch.setattr(multi_tensor, "can_run_kernels", lambda device: True)
    chunks, first, second = Chunks(), torch.zeros(5), torch.zeros(5)
    for tensor in (first, second, second.resize_(2 * BLOCK + 1)):
        assert chunks.find([tensor], on="cpu")
        assert chunks._table.tolist() == [[tensor.data_ptr()], [tensor.numel()]]
    assert (chunks._which.tolist(), chunks._start.tolist()) == ([0, 0, 0], [0, 1, 2])
