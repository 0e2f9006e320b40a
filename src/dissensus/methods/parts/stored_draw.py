"""A stored draw: functions drawn once, after training, which are saved and loaded with the posterior."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Self, cast

from torch import Tensor, nn

from dissensus.core.particles import Particles
from dissensus.core.posterior import Posterior
from dissensus.utils.tensor_tree import Tensors


class StoringPosterior(Posterior, ABC):
    """Base class of posteriors with a draw in `stored`. Loading a state replaces the draw by the state's, or removes it."""

    stored: nn.Module | None
    draw_attributes: ClassVar[tuple[str, ...]] = ("stored",)  # attributes that are set and removed with the draw

    @abstractmethod
    def blank_draw(self, state: Tensors) -> nn.Module:
        """A draw with the shapes in this state of the posterior, to be filled from it."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        state = {key.removeprefix(prefix): state_dict[key] for key in state_dict if key.startswith(prefix)}
        for part in self.draw_attributes:
            setattr(self, part, None)
        if any(key.startswith("stored.") for key in state):
            self.stored = self.blank_draw(state)
        else:  # the state has no draw: remove everything that belongs to it
            for key in state:
                if key.partition(".")[0] in self.draw_attributes:
                    del state_dict[f"{prefix}{key}"]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class Families(nn.ModuleList):
    """Particles of drawn functions, in order: one family for all functions, one per network, or several per network.

    With several per network they stay in the host's memory, because the draw does not fit on the posterior's device.
    """

    def __init__(self, families: Iterable[Particles], *, parts: bool = False) -> None:
        super().__init__(families)
        self.parts = parts

    @property
    def each(self) -> list[Particles]:
        return [cast(Particles, family) for family in self]

    @property
    def sizes(self) -> list[int]:
        """Number of functions in each family."""
        return [family.members for family in self.each]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if not self.parts:
            return super()._apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]
        for family in self.each:  # one after the other, so that only one at a time is on the device
            family._apply(fn).to("cpu")  # type: ignore[no-untyped-call]
        return self
