"""The methods. METHODS maps names to classes for the command line, saved files and the contract test."""

from dissensus.core.posterior import Posterior
from dissensus.methods.deep_ensemble import DeepEnsemble
from dissensus.methods.dropout import MCDropout
from dissensus.methods.embedded_ensembles import BatchEnsemble, DropoutEnsemble
from dissensus.methods.forde import LIT, FoRDE
from dissensus.methods.hmc import HMC, SGHMC
from dissensus.methods.laplace import Laplace
from dissensus.methods.map import MAP
from dissensus.methods.mean_field_vi import MeanFieldVI
from dissensus.methods.node_bnn import NodeBNN, RankOneBNN
from dissensus.methods.perturbation import GaussianPerturbation
from dissensus.methods.repulsive_ensembles import SVGD, FeatureRDE, FunctionRDE, WeightRDE
from dissensus.methods.snapshots import SnapshotEnsemble
from dissensus.methods.swag import SWA, SWAG
from dissensus.methods.track import branch, track
from dissensus.methods.tradi import TRADI

_CLASSES: tuple[type[Posterior], ...] = (
    MAP, DeepEnsemble, MCDropout, WeightRDE, FunctionRDE, FeatureRDE, FoRDE, SVGD, LIT, BatchEnsemble, DropoutEnsemble, TRADI,
    SWAG, SWA, GaussianPerturbation, SnapshotEnsemble, SGHMC, HMC, Laplace, NodeBNN, RankOneBNN, MeanFieldVI,
)  # fmt: skip
METHODS: dict[str, type[Posterior]] = {method.name: method for method in _CLASSES}

__all__ = [
    "HMC", "LIT", "MAP", "METHODS", "SGHMC", "SVGD", "SWA", "SWAG", "TRADI", "BatchEnsemble", "DeepEnsemble",
    "DropoutEnsemble", "FeatureRDE", "FoRDE", "FunctionRDE", "GaussianPerturbation", "Laplace", "MCDropout", "MeanFieldVI",
    "NodeBNN", "RankOneBNN", "SnapshotEnsemble", "WeightRDE", "branch", "track",
]  # fmt: skip
