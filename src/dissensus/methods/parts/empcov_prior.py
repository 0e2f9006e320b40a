"""EmpCov: a prior on the first layer's weights that follows the inputs (Izmailov, Nicholson, Lotfi & Wilson, NeurIPS 2021).

Along directions in which the training inputs do not vary, only the prior determines the weights. An isotropic prior leaves
random weights there, so test inputs that vary in these directions give noisy outputs; EmpCov pulls the weights to zero.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.core.prior import GaussianPrior, Prior
from dissensus.numerics.lengthscales import Moments, check_finite_rows
from dissensus.utils.checks import number, one_of
from dissensus.utils.tensor_tree import Tensors


class EmpCov(Prior):
    """A prior on the first layer: w ~ N(0, alpha C + epsilon I) for each output, C the covariance of the layer's inputs.

    Args:
        inputs: training inputs (N, ...) or an iterable of batches (x or (x, ...)), as the network gets them.
        network: the architecture; the values of its weights do not matter.
        layer: name of the first layer: an nn.Linear (C over flattened inputs) or nn.Conv2d (C over its input patches).
        alpha: factor of C, the variance along directions in which inputs vary.
        epsilon: variance along directions in which inputs do not vary.
        rest: the prior on all other tensors, or a Gaussian's standard deviation; None leaves them to weight decay.
    """

    root: Tensor
    spread: Tensor

    def __init__(
        self,
        inputs: Tensor | Iterable[Any],
        network: nn.Module,
        layer: str,
        *,
        alpha: float = 1.0,
        epsilon: float = 1e-4,
        rest: Prior | float | None = None,
    ) -> None:
        super().__init__()
        known = {name: part for name, part in network.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)}
        first = known[one_of("layer", layer, known)]
        self.parameter = f"{layer}.weight" if layer else "weight"
        self.alpha, self.epsilon = number("alpha", alpha, above=0), number("epsilon", epsilon, above=0)
        self.rest = rest if rest is None or isinstance(rest, Prior) else GaussianPrior(rest)
        self.norm_layers = self.rest is not None and self.rest.norm_layers
        dimension = first.weight[0].numel()
        axes = torch.eye(dimension, dtype=torch.float64, device=first.weight.device)
        covariance = Moments.from_rows(_layer_inputs(inputs, first), axes).covariance
        values, vectors = torch.linalg.eigh(covariance)
        # w Σ⁻¹ wᵀ = ‖w root‖²
        deviations = (alpha * values.clamp(min=0.0) + epsilon).sqrt()  # (D,)
        dtype = torch.promote_types(first.weight.dtype, torch.float32)  # sums of squares overflow in float16
        self.register_buffer("root", (vectors / deviations).to(dtype))  # (D, D)
        self.register_buffer("spread", (vectors * deviations).T.to(dtype))

    def covers(self, name: str) -> bool:
        return self.rest is not None or name == self.parameter

    def log_prob(self, params: Tensors) -> Tensor:
        """() −Σ_o w_o Σ⁻¹ w_oᵀ / 2 over the layer's outputs o, plus log p of the other tensors."""
        others = {name: tensor for name, tensor in params.items() if name != self.parameter}
        terms = [] if self.rest is None or not others else [self.rest.log_prob(others)]
        if self.parameter in params:  # it may be frozen
            weight = params[self.parameter].flatten(1)  # (O, D)
            terms.append(-(weight @ self.root.to(weight.dtype)).square().sum() / 2)
        return torch.stack(terms).sum()

    def check_fits(self, shapes: Mapping[str, torch.Size]) -> None:
        one_of("a prior on one", self.parameter, shapes)  # for tied layers the network lists the first name
        width = math.prod(shapes[self.parameter][1:])
        if width != len(self.root):
            wanted = f"a prior over {width} weights per output of '{self.parameter}'"
            raise ValueError(f"expected {wanted}, got one over {len(self.root)}; build it for this network")

    def draw(self, name: str, like: Tensor) -> Tensor:
        if name != self.parameter:
            assert self.rest is not None  # otherwise it covers no other tensor
            return self.rest.draw(name, like)
        noise = torch.randn_like(like)
        return (noise.flatten(1) @ self.spread.to(noise.dtype)).reshape(like.shape)


def _layer_inputs(inputs: Tensor | Iterable[Any], first: nn.Linear | nn.Conv2d) -> Iterator[Tensor]:
    """Batches (n, D) of the layer's input vectors: flattened inputs, or patches for a convolution."""
    before = 0
    for batch in torch.split(inputs, 256) if isinstance(inputs, Tensor) else inputs:
        x = batch[0] if isinstance(batch, tuple | list) else batch
        x = x.detach().to(first.weight.device, torch.promote_types(x.dtype, torch.float32))
        check_finite_rows(x.flatten(1), before)
        before += len(x)
        if isinstance(first, nn.Conv2d):
            patches = F.unfold(x, first.kernel_size, first.dilation, first.padding, first.stride)  # type: ignore[arg-type]
            rows = patches.transpose(1, 2).flatten(0, 1)  # (B·places, D)
        else:
            rows = x.flatten(1)
        if rows.shape[1] != first.weight[0].numel():
            wanted = f"inputs of {first.weight[0].numel()} numbers for this layer"
            raise ValueError(f"expected {wanted}, got {rows.shape[1]}; name the layer that takes the network's inputs")
        yield rows
