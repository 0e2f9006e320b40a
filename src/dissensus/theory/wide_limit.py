"""Correlation between members of a given embedded ensemble in the wide limit, by the recursion of `embedded_kernels`.

It holds for a chain of ReLU layers, one input and random weights, with the moments of the actual factors instead of those of
a law. Layers without factors have factors of 1; biases, which members share at the start, are left out:

    K_k ← 2 m_k C_k,    Θ_k ← m_k (C_k + 2 D_k Θ_k),    k = same member, different members

Pooling, parallel branches and unknown layers may bring members nearer together than a chain would. There both extremes are
followed: members as near as the chain says (or uncorrelated, after activations other than ReLU), and members that are equal.
If the two results differ, the answer is unknown.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from dissensus.core.posterior import Posterior
from dissensus.layers.call_order import TracedCalls, layer_chain, trace_calls
from dissensus.layers.conversion import CONVERTIBLE, CONVOLUTIONS, READERS
from dissensus.theory.closed_forms import piecewise_linear

BATCH_NORM = nn.modules.batchnorm._NormBase
NORMS = (BATCH_NORM, nn.LayerNorm, nn.GroupNorm)
APART = 0.1  # if the two extremes differ by more, the answer is unknown
ONES = torch.ones(2, 1)  # factors of a layer without factors, for any two members


@dataclass(frozen=True)
class Link:
    """A linear or convolutional layer of the chain, with its factors (M, n) of inputs and of outputs."""

    r: Tensor
    s: Tensor
    has_batch_norm: bool  # an own batch norm follows
    may_merge_members: bool  # the next operations may bring members nearer together
    has_other_activation: bool  # the next activation is not a ReLU


def wide_limit(posterior: Posterior, modulations: dict[str, Tensor]) -> tuple[float | None, float | None]:
    """(K_o/K_d, Θ_o/Θ_d) of one input at the outputs; None if unknown."""
    links = chain(posterior, modulations)
    low, high = (propagate_chain(links, equal=equal) for equal in (False, True))
    pairs = zip(low, high, strict=True)
    told = [a if a is not None and b is not None and abs(a - b) <= APART else None for a, b in pairs]
    return told[0], told[1]


def chain(posterior: Posterior, modulations: dict[str, Tensor]) -> list[Link]:
    """The network's layers, with factors or without, in the order of calls."""
    network = posterior.particles.template.network
    parts = dict(network.named_modules())
    # Norms that do not normalise the size.
    fixed = {*posterior.particles.template.always_eval, *posterior.particles.frozen_norms()}
    norms = {n for n, part in parts.items() if isinstance(part, BATCH_NORM) and f"network.{n}" not in fixed}
    layers = [name for name, part in parts.items() if isinstance(part, CONVERTIBLE)]
    with posterior.particles.lock_network():
        names = [name for name in parts if name in layers or name in norms]
        seen = trace_calls(network, names)
        order = layer_chain(names, seen)
        whole = [name for name in order if name in layers]
        through = unavoidable_layers(network, whole, seen)
    known = not any(_has_unknown_weights(part) for part in parts.values())
    opaque = any(_is_activation(part) and not isinstance(part, nn.ReLU) for part in parts.values())
    # A custom forward may pool without a layer; an nn.Sequential cannot.
    written = any(list(part.children()) and not isinstance(part, nn.Sequential) for part in parts.values())
    pools = any(type(part).__module__ == nn.modules.pooling.__name__ for part in parts.values())
    straight = known and through >= set(whole)
    links = []
    for name, after in zip(order, [*order[1:], ""], strict=True):
        if name in layers:
            r, s = (modulations.get(f"{name}.{factor}", ONES) for factor in "rs")
            image = isinstance(parts[name], CONVOLUTIONS)
            loose = name not in through if name == whole[-1] else not straight or (image and (written or pools))
            links.append(Link(r, s, after in norms, loose, opaque))
    return links


def propagate_chain(links: list[Link], *, equal: bool) -> tuple[float | None, float | None]:
    """(K_o/K_d, Θ_o/Θ_d) at the end of the chain; after loose links members are `equal`, or as near as the chain says."""
    # Only ratios are returned, and with ReLU they do not depend on the input's size: one input of size 1, equal for all
    # members, represents all inputs.
    same, cross, theta_same, theta_cross = 1.0, 1.0, 0.0, 0.0
    for place, link in enumerate(links):
        s = link.s
        within, between = moments(link.r, link.r)
        # z = W (r ∘ h), W ~ N(0, 2/n): K = 2 m h, Θ = m (h + 2 Θ). Θ first: it needs h, which the next line replaces.
        theta_same = within * (same + 2 * theta_same)
        theta_cross = between * (cross + 2 * theta_cross)
        same, cross = 2 * within * same, 2 * between * cross
        if not same > 0 or not theta_same > 0:  # all factors are 0
            return None, None
        if link.has_batch_norm:
            # Each member's batch norm divides by the size of s ∘ z. Only the signs of s and the correlation of z between
            # members remain. Gradients are divided by that size too, hence Θ by the same number.
            s = s.sign()
            same, cross, theta_same, theta_cross = 1.0, cross / same, theta_same / same, theta_cross / same
        if place == len(links) - 1:  # outputs: no activation, s multiplies them as they are
            within, between = moments(s, s)
            if not within > 0:
                return None, None
            if equal and link.may_merge_members:
                return 1.0, 1.0
            return between * cross / (within * same), between * theta_cross / (within * theta_same)
        # h = φ(s ∘ z), φ = ReLU. Within a member C_d = V₂ K/2: half of z is above 0, whatever the sign of s. Between members
        # the signs matter: ReLU(s z) = |s| ReLU(±z), so that a pair of units with factors of equal signs sees the
        # correlation c, one with opposite signs −c: C_o = P F(c) + Q F(−c). Slopes have the factors' signs themselves, hence
        # the minus in D_o = P G(c) − Q G(−c).
        ups, downs = s.clamp(min=0), (-s).clamp(min=0)
        alike = moments(ups, ups)[1] + moments(downs, downs)[1]  # P = E |s||s'| over equal signs
        opposite = moments(ups, downs)[1] + moments(downs, ups)[1]  # Q
        second = moments(s, s)[0]  # V₂
        c = min(1.0, max(-1.0, cross / same))
        (value, slope), (mirrored, mirrored_slope) = _relu(c), _relu(-c)
        value, slope = alike * value + opposite * mirrored, alike * slope - opposite * mirrored_slope
        theta_same, theta_cross = second / 2 * theta_same, slope * theta_cross
        same, cross = second * same / 2, value * same
        # More than a ReLU may follow the link. Pooling and parallel branches can only bring members nearer together, up to
        # equal; another activation may also leave less correlation than ReLU, down to none. The truth lies between the two
        # runs, and is known if these agree.
        if equal and (link.may_merge_members or link.has_other_activation):
            cross, theta_cross = same, theta_same
        elif link.has_other_activation:
            cross = theta_cross = 0.0
    raise ValueError("expected modulations, got none; pass an embedded ensemble with layers that are cut")


def moments(a: Tensor, b: Tensor) -> tuple[float, float]:
    """(mean of a_α b_α within members, mean of a_α b_β over pairs of different members) of factors (M, n)."""
    a, b = a.detach().double(), b.detach().double()
    members = len(a)
    own, total = (a * b).sum(0), a.sum(0) * b.sum(0)
    return float(own.mean()) / members, float((total - own).mean()) / (members * (members - 1))


def unavoidable_layers(network: nn.Module, layers: Sequence[str], followed: TracedCalls | None) -> set[str]:
    """The layers through which every path from inputs to outputs leads; empty if unknown.

    Layers that produce the network's outputs count as one.
    """
    if followed is None or "" in layers:  # "": the network is itself the layer
        return {name for name in layers if followed is not None}

    def places(name: str) -> set[fx.Node]:
        return {node for node, called in followed.places.items() if name in called}

    heads = {node for name in followed.outputs for node in places(name)}
    cuts = {name: heads if name in followed.outputs else places(name) for name in layers if _is_traced(network, name)}
    return {name for name, nodes in cuts.items() if nodes and not _reaches_inputs(followed.last, nodes)}


def _is_traced(network: nn.Module, name: str) -> bool:
    """Whether the layer is called by a traced forward, not inside one of torch's layers."""
    while name:
        name = name.rpartition(".")[0]
        part = network.get_submodule(name)
        opened = isinstance(part, nn.Sequential | nn.ModuleList | nn.ModuleDict)
        if type(part).__module__.startswith("torch.nn") and not opened:
            return False
    return True


def _reaches_inputs(outputs: list[fx.Node], without: set[fx.Node]) -> bool:
    left, seen = list(outputs), set(without)
    while left:
        node = left.pop()
        if node in seen:
            continue
        if node.op == "placeholder":
            return True
        seen.add(node)
        left.extend(node.all_input_nodes)
    return False


def _has_unknown_weights(part: nn.Module) -> bool:
    """Whether the layer has weights with unknown effect: attention, recurrent layers, embeddings."""
    own = not isinstance(part, (*CONVERTIBLE, *NORMS)) and not list(part.children()) and bool(list(part.parameters()))
    return own or isinstance(part, READERS)


def _is_activation(part: nn.Module) -> bool:
    return type(part).__module__ == nn.modules.activation.__name__ and not isinstance(part, READERS)


def _relu(c: float) -> tuple[float, float]:
    """E φ(z) φ(z') and E φ'(z) φ'(z') of ReLU, for unit variances and a correlation of c."""
    one = torch.ones((), dtype=torch.float64)
    value, slope = piecewise_linear(one, one, c * one, 0.0)
    return float(value), float(slope)
