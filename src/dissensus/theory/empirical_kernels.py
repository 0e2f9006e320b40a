"""Empirical tangent kernels: Θ(x, x') = ∂f(x)/∂θ · (∂f(x')/∂θ)ᵀ for all pairs of inputs and outputs of a network, and those
between members that share weights.

Three methods give the same result (Novak et al. 2022). Costs with N inputs, O outputs, P parameters, W units in L layers and
cost F of a forward pass:

    structured   N O F + N² O² L W     dense networks: ⟨δ, δ'⟩ (⟨h, h'⟩ + 1) layer by layer, without forming gradients
    jacobian     N O F + N² O² P       gradients of all outputs, contracted parameter by parameter
    products     N² O F                kernel times unit vector, by one backward and one forward derivative
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import jacrev, jvp, vjp, vmap
from torch.utils.flop_counter import FlopCounterMode

from dissensus.core import batch as batches
from dissensus.core.posterior import Posterior, inference_context
from dissensus.nets.blocks import NTKLinear
from dissensus.theory.kernel_inputs import check_budget, checked_pair
from dissensus.utils.checks import one_of
from dissensus.utils.tensor_tree import TensorPlaces, call_with_tensors
from dissensus.utils.torch_private import BatchNorm, DropoutNd, forward_hooks_of, parameters_of

Params = dict[str, Tensor]
OneInput = Callable[[Params, Tensor], Tensor]  # one input -> (O,)


def trainable_parameters(network: nn.Module) -> Params:
    """The parameters that require gradients."""
    return {name: p for name, p in network.named_parameters() if p.requires_grad}


def functional(network: nn.Module) -> tuple[OneInput, Params]:
    """A network (N, …) -> (N, O) as a function of its trained parameters and one input."""
    places = TensorPlaces(network)

    def function(params: Params, x: Tensor) -> Tensor:
        return call_with_tensors(network, params, x[None], places=places)[0]

    return function, {name: p.detach() for name, p in trainable_parameters(network).items()}


def contraction(
    network: nn.Module, x1: Tensor, x2: Tensor, *, outputs: int, result: int, memory: int, plain: bool = False
) -> Tensor:
    """(N1, N2, O, O): contracts gradients of all outputs, block by block of inputs; `plain`: uses plain autograd."""
    function, params = functional(network)
    gradients = partial(gradients_one_by_one, network) if plain else partial(output_gradients, function, params)
    first, symmetric = next(iter(params.values())), x2 is x1
    size = sum(p.numel() * p.element_size() for p in params.values())
    row = 3 * outputs * size  # gradients, and torch's temporary memory for them
    check_budget(result + 2 * row, memory, "a kernel and gradients of two inputs", "use method='products'")
    block = max(1, (memory - result) // (2 * row))
    theta = first.new_empty(len(x1), outputs, len(x2), outputs)
    for i in range(0, len(x1), block):
        left = gradients(x1[i : i + block])
        for j in range(i if symmetric else 0, len(x2), block):
            right = left if symmetric and i == j else gradients(x2[j : j + block])
            found = contract(left, right)
            theta[i : i + block, :, j : j + block] = found
            if symmetric and i != j:
                theta[j : j + block, :, i : i + block] = found.permute(2, 3, 0, 1)
    return theta.permute(0, 2, 1, 3)


def output_gradients(function: OneInput, params: Params, x: Tensor) -> list[Tensor]:
    """(N, O, P_k) gradients of every output for every input, one tensor per parameter."""
    return [each.flatten(2) for each in vmap(jacrev(function), (None, 0))(params, x).values()]


def gradients_one_by_one(network: nn.Module, x: Tensor) -> list[Tensor]:
    """The same for a network (N, …) -> (N, O), one output at a time: slow, but correct for every network."""
    params = list(trainable_parameters(network).values())
    how: dict[str, Any] = {"retain_graph": True, "materialize_grads": True}
    with torch.enable_grad():
        each = [torch.autograd.grad(output, params, **how) for row in x[:, None] for output in network(row)[0]]
    return [torch.stack(found).reshape(len(x), -1, found[0].numel()) for found in zip(*each, strict=True)]


def contract(left: list[Tensor], right: list[Tensor]) -> Tensor:
    """(N1, O, N2, O) inner products of gradients."""
    (n, o), (m, q) = left[0].shape[:2], right[0].shape[:2]
    total = left[0].new_zeros(n * o, m * q)
    for one, two in zip(left, right, strict=True):
        total.addmm_(one.flatten(0, 1), two.flatten(0, 1).T)
    return total.view(n, o, m, q)


def saved_bytes(function: OneInput, params: Params, x: Tensor) -> int:
    """Bytes that autograd keeps for one input's forward pass, without parameters."""
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
    known, total = {p.data_ptr() for p in params.values()}, 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal total
        total += 0 if tensor.data_ptr() in known else tensor.numel() * tensor.element_size()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function(leaves, x)
    return max(total, x.numel() * x.element_size())


def products(network: nn.Module, x1: Tensor, x2: Tensor, *, outputs: int, result: int, memory: int) -> Tensor:
    """(N1, N2, O, O): Θ(·, x') e_o is the derivative of f along the gradient of f_o(x'), so gradients are not contracted."""
    (function, params), room = functional(network), memory - result
    size = sum(p.numel() * p.element_size() for p in params.values())
    held = 4 * saved_bytes(function, params, x1[0])  # for one input: values, tangents and temporary memory of layers
    what = "a kernel and derivatives along a gradient"
    check_budget(result + 4 * size + held, memory, what, "pass fewer inputs at a time")
    block = max(1, min(len(x1), 64, (room - 4 * size) // held))
    chunk = max(1, room // (4 * size + block * held))
    first = next(iter(params.values()))
    units = torch.eye(outputs, dtype=first.dtype, device=first.device)

    def column(x: Tensor, unit: Tensor, inputs: Tensor) -> Tensor:
        gradient = vjp(lambda p: function(p, x), params)[1](unit)[0]
        moved: Tensor = jvp(lambda p: vmap(function, (None, 0))(p, inputs), (params,), (gradient,))[1]
        return moved  # (n, O)

    theta = first.new_empty(len(x1), len(x2), outputs, outputs)
    every = vmap(vmap(column, (None, 0, None), chunk_size=chunk), (0, None, None), chunk_size=max(1, chunk // outputs))
    for i in range(0, len(x1), block):
        found = every(x2, units, x1[i : i + block])  # (N2, O', n, O)
        theta[i : i + block] = found.permute(2, 0, 3, 1)
    return theta


# Inputs h (N, D), signals δ (N, O, W), what the weights' and bias' terms count.
Layer = tuple[Tensor, Tensor, float, float]
BLOCK = 1280  # rows per block: few enough to skip half of a symmetric kernel, many enough for fast matrix products
Dense = nn.Linear | NTKLinear


def layerwise_kernel(network: nn.Module, x1: Tensor, x2: Tensor, *, outputs: int, result: int, memory: int) -> Tensor:
    """(N1, N2, O, O) from layers' inputs and signals; wrong if a parameter is used outside one call of its Linear."""
    linear: list[Dense] = [each for each in network.modules() if isinstance(each, nn.Linear | NTKLinear)]
    width = sum(each.out_features * each.weight.element_size() for each in linear)
    needed = result + (len(x1) + len(x2)) * outputs * width
    check_budget(needed, memory, "a kernel and backpropagated signals", "pass fewer inputs at a time")
    symmetric = x2 is x1
    first = _layer_signals(network, x1, linear)
    second = first if symmetric else _layer_signals(network, x2, linear)
    theta = first[0][1].new_empty(len(x1), outputs, len(x2), outputs)
    step = max(1, min(BLOCK, int(((memory - result) / (3 * theta.element_size())) ** 0.5)) // outputs)
    for i in range(0, len(x1), step):
        for j in range(i if symmetric else 0, len(x2), step):
            rows, columns = slice(i, i + step), slice(j, j + step)
            block = torch.zeros_like(theta[rows, :, columns])
            for (h, delta, weight, bias), (other_h, other_delta, *_) in zip(first, second, strict=True):
                gram = (weight * (h[rows] @ other_h[columns].T)).add_(bias)[:, None, :, None]
                signals = delta[rows].flatten(0, 1) @ other_delta[columns].flatten(0, 1).T
                block.addcmul_(signals.view(block.shape), gram)
            theta[rows, :, columns] = block
            if symmetric and i != j:
                theta[columns, :, rows] = block.permute(2, 3, 0, 1)
    return theta.permute(0, 2, 1, 3)


def _layer_signals(network: nn.Module, x: Tensor, linear: list[Dense]) -> list[Layer]:
    """Every trained Linear's inputs and signals for x."""
    held = [id(p) for each in linear for p in (parameters_of(each).get("weight"), each.bias) if p is not None]
    other = any(p.requires_grad and id(p) not in held for p in network.parameters())
    if other or len(held) != len(set(held)) or any(any(forward_hooks_of(each)) for each in linear):
        raise ValueError("expected plain Linear layers, got hooks, shared weights, or parameters of other layers")
    seen: dict[Dense, tuple[Tensor, Tensor]] = {}

    def keep(layer: Dense, given: tuple[Any, ...], named: dict[str, Any], z: Tensor) -> Tensor:
        (h,) = (*given, *named.values())
        if layer in seen or h.ndim != 2:
            raise ValueError("expected layers called once, on one vector of an input, got another use")
        seen[layer] = (h.detach().clone(), z)
        return z.clone()  # an in-place activation then changes only the copy

    with torch.enable_grad(), ExitStack() as hooks:
        for each in linear:
            hooks.enter_context(each.register_forward_hook(keep, with_kwargs=True))
        out = network(x)  # (N, O)
    trained = [layer for layer in seen if any(p.requires_grad for p in layer.parameters(recurse=False))]
    ends = [seen[layer][1] for layer in trained]
    # One backward pass for all outputs: their unit vectors are a batch.
    units = torch.eye(out.shape[1], dtype=out.dtype, device=out.device)[:, None].expand(-1, *out.shape)
    found = torch.autograd.grad(out, ends, units, is_grads_batched=True, materialize_grads=True)
    signals = []
    for layer, delta in zip(trained, found, strict=True):
        square = 1.0 if type(layer).forward is nn.Linear.forward else 1 / layer.in_features  # of the weight's factor
        learns = square * layer.weight.requires_grad, float(layer.bias is not None and layer.bias.requires_grad)
        signals.append((seen[layer][0], delta.transpose(0, 1).contiguous(), *learns))
    return signals


Method = Literal["auto", "structured", "jacobian", "products"]
Way = Callable[..., Tensor]
PLAIN = partial(contraction, plain=True)
WAYS: dict[str, list[Way]] = {"structured": [layerwise_kernel], "products": [products]}
WAYS["jacobian"] = [contraction, PLAIN]
_MIXES = (BatchNorm, DropoutNd)


def empirical_ntk(
    network: nn.Module, x1: Tensor, x2: Tensor | None = None, *, method: Method = "auto", memory: int = 2**30
) -> Tensor:
    """Measures the tangent kernel (N1, N2, O, O) of a network, over its parameters that require gradients.

    A network's outputs for one input must not depend on other inputs of the batch. The result has the parameters' dtype.

    Args:
        x1, x2: inputs (N1, …) and (N2, …); x2 = None means x1.
        method: "structured", "jacobian" or "products" (see the module's docstring), or "auto" for the cheapest. Each is
            checked against plain autograd on up to four inputs; if all fail, plain autograd computes the kernel.
        memory: most bytes for the computation, including the result, besides network, inputs and that check.
    """
    one_of("method", method, ("auto", *WAYS), hint="'auto' chooses")
    x1, second = checked_pair(x1, x2)
    if not trainable_parameters(network):
        raise ValueError("expected parameters that require gradients, got none; call network.requires_grad_()")
    mixing = [each for each in network.modules() if isinstance(each, _MIXES)]
    if any(each.training or getattr(each, "running_mean", each) is None for each in mixing):
        got = "others; call network.eval(), so that each input's outputs depend on this input only"
        raise ValueError(f"expected batch norm and dropout in eval mode, with running statistics, got {got}")
    flat, some = FlatOutputs(network), torch.cat([x1[:2], second[-2:]])
    with exact_convolutions():
        outputs = check_rows(flat, some)
        result = len(x1) * len(second) * outputs**2 * next(iter(trainable_parameters(network).values())).element_size()
        auto = method == "auto"
        for name in ("structured", *methods_by_cost(flat, x1, len(second), outputs)) if auto else (method,):
            for way in WAYS[name]:
                if way is PLAIN or is_consistent(way, flat, some, outputs):
                    return way(flat, x1, second, outputs=outputs, result=result, memory=memory)
    got = "one where it fails or disagrees with plain autograd"
    raise ValueError(f"expected a network for which method={method!r} works, got {got}; pass method='auto'")


class FlatOutputs(nn.Module):
    """A network with outputs flattened to rows (N, O), or projected on one direction (N, 1)."""

    def __init__(self, network: nn.Module, direction: Tensor | None = None) -> None:
        super().__init__()
        self.network, self.direction = network, direction

    def forward(self, x: Tensor) -> Tensor:
        found = batches.call_network(self.network, x)
        flat = found.reshape(len(found) if found.ndim else 1, -1)
        return flat if self.direction is None else flat @ self.direction[:, None]


def check_rows(network: FlatOutputs, x: Tensor) -> int:
    """The number of outputs O; raises if an input's outputs change when it is alone in the batch."""
    with torch.no_grad():
        together, alone = network(x), torch.cat([network(row) for row in x[:, None]])
    atol = 10 * torch.finfo(alone.dtype).eps ** 0.5 * float(alone.abs().max())
    if together.shape != alone.shape or not torch.allclose(together, alone, rtol=0, atol=atol, equal_nan=True):
        advice = "put the batch axis first, and remove batch statistics and random numbers"
        raise ValueError(f"expected the same outputs for an input alone and in a batch, got different ones; {advice}")
    return alone.shape[1]


def is_consistent(way: Way, network: FlatOutputs, x: Tensor, outputs: int) -> bool:
    """Whether Σ_ij vᵀ Θ(x_i, x_j) v equals plain autograd's ‖∂ Σ_i v·f(x_i)/∂θ‖², for a random v."""
    params = list(trainable_parameters(network).values())
    along = FlatOutputs(network.network, torch.randn(outputs, generator=torch.Generator().manual_seed(0)).to(params[0]))
    with torch.enable_grad():
        total = torch.cat([along(row) for row in x[:, None]]).sum()
    found = torch.autograd.grad(total, params, materialize_grads=True) if total.requires_grad else ()
    expected = sum(float(each.double().square().sum()) for each in found)
    try:
        theta = way(along, x, x, outputs=1, result=0, memory=2**62).detach().double()
    except Exception:  # autograd has just run the network, so this method fails, not the network
        return False
    tolerance = 10 * torch.finfo(params[0].dtype).eps ** 0.5 * float(theta.abs().sum())
    return bool(abs(float(theta.sum()) - expected) <= tolerance)


def exact_convolutions() -> AbstractContextManager[object]:
    """Context in which GPU convolutions use full float32: torch's default, ten bits, is too coarse for small eigenvalues."""
    kept = {name: getattr(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")}
    return torch.backends.cudnn.flags(**kept, allow_tf32=False)


def methods_by_cost(network: nn.Module, x1: Tensor, count: int, outputs: int) -> list[str]:
    """The two methods that work for any module, the one with fewer multiplications first."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(x1[:1])
    forward = counter.get_total_flops() / 2
    size = sum(p.numel() for p in trainable_parameters(network).values())
    rows, pairs = (len(x1) + count) * outputs, len(x1) * count * outputs
    by_jacobian = 3 * rows * forward + pairs * outputs * size
    by_products = pairs * 2 * forward + count * outputs * 3 * forward
    return ["jacobian", "products"] if by_jacobian <= by_products else ["products", "jacobian"]


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
    size = next(iter(weights.values())).element_size()
    count = sum(p.numel() for p in weights.values()) + sum(p.numel() for p in each[0].values())
    needed = members * (1 if x2 is None else 2) * max(len(x1), len(second)) * 3 * outputs * count * size
    result = (members + 1) * members * len(x1) * len(second) * outputs**2 * size
    check_budget(needed + result, memory, "gradients of all members and their kernel", "pass fewer inputs at a time")

    def gradients(params: Params, others: Params, x: Tensor) -> list[Tensor]:
        return output_gradients(lambda p, one: function({**others, **p}, one[None]).reshape(-1), params, x)

    def both_gradients(params: Params, others: Params) -> tuple[list[Tensor], list[Tensor]]:
        one = gradients(params, others, x1)
        return one, one if x2 is None else gradients(params, others, second)

    left, right = zip(*(both_gradients(weights, {**a, **b}) for a, b in zip(each, constant, strict=True)), strict=True)
    theta = torch.stack([torch.stack([contract(one, two).permute(0, 2, 1, 3) for two in right]) for one in left])
    if not own:
        return EnsembleBlocks(theta, torch.zeros_like(theta[0]))
    pairs = (both_gradients(a, {**weights, **b}) for a, b in zip(each, constant, strict=True))
    return EnsembleBlocks(theta, torch.stack([contract(*pair).permute(0, 2, 1, 3) for pair in pairs]))


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
        tensors = rest | {name: tensor for name, tensor in params.items() if name not in held}
        return particles.call(lambda member: batches.call_network(member.network, x), tensors, held)[0]

    posterior.check_inputs(x1)
    with inference_context(posterior), exact_convolutions():
        own = {name: p for name, p in own.items() if p.requires_grad}
        first, second = x1.to(posterior.device), None if x2 is None else x2.to(posterior.device)
        fixed |= particles.own_buffers()
        return ensemble_blocks(outputs, trained, own, first, second, fixed=fixed, memory=memory)
