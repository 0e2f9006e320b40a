"""The methods, one file each. METHODS is what the command line, saved files and the contract test go by."""

from dissensus.core.posterior import Posterior
from dissensus.methods.batch_ensemble import BatchEnsemble
from dissensus.methods.deep_ensemble import DeepEnsemble
from dissensus.methods.dropout import MCDropout
from dissensus.methods.dropout_ensemble import DropoutEnsemble
from dissensus.methods.feature_rde import FeatureRDE
from dissensus.methods.forde import FoRDE
from dissensus.methods.function_rde import FunctionRDE
from dissensus.methods.laplace import Laplace
from dissensus.methods.lit import LIT
from dissensus.methods.map import MAP
from dissensus.methods.node_bnn import NodeBNN
from dissensus.methods.perturbation import GaussianPerturbation
from dissensus.methods.snapshots import SnapshotEnsemble
from dissensus.methods.svgd import SVGD
from dissensus.methods.swag import SWA, SWAG
from dissensus.methods.track import branch, track
from dissensus.methods.tradi import TRADI
from dissensus.methods.weight_rde import WeightRDE

METHODS: dict[str, type[Posterior]] = {
    method.name: method
    for method in (
        MAP,
        DeepEnsemble,
        MCDropout,
        WeightRDE,
        FunctionRDE,
        FeatureRDE,
        FoRDE,
        SVGD,
        LIT,
        BatchEnsemble,
        DropoutEnsemble,
        TRADI,
        SWAG,
        SWA,
        GaussianPerturbation,
        SnapshotEnsemble,
        Laplace,
        NodeBNN,
    )
}

__all__ = [
    "LIT",
    "MAP",
    "METHODS",
    "SVGD",
    "SWA",
    "SWAG",
    "TRADI",
    "BatchEnsemble",
    "DeepEnsemble",
    "DropoutEnsemble",
    "FeatureRDE",
    "FoRDE",
    "FunctionRDE",
    "GaussianPerturbation",
    "Laplace",
    "MCDropout",
    "NodeBNN",
    "SnapshotEnsemble",
    "WeightRDE",
    "branch",
    "track",
]
