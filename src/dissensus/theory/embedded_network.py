"""A dense embedded ensemble of finite width as plain tensors, to compare with `embedded_kernels`.

    z_α^l = x_α^{l−1} W^l/√N_{l−1} + b^l,   x_α^l = u_α^l φ(v_α^l z_α^l),   f_α = x_α^L W^{L+1}/√N_L

W and b are shared by all members; each member has its own u and v. Inputs and outputs are not modulated, and there is no
output bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dissensus.layers.modulation import Modulation
from dissensus.theory.activations import ACTIVATIONS
from dissensus.theory.embedded_limit import laws_of
from dissensus.theory.kernel_inputs import variance_of
from dissensus.theory.tangent_blocks import EnsembleBlocks
from dissensus.utils.checks import integer, one_of


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
        outputs: Tensor = x @ params[f"weight{self.depth + 1}"] / x.shape[-1] ** 0.5
        return outputs

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
        """The same as `ensemble_blocks`, computed from activations and backpropagated signals only:

        Θ^com_αβ = ⟨x^L, x'^L⟩/N_L + Σ_l ⟨δ^l, δ'^l⟩ (⟨x^{l−1}, x'^{l−1}⟩/N_{l−1} + 1_b)
        Θ^ind_α  = Σ_l ⟨∂f/∂u, ∂f/∂u'⟩ + ⟨∂f/∂v, ∂f/∂v'⟩
        """
        first = self._signals(x1)
        second = first if x2 is None else self._signals(x2)
        common: Tensor = torch.zeros(())
        individual: Tensor = torch.zeros(())
        for l, (one, two) in enumerate(zip(first, second, strict=True), start=1):
            gram = torch.einsum("anw,bmw->abnm", one.inputs, two.inputs) / one.inputs.shape[-1]
            gram = gram + float(f"bias{l}" in self.shared)
            common = common + torch.einsum("anow,bmpw->abnmop", one.delta, two.delta) * gram[..., None, None]
            for left, right in zip(one.own, two.own, strict=True):
                individual = individual + torch.einsum("anow,ampw->anmop", left, right)
        return EnsembleBlocks(common, individual)

    def _signals(self, x: Tensor) -> list[_Signals]:
        """For each layer: inputs (M, B, N), ∂f/∂z and ∂f/∂(u, v) (M, B, O, N), for every input separately."""
        members, batch = self.members, len(x)
        rows = {name: tensor[:, None].expand(members, batch, -1) for name, tensor in self.own.items()}
        own = {name: tensor.detach().clone().requires_grad_() for name, tensor in rows.items()}
        inputs, zs = [], []
        h = x.expand(members, *x.shape)
        with torch.enable_grad():
            for l in range(1, self.depth + 2):
                inputs.append(h.detach())
                z = h @ self.shared[f"weight{l}"] / h.shape[-1] ** 0.5 + self.shared.get(f"bias{l}", 0.0)
                zs.append(z.requires_grad_())
                if l <= self.depth:
                    h = own[f"u{l}"] * ACTIVATIONS[self.activation].function(own[f"v{l}"] * z)
            f = zs[-1]
            leaves = [*zs, *own.values()]
            found = [torch.autograd.grad(each.sum(), leaves, retain_graph=True) for each in f.unbind(-1)]
        stacked = [torch.stack(each, 2) for each in zip(*found, strict=True)]  # (M, B, O, N)
        factors = dict(zip(own, stacked[len(zs) :], strict=True))
        return [
            _Signals(inputs[l], stacked[l], [factors[f"u{l + 1}"], factors[f"v{l + 1}"]] if l < self.depth else [])
            for l in range(len(zs))
        ]


class _Signals(NamedTuple):
    inputs: Tensor
    delta: Tensor
    own: list[Tensor]


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
