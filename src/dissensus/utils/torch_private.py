"""torch's private names, behind plain functions: what a new version of torch may rename is here and nowhere else.

Tried on torch 2.11 (CPU and CUDA) and 2.13 (CPU).
"""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any, final

import torch
from torch import Tensor, distributed, nn
from torch._C import _functorch as functorch
from torch._functorch.vmap import lazy_load_decompositions  # type: ignore[attr-defined]
from torch._utils import _flatten_dense_tensors as flatten_all, _unflatten_dense_tensors as unflatten_all
from torch.autograd.graph import _engine_run_backward
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm, _NormBase as NormBase
from torch.nn.modules.conv import _ConvNd as ConvNd
from torch.nn.modules.dropout import _DropoutNd as DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import has_torch_function
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["BatchNorm", "ConvNd", "DropoutNd", "NormBase", "flatten_all", "pytree", "unflatten_all"]

CAST = torch.ops.aten._to_copy.default
EXPORT_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch._export")
FORWARDS = ("forward", "_conv_forward")  # what a layer computes
INNER_SCHEDULERS = "_schedulers"  # of a schedule made of others
MODULE_CALL = "_call_impl"  # the function of `nn.Module` that calls hooks and `forward`
schema_of: Callable[[Any], Any] = attrgetter("_schema")  # of an operation
axes_check_of: Callable[[nn.Module], Any] = attrgetter("_check_input_dim")  # of a batch norm
tensor_without_memory = Tensor._make_wrapper_subclass

# One operation on many tensors
add_products, add_tensors, copy_tensors = torch._foreach_addcmul_, torch._foreach_add_, torch._foreach_copy_
tensor_norms, unscale_tensors = torch._foreach_norm, torch._amp_foreach_non_finite_check_and_unscale_
subtract_tensors = torch._foreach_sub_
adam_kernels: dict[bool, Any] = {False: torch._fused_adam_, True: torch._fused_adamw_}  # by "decoupled_weight_decay"
sgd_kernel = torch._fused_sgd_

# What a module has registered, by name: the dictionaries themselves. `attrgetter` is fast, but no compiler follows it.
parameters_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_parameters")
buffers_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_buffers")
children_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_modules")
tensors_of: Callable[[nn.Module], tuple[dict[str, Any], ...]] = attrgetter("_parameters", "_buffers")
unsaved_buffers: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
forward_hooks_of: Callable[[nn.Module], tuple[dict[int, Any], ...]] = attrgetter("_forward_pre_hooks", "_forward_hooks")

# Of a tensor: how often it was written in place, which inference tensors do not know; the hooks of its gradient, or None;
# the name of its part in this process
version_of: Callable[[Tensor], int] = attrgetter("_version")
gradient_hooks_of: Callable[[Tensor], dict[int, Any] | None] = attrgetter("_backward_hooks")
LOCAL_TENSOR = "_local_tensor"

outside_transforms = torch._C._DisableFuncTorch  # inside, tensors outlive the function transforms around
unseen_by_function_modes = torch._C.DisableTorchFunction  # inside, no function mode sees what is called
free_cublas_workspaces: Callable[[], None] = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
profiles: Callable[[], bool] = torch._C._autograd._profiler_enabled
will_run = torch._C._will_engine_execute_node  # whether the backward pass that runs now will reach a node

# How the innermost level of functorch is closed. Its own function for all of them closes one too many in torch 2.11.
CLOSE = {
    functorch.TransformType.Vmap: functorch._vmap_decrement_nesting,
    functorch.TransformType.Grad: functorch._grad_decrement_nesting,
    functorch.TransformType.Jvp: functorch._jvp_decrement_nesting,
    functorch.TransformType.Functionalize: functorch._func_decrement_nesting,
}


def named_submodules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """(path, with a dot at its end, and submodule), as `named_modules` has them, faster."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()
    waiting = [("", module)]
    while waiting:
        path, part = waiting.pop()
        if part not in seen:
            seen.add(part)
            found.append((path, part))
            if inner := part._modules:
                children = [(f"{path}{name}.", child) for name, child in inner.items() if child is not None]
                waiting += reversed(children)
    return found


def named_registries(module: nn.Module) -> list[tuple[str, dict[str, Any]]]:
    """(path, dictionary of tensors by name) of each submodule that has parameters, or buffers."""
    parts = named_submodules(module)
    return [(path, each) for path, part in parts for each in (part._parameters, part._buffers) if each]


def submodule(name: str) -> Any:
    """A property, the submodule of this name: torch's own look-up takes ten times as long."""

    def find(module: nn.Module) -> Any:
        try:
            return module._modules[name]
        except KeyError:
            raise AttributeError(name) from None

    return property(final(find))


def copy_with(module: Any, buffers: Mapping[str, Tensor], children: Mapping[str, nn.Module | None]) -> Any:
    """A copy of the module with these buffers and submodules, and with the module's own under other names."""
    copied = copy.copy(module)
    copied._buffers, copied._modules = {**module._buffers, **buffers}, {**module._modules, **children}
    return copied


def convolve(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution's outputs with another weight and bias."""
    return layer._conv_forward(x, weight, bias)


def output_padding(layer: Any, *args: Any) -> list[int]:
    """What a transposed convolution adds to its outputs so that they get the size asked for."""
    return layer._output_padding(*args)


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Base class of what sees every operation inside."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, hundreds of modules, at the first operation


def in_function_transform() -> bool:
    """Whether this is inside a vmap, grad or jvp."""
    return functorch.peek_interpreter_stack() is not None


def is_traced() -> bool:
    """Whether tensors made now may mean nothing later: in compilers, function transforms and dispatch modes."""
    return torch.compiler.is_compiling() or in_function_transform() or torch._C._len_torch_dispatch_stack() > 0


def in_vmap() -> bool:
    """Whether one of the function transforms around this is a vmap."""
    return any(each.key() == functorch.TransformType.Vmap for each in functorch.get_interpreter_stack() or ())


def is_transformed(*tensors: Tensor) -> bool:
    """Whether one of the tensors belongs to a function transform: it has no memory of its own."""
    return any(functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors)


def has_vmap_axis(x: Any) -> bool:
    """Whether this is a tensor with a hidden axis of vmap."""
    return isinstance(x, Tensor) and bool(functorch.is_batchedtensor(x))


def is_inside_ddp() -> bool:
    """Whether this is inside the forward of a DistributedDataParallel module."""
    return DistributedDataParallel._active_ddp_module is not None


def default_store() -> Any:
    """The store of the group of all processes."""
    return distributed.distributed_c10d._get_default_store()


def group_timeout(group: Any) -> timedelta:
    """How long processes of a group wait for each other."""
    return group._get_backend(group._device_types[0]).options._timeout


def set_group_timeout(group: Any, limit: timedelta) -> None:
    """Lets processes of a group wait so long for each other."""
    distributed.distributed_c10d._set_pg_timeout(limit, group)


def run_in_vmap(one: Callable[..., Any], parts: Iterable[Mapping[str, Tensor]], count: int, map_trees: Any) -> Any:
    """one(*parts) in a vmap over the first axes of all their tensors, entered by hand; results with a new first axis."""
    lazy_load_decompositions()
    level = functorch._vmap_increment_nesting(count, "different")
    try:
        add, remove = functorch._add_batch_dim, functorch._remove_batch_dim
        found = one(*({name: add(tensor, 0, level) for name, tensor in part.items()} for part in parts))
        return map_trees(lambda column: remove(column[0], level, count, 0), [found])
    finally:
        functorch._vmap_decrement_nesting()


def fold_vmap_axis(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) with vmap's axis and the first axis as one: function must act on each row separately."""
    from torch._functorch import predispatch

    level = functorch.maybe_get_level(x)
    members = int(functorch.get_unwrapped(x).shape[functorch.maybe_get_bdim(x)])
    rows = predispatch._remove_batch_dim(x, level, members, 0)  # (M, B, ...)
    result = function(rows.flatten(0, 1)).unflatten(0, (members, -1))  # type: ignore[no-untyped-call]
    return predispatch._add_batch_dim(result, 0, level)


def replace_globals(function: Any, names: Mapping[str, Any]) -> Callable[..., Any]:
    """A copy of a Python function of torch whose body reads other globals of these names."""
    made = FunctionType(function.__code__, function.__globals__ | names, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def has_step_hooks(optimizer: Any, known: int) -> bool:
    """Whether something takes part in the optimiser's step, besides so many hooks of all optimisers after it."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    others = _global_optimizer_pre_hooks or len(_global_optimizer_post_hooks) > known
    return bool(own or others) or hasattr(optimizer, "grad_scale") or profiles()


def is_torchs_step(step: Any) -> bool:
    """Whether this is torch's own `step`, or that in wrappers of torch, which only note that it was called."""
    while step is not None:
        step = step.__func__ if isinstance(step, MethodType) else step
        # another object may pass on what it asks of torch's
        if not isinstance(step, FunctionType) or not step.__globals__.get("__name__", "").startswith("torch."):
            return False
        step = getattr(step, "__wrapped__", None)
    return True


def run_backward(loss: Tensor, wanted: Iterable[Tensor]) -> None:
    """Sets `.grad` of what is wanted, as `loss.backward(inputs=wanted)`, whose questions take as long as a small layer."""
    if loss.shape or not loss.is_floating_point() or has_torch_function((loss,)):
        torch.autograd.backward(loss, inputs=[*wanted])
        return
    how = {"allow_unreachable": True, "accumulate_grad": True}
    _engine_run_backward((loss,), (torch.ones_like(loss),), False, False, (*wanted,), **how)


def in_backward_pass() -> bool:
    """Whether autograd's engine runs in this thread."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def without_onednn() -> Iterator[None]:
    """Inside, matrix products on the CPU run without oneDNN."""
    before = torch._C._get_mkldnn_enabled()  # torch.backends.mkldnn.flags would change other settings, too, and warn
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def raise_at_recompile_limit() -> AbstractContextManager[object]:
    """Inside, dynamo raises at its limit of recompilations, where it would silently run plain code."""
    return torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)


class TorchStateGuard:
    """Afterwards functorch's levels, torch's modes and its dispatch keys are as before; `silent`: loggers to silence inside."""

    # Around exporters and compilers, which may fail halfway: a graph holds the beginning and the end of a vmap as
    # separate operations. If one in between fails, the end never runs, and from then on torch itself computes inside
    # that vmap. A class, since small predictions enter it: a generator takes longer.

    def __init__(self, *silent: str) -> None:
        self.levels = [(logger, logger.level) for logger in map(logging.getLogger, silent)]

    def __enter__(self) -> None:
        for logger, _ in self.levels:
            logger.setLevel(logging.CRITICAL)
        self.depth = functorch.get_dynamic_layer_stack_depth()
        self.functions, self.dispatches = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
        self.keys = torch._C._PreserveDispatchKeyGuard()
        self.keys.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        self.keys.__exit__(*error)
        while functorch.get_dynamic_layer_stack_depth() > self.depth:
            CLOSE[functorch.peek_interpreter_stack().key()]()
        while torch._C._len_torch_function_stack() > self.functions:
            torch._C._pop_torch_function_stack()
        while torch._C._len_torch_dispatch_stack() > self.dispatches:
            torch._C._pop_torch_dispatch_stack(None)
        for logger, level in self.levels:
            logger.setLevel(level)
