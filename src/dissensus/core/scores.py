"""The scores of `dissensus.numerics.scores`, under the name that was promised."""

from dissensus.numerics.scores import (
    MATRICES,
    RIDGE,
    Score,
    apply_matrix,
    check_score,
    kde,
    kde_matrix,
    kernel_and_bandwidth,
    slopes,
    spectral_stein,
    spectral_stein_at,
    spectral_stein_matrix,
    stein,
    stein_matrix,
    svgd,
)

__all__ = [
    "MATRICES",
    "RIDGE",
    "Score",
    "apply_matrix",
    "check_score",
    "kde",
    "kde_matrix",
    "kernel_and_bandwidth",
    "slopes",
    "spectral_stein",
    "spectral_stein_at",
    "spectral_stein_matrix",
    "stein",
    "stein_matrix",
    "svgd",
]
