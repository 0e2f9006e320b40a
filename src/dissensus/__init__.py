"""dissensus: turn any network into a distribution over networks, and say how sure it is."""

from dissensus import data, metrics, nets
from dissensus.core.errors import Diverged
from dissensus.core.likelihood import Classification, HeteroscedasticRegression, Likelihood, Regression
from dissensus.core.posterior import Posterior, refresh
from dissensus.core.predictive import ClassificationPredictive, Predictive, RegressionPredictive
from dissensus.core.summary import SummaryPredictive
from dissensus.history import Epoch, History
from dissensus.methods import MAP, METHODS, DeepEnsemble, MCDropout
from dissensus.predict import predict, predict_batches, summarise
from dissensus.storage import load, save
from dissensus.temperature import temperature_scale
from dissensus.train import fit

__version__ = "0.1.0"

__all__ = [
    "MAP",
    "METHODS",
    "Classification",
    "ClassificationPredictive",
    "DeepEnsemble",
    "Diverged",
    "Epoch",
    "HeteroscedasticRegression",
    "History",
    "Likelihood",
    "MCDropout",
    "Posterior",
    "Predictive",
    "Regression",
    "RegressionPredictive",
    "SummaryPredictive",
    "data",
    "fit",
    "load",
    "metrics",
    "nets",
    "predict",
    "predict_batches",
    "refresh",
    "save",
    "summarise",
    "temperature_scale",
]
