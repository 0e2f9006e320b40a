"""Foreign machinery, such as torch's exporters and compilers: it may fail halfway, and leaves no trace in torch."""

import logging

import torch
from torch._C import _functorch as functorch

# How the innermost level of functorch is closed. Its own function for all of them closes one too many in torch 2.11.
CLOSE = {
    functorch.TransformType.Vmap: functorch._vmap_decrement_nesting,
    functorch.TransformType.Grad: functorch._grad_decrement_nesting,
    functorch.TransformType.Jvp: functorch._jvp_decrement_nesting,
    functorch.TransformType.Functionalize: functorch._func_decrement_nesting,
}


class TorchStateGuard:
    """Afterwards functorch's levels, torch's modes and its dispatch keys are as before; `silent`: loggers to silence inside.

    A graph holds the beginning and the end of a vmap as separate operations. If one in between fails, the end never runs, and
    from then on torch itself computes inside that vmap. A class, since small predictions enter it: a generator takes longer.
    """

    def __init__(self, *silent: str) -> None:
        self.levels = [(logger, logger.level) for logger in map(logging.getLogger, silent)]

    def __enter__(self) -> None:
        self.depth = functorch.get_dynamic_layer_stack_depth()
        self.functions, self.dispatches = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
        for logger, _ in self.levels:
            logger.setLevel(logging.CRITICAL)
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
