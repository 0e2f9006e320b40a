"""Member: one network, its likelihood and its latents as one module, used as the template for each member's tensors."""

import copy
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from dissensus.core.attributes import unmade
from dissensus.core.batch import Batch, call
from dissensus.core.likelihood import Likelihood
from dissensus.core.turns import turn
from dissensus.numerics.tree import Tensors, TensorTree

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
        self.training = network.training  # not self.train(), which would change the submodules
        # Submodules that the caller has put in eval mode: they stay in it during training.
        self.always_eval = [name for name, part in self.named_modules() if network.training and not part.training]

    def forward(self, function: Callable[..., Any], *args: Any) -> tuple[Any, Tensors]:
        result = function(self, *args)
        return result, dict(self.named_buffers()) if self.training else {}

    def nll(self, batch: Batch) -> Tensor:
        """() mean negative log-likelihood of the batch."""
        return self.likelihood.nll(call(self.network, batch.x), batch.y, batch.weight)


def emptied(member: Member) -> Member:
    """A copy of the member with empty tensors, into which real ones are put at every call. Tied tensors stay tied."""
    check_whole(member.network)
    blanks = unmade(member)
    for parameter in member.parameters():
        empty = parameter.detach().new_empty(0)
        blanks[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in member.buffers():
        blanks[id(buffer)] = buffer.detach().new_empty(0)
    with turn(member.network):  # another thread's hooks and forwards must not be copied
        copied: Member = copy.deepcopy(member, blanks)
    return copied


def member_index(index: int, members: int) -> int:
    """The index from 0 to M − 1; negative ones count from the end."""
    if not -members <= index < members:
        raise ValueError(
            f"expected a member from 0 to {members - 1}, got {index}; this posterior has {members} members"
        )
    return index % members


def is_fully_sharded(network: nn.Module) -> bool:
    """Whether torch's `fully_shard` has divided the network's tensors over processes."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported here, which takes seconds: whoever used it did
    return fsdp is not None and any(isinstance(part, fsdp.FSDPModule) for part in network.modules())


def stay_divided(network: nn.Module) -> None:
    """Makes `fully_shard`, if it was used, divide all parts again after a forward pass, also the outermost one.

    Otherwise whole tensors would replace the divided ones that optimisers and files refer to.
    """
    for part in network.modules() if is_fully_sharded(network) else ():
        if hasattr(part, "set_reshard_after_forward"):
            part.set_reshard_after_forward(True, recurse=False)  # type: ignore[operator]


def check_whole(network: nn.Module) -> None:
    """Raises if the network is divided over processes, for methods that must copy it."""
    if is_fully_sharded(network):
        raise NotImplementedError(
            "expected a network that is whole in one process, because it is copied, got one divided by fully_shard; use "
            "ds.MAP(network), and load its whole state into a plain network to save or export it"
        )


def check_initialised(network: nn.Module) -> None:
    """Raises if this is not a network, or one with lazy tensors or tensors on the meta device."""
    if not isinstance(network, nn.Module):
        raise TypeError(f"expected an nn.Module, got {type(network).__name__}; pass the network object itself")
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        if nn.parameter.is_lazy(tensor) or tensor.is_meta:
            raise ValueError(
                f"expected initialised tensors, got '{name}', which is lazy or on the meta device; run the network on one "
                "batch first, or use network.to_empty(device=…)"
            )
