"""The last layer of a network, the linear layer whose output is the network's output, and its Gauss–Newton curvature.

With outputs f = W φ (a bias is a feature that is 1), −log p(y | f) has a Hessian H in f, and

    G = Σ_n w_n H_n ⊗ φ_n φ_nᵀ            full: exact, (C D)² numbers
    G ≈ (Σ w_n H_n) ⊗ (Σ w_n φ_n φ_nᵀ) / Σ w_n      Kronecker-factored: C² + D²

Its eigenvalues λ give log determinants, evidence and samples at any prior precision δ:

    log p(y) ≈ log p(y | W*) − ½ δ ‖W*‖² − ½ Σ log(1 + λ/δ)                 (MacKay 1992; Daxberger et al. 2021)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.batch import Batch, Inputs
from dissensus.core.likelihood import Likelihood, Regression, expand_weight
from dissensus.utils.checks import number, one_of
from dissensus.utils.tensor_tree import Tensors

Structure = Literal["full", "kron"]
Precision = float | Literal["marginal_likelihood"]
LARGEST = 2**30  # bytes of one matrix in float64; its eigenvectors take as much again
CHUNK = 2**22  # float64 numbers processed at once when summing over rows
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class LastLayer:
    """A linear layer and its name: outputs = W features + b, at every position for a 1×1 convolution."""

    name: str
    layer: nn.Module
    parameters: dict[str, Tensor]  # name in the network -> the layer's weight and, if any, its bias

    @property
    def channels(self) -> int:
        """The axis of features and outputs that the layer mixes."""
        return 1 if isinstance(self.layer, CONVOLUTIONS) else -1

    def matrix(self, tensors: dict[str, Tensor]) -> Tensor:
        """(..., C, D) weights and biases side by side in float64, from tensors named like `parameters`."""
        weight, *bias = (tensors[name].double() for name in self.parameters)
        front = weight.ndim - next(iter(self.parameters.values())).ndim
        parts = [weight.flatten(front + 1), *(each[..., None] for each in bias)]
        return torch.cat(parts, dim=-1)

    def tensors(self, matrix: Tensor) -> dict[str, Tensor]:
        """The inverse of `matrix`: copies in the shapes and dtypes of the layer's parameters."""
        (weight, kernel), *bias = self.parameters.items()
        inputs = kernel.shape[1]
        found = {weight: matrix[..., :inputs].reshape(*matrix.shape[:-1], inputs, *kernel.shape[2:])}
        found |= {name: matrix[..., inputs] for name, _ in bias}
        copies = {name: t.to(kernel.dtype, copy=True) for name, t in found.items()}
        return {name: t.clone(memory_format=torch.contiguous_format) for name, t in copies.items()}

    def rows(self, tensor: Tensor) -> Tensor:
        """(n, C) one row per position, in float64, from a tensor with the layer's channel axis."""
        moved = tensor.movedim(self.channels, -1).double()
        return moved.reshape(-1, moved.shape[-1])

    def inputs(self, features: Tensor) -> Tensor:
        """(n, D) features by rows, with a 1 for the bias."""
        found = self.rows(features)
        return torch.cat([found, torch.ones_like(found[:, :1])], dim=1) if len(self.parameters) == 2 else found


def last_layer(network: nn.Module, x: Inputs, name: str | None = None) -> LastLayer:
    """The layer of that name, or the last linear layer called for x; raises if the network's outputs are not its outputs."""
    layers = dict(network.named_modules())
    if name is not None and name not in layers:
        one_of("layer", name, [each for each in layers if _is_linear(layers[each])])
    called: list[str] = []

    def note(each: str) -> None:
        # A module that contains a called layer does not count as a layer, even if it has weights (a vision transformer has a
        # class token). `check_outputs` finds out if it changes the layer's outputs.
        around = any(inner != each and inner.startswith(f"{each}." if each else "") for inner in called)
        # A parametrised layer contains called modules, too.
        if not around or isinstance(layers[each], (nn.Linear, *CONVOLUTIONS)):
            called.append(each)

    watched = [each for each, layer in layers.items() if (_multiplies_weights(layer) if name is None else each == name)]
    handles = [layers[each].register_forward_hook(lambda *_, each=each: note(each)) for each in watched]
    try:
        batches.call_network(network, x)
    finally:
        for handle in handles:
            handle.remove()
    found = called[-1] if called else name or ""
    if fault := _why_not_last(network, found, called):
        raise ValueError(f"expected outputs linear in the last layer's weights, got {fault}, or name another: layer=")
    under = f"{found}." if found else ""
    own = {f"{under}{key}": p for key, p in layers[found].named_parameters(recurse=False)}
    return LastLayer(found, layers[found], own)


@contextmanager
def record_calls(last: LastLayer) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Context in which copies of (features, outputs) of every call of the layer are appended to the list."""
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...], keywords: dict[str, Tensor], outputs: Tensor) -> None:
        features = [*args, *keywords.values()][0]
        seen.append((features.clone(), outputs.clone()))  # the network may write into both afterwards

    handle = last.layer.register_forward_hook(keep, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def add_batch_curvature(
    gathered: CurvatureSums, network: nn.Module, likelihood: Likelihood, last: LastLayer, batch: Batch
) -> None:
    """Adds the curvature of one batch for one network to the sums."""
    x, y, weight = batch
    with record_calls(last) as seen, batches.UnchangedInputs(x):
        outputs = batches.call_network(network, x)
    if len(seen) != 1:  # the layer was found with the first batch
        got = f"'{last.name}' called {len(seen)} times"
        raise ValueError(f"expected a last layer that is called once per batch, got {got}; use separate layers")
    features, made = seen[0]
    if not bool(outputs.isfinite().all()):
        raise ValueError("expected finite outputs, got NaN or infinity; check the network's weights")
    check_outputs(last, made, outputs)
    if last.channels == -1 and made.ndim > 2 and type(likelihood).curvature is not Regression.curvature:
        got = f"{tuple(made.shape)}; for outputs at several positions, use a 1×1 convolution"
        raise ValueError(f"expected outputs (B, C) of the last layer '{last.name}', got {got}")
    counted = likelihood.target_mask(y)
    log_prob = likelihood.log_prob(outputs.double(), y)
    w = torch.ones_like(log_prob) if weight is None else expand_weight(weight, log_prob)
    if counted is not None:
        w = w * counted
    gathered.log_likelihood += (w * log_prob).sum()
    positions = made.select(last.channels, 0)  # (B, ...)
    w = w.reshape(*w.shape, *[1] * (positions.ndim - w.ndim)).expand_as(positions)
    a, u = likelihood.curvature(outputs.double(), y)
    more = a.shape[outputs.ndim :]  # (C,) of whole Hessians, () of diagonals
    hessian = last.rows(a.reshape(*made.shape, *more)).reshape(positions.numel(), *more, -1)
    outer = None if u is None else last.rows(u.reshape(made.shape))
    gathered.add(last.inputs(features), hessian, outer, w.reshape(-1).double())


def check_outputs(last: LastLayer, made: Tensor, outputs: Tensor) -> None:
    """Raises if the network's outputs differ from the layer's (axes of length one may be dropped)."""
    same = made.shape == outputs.shape or made.squeeze(last.channels).shape == outputs.shape
    if not same or not torch.equal(made.reshape(outputs.shape), outputs):
        got = "others; remove what changes them (a softmax belongs to the likelihood), or name the right layer: layer="
        raise ValueError(f"expected a network that returns the outputs of its last layer '{last.name}', got {got}")


def _multiplies_weights(layer: nn.Module) -> bool:
    """Whether a layer multiplies by its own weights: the last such layer called must be linear."""
    return isinstance(layer, nn.Linear) or any(p.ndim > 1 for p in layer.parameters(recurse=False))


def _is_linear(layer: nn.Module) -> bool:
    """Whether this is a linear layer or a 1×1 convolution, and not a subclass with another forward."""
    if isinstance(layer, CONVOLUTIONS):
        ones = {*layer.kernel_size, *layer.stride, layer.groups} == {1}
        padded = not isinstance(layer.padding, str) and set(layer.padding) != {0}
        return ones and not padded and type(layer).forward in {kind.forward for kind in CONVOLUTIONS}
    return isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward


def _why_not_last(network: nn.Module, name: str, called: list[str]) -> str | None:
    """Why this layer cannot be the last one, and the remedy; None if it can."""
    layer, times = network.get_submodule(name), called.count(name)
    if times == 0:
        return f"{f'{name!r} never' if name else 'no layer with weights'} called; call a linear layer as a module, last"
    if not _is_linear(layer):
        return f"'{name}', a {layer}; put an nn.Linear or a 1×1 convolution last"
    if times > 1:
        return f"'{name}' called {times} times; give the network a last layer of its own"
    if [key for key, _ in layer.named_parameters(recurse=False)] not in (["weight"], ["weight", "bias"]):
        return f"'{name}' with parametrised weights; remove the parametrisation first"
    mine = {id(parameter) for parameter in layer.parameters(recurse=False)}
    for other, parameter in network.named_parameters(remove_duplicate=False):
        if id(parameter) in mine and other.rpartition(".")[0] != name:
            return f"'{name}' tied to {other}; untie them"
    return None


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
    """N(mean, (G + δ)⁻¹) over the last layer's weights and biases, (C, D), as eigenvalues and eigenvectors of G, in float64."""

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
        each = torch.stack([(rows * variance) @ rows.mT for rows in blocks])  # (C, D, D)
        values, vectors = eigendecompose(each)  # (C, D), (C, D, D)
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
        for name, buffer in self._buffers.items():  # half precision cannot hold the range of the eigenvalues
            if buffer is not None:
                moved = fn(buffer)
                self._buffers[name] = moved if moved.dtype == buffer.dtype else buffer.to(moved.device)
        return self


def _buffers_of(mean: Tensor, values: Tensor, vectors: Sequence[Tensor], log_likelihood: Tensor, layer: int) -> Tensors:
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
    return curvature.best_precision() if prior_precision == "marginal_likelihood" else float(prior_precision)
