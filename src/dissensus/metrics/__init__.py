"""Metrics: plain functions on tensors, imported at once, and torchmetrics classes over them, imported on first use.

dissensus.metrics.ece(probabilities, y)      # a function
dissensus.metrics.ECE(bins=15)               # a torchmetrics.Metric; pip install 'dissensus[torchmetrics]'
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from dissensus.metrics.bootstrap import (
    Comparison,
    Interval,
    McNemar,
    bootstrap_interval,
    bootstrap_mean,
    bootstrap_two_samples,
    mcnemar,
    paired_bootstrap,
    paired_test,
)
from dissensus.metrics.calibration import (
    ReliabilityBins,
    adaptive_ece,
    classwise_ece,
    debiased_ece,
    debiased_squared_ece,
    ece,
    reliability_bins,
    union_ece,
)
from dissensus.metrics.diversity import (
    EnsembleGain,
    disagreement,
    effective_members,
    effective_members_regression,
    ensemble_gain,
    ensemble_gain_of,
    mixture_log_probabilities,
    pairwise_kl,
)
from dissensus.metrics.ood_scores import (
    energy_score,
    entropy_score,
    max_probability_score,
    mutual_information_score,
)
from dissensus.metrics.proper import (
    BrierDecomposition,
    accuracy,
    accuracy_values,
    brier,
    brier_decomposition,
    brier_values,
    confusion_matrix,
    intersection_over_union,
    miou,
    nll,
    nll_values,
)
from dissensus.metrics.ranking import (
    PerImageOOD,
    PrecisionRecallCurve,
    RocCurve,
    aupr,
    aupr_adjusted,
    aupr_in,
    auroc,
    fpr95,
    fpr95_in,
    per_image_ood,
    precision_recall_curve,
    roc_curve,
)
from dissensus.metrics.regression import (
    Gaussian,
    Unstandardised,
    crps_gaussian,
    crps_mixture,
    crps_mixture_values,
    gaussian_nll,
    gaussian_nll_values,
    interval_coverage,
    interval_coverage_values,
    mean_interval_width,
    mixture_nll,
    mixture_nll_values,
    moment_match,
    pinball_loss,
    rmse,
    unstandardise,
)
from dissensus.metrics.selective import RiskCoverage, aurc, excess_aurc, risk_coverage
from dissensus.metrics.streaming import Bounded, CalibrationBins, ConfusionCounts, ScoreHistogram

if TYPE_CHECKING:
    from dissensus.metrics.modular import (
        AUPR,
        AUROC,
        CRPS,
        ECE,
        FPR95,
        NLL,
        RMSE,
        Accuracy,
        Brier,
        Gathered,
        GaussianNLL,
        IntervalCoverage,
        MIoU,
        MixtureNLL,
    )

__all__ = [
    "AUPR",
    "AUROC",
    "CRPS",
    "ECE",
    "FPR95",
    "NLL",
    "RMSE",
    "Accuracy",
    "Bounded",
    "Brier",
    "BrierDecomposition",
    "CalibrationBins",
    "Comparison",
    "ConfusionCounts",
    "EnsembleGain",
    "Gathered",
    "Gaussian",
    "GaussianNLL",
    "Interval",
    "IntervalCoverage",
    "MIoU",
    "McNemar",
    "MixtureNLL",
    "PerImageOOD",
    "PrecisionRecallCurve",
    "ReliabilityBins",
    "RiskCoverage",
    "RocCurve",
    "ScoreHistogram",
    "Unstandardised",
    "accuracy",
    "accuracy_values",
    "adaptive_ece",
    "aupr",
    "aupr_adjusted",
    "aupr_in",
    "aurc",
    "auroc",
    "bootstrap_interval",
    "bootstrap_mean",
    "bootstrap_two_samples",
    "brier",
    "brier_decomposition",
    "brier_values",
    "classwise_ece",
    "confusion_matrix",
    "crps_gaussian",
    "crps_mixture",
    "crps_mixture_values",
    "debiased_ece",
    "debiased_squared_ece",
    "disagreement",
    "ece",
    "effective_members",
    "effective_members_regression",
    "energy_score",
    "ensemble_gain",
    "ensemble_gain_of",
    "entropy_score",
    "excess_aurc",
    "fpr95",
    "fpr95_in",
    "gaussian_nll",
    "gaussian_nll_values",
    "intersection_over_union",
    "interval_coverage",
    "interval_coverage_values",
    "max_probability_score",
    "mcnemar",
    "mean_interval_width",
    "miou",
    "mixture_log_probabilities",
    "mixture_nll",
    "mixture_nll_values",
    "moment_match",
    "mutual_information_score",
    "nll",
    "nll_values",
    "paired_bootstrap",
    "paired_test",
    "pairwise_kl",
    "per_image_ood",
    "pinball_loss",
    "precision_recall_curve",
    "reliability_bins",
    "risk_coverage",
    "rmse",
    "roc_curve",
    "union_ece",
    "unstandardise",
]


# The torchmetrics classes: the names that the imports above did not bind.
CLASSES = frozenset(__all__) - frozenset(globals())
if sys.modules.get("torchmetrics") is None and importlib.util.find_spec("torchmetrics") is None:
    __all__ = [name for name in __all__ if name not in CLASSES]  # or `import *` would fail


def __getattr__(name: str) -> Any:
    """A torchmetrics class of `modular`, which is imported now."""
    if name not in CLASSES:
        raise AttributeError(f"module 'dissensus.metrics' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module("dissensus.metrics.modular"), name)
    except ModuleNotFoundError as error:
        if error.name != "torchmetrics":
            raise
        raise ImportError(
            f"expected torchmetrics for dissensus.metrics.{name}, got none; pip install 'dissensus[torchmetrics]'",
            name="torchmetrics",
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
