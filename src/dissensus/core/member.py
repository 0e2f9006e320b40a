"""Member: one network, its likelihood and its latents as one module, used as the template for each member's tensors."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dissensus.core.attributes import unmade
from dissensus.core.batch import Batch, call
from dissensus.core.fully import check_whole
from dissensus.core.likelihood import Likelihood
from dissensus.core.running import first_line
from dissensus.core.turns import turn
from dissensus.numerics.tree import Tensors, TensorTree, buffers_by_name, found_quickly

log = logging.getLogger("dissensus")
PREFIX = "network."  # prefix of the names of a network's tensors in a member


class Member(nn.Module):
    """One network and its likelihood as one module. `forward(f, *args)` returns (f(member, *args), buffers afterwards).

    They are one module so that one `functional_call` serves both. `latents`: tensors that belong to neither, such as
    variational means and deviations, without weight prior and weight decay; f reads them as `member.latents`.
    """

    def __init__(self, network: nn.Module, likelihood: Likelihood, latents: nn.Module | None = None) -> None:
        super().__init__()
        if not isinstance(likelihood, Likelihood):
            what = likelihood.__name__ + " itself" if isinstance(likelihood, type) else type(likelihood).__name__
            raise TypeError(f"expected a likelihood object, got {what}; pass an instance, for example Classification()")
        self.network = network
        self.likelihood = likelihood
        self.latents = TensorTree() if latents is None else latents
        found_quickly(self, "network", "likelihood", "latents")
        self.training = network.training  # not self.train(), which would change the submodules
        # Submodules that the caller has put in eval mode: they stay in it during training.
        self.always_eval = [name for name, part in self.named_modules() if network.training and not part.training]

    def forward(self, function: Callable[..., Any], *args: Any) -> tuple[Any, Tensors]:
        result = function(self, *args)
        if not self.training:
            return result, {}
        return result, dict(self.named_buffers()) if torch.compiler.is_dynamo_compiling() else buffers_by_name(self)

    def nll(self, batch: Batch) -> Tensor:
        """() mean negative log-likelihood of the batch."""
        return self.likelihood.nll(call(self.network, batch.x), batch.y, batch.weight)


def emptied(member: Member) -> Member:
    """A copy of the member with empty tensors, into which real ones are put at every call. Tied tensors stay tied."""
    check_whole(member.network)
    with turn(member.network):  # another thread's hooks and forwards must not be copied
        copied: Member = copy.deepcopy(member, blanks(member))
    return copied


def emptied_if_possible(member: Member) -> Member:
    """The same, or the member itself where it cannot be copied."""
    try:
        return emptied(member)
    except (TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
        # Some modules cannot be copied (they hold a lock). The original is used, under its lock, and restored each time.
        log.info("functions run in the caller's network: it cannot be copied (%s)", first_line(error))
        return member


def blanks(part: nn.Module) -> dict[int, Any]:
    """What a copy of the part gets in place of its tensors: empty ones."""
    found = unmade(part)
    for parameter in part.parameters():
        empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        found[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in part.buffers():
        found[id(buffer)] = buffer.detach().new_empty(0)
    return found


def member_index(index: int, members: int) -> int:
    """The index from 0 to M − 1; negative ones count from the end."""
    if not -members <= index < members:
        raise ValueError(
            f"expected a member from 0 to {members - 1}, got {index}; this posterior has {members} members"
        )
    return index % members


def check_initialised(network: nn.Module) -> None:
    """Raises if this is not a network, or one with lazy tensors, tensors on the meta device, or parts of TorchScript."""
    if not isinstance(network, nn.Module):
        raise TypeError(f"expected an nn.Module, got {type(network).__name__}; pass the network object itself")
    for name, part in network.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            what = f"{name or 'one'} of torch.jit, which runs only with its own weights"
            raise TypeError(
                f"expected a network of Python modules, got {what}; pass the one that was scripted or traced"
            )
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        if nn.parameter.is_lazy(tensor) or tensor.is_meta:
            raise ValueError(
                f"expected initialised tensors, got '{name}', which is lazy or on the meta device; run the network on one "
                "batch first, or use network.to_empty(device=…)"
            )
