"""Calibration of a posterior's predictions, and promises (guarantees) about the calibrated predictions.

Both are fitted to predictions on held-out rows and hold for these predictions only: training drops both, and a new
calibration drops the promises fitted to the old one.
"""

from __future__ import annotations

import logging
from abc import ABC
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple, final

from torch import Tensor, nn

from dissensus.core.particles import Particles
from dissensus.core.predictive import Predictive
from dissensus.numerics.tree import KnownParts

log = logging.getLogger("dissensus")


class Fitted(nn.Module, ABC):
    """Base class of calibrations and promises: settings and buffers that are saved, moved and copied with the posterior.

    Files name a class by its `kind`, listed in `KINDS` of `standing/__init__.py`; the constructor takes the saved values.

    Args:
        facts: all settings, as JSON values.
        tensors: name -> tensor, each registered as a buffer; floating-point ones get the posterior's precision.
    """

    kind: ClassVar[str]

    def __init__(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.facts = dict(facts)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.detach().clone())

    @final
    def config(self) -> dict[str, Any]:
        """Its entry in a file, besides its tensors."""
        return {"kind": self.kind, "facts": self.facts}


class Calibration(Fitted, ABC):
    """Base class: a map from the networks' mixture to the calibrated one. Pure functions of tensors.

    Members may be processed one at a time, so there are two steps: `members` acts on some members, `mixture` on the whole.
    """

    def members(self, predictive: Predictive) -> Predictive:
        """The predictive of some members, each calibrated."""
        return predictive

    def mixture(self, predictive: Predictive) -> Predictive:
        """The predictive of all members, or their summary, with a calibrated mean."""
        return predictive

    def logits(self, logits: Tensor) -> Tensor:
        """Members' logits (M, B, C, ...), calibrated as `members` does."""
        return logits


class Lens(NamedTuple):
    """Temperature and calibration at one moment, applied to the networks' mixture throughout one prediction."""

    temperature: float
    calibration: Calibration | None

    def members(self, predictive: Predictive) -> Predictive:
        """Some members, tempered and calibrated; call `mixture` once all members are there."""
        tempered = predictive if self.temperature == 1.0 else predictive.tempered(self.temperature)
        return tempered if self.calibration is None else self.calibration.members(tempered)

    def mixture(self, predictive: Predictive) -> Predictive:
        """The calibrated mixture of all members."""
        return predictive if self.calibration is None else self.calibration.mixture(predictive)

    def logits(self, logits: Tensor) -> Tensor:
        """Members' logits (M, B, C, ...), tempered and calibrated as by `members`."""
        tempered = logits / self.temperature
        return tempered if self.calibration is None else self.calibration.logits(tempered)


class Promise(Fitted, ABC):
    """Base class: a guarantee about a posterior's predictions, such as sets with coverage or a gate with a risk."""

    _of: tuple[Any] | None = None  # its posterior; a tuple, so that it is no submodule

    @property
    @final
    def posterior(self) -> Any:
        """The `Posterior` that it was fitted to."""
        if self._of is None or not any(each is self for each in self._of[0].promises.values()):
            raise ValueError(
                f"expected a {self.kind} that still belongs to a posterior, got one that was dropped (by training, another "
                "calibration or another of its name); fit it again"
            )
        return self._of[0]


class Ground(nn.Module):
    """Base class of posteriors: holds their temperature, calibration and promises.

    Public attributes: `temperature` (), `calibration` (a `Calibration` or None; acts after the temperature), `promises`
    (name -> `Promise`).
    """

    temperature: Tensor  # () logits are divided by it; saved with the state
    calibration: Calibration | None
    promises: nn.ModuleDict
    particles: Particles

    def __init__(self) -> None:
        super().__init__()
        self.register_module("calibration", None)
        self.promises = nn.ModuleDict()
        self.known_parts = KnownParts()  # of what is looked at in a prediction

    @final
    def lens(self) -> Lens:
        """The present temperature and calibration."""
        with self.particles.turn():
            temperature: Any = self._buffers["temperature"]
            return Lens(temperature.item(), self._modules["calibration"])  # type: ignore[arg-type]

    @final
    def stand(self, name: str, promise: Promise) -> None:
        """Adds a promise under this name; replaces an earlier one."""
        promise._of = (self,)
        self.promises[name] = promise.to(self.temperature.device)

    @final
    def recalibrate(self, temperature: float, calibration: Calibration | None, change: str = "a calibration") -> None:
        """Sets temperature and calibration; promises fitted to the old ones are dropped with a warning."""
        self.drop_promises(change)
        with self.particles.turn():  # no other thread may predict in between
            self.temperature.fill_(temperature)
            self.calibration = calibration if calibration is None else calibration.to(self.temperature.device)

    @final
    def uncalibrate(self, change: str) -> None:
        """Sets the temperature to 1 and drops calibration and promises, with warnings, because predictions change."""
        if (before := float(self.temperature)) != 1.0:
            log.warning(
                "%s sets the temperature back from %.3g to 1; call ds.temperature_scale afterwards", change, before
            )
        if self.calibration is not None:
            log.warning("%s drops the %s calibration; call ds.calibrate afterwards", change, self.calibration.kind)
        self.recalibrate(1.0, None, change)

    @final
    def drop_promises(self, change: str, kept: Collection[str] = ()) -> None:
        """Drops all promises except `kept`, with a warning if there were any, because predictions change."""
        if dropped := [name for name in self.promises if name not in kept]:
            log.warning(
                "%s changes the predictions and drops what was fitted to them (%s); fit it again", change,
                ", ".join(dropped),
            )  # fmt: skip
            self.promises = nn.ModuleDict({name: each for name, each in self.promises.items() if name in kept})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        # A new state is a new posterior: calibration and promises are dropped unless the state has the same. Gates are
        # always dropped: a state holds only tensors, and a gate has none.
        def there(part: str) -> bool:
            return any(name.startswith(f"{prefix}{part}.") for name in state_dict)

        if self.calibration is not None and not there("calibration"):
            log.warning("load_state_dict drops the %s calibration: the state has none", self.calibration.kind)
            self.calibration = None
        self.drop_promises("load_state_dict", [name for name in self.promises if there(f"promises.{name}")])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
