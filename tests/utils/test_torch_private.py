"""torch's private names are in one module; levels of functorch, modes and loggers are afterwards as before."""

import logging
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import BaseTorchDispatchMode, _get_current_dispatch_mode_stack

import dissensus
from dissensus.core.member_runner import FallbackChain
from dissensus.utils import torch_private
from dissensus.utils.torch_modes import eval_mode
from dissensus.utils.torch_private import TorchStateGuard

PRIVATE = re.compile(r"torch\._(C|functorch|dynamo|inductor)\b|torch\.utils\._python_dispatch|sys\._getframe")


def test_no_other_module_uses_torchs_internals_or_the_frames_of_callers() -> None:
    files = Path(dissensus.__file__).parent.rglob("*.py")
    found = [file.name for file in files if PRIVATE.search(file.read_text()) and file.name != "torch_private.py"]
    assert found == []


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (torch.func.vmap, (True, True, True, True)),
        (torch.func.grad, (True, False, True, False)),
        (lambda function: function, (False, False, False, False)),
    ],
)
def test_function_transforms_are_told_apart(transform, expected) -> None:
    found = []

    def function(x: Tensor) -> Tensor:
        found.append(
            (
                torch_private.in_function_transform(),
                torch_private.in_vmap(),
                torch_private.is_transformed(x),
                torch_private.has_vmap_axis(x),
            )
        )
        return x.sum()

    transform(function)(torch.ones(3))
    assert found == [expected]


def test_function_modes_do_not_see_what_is_hidden_from_them() -> None:
    seen = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watching():
        with torch_private.unseen_by_function_modes():
            torch.tensor([1.0])
        assert seen == []
        torch.tensor([1.0])
    assert seen == [torch.tensor]


def fail_halfway():
    """As a graph whose operation between the beginning and the end of a vmap raises."""
    functorch._vmap_increment_nesting(3, "error")
    BaseTorchFunctionMode().__enter__()
    BaseTorchDispatchMode().__enter__()
    raise RuntimeError("halfway")


def state():
    modes = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()
    return functorch.get_dynamic_layer_stack_depth(), *modes, logging.getLogger("torch.onnx").level


def test_a_failure_halfway_leaves_neither_levels_nor_modes_open():
    before = state()
    with TorchStateGuard("torch.onnx"):
        assert logging.getLogger("torch.onnx").level == logging.CRITICAL
    with pytest.raises(RuntimeError, match="halfway"), TorchStateGuard("torch.onnx"):
        fail_halfway()
    assert state() == before
    nn.Linear(2, 2)


def test_levels_and_modes_of_the_caller_stay():
    def inside(x):
        before = state()
        with pytest.raises(RuntimeError, match="halfway"), TorchStateGuard():
            fail_halfway()
        assert state() == before
        return 2 * x

    with BaseTorchFunctionMode(), BaseTorchDispatchMode():
        found = torch.func.vmap(inside)(torch.arange(3.0))
    assert found.tolist() == [0.0, 2.0, 4.0]


def test_a_way_that_fails_halfway_leaves_torch_to_the_next_as_it_was():
    before, said = state(), []
    ways = FallbackChain(lambda name, reason: said.append((name, reason)), fast=fail_halfway, slow=lambda: state())
    assert ways() == before
    assert said == [("fast", "halfway")]


def test_modes_come_back_one_by_one():
    network = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2)))
    network[1][1].eval()
    with eval_mode(network):
        assert not any(module.training for module in network.modules())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), eval_mode(network):
        network(torch.zeros(3, 5))
    assert [module.training for module in network.modules()] == [True, True, True, True, False]
