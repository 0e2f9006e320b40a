"""The one function mode: the innermost table is asked first, and what it calls goes to those around it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.kernels.layer_overrides import LayerOverrides


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
