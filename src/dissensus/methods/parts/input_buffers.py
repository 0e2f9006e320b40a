"""Input buffers: inputs as a module, so that they move and are saved with the posterior that repels at them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from dissensus.core.batch import Inputs, check_finite


class InputBuffers(nn.Module):
    """Copies of inputs, a tensor, a tuple or a dict of tensors, as buffers."""

    def __init__(self, x: Inputs) -> None:
        super().__init__()
        values = list(x.values()) if isinstance(x, Mapping) else list(x) if isinstance(x, tuple | list) else [x]
        if not values or not all(isinstance(value, Tensor) for value in values):
            wrong = next((value for value in values if not isinstance(value, Tensor)), x)
            raise TypeError(
                f"expected inputs as a tensor, tuple or dict of tensors, got {type(wrong).__name__}; pass tensors (n, ...)"
            )
        self.form = "dict" if isinstance(x, Mapping) else "tuple" if isinstance(x, tuple | list) else "tensor"
        self.names = list(x) if isinstance(x, Mapping) else []
        self.count = len(values)
        for i, value in enumerate(values):
            if value.ndim == 0 or len(value) == 0:
                raise ValueError(f"expected inputs (n, ...), got shape {tuple(value.shape)}; pass some rows")
            check_finite(value, anywhere=True)
            self.register_buffer(str(i), value.detach().clone())

    def inputs(self) -> Inputs:
        """The inputs, as they were given."""
        values = [self.get_buffer(str(i)) for i in range(self.count)]
        if self.form == "dict":
            return dict(zip(self.names, values, strict=True))
        return tuple(values) if self.form == "tuple" else values[0]

    def config(self) -> dict[str, Any]:
        """Form, names, shapes and types, all JSON."""
        tensors = [self.get_buffer(str(i)) for i in range(self.count)]
        kinds = [[list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in tensors]
        return {"form": self.form, "names": self.names, "tensors": kinds}

    @classmethod
    def skeleton(cls, config: dict[str, Any]) -> Self:
        """Inputs of this form, all zero, to be overwritten by those of a file."""
        values = [torch.zeros(shape, dtype=getattr(torch, kind)) for shape, kind in config["tensors"]]
        if config["form"] == "dict":
            return cls(dict(zip(config["names"], values, strict=True)))
        return cls(tuple(values) if config["form"] == "tuple" else values[0])
