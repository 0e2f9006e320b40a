"""Metrics: plain functions on tensors, and torchmetrics classes built on them, which are imported on first use.

dissensus.metrics.ece(probabilities, y)      # a function
dissensus.metrics.ECE(bins=15)               # a torchmetrics.Metric; pip install 'dissensus[torchmetrics]'
"""

# ruff: noqa: F403, F405 - the names of __all__ are those of the files below
import importlib
from typing import TYPE_CHECKING, Any

from dissensus.metrics.bootstrap import *
from dissensus.metrics.chain_diagnostics import *
from dissensus.metrics.classification import *
from dissensus.metrics.diversity import *
from dissensus.metrics.ranking import *
from dissensus.metrics.regression import *
from dissensus.metrics.streaming import *
from dissensus.utils.extras import is_installed, require_extra

if TYPE_CHECKING:
    from dissensus.metrics.torchmetrics_classes import *

__all__ = [
    "Bounded", "BrierDecomposition", "CalibrationBins", "Comparison", "ConfusionCounts", "EnsembleGain", "Gaussian",
    "Interval", "McNemar", "PerImageOOD", "PrecisionRecallCurve", "ReliabilityBins", "RiskCoverage", "RiskHistogram",
    "RocCurve", "ScoreHistogram", "Unstandardised", "accuracy", "accuracy_values", "adaptive_ece", "agreement", "augrc",
    "aupr", "aupr_adjusted", "aupr_in", "aurc", "auroc", "bootstrap_interval", "bootstrap_mean",
    "bootstrap_two_samples", "brier", "brier_decomposition", "brier_values", "classwise_ece", "confusion_matrix",
    "coverage_at_risk", "crps_gaussian", "crps_mixture", "crps_mixture_values", "debiased_ece", "debiased_squared_ece",
    "disagreement", "ece", "effective_members", "effective_members_regression", "effective_sample_size", "energy_score",
    "ensemble_gain", "ensemble_gain_of", "epistemic_uncertainty", "excess_aurc", "fpr95", "fpr95_in", "gaussian_nll",
    "gaussian_nll_values", "intersection_over_union", "interval_coverage", "interval_coverage_values",
    "max_probability_score", "mcnemar", "mean_interval_width", "miou", "mixture_log_probabilities", "mixture_nll",
    "mixture_nll_values", "mixture_total_variation", "mixture_total_variation_values", "moment_match",
    "nll", "nll_values", "paired_bootstrap", "paired_test", "pairwise_kl", "per_image_ood",
    "pinball_loss", "precision_recall_curve", "reliability_bins", "risk_coverage", "rmse", "roc_curve", "smooth_ece",
    "split_rhat", "total_uncertainty", "total_variation", "total_variation_values", "union_ece", "unstandardise",
]  # fmt: skip
# torchmetrics classes, imported on first use
CLASSES = ["AUPR", "AUROC", "CRPS", "ECE", "FPR95", "NLL", "RMSE", "Accuracy", "Brier", "Gathered"]
CLASSES += ["GaussianNLL", "IntervalCoverage", "MIoU", "MixtureNLL"]
RENAMED = {"entropy_score": "use total_uncertainty", "mutual_information_score": "use epistemic_uncertainty"}
if is_installed("torchmetrics"):
    __all__ += CLASSES  # else `import *` would fail


def __getattr__(name: str) -> Any:
    """Imports `torchmetrics_classes` and returns one of its torchmetrics classes."""
    if name not in CLASSES:
        hint = RENAMED.get(name, "see dir(dissensus.metrics)")
        raise AttributeError(f"module 'dissensus.metrics' has no attribute {name!r}; {hint}")
    require_extra("torchmetrics")
    return getattr(importlib.import_module("dissensus.metrics.torchmetrics_classes"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
