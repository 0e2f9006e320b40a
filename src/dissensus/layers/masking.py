"""Dropout sites: where a network drops units, and how to apply masks there without changing the network."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dissensus.core.member_runner import has_attention
from dissensus.utils.tensor_tree import named_submodules
from dissensus.utils.torch_modes import plain_attention

log = logging.getLogger("dissensus")

DROPOUT = nn.modules.dropout._DropoutNd
CHANNELWISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
ALPHA = (nn.AlphaDropout, nn.FeatureAlphaDropout)
WEIGHT_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)


def dropout_sites(network: nn.Module, rate: float | None) -> dict[str, float]:
    """Layer name -> dropout rate. `rate=None`: the network's dropout modules; else all weight layers except the first."""
    own = {name: module.p for name, module in network.named_modules() if isinstance(module, DROPOUT) and module.p > 0}
    rates = ((name, module, getattr(module, "dropout", None)) for name, module in network.named_modules())
    functional = [name or type(part).__name__ for name, part, p in rates if isinstance(p, float) and p > 0]
    if rate is None:
        if own:
            if functional:
                log.info("dropout inside %s stays off in prediction, because it has no module", ", ".join(functional))
            return own
        hint = f" ({', '.join(functional)} drop inside their own forward)" if functional else ""
        raise ValueError(
            f"expected a network with dropout modules of positive rate, got none{hint}; functional dropout (F.dropout) has "
            "no module to switch on: use nn.Dropout in the network, or pass rate= to insert dropout"
        )
    if own:
        raise ValueError(f"expected a network without dropout if rate is given, got {', '.join(own)}; pass rate=None")
    weighted = [name for name, module in network.named_modules() if isinstance(module, WEIGHT_LAYERS)]
    if len(weighted) < 2:
        got, hint = len(weighted), "put nn.Dropout into the network yourself"
        raise ValueError(f"expected at least two linear or convolutional layers for dropout between, got {got}; {hint}")
    return dict.fromkeys(weighted[1:], rate)


@contextmanager
def change_at_sites(
    network: nn.Module, sites: dict[str, float], change: Callable[[str, Tensor], Tensor]
) -> Iterator[None]:
    """Inside, the tensor at each site is replaced by `change(key, tensor)`; the key is "layer#call", calls counted from 0.

    At a dropout module it is the output (in eval mode equal to its input), at a weight layer the input.
    """
    calls: Counter[str] = Counter()
    modules = {path.removesuffix("."): part for path, part in named_submodules(network)}

    def key(name: str) -> str:
        calls[name] += 1
        return f"{name}#{calls[name] - 1}"

    def hook(name: str) -> Any:
        if isinstance(modules[name], DROPOUT):
            return modules[name].register_forward_hook(lambda _, __, output: change(key(name), output))
        return modules[name].register_forward_pre_hook(lambda _, inputs: (change(key(name), inputs[0]), *inputs[1:]))

    handles = [hook(name) for name in sites]
    try:
        with (
            plain_attention() if has_attention(network) else nullcontext()
        ):  # the fast path of attention calls no submodule
            yield
    finally:
        for handle in handles:
            handle.remove()


def mask_shape(layer: nn.Module, tensor: Tensor) -> tuple[int, ...]:
    """Shape of one example's mask: every unit, or whole channels for channel-wise dropout and before convolutions."""
    whole = isinstance(layer, (*CHANNELWISE, nn.modules.conv._ConvNd)) and tensor.ndim > 2
    return (tensor.shape[1], *[1] * (tensor.ndim - 2)) if whole else tuple(tensor.shape[1:])


def apply_mask(layer: nn.Module, tensor: Tensor, keep: Tensor, rate: float) -> Tensor:
    """tensor with dropped units set to 0 and the others scaled up; alpha dropout keeps mean and variance."""
    if isinstance(layer, ALPHA):
        # Klambauer et al. 2017: dropped units are set to α' = −λα; a, b restore zero mean and unit variance.
        alpha = -1.7580993408473766
        a = 1 / math.sqrt((1 - rate) * (1 + rate * alpha**2))
        return a * torch.where(keep, tensor, alpha) - a * alpha * rate
    return torch.where(keep, tensor / (1 - rate), 0.0)


class Masks:
    """M masks per site computed from one seed: the same on every device, made at the first call of a site."""

    def __init__(self, network: nn.Module, sites: dict[str, float], members: int, seed: int) -> None:
        named = {path.removesuffix("."): part for path, part in named_submodules(network)}
        self.layers = {name: named[name] for name in sites}
        self.sites, self.members, self.seed = sites, members, seed
        self._made: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def site_masks(self, key: str, tensor: Tensor) -> Tensor:
        """(M, *features) boolean masks of the site `key`, True where a unit is kept."""
        name, _, call = key.rpartition("#")
        shape = mask_shape(self.layers[name], tensor)
        if (key, shape) not in self._made:
            # One generator per site and call, on the host: masks do not depend on the order of calls or on the device.
            stream = (self.seed + 1_000_003 * list(self.sites).index(name) + 7_919 * int(call)) % 2**63
            generator = torch.Generator().manual_seed(stream)
            keep = torch.rand(self.members, *shape, generator=generator) >= self.sites[name]
            self._made[key, shape] = keep.to(tensor.device)
        return self._made[key, shape]

    def apply_at_site(self, key: str, tensor: Tensor, keep: Tensor) -> Tensor:
        name = key.rpartition("#")[0]
        return apply_mask(self.layers[name], tensor, keep, self.sites[name])
