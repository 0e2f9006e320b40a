"""Layers with latents on their nodes: h = (W (x ∘ z) + b·c) ∘ s, z for input nodes, s for output nodes, c a scalar on the bias.

In a convolution a node is a channel. Latents differ from example to example while a network trains; one set of them for all
examples is folded into weight and bias, after which the layer is an ordinary one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.surgery.account import Account
from dissensus.surgery.conversion import DENSE, TRANSPOSED, Cut, converted, cut, watch_reads
from dissensus.surgery.order import follow
from dissensus.surgery.scaling import scaled

Mode = Literal["in", "out", "both"]
MODES: tuple[Mode, ...] = ("in", "out", "both")
PLAIN_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
WORDS = {"before": "input nodes", "bias": "the bias", "behind": "output nodes"}


class Nodes(NamedTuple):
    """Latents of one layer, each (N, C) for N examples or (C,) for all; None: none there."""

    before: Tensor | None = None  # z, on input nodes
    bias: Tensor | None = None  # c, (N, 1) or (1,)
    behind: Tensor | None = None  # s, on output nodes


class Kernel(NamedTuple):
    """Weight and bias of one layer with its latents, the same for all examples, folded in."""

    weight: Tensor
    bias: Tensor | None


class Noded(Cut):
    """A layer that multiplies its nodes by the latents it is given; without any it is the plain one."""

    added = ("nodes", "known_as", "stands", "seen", "rewritten")
    nodes: Nodes | Kernel | None
    known_as: str
    stands: str  # what the account says
    seen: list[tuple[Tensor, int]] | None = None  # outputs and their versions, while somebody watches
    rewritten: bool = True  # whether others write into the outputs, as in-place activations do; so until looked at
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor, *args: Any, **keywords: Any) -> Tensor:
        nodes = self.nodes
        if nodes is None:
            _check_not_again(self)
            return super().forward(input, *args, **keywords)  # type: ignore[no-any-return]
        if isinstance(nodes, Kernel):
            if isinstance(self, nn.Linear):
                return F.linear(input, nodes.weight, nodes.bias)
            return self._conv_forward(input, nodes.weight, nodes.bias)  # type: ignore[no-any-return, operator]
        if foldable(self) and all(each is None or each.ndim == 1 for each in nodes):
            # One set for all examples: kernels are smaller than what passes them, and a sample costs one plain pass.
            return self._conv_forward(input, *folded_tensors(self, self.weight, self.bias, nodes))  # type: ignore[no-any-return, operator]
        if nodes.before is not None:
            input = scaled(input, self._across(nodes.before, input), alone=True)
        outputs: Tensor = super().forward(input, *args, **keywords)
        if nodes.bias is not None and self.bias is not None:
            outputs = outputs + self._across(self.bias * (nodes.bias - 1), outputs)
        if nodes.behind is not None:
            factors = self._across(nodes.behind, outputs)
            # The short backward pass reads the product, which must then be there as it was.
            outputs = outputs * factors if self.rewritten else scaled(outputs, factors, alone=False)
        if self.seen is not None:
            self.seen.append((outputs, _version(outputs)))
        return outputs

    def _across(self, latents: Tensor, x: Tensor) -> Tensor:
        """Latents (N, C) in the shape that multiplies x (N, C, ...), or (N, ..., C) where features are last."""
        dense = isinstance(self, DENSE)
        space = 0 if dense else len(self.kernel_size)  # type: ignore[arg-type]
        if latents.ndim == 1:  # one set for all examples, wherever those are
            return latents.to(x.dtype).reshape(-1, *[1] * space)
        examples, width = latents.shape
        between = x.ndim - 2
        if between < 0 or len(x) != examples or (not dense and between != space):
            raise ValueError(
                f"expected the {examples} examples of the batch on the first axis of layer {self.known_as!r}, got a tensor of "
                f"shape {tuple(x.shape)}; latents are drawn for each example: leave this layer out with layers=[...]"
            )
        shape = (examples, *[1] * between, width) if dense else (examples, width, *[1] * between)
        return latents.to(x.dtype).reshape(shape)

    def done(self) -> str:
        return self.stands

    def kernel(self) -> Kernel:
        nodes = self.nodes if isinstance(self.nodes, Nodes) else Nodes()
        return folded_tensors(self, self.weight, self.bias, nodes)


@dataclass(frozen=True)
class Site:
    """Where latents stand, and how many."""

    layer: str
    part: str  # a field of Nodes
    width: int


class NodedNetwork(NamedTuple):
    """A copy of a network whose layers take latents, where those stand, and what was and was not converted."""

    network: nn.Module
    sites: tuple[Site, ...]
    account: Account

    @property
    def latents(self) -> int:
        """How many there are."""
        return sum(site.width for site in self.sites)

    @property
    def widths(self) -> tuple[int, ...]:
        """Latents of each layer."""
        found: Counter[str] = Counter()
        for site in self.sites:
            found[site.layer] += site.width
        return tuple(found.values())


def with_nodes(
    network: nn.Module, mode: Mode, *, bias: bool = False, layers: Sequence[str] | None = None
) -> NodedNetwork:
    """The network with latents on the input nodes, output nodes or both of its linear and convolutional layers.

    `bias`: a scalar for each layer's bias, as iBNN has it. `layers`: patterns of names; None is all.
    """
    if mode not in MODES:
        raise ValueError(f"expected a mode of {', '.join(MODES)}, got {mode!r}; name one of them")
    sites: list[Site] = []

    def make(name: str, layer: nn.Module) -> nn.Module:
        inputs, outputs = (
            getattr(layer, f"{side}_{'features' if isinstance(layer, DENSE) else 'channels'}") for side in ("in", "out")
        )
        if mode != "out":
            sites.append(Site(name, "before", inputs))
        if bias and layer.bias is not None:
            sites.append(Site(name, "bias", 1))
        if mode != "in":
            sites.append(Site(name, "behind", outputs))
        cut(layer, Noded)
        mine = [f"{site.width} on {WORDS[site.part]}" for site in sites if site.layer == name]
        layer.nodes, layer.known_as, layer.stands = None, name, f"latents: {', '.join(mine)}"  # type: ignore[assignment]
        return layer

    copied, account = converted(network, make, layers=layers)
    followed = follow(copied, list(account.converted))
    for name in account.converted:
        layer = copied.get_submodule(name)
        if isinstance(layer, Cut):
            account.converted[name] += watch_reads(name, layer, followed)
    return NodedNetwork(copied, tuple(sites), account)


def by_layer(sites: Sequence[Site], latents: Tensor) -> dict[str, Nodes]:
    """Layer -> its part of latents (..., D)."""
    found: dict[str, Nodes] = {}
    for site, part in zip(sites, latents.split_with_sizes([site.width for site in sites], dim=-1), strict=True):
        found[site.layer] = found.get(site.layer, Nodes())._replace(**{site.part: part})
    return found


@contextmanager
def standing(network: nn.Module, nodes: Mapping[str, Nodes | Kernel]) -> Iterator[None]:
    """Inside, these layers multiply by these latents."""
    with placed([network.get_submodule(name) for name in nodes], nodes.values()):
        yield


@contextmanager
def placed(layers: Sequence[nn.Module], nodes: Iterable[Nodes | Kernel]) -> Iterator[None]:
    """`standing` for layers that are known already."""
    for layer, each in zip(layers, nodes, strict=True):
        vars(layer)["nodes"] = each  # past nn.Module's own setting of attributes, which costs as much as a launch
    try:
        yield
    finally:
        for layer in layers:
            vars(layer)["nodes"] = None


@contextmanager
def watched(layers: Sequence[Noded]) -> Iterator[None]:
    """Inside, the layers keep what they return to a batch with latents of its own, in `seen`, empty at first."""
    for layer in layers:
        vars(layer)["seen"] = []
    try:
        yield
    finally:
        for layer in layers:
            vars(layer)["seen"] = None


def written_into(layer: Noded) -> bool:
    """Whether somebody has written into what a watched layer returned."""
    return any(_version(outputs) != version for outputs, version in layer.seen or ())


def _check_not_again(layer: Noded) -> None:
    """Raises inside a backward pass: activation checkpointing runs a layer again there, where its latents are gone."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        raise ValueError(
            f"expected a layer that runs in the forward pass alone, got {layer.known_as!r} run again in the backward pass, "
            "without its latents; leave activation checkpointing out, or leave this layer out with layers=[...]"
        )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors count no versions


def takes_kernel(layer: nn.Module) -> bool:
    """Whether a `Kernel` may stand in the layer."""
    return isinstance(layer, (nn.Linear, *PLAIN_CONVOLUTIONS))


def foldable(layer: nn.Module) -> bool:
    """Whether one is made at every call: where kernels are smaller than what passes them."""
    return isinstance(layer, PLAIN_CONVOLUTIONS)


def folded_tensors(layer: nn.Module, weight: Tensor, bias: Tensor | None, nodes: Nodes) -> Kernel:
    """Weight and bias that alone compute what the layer does with these latents, each (C,)."""
    before, scalar, behind = nodes
    groups: int = getattr(layer, "groups", 1)
    space = [1] * (weight.ndim - 2)
    if before is not None:
        # Rows are outputs, but for transposed convolutions, where they are inputs; the others count within their group.
        spread = before[:, None] if isinstance(layer, TRANSPOSED) else _in_groups(before, groups, len(weight))
        weight = weight * spread.reshape(*spread.shape, *space)
    if behind is not None:
        spread = _in_groups(behind, groups, len(weight)) if isinstance(layer, TRANSPOSED) else behind[:, None]
        weight = weight * spread.reshape(*spread.shape, *space)
    if bias is not None and scalar is not None:
        bias = bias * scalar
    if bias is not None and behind is not None:
        bias = bias * behind
    return Kernel(weight, bias)


def _in_groups(latents: Tensor, groups: int, rows: int) -> Tensor:
    """(rows or 1, C / groups) of latents (C,): each row has those of its group."""
    grouped = latents.reshape(groups, -1)
    return grouped if groups == 1 else torch.repeat_interleave(grouped, rows // groups, dim=0)
