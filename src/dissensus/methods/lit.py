"""LIT: locally independent training (Ross, Pan, Celi & Doshi-Velez, AAAI 2020), a baseline of FoRDE."""

from collections.abc import Sequence
from typing import Any, Unpack, final

import torch
from torch import Tensor, nn

from dissensus.core.likelihood import Likelihood
from dissensus.core.prior import PriorKeywords
from dissensus.methods.parts.comparison_spaces import Gradient
from dissensus.methods.parts.input_gradients import InputGradientPosterior
from dissensus.numerics.rbf_kernels import directions, to_kernel_precision
from dissensus.utils.checks import number


@final
class LIT(InputGradientPosterior):
    """M networks trained with a penalty on parallel input gradients, in the same or in opposite directions.

        loss = Σ_i mean_b nll_ib + strength · Σ_{i<j} mean_b cos²(g_ib, g_jb)

    g_ib is the input gradient of the true-class logit, as in FoRDE.

    Args:
        networks: M networks of one architecture, each initialised separately; copied.
        strength: weight of each pair of members, so (M − 1) · strength in total for one member; 0 is a deep ensemble.
            FoRDE's c is a member's total: at strength = c, LIT's pairs weigh at least M − 1 times as much as FoRDE's.
        gradient: the differentiated output: the true-class "logit" (the mean for regression) or the "log_prob".
        examples: number of examples per batch that are penalised, in a second forward pass; None is all of them.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """

    name = "lit"

    def __init__(
        self,
        networks: Sequence[nn.Module],
        *,
        strength: float,
        gradient: Gradient = "logit",
        examples: int | None = None,
        likelihood: Likelihood | None = None,
        **prior: Unpack[PriorKeywords],
    ) -> None:
        super().__init__(networks, gradient=gradient, examples=examples, likelihood=likelihood, **prior)
        self.strength = number("strength", strength, least=0, hint="0 is a deep ensemble")

    def couple(self, z: Any) -> Any:
        """strength · ∂/∂g_i Σ_{j≠i} mean_b cos²(g_ib, g_jb): the penalty's own gradient, since it is symmetric."""
        g = z["gradients"]  # (M, B, D)
        weight = z["weight"][0] if "weight" in z else None  # (B,)
        force = self.strength * torch.func.grad(lambda gradients: squared_cosines(gradients, weight).sum())(g)
        return {name: force if name == "gradients" else torch.zeros_like(tensor) for name, tensor in z.items()}


def squared_cosines(gradients: Tensor, weight: Tensor | None = None) -> Tensor:
    """(M,) Σ_{j≠i} mean_b cos²(g_ib, sg[g_jb]) of input gradients (M, B, D); weight (B,) weighs the mean."""
    unit = directions(to_kernel_precision(gradients)).transpose(0, 1)  # (B, M, D)
    squares = (unit @ unit.detach().transpose(1, 2)).square()  # (B, M, M)
    itself = torch.eye(squares.shape[1], dtype=torch.bool, device=squares.device)
    squares = squares.masked_fill(itself, 0.0).sum(2)  # (B, M)
    if weight is None:
        mean = squares.mean(0)
    else:
        share = weight.to(squares.dtype)
        mean = (share[:, None] * squares).sum(0) / share.sum().clamp(min=torch.finfo(squares.dtype).tiny)
    return mean.to(torch.promote_types(gradients.dtype, torch.float32))
