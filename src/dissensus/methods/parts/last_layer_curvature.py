"""Curvature: the generalised Gauss–Newton matrix of a linear last layer; its evidence, variances and samples.

With outputs f = W φ (a bias is a feature that is 1), −log p(y | f) has a Hessian H in f, and

    G = Σ_n w_n H_n ⊗ φ_n φ_nᵀ            full: exact, (C D)² numbers
    G ≈ (Σ w_n H_n) ⊗ (Σ w_n φ_n φ_nᵀ) / Σ w_n      Kronecker-factored: C² + D²

Its eigenvalues λ give log determinants, evidence and samples at any prior precision δ:

    log p(y) ≈ log p(y | W*) − ½ δ ‖W*‖² − ½ Σ log(1 + λ/δ)                 (MacKay 1992; Daxberger et al. 2021)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from dissensus.utils.checks import number, one_of
from dissensus.utils.tensor_tree import Tensors

Structure = Literal["full", "kron"]
Precision = float | Literal["marginal_likelihood"]
LARGEST = 2**30  # bytes of one matrix in float64; its eigenvectors take as much again
CHUNK = 2**22  # float64 numbers processed at once when summing over rows


class CurvatureSums:
    """Sums over the examples of one pass over a loader, in float64; curvature is computed from them."""

    def __init__(self, structure: Structure, classes: int, features: int, device: torch.device) -> None:
        self.structure = structure
        like: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self.sums = [torch.zeros(side, side, **like) for side in _sides(structure, classes, features)]
        self.log_likelihood = torch.zeros((), **like)
        self.weight = torch.zeros((), **like)

    def add(self, features: Tensor, hessian: Tensor, outer: Tensor | None, weight: Tensor) -> None:
        """Adds rows: features (n, D), weights (n,), and Hessians, full (n, C, C) or diagonal (n, C), minus outer outerᵀ."""
        classes, width = hessian.shape[1], features.shape[1]
        self.weight += weight.sum()
        step = max(1, CHUNK // (classes * width))
        for rows in (slice(start, start + step) for start in range(0, len(features), step)):
            phi, a, w = features[rows], hessian[rows], weight[rows, None]  # (n, D), (n, C) or (n, C, C), (n, 1)
            u = None if outer is None else outer[rows]
            if self.structure == "kron":
                total = (w * a.flatten(1)).sum(0)
                total = torch.diag(total) if a.ndim == 2 else total.view(classes, classes)
                self.sums[0] += total - (0 if u is None else (w * u).mT @ u)
                self.sums[1] += (w * phi).mT @ phi
                continue
            blocks = self.sums[0].view(classes, width, classes, width)
            for c in range(classes):
                if a.ndim == 2:
                    blocks[c, :, c] += (w * a[:, c, None] * phi).mT @ phi
                else:
                    curved = (a[:, c, :, None] * phi[:, None, :]).flatten(1)  # (n, C D)
                    blocks[c] += ((w * phi).mT @ curved).view(width, classes, width)
            if u is not None:
                z = (u[:, :, None] * phi[:, None, :]).flatten(1)  # (n, C D)
                self.sums[0] -= (w * z).mT @ z


class Curvature(nn.Module):
    """N(mean, (G + δ)⁻¹) over the last layer's weights and biases, (C, D), stored as eigenvalues and eigenvectors of G.

    Stays in float64 when the posterior is cast: half precision cannot hold the range of the eigenvalues.
    """

    mean: Tensor  # (C, D)
    eigenvalues: Tensor  # (C D,) or (C, D)
    log_likelihood: Tensor  # () of the data at the mean
    precision: Tensor  # () δ
    layer: Tensor  # () number of the layer among the network's modules

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    @classmethod
    def from_sums(cls, gathered: CurvatureSums, mean: Tensor, *, layer: int) -> Self:
        """The curvature from these sums around the weights `mean` (C, D); the prior precision is not chosen yet."""
        values, vectors = zip(*map(eigendecompose, gathered.sums), strict=True)
        kron = gathered.structure == "kron"
        eigenvalues = torch.outer(*values) / gathered.weight if kron else values[0]
        return cls(_buffers_of(mean, eigenvalues, vectors, gathered.log_likelihood, layer))

    @classmethod
    def blank(cls, structure: Structure, classes: int, features: int, *, layer: int) -> Self:
        """A curvature of the right shapes, to be filled from a file."""
        sides = _sides(structure, classes, features)
        mean = torch.empty(classes, features, dtype=torch.float64)
        # Empty, not zeros: zeros would allocate the memory at once.
        vectors = [mean.new_empty(side, side) for side in sides]
        return cls(_buffers_of(mean, mean.new_empty(sides), vectors, mean.new_empty(()), layer))

    def log_marginal_likelihood(self, precision: Tensor) -> Tensor:
        """() log p(y) at a prior precision δ (), differentiable in it."""
        fit = self.log_likelihood - 0.5 * precision * self.mean.square().sum()
        return fit - 0.5 * torch.log1p(self.eigenvalues / precision).sum()

    def best_precision(self) -> float:
        """The prior precision that maximises the evidence: the only root of Σ λ/(λ + δ) = δ ‖mean‖², by bisection."""
        square, most = float(self.mean.square().sum()), float(self.eigenvalues.max())
        if not (square > 0 and most > 0 and math.isfinite(square) and math.isfinite(most)):
            got = f"‖W‖² = {square:g} and a largest eigenvalue of {most:g}"
            raise ValueError(f"expected finite non-zero weights and curvature, got {got}; pass prior_precision=")

        def excess(log_precision: float) -> float:  # decreases with the precision
            precision = math.exp(log_precision)
            return float((self.eigenvalues / (self.eigenvalues + precision)).sum()) - precision * square

        high = math.log(self.eigenvalues.numel() / square)  # Σ λ/(λ + δ) < C D
        low = high - 1.0
        while excess(low) <= 0:
            high, low = low, low - 2 * (high - low)
        while (middle := 0.5 * (low + high)) not in (low, high):
            low, high = (middle, high) if excess(middle) > 0 else (low, middle)
        return math.exp(middle)

    def sample_joint(self, noise: Tensor) -> Tensor:
        """(S, C, D) samples of N(0, (G + δ)⁻¹), from standard normal noise of that shape."""
        scaled = noise.reshape(len(noise), *self.eigenvalues.shape) * (self.eigenvalues + self.precision).rsqrt()
        if self.structure == "full":
            return (scaled @ self.get_buffer("vectors").mT).reshape(noise.shape)
        return self.get_buffer("outputs") @ scaled @ self.get_buffer("features").mT

    def sample_rows(self, noise: Tensor) -> Tensor:
        """As `joint`, but rows (the weights of one output) are sampled independently: N(0, Σ_cc), Σ = (G + δ)⁻¹."""
        variance = (self.eigenvalues + self.precision).reciprocal()
        if self.structure == "kron":  # Σ_cc = F diag(v_c) Fᵀ with v_c = Σ_s O_cs² / (λ_s. + δ)
            scaled = noise * (self.get_buffer("outputs").square() @ variance).sqrt()
            return scaled @ self.get_buffer("features").mT
        blocks = self.get_buffer("vectors").view(*self.mean.shape, -1)  # (C, D, C D)
        values, vectors = eigendecompose(
            torch.stack([(rows * variance) @ rows.mT for rows in blocks])
        )  # (C, D), (C, D, D)
        return torch.einsum("scd,ced->sce", noise * values.sqrt(), vectors)

    def variance(self) -> Tensor:
        """(C, D) marginal variances."""
        variance = (self.eigenvalues + self.precision).reciprocal()
        if self.structure == "full":
            return (self.get_buffer("vectors").square() @ variance).reshape(self.mean.shape)
        return self.get_buffer("outputs").square() @ variance @ self.get_buffer("features").square().mT

    @property
    def structure(self) -> Structure:
        return "full" if "vectors" in self._buffers else "kron"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        for name, buffer in self._buffers.items():
            if buffer is not None:
                moved = fn(buffer)
                self._buffers[name] = moved if moved.dtype == buffer.dtype else buffer.to(moved.device)
        return self


def _buffers_of(mean: Tensor, values: Tensor, vectors: Sequence[Tensor], log_likelihood: Tensor, layer: int) -> Tensors:
    """The buffers of a Curvature."""
    names = ("vectors",) if len(vectors) == 1 else ("outputs", "features")
    return {
        "mean": mean,
        "eigenvalues": values,
        **dict(zip(names, vectors, strict=True)),
        "log_likelihood": log_likelihood,
        "precision": torch.ones_like(log_likelihood),
        "layer": torch.tensor(layer, device=mean.device),
    }


def _sides(structure: Structure, classes: int, features: int) -> list[int]:
    """Rows of each matrix; raises before allocation if a matrix would be too large."""
    sides = {"full": [classes * features], "kron": [classes, features]}[structure]
    if 8 * max(sides) ** 2 > LARGEST:
        remedy = 'pass structure="kron"' if structure == "full" else "put a narrower layer last"
        most = f"{math.isqrt(LARGEST // 8):,} rows"
        raise ValueError(f"expected at most {most} in a {structure} curvature (1 GiB), got {max(sides):,}; {remedy}")
    return sides


def eigendecompose(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """(eigenvalues ≥ 0, eigenvectors in columns) of a matrix that is positive semidefinite up to rounding."""
    values, vectors = torch.linalg.eigh(matrix)
    return values.clamp(min=0.0), vectors.contiguous()


def check_precision(prior_precision: Precision) -> Precision:
    """The prior precision; raises unless it is a number above 0 or "marginal_likelihood"."""
    if isinstance(prior_precision, str):
        return one_of("prior_precision", prior_precision, ("marginal_likelihood",), hint="or pass 1/σ² of N(0, σ²)")
    return number("prior_precision", prior_precision, above=0, hint="pass 1/σ² of N(0, σ²)")


def resolve_precision(prior_precision: Precision, curvature: Curvature) -> float:
    """The prior precision as a number."""
    return curvature.best_precision() if prior_precision == "marginal_likelihood" else float(prior_precision)
