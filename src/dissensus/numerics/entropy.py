"""Terms of an entropy."""

import torch
from torch import Tensor


def entropy_terms(p: Tensor) -> Tensor:
    """−p log p, 0 where p is; in a traced graph by operations that every exporter knows (torch 2.11 has no `entr` for ONNX)."""
    if torch.compiler.is_compiling():
        return -p * p.clamp_min(torch.finfo(p.dtype).tiny).log()
    terms: Tensor = torch.special.entr(p)
    return terms
