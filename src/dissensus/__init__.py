"""dissensus: turn any network into a distribution over networks, and say how sure it is."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dissensus import data, metrics, nets
from dissensus.core.empcov import EmpCov
from dissensus.core.errors import Diverged
from dissensus.core.likelihood import Classification, HeteroscedasticRegression, Likelihood, Regression
from dissensus.core.posterior import Posterior, refresh
from dissensus.core.predictive import ClassificationPredictive, Predictive, RegressionPredictive
from dissensus.core.prior import GaussianPrior, Prior
from dissensus.core.recorder import Recorder
from dissensus.core.summary import SummaryPredictive
from dissensus.evaluate import evaluate
from dissensus.evaluation.corrupted import Corruptions
from dissensus.evaluation.distances import DistancesOverTraining, MemberDistances, member_distances
from dissensus.evaluation.evaluation import Evaluation
from dissensus.methods import (
    LIT,
    MAP,
    METHODS,
    SVGD,
    SWA,
    SWAG,
    TRADI,
    BatchEnsemble,
    DeepEnsemble,
    DropoutEnsemble,
    FeatureRDE,
    FoRDE,
    FunctionRDE,
    GaussianPerturbation,
    Laplace,
    MCDropout,
    NodeBNN,
    SnapshotEnsemble,
    WeightRDE,
    branch,
    track,
)
from dissensus.methods.parts.recording import RecordingPosterior
from dissensus.numerics.annealing import Annealing
from dissensus.numerics.lengthscales import Lengthscales, pca_lengthscales
from dissensus.predict import ImagePrediction, predict, predict_batches, predict_image, summarise
from dissensus.report import report
from dissensus.storage import load, save
from dissensus.surgery.modulation import Modulation
from dissensus.temperature import temperature_scale
from dissensus.train import fit
from dissensus.training.history import Epoch, History
from dissensus.version import __version__ as __version__

if TYPE_CHECKING:
    from dissensus import theory

__all__ = [
    "LIT",
    "MAP",
    "METHODS",
    "SVGD",
    "SWA",
    "SWAG",
    "TRADI",
    "Annealing",
    "BatchEnsemble",
    "Classification",
    "ClassificationPredictive",
    "Corruptions",
    "DeepEnsemble",
    "DistancesOverTraining",
    "Diverged",
    "DropoutEnsemble",
    "EmpCov",
    "Epoch",
    "Evaluation",
    "FeatureRDE",
    "FoRDE",
    "FunctionRDE",
    "GaussianPerturbation",
    "GaussianPrior",
    "HeteroscedasticRegression",
    "History",
    "ImagePrediction",
    "Laplace",
    "Lengthscales",
    "Likelihood",
    "MCDropout",
    "MemberDistances",
    "Modulation",
    "NodeBNN",
    "Posterior",
    "Predictive",
    "Prior",
    "Recorder",
    "RecordingPosterior",
    "Regression",
    "RegressionPredictive",
    "SnapshotEnsemble",
    "SummaryPredictive",
    "WeightRDE",
    "branch",
    "data",
    "evaluate",
    "fit",
    "load",
    "member_distances",
    "metrics",
    "nets",
    "pca_lengthscales",
    "predict",
    "predict_batches",
    "predict_image",
    "refresh",
    "report",
    "save",
    "summarise",
    "temperature_scale",
    "theory",
    "track",
]


def __getattr__(name: str) -> Any:
    """`ds.theory`, imported when it is first asked for: few programs do."""
    if name == "theory":
        return import_module("dissensus.theory")
    raise AttributeError(f"module 'dissensus' has no attribute {name!r}")
