"""Linear layers of a network, by default its last one, and the Gauss–Newton curvature of the loss in their weights.

With outputs f = W φ (a bias is a feature that is 1), −log p(y | f) has a Hessian H in f, and

    G = Σ_n w_n H_n ⊗ φ_n φ_nᵀ            full: exact, (C D)² numbers
    G ≈ (Σ w_n H_n) ⊗ (Σ w_n φ_n φ_nᵀ) / Σ w_n      Kronecker-factored: C² + D²

For inner layers, and where something follows the last one (a token is selected, a map is resized), backward passes give
g = Jᵀ L e, with J the Jacobian of f in the layer's outputs, H = L Lᵀ and unit vectors e; n counts rows of all positions:

    G = Σ v vᵀ, v = Σ_positions g ⊗ φ          full: exact
    G ≈ (Σ g gᵀ) ⊗ (Σ w_n φ_n φ_nᵀ) / Σ w_n      Kronecker-factored, over positions with g ≠ 0 (Martens & Grosse 2015)

Its eigenvalues λ give log determinants, evidence and samples at any prior precision δ:

    log p(y) ≈ log p(y | W*) − ½ δ ‖W*‖² − ½ Σ log(1 + λ/δ)                 (MacKay 1992; Daxberger et al. 2021)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.batch import Batch, Inputs
from dissensus.core.likelihood import Likelihood, expand_weight
from dissensus.utils.checks import first_names, number, one_of
from dissensus.utils.tensor_tree import Tensors

log = logging.getLogger("dissensus")
Structure = Literal["full", "kron"]
Hessian = tuple[Tensor, Tensor | None]  # as of `Likelihood.curvature`
Call = tuple[str, Any, Any]  # name of a layer, its features, its outputs; None where it does not return a tensor
Precision = float | Literal["marginal_likelihood"]
LARGEST = 2**30  # bytes of one matrix in float64; its eigenvectors take as much again
CHUNK = 2**22  # float64 numbers processed at once when summing over rows
MOST_OUTPUTS, RANDOM_PASSES = 256, 64  # backward passes: one per output of an example, above so many along random signs
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class LinearLayer:
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


@dataclass(frozen=True)
class Block:
    """Layers with one Gaussian: over the weights (C, D) of one layer, or over those of several as one row (1, P)."""

    layers: Sequence[LinearLayer]

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: p for layer in self.layers for name, p in layer.parameters.items()}

    @property
    def shape(self) -> tuple[int, int]:
        """(C, D) or (1, P)."""
        rows, columns = self.matrix(self.parameters).shape
        return rows, columns

    def numbers(self, network: nn.Module) -> int | list[int]:
        """The layers' numbers among the network's modules; one number for one layer."""
        modules = list(network.modules())
        found = [modules.index(layer.layer) for layer in self.layers]
        return found[0] if len(found) == 1 else found

    def matrix(self, tensors: dict[str, Tensor]) -> Tensor:
        """(..., C, D) or (..., 1, P) weights and biases, from tensors named like the layers' parameters."""
        each = [layer.matrix(tensors) for layer in self.layers]
        return each[0] if len(each) == 1 else torch.cat([matrix.flatten(-2) for matrix in each], -1)[..., None, :]

    def tensors(self, matrix: Tensor) -> dict[str, Tensor]:
        """The inverse of `matrix`."""
        shapes = [layer.matrix(layer.parameters).shape for layer in self.layers]
        parts = [matrix] if len(shapes) == 1 else matrix[..., 0, :].split([math.prod(shape) for shape in shapes], -1)
        each = [part.reshape(*matrix.shape[:-2], *shape) for part, shape in zip(parts, shapes, strict=True)]
        return {name: t for layer, m in zip(self.layers, each, strict=True) for name, t in layer.tensors(m).items()}


def make_blocks(structure: Structure | Literal["auto"], layers: list[LinearLayer]) -> tuple[Structure, list[Block]]:
    """(structure, one block of all layers, or for "kron" one per layer); "auto" is "full" if that takes up to 1 GiB."""
    rows = sum(layer.matrix(layer.parameters).numel() for layer in layers)
    if structure == "auto":
        structure = "full" if 8 * rows**2 <= LARGEST else "kron"
    return structure, [Block(layers)] if structure == "full" else [Block([layer]) for layer in layers]


@contextmanager
def record_calls(layers: Mapping[str, nn.Module]) -> Iterator[list[Call]]:
    """Context in which every call of the layers is appended to the list; gradients of the outputs can be had."""
    seen: list[Call] = []

    def keep(name: str, args: tuple[Any, ...], keywords: dict[str, Any], outputs: Any) -> Any:
        if not isinstance(outputs, Tensor):
            seen.append((name, None, None))
            return outputs
        features = [given.detach().clone() for given in [*args, *keywords.values()][:1] if isinstance(given, Tensor)]
        if torch.is_grad_enabled() and not outputs.requires_grad:
            outputs.requires_grad_()
        seen.append((name, next(iter(features), None), outputs))
        return outputs.clone()  # the network may write into both afterwards

    handles = [
        layer.register_forward_hook(lambda _, *call, name=name: keep(name, *call), with_kwargs=True)
        for name, layer in layers.items()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def choose_layers(network: nn.Module, x: Inputs, patterns: str | Sequence[str] | None = None) -> list[LinearLayer]:
    """The layers with these names, or, without patterns, the last layer called for x that the outputs depend on."""
    modules = dict(network.named_modules())
    given = ["*"] if patterns is None else [patterns] if isinstance(patterns, str) else list(patterns)
    matched = {name: m for name, m in modules.items() if any(fnmatchcase(name, each) for each in given)}
    weighted = {name: m for name, m in matched.items() if any(p is not None for p in m._parameters.values())}
    watched = weighted if patterns is not None else {n: m for n, m in matched.items() if _multiplies_weights(m)}
    if patterns is not None and not all(any(fnmatchcase(name, each) for name in weighted) for each in given or [""]):
        known = first_names(name for name, layer in modules.items() if _is_linear(layer))
        raise ValueError(
            f"expected layers= that match layers with weights, got {patterns!r}; linear layers are {known}"
        )
    with torch.enable_grad(), record_calls(watched) as seen:
        outputs = batches.call_network(network, x)
    called: list[Call] = []
    for name, *tensors in seen:
        # A module that contains a called layer does not count as a layer, even if it has weights (a vision transformer has a
        # class token). A parametrised layer contains called modules, too.
        around = any(inner != name and inner.startswith(f"{name}." if name else "") for inner, _, _ in called)
        if not around or isinstance(modules[name], (nn.Linear, *CONVOLUTIONS)):
            called.append((name, *tensors))
    while patterns is None and called and not _depends(outputs, called[-1][2]):  # such as an auxiliary head
        called.pop()
    names = [name for name, _, _ in called]
    return [_linear_layer(network, name, names) for name in ((names or [""])[-1:] if patterns is None else watched)]


def _depends(outputs: Tensor, made: Tensor | None) -> bool:
    if made is None or not outputs.requires_grad:
        return True
    ones = torch.ones_like(outputs)
    return torch.autograd.grad(outputs, made, ones, retain_graph=True, allow_unused=True)[0] is not None


def _linear_layer(network: nn.Module, name: str, called: list[str]) -> LinearLayer:
    """The layer of that name; raises if its weights cannot be sampled."""
    if fault := _why_not_linear(network, name, called):
        raise ValueError(f"expected outputs linear in the layer's weights, got {fault}, or choose others: layers=")
    layer, under = network.get_submodule(name), f"{name}." if name else ""
    return LinearLayer(name, layer, {f"{under}{key}": p for key, p in layer.named_parameters(recurse=False)})


def add_batch_curvature(
    gathered: Sequence[CurvatureSums], network: nn.Module, likelihood: Likelihood, blocks: Sequence[Block], batch: Batch
) -> None:
    """Adds the curvature of one batch for one network to the sums of each block; the first one has the log-likelihood."""
    x, y, weight = batch
    layers = [layer for block in blocks for layer in block.layers]
    with record_calls({layer.name: layer.layer for layer in layers}) as seen, batches.UnchangedInputs(x):
        outputs = batches.call_network(network, x)
    for layer in layers:  # they were found with the first batch
        if (times := [name for name, _, _ in seen].count(layer.name)) != 1:
            got = f"'{layer.name}' called {times} times"
            raise ValueError(f"expected layers that are called once per batch, got {got}; use separate layers")
    if not bool(outputs.isfinite().all()):
        raise ValueError("expected finite outputs, got NaN or infinity; check the network's weights")
    counted, axis = likelihood.target_mask(y), likelihood.output_axis
    log_prob = likelihood.log_prob(outputs.double(), y)
    w = torch.ones_like(log_prob) if weight is None else expand_weight(weight, log_prob)
    if counted is not None:
        w = w * counted
    gathered[0].log_likelihood += (w * log_prob).sum()
    hessian = likelihood.curvature(outputs.double(), y)
    w = w.unsqueeze(axis) if w.ndim == outputs.ndim - 1 else w
    w = w.reshape(*w.shape, *[1] * (outputs.ndim - w.ndim)).expand_as(outputs).double()
    gathered[0].rows += w.select(axis, 0).sum() if outputs.ndim > 1 else w.sum()
    if len(layers) == 1 and _add_in_closed_form(gathered[0], layers[0], seen[0], w, outputs, hessian, axis):
        return
    if warning := likelihood.output_warning(outputs):  # a softmax at the end
        raise ValueError(warning)
    with torch.enable_grad(), record_calls({layer.name: layer.layer for layer in layers}) as seen:
        outputs = batches.call_network(network, x)
    _add_by_passes(gathered, layers, seen, outputs, lambda e: w.sqrt() * curvature_root(*hessian, axis)(e), weight)


def _add_in_closed_form(
    sums: CurvatureSums, layer: LinearLayer, call: Call, w: Tensor, outputs: Tensor, hessian: Hessian, axis: int
) -> bool:
    """Adds a batch if the network's outputs are the layer's, with its channels on that axis; returns whether they are."""
    a, u = hessian
    at = (
        layer.channels if u is None and a.ndim == outputs.ndim else axis
    )  # a diagonal Hessian fits channels on any axis
    made = call[2].movedim(layer.channels, at)
    if outputs.shape not in (made.shape, made.squeeze(at).shape) or not torch.equal(
        made.reshape(outputs.shape), outputs
    ):
        return False

    def rows(tensor: Tensor) -> Tensor:  # (n, C), or (n, C, C) of whole Hessians
        more = tensor.shape[outputs.ndim :]
        return tensor.reshape(*made.shape, *more).movedim(at, made.ndim - 1).reshape(-1, made.shape[at], *more)

    sums.add(layer.inputs(call[1]), rows(a), None if u is None else rows(u), rows(w)[:, 0])
    return True


def _add_by_passes(
    gathered: Sequence[CurvatureSums],
    layers: Sequence[LinearLayer],
    seen: Sequence[Call],
    outputs: Tensor,
    root: Callable[[Tensor], Tensor],
    weight: Tensor | None,
) -> None:
    """Adds Σ v vᵀ of a batch to full sums, the two factors of each layer to Kronecker-factored ones."""
    calls = {name: tensors for name, *tensors in seen}
    features = [layer.inputs(calls[layer.name][0]) for layer in layers]  # (n, D) each
    full, examples = gathered[0].structure == "full", len(outputs)

    def gradients(given: Tensor) -> list[Tensor]:  # (n, C) for each layer
        made, how = [calls[layer.name][1] for layer in layers], {"allow_unused": True, "materialize_grads": True}
        found = torch.autograd.grad(outputs, made, given.to(outputs.dtype), retain_graph=True, **how)
        return [layer.rows(g) for layer, g in zip(layers, found, strict=True)]

    first = torch.zeros_like(outputs).index_fill(0, torch.zeros((), dtype=torch.long, device=outputs.device), 1.0)
    for layer, g in zip(layers, gradients(first) if full or weight is not None else (), strict=False):
        if len(g) % examples or bool(g[len(g) // examples :].any()):
            hint = 'choose others, or structure="kron" without example weights'
            raise ValueError(f"expected layers with examples on the first axis, got '{layer.name}'; {hint}")
    used = [torch.zeros_like(phi[:, 0], dtype=torch.bool) for phi in features]
    for direction in gathered[0].directions(outputs):
        found = gradients(root(direction))
        used = [before | (g != 0).any(1) for before, g in zip(used, found, strict=True)]
        if full:
            pairs = [[t.reshape(examples, -1, t.shape[1]) for t in both] for both in zip(found, features, strict=True)]
            v = torch.cat([torch.einsum("bnc,bnd->bcd", *pair).flatten(1) for pair in pairs], dim=1)  # (B, P)
            gathered[0].sums[0] += v.mT @ v
        for sums, g in zip(gathered, () if full else found, strict=False):
            sums.sums[0] += g.mT @ g
    each = torch.ones(examples) if weight is None else weight.reshape(examples, -1).mean(1)
    for sums, phi, on in zip(gathered, () if full else features, used, strict=False):
        w = on * (each.to(phi).repeat_interleave(len(phi) // examples) if weight is not None else 1.0)
        sums.weight += w.sum()
        sums.sums[1] += (w[:, None] * phi).mT @ phi


def curvature_root(a: Tensor, u: Tensor | None, axis: int) -> Callable[[Tensor], Tensor]:
    """The function e -> L e with L Lᵀ = diag(a) − u uᵀ over that axis, or = a, if that has one axis more than outputs."""
    tiny = torch.finfo(a.dtype).tiny

    def root(e: Tensor) -> Tensor:
        if a.ndim > e.ndim:
            values, vectors = eigendecompose(a.movedim(axis, -2))
            return (vectors * values.sqrt()[..., None, :] @ e.movedim(axis, -1)[..., None])[..., 0].movedim(-1, axis)
        if u is None:
            return a.sqrt() * e
        v = u / a.sqrt().clamp(min=tiny)  # diag(a)^½ (I − v vᵀ) diag(a)^½, and (I − v vᵀ)^½ = I − k v vᵀ
        square = v.square().sum(axis, keepdim=True).clamp(tiny, 1.0)
        k = (1 - (1 - square).sqrt()) / square
        return a.sqrt() * (e - k * v * (v * e).sum(axis, keepdim=True))

    return root


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


def _why_not_linear(network: nn.Module, name: str, called: list[str]) -> str | None:
    """Why the weights of this layer cannot be sampled, and the remedy; None if they can."""
    layer, times = network.get_submodule(name), called.count(name)
    if times == 0:
        return f"{f'{name!r} never' if name else 'no layer with weights'} called; call a linear layer as a module"
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
        self.weight = torch.zeros((), **like)  # of the features' sum
        self.rows = torch.zeros((), **like)  # weight of all outputs that count
        self.generator: torch.Generator | None = None

    def directions(self, outputs: Tensor) -> Iterator[Tensor]:
        """Directions e of the outputs' shape with Σ e eᵀ = I for every example: unit vectors; random signs on average."""
        size, random = outputs[0].numel(), outputs[0].numel() > MOST_OUTPUTS
        if random and self.generator is None:
            self.generator = torch.Generator(outputs.device).manual_seed(0)
            what = "Laplace estimates the curvature of %d outputs per example from %d random directions per batch"
            log.info(what, size, RANDOM_PASSES)
        like: dict[str, Any] = {"dtype": torch.float64, "device": outputs.device}
        for i in range(RANDOM_PASSES if random else size):
            if random:
                signs = torch.randint(2, outputs.shape, generator=self.generator, **like)
                yield (2 * signs - 1) / math.sqrt(RANDOM_PASSES)
            else:
                yield torch.eye(size, **like)[i].reshape(outputs.shape[1:]).expand_as(outputs)

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
    """N(mean, (G + δ)⁻¹) over the weights of a block, (C, D), as eigenvalues and eigenvectors of G, in float64."""

    mean: Tensor  # (C, D)
    eigenvalues: Tensor  # (C D,) or (C, D)
    log_likelihood: Tensor  # () of the data at the mean
    precision: Tensor  # () δ
    layer: Tensor  # () number of the layer among the network's modules; (L,) of several

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    @classmethod
    def from_sums(cls, gathered: CurvatureSums, mean: Tensor, *, layer: int | list[int]) -> Self:
        """The curvature from these sums around the weights `mean` (C, D); the prior precision is not chosen yet."""
        values, vectors = zip(*map(eigendecompose, gathered.sums), strict=True)
        kron = gathered.structure == "kron"
        eigenvalues = torch.outer(*values) / gathered.weight if kron else values[0]
        return cls(_buffers_of(mean, eigenvalues, vectors, gathered.log_likelihood, layer))

    @classmethod
    def blank(cls, structure: Structure, classes: int, features: int, *, layer: int | list[int]) -> Self:
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


def _buffers_of(mean: Tensor, values: Tensor, vectors: Sequence[Tensor], log_likelihood: Tensor, layer: Any) -> Tensors:
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
        remedy = 'pass structure="kron"' if structure == "full" else "choose narrower layers"
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


def resolve_precision(prior_precision: Precision, curvatures: Sequence[Curvature]) -> float:
    """The number given, or the precision that maximises the evidence: the only root of Σ λ/(λ + δ) = δ ‖mean‖²."""
    if prior_precision != "marginal_likelihood":
        return float(prior_precision)
    eigenvalues = torch.cat([each.eigenvalues.flatten() for each in curvatures])
    square, most = sum(float(each.mean.square().sum()) for each in curvatures), float(eigenvalues.max())
    if not (square > 0 and most > 0 and math.isfinite(square) and math.isfinite(most)):
        got = f"‖W‖² = {square:g} and a largest eigenvalue of {most:g}"
        raise ValueError(f"expected finite non-zero weights and curvature, got {got}; pass prior_precision=")

    def excess(log_precision: float) -> float:  # decreases with the precision
        precision = math.exp(log_precision)
        return float((eigenvalues / (eigenvalues + precision)).sum()) - precision * square

    high = math.log(eigenvalues.numel() / square)  # Σ λ/(λ + δ) < C D
    low = high - 1.0
    while excess(low) <= 0:
        high, low = low, low - 2 * (high - low)
    while (middle := 0.5 * (low + high)) not in (low, high):  # bisection
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return math.exp(middle)
