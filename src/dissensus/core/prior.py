"""The Gaussian prior on weights and biases: ‖θ‖² / (2 N σ²), what a mean loss over N data points must carry."""

import math

import torch
from torch import Tensor, nn

from dissensus.numerics.checks import check_number, check_whole

NORM_LAYERS: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.CrossMapLRN2d,
)


def norm_parameters(module: nn.Module) -> set[str]:
    """Names of the parameters that belong to normalisation layers: torch's, and any that keeps running statistics."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, layer in module.named_modules()
        if isinstance(layer, NORM_LAYERS) or isinstance(getattr(layer, "running_mean", None), Tensor)
        for name, _ in layer.named_parameters(recurse=False)
    }


def check_prior(weight_prior_std: float | None, data_size: int | None) -> None:
    """Raises where the two keywords do not make a prior."""
    if data_size is not None:
        check_whole("data_size", data_size)
    if weight_prior_std is not None:
        check_number("weight_prior_std", weight_prior_std)
    for name, value in (("weight_prior_std", weight_prior_std), ("data_size", data_size)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"expected a positive {name}, got {value}; pass a finite number above 0")
    if weight_prior_std is not None and data_size is None:
        raise ValueError("expected data_size with weight_prior_std, got none; pass data_size=len(training_set)")


def negative_log_prior(tensors: dict[str, Tensor], weight_prior_std: float, data_size: int) -> Tensor:
    """() Σ θ² / (2 N σ²): −log p(θ) / N up to a constant."""
    # Sums of squares leave the range of float16 and the digits of bfloat16 long before the weights do.
    full = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors.values()]
    squares = torch.stack([tensor.square().sum() for tensor in full])
    return squares.sum() / (2 * data_size * weight_prior_std**2)
