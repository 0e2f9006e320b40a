"""The output of a network among all that it returns."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def output_tensor(outputs: Any) -> Tensor:
    """The output tensor of a network: what it returned, "logits" or else "out" of a dict, or the first one of a plain tuple."""
    # Named tuples of torchvision, and tuples with another tensor of that shape (a variance, auxiliary logits), are refused,
    # because their other tensors belong in the loss.
    found = named_output(outputs)
    if type(outputs) is tuple:
        tensors: list[Any] = [each for each in outputs if isinstance(each, Tensor) and each.is_floating_point()]
        found = tensors[0] if sum(each.shape == tensors[0].shape for each in tensors) == 1 else None
    if not isinstance(found, Tensor):
        got = type(outputs).__name__
        raise TypeError(f'expected a network that returns one tensor, or "logits" or "out", got {got}; wrap it')
    return found


def named_output(outputs: Any) -> Any:
    """What a network returned, of a dict only "logits" or else "out", None without both."""
    # Models of transformers return "logits", or with return_dict=False a tuple that starts with them; torchvision's
    # segmentation models return "out" and "aux", which only the training loss reads (`Member.outputs_and_auxiliary`).
    return outputs.get("logits", outputs.get("out")) if isinstance(outputs, Mapping) else outputs


def auxiliary_output(outputs: Any) -> Tensor:
    """The output of an auxiliary head: "aux" of a dict."""
    if not (isinstance(outputs, Mapping) and isinstance(found := outputs.get("aux"), Tensor)):
        got = "others; return a dict of both"
        raise TypeError(f'expected "out" and "aux" of a network with auxiliary_weight, got {got}')
    return found
