"""Lengthscales of the FoRDE kernel: a rotation and a precision along each axis (Trinh et al., ICLR 2024, §3.3).

The kernel compares unit vectors by (s − s')ᵀ Σ⁻¹ (s − s'). With the principal components of the training inputs,
Σ⁻¹ = U Λ Uᵀ, members repel each other most in the directions in which the data vary most.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor

from dissensus.utils.checks import integer, number, one_of

LARGEST_EXACT = 4096  # dimensions up to which the D × D covariance is formed: 134 MB in float64
EXTRA = 10  # extra directions of the randomised range finder beyond the rank (Halko, Martinsson & Tropp 2011)


@dataclass(frozen=True, eq=False)
class Lengthscales:
    """The metric of FoRDE's kernel on unit input gradients; made by `pca_lengthscales`.

    Σ⁻¹ = U diag(precision) Uᵀ + remainder (I − U Uᵀ), U the eigenvectors: members repel most where the precision is large.

    Args:
        eigenvectors: (D, R), orthonormal columns, in the D flattened input features.
        precision: (R,) ≥ 0, one per column.
        remainder: precision ≥ 0 of the D − R other directions; no effect if R = D.
    """

    eigenvectors: Tensor  # (D, R), orthonormal columns
    precision: Tensor  # (R,) ≥ 0
    remainder: float | Tensor = 0.0  # () ≥ 0

    def __post_init__(self) -> None:
        if self.eigenvectors.ndim != 2 or self.precision.shape != self.eigenvectors.shape[1:]:
            got = f"{tuple(self.eigenvectors.shape)} and {tuple(self.precision.shape)}"
            raise ValueError(f"expected eigenvectors (D, R) and precision (R,), got {got}; pass one per column")

    def config(self) -> list[int]:
        """[D, R]; files store the values as tensors."""
        return list(self.eigenvectors.shape)

    @classmethod
    def from_config(cls, shape: Sequence[int]) -> Self:
        """Zeros of this shape [D, R], to be overwritten from a file."""
        return cls(torch.zeros(*shape), torch.zeros(shape[1]))

    def __repr__(self) -> str:
        dimension, rank = self.eigenvectors.shape
        span = f"{float(self.precision.min()):.3g} to {float(self.precision.max()):.3g}" if rank else "none"
        mean = f"{float(self.mean_precision):.3g}"
        return f"Lengthscales(dimension={dimension}, rank={rank}, precision {span}, mean {mean})"

    @property
    def dimension(self) -> int:
        """D, the number of input features."""
        return self.eigenvectors.shape[0]

    @property
    def mean_precision(self) -> Tensor:
        """() tr Σ⁻¹ / D."""
        dimension, rank = self.eigenvectors.shape
        total = self.precision.sum()
        return (total + (dimension - rank) * torch.as_tensor(self.remainder, dtype=total.dtype).to(total)) / dimension

    def scale(self, s: Tensor) -> Tensor:
        """(..., D) or (..., R) vectors whose squared distances are (s − s')ᵀ Σ⁻¹ (s − s')."""
        u, root = self.eigenvectors.to(s.dtype), self.precision.to(s.dtype).sqrt()
        if u.shape[0] == u.shape[1]:
            return (s @ u) * root
        rest = torch.as_tensor(self.remainder, dtype=s.dtype, device=s.device).sqrt()
        return rest * s + ((s @ u) * (root - rest)) @ u.T  # Σ^(−1/2) s

    def pull(self, f: Tensor) -> Tensor:
        """(..., D) derivatives by s, from derivatives by `scale(s)`: its transpose."""
        u, root = self.eigenvectors.to(f.dtype), self.precision.to(f.dtype).sqrt()
        return (f * root) @ u.T if u.shape[0] == u.shape[1] else self.scale(f)


def pca_lengthscales(
    inputs: Tensor | Iterable[Any],
    alpha: float = 1.0,
    *,
    form: Literal["poster", "paper"] = "poster",
    rank: int | None = None,
    passes: int = 3,
) -> Lengthscales:
    """Computes FoRDE's `Lengthscales` from the principal components of the training inputs.

    alpha interpolates between the identity (0) and the principal components (1). With the eigenvalues λ of the inputs'
    covariance,

        "poster":  precision = (1 − α) + α λ            (Σ_α⁻¹ = (1 − α) I + α Λ)
        "paper":   precision = 1 / (α/λ + (1 − α))      (Σ_α = α Λ⁻¹ + (1 − α) I, appendix D.4)

    Both agree at α = 0 and 1; in between, the paper's form weakens directions of small variance already at a small α.

    Args:
        inputs: (N, ...) or batches (x or (x, ...)), not augmented, scaled as for the network, which matters if 0 < α < 1.
        alpha: α in [0, 1].
        form: "poster", the later of the two, or "paper".
        rank: R, number of eigenvectors; None is all up to 4,096 dimensions, 512 beyond. Other directions share the rest.
        passes: passes over the data for inputs of more than 4,096 dimensions, whose eigenvectors are computed by randomised
            subspace iteration without a D × D matrix; only one if the data can be read only once.
    """
    number("alpha", alpha, least=0, most=1, hint="0 is the identity, 1 the principal components")
    one_of("form", form, ("poster", "paper"))
    if rank is not None:
        integer("rank", rank, hint="None chooses one")
    integer("passes", passes, hint="3 are enough")
    readable_once, batches = isinstance(inputs, Iterator), _flat_batches(inputs)
    first = next(batches, None)
    if first is None or first.numel() == 0:
        raise ValueError("expected training inputs, got none; pass data (a generator can be read only once)")
    rows, dimension = itertools.chain([first], batches), first.shape[1]
    exact = dimension <= LARGEST_EXACT
    kept = min(rank or (dimension if exact else 512), dimension)
    if exact:
        moments = Moments.from_rows(rows, torch.eye(dimension, dtype=torch.float64, device=first.device))
        values, vectors = torch.linalg.eigh(moments.covariance)
        values, vectors = values.flip(0)[:kept], vectors.flip(1)[:, :kept]  # largest first
    else:
        again = itertools.chain([rows], (_flat_batches(inputs) for _ in range(0 if readable_once else passes - 1)))
        moments, values, vectors = _randomised_eigen(again, first, kept)
        kept = values.numel()
    values = values.clamp(min=0.0)
    rest = (moments.trace - values.sum()).clamp(min=0.0) * (kept < dimension) / max(dimension - kept, 1)
    dtype = first.dtype if first.dtype in (torch.float32, torch.float64) else torch.float32
    precisions = (_precision(each, alpha, form).to(dtype) for each in (values, rest))
    return Lengthscales(vectors.to(dtype), *precisions)


def _precision(eigenvalues: Tensor, alpha: float, form: str) -> Tensor:
    if form == "poster":
        return (1 - alpha) + alpha * eigenvalues
    # 1 / (α/λ + 1 − α), written so that λ = 0 gives 0
    below = alpha + (1 - alpha) * eigenvalues
    return torch.where(below > 0, eigenvalues / below, 1.0) if alpha > 0 else torch.ones_like(eigenvalues)


@dataclass
class Moments:
    """Moments of the covariance C from one pass over the rows: C Ω for a given Ω (D, L), and the trace of C."""

    covariance: Tensor  # (D, L) C Ω
    trace: Tensor  # ()

    @classmethod
    def from_rows(cls, rows: Iterable[Tensor], omega: Tensor) -> Moments:
        # Shifted by the first batch's mean, because E[xxᵀ] − μμᵀ loses digits if the mean is large.
        count, shift = 0, None
        total = squares = product = omega.new_zeros(())
        for batch in rows:
            x = batch.to(omega.dtype)
            shift = x.mean(0) if shift is None else shift
            x = x - shift
            count += len(x)
            total = total + x.sum(0)
            squares = squares + x.square().sum()
            product = product + x.T @ (x @ omega)
        if count < 2:
            raise ValueError(f"expected at least two inputs, got {count}; pass the training inputs")
        mean = total / count
        covariance = (product - count * torch.outer(mean, mean @ omega)) / (count - 1)
        trace = (squares - count * mean.square().sum()) / (count - 1)
        if float(trace) <= 1e-12 * float(shift.square().sum()) / omega.shape[0]:  # type: ignore[union-attr]
            raise ValueError("expected inputs that vary, got equal rows; pass the training inputs")
        return cls(covariance, trace)


def _randomised_eigen(passes: Iterable[Iterable[Tensor]], first: Tensor, rank: int) -> tuple[Moments, Tensor, Tensor]:
    """(moments, eigenvalues (R,), eigenvectors (D, R)), largest first, by subspace iteration and a Nyström step."""
    dimension = first.shape[1]
    # A separate generator, so that the caller's random state does not change.
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(dimension, min(rank + EXTRA, dimension), dtype=torch.float64, generator=generator)
    basis, moments = basis.to(first.device), None
    for rows in passes:
        if moments is not None:
            basis = moments.covariance
        basis = torch.linalg.qr(basis).Q
        moments = Moments.from_rows(rows, basis)
    assert moments is not None
    core = basis.T @ moments.covariance  # (L, L)
    values, vectors = torch.linalg.eigh((core + core.T) / 2)
    kept = values > 1e-12 * values[-1]  # directions without variance: fewer rows than directions
    root = moments.covariance @ (vectors[:, kept] / values[kept].sqrt())  # (D, L'): C ≈ root rootᵀ
    left, singular, _ = torch.linalg.svd(root, full_matrices=False)
    return moments, singular.square()[:rank], left[:, :rank]


def _flat_batches(inputs: Tensor | Iterable[Any]) -> Iterator[Tensor]:
    """Batches of flattened inputs (n, D), in float32 or more."""
    width: int | None = None
    before = 0
    for batch in torch.split(inputs, 1024) if isinstance(inputs, Tensor) else inputs:
        x = batch[0] if isinstance(batch, tuple | list) else batch
        if not isinstance(x, Tensor) or x.ndim < 2:
            found = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            advice = "add a batch axis, or convert arrays with torch.from_numpy"
            kind = ValueError if isinstance(x, Tensor) else TypeError
            raise kind(f"expected inputs as a tensor (N, ...) or batches of such tensors, got {found}; {advice}")
        rows = x.detach().flatten(1).to(torch.promote_types(x.dtype, torch.float32))
        if rows.shape[1] != (width := width or rows.shape[1]):
            got = f"a batch of shape {tuple(x.shape)}"
            raise ValueError(f"expected batches of {width} numbers per input, as in the first, got {got}; reshape it")
        check_finite_rows(rows, before)
        before += len(rows)
        yield rows


def check_finite_rows(rows: Tensor, before: int = 0, what: str = "inputs", where: str = "") -> None:
    """Raises if rows (n, D) hold NaN or infinity; `before`: number of earlier rows, for the row number in the error."""
    if not bool((finite := rows.isfinite()).all()):
        row, column = (~finite).nonzero()[0].tolist()
        more = int((~finite).sum()) - 1
        at = f"row {before + row}, column {column}{where}{f' and {more} more' if more else ''}"
        got = f"{float(rows[row, column])} in {at}"
        raise ValueError(f"expected finite {what}, got {got}; remove such rows, or fill in the missing values")
