"""MC dropout: dropout left on at prediction (Gal & Ghahramani, ICML 2016)."""

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Unpack, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.batch import Batch
from dissensus.core.drawn_functions import DrawnFunctions, join_families
from dissensus.core.member_runner import ATTENTION, network_lock
from dissensus.core.networks import MethodKeywords, Networks, NetworksPosterior
from dissensus.core.particles import Member, Particles, SingleMemberCache, member_index, single_member
from dissensus.kernels.layer_overrides import LayerOverrides
from dissensus.layers.conversion import check_layer_names
from dissensus.numerics.randomness import next_seed
from dissensus.utils.checks import fraction, integer
from dissensus.utils.tensor_tree import Tensors
from dissensus.utils.torch_modes import eval_mode, plain_attention, set_attributes
from dissensus.utils.torch_private import ConvNd, DropoutNd, named_submodules, replace_globals

log = logging.getLogger("dissensus")

CHANNELWISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
ALPHA = (nn.AlphaDropout, nn.FeatureAlphaDropout)
WEIGHT_LAYERS = (nn.Linear, ConvNd)
FUNCTIONS = {
    F.dropout: nn.Dropout, F.dropout1d: nn.Dropout1d, F.dropout2d: nn.Dropout2d, F.dropout3d: nn.Dropout3d,
    F.alpha_dropout: nn.AlphaDropout, F.feature_alpha_dropout: nn.FeatureAlphaDropout,
}  # fmt: skip
FUNCTIONAL = "functional dropout"  # the site of all functional dropout: calls are numbered in their order

Change = Callable[[str, Tensor, nn.Module, float], Tensor]  # ("layer#call", tensor, layer, rate) -> what it becomes


@final
class MCDropout(NetworksPosterior):
    """One network with dropout on at prediction: each drawn function has one dropout mask, fixed for all inputs.

    In training every example has its own mask. At prediction batch norm is in eval mode, and all is dropped that the network
    drops in training: by dropout modules, by drop-path (whole branches), and by functions (`F.dropout`, attention's
    `dropout_p`) in modules that hold the rate (`self.dropout = 0.1`). Recurrent layers drop nothing, with a warning.

    Args:
        networks: one module, not copied, or a list of M; each network gives `samples` functions.
        rate: None uses the network's own dropout. A number inserts dropout before every linear and convolutional layer
            except the first, in training and in prediction; the caller's module is not changed. Before convolutions whole
            channels are dropped, so a drawn function is the network with some rows of its weights removed.
        layers: name patterns of the modules that drop in prediction ("head.*"), or before which `rate` inserts dropout; None
            is all (`posterior.sites`). In training the network's own dropout acts everywhere.
        samples: functions per network and draw.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """

    name = "mc_dropout"
    draw_only_settings = ("samples",)
    seed: Tensor

    def __init__(
        self,
        networks: Networks,
        *,
        rate: float | None = None,
        layers: Sequence[str] | None = None,
        samples: int = 30,
        **prior: Unpack[MethodKeywords],
    ) -> None:
        super().__init__(networks, **prior)
        self.rate = rate if rate is None else fraction("rate", rate, hint="0.1 is a usual one")
        self.layers = layers
        self.samples = integer("samples", samples)
        # Seed of the stored draw; −1 if none is stored.
        self.register_buffer("seed", torch.tensor(-1, dtype=torch.int64))
        self.sites = dropout_sites(self.particles.template.network, rate, layers)
        self._apart = SingleMemberCache()

    def member_loss(self, params: Tensors, buffers: Tensors, batch: Batch) -> tuple[Tensor, Any, Tensors]:
        if self.rate is None or not self.training:  # only the network's own dropout acts
            return super().member_loss(params, buffers, batch)

        def drop_units(_: str, tensor: Tensor, layer: nn.Module, rate: float) -> Tensor:  # every example has a new mask
            keep = torch.rand(len(tensor), *mask_shape(layer, tensor), device=tensor.device) >= rate
            return apply_mask(layer, tensor, keep, rate)

        def nll(member: Member) -> Tensor:
            with change_at_sites(member.network, self.sites, drop_units):
                return member.nll(batch)

        value, buffers = self.particles.call(nll, params, buffers)
        return value + self.penalty(params), (), buffers

    @property
    def _rates(self) -> dict[str, float]:
        network = self.particles.template.network  # whose own rates may have been changed
        return {n: held_rate(network.get_submodule(n)) if self.rate is None else self.rate for n in self.sites}

    def draw(self) -> DrawnFunctions:
        seed = int(self.seed) if int(self.seed) >= 0 else next_seed()
        self.sites = self._rates
        particles, several = self.particles, self.particles.members > 1
        each = [single_member(particles, m) if several else self._apart(particles) for m in range(particles.members)]
        return join_families(DropoutFunctions(one, self.sites, self.samples, seed + m) for m, one in enumerate(each))

    def store_draw(self, loader: Iterable[Any]) -> None:
        # Batch statistics from training are kept: one function's masks change them too little to re-estimate.
        self.seed.fill_(next_seed())


class DropoutFunctions(DrawnFunctions):
    """M functions of one network, each with its own dropout masks. Masks are computed from a seed and not stored."""

    def __init__(
        self, particles: Particles, sites: dict[str, float], samples: int, seed: int, rows: slice | None = None
    ) -> None:
        """`rows`: which of the samples these are; None for all."""
        super().__init__()
        self.particles, self.sites, self.seed = particles, sites, seed
        self.rows = rows or slice(0, samples)
        self.members, self.masks = self.rows.stop - self.rows.start, Masks(sites, samples, seed)
        self._known_masks: dict[tuple[Any, ...], Tensors] = {}
        self.training = False  # the functions are fixed: the network's own dropout is off, masks are applied by hand

    def map_members(self, function: Callable[..., Any], *args: Any) -> Any:
        dropped = self._with_masks(function)
        with self.particles.lock_network(), eval_mode(self.particles, self.particles.template):
            return self.particles.map_members(dropped, *args, varying=self._masks(function, *args), how="vectorised")

    def call_member(self, index: int, function: Callable[..., Any], *args: Any) -> Any:
        particles = self.particles
        with particles.lock_network(), eval_mode(particles, particles.template):
            mine = {key: keep[index] for key, keep in self._masks(function, *args).items()}
            return particles.call_first(self._with_masks(function), mine, *args)

    def _with_masks(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """function(member, *args), as a function that takes the masks before args."""

        def run_masked(member: Member, keep: Tensors, *args: Any) -> Any:
            def drop_units(key: str, tensor: Tensor, layer: nn.Module, rate: float) -> Tensor:
                return apply_mask(layer, tensor, keep[key], rate)

            with change_at_sites(member.network, self.sites, drop_units):
                return function(member, *args)

        return run_masked

    def _masks(self, function: Callable[..., Any], *args: Any) -> Tensors:
        """Site and call -> masks (M, *features) of the sites that function passes; it is run once per input shape."""
        shapes = tuple(tuple(tensor.shape[1:]) for x in args for tensor in batches.input_tensors(x))
        if any(isinstance(length, torch.SymInt) for shape in shapes for length in shape):
            got = "dynamic axes; export without dynamic="
            raise ValueError(f"expected inputs of one shape for dropout masks, got {got}")
        if shapes not in self._known_masks:
            met: Tensors = {}

            def note_mask(key: str, tensor: Tensor, layer: nn.Module, rate: float) -> Tensor:
                keep = self.masks.site_masks(key, tensor, layer, rate)
                met[key] = keep if self.members == len(keep) else keep[self.rows]
                return tensor

            def run(member: Member) -> Any:
                with change_at_sites(member.network, self.sites, note_mask):
                    return function(member, *args)

            with torch.no_grad():
                self.particles.call_first(run)
            if not met:
                got = f"none of {', '.join(self.sites)} called: all functions would be equal"
                raise ValueError(f"expected a network whose forward calls its dropout modules, got {got}")
            self._known_masks[shapes] = met
        return self._known_masks[shapes]

    def member(self, index: int) -> nn.Module:
        network = self.particles.member(0)
        masks = Masks(self.sites, self.masks.members, self.masks.seed)
        return DropoutNetwork(network, masks, self.rows.start + member_index(index, self.members))

    def build_subset(self, rows: slice) -> DrawnFunctions:
        mine = slice(self.rows.start + rows.start, self.rows.start + rows.stop)
        return DropoutFunctions(self.particles, self.sites, self.masks.members, self.seed, mine)


class DropoutNetwork(nn.Module):
    """One drawn function: the network in eval mode with one fixed set of units dropped."""

    def __init__(self, network: nn.Module, masks: "Masks", index: int) -> None:
        super().__init__()
        self.network, self.masks, self.index = network.eval(), masks, index

    def train(self, mode: bool = True) -> "DropoutNetwork":
        self.training = mode  # the function is fixed in either mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        def change(key: str, tensor: Tensor, layer: nn.Module, rate: float) -> Tensor:
            return apply_mask(layer, tensor, self.masks.site_masks(key, tensor, layer, rate)[self.index], rate)

        # Hooks come and go with every call.
        with network_lock(self.network), change_at_sites(self.network, self.masks.sites, change):
            outputs: Tensor = self.network(*args, **kwargs)
        return outputs


def dropout_sites(network: nn.Module, rate: float | None, layers: Sequence[str] | None = None) -> dict[str, float]:
    """Layer name -> dropout rate. `rate=None`: what drops by itself; else all weight layers except the first."""
    parts = list(network.named_modules())
    rates = {name: held_rate(part) for name, part in parts}
    dropping = [(name, part) for name, part in parts if rates[name] > 0]
    modules = {name: rates[name] for name, part in dropping if isinstance(part, DropoutNd)}
    if rate is None:
        if recurrent := [name for name, part in parts if isinstance(part, nn.RNNBase) and part.dropout]:
            log.warning("dropout inside recurrent layers (%s) stays off in prediction", ", ".join(recurrent))
        if not dropping:
            use = "use nn.Dropout, hold the rate of F.dropout as a number (self.dropout = 0.1), or pass rate= to insert it"
            raise ValueError(f"expected a network that drops at a positive rate, got none; {use}")
        sites = modules | {name: rates[name] for name, _ in dropping}
    else:
        if modules:
            got = ", ".join(modules)
            raise ValueError(f"expected a network without dropout if rate is given, got {got}; pass rate=None")
        weighted = [name for name, module in parts if isinstance(module, WEIGHT_LAYERS)]
        if len(weighted) < 2:
            got = f"{len(weighted)}; put nn.Dropout into the network yourself"
            raise ValueError(f"expected at least two linear or convolutional layers for dropout between, got {got}")
        sites = dict.fromkeys(weighted[1:], rate)
    check_layer_names(layers, sites, sites)
    return {name: p for name, p in sites.items() if layers is None or any(fnmatchcase(name, each) for each in layers)}


def held_rate(part: nn.Module) -> float:
    """The rate at which a module drops its output, or that it holds for functional dropout in its forward; 0 if none."""
    if isinstance(part, DropoutNd):
        return part.p
    if is_drop_path(part):
        return float(vars(part).get("drop_prob") or vars(part).get("p") or 0.0)
    if isinstance(part, (nn.RNNBase, *WEIGHT_LAYERS)):
        return 0.0
    numbers = {name: value for name, value in vars(part).items() if "drop" in name and isinstance(value, float)}
    if any(value > 0 for name, value in numbers.items() if re.search("layer_?drop", name)):
        return 0.0  # in training mode it would skip layers by random numbers that nobody can fix
    held = [value for name, value in numbers.items() if not re.search("path|layer_?drop|drop_prob", name)]
    if "attention" in type(part).__name__.lower():  # which reads the rate of a module that it does not call
        held += [child.p for child in part.children() if isinstance(child, DropoutNd)]
    return max((value for value in held if value < 1), default=0.0)


def is_drop_path(part: nn.Module) -> bool:
    """Whether a module drops whole branches: drop-path of timm, torchvision or transformers, found by the class's name."""
    return type(part).__name__.endswith(("DropPath", "StochasticDepth"))


@contextmanager
def change_at_sites(network: nn.Module, sites: dict[str, float], change: Change) -> Iterator[None]:
    """Inside, tensors at sites are changed: outputs of modules that drop, inputs of weight layers, and functional dropout."""
    calls: Counter[str] = Counter()
    modules = {path.removesuffix("."): part for path, part in named_submodules(network)}

    def change_next(name: str, tensor: Tensor, layer: nn.Module, rate: float) -> Tensor:
        calls[name] += 1
        return change(f"{name}#{calls[name] - 1}", tensor, layer, rate)

    def hook(name: str, part: nn.Module, rate: float) -> Any:
        if isinstance(part, DropoutNd) or is_drop_path(part):
            return part.register_forward_hook(lambda _, __, output: change_next(name, output, part, rate))
        if isinstance(part, WEIGHT_LAYERS):
            return part.register_forward_pre_hook(lambda _, x: (change_next(name, x[0], part, rate), *x[1:]))
        functional.append(name)
        return set_attributes(part, training=True)  # in which functional dropout acts; submodules keep their own mode

    functional: list[str] = []
    with ExitStack() as changed:
        for name, rate in sites.items():
            changed.enter_context(hook(name, modules[name], rate))
        if any(isinstance(each, ATTENTION) for each in modules.values()):
            changed.enter_context(plain_attention())  # its fast path calls no submodule
        if functional:
            changed.enter_context(functional_dropout(change_next))
        yield


def functional_dropout(change: Change) -> LayerOverrides:
    """Inside, what functional dropout of a positive rate would drop is changed instead, attention weights included."""

    def drop(function: Any, input: Tensor, p: float = 0.5, training: bool = True, *rest: Any, **more: Any) -> Any:
        if training and p > 0:
            return change(FUNCTIONAL, input, FUNCTIONS[function](p), p)
        return function(input, p, training, *rest, **more)

    def attend(function: Any, query: Any, key: Any, value: Any, *rest: Any, **given: Any) -> Any:
        given |= dict(zip(("attn_mask", "dropout_p", "is_causal"), rest, strict=False))
        if not (rate := given.pop("dropout_p", 0.0)):
            return function(query, key, value, **given)
        one_hot = torch.eye(key.shape[-2], dtype=value.dtype, device=value.device).expand(*key.shape[:-1], -1)
        weights = function(query, key, one_hot, **given)  # (..., H, T, S)
        if given.get("enable_gqa"):
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
        return change(FUNCTIONAL, weights, nn.Dropout(rate), rate) @ value

    def attend_by_heads(function: Any, *args: Any, **kwargs: Any) -> Any:
        # torch runs a function's body outside of the mode: this one is run with its calls exchanged.
        heads = args[4]
        inner = {
            "has_torch_function": lambda _: False,
            "scaled_dot_product_attention": partial(attend, F.scaled_dot_product_attention),
            "dropout": lambda x, p: drop(F.dropout, x.unflatten(0, (-1, heads)), p).flatten(0, 1),
        }
        return replace_globals(function, inner)(*args, **kwargs)

    attention = {F.scaled_dot_product_attention: attend, F.multi_head_attention_forward: attend_by_heads}
    return LayerOverrides(dict.fromkeys(FUNCTIONS, drop) | attention)


def mask_shape(layer: nn.Module, tensor: Tensor) -> tuple[int, ...]:
    """Shape of one example's mask: every unit; whole channels for channel-wise dropout and before convolutions; a branch."""
    if is_drop_path(layer):
        return (1,) * (tensor.ndim - 1)
    whole = isinstance(layer, (*CHANNELWISE, ConvNd)) and tensor.ndim > 2
    return (tensor.shape[1], *[1] * (tensor.ndim - 2)) if whole else tuple(tensor.shape[1:])


def apply_mask(layer: nn.Module, tensor: Tensor, keep: Tensor, rate: float) -> Tensor:
    """tensor with dropped units set to 0 and the others scaled up; alpha dropout keeps mean and variance."""
    if isinstance(layer, ALPHA):
        # Klambauer et al. 2017: dropped units are set to α' = −λα; a, b restore zero mean and unit variance.
        alpha = -1.7580993408473766
        a = 1 / math.sqrt((1 - rate) * (1 + rate * alpha**2))
        return a * torch.where(keep, tensor, alpha) - a * alpha * rate
    return torch.where(keep, tensor / (1 - rate) if getattr(layer, "scale_by_keep", True) else tensor, 0.0)


class Masks:
    """M masks per site computed from one seed: the same on every device, made at the first call of a site."""

    def __init__(self, sites: dict[str, float], members: int, seed: int) -> None:
        self.sites, self.members, self.seed = sites, members, seed
        self._numbers = {name: number for number, name in enumerate([*sites, FUNCTIONAL])}
        self._made: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def site_masks(self, key: str, tensor: Tensor, layer: nn.Module, rate: float) -> Tensor:
        """(M, *features) boolean masks of the site `key`, True where a unit is kept."""
        name, _, call = key.rpartition("#")
        shape = mask_shape(layer, tensor)
        if (key, shape) not in self._made:
            # One generator per site and call, on the host: masks do not depend on the order of calls or on the device.
            stream = (self.seed + 1_000_003 * self._numbers[name] + 7_919 * int(call)) % 2**63
            keep = torch.rand(self.members, *shape, generator=torch.Generator().manual_seed(stream)) >= rate
            self._made[key, shape] = keep.to(tensor.device)
        return self._made[key, shape]
