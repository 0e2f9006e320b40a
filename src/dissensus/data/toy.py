"""Small synthetic problems to look at: classes in the plane, regressions on the line.

Every function draws in float64 from its own generator and returns x (N, D) and y, (N,) int64 classes or (N, 1) targets.
"""

import math

import numpy as np
import torch
from torch import Tensor

from dissensus.data.file_formats import open_embedded
from dissensus.utils.checks import integer, number

Points = tuple[Tensor, Tensor]
Dtype = torch.dtype
FLOAT = torch.float32


def two_moons(count: int = 1500, *, noise: float = 0.1, seed: int = 0, dtype: Dtype = FLOAT) -> Points:
    """Two classes on interleaved half circles: x (count, 2) and y (count,) in {0, 1}; noise: standard deviation per axis."""
    integer("count", count)
    upper = torch.linspace(0, math.pi, count // 2, dtype=torch.float64)
    lower = torch.linspace(0, math.pi, count - count // 2, dtype=torch.float64)
    halves = torch.stack([upper.cos(), upper.sin()], 1), torch.stack([1 - lower.cos(), 0.5 - lower.sin()], 1)
    x = torch.cat(halves)  # (count, 2)
    generator = torch.Generator().manual_seed(seed)
    x = x + noise * _normal(x.shape, generator)
    return _shuffle_rows(x.to(dtype), _classes(len(upper), len(lower)), generator)


def five_blobs(
    points: int = 40, *, radius: float = 5.0, std: float = 1.0, scale: float = 1.0, seed: int = 0, dtype: Dtype = FLOAT
) -> Points:
    """Five Gaussian blobs on a ring that starts at the top: x (5 · points, 2) and y (5 · points,) in 0 … 4.

    The set of the repulsive-ensemble papers: 40 points per class for training and, with another seed, 20 for testing.
    `scale` multiplies both radius and std; 0.4 gives the smaller picture in the FoRDE paper.
    """
    integer("points", points)
    angles = math.pi / 2 + 2 * math.pi / 5 * torch.arange(5, dtype=torch.float64)
    centres = radius * torch.stack([angles.cos(), angles.sin()], 1)  # (5, 2)
    generator = torch.Generator().manual_seed(seed)
    x = centres.repeat_interleave(points, 0) + std * _normal((5 * points, 2), generator)
    return _shuffle_rows((scale * x).to(dtype), _classes(*[points] * 5), generator)


def donuts(
    count: int = 500, *, radii: tuple[float, float] = (2.0, 5.0), std: float = 0.3, seed: int = 0, dtype: Dtype = FLOAT
) -> Points:
    """Two classes on rings about the origin: x (count, 2) and y (count,), 0 on the inner ring.

    `radii`: radii of the inner and the outer ring. `std`: standard deviation of the distance to the origin.
    """
    integer("count", count)
    y = _classes(count // 2, count - count // 2)
    generator = torch.Generator().manual_seed(seed)
    return _shuffle_rows(_ring(torch.tensor(radii, dtype=torch.float64)[y], std, generator).to(dtype), y, generator)


def far_ring(
    count: int = 200, *, centre: int = 50, radius: float = 15.0, std: float = 1.0, seed: int = 0, dtype: Dtype = FLOAT
) -> Tensor:
    """Out-of-distribution points for `five_blobs`, x (count + centre, 2): first a wide ring, then N(0, std²) in its middle."""
    integer("count", count)
    generator = torch.Generator().manual_seed(seed)
    ring = _ring(torch.full((count,), radius, dtype=torch.float64), std, generator)
    return torch.cat([ring, std * _normal((centre, 2), generator)]).to(dtype)


def x_sin_x(points: int = 45, *, noise: float = 0.25, seed: int = 0, dtype: Dtype = FLOAT) -> Points:
    """Regression with a gap: x (2 · points, 1) in U[1.5, 2.5] and U[4.5, 6], y = x sin x + noise · N(0, 1)."""
    integer("points", points)
    generator = torch.Generator().manual_seed(seed)
    x = torch.cat([_uniform((points, 1), 1.5, 2.5, generator), _uniform((points, 1), 4.5, 6.0, generator)])
    return _add_noise(x, x * x.sin(), noise, generator, dtype)


def cubic(count: int = 20, *, noise: float = 3.0, seed: int = 0, dtype: Dtype = FLOAT) -> Points:
    """Cubic regression: x (count, 1) in U[−4, 4] and y = x³ + noise · N(0, 1), usually plotted on [−6, 6]."""
    integer("count", count)
    generator = torch.Generator().manual_seed(seed)
    x = _uniform((count, 1), -4.0, 4.0, generator)
    return _add_noise(x, x**3, noise, generator, dtype)


def cubic_gap(count: int = 201, *, noise: float = 2.0, seed: int = 0, dtype: Dtype = FLOAT) -> Points:
    """Cubic regression with a gap: x (2 · count, 1) on even grids over [−3, −1] and [1, 3], y = x³ + noise · N(0, 1).

    The toy set of iBNN (Trinh, Kaski & Heinonen 2020), with steps of 0.01.
    """
    integer("count", count)
    generator = torch.Generator().manual_seed(seed)
    right = torch.linspace(1.0, 3.0, count, dtype=torch.float64)[:, None]
    x = torch.cat([-right.flip(0), right])
    return _add_noise(x, x**3, noise, generator, dtype)


def hill(points: int = 3, *, noise: float = 0.0, seed: int = 0, dtype: Dtype = FLOAT) -> Points:
    """A symmetric hill: x (4 · points − 1, 1) on even grids, y = 1 on [−½, ½], −1 on [−2½, −1½] and [1½, 2½], plus noise.

    The noise is noise · N(0, 1). A monotone function, such as a network with one hidden unit, can fit only one of the two
    slopes; its posterior has two modes of equal weight.
    """
    integer("points", points)
    right = torch.linspace(1.5, 2.5, points, dtype=torch.float64)[:, None]
    top = torch.linspace(-0.5, 0.5, 2 * points - 1, dtype=torch.float64)[:, None]
    x = torch.cat([-right.flip(0), top, right])
    return _add_noise(x, torch.where(x.abs() < 1, 1.0, -1.0), noise, torch.Generator().manual_seed(seed), dtype)


def gaussian_process(
    count: int = 50,
    *,
    lengthscale: float = 1.0,
    amplitude: float = 1.0,
    noise: float = 0.1,
    low: float = -4.0,
    high: float = 4.0,
    seed: int = 0,
    dtype: Dtype = FLOAT,
) -> Points:
    """Regression on a Gaussian-process sample f: x (count, 1) in U[low, high] and y = f(x) + noise · N(0, 1).

    f has the RBF kernel k(x, x') = amplitude² exp(−(x − x')² / (2 lengthscale²)). The same seed with noise=0 gives f there.
    """
    integer("count", count)
    number("lengthscale", lengthscale, above=0)
    generator = torch.Generator().manual_seed(seed)
    x = _uniform((count, 1), low, high, generator)
    kernel = torch.exp(-0.5 * ((x - x.T) / lengthscale) ** 2)
    # float64 and a jitter of 1e-9 on the unit diagonal: the kernel of near points is singular to working precision
    factor = torch.linalg.cholesky(kernel + 1e-9 * torch.eye(count, dtype=torch.float64))
    return _add_noise(x, amplitude * factor @ _normal((count, 1), generator), noise, generator, dtype)


def three_clusters(*, dtype: Dtype = FLOAT) -> Points:
    """Regression with three clusters of inputs and gaps between them: features x (400, 2) and targets y (400, 1).

    The set of Izmailov et al. 2019, "Subspace Inference for Bayesian Deep Learning". The points are fixed: there is no seed.
    """
    points = torch.from_numpy(np.load(open_embedded("regression_400x2.npy"), allow_pickle=False))
    return quadratic_features(points[:, :1]).to(dtype), points[:, 1:].to(dtype)


def quadratic_features(x: Tensor) -> Tensor:
    """Features [x/2, (x/2)²] (N, 2) of inputs (N, 1), as in `three_clusters`; use them for a grid to plot over."""
    if x.ndim != 2 or x.shape[1] != 1:
        raise ValueError(f"expected inputs of shape (N, 1), got {tuple(x.shape)}; add a last axis with x[:, None]")
    return torch.cat([x / 2, (x / 2) ** 2], 1)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def _add_noise(x: Tensor, clean: Tensor, noise: float, generator: torch.Generator, dtype: torch.dtype) -> Points:
    """(x, clean targets + noise · N(0, 1)) in this dtype."""
    return x.to(dtype), (clean + noise * _normal(x.shape, generator)).to(dtype)


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, dtype=torch.float64, generator=generator)


def _ring(radius: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """(N, 2) points at a uniform angle and a distance radius + std · N(0, 1); radius (N,)."""
    angle = _uniform(tuple(radius.shape), 0.0, 2 * math.pi, generator)
    distance = radius + std * _normal(tuple(radius.shape), generator)
    return distance[:, None] * torch.stack([angle.cos(), angle.sin()], 1)


def _shuffle_rows(x: Tensor, y: Tensor, generator: torch.Generator) -> Points:
    """Rows in random order, so that the first rows are a fair sample."""
    order = torch.randperm(len(x), generator=generator)
    return x[order], y[order]


def _classes(*counts: int) -> Tensor:
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
