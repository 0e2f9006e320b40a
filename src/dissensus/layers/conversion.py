"""Layer surgery: copies any network and changes what its linear and convolutional layers compute with the same weights.

A converted layer keeps its place, its object, its hooks and the names of its tensors: only its class becomes a subclass of
the old one (`ConvertedLayer`), as with torch's parametrizations. A wrapper would put "layer." into the names of a state
dict, break users' `isinstance(part, nn.Linear)`, and miss modules that hold the layer without being its parent.
"""

import copy
from abc import ABC
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from inspect import signature
from typing import Any, ClassVar, TypeVar, cast

import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.core.member import check_initialised
from dissensus.core.member_runner import first_line, network_lock
from dissensus.layers.call_order import TracedCalls
from dissensus.nets.blocks import NTKLinear
from dissensus.utils.batch_norm_names import NORM_LAYERS
from dissensus.utils.checks import first_names
from dissensus.utils.module_state import SWITCHES
from dissensus.utils.sharding import check_copyable
from dissensus.utils.torch_private import FORWARDS, forward_hooks_of, parameters_of


@dataclass
class ConversionReport:
    """`converted`: layer -> what was changed; `left`: layer -> why it was not. `str()` is a table of both."""

    converted: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [("layer", "converted", "left alone")]
        rows += [(name or "(itself)", done, "") for name, done in self.converted.items()]
        rows += [(name or "(itself)", "", reason) for name, reason in self.left.items()]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join(lines)


class TransposedLinear(nn.Module, ABC):
    """Linear layers x W, with a weight (inputs, outputs): Conv1D of GPT-2 in transformers, known by name and arguments."""

    nx: int
    nf: int

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        return any(each.__name__ == "Conv1D" and {"nf", "nx"} <= {*signature(each).parameters} for each in kind.__mro__)


DENSE: tuple[type[nn.Module], ...] = (nn.Linear, NTKLinear, TransposedLinear)
TRANSPOSED: tuple[type[nn.Module], ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
CONVERTIBLE = (*DENSE, *CONVOLUTIONS)
EMBEDDINGS: tuple[type[nn.Module], ...] = (nn.Embedding, nn.EmbeddingBag)
NESTED = SWITCHES[-1]
READERS: tuple[type[nn.Module], ...] = (nn.MultiheadAttention,)  # they read their layers' weights without calling them

CutKind = TypeVar("CutKind", bound="ConvertedLayer")


class ConvertedLayer(nn.Module):
    """A converted layer: a mixin before the plain layer's class. Subclasses define a forward, and tensors named in `added`."""

    plain_class: ClassVar[type[nn.Module]]
    added: ClassVar[tuple[str, ...]] = ()  # names of tensors and settings that the plain layer does not have
    # Whether the network may also read its weight directly, which would change if the added tensors were folded into it.
    read_past: bool = False

    def fold(self) -> None:
        """Folds the added tensors into weight and bias; they remain, without effect."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle cannot find classes that are made at run time by name.
        reduced = tuple(super().__reduce_ex__(protocol))
        return _empty_layer, (type(self).__mro__[1], self.plain_class), *reduced[2:]


class SeparateWeights(ConvertedLayer):
    """A layer that computes with separate weights (`own`), while other modules still read the old ones."""

    added = ("own",)
    own: nn.Module

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return self.own(*args, **keywords)


def convert_layer(layer: nn.Module, kind: type[CutKind]) -> CutKind:
    """The layer itself, with the class (kind, old class); the caller adds the tensors in `kind.added`."""
    layer.__class__ = _converted_class(kind, type(layer))  # type: ignore[arg-type]
    return cast("CutKind", layer)


def convertible_layers(
    network: nn.Module, *, layers: Sequence[str] | None = None, needed: bool = True
) -> tuple[dict[str, nn.Module], ConversionReport]:
    """(name -> layer that can be converted, an account of the others). All methods convert by this rule.

    Convertible are linear layers, GPT-2's `Conv1D` and (transposed, grouped) convolutions, at any depth, in the order in which
    modules are registered. A layer with several names is listed once. `layers`: name patterns ("encoder.*"), None is all.
    """
    account, reasons = ConversionReport(), _skip_reasons(network)
    known = {name: part for name, part in network.named_modules() if isinstance(part, CONVERTIBLE)}
    patterns = ["*"] if layers is None else layers
    check_layer_names(layers, [name for name, _ in network.named_modules()], known)
    found: dict[str, nn.Module] = {}
    for name, _ in network.named_modules():
        if name in reasons:
            account.left[name] = reasons[name]
        elif name in known and any(fnmatchcase(name, pattern) for pattern in patterns):
            found[name] = known[name]
        elif name in known:
            account.left[name] = "not selected by layers="
    if not found and needed:
        why = "; ".join(f"{name or 'it'}: {reason}" for name, reason in list(account.left.items())[:3])
        got = f"{type(network).__name__} with none that can be converted{f' ({why})' if why else ''}"
        raise ValueError(f"expected a network with a linear or convolutional layer, got {got}; use nn.Linear or Conv")
    return found, account


def check_layer_names(layers: Sequence[str] | None, names: Iterable[str], shown: Iterable[str]) -> None:
    """Raises unless `layers` is None or a list of patterns that each match a name; `shown`: those that the error lists."""
    if layers is not None and (isinstance(layers, str) or not layers):
        raise ValueError(f"expected a list of names of layers, got {layers!r}; pass layers=[...], or None for all")
    if unmatched := [each for each in layers or () if not any(fnmatchcase(name, each) for name in names)]:
        got = f"{', '.join(sorted(unmatched))}, which match no layer"
        raise ValueError(f"expected names of layers, got {got}; the network has {first_names(list(shown))}")


def convertible_copy(
    network: nn.Module, *, layers: Sequence[str] | None = None, needed: bool = True
) -> tuple[nn.Module, dict[str, nn.Module], ConversionReport]:
    """(a copy of the network with its ties, its `convertible_layers`, an account of the others), to be converted."""
    check_initialised(network)
    check_copyable(network)
    try:
        with network_lock(network):
            copied = copy.deepcopy(network)  # with ties and hooks
    except (TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
        got = f"{type(network).__name__} ({first_line(error)})"
        hint = "remove old-style weight norm, or what else makes copy.deepcopy fail"
        raise ValueError(f"expected a network that can be copied, got {got}; {hint}") from error
    found, account = convertible_layers(copied, layers=layers, needed=needed)
    _switch_fast_paths(copied, off=True)
    return copied, found, account


def restore_plain_layers(network: nn.Module) -> nn.Module:
    """Turns a converted network into one of ordinary layers, in place: weights are kept, added tensors dropped."""
    for layer in list(network.modules()):
        if isinstance(layer, ConvertedLayer):
            _restore_plain_layer(layer)
    _switch_fast_paths(network, off=False)
    return network


def fold_layers(network: nn.Module) -> nn.Module:
    """Turns a converted network into ordinary layers that compute the same, in place: added tensors are folded in."""
    # A weight that the network reads, or may read, directly stays; the folded one is stored separately.
    cuts = [layer for layer in network.modules() if isinstance(layer, ConvertedLayer)]
    _switch_fast_paths(network, off=any(layer.read_past for layer in cuts))  # torch's fast path reads weights directly
    for layer in cuts:
        read = {"weight": layer.weight, "bias": layer.bias} if layer.read_past else None
        layer.fold()
        _restore_plain_layer(layer)
        if read is not None:
            own = copy.deepcopy(layer)
            for hooks in forward_hooks_of(own):
                hooks.clear()
            for name, tensor in read.items():
                setattr(layer, name, tensor)
            convert_layer(layer, SeparateWeights).own = own
    return network


def note_direct_reads(name: str, layer: ConvertedLayer, followed: TracedCalls | None) -> str:
    """The account's remark on a layer that is not called, or whose weight is, or may be, read directly."""
    layer.read_past = followed is None or name in followed.read_directly
    if followed is None:
        return "; the forward cannot be traced and may read its weight directly"
    if name not in followed.calls:
        return "; not called in the traced forward: maybe only its weight is read"
    return "; where its weight is read directly, this has no effect" if layer.read_past else ""


def _restore_plain_layer(layer: ConvertedLayer) -> None:
    added = layer.added
    layer.__class__ = layer.plain_class  # type: ignore[assignment]
    vars(layer).pop("read_past", None)
    for name in added:
        if hasattr(layer, name):
            delattr(layer, name)


def _skip_reasons(network: nn.Module) -> dict[str, str]:
    """Name -> why a layer with parameters cannot be converted. Norm layers are not considered."""
    found: dict[str, str | None] = {}
    readers = {name: type(part).__name__ for name, part in network.named_modules() if isinstance(part, READERS)}
    for name, part in network.named_modules():
        held = any(parameter is not None for parameter in parameters_of(part).values())
        if isinstance(part, ConvertedLayer):
            raise ValueError(f"expected a plain network, got {name or 'one'} already converted; pass the original one")
        if isinstance(part, CONVERTIBLE):
            reader = next((kind for at, kind in readers.items() if name.startswith(f"{at}." if at else "")), None)
            read = reader is not None and name not in readers
            found[name] = f"{reader} reads its weight and does not call it" if read else _fault_of_layer(part)
        elif held and isinstance(part, EMBEDDINGS):
            found[name] = "an embedding: a lookup, no product"
        elif held and isinstance(part, READERS):
            found[name] = "attention: its weights are used inside its own forward"
        elif held and isinstance(part, nn.RNNBase | nn.RNNCellBase):
            found[name] = "recurrent: its weights are used inside its own forward"
        elif held and not isinstance(part, NORM_LAYERS) and not isinstance(getattr(part, "running_mean", None), Tensor):
            found[name] = f"{type(part).__name__} has its own parameters and an unknown forward"
    return {name: reason for name, reason in found.items() if reason is not None}


def _fault_of_layer(part: nn.Module) -> str | None:
    """Why a layer of a type that can be converted cannot be; None if it can."""
    kind = next(each for each in CONVERTIBLE if isinstance(part, each))
    mine = type(part)
    kind = mine if kind is TransposedLinear else kind
    if any(getattr(mine, name, None) is not getattr(kind, name, None) or name in vars(part) for name in FORWARDS):
        return f"{type(part).__name__} has its own forward"
    if not isinstance(parameters_of(part).get("weight"), Tensor):
        return "its weight is computed from others (a parametrization or weight norm)"
    if part.bias is not None and not isinstance(parameters_of(part).get("bias"), Tensor):
        return "its bias is computed from others (a parametrization)"
    return None


def _switch_fast_paths(network: nn.Module, *, off: bool) -> None:
    """Switches torch's fast path of transformer layers, which reads weights and calls no layer, off, or back to default."""
    for part in network.modules():
        if isinstance(part, nn.TransformerEncoderLayer):
            relu = part.activation is F.relu or isinstance(part.activation, nn.ReLU)
            gelu = part.activation is F.gelu or isinstance(part.activation, nn.GELU)
            part.activation_relu_or_gelu = 0 if off else 1 if relu else 2 if gelu else 0
        elif isinstance(part, nn.TransformerEncoder):  # it removes padding for the fast path of its layers
            kept = vars(part).pop(NESTED, part.use_nested_tensor)
            part.use_nested_tensor = not off and kept
            vars(part).update({NESTED: kept} if off else {})


@cache
def _converted_class(kind: type[ConvertedLayer], plain_class: type[nn.Module]) -> type[nn.Module]:
    return type(f"{kind.__name__}{plain_class.__name__}", (kind, plain_class), {"plain_class": plain_class})


def _empty_layer(kind: type[ConvertedLayer], plain_class: type[nn.Module]) -> nn.Module:
    made = _converted_class(kind, plain_class)  # type: ignore[arg-type]
    return made.__new__(made)
