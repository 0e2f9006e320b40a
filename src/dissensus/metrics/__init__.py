"""Metrics: plain functions on tensors, and torchmetrics classes built on them, which are imported on first use.

dissensus.metrics.ece(probabilities, y)      # a function
dissensus.metrics.ECE(bins=15)               # a torchmetrics.Metric; pip install 'dissensus[torchmetrics]'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dissensus.metrics.bootstrap import Comparison as Comparison
from dissensus.metrics.bootstrap import Interval as Interval
from dissensus.metrics.bootstrap import McNemar as McNemar
from dissensus.metrics.bootstrap import bootstrap_interval as bootstrap_interval
from dissensus.metrics.bootstrap import bootstrap_mean as bootstrap_mean
from dissensus.metrics.bootstrap import bootstrap_two_samples as bootstrap_two_samples
from dissensus.metrics.bootstrap import mcnemar as mcnemar
from dissensus.metrics.bootstrap import paired_bootstrap as paired_bootstrap
from dissensus.metrics.bootstrap import paired_test as paired_test
from dissensus.metrics.calibration import ReliabilityBins as ReliabilityBins
from dissensus.metrics.calibration import adaptive_ece as adaptive_ece
from dissensus.metrics.calibration import classwise_ece as classwise_ece
from dissensus.metrics.calibration import debiased_ece as debiased_ece
from dissensus.metrics.calibration import debiased_squared_ece as debiased_squared_ece
from dissensus.metrics.calibration import ece as ece
from dissensus.metrics.calibration import reliability_bins as reliability_bins
from dissensus.metrics.calibration import union_ece as union_ece
from dissensus.metrics.chain_diagnostics import effective_sample_size as effective_sample_size
from dissensus.metrics.chain_diagnostics import split_rhat as split_rhat
from dissensus.metrics.diversity import EnsembleGain as EnsembleGain
from dissensus.metrics.diversity import disagreement as disagreement
from dissensus.metrics.diversity import effective_members as effective_members
from dissensus.metrics.diversity import effective_members_regression as effective_members_regression
from dissensus.metrics.diversity import ensemble_gain as ensemble_gain
from dissensus.metrics.diversity import ensemble_gain_of as ensemble_gain_of
from dissensus.metrics.diversity import mixture_log_probabilities as mixture_log_probabilities
from dissensus.metrics.diversity import pairwise_kl as pairwise_kl
from dissensus.metrics.ood import PerImageOOD as PerImageOOD
from dissensus.metrics.ood import PrecisionRecallCurve as PrecisionRecallCurve
from dissensus.metrics.ood import RocCurve as RocCurve
from dissensus.metrics.ood import aupr as aupr
from dissensus.metrics.ood import aupr_adjusted as aupr_adjusted
from dissensus.metrics.ood import aupr_in as aupr_in
from dissensus.metrics.ood import auroc as auroc
from dissensus.metrics.ood import energy_score as energy_score
from dissensus.metrics.ood import entropy_score as entropy_score
from dissensus.metrics.ood import fpr95 as fpr95
from dissensus.metrics.ood import fpr95_in as fpr95_in
from dissensus.metrics.ood import max_probability_score as max_probability_score
from dissensus.metrics.ood import mutual_information_score as mutual_information_score
from dissensus.metrics.ood import per_image_ood as per_image_ood
from dissensus.metrics.ood import precision_recall_curve as precision_recall_curve
from dissensus.metrics.ood import roc_curve as roc_curve
from dissensus.metrics.predictive_distances import agreement as agreement
from dissensus.metrics.predictive_distances import mixture_total_variation as mixture_total_variation
from dissensus.metrics.predictive_distances import mixture_total_variation_values as mixture_total_variation_values
from dissensus.metrics.predictive_distances import total_variation as total_variation
from dissensus.metrics.predictive_distances import total_variation_values as total_variation_values
from dissensus.metrics.proper_scores import BrierDecomposition as BrierDecomposition
from dissensus.metrics.proper_scores import accuracy as accuracy
from dissensus.metrics.proper_scores import accuracy_values as accuracy_values
from dissensus.metrics.proper_scores import brier as brier
from dissensus.metrics.proper_scores import brier_decomposition as brier_decomposition
from dissensus.metrics.proper_scores import brier_values as brier_values
from dissensus.metrics.proper_scores import confusion_matrix as confusion_matrix
from dissensus.metrics.proper_scores import intersection_over_union as intersection_over_union
from dissensus.metrics.proper_scores import miou as miou
from dissensus.metrics.proper_scores import nll as nll
from dissensus.metrics.proper_scores import nll_values as nll_values
from dissensus.metrics.regression import Gaussian as Gaussian
from dissensus.metrics.regression import Unstandardised as Unstandardised
from dissensus.metrics.regression import crps_gaussian as crps_gaussian
from dissensus.metrics.regression import crps_mixture as crps_mixture
from dissensus.metrics.regression import crps_mixture_values as crps_mixture_values
from dissensus.metrics.regression import gaussian_nll as gaussian_nll
from dissensus.metrics.regression import gaussian_nll_values as gaussian_nll_values
from dissensus.metrics.regression import interval_coverage as interval_coverage
from dissensus.metrics.regression import interval_coverage_values as interval_coverage_values
from dissensus.metrics.regression import mean_interval_width as mean_interval_width
from dissensus.metrics.regression import mixture_nll as mixture_nll
from dissensus.metrics.regression import mixture_nll_values as mixture_nll_values
from dissensus.metrics.regression import moment_match as moment_match
from dissensus.metrics.regression import pinball_loss as pinball_loss
from dissensus.metrics.regression import rmse as rmse
from dissensus.metrics.regression import unstandardise as unstandardise
from dissensus.metrics.selective import RiskCoverage as RiskCoverage
from dissensus.metrics.selective import aurc as aurc
from dissensus.metrics.selective import excess_aurc as excess_aurc
from dissensus.metrics.selective import risk_coverage as risk_coverage
from dissensus.metrics.streaming import Bounded as Bounded
from dissensus.metrics.streaming import CalibrationBins as CalibrationBins
from dissensus.metrics.streaming import ConfusionCounts as ConfusionCounts
from dissensus.metrics.streaming import RiskHistogram as RiskHistogram
from dissensus.metrics.streaming import ScoreHistogram as ScoreHistogram
from dissensus.utils.extras import is_installed, require_extra

if TYPE_CHECKING:
    from dissensus.metrics.torchmetrics_classes import *  # noqa: F403

# torchmetrics classes, imported on first use
CLASSES = ["AUPR", "AUROC", "CRPS", "ECE", "FPR95", "NLL", "RMSE", "Accuracy", "Brier", "Gathered"]
CLASSES += ["GaussianNLL", "IntervalCoverage", "MIoU", "MixtureNLL"]
__all__ = sorted(name for name, value in globals().items() if getattr(value, "__module__", "").startswith(__name__))
if is_installed("torchmetrics"):
    __all__ += CLASSES  # else `import *` would fail


def __getattr__(name: str) -> Any:
    """Imports `torchmetrics_classes` and returns one of its torchmetrics classes."""
    if name not in CLASSES:
        raise AttributeError(f"module 'dissensus.metrics' has no attribute {name!r}")
    require_extra("torchmetrics")
    return getattr(importlib.import_module("dissensus.metrics.torchmetrics_classes"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
