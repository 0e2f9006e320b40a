"""Settings that must be numbers, wherever they are given, and settings under their former names."""

import ast
import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import BaseTorchDispatchMode, _get_current_dispatch_mode_stack

import dissensus
import dissensus as ds
import tiny
from dissensus.core.member_runner import FallbackChain
from dissensus.data import Batches
from dissensus.utils import torch_private
from dissensus.utils.checks import fraction, integer, number, one_of
from dissensus.utils.torch_modes import eval_mode
from dissensus.utils.torch_private import TorchStateGuard
from refusals import refuses


@pytest.mark.parametrize(
    ("method", "keyword", "value"),
    [
        (ds.Laplace, "samples", "30"), (ds.Laplace, "samples", 2.5), (ds.MCDropout, "samples", "30"),
        (ds.MCDropout, "samples", 2.5), (ds.SWAG, "rank", 2.5), (ds.SWAG, "start", 2.5), (ds.SWAG, "every", "2"),
        (ds.TRADI, "features", 2.5), (ds.SnapshotEnsemble, "members", "3"),
    ],
)  # fmt: skip
def test_counts_that_are_no_whole_numbers_are_named(method, keyword, value):
    told = rf"^expected {keyword} as a whole number, got {re.escape(repr(value))}; pass an int"
    refuses(lambda: method(tiny.mlp(dropout=0.1), **{keyword: value}), told, TypeError)


@pytest.mark.parametrize(
    ("method", "keyword"),
    [
        (ds.MCDropout, "rate"), (ds.SWAG, "posterior_temperature"), (ds.TRADI, "bandwidth"),
        (ds.GaussianPerturbation, "noise"),
    ],
)  # fmt: skip
def test_settings_that_are_no_numbers_are_named(method, keyword):
    with pytest.raises(TypeError, match=f"^expected {keyword} as a number, got '0.5'; pass a float"):
        method(tiny.mlp(dropout=0.1), **{keyword: "0.5"})


def test_numbers_of_other_libraries_are_numbers():
    for value in (3, np.int64(3)):
        assert integer("samples", value) == 3
    for value in (3, 0.5, np.float32(0.5), torch.tensor(0.5)):
        assert number("noise", value) is value


def test_a_batch_size_is_a_whole_number():
    x, y = tiny.points()
    for value in ("5", 2.5):
        with pytest.raises(TypeError, match=r"^expected batch_size as a whole number"):
            Batches(x, y, batch_size=value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: integer("rank", 0), "expected rank of at least 1, got 0; pass a larger number"),
        (
            lambda: integer("start", -1, least=0, hint="0 is the start"),
            "expected start of at least 0, got -1; 0 is the start",
        ),
        (
            lambda: fraction("rate", 1.0),
            "expected rate above 0 and below 1, got 1.0; pass a number within these bounds",
        ),
        (lambda: number("std", float("nan")), "expected std as a finite number, got nan"),
        (lambda: number("std", -1, least=0), "expected std of at least 0, got -1"),
        (lambda: number("level", 1.5, above=0, most=1), "expected level above 0 and of at most 1, got 1.5"),
        (lambda: one_of("mode", "c", ["a", "b"]), "expected mode of a, b, got 'c'; name one of them"),
        (lambda: one_of("bits", True, [1, 2]), "expected bits of 1, 2, got True"),
    ],
)
def test_a_value_out_of_bounds_is_one_error(call, message):
    refuses(call, f"^{re.escape(message)}")


def test_values_within_bounds_come_back():
    assert integer("rank", 1) == 1
    assert fraction("rate", 0.5) == 0.5
    assert number("level", 1, above=0, most=1) == 1
    assert one_of("mode", "a", {"a": 1}) == "a"


ROWS = [  # method, former settings, settings now
    (ds.DropoutEnsemble, {"keep": 0.9}, {"rate": 0.1}),
    (ds.NodeBNN, {"gamma": 4.0, "rate": "curvature"}, {"posterior_temperature": 5.0, "lr": "curvature"}),
    (ds.SWAG, {"scale": 0.25}, {"posterior_temperature": 0.25}),
]
NEEDED = {ds.NodeBNN: {"data_size": 12}}


@pytest.mark.parametrize(("method", "former", "now"), ROWS)
def test_a_former_keyword_is_an_error_that_names_the_new_one(method, former, now):
    for (old, value), new in zip(former.items(), now, strict=True):
        with pytest.raises(
            TypeError, match=f"expected a keyword of {method.__name__}, one of .*, got '{old}'; pass {new}="
        ):
            method(ds.nets.MLP(2, 3, hidden=(4,)), **{old: value}, **NEEDED.get(method, {}))


# ----------------------------------------------------------------------------------------------- private names of torch
MADE = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
OBJECTS = [
    nn.Conv2d(1, 1, 1), nn.ConvTranspose2d(1, 1, 1), nn.BatchNorm2d(1), nn.MultiheadAttention(1, 1), nn.Parameter(),
    MADE, torch.optim.lr_scheduler.SequentialLR(MADE, [torch.optim.lr_scheduler.StepLR(MADE, 1)], []),
    torch.utils.data.DataLoader([0]), torch.utils.data.WeightedRandomSampler([1.0], 1),
    torch.utils.data.DistributedSampler([0], 1, 0), torch.ops.aten.add.Tensor,
]  # fmt: skip
PRIVATE = {name for each in OBJECTS for name in dir(each) if re.match(r"_[a-z]", name)} | {"_local_tensor"}
BELOW_TORCH = re.compile(r"(torch|nn|distributed)(\.\w+)*\._[a-zA-Z]\w*$|sys\._getframe$")
OVERRIDDEN = {"_apply", "_load_from_state_dict", "_save_to_state_dict"}  # torch has subclasses define these
OUR_OWN = {"bench/rows/user_data.py: _values"}  # a function with the name of one of sparse tensors


def private_names(tree: ast.Module) -> set[str]:
    """torch's private names in a file: imported ones, ones below `torch`, `nn` and `distributed`, and ones of `OBJECTS`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            found |= {f"{node.module}.{each.name}" for each in node.names if "._" in f"{node.module}.{each.name}"}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names if re.match(r"torch\b.*\._", each.name)}
        elif isinstance(node, ast.Attribute) and BELOW_TORCH.match(ast.unparse(node)):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.Attribute) and node.attr in PRIVATE:
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and (node.value in PRIVATE or re.match(r"torch\..*\._", str(node.value))):
            found.add(node.value)
    return found - OVERRIDDEN


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("from torch.utils import _pytree as pytree", {"torch.utils._pytree"}),
        ("from torch._C import _functorch", {"torch._C._functorch"}),
        ("import torch._dynamo", {"torch._dynamo"}),
        ("torch._foreach_add_(a, b)", {"torch._foreach_add_"}),
        ("nn.modules.conv._ConvNd", {"nn.modules.conv._ConvNd"}),
        ("layer._parameters['weight']", {"_parameters"}),
        ("getattr(x, '_version')", {"_version"}),
        ("loader._index_sampler", {"_index_sampler"}),
        ("sys._getframe()", {"sys._getframe"}),
        ("super()._apply(f); self._mine; torch.ones(1)", set()),
    ],
)
def test_private_names_of_torch_are_found(code, expected):
    assert private_names(ast.parse(code)) == expected


def test_no_other_module_uses_torchs_internals_or_the_frames_of_callers() -> None:
    home = Path(dissensus.__file__).parent
    files = {file.relative_to(home).as_posix(): file for file in home.rglob("*.py") if file.name != "torch_private.py"}
    used = {f"{name}: {each}" for name, file in files.items() for each in private_names(ast.parse(file.read_text()))}
    assert used == OUR_OWN


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
                torch_private.in_function_transform(), torch_private.in_vmap(), torch_private.is_transformed(x),
                torch_private.has_vmap_axis(x),
            )
        )  # fmt: skip
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
