"""Predicts, before training, whether the members of an embedded ensemble act as M independent networks or as one.

With γ = M the members' mean learns 1 + κ times as fast as their differences, where κ = (M − 1) Θ_o/Θ_d of shared weights.
κ ≤ ½ is the independent regime, κ ≥ 2 the collective one; values between are neither. Members count as independent only if
their outputs, too, have a correlation of at most ½/(M − 1) and ¼, and if the law of their factors agrees: `regime="auto"`
takes γ = M up to (M − 1)ρ = 1, and never for masks.

κ averages signed overlaps, which cancel; at a finite width the interference between members does not cancel. Random factors
of N nodes overlap by ±1/√N, so the other members together interfere with a share Σ cos² ≈ (M − 1)/N: the `crowding` of the
narrowest hidden layer. Above 0.075, members are not called independent (docs/results/embedded.md has the limit's tests).

The correlation comes from the recursion of `embedded_kernels`, with the moments of the actual factors, for a chain of ReLU
layers: K_k ← 2 m_k C_k, Θ_k ← m_k (C_k + 2 D_k Θ_k), k = same, different members. Where other layers may bring members nearer
together, both extremes are followed, the chain's and equal members; if their results differ, the answer is unknown.

The largest stable rate comes from the largest eigenvalue of the whole tangent kernel over members × examples × outputs,

    Θ = (γ/M) J_w J_wᵀ + J_o J_oᵀ + (μ_u/μ_w) J_u J_uᵀ,

w the shared tensors, u the modulations, o the members' other own tensors; products with Θ are derivatives, Θ is never formed.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dissensus.core import batch as batches
from dissensus.core.batch import Batch, Inputs
from dissensus.core.likelihood import Classification, Likelihood
from dissensus.core.particles import Particles, Rows, copy_likelihood
from dissensus.core.posterior import Posterior
from dissensus.layers.batch_norm import statistics_mode
from dissensus.layers.call_order import TracedCalls, layer_chain, trace_calls
from dissensus.layers.conversion import CONVERTIBLE, CONVOLUTIONS, READERS
from dissensus.layers.factored import ModulatedLayer
from dissensus.theory.activations import piecewise_linear_moments
from dissensus.theory.kernel_inputs import check_examples
from dissensus.utils.batch_norm_names import statistics_layers
from dissensus.utils.tensor_tree import Tensors
from dissensus.utils.torch_modes import plain_attention
from dissensus.utils.torch_private import NormBase

NORMS = (NormBase, nn.LayerNorm, nn.GroupNorm)
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
    pairs = zip(*(propagate_chain(links, equal=equal) for equal in (False, True)), strict=True)
    told = [a if a is not None and b is not None and abs(a - b) <= APART else None for a, b in pairs]
    return told[0], told[1]


def chain(posterior: Posterior, modulations: dict[str, Tensor]) -> list[Link]:
    """The network's layers, with factors or without, in the order of calls."""
    network = posterior.particles.template.network
    parts = dict(network.named_modules())
    # Norms that do not normalise the size.
    fixed = {*posterior.particles.template.always_eval, *posterior.particles.frozen_norms()}
    norms = {n for n, part in parts.items() if isinstance(part, NormBase) and f"network.{n}" not in fixed}
    layers = [name for name, part in parts.items() if isinstance(part, CONVERTIBLE)]
    with posterior.particles.lock_network():
        names = [name for name in parts if name in layers or name in norms]
        seen = trace_calls(network, names)
        order = layer_chain(names, seen)
        whole = [name for name in order if name in layers]
        through = unavoidable_layers(network, whole, seen)
    known = not any(_has_unknown_weights(part) for part in parts.values())
    named = nn.modules.activation.__name__, (*READERS, nn.ReLU)
    opaque = any(type(part).__module__ == named[0] and not isinstance(part, named[1]) for part in parts.values())
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
    # Only ratios are returned, which with ReLU do not depend on the input's size: one input of size 1 represents all.
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
        # equal; another activation may also leave less correlation than ReLU, down to none. The truth lies between both.
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
    """The layers through which every path to the outputs leads (output layers count as one); empty if unknown."""
    if followed is None or "" in layers:  # "": the network is itself the layer
        return {name for name in layers if followed is not None}

    def places(name: str) -> set[fx.Node]:
        return {node for node, called in followed.places.items() if name in called}

    heads = {node for name in followed.outputs for node in places(name)}
    cuts = {name: heads if name in followed.outputs else places(name) for name in layers if _is_traced(network, name)}
    return {name for name, nodes in cuts.items() if nodes and not _reaches_inputs(followed.last, nodes)}


def _is_traced(network: nn.Module, name: str) -> bool:
    """Whether the layer is called by a traced forward, not inside one of torch's layers."""
    *parents, _ = accumulate(name.split("."), getattr, initial=network)
    opened = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    return all(isinstance(part, opened) or not type(part).__module__.startswith("torch.nn") for part in parents)


def _reaches_inputs(outputs: list[fx.Node], without: set[fx.Node]) -> bool:
    reached, seen = list(outputs), set(without)
    for node in reached:  # which grows
        if node not in seen:
            seen.add(node)
            reached += node.all_input_nodes
    return any(node.op == "placeholder" for node in seen - without)


def _has_unknown_weights(part: nn.Module) -> bool:
    """Whether the layer has weights with unknown effect: attention, recurrent layers, embeddings."""
    own = not isinstance(part, (*CONVERTIBLE, *NORMS)) and not list(part.children()) and bool(list(part.parameters()))
    return own or isinstance(part, READERS)


def _relu(c: float) -> tuple[float, float]:
    """E φ(z) φ(z') and E φ'(z) φ'(z') of ReLU, for unit variances and a correlation of c."""
    one = torch.ones((), dtype=torch.float64)
    value, slope = piecewise_linear_moments(one, one, c * one, 0.0)
    return float(value), float(slope)


ITERATIONS, TOLERANCE = 100, 1e-4
PROBES = 8  # random probes of the traces by which members' kernels are compared


class MemberOutputs:
    """All members' outputs as a function of their trained tensors, with batch statistics of the batch and without dropout."""

    def __init__(self, posterior: Any, x: batches.Inputs) -> None:
        self.posterior, self.particles = posterior, posterior.particles
        self.x = batches.move_to_device(x, posterior.device)
        shared, own = self.particles.shared_parameters(), self.particles.own_parameters()
        network = {n: p for n, p in {**shared, **own}.items() if n.startswith("network.") and p.requires_grad}
        self.tensors = {name: tensor.detach() for name, tensor in network.items()}
        self.shared = {name for name in network if name in shared}
        self.factors = {f"network.{name}" for name in posterior.modulations} & network.keys()
        self.fixed = {n: p.detach() for n, p in shared.items() if n not in network}
        self.fixed_own = {n: p.detach() for n, p in own.items() if n not in network}

    def __call__(self, tensors: Tensors) -> Tensor:
        """Outputs (M, B, …), by vmap if members can be vectorised."""
        return self.particles.run(*self._function_of_rows(tensors), self.particles.members)

    def member(self, tensors: Tensors, m: int) -> Tensor:
        """Outputs (B, …) of member m."""
        function, rows = self._function_of_rows(tensors)
        return function(rows.member_rows(m + 1)[m])

    def _function_of_rows(self, tensors: Tensors) -> tuple[Callable[[Rows], Tensor], Rows]:
        """(a function of one member's rows that returns its outputs, the rows of all members)."""
        shared = {**self.fixed, **{name: tensors[name] for name in self.shared}}
        own = {name: tensor for name, tensor in tensors.items() if name not in self.shared}

        def one(row: Rows) -> Tensor:
            buffers = {**self.particles.shared_buffers(), **row.buffers}
            outputs = self.particles.call(lambda m: batches.call_network(m.network, self.x), shared | row.own, buffers)
            return outputs[0]

        return one, Rows({**self.fixed_own, **own}, self.particles.own_buffers(), {})

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Context for calling the functions: this thread's turn, and attention kernels that have all derivatives."""
        template = self.particles.template
        fixed = {*template.always_eval, *self.particles.frozen_norms()}  # as in training
        layers = {n: each for n, each in statistics_layers(template).items() if n not in fixed}
        norms = statistics_mode(self.particles, layers)
        with self.particles.lock_network(), plain_attention(), sdpa_kernel(SDPBackend.MATH), norms:
            yield


def largest_rate(outputs: MemberOutputs, y: Tensor | None = None) -> float | None:
    """The largest stable learning rate of the weights for descent on the batch, in the kernel approximation.

    For squared errors 2B/λ_max, times σ² for noise σ, since the loss has a factor 1/σ². For classification twice 2B/λ_max:
    the curvature of the softmax is at most ½, so this rate is stable for all predictions. For your own likelihood 2B/λ_max
    divided by its largest curvature at the outputs; None if that needs targets y and there are none. With a `modulation_lr`,
    which does not scale with the weights' rate, the largest rate that is stable beside it; 0 if that one is too large alone.
    """
    posterior = outputs.posterior
    gamma, members, own = posterior.gamma, outputs.particles.members, posterior.modulation_lr
    with outputs.evaluation_context():
        f, back = torch.func.vjp(outputs, outputs.tensors)[:2]
        curved = largest_curvature(outputs.particles, f.detach(), None if y is None else y.to(f.device))
        if curved is None:
            return None
        limit = 2 / curved if curved else math.inf
        generator = torch.Generator(f.device).manual_seed(0)  # the same numbers for the same posterior
        vector = torch.randn(f.shape, dtype=f.dtype, device=f.device, generator=generator)

        def eigenvalue(weights: float, factors: float) -> float:
            nonlocal vector
            rates = {name: weights * (gamma / members if name in outputs.shared else 1.0) for name in outputs.tensors}
            rates |= dict.fromkeys(outputs.factors, factors)
            value, vector = _lanczos(outputs, back, rates, vector)
            return value

        def rate(value: float) -> float:
            return limit / value if value > 0 else math.inf  # nothing moves: all factors are 0

        if own is None:
            return rate(eigenvalue(1.0, 1.0))
        low, high = 0.0, rate(eigenvalue(1.0, 0.0))
        if not own:
            return high
        below = eigenvalue(low, own)
        if below >= limit:
            return 0.0
        if high == math.inf:
            return high
        above = eigenvalue(high, own)
        # λ_max of lr A + μ_u U is convex in lr: chords lie above it, so their roots come from below.
        while below < (1 - 1e-3) * limit:
            low += (limit - below) * (high - low) / (above - below)
            below = eigenvalue(low, own)
        return low


def overlap(outputs: MemberOutputs) -> float:
    """Σ_{α≠β} tr Θ^com_αβ / (M − 1) Σ_α tr Θ^com_αα by random probes: 0 if independent, 1 if equal, NaN if none is shared."""
    members = outputs.particles.members
    shared = {name: outputs.tensors[name] for name in outputs.shared}
    if members == 1 or not shared:
        return math.nan
    across = within = 0.0
    with outputs.evaluation_context():
        backs = []
        for m in range(members):
            f, back = torch.func.vjp(lambda w, m=m: outputs.member({**outputs.tensors, **w}, m), shared)[:2]
            backs.append(back)
        generator = torch.Generator(f.device).manual_seed(0)
        for _ in range(PROBES):
            probe = torch.randint(2, f.shape, device=f.device, generator=generator).to(f.dtype) * 2 - 1
            total: Tensors = {}
            mine = 0.0
            for back in backs:
                gradient = back(probe)[0]
                mine += float(sum(g.double().square().sum() for g in gradient.values()))
                total = {name: g + total[name] if total else g for name, g in gradient.items()}
            within += mine
            across += float(sum(g.double().square().sum() for g in total.values())) - mine
    return float(across / ((members - 1) * within)) if within > 0 else math.nan


def correlation_of(outputs: MemberOutputs) -> float | None:
    """Correlation of members' outputs, not centred: Σ_{α≠β} ⟨f_α, f_β⟩ / (M − 1) Σ_α ⟨f_α, f_α⟩; None if all are 0."""
    with outputs.evaluation_context(), torch.no_grad():
        f = outputs(outputs.tensors).detach().double().flatten(1)  # (M, B·O)
    within = float(f.square().sum())
    across = float(f.sum(0).square().sum()) - within
    return across / ((len(f) - 1) * within) if within > 0 else None


def largest_curvature(particles: Particles, outputs: Tensor, y: Tensor | None) -> float | None:
    """Largest second derivative of a member's mean loss by its outputs (M, B, …), or a bound; None if it needs targets."""
    form = type(particles.likelihood).curvature
    if form is Classification.curvature:
        weights: list[float] = getattr(particles.likelihood, "class_weights", None) or [1.0]
        # An example's share of the weighted mean is at most this divided by their number.
        uneven = max(weights) / min(weights)
        return 0.5 * uneven / outputs[0, :, 0].numel()  # diag p − ppᵀ has no eigenvalue above ½
    if y is None and form is Likelihood.curvature:
        return None
    largest = 0.0
    for m, f in enumerate(outputs.double()):
        likelihood = copy_likelihood(particles, m)
        a = likelihood.curvature(f, y)[0]  # the subtracted u uᵀ only makes it smaller
        values = a if a.ndim == f.ndim else torch.linalg.eigvalsh(a.movedim(1, -2))
        entries = len(f) if y is None else likelihood.log_prob(f, y).numel()
        largest = max(largest, float(values.detach().max()) / entries)
    return largest


def _lanczos(outputs: MemberOutputs, back: Any, rates: dict[str, float], start: Tensor) -> tuple[float, Tensor]:
    """(λ_max of J diag(rates) Jᵀ, an approximate eigenvector); power iteration needs ten times the products."""
    basis: list[Tensor] = []
    alphas: list[float] = []
    betas: list[float] = []
    vector, value, values, vectors = start / start.norm(), 0.0, torch.zeros(1), torch.ones(1, 1)
    for _ in range(min(ITERATIONS, start.numel())):
        basis.append(vector)
        gradient = {name: g * rates[name] for name, g in back(vector)[0].items()}
        moved: Tensor = torch.func.jvp(outputs, (outputs.tensors,), (gradient,))[1].detach()
        alphas.append(float((vector * moved).sum()))
        for _ in range(2):  # twice is enough against rounding
            for each in basis:
                moved = moved - (each * moved).sum() * each
        diagonal, below = (torch.tensor(each, dtype=torch.float64) for each in (alphas, betas))
        values, vectors = torch.linalg.eigh(torch.diag(diagonal) + torch.diag(below, -1))  # eigh reads the lower half
        before, value = value, float(values[-1])
        size = float(moved.norm())
        if abs(value - before) <= TOLERANCE * abs(value) or not size > 1e-12 * abs(value):
            break
        betas.append(size)
        vector = moved / size
    parts = (share * each for share, each in zip(vectors[:, -1].tolist(), basis, strict=True))
    return value, sum(parts, torch.zeros_like(start))


RegimeKind = Literal["independent", "between", "collective"]
FEW, MANY = 0.5, 2.0  # members are independent up to the first κ, collective from the second
CROWDED = 0.075  # (M − 1)/N above which members are not independent


@dataclass(frozen=True)
class Regime:
    """The predicted regime of an embedded ensemble, made by `regime`; `str()` is a table: what, value, verdict."""

    members: int
    gamma: float
    kind: RegimeKind | None  # None: unknown
    correlation: float | None  # of outputs in the wide limit, for random weights without biases; None: unknown
    overlap: float | None  # Θ_αβ/Θ_αα of shared weights: measured if inputs are given, else in the wide limit
    measured: bool
    rate: float | None  # largest stable learning rate of SGD on the inputs; None without inputs, or if it needs targets
    measured_correlation: float | None = None  # of the current members over the inputs, not centred
    remedy: str = ""  # a change that would make members independent, "" if none is known
    crowding: float = 0.0  # (M − 1)/N of the narrowest hidden layer
    crowded: bool = False  # whether members would be independent without the crowding

    @property
    def effective_members(self) -> float | None:
        """Effective number of members for random weights: M / (1 + max((M − 1) correlation, crowding)).

        None if the correlation is unknown.
        """
        if self.correlation is None:
            return None
        return self.members / (1 + max((self.members - 1) * self.correlation, self.crowding))

    @property
    def advice(self) -> str:
        """A suggested change, or "" if γ suits the members or the regime is unclear."""
        if self.members == 1:
            return ""
        if self.kind == "collective" and self.gamma > 1 + 1e-9:
            other = f", or {self.remedy}" if self.remedy else ""
            return f'γ = {self.gamma:g} only lowers the largest stable rate; pass regime="collective"{other}'
        if self.kind == "independent" and self.gamma < self.members / 2:
            slower = self.members / self.gamma
            return f'γ = {self.gamma:g} trains shared weights {slower:g} times slower; pass regime="independent"'
        if self.crowded:
            ratio = f"(M − 1)/N = {_two_decimals(self.crowding)} in the narrowest layer"
            return f"members crowd ({ratio}, more than {CROWDED:g}); pass fewer, or widen it"
        return ""

    def __str__(self) -> str:
        kinds = {"between": "between independent and collective", None: "regime unknown; pass inputs to measure it"}
        kind = "one network" if self.members == 1 else kinds.get(self.kind) or str(self.kind)
        rows = [("members", f"{self.members} with γ = {self.gamma:g}", kind)]
        if self.members > 1 and self.correlation is not None:
            effective = f"{self.effective_members:.1f} effective members, for random weights without biases"
            rows.append(("correlation predicted", _two_decimals(self.correlation), effective))
        if self.measured_correlation is not None:
            value = _two_decimals(self.measured_correlation)
            rows.append(("correlation measured", value, "these members on the inputs"))
        if self.members > 1 and self.overlap is not None:
            source = "measured" if self.measured else "wide limit"
            where = f"independent up to {FEW:g}, collective from {MANY:g}; {source}"
            rows.append(("(M − 1) kernel overlap κ", _two_decimals((self.members - 1) * self.overlap), where))
        if self.rate is not None:
            rows.append(("largest stable rate", f"{self.rate:.3g}", "SGD without momentum on the inputs"))
        if self.advice:
            rows.append(("advice", "", self.advice))
        first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
        return "\n".join(f"{what:<{first}}  {value:<{second}}  {verdict}" for what, value, verdict in rows)


def regime(posterior: Posterior, x: Inputs | None = None, y: Tensor | None = None) -> Regime:
    """Predicts the `Regime` of an embedded ensemble from its current modulations; with inputs x its kernel is measured.

    The predicted correlation is that of random weights, for a chain of layers with ReLU and without biases; None if
    images, residuals or other activations leave it open. The measured correlation is that of the current members on x.

    Args:
        posterior: a `BatchEnsemble` or `DropoutEnsemble`.
        x: inputs (B, …); None predicts without measuring.
        y: targets of x, needed for the rate only if your own likelihood's `curvature` has no closed form.

    Returns:
        A `Regime`. Its rate is 2B/λ_max of the kernel over members × examples, for full batches x and SGD without
        momentum; for classification it is a bound; None without x. Momentum β raises it by 1 + β for a quadratic.
    """
    modulations: dict[str, Tensor] | None = getattr(posterior, "modulations", None)
    if modulations is None:
        got = type(posterior).__name__
        raise TypeError(f"expected an embedded ensemble, got {got}; pass a BatchEnsemble or a DropoutEnsemble")
    members, gamma = posterior.particles.members, float(cast(Any, posterior).gamma)
    correlation, between = wide_limit(posterior, modulations) if members > 1 else (0.0, 0.0)
    links = chain(posterior, modulations) if members > 1 else []
    factors = [each for before, after in pairwise(links) for each in (before.s, after.r)]
    crowding = max([(members - 1) / each.shape[1] for each in factors if each is not ONES], default=0.0)
    rate = found = None
    if x is not None:
        check_examples(x)
        batches.check_finite(x, anywhere=True)
        posterior.check_inputs(x)
        outputs = MemberOutputs(posterior, x)
        if y is not None:
            posterior.check_batch(Batch.from_tuple((x, y)))
        rate = largest_rate(outputs, y)
        if members > 1:
            measured, found = overlap(outputs), correlation_of(outputs)
            between = None if math.isnan(measured) else measured
    law = getattr(posterior, "modulation", None)
    bound = math.inf if law is None else (members - 1) * law.collectivity
    kind = regime_kind(members, between, correlation, bound) if members > 1 else "independent"
    crowded = kind == "independent" and crowding > CROWDED
    facts = (correlation, between, x is not None, rate, found, remedy_of(posterior), crowding, crowded)
    return Regime(members, gamma, "between" if crowded else kind, *facts)


def regime_kind(members: int, overlap: float | None, correlation: float | None, bound: float) -> RegimeKind | None:
    """The regime as in the module's docstring; None if the overlap is unknown. `bound`: (M − 1)ρ of the factors' law."""
    if overlap is None:
        return None
    if (members - 1) * overlap >= MANY:
        return "collective"
    apart = correlation is None or max(members - 1, 2) * correlation <= FEW
    return "independent" if (members - 1) * overlap <= FEW and apart and bound <= 1 else "between"


def remedy_of(posterior: Posterior) -> str:
    """A change that would make members independent."""
    law = getattr(posterior, "modulation", None)
    if law is None:
        return "a larger rate"
    if law.collectivity > 0:
        return "modulations with a mean of 0, such as Modulation.sign()"
    layers = [part for part in posterior.particles.template.network.modules() if isinstance(part, CONVERTIBLE)]
    if not all(isinstance(part, ModulatedLayer) for part in layers):
        return "convert the last layers too (layers=)"
    return "fewer members, or wider layers"


def _two_decimals(value: float) -> str:
    """The value with two decimals, without −0.00."""
    return f"{round(value, 2) + 0.0:.2f}"
