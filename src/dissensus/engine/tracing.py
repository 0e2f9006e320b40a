"""Tracing: turns a module into one graph of plain operations for any batch size, with members folded into the batch.

vmap fixes the batch size of many layers to that of the example: its rules for convolutions, pooling and normalisation read
sizes as numbers. Inside `any_batch_size`, such layers run outside of vmap with members × batch as batch, or are written out.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from dissensus.core import batch as batches
from dissensus.core.batch import Inputs
from dissensus.kernels.layer_overrides import BatchNormArguments, LayerOverrides
from dissensus.utils.torch_private import EXPORT_LOGGERS, TorchStateGuard, fold_vmap_axis, has_vmap_axis, schema_of

CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
ROW_BY_ROW = (  # functions that act on each row of a batch, without weights
    F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.adaptive_avg_pool1d,
    F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, F.adaptive_max_pool2d, F.interpolate, F.pixel_shuffle, F.unfold, F.pad,
    F.instance_norm,
)  # fmt: skip


def any_batch_size() -> LayerOverrides:
    """Inside, layers that vmap would fix to one batch size accept any."""

    def for_members(form: Callable[..., Tensor]) -> Callable[..., Any]:
        def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            members = any(has_vmap_axis(each) for each in (*args, *kwargs.values()))
            return form(function, *args, **kwargs) if members else function(*args, **kwargs)

        return run

    forms: dict[Any, Any] = {F.batch_norm: _batch_norm, F.layer_norm: _layer_norm, F.group_norm: _group_norm}
    forms |= dict.fromkeys(CONVOLUTIONS, _convolution) | dict.fromkeys(ROW_BY_ROW, _run_row_by_row)
    return LayerOverrides({function: for_members(form) for function, form in forms.items()})


class TracedModule(nn.Module):
    """The module for tracing: takes the tensors of a tuple or dict as separate arguments, in their order."""

    def __init__(self, module: nn.Module, like: Inputs) -> None:
        super().__init__()
        self.module = module
        self.names = list(like) if isinstance(like, dict) else None
        self.several = isinstance(like, tuple | list)

    def forward(self, *x: Tensor) -> Any:
        given: Any = dict(zip(self.names, x, strict=True)) if self.names else x if self.several else x[0]
        with torch.no_grad(), any_batch_size():
            return self.module(given)


def trace(
    module: nn.Module, x: Inputs, forms: Mapping[Any, Any] | None = None, axes: Sequence[Any] | None = None
) -> ExportedProgram:
    """The graph of module(x), made only of torch's operations; the first axis of every tensor in x may have any length.

    `x`: two examples or more, since torch treats an axis of length one as fixed. `forms`: operation -> function that computes
    it by others, for a format that lacks it. `axes`: for each tensor in x, other axes of any length; None has none.
    """
    given = tuple(batches.input_tensors(x))
    size = Dim("batch", min=1)
    shapes = (tuple({**dict.fromkeys(free, Dim.DYNAMIC), 0: size} for free in axes or [()] * len(given)),)
    # torch logs and prints whole graphs if tracing fails; the caller tries another way or raises.
    with TorchStateGuard(*EXPORT_LOGGERS):
        # Strict tracing refuses most modules.
        exported = torch.export.export(TracedModule(module, x).eval(), given, dynamic_shapes=shapes, strict=False)
        return exported.run_decompositions(forms or {})  # remaining vmap operations become plain


def random_operations(exported: ExportedProgram) -> list[str]:
    """Names of operations in the graph that draw random numbers."""
    graphs = [each.graph for each in exported.graph_module.modules() if isinstance(each, torch.fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes if node.op == "call_function"]
    return sorted({str(node.target) for node in nodes if _draws(node)})


def _draws(node: torch.fx.Node) -> bool:
    """Whether an operation draws random numbers; fused attention, which torch counts among these, does only to drop."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in schema_of(node.target).arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0


def _fold_members(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) for all members' rows at once; function must act on each row separately."""
    return fold_vmap_axis(function, x) if has_vmap_axis(x) else function(x)


def _run_row_by_row(function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _fold_members(lambda x: function(x, *args, **kwargs), input)


def _convolution(run: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kw: Any) -> Tensor:
    if has_vmap_axis(weight):
        raise ValueError("members have their own kernels: they run one after the other")
    outputs = _fold_members(lambda x: run(x, weight, None, *args, **kw), input)
    return outputs if bias is None else outputs + _as_channels(bias, outputs)


def _batch_norm(function: Any, *args: Any, **kwargs: Any) -> Tensor:
    input, mean, variance, weight, bias, training, _, eps = BatchNormArguments(*args, **kwargs)
    if training or mean is None or variance is None:
        raise ValueError("expected batch norm in eval mode, got one that reads the batch's own statistics")
    scaled = (input - _as_channels(mean, input)) * _as_channels(torch.rsqrt(variance + eps), input)
    return _affine(scaled, weight, bias)


def _layer_norm(
    function: Any,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    centred = input - input.mean(axes, keepdim=True)
    scaled = centred * torch.rsqrt(centred.square().mean(axes, keepdim=True) + eps)
    scaled = scaled if weight is None else scaled * weight
    return scaled if bias is None else scaled + bias


def _group_norm(
    function: Any,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return _affine(_fold_members(lambda x: function(x, num_groups, eps=eps), input), weight, bias)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * _as_channels(weight, x)
    return x if bias is None else x + _as_channels(bias, x)


def _as_channels(values: Tensor, like: Tensor) -> Tensor:
    """Values (C,) in a shape that broadcasts with `like` (B, C, ...)."""
    return values.reshape(-1, *[1] * (like.ndim - 2))
