"""Linear layers of a network, by default its last one, and the Gauss–Newton curvature of the loss in their weights.

With outputs f = W φ (a bias is a feature that is 1), −log p(y | f) has a Hessian H in f, and

    G = Σ_n w_n H_n ⊗ φ_n φ_nᵀ            full: exact, (C D)² numbers
    G ≈ (Σ w_n H_n) ⊗ (Σ w_n φ_n φ_nᵀ) / Σ w_n      Kronecker-factored: C² + D²

For inner layers, and if something follows the last one (a token is selected, a map is resized), backward passes give
g = Jᵀ L e at every position, with J the Jacobian of f in the layer's outputs, H = L Lᵀ, and unit vectors e:

    G = Σ v vᵀ, v = Σ_positions g ⊗ φ    or    G ≈ (Σ g gᵀ) ⊗ (Σ w φ φᵀ) / Σ w over positions with g ≠ 0

Its eigenvalues λ give log determinants, evidence and samples at any prior precision δ:

    log p(y) ≈ log p(y | W*) − ½ δ ‖W*‖² − ½ Σ log(1 + λ/δ)                 (MacKay 1992; Daxberger et al. 2021)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.batch import Batch, Inputs
from dissensus.core.likelihood import Likelihood, expand_weight
from dissensus.layers.conversion import convertible_layers
from dissensus.utils.checks import number, one_of
from dissensus.utils.tensor_tree import Tensors
from dissensus.utils.torch_private import buffers_of

Structure = Literal["full", "kron", "auto"]
Hessian = tuple[Tensor, Tensor | None]  # as of `Likelihood.curvature`
Root = Callable[[Tensor], Tensor]  # e -> L e, L Lᵀ a Hessian
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

    @property
    def mean(self) -> Tensor:
        """(C, D) the layer's own weights and biases."""
        return self.matrix(self.parameters).detach()

    def matrix(self, tensors: dict[str, Tensor]) -> Tensor:
        """(..., C, D) weights and biases side by side in float64, from tensors named like `parameters`."""
        weight, *bias = (tensors[name].double() for name in self.parameters)
        front = weight.ndim - next(iter(self.parameters.values())).ndim
        return torch.cat([weight.flatten(front + 1), *(each[..., None] for each in bias)], dim=-1)

    def tensors(self, matrix: Tensor) -> dict[str, Tensor]:
        """The inverse of `matrix`: copies in the shapes and dtypes of the layer's parameters."""
        (weight, kernel), *bias = self.parameters.items()
        inputs = kernel.shape[1]
        found = {weight: matrix[..., :inputs].reshape(*matrix.shape[:-1], inputs, *kernel.shape[2:])}
        found |= {name: matrix[..., inputs] for name, _ in bias}
        return {name: t.to(kernel.dtype).clone(memory_format=torch.contiguous_format) for name, t in found.items()}

    def rows(self, tensor: Tensor) -> Tensor:
        """(n, C) one row per position, in float64, from a tensor with the layer's channel axis."""
        moved = tensor.movedim(self.channels, -1).double()
        return moved.reshape(-1, moved.shape[-1])

    def inputs(self, features: Tensor) -> Tensor:
        """(n, D) features by rows, with a 1 for the bias."""
        found = self.rows(features)
        return torch.cat([found, torch.ones_like(found[:, :1])], dim=1) if len(self.parameters) == 2 else found


@contextmanager
def record_calls(layers: Mapping[str, nn.Module]) -> Iterator[list[Call]]:
    """Context in which every call of the layers is appended to the list; under autograd, their outputs have gradients."""
    seen: list[Call] = []

    def keep(name: str, args: tuple[Any, ...], keywords: dict[str, Any], outputs: Any) -> Any:
        if not isinstance(outputs, Tensor):
            seen.append((name, None, None))
            return outputs
        features = next((given.clone() for given in [*args, *keywords.values()] if isinstance(given, Tensor)), None)
        if torch.is_grad_enabled() and not outputs.requires_grad:
            outputs.requires_grad_()
        seen.append((name, features, outputs))
        return outputs.clone()  # the network may write into both afterwards

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hook = layer.register_forward_hook(lambda _, *call, name=name: keep(name, *call), with_kwargs=True)
            hooks.enter_context(hook)
        yield seen


def choose_layers(network: nn.Module, x: Inputs, patterns: str | Sequence[str] | None = None) -> list[LinearLayer]:
    """The layers with these names, or, without patterns, the last layer called for x that the outputs depend on."""
    modules = dict(network.named_modules())
    # Layers that multiply by their own weights: the last of them must be linear.
    weighted = {name for name, each in modules.items() if any(p.ndim > 1 for p in each.parameters(recurse=False))}
    watched = {name: layer for name, layer in modules.items() if name in weighted or isinstance(layer, nn.Linear)}
    if patterns is not None:
        watched, _ = convertible_layers(network, layers=[patterns] if isinstance(patterns, str) else patterns)
    with torch.enable_grad(), record_calls(watched) as seen:
        outputs = batches.call_network(network, x)
    called: list[Call] = []
    for name, *tensors in seen:
        # A module around a called layer is none, even with weights of its own (a class token), unless it is parametrised.
        around = any(inner != name and inner.startswith(f"{name}." if name else "") for inner, _, _ in called)
        if not around or isinstance(modules[name], (nn.Linear, *CONVOLUTIONS)):
            called.append((name, *tensors))
    how: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
    while patterns is None and called and outputs.requires_grad and isinstance(called[-1][2], Tensor):
        if torch.autograd.grad(outputs, called[-1][2], torch.ones_like(outputs), **how)[0] is not None:
            break
        called.pop()  # such as an auxiliary head
    names = [name for name, _, _ in called]
    return [_linear_layer(network, name, names) for name in (names[-1:] or [""] if patterns is None else watched)]


def _linear_layer(network: nn.Module, name: str, called: list[str]) -> LinearLayer:
    """The layer of that name; raises if its weights cannot be sampled."""
    if fault := _why_not_linear(network, name, called):
        raise ValueError(f"expected outputs linear in the layer's weights, got {fault}, or choose others: layers=")
    layer = network.get_submodule(name)
    return LinearLayer(name, layer, {key: network.get_parameter(key) for key in parameter_names(name, layer)})


def parameter_names(name: str, layer: nn.Module) -> list[str]:
    """Names in the network of the parameters of a layer of that name."""
    return [f"{name}.{key}" if name else key for key, _ in layer.named_parameters(recurse=False)]


def add_batch_curvature(
    gathered: list[CurvatureSums], network: nn.Module, likelihood: Likelihood, layers: list[LinearLayer], batch: Batch
) -> None:
    """Adds the curvature of one batch for one network to the sums of each layer; the first one has the log-likelihood."""
    x, y, weight = batch
    with record_calls({layer.name: layer.layer for layer in layers}) as seen, batches.UnchangedInputs(x):
        outputs = batches.call_network(network, x)
    for layer in layers:  # they were found with the first batch
        if (times := [name for name, _, _ in seen].count(layer.name)) != 1:
            got = f"'{layer.name}' called {times} times"
            raise ValueError(f"expected layers that are called once per batch, got {got}; use separate layers")
    if not bool(outputs.isfinite().all()):
        raise ValueError("expected finite outputs, got NaN or infinity; check the network's weights")
    counted, axis = likelihood.target_mask(y), likelihood.class_axis
    log_prob = likelihood.log_prob(outputs.double(), y)
    w = expand_weight(weight, log_prob, counted)
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
    root = curvature_root(*hessian, axis, whole=hessian[0].ndim > outputs.ndim)
    _add_by_passes(gathered, layers, seen, outputs, lambda e: w.sqrt() * root(e), weight)


def _add_in_closed_form(
    sums: CurvatureSums, layer: LinearLayer, call: Call, w: Tensor, outputs: Tensor, hessian: Hessian, axis: int
) -> bool:
    """Adds a batch if the network's outputs are the layer's, with its channels on that axis; returns whether they are."""
    a, u = hessian
    at = layer.channels if u is None and a.ndim == outputs.ndim else axis  # diagonal Hessians fit any axis
    made = call[2].movedim(layer.channels, at)
    fits = outputs.shape in (made.shape, made.squeeze(at).shape)
    if not fits or not torch.equal(made.reshape(outputs.shape), outputs):
        return False

    def rows(tensor: Tensor) -> Tensor:  # (n, C), or (n, C, C) of whole Hessians
        more = tensor.shape[outputs.ndim :]
        return tensor.reshape(*made.shape, *more).movedim(at, made.ndim - 1).reshape(-1, made.shape[at], *more)

    sums.add(layer.inputs(call[1]), rows(a), None if u is None else rows(u), rows(w)[:, 0])
    return True


def _add_by_passes(
    gathered: list[CurvatureSums], layers: list[LinearLayer], seen: list[Call], outputs: Tensor, root: Root, weight: Any
) -> None:
    """Adds Σ v vᵀ of a batch to full sums, the two factors of each layer to Kronecker-factored ones."""
    calls, examples = {name: tensors for name, *tensors in seen}, len(outputs)
    features = [layer.inputs(calls[layer.name][0]) for layer in layers]  # (n, D) each

    def gradients(given: Tensor) -> list[Tensor]:  # (n, C) for each layer
        made, how = [calls[layer.name][1] for layer in layers], {"allow_unused": True, "materialize_grads": True}
        found = torch.autograd.grad(outputs, made, given.to(outputs.dtype), retain_graph=True, **how)
        return [layer.rows(g) for layer, g in zip(layers, found, strict=True)]

    if weight is not None or any(sums.structure == "full" for sums in gathered):
        first = torch.arange(examples, device=outputs.device).reshape(-1, *[1] * (outputs.ndim - 1)) == 0
        for layer, g in zip(layers, gradients(first.expand_as(outputs)), strict=True):
            if len(g) % examples or bool(g[len(g) // examples :].any()):
                hint = 'choose others, or structure="kron" without example weights'
                raise ValueError(f"expected layers with examples on the first axis, got '{layer.name}'; {hint}")
    used = [torch.zeros_like(phi[:, 0], dtype=torch.bool) for phi in features]
    for direction in gathered[0].directions(outputs):
        for sums, phi, on, g in zip(gathered, features, used, gradients(root(direction)), strict=True):
            on |= (g != 0).any(1)
            pair = (rows.reshape(examples, -1, rows.shape[1]) for rows in (g, phi))
            v = torch.einsum("bnc,bnd->bcd", *pair).flatten(1) if len(sums.sums) == 1 else g  # (B, C D) or (n, C)
            sums.sums[0] += v.mT @ v
    for sums, phi, on in zip(gathered, features, used, strict=True):
        w = on.double()
        if weight is not None:
            w *= weight.double().reshape(examples, -1).mean(1).repeat_interleave(len(phi) // examples)
        sums.weight += w.sum()
        for factor in sums.sums[1:]:
            factor += (w[:, None] * phi).mT @ phi


def curvature_root(a: Tensor, u: Tensor | None, axis: int, *, whole: bool) -> Root:
    """The function e -> L e, for e of the outputs' shape, with L Lᵀ the Hessian over that axis: diag(a) − u uᵀ, or whole a."""
    if whole:
        values, vectors = eigendecompose(a.movedim(axis, -2))  # (B, ..., C), (B, ..., C, C)
        return lambda e: (vectors @ (values.sqrt() * e.movedim(axis, -1))[..., None])[..., 0].movedim(-1, axis)
    # diag(a) − u uᵀ = diag(a)^½ (I − v vᵀ) diag(a)^½, and (I − v vᵀ)^½ = I − k v vᵀ
    d, tiny = a.sqrt(), torch.finfo(a.dtype).tiny
    v = torch.zeros_like(d) if u is None else u / d.clamp(min=tiny)
    square = v.square().sum(axis, keepdim=True).clamp(tiny, 1.0)
    k = (1 - (1 - square).sqrt()) / square
    return lambda e: d * (e - k * v * (v * e).sum(axis, keepdim=True))


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

    def __init__(self, structure: Structure, shape: Sequence[int], device: torch.device) -> None:
        like: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self.sums = [torch.zeros(side, side, **like) for side in _sides(structure, *shape)]
        self.structure: Structure = "full" if len(self.sums) == 1 else "kron"
        self.log_likelihood = torch.zeros((), **like)
        self.weight = torch.zeros((), **like)  # of the features' sum
        self.rows = torch.zeros((), **like)  # weight of all outputs that count
        self.generator = torch.Generator(device).manual_seed(0)

    def directions(self, outputs: Tensor) -> Iterator[Tensor]:
        """Directions e of the outputs' shape with Σ e eᵀ = I for every example: unit vectors; random signs on average."""
        size, shape, device = outputs[0].numel(), outputs.shape, outputs.device
        if size <= MOST_OUTPUTS:
            units = torch.eye(size, dtype=torch.float64, device=device).reshape(size, 1, *shape[1:])
            yield from units.expand(size, *shape)
            return
        for _ in range(RANDOM_PASSES):
            signs = 2 * torch.randint(2, shape, generator=self.generator, device=device) - 1
            yield signs.double() / math.sqrt(RANDOM_PASSES)

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
    """N(mean, (G + δ)⁻¹) over a layer's weights and biases, (C, D), as eigenvalues and eigenvectors of G, in float64."""

    mean: Tensor  # (C, D)
    eigenvalues: Tensor  # (C D,) or (C, D)
    log_likelihood: Tensor  # () of the data at the mean
    precision: Tensor  # () δ
    read_share: Tensor  # () share of the examples that was read: what is counted for others is no evidence
    layer: Tensor  # () number of the layer among the network's modules

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    @classmethod
    def from_sums(cls, gathered: CurvatureSums, mean: Tensor, *, layer: int, times: float = 1.0) -> Self:
        """The curvature of `times` these sums around the weights `mean` (C, D); the prior precision is not chosen yet."""
        values, vectors = zip(*map(eigendecompose, gathered.sums), strict=True)
        kron = gathered.structure == "kron"
        eigenvalues = torch.outer(*values) / gathered.weight.clamp(min=1e-300) if kron else values[0]
        found = cls(_buffers_of(mean, times * eigenvalues, vectors, times * gathered.log_likelihood, layer))
        found.read_share.fill_(min(1.0, 1.0 / times))
        return found

    @classmethod
    def blank(cls, structure: Structure, classes: int, features: int, *, layer: int) -> Self:
        """A curvature of the right shapes, to be filled from a file."""
        sides = _sides(structure, classes, features)
        mean = torch.empty(classes, features, dtype=torch.float64)
        # Empty, not zeros: zeros would allocate the memory at once.
        vectors = [mean.new_empty(side, side) for side in sides]
        return cls(_buffers_of(mean, mean.new_empty(sides), vectors, mean.new_empty(()), layer))

    def log_marginal_likelihood(self, precision: Tensor) -> Tensor:
        """() log p(y) of the examples read at a prior precision δ (), differentiable in it."""
        fit = self.read_share * self.log_likelihood - 0.5 * precision * self.mean.square().sum()
        return fit - 0.5 * torch.log1p(self.read_share * self.eigenvalues / precision).sum()

    def sample_joint(self, noise: Tensor) -> Tensor:
        """(S, C, D) samples of N(0, (G + δ)⁻¹), from standard normal noise of that shape."""
        scaled = noise.reshape(len(noise), *self.eigenvalues.shape) * (self.eigenvalues + self.precision).rsqrt()
        if self.structure == "full":
            return (scaled @ self.get_buffer("vectors").mT).reshape(noise.shape)
        return self.get_buffer("outputs") @ scaled @ self.get_buffer("features").mT

    def sample_rows(self, noise: Tensor) -> Tensor:
        """As `sample_joint`, but rows (the weights of one output) are sampled independently: N(0, Σ_cc), Σ = (G + δ)⁻¹."""
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
        return "full" if "vectors" in buffers_of(self) else "kron"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        for name, buffer in buffers_of(self).items():  # half precision cannot hold the range of the eigenvalues
            if buffer is not None:
                moved = fn(buffer)
                buffers_of(self)[name] = moved if moved.dtype == buffer.dtype else buffer.to(moved.device)
        return self


def _buffers_of(mean: Tensor, values: Tensor, vectors: Sequence[Tensor], log_likelihood: Tensor, layer: int) -> Tensors:
    names = ("vectors",) if len(vectors) == 1 else ("outputs", "features")
    found = {"mean": mean, "eigenvalues": values, **dict(zip(names, vectors, strict=True))}
    found |= {key: torch.ones_like(log_likelihood) for key in ("precision", "read_share")}
    return found | {"log_likelihood": log_likelihood, "layer": torch.tensor(layer, device=mean.device)}


def _sides(structure: Structure, classes: int, features: int) -> list[int]:
    """Rows of each matrix; raises before allocation if a matrix would be too large."""
    if structure == "auto":
        structure = "full" if 8 * (classes * features) ** 2 <= LARGEST else "kron"
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
    """The number given, or the precision that maximises the evidence: the only root of Σ λ/(λ + δ) = δ ‖mean‖², λ as read."""
    if prior_precision != "marginal_likelihood":
        return float(prior_precision)
    eigenvalues = torch.cat([(each.read_share * each.eigenvalues).flatten() for each in curvatures])
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
