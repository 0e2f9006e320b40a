"""A tree of named tensors as a module, so that `.to`, `state_dict` and checkpoints work."""

from collections.abc import Mapping
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dissensus.numerics.copying import copy_all

Tensors = dict[str, Tensor]  # by name


def copies(tensors: Tensors) -> Tensors:
    """Copies of the tensors, on a GPU by few kernels for all of them; vmap has no rule for that."""
    on_gpu = all(tensor.is_cuda for tensor in tensors.values()) and torch._C._functorch.peek_interpreter_stack() is None
    if not tensors or not on_gpu or torch.compiler.is_compiling():
        return {name: tensor.clone() for name, tensor in tensors.items()}
    found = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    copy_all(list(found.values()), list(tensors.values()))
    return found


class TensorTree(nn.Module):
    """Named tensors as parameters and buffers of nested empty modules, so that `state_dict` looks like the network's.

    A training step needs the names a dozen times, and walking over the modules costs more than small layers, so the names are
    cached until a tensor is planted, converted or loaded.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None

    def named(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(parameters, buffers) by name; do not modify the dicts."""
        if self._known is None:
            self._known = dict(self.named_parameters()), dict(self.named_buffers())
        return self._known

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self._known = None  # conversion replaces buffers
        return super()._apply(*args, **kwargs)  # type: ignore[no-any-return, no-untyped-call]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._known = None  # load_state_dict(assign=True) replaces all of them
        super()._load_from_state_dict(*args, **kwargs)

    def plant(self, name: str, tensor: Tensor, *, persistent: bool = True) -> None:
        self._known = None
        *path, leaf = name.split(".")
        node: nn.Module = self
        for part in path:
            if part not in node._modules:
                node.add_module(part, TensorTree())
            node = node._modules[part]  # type: ignore[assignment]
        if isinstance(tensor, nn.Parameter):
            node.register_parameter(leaf, tensor)
        else:
            node.register_buffer(leaf, tensor, persistent=persistent)


def ties(module: nn.Module) -> dict[str, str]:
    """Other name -> first name of each tied tensor; a layer with several names counts once."""
    first: dict[Tensor, str] = {}
    found: dict[str, str] = {}
    for path, part in module.named_modules():
        for leaf, tensor in chain(part._parameters.items(), part._buffers.items()):
            name = f"{path}.{leaf}" if path else leaf
            if tensor is not None and (source := first.setdefault(tensor, name)) != name:
                found[name] = source
    return found


def call_with(module: nn.Module, tensors: Tensors, *args: Any, tied: Mapping[str, str] | None = None) -> Any:
    """module(*args) with these tensors in place of its own, tied ones in all their places. `tied`: the result of `ties`.

    torch gets each place once: its own handling of ties would leave tensors of this call in a layer with two names.
    """
    tied = ties(module) if tied is None else tied
    others = {name: tensors[source] for name, source in tied.items() if source in tensors}
    return functional_call(module, {**tensors, **others}, args, tie_weights=False)


def named_tensors(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(parameters, buffers) by name; for a caller's module they may change between calls."""
    if isinstance(module, TensorTree):
        return module.named()
    return dict(module.named_parameters()), dict(module.named_buffers())
