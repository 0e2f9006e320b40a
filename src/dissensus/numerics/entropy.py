"""Terms of an entropy."""

import torch
from torch import Tensor


def entropy_terms(p: Tensor) -> Tensor:
    """−p log p, with 0 log 0 = 0; in a traced graph by operations that every exporter knows (torch 2.11: no ONNX `entr`)."""
    if torch.compiler.is_compiling():
        return -p * p.clamp_min(torch.finfo(p.dtype).tiny).log()
    terms: Tensor = torch.special.entr(p)
    return terms
