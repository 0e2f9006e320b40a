"""What a file says beside tensors: frozen parameters and layers in eval mode by hand, which stay so when it is trained on.

And which particles run in a loop: vectorised they would differ in the last bit.
"""

from collections.abc import Mapping
from typing import Any

from dissensus.core.particles import Particles
from dissensus.core.posterior import Posterior


def still(posterior: Posterior) -> dict[str, list[str]]:
    """{"frozen": names of parameters, "eval": of layers, "loop": of particles}, each where there is one."""
    frozen = [name for name, parameter in posterior.named_parameters() if not parameter.requires_grad]
    found = {"frozen": frozen, "eval": list(posterior.particles.template.always_eval)}
    found["loop"] = [n for n, part in posterior.named_modules() if isinstance(part, Particles) and part.how == "loop"]
    return {what: names for what, names in found.items() if names}


def keep_still(posterior: Posterior, saved: Mapping[str, Any]) -> None:
    """Freezes what was frozen when it was saved; what the caller's template has frozen stays so. Raises on unknown names."""
    template = posterior.particles.template
    for name in saved.get("frozen", []):
        posterior.get_parameter(name).requires_grad_(False)
    layers = {name: template.get_submodule(name) for name in saved.get("eval", [])}
    template.always_eval = sorted({*template.always_eval, *layers})
    groups = {name: part for name, part in posterior.named_modules() if isinstance(part, Particles)}
    for name in saved.get("loop", []):
        groups[name].how = "loop"
