"""One network or many: the first argument of a method, the particles made from it, and base classes that hold them."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import Tensor, nn

from dissensus.core.drawn_functions import DrawnFunctions, MemberFunctions
from dissensus.core.likelihood import Classification, Likelihood
from dissensus.core.member import PREFIX, check_initialised, tensors_by_name
from dissensus.core.particles import Particles
from dissensus.core.posterior import Posterior
from dissensus.core.prior import PriorKeywords
from dissensus.core.weights import network_parameters
from dissensus.utils.checks import integer
from dissensus.utils.module_state import deepcopy_memo
from dissensus.utils.sharding import check_copyable, gather_full_tensor, is_divided
from dissensus.utils.shared_tensors import make_from_base, memory_place
from dissensus.utils.tensor_tree import Tensors

Networks = nn.Module | Sequence[nn.Module] | Particles
MemberSource = Sequence[nn.Module] | Callable[..., nn.Module]


class NetworksPosterior(Posterior):
    """Base class of methods of one network, or of each of a list; arguments as in `MAP`, which trains them as usual."""

    networks_taken = "any"

    def __init__(
        self,
        networks: Networks,
        *,
        likelihood: Likelihood | None = None,
        latents: nn.Module | None = None,
        **prior: Unpack[PriorKeywords],
    ) -> None:
        if not isinstance(networks, Iterable) or (
            isinstance(networks, nn.Module) and not isinstance(networks, nn.ModuleList)
        ):
            particles = Particles.wrap_network(networks, likelihood or Classification(), latents)
        else:
            each = None if latents is None else [copy.deepcopy(latents) for _ in networks]
            particles = stack_members(networks, likelihood, each)
        super().__init__(particles, **prior)

    def draw(self) -> DrawnFunctions:
        return MemberFunctions(self.particles)

    def config(self) -> dict[str, Any]:
        held, members = self.particles.shared is self.particles.template, self.particles.members
        networks = {"networks": None} if held else {"networks": members, "once": self.particles.stored_once}
        return {**networks, **super().config()}

    @classmethod
    def skeleton(cls, network: nn.Module, config: dict[str, Any], likelihood: Likelihood) -> Self:
        networks: Any = network
        if config["networks"] is not None and not isinstance(network, Particles):
            once = config["once"]
            frozen = [name for name in once if once[name]]
            networks = placeholders(network, config["networks"], frozen)
            if cls.plain_network is Posterior.plain_network:  # else the method converts each network
                networks = Particles.stack(networks, likelihood, own=lambda name: name not in once, frozen=frozen)
        settings = {key: value for key, value in config.items() if key not in ("networks", "once")}
        return super().skeleton(networks, settings, likelihood)


class StoringPosterior(Posterior, ABC):
    """Base class of posteriors with a draw in `stored`: functions drawn once, after training, saved and loaded with it.

    Loading a state replaces the draw by the state's, or removes it.
    """

    draw_only_settings: ClassVar[tuple[str, ...]] = ("samples", "stored")
    stored: nn.Module | None
    draw_attributes: ClassVar[tuple[str, ...]] = ("stored",)  # attributes that are set and removed with the draw

    @abstractmethod
    def draw_sizes(self, state: Tensors | None = None) -> list[int] | bool | None:
        """What `config` says of the stored draw, of the posterior or of a state of it; false if there is none."""

    @abstractmethod
    def blank_draw(self, sizes: Any, state: Tensors) -> nn.Module:
        """A draw of these sizes, to be filled from this state of the posterior, or from a file (an empty state)."""

    def frozen_names(self) -> list[str]:
        """Names of the networks' frozen parameters."""
        stored = network_parameters(self.particles).stored
        return [name for name, parameter in stored.items() if not parameter.requires_grad]

    def config(self) -> dict[str, Any]:
        return {**super().config(), "stored": self.draw_sizes(), "frozen": self.frozen_names()}

    @classmethod
    def skeleton(cls, network: nn.Module, config: dict[str, Any], likelihood: Likelihood) -> Self:
        for name, parameter in network.named_parameters():
            if "frozen" in config and not isinstance(network, Particles) and parameter.is_floating_point():
                parameter.requires_grad_(name not in config["frozen"])
        settings = {key: value for key, value in config.items() if key not in ("stored", "frozen")}
        posterior = super().skeleton(network, settings, likelihood)
        if config.get("stored"):
            posterior.stored = posterior.blank_draw(config["stored"], {})
        return posterior

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        state = {key.removeprefix(prefix): state_dict[key] for key in state_dict if key.startswith(prefix)}
        for part in self.draw_attributes:
            setattr(self, part, None)
        if any(key.startswith("stored.") for key in state):
            self.stored = self.blank_draw(self.draw_sizes(state), state)
        else:  # the state has no draw: remove everything that belongs to it
            for key in state:
                if key.partition(".")[0] in self.draw_attributes:
                    del state_dict[f"{prefix}{key}"]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class MethodKeywords(PriorKeywords, total=False):
    """Keywords of methods that take networks, explained in `Posterior`."""

    likelihood: Likelihood | None


class MemberKeywords(MethodKeywords, total=False):
    """Further keywords of methods with M stored members, explained in `DeepEnsemble`."""

    members: int | None
    base: nn.Module | None


class StackedPosterior(Posterior):
    """Base class of methods with M stored members; arguments as in `DeepEnsemble`, which trains each as it would alone."""

    networks_taken = "several"

    def __init__(
        self,
        networks: MemberSource,
        *,
        members: int | None = None,
        base: nn.Module | None = None,
        likelihood: Likelihood | None = None,
        **prior: Unpack[PriorKeywords],
    ) -> None:
        super().__init__(stack_members(make_members(networks, members, base), likelihood), **prior)

    def draw(self) -> DrawnFunctions:
        return MemberFunctions(self.particles)

    def config(self) -> dict[str, Any]:
        once = [name for name, frozen in self.particles.stored_once.items() if frozen]
        return {"members": self.particles.members, **({"once": once} if once else {}), **super().config()}

    @classmethod
    def skeleton(cls, network: nn.Module, config: dict[str, Any], likelihood: Likelihood) -> Self:
        settings = {key: value for key, value in config.items() if key not in ("members", "once")}
        networks: Any = placeholders(network, config["members"], config.get("once", ()))
        return super().skeleton(networks, settings, likelihood)


def make_members(networks: MemberSource, members: int | None, base: nn.Module | None = None) -> Sequence[nn.Module]:
    """The given networks, or `members` networks made by the given function, each from a copy of `base` with its tensors."""
    makes = callable(networks) and not isinstance(networks, nn.Module)
    if makes != (members is not None) or not (base is None or (makes and isinstance(base, nn.Module))):
        given = f"members={members}" + ("" if base is None else f" and base={type(base).__name__}")
        got = f"{given} with {type(networks).__name__}"
        advice = "pass DeepEnsemble([a, b, c]) or DeepEnsemble(make, members=3)"
        raise ValueError(f"expected a list of networks, or a function that makes one and members=, got {got}; {advice}")
    if not callable(networks) or isinstance(networks, nn.Module):
        return networks  # type: ignore[return-value]
    count = integer("members", members)
    return [networks() for _ in range(count)] if base is None else make_from_base(networks, base, count)


def networks_to_convert(networks: Any) -> tuple[list[nn.Module], bool]:
    """(networks, whether one was given by itself) for a method that changes layers."""
    if isinstance(networks, Particles):
        raise TypeError("expected networks, got the members of another posterior; train this method on its own")
    one = isinstance(networks, nn.Module) and not isinstance(networks, nn.ModuleList)
    return [networks] if one else list(networks), one


def stack_members(
    networks: Sequence[nn.Module] | nn.ModuleList,
    likelihood: Likelihood | None,
    latents: Sequence[nn.Module] | None = None,
) -> Particles:
    """M networks of one architecture, checked and copied into a stack, with the latents of each."""
    if isinstance(networks, nn.Module) and not isinstance(networks, nn.ModuleList):
        raise TypeError("expected a sequence of modules, got one module; pass [make() for _ in range(M)], or use MAP")
    networks = list(networks)
    if not networks:
        raise ValueError("expected at least one module, got none; pass [make() for _ in range(M)]")
    for network in networks:
        check_initialised(network)
        check_copyable(network)
    check_same_architecture(networks)
    check_distinct_weights(networks)
    return Particles.stack(networks, likelihood or Classification(), latents=latents)


def check_same_architecture(networks: Sequence[nn.Module]) -> None:
    """Raises if the networks do not have one architecture."""
    first = _signature(networks[0])
    for i, network in enumerate(networks[1:], start=1):
        other = _signature(network)
        for name in {**first, **other} if other != first else ():
            if (one := first.get(name, "absent")) != (two := other.get(name, "absent")):
                got = f"{name}: {one} in member 0, {two} in member {i}; build all members the same way"
                raise ValueError(f"expected members of one architecture, got {got}")


def _signature(network: nn.Module) -> dict[str, str]:
    """What must be equal in all members: layers with their settings, tensors with shape, dtype, ties and requires_grad."""
    described = {f"layer '{name}'": f"{type(m).__name__}({m.extra_repr()})" for name, m in network.named_modules()}
    first_name: dict[int, str] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        tied = first_name.setdefault(id(parameter), name)
        marks = ("" if parameter.requires_grad else " frozen") + ("" if tied == name else f" tied to {tied}")
        described[f"parameter '{name}'"] = f"{tuple(parameter.shape)} {parameter.dtype}{marks}"
    for name, buffer in network.named_buffers():
        described[f"buffer '{name}'"] = f"{tuple(buffer.shape)} {buffer.dtype}"
    return described


def check_distinct_weights(networks: Sequence[nn.Module]) -> None:
    """Raises if two members start at exactly the same trainable weights, because they would stay equal."""
    trained = [[_numbers(p.detach()) for p in n.parameters() if p.requires_grad] for n in networks]
    flat = [torch.cat(each or [torch.empty(0)]) for each in trained]
    alike: dict[complex, list[int]] = {}  # by sums, which are equal for equal vectors, so that few pairs are compared
    for i, vector in enumerate(flat):
        others = alike.setdefault(vector.sum().item(), [])
        for j in others:
            if vector.numel() and torch.equal(vector, flat[j]):
                fix = "initialise each one separately, [make() for _ in range(M)], instead of copying one"
                got = f"members {j} and {i} equal; {fix}"
                raise ValueError(f"expected members that start at different weights, got {got}")
        others.append(i)


def _numbers(parameter: Tensor) -> Tensor:
    """(K,) its entries; where processes have parts of it, their sum: networks are never whole together."""
    return gather_full_tensor(parameter).sum()[None] if is_divided(parameter) else parameter.flatten()


def placeholders(network: nn.Module, members: int, once: Iterable[str] = ()) -> list[nn.Module]:
    """Copies of one network with distinct placeholder values, to be overwritten from a file; only persistent tensors
    change. `once`: names of a member's tensors that all copies share, frozen."""
    memo, held = deepcopy_memo(network), tensors_by_name(network)
    for tensor in (held[name.removeprefix(PREFIX)] for name in once if name.removeprefix(PREFIX) in held):
        memo[id(tensor)] = tensor.requires_grad_(False) if isinstance(tensor, nn.Parameter) else tensor
    shared = {memory_place(tensor) for tensor in memo.values()}
    copies = [copy.deepcopy(network, dict(memo)) for _ in range(members)]
    with torch.no_grad():
        for i, each in enumerate(copies):
            for tensor in each.state_dict().values():
                if memory_place(tensor) not in shared:
                    tensor.fill_(i)
    return copies
