"""The kernels of `dissensus.numerics.kernels`, under the name that was promised."""

from dissensus.numerics.kernels import (
    BANDWIDTHS,
    EPSILON,
    FLOOR,
    Bandwidth,
    as_rows,
    batch_log_density,
    directions,
    input_gradient_log_density,
    median,
    median_bandwidth,
    rbf,
    squared_distances,
    working,
)

__all__ = [
    "BANDWIDTHS",
    "EPSILON",
    "FLOOR",
    "Bandwidth",
    "as_rows",
    "batch_log_density",
    "directions",
    "input_gradient_log_density",
    "median",
    "median_bandwidth",
    "rbf",
    "squared_distances",
    "working",
]
