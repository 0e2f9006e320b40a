"""What stands on a posterior: a calibration of its predictions, and promises about the calibrated ones.

All of it was fitted to the predictions for held-out rows, so it holds for these predictions only: training drops it, and a new
calibration drops the promises that stood on the old one.
"""

from __future__ import annotations

import logging
from abc import ABC
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple, final

from torch import Tensor, nn

from dissensus.core.particles import Particles
from dissensus.core.predictive import Predictive

log = logging.getLogger("dissensus")


class Fitted(nn.Module, ABC):
    """Base class: JSON facts, and tensors as buffers. Saved and loaded, moved and copied with its posterior.

    A class of it is known to files by its `kind`, in `KINDS` of `standing/__init__.py`; the constructor takes what was saved.

    Args:
        facts: all settings, JSON.
        tensors: name -> tensor, each a buffer of that name; floating-point ones in the precision of the posterior.
    """

    kind: ClassVar[str]

    def __init__(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.facts = dict(facts)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.detach().clone())

    @final
    def config(self) -> dict[str, Any]:
        """What a file says of it, beside its tensors."""
        return {"kind": self.kind, "facts": self.facts}


class Calibration(Fitted, ABC):
    """Base class: what turns the mixture that the networks predict into the one that users see. Pure functions of tensors.

    Members may come one at a time, so there are two steps: `members` may see some of them, `mixture` sees the whole.
    """

    def members(self, predictive: Predictive) -> Predictive:
        """A predictive of some members, each of them calibrated."""
        return predictive

    def mixture(self, predictive: Predictive) -> Predictive:
        """The predictive of all members, or their summary, its mean calibrated."""
        return predictive

    def logits(self, logits: Tensor) -> Tensor:
        """Members' logits (M, B, C, ...), calibrated as `members` does."""
        return logits


class Lens(NamedTuple):
    """How the networks' mixture is seen by users: at a temperature, then calibrated. One moment's, for a whole prediction."""

    temperature: float
    calibration: Calibration | None

    def members(self, predictive: Predictive) -> Predictive:
        """Some members as they are seen; `mixture` follows once all are there."""
        tempered = predictive if self.temperature == 1.0 else predictive.tempered(self.temperature)
        return tempered if self.calibration is None else self.calibration.members(tempered)

    def mixture(self, predictive: Predictive) -> Predictive:
        """The mixture of all members as it is seen."""
        return predictive if self.calibration is None else self.calibration.mixture(predictive)

    def logits(self, logits: Tensor) -> Tensor:
        """Members' logits (M, B, C, ...) as `members` sees them."""
        tempered = logits / self.temperature
        return tempered if self.calibration is None else self.calibration.logits(tempered)


class Promise(Fitted, ABC):
    """Base class: what is promised of a posterior's predictions, such as sets with coverage or a gate with a risk."""

    _of: tuple[Any] | None = None  # its posterior, in a tuple: that is no part of it

    @property
    @final
    def posterior(self) -> Any:
        """The `Posterior` that it stands on."""
        if self._of is None or not any(each is self for each in self._of[0].promises.values()):
            raise ValueError(
                f"expected a {self.kind} that stands on a posterior, got one that was dropped (by training, another "
                "calibration or another of its name); fit it again"
            )
        return self._of[0]


class Ground(nn.Module):
    """Base class of posteriors: what stands on them.

    Public attributes: `temperature` (), `calibration` (a `Calibration` or None; acts after the temperature), `promises`
    (name -> `Promise`).
    """

    temperature: Tensor  # () by which predictions are softened; saved with the state
    calibration: Calibration | None
    promises: nn.ModuleDict
    particles: Particles

    def __init__(self) -> None:
        super().__init__()
        self.register_module("calibration", None)
        self.promises = nn.ModuleDict()

    @final
    def lens(self) -> Lens:
        """How predictions are seen now."""
        with self.particles.turn():
            return Lens(float(self.temperature), self.calibration)

    @final
    def stand(self, name: str, promise: Promise) -> None:
        """Puts a promise under this name, in place of the one that was there."""
        promise._of = (self,)
        self.promises[name] = promise.to(self.temperature.device)

    @final
    def recalibrate(self, temperature: float, calibration: Calibration | None, change: str = "a calibration") -> None:
        """Puts these in place of temperature and calibration; promises that stood on those are dropped, with a warning."""
        self.drop_promises(change)
        with self.particles.turn():  # no other thread looks in between
            self.temperature.fill_(temperature)
            self.calibration = calibration if calibration is None else calibration.to(self.temperature.device)

    @final
    def uncalibrate(self, change: str) -> None:
        """Sets the temperature to 1 and drops all that stands here, with warnings: predictions change."""
        if (before := float(self.temperature)) != 1.0:
            log.warning(
                "%s sets the temperature back from %.3g to 1; call ds.temperature_scale afterwards", change, before
            )
        if self.calibration is not None:
            log.warning("%s drops the %s calibration; call ds.calibrate afterwards", change, self.calibration.kind)
        self.recalibrate(1.0, None, change)

    @final
    def drop_promises(self, change: str, kept: Collection[str] = ()) -> None:
        """Drops the promises but those kept, with a warning where there were any: predictions now change."""
        if dropped := [name for name in self.promises if name not in kept]:
            log.warning(
                "%s drops what stood on the predictions (%s): it was promised for those before; fit it again", change,
                ", ".join(dropped),
            )  # fmt: skip
            self.promises = nn.ModuleDict({name: each for name, each in self.promises.items() if name in kept})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        # Another state is another posterior: what stood here goes, unless the state has the same. No state has gates: they
        # are no tensors, and what they promise is not known of it.
        def there(part: str) -> bool:
            return any(name.startswith(f"{prefix}{part}.") for name in state_dict)

        if self.calibration is not None and not there("calibration"):
            log.warning("load_state_dict drops the %s calibration: the state has none", self.calibration.kind)
            self.calibration = None
        self.drop_promises("load_state_dict", [name for name in self.promises if there(f"promises.{name}")])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
