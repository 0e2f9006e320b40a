"""torch's private names are in one module, behind functions that say what they do."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import dissensus
from dissensus.utils import torch_private

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
