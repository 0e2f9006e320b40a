"""Kernels of embedded ensembles at infinite width: members share weights and differ by modulations.

Layers l = 1…L in NTK form, members α: z_α = x_α W/√N + b, x_α ← u_α φ(v_α z_α), f_α = x_α W/√N; W and b are shared. As
widths grow, {f_α} becomes a Gaussian process with covariance K_d within a member and K_o between two members, and gradient
descent follows fixed kernels: Θ_d and Θ_o from the shared weights, Θ_ind from a member's own modulations (Velikanov et al.,
arXiv 2202.12297, theorems 1 and 2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from dissensus.layers.modulation import Modulation
from dissensus.theory.activations import Activation, activation_of
from dissensus.theory.kernel_inputs import check_kernels, input_moments, variance_of
from dissensus.utils.checks import integer, one_of


@dataclass(frozen=True)
class EmbeddedKernels:
    """Kernels within and between members of a wide embedded ensemble, (N1, N2) float64 each; made by `embedded_kernels`."""

    gp_same: Tensor  # K_d = E f_α(x) f_α(x')
    gp_cross: Tensor  # K_o = E f_α(x) f_β(x'), α ≠ β
    common_same: Tensor  # Θ_d = ⟨∂f_α/∂w, ∂f_α/∂w⟩, w: all shared tensors
    common_cross: Tensor  # Θ_o = ⟨∂f_α/∂w, ∂f_β/∂w⟩
    individual: Tensor  # Θ_ind = ⟨∂f_α/∂u_α, ∂f_α/∂u_α⟩ over the trained modulations

    def mean_mode(self, members: int, gamma: float) -> Tensor:
        """(N1, N2) tangent kernel of the members' mean: (γ/M)(Θ_d + (M − 1) Θ_o) + Θ_ind."""
        return gamma / members * (self.common_same + (members - 1) * self.common_cross) + self.individual

    def difference_mode(self, members: int, gamma: float) -> Tensor:
        """(N1, N2) tangent kernel of the differences between members: (γ/M)(Θ_d − Θ_o) + Θ_ind."""
        return gamma / members * (self.common_same - self.common_cross) + self.individual


def embedded_kernels(
    x1: Tensor,
    x2: Tensor | None = None,
    *,
    depth: int,
    activation: str | nn.Module | Activation,
    u: Modulation | Sequence[Modulation],
    v: Modulation | Sequence[Modulation],
    weight_variance: float,
    bias_variance: float = 0.0,
    trained: Literal["both", "u", "v", "none"] = "both",
) -> EmbeddedKernels:
    """Computes the `EmbeddedKernels` of a dense embedded ensemble at infinite width.

    Members are f_α with x ← u_α φ(v_α (x W/√N + b)) in each hidden layer. There is no output bias: it would correlate
    members whatever their modulations.

    Args:
        x1, x2: inputs (N1, D) and (N2, D); x2 = None means x1.
        depth: number of hidden layers.
        activation: φ as a name ("relu", "erf", …), a module or an `Activation`.
        u, v: laws of the modulations: one for all, or one for each hidden layer.
        weight_variance: variance of W.
        bias_variance: above 0 adds trained, shared hidden biases (+1 per layer in the tangent kernel).
        trained: the modulations that count in `individual`: "both", "u", "v" or "none" (for dropout masks).
    """
    one_of("trained", trained, ("both", "u", "v", "none"), hint="name the trained modulations")
    integer("depth", depth, hint="members differ only in hidden layers")
    phi = activation_of(activation)
    laws = list(zip(laws_of(u, depth, "u"), laws_of(v, depth, "v"), strict=True))
    variance = variance_of("weight_variance", weight_variance)
    bias = variance_of("bias_variance", bias_variance)
    inner, norm1, norm2 = input_moments(x1, x2)
    trained_bias = 1.0 if bias > 0 else 0.0
    a, b = (variance * norm + bias for norm in (norm1, norm2))  # K_d(x, x), K_d(x', x')
    same = cross = variance * inner + bias
    theta_same = theta_cross = inner + trained_bias
    individual = torch.zeros_like(inner)
    for layer, (law_u, law_v) in enumerate(laws, start=1):
        within, between = phi.within_member(a, b, same, law_v), phi.between_members(a, b, cross, law_v)
        second, first_squared = law_u.second_moment, law_u.mean**2  # m_d = U₂, m_o = U₁²
        hidden = layer < depth
        output_bias, output_trained = (bias, trained_bias) if hidden else (0.0, 0.0)
        # Θ_ind ← σ_w² (C_d [u] + U₂ Z [v] + U₂ D_d Θ_ind)
        individual = second * within.slope * individual
        if trained in ("both", "u"):
            individual = individual + within.value
        if trained in ("both", "v"):
            assert within.product is not None
            individual = individual + second * within.product
        individual = variance * individual
        # Θ ← m C + 1_b + σ_w² m D Θ
        theta_same = second * (within.value + variance * within.slope * theta_same) + output_trained
        theta_cross = first_squared * (between.value + variance * between.slope * theta_cross) + output_trained
        same = variance * second * within.value + output_bias
        cross = variance * first_squared * between.value + output_bias
        if hidden:
            a, b = (variance * second * phi.within_member(q, q, q, law_v).value + bias for q in (a, b))
    check_kernels(same, cross, theta_same, theta_cross, individual)
    return EmbeddedKernels(same, cross, theta_same, theta_cross, individual)


def laws_of(laws: Modulation | Sequence[Modulation], depth: int, name: str) -> list[Modulation]:
    """One law for each hidden layer."""
    given = [laws] * depth if isinstance(laws, Modulation) else list(laws)
    if len(given) != depth or not all(isinstance(law, Modulation) for law in given):
        raise ValueError(f"expected one Modulation or {depth} for {name}, got {laws!r}; pass Modulation.sign()")
    return given
