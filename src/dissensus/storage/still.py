"""What a file says beside tensors: frozen parameters and layers in eval mode by hand, which stay so when it is trained on.

And which particles run in a loop: vectorised they would differ in the last bit.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dissensus.core.particles import Particles
from dissensus.core.posterior import Posterior
from dissensus.storage.sealed import damaged


def still(posterior: Posterior) -> dict[str, list[str]]:
    """{"frozen": names of parameters, "eval": of layers, "loop": of particles}, each where there is one."""
    frozen = [name for name, parameter in posterior.named_parameters() if not parameter.requires_grad]
    found = {"frozen": frozen, "eval": list(posterior.particles.template.always_eval)}
    found["loop"] = [n for n, part in posterior.named_modules() if isinstance(part, Particles) and part.how == "loop"]
    return {what: names for what, names in found.items() if names}


def keep_still(posterior: Posterior, saved: Any, path: Path) -> None:
    """Freezes what was frozen when it was saved; what the caller's template has frozen stays so."""
    template = posterior.particles.template
    parameters = dict(posterior.named_parameters())
    for name in _names(saved, "frozen", parameters, path):
        parameters[name].requires_grad_(False)
    layers = _names(saved, "eval", dict(template.named_modules()), path)
    template.always_eval = sorted({*template.always_eval, *layers})
    groups = {name: part for name, part in posterior.named_modules() if isinstance(part, Particles)}
    for name in _names(saved, "loop", groups, path):
        groups[name].how = "loop"


def _names(saved: Any, what: str, known: Mapping[str, object], path: Path) -> list[str]:
    names = saved.get(what, []) if isinstance(saved, dict) else None
    if not isinstance(names, list):
        raise damaged(path, "what stood still in training is no table of lists")
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise damaged(path, f"{name!r}, which stood still in training, is not in the network")
    return names
