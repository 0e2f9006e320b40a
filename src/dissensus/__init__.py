"""dissensus: turn any network into a distribution over networks, and measure its uncertainty.

The core (posteriors, likelihoods, predictives) is imported at once, everything else on first use.
"""

# ruff: noqa: F403, F405 - type checkers find the methods in `dissensus.methods.__all__`
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dissensus.core.calibrated import KIND_ROOMS
from dissensus.core.divergence import Diverged
from dissensus.core.likelihood import Classification, HeteroscedasticRegression, Likelihood, Regression
from dissensus.core.posterior import Posterior
from dissensus.core.predictive import ClassificationPredictive, Predictive, RegressionPredictive, SummaryPredictive
from dissensus.core.prior import GaussianPrior, Prior
from dissensus.core.weights import Recorder
from dissensus.engine.loader import Loader
from dissensus.predict import ImagePrediction, predict, predict_batches, predict_image, summarise
from dissensus.report import report
from dissensus.utils.checks import unknown_name
from dissensus.version import __version__ as __version__

if TYPE_CHECKING:
    from dissensus import attacks, data, distributed, integrations, landscape, metrics, nets, sklearn, theory
    from dissensus.calibration.calibrate import Calibrated, calibrate, temperature_scale
    from dissensus.calibration.conformal import Conformal, conformal
    from dissensus.calibration.decide import Decision, decide
    from dissensus.calibration.selective import Gate, ood_gate, selective
    from dissensus.core.drawn_functions import DrawnFunctions, MemberFunctions
    from dissensus.core.networks import NetworksPosterior, StackedPosterior
    from dissensus.core.particles import Particles
    from dissensus.evaluation.evaluate import count_operations, evaluate
    from dissensus.evaluation.evaluation import Evaluation
    from dissensus.evaluation.member_diagnostics import (
        Convergence,
        DistancesOverTraining,
        MemberDistances,
        convergence,
        member_distances,
    )
    from dissensus.evaluation.robustness_curves import AttackCurves, Corruptions
    from dissensus.export_model import export
    from dissensus.frozen_backbone import BackboneAndHead, cache_features, heads
    from dissensus.layers.modulation import Modulation
    from dissensus.layers.nodes import Capacity, capacity
    from dissensus.likelihoods.multilabel import MultiLabel, MultiLabelPredictive
    from dissensus.likelihoods.tokens import SequencePredictive, TokenPredictive, Tokens
    from dissensus.methods import *
    from dissensus.methods.parts.empcov_prior import EmpCov
    from dissensus.methods.parts.sampling_posterior import RecordingPosterior, SamplingPosterior
    from dissensus.numerics.annealing import Annealing
    from dissensus.numerics.lengthscales import Lengthscales, pca_lengthscales
    from dissensus.storage import load, save
    from dissensus.training.fit import fit, refresh
    from dissensus.training.history import Epoch, History
    from dissensus.training.watching import watching
    from dissensus.utils.parameter_groups import Group

KIND_ROOMS.append("dissensus.calibration")  # imported when a file has a calibration

# Module -> names that are imported from it on first use. All other names of `__all__` are in `dissensus.methods`.
_LAZY = {
    "calibration.calibrate": "calibrate temperature_scale Calibrated",
    "calibration.conformal": "conformal Conformal",
    "calibration.decide": "decide Decision",
    "calibration.selective": "ood_gate selective Gate",
    "core.drawn_functions": "DrawnFunctions MemberFunctions",
    "core.networks": "NetworksPosterior StackedPosterior",
    "core.particles": "Particles",
    "evaluation.evaluate": "count_operations evaluate",
    "evaluation.evaluation": "Evaluation",
    "evaluation.member_diagnostics": "convergence member_distances Convergence DistancesOverTraining MemberDistances",
    "evaluation.robustness_curves": "AttackCurves Corruptions",
    "export_model": "export",
    "frozen_backbone": "cache_features heads BackboneAndHead",
    "layers.modulation": "Modulation",
    "layers.nodes": "capacity Capacity",
    "likelihoods.multilabel": "MultiLabel MultiLabelPredictive",
    "likelihoods.tokens": "SequencePredictive Tokens TokenPredictive",
    "methods.parts.empcov_prior": "EmpCov",
    "methods.parts.sampling_posterior": "RecordingPosterior SamplingPosterior",
    "numerics.annealing": "Annealing",
    "numerics.lengthscales": "pca_lengthscales Lengthscales",
    "storage": "load save",
    "training.fit": "fit refresh",
    "training.history": "Epoch History",
    "training.watching": "watching",
    "utils.parameter_groups": "Group",
}
_HOMES = {name: home for home, names in _LAZY.items() for name in names.split()}
_ROOMS = ("attacks", "data", "distributed", "integrations", "landscape", "metrics", "nets", "sklearn", "theory")

__all__ = [
    "HMC", "LIT", "MAP", "METHODS", "SGHMC", "SVGD", "SWA", "SWAG", "TRADI", "Annealing", "AttackCurves",
    "BackboneAndHead", "BatchEnsemble", "Calibrated", "Capacity", "Classification", "ClassificationPredictive",
    "Conformal", "Convergence", "Corruptions", "Decision", "DeepEnsemble", "DistancesOverTraining", "Diverged",
    "DrawnFunctions", "DropoutEnsemble", "EmpCov", "Epoch", "Evaluation", "FeatureRDE", "FoRDE", "FunctionRDE",
    "Gate", "GaussianPerturbation", "GaussianPrior", "Group", "HeteroscedasticRegression", "History",
    "ImagePrediction", "Laplace", "Lengthscales", "Likelihood", "Loader", "MCDropout", "MeanFieldVI",
    "MemberDistances", "MemberFunctions", "Modulation", "MultiLabel", "MultiLabelPredictive", "NetworksPosterior",
    "NodeBNN", "Particles", "Posterior", "Predictive", "Prior", "RankOneBNN", "Recorder", "RecordingPosterior",
    "Regression", "RegressionPredictive", "SamplingPosterior", "SequencePredictive", "SnapshotEnsemble",
    "StackedPosterior", "SummaryPredictive", "TokenPredictive", "Tokens", "WeightRDE", "attacks", "bench", "branch",
    "cache_features", "calibrate", "capacity", "conformal", "convergence", "count_operations", "data", "decide",
    "distributed", "evaluate", "export", "fit", "heads", "integrations", "landscape", "load", "member_distances",
    "metrics", "nets", "ood_gate", "pca_lengthscales", "predict", "predict_batches", "predict_image", "refresh",
    "report", "save", "selective", "sklearn", "summarise", "temperature_scale", "theory", "track", "watching",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in (*_ROOMS, "bench"):  # the bench stands above everything, so nothing here imports it
        return import_module(f"dissensus.{name}")
    if name not in __all__:
        raise AttributeError(unknown_name("a name in dissensus, one", name, [*_ROOMS, *__all__], ["dir(dissensus)"]))
    value = globals()[name] = getattr(import_module(f"dissensus.{_HOMES.get(name, 'methods')}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
