"""Empirical tangent kernels between members of an embedded ensemble: members share weights and own modulations.

They take a function f(params, x) of one member's tensors, so any network with shared and own tensors can be measured.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dissensus.core import batch as batches
from dissensus.core.posterior import Posterior, inference_context
from dissensus.theory.empirical_kernels import exact_convolutions
from dissensus.theory.jacobians import Params, contract, output_gradients
from dissensus.theory.kernel_inputs import check_budget, checked_pair


@dataclass(frozen=True)
class EnsembleBlocks:
    """Measured tangent kernels between members, the empirical counterpart of `EmbeddedKernels`.

    M members, N1 and N2 inputs, O outputs.
    """

    common: Tensor  # (M, M, N1, N2, O, O) ⟨∂f_α/∂w, ∂f_β/∂w⟩
    individual: Tensor  # (M, N1, N2, O, O) ⟨∂f_α/∂u_α, ∂f_α/∂u_α⟩

    def total(self, gamma: float) -> Tensor:
        """The whole kernel (M·N1·O, M·N2·O): (γ/M) Θ^com, plus Θ^ind within members; rows by member, input, output."""
        members = len(self.common)
        theta = gamma / members * self.common
        own = torch.arange(members)
        theta[own, own] += self.individual
        _, _, n, m, o, q = theta.shape
        return theta.permute(0, 2, 4, 1, 3, 5).reshape(members * n * o, members * m * q)

    @property
    def same(self) -> Tensor:
        """(N1, N2, O, O) mean over members of Θ^com within a member."""
        own = torch.arange(len(self.common))
        return self.common[own, own].mean(0)

    @property
    def cross(self) -> Tensor:
        """(N1, N2, O, O) mean over pairs of different members of Θ^com."""
        members = len(self.common)
        return (self.common.sum((0, 1)) - members * self.same) / (members * (members - 1))


def ensemble_blocks(
    function: Callable[[Params, Tensor], Tensor],
    shared: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    x1: Tensor,
    x2: Tensor | None = None,
    *,
    fixed: Mapping[str, Tensor] | None = None,
    memory: int = 2**30,
) -> EnsembleBlocks:
    """Measures the `EnsembleBlocks` of a function f({**shared, **one member's own}, x (B, …)) -> (B, O).

    Args:
        function: f(params, x), with one member's tensors by name.
        shared: tensors shared by all members.
        own: trained tensors of each member, member axis first, (M, …).
        x1, x2: inputs (N1, …) and (N2, …); x2 = None means x1.
        fixed: own tensors that are not trained, such as masks and batch statistics.
        memory: most bytes for gradients and kernels.

    Raises:
        ValueError: more memory is needed; pass fewer inputs at a time.
    """
    x1, second = checked_pair(x1, x2)
    lengths = {len(tensor) for tensor in (*own.values(), *(fixed or {}).values())}
    if len(lengths) != 1:
        raise ValueError(f"expected own tensors with one member axis first, got lengths {sorted(lengths)}; stack them")
    (members,) = lengths
    weights = {name: tensor.detach() for name, tensor in shared.items()}
    each = [{name: tensor[m].detach() for name, tensor in own.items()} for m in range(members)]
    constant = [{name: tensor[m].detach() for name, tensor in (fixed or {}).items()} for m in range(members)]
    with torch.no_grad():
        outputs = function({**weights, **each[0], **constant[0]}, x1[:1]).numel()
    some = next(iter(weights.values()))
    size = some.element_size()
    count = sum(p.numel() for p in weights.values()) + sum(p.numel() for p in each[0].values())
    row = 3 * outputs * count * size
    sides = 1 if x2 is None else 2
    needed = members * sides * max(len(x1), len(second)) * row
    result = (members + 1) * members * len(x1) * len(second) * outputs**2 * size
    check_budget(needed + result, memory, "gradients of all members and their kernel", "pass fewer inputs at a time")

    def gradients(params: Params, others: Params, x: Tensor) -> list[Tensor]:
        return output_gradients(lambda p, one: function({**others, **p}, one[None]).reshape(-1), params, x)

    left = [gradients(weights, {**each[m], **constant[m]}, x1) for m in range(members)]
    right = left
    if x2 is not None:
        right = [gradients(weights, {**each[m], **constant[m]}, second) for m in range(members)]
    theta = torch.stack([torch.stack([contract(one, two).permute(0, 2, 1, 3) for two in right]) for one in left])
    if not own:
        return EnsembleBlocks(theta, torch.zeros_like(theta[0]))
    inner = []
    for m in range(members):
        one = gradients(each[m], {**weights, **constant[m]}, x1)
        two = one if x2 is None else gradients(each[m], {**weights, **constant[m]}, second)
        inner.append(contract(one, two).permute(0, 2, 1, 3))
    return EnsembleBlocks(theta, torch.stack(inner))


def posterior_blocks(
    posterior: Posterior, x1: Tensor, x2: Tensor | None = None, *, memory: int = 2**30
) -> EnsembleBlocks:
    """Measures the `EnsembleBlocks` of a posterior whose members share weights (`BatchEnsemble`, `DropoutEnsemble`).

    Runs in eval mode. All trained tensors count: the shared ones as w, the members' own (modulations, norm layers, output
    bias) as u, each with the weights' learning rate. `.total(posterior.gamma)` is the kernel of training.

    Args:
        x1, x2: inputs (N1, …) and (N2, …); x2 = None means x1.
        memory: most bytes for gradients and kernels.
    """
    particles = posterior.particles
    shared = {n: p for n, p in particles.shared_parameters().items() if n.startswith("network.")}
    own = {n: p for n, p in particles.own_parameters().items() if n.startswith("network.")}
    trained = {name: p for name, p in shared.items() if p.requires_grad}
    if not trained or particles.members < 2:
        got = f"{type(posterior).__name__} with {particles.members} member(s) and {len(trained)} shared tensors"
        raise TypeError(f"expected members that share weights, got {got}; pass a BatchEnsemble or a DropoutEnsemble")
    rest = {name: p.detach() for name, p in shared.items() if name not in trained}
    buffers, fixed = particles.shared_buffers(), {n: p for n, p in own.items() if not p.requires_grad}

    def outputs(params: Params, x: Tensor) -> Tensor:
        held = {**buffers, **{name: params[name] for name in particles.own_buffers()}}
        weights = {name: tensor for name, tensor in params.items() if name not in held}
        found: Tensor = particles.call(
            lambda member: batches.call_network(member.network, x), {**rest, **weights}, held
        )[0]
        return found

    posterior.check_inputs(x1)
    with inference_context(posterior), exact_convolutions():
        return ensemble_blocks(
            outputs,
            trained,
            {name: p for name, p in own.items() if p.requires_grad},
            x1.to(posterior.device),
            None if x2 is None else x2.to(posterior.device),
            fixed={**fixed, **particles.own_buffers()},
            memory=memory,
        )
