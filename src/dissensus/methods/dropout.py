"""MC dropout: dropout left on at prediction (Gal & Ghahramani, ICML 2016)."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Unpack, final

import torch
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.batch import Batch
from dissensus.core.drawn_functions import DrawnFunctions, join_families
from dissensus.core.likelihood import Likelihood
from dissensus.core.member_runner import has_attention, network_lock
from dissensus.core.networks import Networks, NetworksPosterior
from dissensus.core.particles import Member, Particles, SingleMemberCache, member_index, single_member
from dissensus.core.prior import PriorKeywords
from dissensus.numerics.randomness import next_seed
from dissensus.utils.checks import fraction, integer
from dissensus.utils.tensor_tree import Tensors, named_submodules
from dissensus.utils.torch_modes import eval_mode, plain_attention

log = logging.getLogger("dissensus")

DROPOUT = nn.modules.dropout._DropoutNd
CHANNELWISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
ALPHA = (nn.AlphaDropout, nn.FeatureAlphaDropout)
WEIGHT_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)


@final
class MCDropout(NetworksPosterior):
    """One network with dropout on at prediction: each drawn function has one dropout mask, fixed for all inputs.

    In training every example has its own mask. At prediction batch norm is in eval mode.

    Args:
        networks: one module, not copied, or a list of M; each network gives `samples` functions.
        rate: None uses the network's own dropout modules. A number inserts dropout before every linear and
            convolutional layer except the first, in training and in prediction; the caller's module is not changed.
            Before convolutions whole channels are dropped, so a drawn function is the network with some rows of its
            weights removed.
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
        samples: int = 30,
        likelihood: Likelihood | None = None,
        **prior: Unpack[PriorKeywords],
    ) -> None:
        super().__init__(networks, likelihood=likelihood, **prior)
        self.rate = rate if rate is None else fraction("rate", rate, hint="0.1 is a usual one")
        self.samples = integer("samples", samples)
        # Seed of the stored draw; −1 if none is stored.
        self.register_buffer("seed", torch.tensor(-1, dtype=torch.int64))
        self.sites = dropout_sites(self.particles.template.network, rate)
        self._apart = SingleMemberCache()

    def member_loss(self, params: Tensors, buffers: Tensors, batch: Batch) -> tuple[Tensor, Any, Tensors]:
        if self.rate is None or not self.training:  # only the network's own dropout modules act
            return super().member_loss(params, buffers, batch)

        def drop_units(key: str, tensor: Tensor) -> Tensor:  # training: a new mask for every example
            name = key.rpartition("#")[0]
            keep = torch.rand(len(tensor), *mask_shape(layers[name], tensor), device=tensor.device) >= self.sites[name]
            return apply_mask(layers[name], tensor, keep, self.sites[name])

        def nll(member: Member) -> Tensor:
            with change_at_sites(member.network, self.sites, drop_units):
                return member.nll(batch)

        layers = dict(self.particles.template.network.named_modules())
        value, buffers = self.particles.call(nll, params, buffers)
        return value + self.penalty(params), (), buffers

    def draw(self) -> DrawnFunctions:
        seed = int(self.seed) if int(self.seed) >= 0 else next_seed()
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
        self.particles = particles
        self.rows = rows or slice(0, samples)
        self.members = self.rows.stop - self.rows.start
        self.seed = seed
        self.sites = sites
        self.masks = Masks(particles.template.network, sites, samples, seed)
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
            return particles.call(self._with_masks(function), *particles.member_tensors(0), mine, *args)[0]

    def _with_masks(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """function(member, *args), as a function that takes the masks before args."""

        def run_masked(member: Member, keep: Tensors, *args: Any) -> Any:
            with change_at_sites(
                member.network, self.sites, lambda key, tensor: self.masks.apply_at_site(key, tensor, keep[key])
            ):
                return function(member, *args)

        return run_masked

    def _masks(self, function: Callable[..., Any], *args: Any) -> Tensors:
        """Site and call -> masks (M, *features) of the sites that function passes; it is run once per input shape."""
        shapes = tuple(tuple(tensor.shape[1:]) for x in args for tensor in batches.input_tensors(x))
        if shapes not in self._known_masks:
            met: Tensors = {}

            def note_mask(key: str, tensor: Tensor) -> Tensor:
                keep = self.masks.site_masks(key, tensor)
                met[key] = keep if self.members == len(keep) else keep[self.rows]
                return tensor

            def run(member: Member) -> Any:
                with change_at_sites(member.network, self.sites, note_mask):
                    return function(member, *args)

            particles = self.particles
            with torch.no_grad():
                particles.call(run, *particles.member_tensors(0))
            if not met:
                got = f"none of {', '.join(self.sites)} called: all functions would be equal"
                raise ValueError(f"expected a network whose forward calls its dropout modules, got {got}")
            self._known_masks[shapes] = met
        return self._known_masks[shapes]

    def member(self, index: int) -> nn.Module:
        network = self.particles.member(0)
        masks = Masks(network, self.sites, self.masks.members, self.masks.seed)
        return DropoutNetwork(network, masks, self.rows.start + member_index(index, self.members))

    def build_subset(self, rows: slice) -> DrawnFunctions:
        mine = slice(self.rows.start + rows.start, self.rows.start + rows.stop)
        return DropoutFunctions(self.particles, self.sites, self.masks.members, self.seed, mine)


class DropoutNetwork(nn.Module):
    """One drawn function: the network in eval mode with one fixed set of units dropped."""

    def __init__(self, network: nn.Module, masks: "Masks", index: int) -> None:
        super().__init__()
        self.network = network.eval()
        self.masks = masks
        self.index = index

    def train(self, mode: bool = True) -> "DropoutNetwork":
        self.training = mode  # the function is fixed in either mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        def change(key: str, tensor: Tensor) -> Tensor:
            return self.masks.apply_at_site(key, tensor, self.masks.site_masks(key, tensor)[self.index])

        # Hooks come and go with every call.
        with network_lock(self.network), change_at_sites(self.network, self.masks.sites, change):
            outputs: Tensor = self.network(*args, **kwargs)
        return outputs


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
        use = "use nn.Dropout in the network, or pass rate= to insert dropout"
        advice = f"functional dropout (F.dropout) has no module to switch on: {use}"
        raise ValueError(f"expected a network with dropout modules of positive rate, got none{hint}; {advice}")
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
    """Inside, tensors at sites become `change("layer#call", tensor)`: outputs of dropout modules, inputs of weight layers."""
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
        # The fast path of attention calls no submodule.
        with plain_attention() if has_attention(network) else nullcontext():
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
