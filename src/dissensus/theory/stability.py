"""Stability of gradient descent on an embedded ensemble: the largest eigenvalue of its whole tangent kernel.

    Θ = (γ/M) J_w J_wᵀ + J_o J_oᵀ + (μ_u/μ_w) J_u J_uᵀ

over members × examples × outputs: w are the shared tensors, u the modulations, o the members' other own tensors. A product
with Θ is one backward and one forward derivative; Θ is never formed.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dissensus.core import batch as batches
from dissensus.core.likelihood import Classification, Likelihood
from dissensus.core.particles import Particles, Rows, copy_likelihood
from dissensus.layers.batch_norm import statistics_mode
from dissensus.utils.batch_norm_names import statistics_layers
from dissensus.utils.tensor_tree import Tensors
from dissensus.utils.torch_modes import plain_attention

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
        found: Tensor = self.particles.run(self._member_function(tensors), self._rows(tensors), self.particles.members)
        return found

    def member(self, tensors: Tensors, m: int) -> Tensor:
        """Outputs (B, …) of member m."""
        return self._member_function(tensors)(self._rows(tensors).member_row(m))

    def _rows(self, tensors: Tensors) -> Rows:
        own = {name: tensor for name, tensor in tensors.items() if name not in self.shared}
        return Rows({**self.fixed_own, **own}, self.particles.own_buffers(), {})

    def _member_function(self, tensors: Tensors) -> Callable[[Rows], Tensor]:
        shared = {**self.fixed, **{name: tensors[name] for name in self.shared}}

        def one(row: Rows) -> Tensor:
            buffers = {**self.particles.shared_buffers(), **row.buffers}
            params = {**shared, **row.own}
            found: Tensor = self.particles.call(
                lambda member: batches.call_network(member.network, self.x), params, buffers
            )[0]
            return found

        return one

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Context for calling the functions: this thread's turn, and attention kernels that have all derivatives."""
        template = self.particles.template
        fixed = {*template.always_eval, *self.particles.frozen_norms()}  # as in training
        layers = {n: each for n, each in statistics_layers(template).items() if n not in fixed}
        with (
            self.particles.lock_network(),
            plain_attention(),
            sdpa_kernel(SDPBackend.MATH),
            statistics_mode(self.particles, layers),
        ):
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
        vector = torch.randn(f.shape, dtype=f.dtype, device=f.device, generator=_generator(f.device))

        def eigenvalue(weights: float, factors: float) -> float:
            nonlocal vector
            rates = {
                name: factors
                if name in outputs.factors
                else weights * (gamma / members if name in outputs.shared else 1.0)
                for name in outputs.tensors
            }
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
    """Kernel overlap between members: Σ_{α≠β} tr Θ^com_αβ / (M − 1) Σ_α tr Θ^com_αα, by random probes.

    0 for independent members, 1 for equal ones; NaN if no shared tensor affects the outputs.
    """
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
        generator = _generator(f.device)
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
    """Correlation of members' outputs: Σ_{α≠β} ⟨f_α, f_β⟩ / (M − 1) Σ_α ⟨f_α, f_α⟩ over inputs and outputs; None if all are 0.

    Not centred, like the predicted correlation: the mean over random weights is 0, the mean over inputs need not be.
    """
    with outputs.evaluation_context(), torch.no_grad():
        f = outputs(outputs.tensors).detach().double().flatten(1)  # (M, B·O)
    within = float(f.square().sum())
    across = float(f.sum(0).square().sum()) - within
    return across / ((len(f) - 1) * within) if within > 0 else None


def largest_curvature(particles: Particles, outputs: Tensor, y: Tensor | None) -> float | None:
    """The largest second derivative of a member's mean loss with respect to its outputs (M, B, …), or a bound.

    None if the likelihood has no closed form and there are no targets.
    """
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


def _lanczos(
    outputs: MemberOutputs, back: Callable[..., Any], rates: dict[str, float], start: Tensor
) -> tuple[float, Tensor]:
    """(λ_max of J diag(rates) Jᵀ, an approximate eigenvector), by the Lanczos method.

    It combines all powers so far, which needs a tenth of the products of plain power iteration: the largest eigenvalues of
    similar members lie close together.
    """
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
    weights = vectors[:, -1].tolist()
    found = sum((w * each for w, each in zip(weights, basis, strict=True)), torch.zeros_like(start))
    return value, found


def _generator(device: torch.device) -> torch.Generator:
    """A generator with a fixed seed: the same posterior gives the same numbers, and global random states do not change."""
    return torch.Generator(device).manual_seed(0)
