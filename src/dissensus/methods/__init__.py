"""The methods, one file each. METHODS maps names to classes for the command line, saved files and the contract test."""

from dissensus.core.posterior import Posterior
from dissensus.methods.batch_ensemble import BatchEnsemble as BatchEnsemble
from dissensus.methods.deep_ensemble import DeepEnsemble as DeepEnsemble
from dissensus.methods.dropout import MCDropout as MCDropout
from dissensus.methods.dropout_ensemble import DropoutEnsemble as DropoutEnsemble
from dissensus.methods.feature_rde import FeatureRDE as FeatureRDE
from dissensus.methods.forde import FoRDE as FoRDE
from dissensus.methods.function_rde import FunctionRDE as FunctionRDE
from dissensus.methods.hmc import HMC as HMC
from dissensus.methods.laplace import Laplace as Laplace
from dissensus.methods.lit import LIT as LIT
from dissensus.methods.map import MAP as MAP
from dissensus.methods.mean_field_vi import MeanFieldVI as MeanFieldVI
from dissensus.methods.node_bnn import NodeBNN as NodeBNN
from dissensus.methods.perturbation import GaussianPerturbation as GaussianPerturbation
from dissensus.methods.rank_one_bnn import RankOneBNN as RankOneBNN
from dissensus.methods.sghmc import SGHMC as SGHMC
from dissensus.methods.snapshots import SnapshotEnsemble as SnapshotEnsemble
from dissensus.methods.svgd import SVGD as SVGD
from dissensus.methods.swag import SWA as SWA
from dissensus.methods.swag import SWAG as SWAG
from dissensus.methods.track import branch as branch
from dissensus.methods.track import track as track
from dissensus.methods.tradi import TRADI as TRADI
from dissensus.methods.weight_rde import WeightRDE as WeightRDE

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
        SGHMC,
        HMC,
        Laplace,
        NodeBNN,
        RankOneBNN,
        MeanFieldVI,
    )
}

__all__ = ["METHODS", "branch", "track", *(method.__name__ for method in METHODS.values())]
