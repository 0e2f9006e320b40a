"""Drawn functions: M fixed functions drawn from a posterior."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self, TypeVar, final

import torch
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.batch import Inputs
from dissensus.core.calibrated import Correction
from dissensus.core.likelihood import Likelihood
from dissensus.core.member_runner import stack_trees
from dissensus.core.particles import Member, Particles, member_index, member_subset
from dissensus.core.predictive import Predictive
from dissensus.utils.tensor_tree import Cache
from dissensus.utils.torch_private import children_of, is_traced, pytree

Found = TypeVar("Found")
FEW = 8  # members of any kind that are quicker one by one than by vmap, without tensors to put in place
# Before 2.12 torch can export vmap, but cannot save the result: the graph calls a function without a name.
LOOPS_IN_EXPORTS = torch.__version__ < "2.12"  # compared once: that takes as long as a layer
MOMENTS = ("mean", "total", "aleatoric", "epistemic")  # outputs of a predictor


class DrawnFunctions(nn.Module, ABC):
    """Base class of the result of `draw`: M fixed functions in one module, (B, *in) -> (M, B, *out)."""

    members: int
    networks: int = 1  # number of networks; each has the same number of functions, in order
    particles: Particles  # the tensors of the functions
    seed: int = 0  # together with the tensors it determines the functions
    # Whether a function given to `map_members` may run the network on several inputs in turn, if that writes no attributes.
    runs_parts: ClassVar[bool] = False

    @abstractmethod
    def map_members(self, function: Callable[..., Any], *args: Any) -> Any:
        """function(member, *args) of each drawn function, stacked along a new first axis."""

    @abstractmethod
    def member(self, index: int) -> nn.Module:
        """One function as an ordinary module."""

    @final
    def function_subset(self, rows: slice) -> "DrawnFunctions | None":
        """Some of the functions, at least one, with the same tensors; None where they cannot be had apart from the others."""
        found = self.build_subset(rows)
        return found if type(found) is type(self) else None  # a subclass says itself how it is cut

    def build_subset(self, rows: slice) -> "DrawnFunctions | None":
        """What `part` gives; None for a kind that does not say how."""
        return None

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of the functions' outputs."""
        return self.particles.templates[0].likelihood

    def forward(self, x: Inputs) -> Tensor:
        with batches.UnchangedInputs(x):
            # (M, B, ...); x is passed on, since dropout masks depend on its shape
            outputs: Tensor = self.map_members(lambda member, x: batches.call_network(member.network, x), x)
        return outputs

    def predict(self, x: Inputs) -> Predictive:
        """The `Predictive` of the functions' mixture at inputs x (B, ...), not calibrated."""
        inputs, described = batches.UnchangedInputs(x), self.describe(x)
        inputs.__exit__()
        return self.likelihood.predictive(*described)

    def call_member(self, index: int, function: Callable[..., Any], *args: Any) -> Any:
        """function(member, *args) of one drawn function."""
        raise NotImplementedError

    def predict_parts(self, x: Inputs) -> Iterator[Predictive]:
        """The mixture in parts of a few functions each; if functions run in a loop, memory does not grow with M."""
        if self.particles.how == "vectorised" or type(self).call_member is DrawnFunctions.call_member:
            yield self.predict(x)
            return
        for i in range(self.members):
            with batches.UnchangedInputs(x):
                described = self.call_member(i, describe_outputs, x)
            yield self.likelihood.predictive(*(tensor[None] for tensor in described))

    def describe(self, *parts: Inputs) -> tuple[Tensor, ...]:
        """The likelihood's description of each function's outputs, each tensor (M, B, ...); the network sees parts apart."""
        if len(parts) == 1 or (self.runs_parts and not self.particles.may_write_attributes):
            return self.map_members(describe_outputs, *parts)
        return tuple(torch.cat(each, 1) for each in zip(*map(self.describe, parts), strict=True))


class MemberFunctions(DrawnFunctions):
    """The stored members themselves: the draw of every method that stores members."""

    ordinary: Callable[[nn.Module], nn.Module] | None
    runs_parts = True

    def __init__(self, particles: Particles, *, ordinary: Callable[[nn.Module], nn.Module] | None = None) -> None:
        """`ordinary`: turns a member's network with cut layers into an ordinary one; None if no layer is cut."""
        super().__init__()
        # Not by nn.Module.__setattr__, which takes as long as a small network.
        children_of(self)["particles"] = particles
        settings = {"particles": particles, "ordinary": ordinary, "training": particles.training}
        vars(self).update(settings, members=particles.members, networks=particles.members)

    def map_members(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.particles.map_members(function, *args)

    def call_member(self, index: int, function: Callable[..., Any], *args: Any) -> Any:
        return self.particles.call(function, *self.particles.member_tensors(index), *args)[0]

    def build_subset(self, rows: slice) -> DrawnFunctions:
        return MemberFunctions(member_subset(self.particles, rows), ordinary=self.ordinary)

    def member(self, index: int) -> nn.Module:
        network = self.particles.member(index)
        return network if self.ordinary is None else self.ordinary(network)


class SeparateMembers(MemberFunctions):
    """Stored members as modules of their own: to run one, no tensor has to be put in place."""

    separate: list[Member]

    def __init__(self, particles: Particles, separate: list[Member]) -> None:
        super().__init__(particles)
        vars(self)["separate"] = separate  # registered are the particles, whose tensors they have

    def map_members(self, function: Callable[..., Any], *args: Any) -> Any:
        with self.particles.lock_network(), self.particles.runner.run_context():
            return stack_trees([function(member, *args) for member in self.separate])


class SeparateMembersCache(Cache):
    """Separate members of drawn functions where these are stored members, and it is quicker to run them one by one."""

    known: DrawnFunctions | None = None

    def __call__(self, drawn: DrawnFunctions) -> DrawnFunctions:
        if type(drawn) is not MemberFunctions or is_traced():
            return drawn
        if self.known is None:
            few = drawn.particles.how == "loop" or drawn.members <= FEW
            separate = drawn.particles.separate_members() if few else None
            self.known = drawn if separate is None else SeparateMembers(drawn.particles, separate)
        return self.known


class Mixture(DrawnFunctions):
    """Several families of functions in a row, such as the functions drawn around each of several networks."""

    def __init__(self, families: Sequence[DrawnFunctions]) -> None:
        super().__init__()
        self._families = nn.ModuleList(families)
        self.particles = families[0].particles
        self.members = sum(family.members for family in families)
        self.networks = sum(family.networks for family in families)
        self.training = False

    @property
    def families(self) -> tuple[DrawnFunctions, ...]:
        return tuple(self._families)  # type: ignore[arg-type]

    def map_members(self, function: Callable[..., Any], *args: Any) -> Any:
        found = [family.map_members(function, *args) for family in self.families]
        return pytree.tree_map(lambda *parts: torch.cat(parts), *found)

    def predict_parts(self, x: Inputs) -> Iterator[Predictive]:
        for family in self.families:
            yield from family.predict_parts(x)

    def build_subset(self, rows: slice) -> DrawnFunctions | None:
        found, first = [], 0
        for family in self.families:
            start, stop = (min(max(end - first, 0), family.members) for end in (rows.start, rows.stop))
            found += [family.function_subset(slice(start, stop))] if start < stop else []
            first += family.members
        whole = [each for each in found if each is not None]
        return Mixture(whole) if len(whole) == len(found) else None

    def member(self, index: int) -> nn.Module:
        index = member_index(index, self.members)
        owners = [(family, i) for family in self.families for i in range(family.members)]
        family, own = owners[index]
        return family.member(own)


def join_families(families: Iterable[DrawnFunctions]) -> DrawnFunctions:
    """All families as one; a single family is returned as it is."""
    found = list(families)
    return found[0] if len(found) == 1 else Mixture(found)


class FunctionPartition:
    """Of drawn functions those that run in this process: all of them. Processes of a mesh may divide them (`distributed`)."""

    def __init__(self, drawn: DrawnFunctions) -> None:
        self.drawn = drawn

    @property
    def local_functions(self) -> DrawnFunctions:
        """Those that run here."""
        return self.drawn

    @property
    def first_local_index(self) -> int:
        """The number of the first of them."""
        return 0

    def gather_results(self, find: Callable[[], Found]) -> list[Found]:
        """What find() gives in every process that runs some of the functions, in their order."""
        return [find()]

    def gather_tensors(self, find: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Tensors (M, ...) of all functions; find() gives those of the functions that run here."""
        first, *others = self.gather_results(find)
        return tuple(torch.cat(each) for each in zip(first, *others, strict=True)) if others else first


class Predictor(nn.Module):
    """A module x -> {mean, total, aleatoric, epistemic} of the calibrated `Predictive`, with copies of drawn functions.

    Always in eval mode; parameters are frozen, gradients reach x. Inputs and outputs are plain tensors, for `torch.export`.
    """

    def __init__(self, drawn: DrawnFunctions, lens: Correction) -> None:
        super().__init__()
        self.drawn = copy.deepcopy(drawn).requires_grad_(False)
        self.separate = SeparateMembersCache()
        self.temperature = lens.temperature
        self.calibration = copy.deepcopy(lens.calibration)
        self.eval()

    def train(self, mode: bool = True) -> Self:
        return super().train(False)

    def predictive(self, x: Inputs) -> Predictive:
        """The calibrated `Predictive` of these functions for x."""
        for particles in self.drawn.modules() if LOOPS_IN_EXPORTS and is_traced() else ():
            if isinstance(particles, Particles):
                particles.how = "loop"
        lens = Correction(self.temperature, self.calibration)
        return lens.correct_mixture(lens.correct_members(self.separate(self.drawn).predict(x)))

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self.separate = SeparateMembersCache()  # tensors get other memory
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def forward(self, x: Inputs) -> dict[str, Tensor]:
        predictive = self.predictive(x)
        return {name: getattr(predictive, name) for name in MOMENTS}


def describe_outputs(member: Member, *parts: Inputs) -> tuple[Tensor, ...]:
    found = [member.likelihood.describe(batches.call_network(member.network, x)) for x in parts]
    return found[0] if len(found) == 1 else tuple(map(torch.cat, zip(*found, strict=True)))
