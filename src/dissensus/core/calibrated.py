"""Calibration of a posterior's predictions, and promises (guarantees) about the calibrated predictions.

Both are fitted to predictions on held-out rows. Training drops calibrations. A promise holds only for the predictions it was
fitted to: it carries a fingerprint of weights, temperature and calibration, which is compared whenever it is used.
"""

from __future__ import annotations

import importlib
import json
import logging
from abc import ABC
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor, nn

from dissensus.core.description import describe_likelihood, differences
from dissensus.core.particles import Particles
from dissensus.core.predictive import Predictive
from dissensus.numerics.hashing import fingerprint
from dissensus.utils.checks import ListedAttributes, one_of
from dissensus.utils.sharding import gather_full_tensor
from dissensus.utils.tensor_tree import SubmoduleCache
from dissensus.utils.torch_private import buffers_of, children_of, parameters_of, submodule, unsaved_buffers, version_of

log = logging.getLogger("dissensus")

# torch's name for what a state holds besides tensors; here the model's description, as JSON bytes
STATE = "_extra_state"
KINDS: dict[str, type[FittedModule]] = {}  # all calibrations and promises, by their names in files
KIND_ROOMS: list[str] = []  # modules that fill KINDS when they are imported, named by the package


class FittedModule(nn.Module, ABC):
    """Base class of calibrations and promises: settings and buffers that are saved, moved and copied with the posterior.

    Files name a class by its `kind`; the constructor takes the saved values: all settings, as JSON values, and tensors by
    name, which are registered as buffers; floating-point ones get the posterior's precision.
    """

    kind: ClassVar[str]

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "kind" in vars(cls):
            KINDS[cls.kind] = cls

    def __init__(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.facts = dict(facts)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.detach().clone())

    @final
    def config(self) -> dict[str, Any]:
        """Its entry in a file, besides its tensors."""
        return {"kind": self.kind, "facts": self.facts}


class Calibration(FittedModule, ABC):
    """Base class: a map from the networks' mixture to the calibrated one. Pure functions of tensors.

    Members may be processed one at a time, so there are two steps: `members` acts on some members, `mixture` on the whole.
    """

    def calibrate_members(self, predictive: Predictive) -> Predictive:
        """The predictive of some members, each calibrated."""
        return predictive

    def calibrate_mixture(self, predictive: Predictive) -> Predictive:
        """The predictive of all members, or their summary, with a calibrated mean."""
        return predictive

    def calibrate_logits(self, logits: Tensor) -> Tensor:
        """Members' logits (M, B, C, ...), calibrated as `members` does."""
        return logits


class Correction(NamedTuple):
    """Temperature and calibration at one moment, applied to the networks' mixture throughout one prediction."""

    temperature: float
    calibration: Calibration | None

    def correct_members(self, predictive: Predictive) -> Predictive:
        """Some members, tempered and calibrated; call `mixture` once all members are there."""
        tempered = predictive if self.temperature == 1.0 else predictive.apply_temperature(self.temperature)
        return tempered if self.calibration is None else self.calibration.calibrate_members(tempered).mark(predictive)

    def correct_mixture(self, predictive: Predictive) -> Predictive:
        """The calibrated mixture of all members."""
        if self.calibration is None:
            return predictive
        return self.calibration.calibrate_mixture(predictive).mark(predictive)

    def correct_logits(self, logits: Tensor) -> Tensor:
        """Members' logits (M, B, C, ...), tempered and calibrated as by `members`."""
        tempered = logits / self.temperature
        return tempered if self.calibration is None else self.calibration.calibrate_logits(tempered)


class Guarantee(FittedModule, ABC):
    """Base class: a guarantee about a posterior's predictions, such as sets with coverage or a gate with a risk."""

    _owner: tuple[Any] | None = None  # its posterior; a tuple, so that it is no submodule

    @property
    @final
    def posterior(self) -> Any:
        """The `Posterior` that it was fitted to; raises if its predictions have changed since."""
        if self._owner is None or not any(each is self for each in self._owner[0].promises.values()):
            raise ValueError(f"expected a {self.kind} fitted to the posterior's present predictions, got others; refit")
        return self._owner[0]


class CalibratedModule(ListedAttributes, nn.Module):
    """Base class of posteriors: holds their temperature, calibration (which acts after the temperature) and promises."""

    temperature: Tensor  # () logits are divided by it; saved with the state
    calibration: Calibration | None
    particles: Particles = submodule("particles")
    initial_network: dict[str, Any]  # the description of the network when the posterior was built

    def __init__(self) -> None:
        super().__init__()
        self.register_module("calibration", None)
        children_of(self)["promises"] = nn.ModuleDict()  # `promises` is a property
        self.known_parts = SubmoduleCache()  # of what is looked at in a prediction
        self._read: tuple[Any, int, bool] = (None, 0, False)  # the temperature, its version, whether it was not 1

    @property
    @final
    def promises(self) -> nn.ModuleDict:
        """Name -> `Guarantee`, those that hold for the present predictions."""
        drop_stale_guarantees(self)
        return children_of(self)["promises"]

    @final
    def fingerprint(self) -> str:
        """What predictions depend on, in 16 digits: tensors, corrections, dropout rates, and the likelihood's settings."""
        left_out = {"steps", "promises", "watchers", *unsaved_buffers(self)}
        own = {**parameters_of(self), **buffers_of(self), **children_of(self)}.items()
        with self.particles.lock_network(), torch.no_grad():
            parts = [part for name, part in sorted(own) if name not in left_out]
            tensors = [gather_full_tensor(each) for part in parts for each in _state_tensors(part)]
            calibration = None if self.calibration is None else self.calibration.config()
            rates = [self._rates] if self._rates else []
            text = as_bytes([describe_likelihood(self.particles.likelihood), calibration, *rates])
            return f"{fingerprint([text, *tensors]):016x}"

    @final
    def current_correction(self) -> Correction:
        """The present temperature and calibration."""
        with self.particles.lock_network():
            temperature: Any = buffers_of(self)["temperature"]
            return Correction(temperature.item(), children_of(self)["calibration"])

    @final
    def add_guarantee(self, name: str, promise: Guarantee) -> None:
        """Adds a promise about the present predictions under this name; replaces an earlier one."""
        promise.facts["fitted_to"] = self.fingerprint()
        self._attach_guarantee(name, promise)

    def _attach_guarantee(self, name: str, promise: Guarantee) -> None:
        promise._owner = (self,)
        children_of(self)["promises"][name] = promise.to(self.temperature.device)

    @final
    def recalibrate(self, temperature: float, calibration: Calibration | None) -> None:
        """Sets temperature and calibration; promises fitted to other ones are dropped with a warning."""
        with self.particles.lock_network():  # no other thread may predict in between
            self.temperature.fill_(temperature)
            self.calibration = calibration if calibration is None else calibration.to(self.temperature.device)
        drop_stale_guarantees(self)

    @property
    def _rates(self) -> dict[str, float]:
        """Dropout rates of layers on which predictions depend, as they are now."""
        return {}

    @property
    @final
    def is_corrected(self) -> bool:
        """Whether a temperature or a calibration changes predictions; on a GPU the temperature is read where it was written."""
        if torch.compiler.is_compiling():  # a graph cannot branch on a value
            return self.calibration is not None
        now = buffers_of(self)["temperature"]
        version = -1 if now.is_inference() else version_of(now)
        if self._read[0] is not now or self._read[1] != version:
            self._read = now, version, bool(now != 1.0)
        return self._read[2] or children_of(self)["calibration"] is not None

    @final
    def uncalibrate(self, change: str) -> None:
        """Sets the temperature to 1 and drops the calibration, with warnings, because predictions change."""
        if (before := float(self.temperature)) != 1.0:
            hint = "call ds.temperature_scale afterwards"
            log.warning("%s sets the temperature back from %.3g to 1; %s", change, before, hint)
        if self.calibration is not None:
            log.warning("%s drops the %s calibration; call ds.calibrate afterwards", change, self.calibration.kind)
        self.recalibrate(1.0, None)

    def get_extra_state(self) -> Tensor:
        """The model's description, which a state needs besides its tensors; bytes, since tools expect tensors in a state."""
        return as_bytes(describe_model(self))

    def set_extra_state(self, state: Tensor) -> None:
        """Does nothing: `_load_from_state_dict` has read it, together with the tensors."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        # Before any tensor is read, so that a state of another model changes nothing.
        if (described := state_dict.get(prefix + STATE)) is not None:
            saved, mine = json.loads(bytes(described.tolist())), describe_model(self)
            for part in ("likelihood", "network"):
                if (found := next(differences(saved[part], mine[part]), None)) is not None:
                    raise ValueError(f"expected the state of this model, got another {part}: {found}; build it alike")
            lost = [mine["calibration"]["kind"]] if mine["calibration"] and not saved["calibration"] else []
            if lost := [*lost, *(name for name in mine["promises"] if name not in saved["promises"])]:
                log.warning("the loaded state has no %s, which is dropped", ", ".join(lost))
            restore_fitted(self, saved, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def stored_guarantees(posterior: CalibratedModule) -> dict[str, Guarantee]:
    """All promises by name, also stale ones."""
    return dict(children_of(posterior)["promises"].items())


def drop_stale_guarantees(posterior: CalibratedModule) -> None:
    """Drops promises that were fitted to other predictions than the present ones, with a warning."""
    if found := stored_guarantees(posterior):
        present = posterior.fingerprint()
        if stale := [name for name, each in found.items() if each.facts["fitted_to"] != present]:
            log.warning("predictions have changed since %s was fitted to them; fit it again", ", ".join(stale))
            children_of(posterior)["promises"] = nn.ModuleDict({n: each for n, each in found.items() if n not in stale})


def describe_model(posterior: CalibratedModule) -> dict[str, Any]:
    """The model besides its tensors and the method's settings, as JSON values."""
    likelihood = describe_likelihood(posterior.particles.likelihood)
    return {"likelihood": likelihood, "network": posterior.initial_network, **describe_fitted(posterior)}


def describe_fitted(posterior: CalibratedModule) -> dict[str, Any]:
    """Calibration and promises as JSON values, without their tensors."""
    return {
        "calibration": None if posterior.calibration is None else posterior.calibration.config(),
        "promises": {name: each.config() for name, each in stored_guarantees(posterior).items()},
    }


def restore_fitted(
    posterior: CalibratedModule, saved: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str = ""
) -> None:
    """Builds the calibration and promises that `describe_fitted` describes, with their tensors from a state or file."""

    def build_fitted(config: Mapping[str, Any], under: str) -> Any:
        for room in KIND_ROOMS:
            importlib.import_module(room)
        own = {name.removeprefix(under): tensor for name, tensor in tensors.items() if name.startswith(under)}
        return KINDS[one_of("kind", config["kind"], KINDS)](config["facts"], own)

    calibration, promises = saved.get("calibration"), saved.get("promises") or {}
    posterior.calibration = None if calibration is None else build_fitted(calibration, f"{prefix}calibration.")
    before = stored_guarantees(posterior)
    children_of(posterior)["promises"] = nn.ModuleDict()
    for name, config in promises.items():
        # the same one keeps its functions of inputs, which no file holds
        same = name in before and before[name].config() == config
        kept = before[name] if same else build_fitted(config, f"{prefix}promises.{name}.")
        posterior._attach_guarantee(name, kept)


def _state_tensors(part: Any) -> list[Tensor]:
    """The tensors in the state of a part: a tensor, a module or None."""
    state = part.state_dict().items() if isinstance(part, nn.Module) else [("", part)]
    return [each for _, each in sorted(state) if isinstance(each, Tensor)]


def as_bytes(values: Any) -> Tensor:
    """JSON values as a tensor of bytes."""
    return torch.frombuffer(bytearray(json.dumps(values, sort_keys=True).encode()), dtype=torch.uint8)
