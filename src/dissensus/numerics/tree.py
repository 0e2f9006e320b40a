"""A tree of named tensors that is a module, so that `.to`, `state_dict` and checkpoints know it."""

from typing import Any, Self

from torch import Tensor, nn

Tensors = dict[str, Tensor]  # by name


class TensorTree(nn.Module):
    """Named tensors as parameters and buffers of nested empty modules, so that `state_dict` reads like the network's.

    A training step asks for their names a dozen times, and walking the modules costs more than small layers do: they are
    kept until something is planted, converted or loaded.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None

    def named(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(parameters, buffers) by name, not to be changed."""
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


def named_tensors(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(parameters, buffers) by name; those of a caller's own module may change from one call to the next."""
    if isinstance(module, TensorTree):
        return module.named()
    return dict(module.named_parameters()), dict(module.named_buffers())
