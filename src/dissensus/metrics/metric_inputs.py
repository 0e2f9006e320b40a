"""Checks the arguments of metrics and flattens them to rows (n, C) and labels (n,)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dissensus.utils.arrays import tensor_of

TOLERANCE = 1e-3  # how far a row of probabilities may be from summing to one


def labelled_rows(
    values: Tensor, y: Tensor, ignore_index: int | None = None, *, class_axis: int = 1, log: bool = False
) -> tuple[Tensor, Tensor]:
    """Rows (n, C) of probabilities or logarithms, (M, n, C) for class_axis 2, and labels (n,), without void places."""
    values = tensor_of(values, torch.float64)
    rows = distributions(values, class_axis=class_axis, log=log)
    shape = (values.shape[class_axis - 1], *values.shape[class_axis + 1 :])
    labels, keep = class_indices("y", y, shape, rows.shape[-1], ignore_index)
    return (rows, labels) if keep is None else (rows[..., keep, :], labels[keep])


def soft_rows(values: Tensor, y: Tensor, *, log: bool = False) -> tuple[Tensor, Tensor] | None:
    """Rows (n, C) of values and, in float64, of soft labels y, which have the values' shape; None for class indices."""
    values, y = tensor_of(values, torch.float64), tensor_of(y)
    if not y.is_floating_point() or y.shape != values.shape:
        return None
    return distributions(values, class_axis=1, log=log), distributions(y, class_axis=1, log=False).double()


def distributions(values: Tensor, *, class_axis: int, log: bool) -> Tensor:
    """Checked values with classes last and places flattened: (n, C), or (M, n, C) for class_axis 2."""
    values = tensor_of(values, torch.float64)
    name = "log-probabilities" if log else "probabilities"
    if not values.is_floating_point():
        raise TypeError(f"expected floating-point {name}, got {values.dtype}; pass the network's softmax outputs")
    if values.ndim <= class_axis:
        axes = "(N, C) or (N, C, H, W)" if class_axis == 1 else "(M, N, C) or (M, N, C, H, W)"
        raise ValueError(f"expected {name} of shape {axes}, got {tuple(values.shape)}; keep the class axis")
    values = values.detach()
    check_no_nan(values, name, class_axis)
    total = (values.exp() if log else values).sum(class_axis, dtype=torch.float64)
    off = ~((total - 1).abs() <= TOLERANCE)
    if _any_bad(off):
        place = _first_place(off)
        remedy = "apply log_softmax first" if log else "apply softmax first"
        got = f"{total[place].item():.6g} at {_place_text(place)}; {remedy}"
        raise ValueError(f"expected {name} that sum to one over axis {class_axis} (tolerance {TOLERANCE}), got {got}")
    if not log and _any_bad(values < -TOLERANCE):
        place = _first_place((values < -TOLERANCE).any(class_axis))
        raise ValueError(f"expected probabilities, got a negative one at {_place_text(place)}; use softmax")
    leading = values.shape[: class_axis - 1]
    return values.movedim(class_axis, -1).reshape(*leading, -1, values.shape[class_axis])


def score_pair(score_in: Tensor, score_ood: Tensor, *, empty: bool = False) -> tuple[Tensor, Tensor]:
    """The two sets of scores as flat tensors of one dtype, without NaN; not empty unless `empty`."""
    pair = []
    for name, given in (("score_in", score_in), ("score_ood", score_ood)):
        score = tensor_of(given, torch.float64)
        if score.numel() == 0 and not empty:
            raise ValueError(f"expected at least one score in {name}, got none; pass scores of both kinds of inputs")
        check_no_nan(score, name)
        pair.append(score.detach().flatten())
    dtype = torch.promote_types(pair[0].dtype, pair[1].dtype)
    dtype = dtype if dtype.is_floating_point else torch.float64
    return pair[0].to(dtype), pair[1].to(dtype)


def same_shape(**tensors: Tensor) -> list[Tensor]:
    """The tensors in float64, checked: all of the first one's shape, not empty, without NaN."""
    tensors = {name: tensor_of(tensor, torch.float64) for name, tensor in tensors.items()}
    first_name, first = next(iter(tensors.items()))
    if first.numel() == 0:
        raise ValueError(f"expected at least one example in {first_name}, got shape {tuple(first.shape)}; pass data")
    for name, tensor in tensors.items():
        if tensor.shape != first.shape:
            wanted = f"the shape {tuple(first.shape)} of {first_name}"
            raise ValueError(f"expected {name} of {wanted}, got {tuple(tensor.shape)}; reshape them to one shape")
        check_no_nan(tensor, name)
    return [tensor.detach().double() for tensor in tensors.values()]


def gaussians(mean: Tensor, variance: Tensor, *, zero: bool = False) -> tuple[Tensor, Tensor]:
    """Means and variances in float64, of one shape; variances must be positive, or non-negative if `zero`."""
    mean, variance = same_shape(mean=mean, variance=variance)
    if (variance < 0 if zero else variance <= 0).any():
        bound = "at least zero" if zero else "above zero"
        raise ValueError(f"expected variances {bound}, got {variance.min().item():.6g}; pass variances, not logarithms")
    return mean, variance


def member_gaussians(
    means: Tensor, variances: Tensor, y: Tensor, *, zero: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Means and variances (M, *shape) and targets of shape `shape`, in float64."""
    means, variances = gaussians(means, variances, zero=zero)
    return means, variances, targets_of(means, y)


def targets_of(means: Tensor, y: Tensor) -> Tensor:
    """Targets in float64, of the shape `shape` of members' means (M, *shape)."""
    y = tensor_of(y, torch.float64)
    if means.ndim == 0 or means.shape[1:] != y.shape:
        wanted = f"(M, {', '.join(map(str, y.shape))})"
        raise ValueError(f"expected means of shape {wanted}, got {tuple(means.shape)}; put the members on axis 0")
    return same_shape(y=y)[0]


def checked_mean(values: Tensor) -> Tensor:
    """() mean of per-example values in float64; raises if there are none."""
    return nonempty_values(values).mean(dtype=torch.float64)


def nonempty_values(values: Tensor) -> Tensor:
    """The values; raises if there are none."""
    if values.numel() == 0:
        raise ValueError("expected at least one labelled example, got none; check the data and ignore_index")
    return values


def check_no_nan(values: Tensor, name: str, class_axis: int | None = None) -> None:
    """Raises if there is a NaN; the error names its first place."""
    bad = values.isnan()
    if _any_bad(bad):
        place = _place_text(_first_place(bad if class_axis is None else bad.any(class_axis)))
        raise ValueError(f"expected numbers in {name}, got NaN at {place}; check whether a network diverged")


def class_indices(
    name: str, y: Tensor, shape: Sequence[int], classes: int, ignore_index: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Flat labels, and the mask of places that are not void (None without ignore_index)."""
    y = tensor_of(y)
    if tuple(y.shape) != tuple(shape):
        got = tuple(y.shape)
        raise ValueError(f"expected {name} of shape {tuple(shape)}, got {got}; pass class indices, not one-hot rows")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise TypeError(f"expected integer class indices in {name}, got {y.dtype}; pass {name}.long()")
    labels = y.detach().long()
    keep = torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index
    bad = keep & ((labels < 0) | (labels >= classes))
    if bad.any():
        place = _first_place(bad)
        remedy = "pass ignore_index if it marks void" if ignore_index is None else f"only {ignore_index} marks void"
        found = f"{labels[place].item()} at {_place_text(place)}"
        raise ValueError(f"expected class indices from 0 to {classes - 1} in {name}, got {found}; {remedy}")
    return labels.flatten(), None if ignore_index is None else keep.flatten()


def _any_bad(bad: Tensor) -> bool:
    """Whether there is a bad place; False while a graph is traced, because values are unknown then."""
    return not torch.compiler.is_compiling() and bool(bad.any())


def _first_place(mask: Tensor) -> tuple[int, ...]:
    """The coordinates of the first True."""
    return tuple(int(i) for i in torch.unravel_index(mask.flatten().int().argmax(), mask.shape))


def _place_text(place: tuple[int, ...]) -> str:
    return f"row {place[0]}" if len(place) == 1 else f"position {place}"


def checked_weights(weights: Tensor, count: int, name: str = "weights") -> Tensor:
    """Checked weights (..., N) in float64, how often each example counts; leading axes are resamples of a bootstrap."""
    if weights.ndim == 0 or weights.shape[-1] != count:
        raise ValueError(f"expected {name} (..., {count}), got {tuple(weights.shape)}; pass one weight per example")
    weights = weights.detach().double()
    total = weights.sum(-1)
    if not (weights.amin() >= 0) or not ((total > 0) & total.isfinite()).all():
        raise ValueError(f"expected {name} of at least zero with a positive sum, got others; pass counts")
    return weights


def group_sums(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """(..., K) sums of values (..., n) by group (n,)."""
    return values.new_zeros(*values.shape[:-1], groups).scatter_add_(-1, group.expand_as(values), values)
