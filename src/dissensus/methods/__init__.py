"""The methods, one file each. METHODS is what the command line, saved files and the contract test go by."""

from dissensus.core.posterior import Posterior
from dissensus.methods.deep_ensemble import DeepEnsemble
from dissensus.methods.dropout import MCDropout
from dissensus.methods.map import MAP

METHODS: dict[str, type[Posterior]] = {method.name: method for method in (MAP, DeepEnsemble, MCDropout)}

__all__ = ["MAP", "METHODS", "DeepEnsemble", "MCDropout"]
