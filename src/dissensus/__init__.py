"""dissensus: turn any network into a distribution over networks, and say how sure it is."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dissensus import data as data
from dissensus import metrics as metrics
from dissensus import nets as nets
from dissensus.core.empcov import EmpCov as EmpCov
from dissensus.core.errors import Diverged as Diverged
from dissensus.core.likelihood import Classification as Classification
from dissensus.core.likelihood import HeteroscedasticRegression as HeteroscedasticRegression
from dissensus.core.likelihood import Likelihood as Likelihood
from dissensus.core.likelihood import Regression as Regression
from dissensus.core.posterior import Posterior as Posterior
from dissensus.core.posterior import refresh as refresh
from dissensus.core.predictive import ClassificationPredictive as ClassificationPredictive
from dissensus.core.predictive import Predictive as Predictive
from dissensus.core.predictive import RegressionPredictive as RegressionPredictive
from dissensus.core.prior import GaussianPrior as GaussianPrior
from dissensus.core.prior import Prior as Prior
from dissensus.core.recorder import Recorder as Recorder
from dissensus.core.summary import SummaryPredictive as SummaryPredictive
from dissensus.evaluate import evaluate as evaluate
from dissensus.evaluation.corrupted import Corruptions as Corruptions
from dissensus.evaluation.distances import DistancesOverTraining as DistancesOverTraining
from dissensus.evaluation.distances import MemberDistances as MemberDistances
from dissensus.evaluation.distances import member_distances as member_distances
from dissensus.evaluation.evaluation import Evaluation as Evaluation
from dissensus.methods import LIT as LIT
from dissensus.methods import MAP as MAP
from dissensus.methods import METHODS as METHODS
from dissensus.methods import SVGD as SVGD
from dissensus.methods import SWA as SWA
from dissensus.methods import SWAG as SWAG
from dissensus.methods import TRADI as TRADI
from dissensus.methods import BatchEnsemble as BatchEnsemble
from dissensus.methods import DeepEnsemble as DeepEnsemble
from dissensus.methods import DropoutEnsemble as DropoutEnsemble
from dissensus.methods import FeatureRDE as FeatureRDE
from dissensus.methods import FoRDE as FoRDE
from dissensus.methods import FunctionRDE as FunctionRDE
from dissensus.methods import GaussianPerturbation as GaussianPerturbation
from dissensus.methods import Laplace as Laplace
from dissensus.methods import MCDropout as MCDropout
from dissensus.methods import NodeBNN as NodeBNN
from dissensus.methods import SnapshotEnsemble as SnapshotEnsemble
from dissensus.methods import WeightRDE as WeightRDE
from dissensus.methods import branch as branch
from dissensus.methods import track as track
from dissensus.methods.parts.recording import RecordingPosterior as RecordingPosterior
from dissensus.numerics.annealing import Annealing as Annealing
from dissensus.numerics.lengthscales import Lengthscales as Lengthscales
from dissensus.numerics.lengthscales import pca_lengthscales as pca_lengthscales
from dissensus.predict import predict as predict
from dissensus.predict import predict_batches as predict_batches
from dissensus.predict import summarise as summarise
from dissensus.report import report as report
from dissensus.storage import load as load
from dissensus.storage import save as save
from dissensus.surgery.modulation import Modulation as Modulation
from dissensus.temperature import temperature_scale as temperature_scale
from dissensus.train import fit as fit
from dissensus.training.history import Epoch as Epoch
from dissensus.training.history import History as History
from dissensus.version import __version__ as __version__

if TYPE_CHECKING:
    from dissensus import theory as theory

_defined = [name for name, value in globals().items() if getattr(value, "__module__", "").startswith(__name__)]
__all__ = sorted([*_defined, "METHODS", "data", "metrics", "nets", "theory"])


def __getattr__(name: str) -> Any:
    """`ds.theory`, imported when it is first asked for: few programs do."""
    if name == "theory":
        return import_module("dissensus.theory")
    raise AttributeError(f"module 'dissensus' has no attribute {name!r}")
