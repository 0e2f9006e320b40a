"""Embedded ensembles: members share weights and differ by modulations. Their kernels at infinite width, and finite ones.

    z_α^l = x_α^{l−1} W^l/√N_{l−1} + b^l,   x_α^l = u_α^l φ(v_α^l z_α^l),   f_α = x_α^L W^{L+1}/√N_L

W and b are shared by all members; each member α has its own u and v in each hidden layer l = 1…L. As widths grow, {f_α} becomes
a Gaussian process with covariance K_d within a member and K_o between two members, and gradient descent follows fixed kernels:
Θ_d and Θ_o from the shared weights, Θ_ind from a member's own modulations (Velikanov et al., arXiv 2202.12297, theorems 1, 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from dissensus.layers.modulation import Modulation
from dissensus.theory.activations import ACTIVATIONS, Activation, activation_of
from dissensus.theory.empirical_kernels import EnsembleBlocks, ensemble_blocks
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

    Members are f_α with x ← u_α φ(v_α (x W/√N + b)) in each hidden layer; an output bias would correlate them in any case.

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
    variance, bias = variance_of("weight_variance", weight_variance), variance_of("bias_variance", bias_variance)
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


@dataclass(frozen=True)
class EmbeddedNetwork:
    """A dense embedded ensemble of finite width as plain tensors, made by `draw`; `network(x)` gives (M, B, O).

    Args:
        shared: "weight1"… (N_in, N_out), "bias1"… (N_out,).
        own: "u1"…, "v1"… (M, N).
        activation: name of φ.
    """

    shared: dict[str, Tensor]
    own: dict[str, Tensor]
    activation: str = "relu"

    @staticmethod
    def draw(
        inputs: int,
        *,
        width: int | Sequence[int],
        depth: int,
        members: int,
        activation: str = "relu",
        u: Modulation | Sequence[Modulation],
        v: Modulation | Sequence[Modulation],
        weight_variance: float,
        bias_variance: float = 0.0,
        outputs: int = 1,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> EmbeddedNetwork:
        """Draws a random network; it has hidden biases if bias_variance > 0, as in `embedded_kernels`.

        Args:
            inputs, outputs: numbers of inputs D and outputs O.
            width: units of the hidden layers: one number, or one for each.
            depth: number of hidden layers.
            members: number of members, M.
            u, v, weight_variance, bias_variance: as in `embedded_kernels`.
            generator: source of random numbers; None means torch's global generator.
        """
        one_of("activation", activation, ACTIVATIONS)
        variance_of("weight_variance", weight_variance)
        variance_of("bias_variance", bias_variance)
        hidden = [width] * depth if isinstance(width, int) else list(width)
        if len(hidden) != depth:
            raise ValueError(f"expected one width or {depth}, got {len(hidden)}; pass one for each hidden layer")
        widths = [integer("widths", each) for each in (inputs, *hidden, outputs)]
        integer("members", members)
        factors = {"u": laws_of(u, depth, "u"), "v": laws_of(v, depth, "v")}

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=dtype, device=device)

        shared, own = {}, {}
        for l in range(1, depth + 2):
            shared[f"weight{l}"] = weight_variance**0.5 * normal(widths[l - 1], widths[l])
            if l <= depth:
                if bias_variance > 0:
                    shared[f"bias{l}"] = bias_variance**0.5 * normal(widths[l])
                for name, laws in factors.items():
                    own[f"{name}{l}"] = laws[l - 1].sample((members, widths[l]), generator, dtype=dtype, device=device)
        return EmbeddedNetwork(shared, own, activation)

    @property
    def depth(self) -> int:
        """Number of hidden layers."""
        return len(self.own) // 2

    @property
    def members(self) -> int:
        """Number of members, M."""
        return len(self.own["u1"])

    def member(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        """Outputs (B, O) of one member, whose tensors in `params` have no member axis; for `ensemble_blocks`."""
        for l in range(1, self.depth + 1):
            z = x @ params[f"weight{l}"] / x.shape[-1] ** 0.5 + params.get(f"bias{l}", 0.0)
            x = params[f"u{l}"] * ACTIVATIONS[self.activation].function(params[f"v{l}"] * z)
        return x @ params[f"weight{self.depth + 1}"] / x.shape[-1] ** 0.5

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs (M, B, O)."""
        return self.outputs(self.shared, self.own, x)

    def outputs(self, shared: dict[str, Tensor], own: dict[str, Tensor], x: Tensor) -> Tensor:
        """Outputs (M, B, O) with these tensors instead of the network's."""
        # (M, 1, N): a factor for each unit, the same for every input
        return self.member({**shared, **{name: tensor[:, None] for name, tensor in own.items()}}, x)

    def replace_tensors(self, tensors: dict[str, Tensor]) -> EmbeddedNetwork:
        """A copy of the network with these tensors, shared and own, replaced by name."""
        shared, own = ({name: tensors.get(name, t) for name, t in each.items()} for each in (self.shared, self.own))
        return EmbeddedNetwork(shared, own, self.activation)

    def blocks(self, x1: Tensor, x2: Tensor | None = None) -> EnsembleBlocks:
        """The measured kernels within and between members: `ensemble_blocks` of this network."""
        return ensemble_blocks(self.member, self.shared, self.own, x1, x2)


def train_embedded(
    network: EmbeddedNetwork,
    x: Tensor,
    y: Tensor,
    *,
    steps: int,
    learning_rate: float,
    gamma: float,
    train_modulations: bool = True,
) -> tuple[Tensor, EmbeddedNetwork]:
    """Trains an `EmbeddedNetwork` by gradient descent on x (B, D) and y (B, O).

    dw = −η (γ/M) Σ_α ∂L_α/∂w for shared tensors, du_α = −η ∂L_α/∂u_α for a member's own, with L_α = (1/2B) Σ_b (f_α − y)².

    Returns:
        (outputs (steps + 1, M, B, O) on x before every step and after the last one, the trained network).
    """
    rates = dict.fromkeys(network.shared, learning_rate * gamma / network.members)
    rates |= {name: learning_rate for name in network.own if train_modulations}
    outputs = []

    def loss(moving: dict[str, Tensor], now: EmbeddedNetwork) -> tuple[Tensor, Tensor]:
        f = now.replace_tensors(moving)(x)
        return (f - y).square().sum() / (2 * len(x)), f

    for _ in range(steps):
        tensors = {**network.shared, **network.own}
        gradients, f = torch.func.grad(loss, has_aux=True)({name: tensors[name] for name in rates}, network)
        outputs.append(f)
        network = network.replace_tensors({name: tensors[name] - rates[name] * g for name, g in gradients.items()})
    return torch.stack([*outputs, network(x)]), network
