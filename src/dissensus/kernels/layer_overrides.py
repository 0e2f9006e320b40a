"""The one function mode in which torch's layers are computed in another way; each way is a plain function in a table.

| where | layers | way |
|---|---|---|
| `kernels/fused_norm.py` | batch norm, convolutions | results that wait for what follows, on a GPU |
| `kernels/double_backward.py` | batch norm, convolutions, PReLU | forms with fast second derivatives |
| `distributed/sync_batch_norm.py` | batch norm | statistics of all processes' rows |
| `engine/tracing.py` | norms, convolutions, pooling | any batch size under vmap |
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.overrides import TorchFunctionMode


class LayerOverrides(TorchFunctionMode):
    """Inside, `table[function](function, *args, **kwargs)` instead of a function of torch in the table.

    Of several inside each other the innermost is asked first. What it calls goes to those around it, and then to torch.
    """

    def __init__(self, table: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.table = table

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        way = self.table.get(function)
        return function(*args, **(kwargs or {})) if way is None else way(function, *args, **(kwargs or {}))


class BatchNormArguments(NamedTuple):
    """The arguments of `F.batch_norm`, with its defaults."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5
