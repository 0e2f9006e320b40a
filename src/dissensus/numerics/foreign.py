"""Foreign machinery, such as torch's exporters and compilers: it may fail halfway, and leaves no trace in torch."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C import _functorch as functorch

# How the innermost level of functorch is closed. Its own function for all of them closes one too many in torch 2.11.
CLOSE = {
    functorch.TransformType.Vmap: functorch._vmap_decrement_nesting,
    functorch.TransformType.Grad: functorch._grad_decrement_nesting,
    functorch.TransformType.Jvp: functorch._jvp_decrement_nesting,
    functorch.TransformType.Functionalize: functorch._func_decrement_nesting,
}


@contextmanager
def torch_left_as_found(*silent: str) -> Iterator[None]:
    """Afterwards functorch's levels, torch's modes and its dispatch keys are as before; `silent`: loggers to silence inside.

    A graph holds the beginning and the end of a vmap as separate operations. If one in between fails, the end never runs, and
    from then on torch itself computes inside that vmap.
    """
    depth = functorch.get_dynamic_layer_stack_depth()
    functions, dispatches = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    levels = [(logger, logger.level) for logger in map(logging.getLogger, silent)]
    for logger, _ in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        with torch._C._PreserveDispatchKeyGuard():
            yield
    finally:
        while functorch.get_dynamic_layer_stack_depth() > depth:
            CLOSE[functorch.peek_interpreter_stack().key()]()
        while torch._C._len_torch_function_stack() > functions:
            torch._C._pop_torch_function_stack()
        while torch._C._len_torch_dispatch_stack() > dispatches:
            torch._C._pop_torch_dispatch_stack(None)
        for logger, level in levels:
            logger.setLevel(level)
