"""Analytic kernels against many random networks: small ones here, wide ones in the slow suite."""

import numpy as np
import pytest
import torch
from torch import nn

from dissensus import theory
from dissensus.bench import theory_studies
from dissensus.bench.report.comparisons import array_over, mean_interval, slope_weights
from dissensus.nets import Residual

LAW = {"weight_variance": 2.0, "bias_variance": 0.1}
VECTORS = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(1))


def dense(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 4),
    )  # fmt: skip


def flat(width: int) -> nn.Module:
    return nn.Sequential(*convolutions(width), nn.Flatten(), nn.Linear(25 * width, 4))


def pooled(width: int) -> nn.Module:
    return nn.Sequential(*convolutions(width), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4))


def residual(width: int) -> nn.Module:
    branch = nn.Sequential(nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
    start = nn.Conv2d(3, width, 3, padding=1)
    return nn.Sequential(start, Residual(branch), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4))


def convolutions(width: int) -> list[nn.Module]:
    return [nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]


def deviation(layers: nn.Module, x: torch.Tensor, networks: int, bias: float) -> float:
    """Largest distance of the mean over networks from the analytic kernels, in standard errors; `bias`: a share allowed."""
    expected, found = theory.kernel(layers, x, **LAW), []
    generator = torch.Generator().manual_seed(0)
    for _ in range(networks):
        network = theory.random_network(layers, **LAW, generator=generator)
        with torch.no_grad():
            f = network(x)
        tangent = theory.empirical_ntk(network, x).diagonal(dim1=2, dim2=3).mean(-1)
        found.append(torch.stack([f @ f.T / f.shape[1], tangent]).double())
    each, wanted = torch.stack(found), torch.stack([expected.nngp, expected.ntk])
    error = each.std(0) / networks**0.5
    return float((((each.mean(0) - wanted).abs() - bias * wanted.abs()).clamp(min=0) / error).max())


@pytest.mark.parametrize(
    ("make", "x"),
    [(dense, VECTORS), *(pytest.param(each, IMAGES, marks=pytest.mark.slow) for each in (residual, flat, pooled))],
)
def test_small_networks_have_the_analytic_kernels(make, x):
    """60 networks of 32 units or channels: four standard errors and a bias of order 1/width."""
    assert deviation(make(32), x, networks=60, bias=2 / 32) < 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "x", "width"),
    [(dense, VECTORS, 2048), (flat, IMAGES, 256), (pooled, IMAGES, 256), (residual, IMAGES, 256)],
)
def test_wide_networks_have_the_analytic_kernels(make, x, width):
    # Three standard errors for one value; the largest of all distinct ones is as rarely beyond what Bonferroni makes of it.
    # Seeds 0 and 1 of the dense network gave 3.2 and 2.2, with deviations of opposite signs: no bias is seen.
    values = len(x) * (len(x) + 1)
    allowed = float(torch.special.ndtri(torch.tensor(1 - 0.00135 / values, dtype=torch.float64)))
    assert deviation(make(width), x, networks=200, bias=0.0) < allowed


@pytest.mark.slow
def test_the_error_of_predicted_training_falls_as_one_over_the_root_of_the_width():
    rows = theory_studies.width((375, 750, 1500), seeds=40, members=4).rows
    errors = array_over(
        rows, "error", setting=theory_studies.SETTINGS, seed=range(40), width=(375, 750, 1500)
    )  # (2, S, W, 1)
    for mine in errors:
        _, lower, upper, _ = mean_interval(slope_weights((375, 750, 1500)) @ np.log2(mine))
        assert lower < -0.5 < upper
        assert mine[:, -1].mean() < 0.1
