"""Foreign machinery leaves no trace in torch: levels of functorch, modes and loggers are afterwards as before."""

import logging

import pytest
import torch
from torch import nn
from torch._C import _functorch as functorch
from torch.overrides import BaseTorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import BaseTorchDispatchMode, _get_current_dispatch_mode_stack

from dissensus.core.member_runner import FallbackChain
from dissensus.utils.torch_private import TorchStateGuard


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
