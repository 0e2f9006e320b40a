"""What members say on the grid of a data set one can look at: numbers by region, and what figures are drawn from."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from dissensus.bench.rows.geometry import Geometry
from dissensus.core.predictive import ClassificationPredictive, Predictive
from dissensus.evaluation.evaluation import Evaluation

SHOWN = 10  # members drawn one by one
POINTS = 2000  # training rows drawn at most


def with_grid(evaluation: Evaluation, predictive: Predictive, geometry: Geometry, targets: Tensor) -> Evaluation:
    """The evaluation with region/NAME/sd or region/NAME/entropy, and arrays grid/…; targets: of the training rows.

    sd: mean over the region of the standard deviation of the members' means, √epistemic. entropy: mean of the entropy of
    the mean probabilities, in nats.
    """
    if len(predictive) != len(geometry.positions) or predictive.mean.ndim != 2:
        raise ValueError(
            f"expected predictions at the {len(geometry.positions)} points of the grid, got {predictive}; evaluate with --again"
        )
    arrays = {"positions": geometry.positions, "seen": geometry.seen[:POINTS], "targets": targets[:POINTS]}
    if isinstance(predictive, ClassificationPredictive):
        quantity, values = "entropy", predictive.total  # (n,)
        arrays["entropy"] = values
    else:
        quantity, values = "sd", predictive.epistemic[:, 0].sqrt()  # (n,)
        arrays |= {"mean": predictive.mean[:, 0], "sd": values, "members": predictive.members[:SHOWN, :, 0]}
    found = {
        f"region/{name}/{quantity}": float(values[where].double().mean()) for name, where in geometry.regions.items()
    }
    single = {
        f"grid/{name}": tensor.float() if tensor.is_floating_point() else tensor for name, tensor in arrays.items()
    }
    return replace(evaluation, metrics=evaluation.metrics | found, arrays=evaluation.arrays | single)
