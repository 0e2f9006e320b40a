"""A tree of named tensors that is a module, so that `.to`, `state_dict` and checkpoints know it."""

from torch import Tensor, nn


class TensorTree(nn.Module):
    """Named tensors as parameters and buffers of nested empty modules, so that `state_dict` reads like the network's."""

    def plant(self, name: str, tensor: Tensor, *, persistent: bool = True) -> None:
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
