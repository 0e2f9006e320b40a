"""Arguments of methods that no TOML value can be: named in a task, made from its training rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from dissensus.bench.names import unknown
from dissensus.core.empcov import EmpCov
from dissensus.core.lengthscales import pca_lengthscales

LENGTHSCALES = ("identity", "pca")
EMPCOV = "empcov"
OF_LENGTHSCALES = ("alpha", "form")  # keywords of pca_lengthscales that stand beside `lengthscales` in a method's table


def further_keys(keywords: Iterable[str]) -> set[str]:
    """The keys a method's table may have beside the method's own keywords."""
    return {EMPCOV, *(OF_LENGTHSCALES if "lengthscales" in keywords else ())}


def first_layer_prior(options: Any, network: nn.Module, batches: Iterable[Any], *, data_size: int) -> EmpCov:
    """The prior that empcov = { layer = "layers.0", alpha = 1.0, epsilon = 1e-4 } in a method's table stands for."""
    if not isinstance(options, Mapping) or "layer" not in options:
        raise ValueError(
            f'expected empcov = {{ layer = "NAME" }} with the layer that sees the inputs, got {options!r}; write it so'
        )
    if unfit := options.keys() - {"layer", "alpha", "epsilon"}:
        raise unknown("a key of empcov", sorted(unfit)[0], ("layer", "alpha", "epsilon"))
    return EmpCov(batches, network, data_size=data_size, **options)


def resolved(settings: Mapping[str, Any], batches: Iterable[Any]) -> dict[str, Any]:
    """Settings with objects in place of names. `batches` of (x, …): training inputs as the network sees them.

    lengthscales = "pca" with alpha and form becomes what `pca_lengthscales` finds; "identity" becomes none.
    """
    found = dict(settings)
    options = {key: found.pop(key) for key in OF_LENGTHSCALES if key in found}
    name = found.pop("lengthscales", "identity")
    if name not in LENGTHSCALES:
        raise unknown("lengthscales", str(name), LENGTHSCALES)
    if name == "pca":
        # α = 0 is the identity exactly: nothing to rotate by.
        none = options.get("alpha") == 0
        return found | {"lengthscales": None if none else pca_lengthscales(batches, **options)}
    if options:
        key = next(iter(options))
        raise ValueError(f'expected lengthscales = "pca" with {key}, got none; add it, or leave {key} out')
    return found
