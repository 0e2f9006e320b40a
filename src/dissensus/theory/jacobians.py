"""Tangent kernels of any function f(params, x), from derivatives of the whole network."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import jacrev, jvp, vjp, vmap

from dissensus.theory.kernel_inputs import check_budget
from dissensus.utils.tensor_tree import TensorPlaces, call_with_tensors

Params = dict[str, Tensor]
OneInput = Callable[[Params, Tensor], Tensor]  # one input -> (O,)


def trainable_parameters(network: nn.Module) -> Params:
    """The parameters that require gradients."""
    return {name: p for name, p in network.named_parameters() if p.requires_grad}


def functional(network: nn.Module) -> tuple[OneInput, Params]:
    """A network (N, …) -> (N, O) as a function of its trained parameters and one input."""
    places = TensorPlaces(network)

    def function(params: Params, x: Tensor) -> Tensor:
        found: Tensor = call_with_tensors(network, params, x[None], places=places)[0]
        return found

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
    found = vmap(jacrev(function), (None, 0))(params, x)
    return [each.flatten(2) for each in found.values()]


def gradients_one_by_one(network: nn.Module, x: Tensor) -> list[Tensor]:
    """The same for a network (N, …) -> (N, O), one output at a time: slow, but correct for every network."""
    params = list(trainable_parameters(network).values())
    with torch.enable_grad():
        each = [
            torch.autograd.grad(output, params, retain_graph=True, materialize_grads=True)
            for row in x[:, None]
            for output in network(row)[0]
        ]
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
