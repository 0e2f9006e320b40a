"""Likelihoods: the distribution of targets given a network's outputs; docs/guides/likelihoods.md has one of your own."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.core.batch import Batch
from dissensus.core.predictive import ClassificationPredictive, Predictive, RegressionPredictive
from dissensus.utils.checks import number, one_of
from dissensus.utils.torch_private import unseen_by_function_modes

Weights = Sequence[float] | Tensor
NO_LABEL = -(2**62)  # torch's own, -100, would leave rows out of a mean without a word


class Likelihood(nn.Module, ABC):
    """Base class: p(y | outputs) of one member. Subclasses define `log_prob`, `describe` and `predictive`.

    Outputs are those of one member, (B, ...), without a member axis: the library repeats the likelihood over members. Its
    parameters (learned noise) are trained with the network; each member has its own.
    """

    class_axis: ClassVar[int] = 1  # of outputs, over which the Hessians of `curvature` extend

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "log_prob" in vars(cls) and "curvature" not in vars(cls):
            cls.curvature = Likelihood.curvature  # type: ignore[method-assign]  # the inherited closed form belongs to another log_prob

    @abstractmethod
    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """(B, ...) log p(y | outputs), one entry per example (per pixel for segmentation)."""

    @abstractmethod
    def describe(self, outputs: Tensor) -> tuple[Tensor, ...]:
        """The tensors that describe one member's predictive distribution, each (B, ...).

        Classification gives log-probabilities, regressions give mean and variance.
        """

    @abstractmethod
    def predictive(self, *described: Tensor) -> Predictive:
        """The mixture over members, from the stacked results of `describe`: each tensor (M, B, ...)."""

    def target_mask(self, y: Tensor) -> Tensor | None:
        """(B, ...) which entries of log_prob count; None if all do."""
        return None

    def cat_targets(self, parts: Sequence[Tensor]) -> Tensor:
        """The targets of several batches in one tensor, of the shape that `Predictive.cat` gives their predictions."""
        return torch.cat([*parts])

    def training_weight(self, y: Tensor) -> Tensor | None:
        """(B, ...) weight of every entry of log_prob in the training loss; None if all count the same."""
        counted = self.target_mask(y)
        return None if counted is None else counted.to(torch.get_default_dtype())

    def check(self, output_shape: torch.Size, y: Tensor) -> None:
        """Raises a ValueError if y does not fit outputs of this shape. Values are read only if y is on the host."""
        return None

    def output_warning(self, outputs: Tensor) -> str | None:
        """A warning about outputs (B, ...) that look wrong, with the remedy; or None. Called once per shape of x."""
        return None

    def curvature(self, outputs: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(a, u) with diag(a) − u uᵀ the Hessian of −log p(y | outputs) over axis 1, at every example and position.

        Both have the shape of outputs, (B, C, ...). If u is None, a may be the full Hessian, (B, C, ..., C). This default
        uses automatic differentiation, for log p that is a sum over positions; negative eigenvalues are set to 0, since
        Gauss–Newton needs a positive semidefinite Hessian. Closed forms that need no targets accept None for y.
        """
        if y is None:
            raise ValueError("expected targets, got None; pass y: this likelihood's curvature may depend on them")

        def loss(f: Tensor) -> Tensor:
            return -self.log_prob(f.reshape(outputs.shape), y).sum()

        f = outputs.detach().reshape(len(outputs), -1, *outputs.shape[2:])  # (B, C, ...), also for outputs (B,)
        axes = torch.eye(f.shape[1], dtype=f.dtype, device=f.device)[(...,) + (None,) * (f.ndim - 2)]  # (C, C, 1...)
        back = torch.func.vjp(torch.func.grad(loss), f)[1]
        whole = torch.stack([back(axis.expand_as(f))[0].detach() for axis in axes], -1).movedim(1, -2)  # (B, ..., C, C)
        if len(axes) == 1:
            return whole.reshape(outputs.shape).clamp(min=0.0), None
        values, vectors = torch.linalg.eigh(whole)
        return ((vectors * values.clamp(min=0.0)[..., None, :]) @ vectors.mT).movedim(-2, 1), None

    def config(self) -> dict[str, Any]:
        """All keyword arguments that rebuild this likelihood, as JSON values, defaults included."""
        return {}

    def nll(self, outputs: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """() −Σ w log p / Σ w over the entries that count: weight 2 is the same as two copies of the example."""
        log_prob = self.log_prob(full_precision(outputs), y)
        counted = self.training_weight(y)
        if weight is None and counted is None:
            return -log_prob.mean()
        w = expand_weight(weight, log_prob)
        if counted is not None:
            w = torch.where(counted > 0, w * counted.to(w.dtype), 0.0)
        # A batch in which no entry counts has loss 0 and gradient 0, not 0/0.
        return -(w * log_prob).sum() / w.sum().clamp(min=torch.finfo(w.dtype).tiny)

    def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self.log_prob(outputs, y)


class Classification(Likelihood):
    """The likelihood of class labels, given logits (B, C), (B, C, T) or (B, C, H, W).

    Targets are class indices of the logits' shape without C, or soft labels of the whole shape. Classes are axis 1, as in
    torch's cross_entropy; logits (B, T, C) of tokens need `Tokens`. Logits (B, C, T) with T = C are ambiguous and refused:
    return (B, C, T, 1), with targets (B, T, 1).

    Args:
        ignore_index: label of positions that do not count, in training and in evaluation; None counts all.
        class_weights: C numbers, used in training only; the loss is −Σ w_y log p_y / Σ w_y, as in torch's
            cross_entropy(weight=), and for soft labels the mean of −Σ_c w_c y_c log p_c.
        label_smoothing: ε from 0 to below 1, in training only: targets are (1 − ε) y + ε / C, as in torch's cross_entropy.
    """

    def __init__(
        self, ignore_index: int | None = None, *, class_weights: Weights | None = None, label_smoothing: float = 0.0
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.label_smoothing = float(number("label_smoothing", label_smoothing, least=0, below=1, hint="0.1 is usual"))
        given = class_weights.tolist() if isinstance(class_weights, Tensor) else class_weights
        hint = "to exclude a class, pass its label as ignore_index"
        weights = [float(number("every class weight", each, above=0, hint=hint)) for each in given or ()]
        self.class_weights = None if given is None else weights
        # A cache by device and dtype, not a buffer, because members have no own copy. Made before a CUDA graph is captured.
        self._weights: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._clear = False  # whether a batch has shown which axis holds the classes

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        if y.is_floating_point():
            return (y * F.log_softmax(outputs, dim=1)).sum(1)  # (B, ...)
        ignored = -100 if self.ignore_index is None else self.ignore_index
        return -F.cross_entropy(outputs, y.long(), reduction="none", ignore_index=ignored)

    def nll(self, outputs: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        if self.label_smoothing:
            return self._smoothed_nll(outputs, y, weight)
        unweighted = weight is None and self.class_weights is None
        plain = unweighted and self.ignore_index is None and not y.is_floating_point()
        if plain and type(self) is Classification:  # the same gradients without two changes of sign in every graph
            if outputs.ndim == 2 and y.is_cpu:  # labels were checked, so all count: one operation less
                return F.cross_entropy(full_precision(outputs), y.long(), ignore_index=NO_LABEL)
            return F.cross_entropy(full_precision(outputs), y.long(), reduction="none").mean()
        if self.class_weights is not None and y.is_floating_point():
            w = self._weight_of_classes(y.device, y.dtype)
            y = y * w.reshape(-1, *[1] * (y.ndim - 2))
        return super().nll(outputs, y, weight)

    def _smoothed_nll(self, outputs: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
        """() Σ w ℓ / Σ w w_y, with torch's loss ℓ of smoothed labels, which class weights multiply, and example weights w."""
        outputs, soft, counted = full_precision(outputs), y.is_floating_point(), self.training_weight(y)
        how: Any = {"ignore_index": -100 if soft or self.ignore_index is None else self.ignore_index}
        if self.class_weights is not None:
            how["weight"] = self._weight_of_classes(outputs.device, outputs.dtype)
        how |= {"reduction": "none", "label_smoothing": self.label_smoothing}
        loss = F.cross_entropy(outputs, y if soft else y.long(), **how)  # (B, ...), 0 where ignored
        w = expand_weight(weight, loss)
        total = (w if counted is None else w * counted.to(w.dtype)).sum()
        return (w * loss).sum() / total.clamp(min=torch.finfo(w.dtype).tiny)

    def training_weight(self, y: Tensor) -> Tensor | None:
        if self.class_weights is None or y.is_floating_point():
            return super().training_weight(y)
        table, counted = self._weight_of_classes(y.device, torch.float64), self.target_mask(y)
        return table[y.long()] if counted is None else torch.where(counted, table[torch.where(counted, y, 0).long()], 0)

    def _weight_of_classes(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """(C,) the class weights as a tensor."""
        if (device, dtype) not in self._weights:
            with unseen_by_function_modes():  # made once, unlike a network's constants
                self._weights[device, dtype] = torch.tensor(self.class_weights, device=device, dtype=dtype)
        return self._weights[device, dtype]

    def target_mask(self, y: Tensor) -> Tensor | None:
        return None if self.ignore_index is None or y.is_floating_point() else y != self.ignore_index

    def curvature(self, outputs: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        probabilities = outputs.softmax(1)
        return probabilities, probabilities

    def describe(self, outputs: Tensor) -> tuple[Tensor, ...]:
        _check_logits(outputs.shape)
        return (F.log_softmax(full_precision(outputs), dim=1),)

    def predictive(self, *described: Tensor) -> Predictive:
        found = ClassificationPredictive(*described)
        found.ignore_index = self.ignore_index
        return found

    def output_warning(self, outputs: Tensor) -> str | None:
        if outputs.ndim < 2 or outputs.shape[1] < 2 or outputs.numel() == 0:
            return None
        # No warning about log-probabilities: log_softmax does not change them, so they are valid logits.
        outputs = outputs[:8].cpu()  # where no kernels are loaded for it
        tolerance = 1e-4 if full_precision(outputs) is outputs else 1e-2
        total = full_precision(outputs).sum(1)
        if bool((outputs < 0).any()) or not torch.allclose(total, torch.ones_like(total), rtol=0, atol=tolerance):
            return None
        return (
            "expected logits, got outputs ≥ 0 that sum to one: the network seems to end in a softmax, and a second softmax "
            "would make every prediction too uncertain; remove the last softmax, or return log-probabilities"
        )

    def config(self) -> dict[str, Any]:
        smoothing = {"label_smoothing": self.label_smoothing} if self.label_smoothing else {}  # older files have none
        return {"ignore_index": self.ignore_index, "class_weights": self.class_weights, **smoothing}

    def check(self, output_shape: torch.Size, y: Tensor) -> None:
        _check_logits(output_shape)
        batch, classes, *space = output_shape
        if self.class_weights is not None and len(self.class_weights) != classes:
            raise ValueError(f"expected {classes} class weights, got {len(self.class_weights)}; pass one per class")
        soft = y.is_floating_point()
        if y.dtype == torch.bool or y.shape != (output_shape if soft else torch.Size((batch, *space))):
            hint = "pass one class index per example, y.long()"
            if y.shape == output_shape:
                hint = "pass class indices, not one-hot rows"
            elif space and y.shape == output_shape[:-1]:
                hint = "classes are axis 1 of the logits: return outputs.movedim(-1, 1), or pass likelihood=Tokens()"
            wanted = f"integer class indices of shape {(batch, *space)} or soft labels of shape {tuple(output_shape)}"
            raise ValueError(f"expected {wanted}, got {y.dtype} of shape {tuple(y.shape)}; {hint}")
        if soft:
            ones = torch.ones((), dtype=y.dtype)
            if y.device.type == "cpu" and not (torch.allclose(y.sum(1), ones, atol=1e-3) and bool((y >= 0).all())):
                wanted = "soft labels ≥ 0 that sum to one over axis 1 (classes)"
                raise ValueError(f"expected {wanted}, got others; normalise them (y.softmax(1))")
            return
        self._clear = self._clear or space != [classes]
        if not self._clear:
            advice = "return outputs[..., None] with targets y[..., None] if axis 1 holds the classes"
            got = f"{tuple(output_shape)}, perhaps (B, T, C); {advice}, else pass likelihood=Tokens()"
            raise ValueError(f"expected logits (B, C, T) with C ≠ T, got {got}")
        if not y.is_cpu or y.numel() == 0:
            return
        known = y.long() if self.ignore_index is None else y[y != self.ignore_index].long()
        low, high = map(Tensor.item, known.aminmax()) if known.numel() else (0, 0)
        if low < 0 or high >= classes:
            bad = low if low < 0 else high
            hint = "relabel the classes, or pass Classification(ignore_index=...)"
            raise ValueError(f"expected labels in 0…{classes - 1}, got {bad}; {hint}")


def full_precision(outputs: Tensor) -> Tensor:
    """Outputs in at least float32: likelihoods are not computed in half precision."""
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def _check_logits(shape: torch.Size) -> None:
    if len(shape) < 2 or shape[1] < 2:
        hint = "give one output per class, pass a single example as x[None], or likelihood=Regression(...)"
        raise ValueError(f"expected logits of shape (B, C) with C ≥ 2, got {tuple(shape)}; {hint}")


def expand_weight(weight: Tensor | None, like: Tensor, counted: Tensor | None = None) -> Tensor:
    """The weight, (B,) or of like's shape, in like's shape and dtype; None is 1, and what does not count has 0."""
    weight = torch.ones_like(like) if weight is None else weight
    if weight.shape[:1] != like.shape[:1] or weight.ndim > like.ndim:
        got = tuple(weight.shape)
        raise ValueError(f"expected sample weights of shape ({like.shape[0]},), got {got}; pass one per example")
    found = weight.to(like.dtype).reshape(*weight.shape, *[1] * (like.ndim - weight.ndim)).expand_as(like)
    return found if counted is None else found * counted


def log_prob_sum(likelihood: Likelihood, found: Predictive, y: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """() the weighted sum of log-probabilities of targets that count, and () the sum of those weights; both float64."""
    counted = likelihood.target_mask(y)
    known = counted is None or found.ignore_index is not None
    log_prob = found.log_prob(y if known else torch.where(counted, y, 0)).double()  # type: ignore[arg-type]
    w = expand_weight(weight, log_prob, counted)
    return (w * log_prob.where(w > 0, 0.0)).sum(), w.sum()  # avoids 0 · −∞ for positions that do not count


class RealTargets(Likelihood):
    """Base class of likelihoods of real targets, which may be standardised for the network.

    With targets (mean, std) the network's outputs are z = (y − mean) / std; users see targets, predictions and densities of y.
    """

    def __init__(self, targets: Any = None, unit: str | None = None) -> None:
        super().__init__()
        self.targets: dict[str, list[float]] | None = None  # JSON, saved with the likelihood's arguments
        self.unit = unit  # unit of y, for reports
        self._scales: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        if targets is not None:
            self.set_target_scale(targets)

    def set_target_scale(self, targets: Any) -> None:
        """Makes outputs mean z from now on. `targets`: {"mean": D numbers, "std": D numbers above 0}, or a `Standardiser`."""
        given = targets if isinstance(targets, Mapping) else {"mean": targets.mean, "std": targets.std}
        # Ten digits, so that a mean over shuffled batches does not depend on their order.
        exact = {key: torch.as_tensor(given[key], dtype=torch.float64).flatten().tolist() for key in given}
        rounded = {key: [float(f"{value:.10g}") for value in values] for key, values in exact.items()}
        for each in rounded["std"]:
            number("every std of the targets", each, above=0, hint="a constant target has std 1")
        if self.targets not in (None, rounded):
            raise ValueError("expected targets that are standardised once, got a second scale; build a new likelihood")
        self.targets = {"mean": rounded["mean"], "std": rounded["std"]}
        self._scales = {}

    def target_scale(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """(mean, std) of y, each (D,)."""
        key = (like.device, like.dtype)
        if key not in self._scales:  # made before a CUDA graph is captured, or a graph traced
            given = self.targets or {"mean": [0.0], "std": [1.0]}
            mean, std = (torch.tensor(given[name], device=like.device, dtype=like.dtype) for name in ("mean", "std"))
            self._scales[key] = mean, std
        return self._scales[key]

    def to_output_units(self, y: Tensor) -> Tensor:
        """z, in the units of the network's outputs."""
        if self.targets is None:
            return y
        mean, std = self.target_scale(y)
        return (y - mean) / std

    def target_log_density(self, y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """(B,) log-density of y, given mean and variance of z."""
        squares = (self.to_output_units(y) - mean) ** 2
        each = -0.5 * (squares / variance + variance.log() + math.log(2 * math.pi))
        if self.targets is not None:
            each = each - self.target_scale(y)[1].log()
        return each.flatten(1).sum(1) if each.ndim > 1 else each

    def to_target_units(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of z, converted to the units of y."""
        if self.targets is None:
            return mean, variance
        shift, std = self.target_scale(mean)
        return mean * std + shift, variance * std**2

    def predictive(self, *described: Tensor) -> Predictive:
        return RegressionPredictive(*described)

    def config(self) -> dict[str, Any]:
        return {"targets": self.targets, "unit": self.unit}

    def mean_shape(self, output_shape: torch.Size) -> torch.Size:
        """Shape of the means, and of targets, for outputs of this shape; targets (B,) may stand for (B, 1)."""
        return output_shape

    def check(self, output_shape: torch.Size, y: Tensor) -> None:
        shape = self.mean_shape(output_shape)
        if self.targets is not None and len(self.targets["mean"]) not in (1, shape[-1] if len(shape) > 1 else 1):
            found = len(self.targets["mean"])
            raise ValueError(f"expected one scale of the targets or {shape[-1]}, got {found}; pass one per output")
        if not y.is_floating_point():
            raise ValueError(f"expected real targets, got {y.dtype}; convert them with y.float()")
        if y.shape != shape:
            raise ValueError(f"expected targets of shape {tuple(shape)}, got {tuple(y.shape)}; reshape one of them")
        if y.device.type == "cpu" and y.numel() and not all(math.isfinite(end.item()) for end in y.aminmax()):
            raise ValueError("expected finite targets, got NaN or infinity; clean the data")


class Regression(RealTargets):
    """The likelihood y ~ N(mean, noise²) of real targets; the network outputs the mean, the noise is fixed or learned.

    Outputs and targets are (B, D) or (B,). For outputs (B, 1), targets may be (B,).

    Args:
        noise: a standard deviation in the units of y, or "learned": one number per member, trained with the network.
        initial: initial value of a learned noise. None: 1, or the network's error on the first training batch if that is
            above 5, as for targets that are not standardised.
        targets: {"mean": …, "std": …} or a `Standardiser`: the network's outputs are then (y − mean) / std, and a learned
            noise starts at 1 in those units; users always see the units of y. Set by `fit(targets="standardised")`.
        unit: unit of y, for reports.
    """

    def __init__(
        self,
        noise: float | Literal["learned"] = "learned",
        *,
        initial: float | None = None,
        targets: Any = None,
        unit: str | None = None,
    ) -> None:
        super().__init__(targets, unit)
        if isinstance(noise, str):
            one_of("noise", noise, ("learned",), hint="or pass the standard deviation of y")
        else:
            number("noise", noise, above=0, hint='pass the standard deviation of y, or "learned"')
        if initial is not None:
            number("initial", initial, above=0, hint="pass a standard deviation")
        self.noise, self.initial = noise, initial
        if noise == "learned":
            self.log_noise = nn.Parameter(torch.tensor(float(initial or 1.0)).log())

    def extra_repr(self) -> str:
        return f"noise={self.noise!r}"

    def _variance(self, outputs: Tensor) -> Tensor:
        if self.noise == "learned":
            return torch.exp(2 * full_precision(self.log_noise)).to(outputs.dtype).expand_as(outputs)
        fixed = torch.full_like(outputs, float(self.noise) ** 2)
        return fixed if self.targets is None else fixed / self.target_scale(outputs)[1] ** 2

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self.target_log_density(y, outputs, self._variance(outputs))  # (B,)

    def curvature(self, outputs: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self._variance(outputs).reciprocal(), None

    def describe(self, outputs: Tensor) -> tuple[Tensor, ...]:
        outputs = full_precision(outputs)
        return self.to_target_units(outputs, self._variance(outputs))

    def config(self) -> dict[str, Any]:
        return {"noise": self.noise, "initial": self.initial, **super().config()}


class HeteroscedasticRegression(RealTargets):
    """The likelihood of real targets with noise that depends on the input (Lakshminarayanan et al. 2017).

    Outputs (B, 2D) are D means, then D raw variances v with variance softplus(v) + 1e-6. Targets are (B, D), or (B,) if D = 1.

    Args:
        targets, unit: as in `Regression`.
    """

    def _moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = outputs.chunk(2, dim=1)  # (B, D) each
        return mean, F.softplus(raw) + 1e-6

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self.target_log_density(y, *self._moments(outputs))  # (B,)

    def curvature(self, outputs: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The Fisher information, the Hessian's mean over y ~ p, since the Hessian itself may be indefinite."""
        variance, slope = self._moments(outputs)[1], outputs.chunk(2, dim=1)[1].sigmoid()  # slope of softplus
        return torch.cat([variance.reciprocal(), 0.5 * (slope / variance).square()], dim=1), None

    def describe(self, outputs: Tensor) -> tuple[Tensor, ...]:
        return self.to_target_units(*self._moments(full_precision(outputs)))

    def mean_shape(self, output_shape: torch.Size) -> torch.Size:
        if len(output_shape) < 2 or output_shape[1] % 2:
            got = tuple(output_shape)
            raise ValueError(f"expected outputs of shape (B, 2D), got {got}; double the network's last layer")
        return torch.Size((output_shape[0], output_shape[1] // 2, *output_shape[2:]))


FAR = 5.0  # errors above this start the noise elsewhere than at 1: errors of standardised targets are smaller


def untrained_noise(particles: Any) -> Tensor | None:
    """Logarithm of a learned noise, () or (M,), if it still has its initial value; else None."""
    noise = {**particles.shared_parameters(), **particles.own_parameters()}.get("likelihood.log_noise")
    if noise is None or not noise.requires_grad or not isinstance(particles.likelihood, Regression):
        return None
    start = math.log(particles.likelihood.initial or 1.0)
    return noise if bool(((noise.detach() - start).abs() < 1e-6).all()) else None


def start_noise(particles: Any, outputs: Callable[[], Tensor], batch: Batch) -> str | None:
    """Starts the noise at the error of the outputs if that is far above 1, where a start at 1 would take long to correct."""
    noise, likelihood = untrained_noise(particles), particles.likelihood
    heads = isinstance(likelihood, HeteroscedasticRegression)  # its variances are network outputs and cannot be set
    if not heads and (noise is None or likelihood.initial is not None):
        return None
    mean, variance = likelihood.describe(outputs()) if heads else (outputs(), 1.0)
    y = batch.y if heads else likelihood.to_output_units(batch.y)  # in the units of the outputs
    squares = (y - mean).double().square() / variance
    w = expand_weight(batch.weight, squares)
    error = float(((w * squares).sum() / w.sum()).sqrt())
    if not FAR < error < math.inf:
        return None
    if noise is not None:
        noise.data.fill_(math.log(error))
    what = "intervals start too narrow" if heads else "the learned noise starts there instead of at 1"
    return (
        f"outputs differ from targets by {error:.3g}{' standard deviations' if heads else ''} in the first batch: {what}; "
        'standardise the targets, fit(..., targets="standardised"), or training will take long'
    )


def noise_warning(particles: Any) -> str | None:
    """A warning if the noise was never trained, else None."""
    return None if (noise := untrained_noise(particles)) is None else (
        f"the learned noise was never trained and is still {float(noise.detach().flatten()[0].exp()):g}; train it, pass "
        "Regression(noise=...), or pass the likelihood of the posterior in which the network was trained"
    )  # fmt: skip
