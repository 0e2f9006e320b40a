"""Training rules: what a method may define about its training (optimisers, parameter groups, priors, hooks before a step)."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, Literal, Self, TypeGuard, Unpack, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dissensus.core.batch import Batch
from dissensus.core.calibrated import CalibratedModule
from dissensus.core.description import rename_hint
from dissensus.core.member import PREFIX
from dissensus.core.member_runner import NOTHING
from dissensus.core.particles import Particles
from dissensus.core.prior import (
    Prior,
    PriorKeywords,
    expanded_signature,
    make_prior,
    names_under_prior,
    passed_keywords,
)
from dissensus.core.weights import Recorder
from dissensus.numerics.annealing import Annealing, scale_gradient
from dissensus.numerics.flat_weights import at_least_float32
from dissensus.utils.checks import check_keywords, one_of
from dissensus.utils.parameter_groups import Group, disjoint_groups, has_stepped, optimizer_groups, plateau_linear
from dissensus.utils.tensor_tree import Tensors, known_submodules, known_tensors
from dissensus.utils.torch_private import buffers_of, parameters_of, submodule


class Watchers(nn.ModuleList):
    """Posteriors that record another one's training, by position or by name of the method."""

    def __getitem__(self, which: Any) -> Any:
        if not isinstance(which, str):
            return super().__getitem__(which)
        found = {each.name: each for each in reversed(self)}
        return found[one_of("a watcher", which, reversed(found))]

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()


class TrainableModule(CalibratedModule):
    """Base class of `Posterior`: what optimisers and `fit` need from a method. Methods may override what is not final.

    `fit`, or your own loop, calls `begin` once and `observe` after every step; recorders (`Recorder`) and watchers get both.
    """

    needed: ClassVar[tuple[str, ...]] = ()  # required keywords, despite their None default
    optimizers: ClassVar[tuple[type[Optimizer], ...] | None] = None  # kinds that may train it; None: any
    capturable: bool = True  # whether a step may be replayed from a CUDA graph: Python code must not choose by step
    prior: Prior | None
    watchers: Watchers = submodule("watchers")
    _with_prior: frozenset[str] | None  # computed when first needed
    steps: Tensor  # () optimiser steps so far, over all runs; saved with the state
    # What validation evaluates: the present networks, functions drawn as at the end, or (None) nothing: `fit` then does not
    # return to the best epoch, because the method collects statistics over many epochs.
    judged_by: ClassVar[Literal["current", "draw"] | None] = "current"

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.__signature__ = expanded_signature(cls.__init__)  # type: ignore[attr-defined]

    def __new__(cls, *_: Any, **keywords: Any) -> Self:
        hint = partial(rename_hint, getattr(cls, "name", ""))
        known = {**cls.__signature__.parameters, **passed_keywords(cls.__init__)}  # type: ignore[attr-defined]
        check_keywords(cls.__name__, keywords, known, hint)
        return super().__new__(cls)

    def __init__(self, particles: Particles, **prior: Unpack[PriorKeywords]) -> None:
        super().__init__()
        self.steps_per_epoch: int | None = None
        self.epochs: int | None = None
        self.steps_before_run = 0  # `steps` at the beginning of this run
        self.batches_per_step = 1  # batches whose gradients make one step; `fit` sets it to `accumulate`
        self.network_is_random = False  # whether the network itself draws random numbers in eval mode
        self.mesh: Any = None  # a `Mesh` of processes that predict together; "independent": each has its own model
        self.particles = particles
        self.watchers = Watchers()  # posteriors that record this one's training (`ds.track`)
        # How members interact, from the hooks that the method defines; one member alone does not. SVGD has both and sets it.
        hooks: tuple[Literal["couple", "mix"], ...] = ("couple", "mix")
        ways = [each for each in hooks if getattr(type(self), each) is not getattr(TrainableModule, each)]
        self.interaction: Literal["couple", "mix"] | None = ways[0] if ways and particles.members > 1 else None
        self.data_size: int | None = None
        self.use_prior(make_prior(**prior), prior.get("data_size"))
        if self.data_size is None and "data_size" in self.needed:
            raise ValueError("expected data_size, got none; pass data_size=len(training_set)")

    @final
    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[Any]:
        """As torch's, which walks over all submodules each time; so do those of parameters and buffers."""
        if memo is not None or prefix or not remove_duplicate or torch.compiler.is_compiling():
            return super().named_modules(memo, prefix, remove_duplicate)
        return ((path[:-1], part) for path, part in known_submodules(self))

    @final
    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[Any]:
        if prefix or not (recurse and remove_duplicate) or torch.compiler.is_compiling():
            return super().named_parameters(prefix, recurse, remove_duplicate)
        return iter(known_tensors(self, parameters_of).items())

    @final
    def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[Any]:
        if prefix or not (recurse and remove_duplicate) or torch.compiler.is_compiling():
            return super().named_buffers(prefix, recurse, remove_duplicate)
        return iter(known_tensors(self, buffers_of).items())

    @property
    @final
    def run_length(self) -> int | None:
        """Optimiser steps of the whole run; None before `begin`."""
        return None if self.steps_per_epoch is None or self.epochs is None else self.steps_per_epoch * self.epochs

    @property
    @final
    def recorders(self) -> list[Recorder]:
        """The recorders of this method."""
        return [part for part in self.children() if isinstance(part, Recorder)]

    @property
    @final
    def ready(self) -> bool:
        """Whether functions can be drawn yet: recorders must have observed enough steps first."""
        return all(recorder.ready for recorder in self.recorders)

    @final
    def begin(self, steps_per_epoch: int | None, epochs: int, *, done: int = 0) -> None:
        """Sets the length of the whole run, for schedules and recorders; drops the calibration.

        Call it in your own training loop only; `fit` calls it by itself.

        Args:
            steps_per_epoch: optimiser steps in an epoch; None if not known yet: call it again after the first epoch.
            epochs: epochs of the whole run.
            done: steps of the run that are already done, in a resumed run.
        """
        before, self.steps_before_run = self.steps_before_run, int(self.steps) - done
        if steps_per_epoch is not None:
            self.steps_per_epoch, self.epochs = steps_per_epoch, epochs
        elif before != self.steps_before_run:  # the length known so far belongs to an earlier run
            self.steps_per_epoch = self.epochs = None
        self.uncalibrate("training")
        for watcher in self.watchers:
            watcher.begin(steps_per_epoch, epochs, done=done)
        for recorder in self.recorders:
            if steps_per_epoch is not None:
                recorder.begin(steps_per_epoch * epochs, done=done)
            elif self.steps_per_epoch is None:
                recorder.begin_unmeasured(epochs)

    @final
    def observe(self, optimizer: torch.optim.Optimizer) -> bool:
        """Counts an optimiser step and lets recorders read the weights; returns whether the optimiser has stepped.

        Call it after every `optimizer.step()` in your own training loop; `fit` calls it by itself.
        """
        recorders, watchers = self.recorders, [*self.watchers]
        with torch.no_grad() if recorders or watchers else NOTHING:
            for recorder in recorders:
                recorder.renew_weights()  # first: if it raises, the step is not counted
            for watcher in watchers:
                watcher.observe(optimizer)
            if stepped := has_stepped(self, optimizer):
                self.steps.add_(1)
                if self.is_corrected:  # a user's loop that did not call `begin`
                    self.uncalibrate("training")
            for recorder in recorders if stepped else ():
                recorder.observe(optimizer)
        return stepped

    def before_step(self, batch: Batch) -> None:
        """Called once, on the host, before the gradients of a batch are computed, by `fit`, `backward` and `loss`.

        For what a method counts in Python (batch sizes, steps). Evaluation does not call it.
        """
        for watcher in self.watchers:
            watcher.before_step(batch)

    def couple(self, z: Any) -> Any:
        """Cotangents v of z (member axis first, detached): adds Σ_i ⟨z_i, v_i⟩ to the objective."""
        raise NotImplementedError

    def mix(self, gradients: Tensors) -> Tensors:
        """Returns the tensors for `.grad` in place of these gradients (by name, own ones (M, ...)).

        For methods whose update is not the gradient of a loss (SVGD). It must be affine: batches may be added up before it.
        """
        raise NotImplementedError

    def groups(self) -> list[Group]:
        """All parameters, trained or not, in groups; if groups overlap, the last wins.

        A method adds its own at the end: `[*super().groups(), Group("scales", {…}, rate=1e-2, decay=False)]`.
        """
        held = self.named_parameters()
        named = {n.removeprefix("particles.own.").removeprefix("particles.shared."): p for n, p in held}
        roots = {name: name.partition(".")[0] for name in named}
        network, noise = ({n: p for n, p in named.items() if roots[n] == root} for root in ("network", "likelihood"))
        latents = {n: p for n, p in named.items() if roots[n] == "latents"}
        others = {n: p for n, p in named.items() if roots[n] not in ("network", "likelihood", "latents")}
        prior = self.prior
        covered = {n: p for n, p in network.items() if prior is not None and prior.covers(n.removeprefix(PREFIX))}
        return [
            Group("network", network),
            Group("others", others, prior=False),
            Group("under the prior", covered, decay=False),
            Group("latents", latents, decay=False, prior=False),
            Group("likelihood", noise, decay=False, prior=False),
        ]

    @final
    def names_with_prior(self) -> list[str]:
        """Names of the members' trained parameters under the prior, from groups with `prior=True`."""
        if self._with_prior is None:
            names = {name for group in disjoint_groups(self.groups()) if group.prior for name in group.parameters}
            bare = (name.removeprefix(PREFIX) for name in names)
            plain = names_under_prior(self.prior, self.particles.template.network, bare)
            self._with_prior = frozenset(PREFIX + name for name in plain)
        # From the stored tensors: inside vmap and func transforms, a member's tensors do not have requires_grad.
        stored = {**self.particles.shared_parameters(), **self.particles.own_parameters()}
        return [name for name, each in stored.items() if name in self._with_prior and each.requires_grad]

    @final
    def penalty(self, params: Tensors) -> Tensor | float:
        """() −log p(θ) / N of one member. Shared tensors get 1/M of its gradient: they count once in the sum over members."""
        if self.prior is None or self.data_size is None:
            return 0.0
        weights, shared, members = {}, self.particles.shared_parameters(), self.particles.total_members
        for name in self.names_with_prior():
            # Sums of squares overflow float16 and lose digits in bfloat16 long before the weights do.
            full = at_least_float32(params[name])
            once = name in shared and members > 1
            weights[name.removeprefix(PREFIX)] = scale_gradient(full, 1 / members) if once else full
        if not weights:
            return 0.0
        if (log_prob := self.prior.log_prob(weights)).shape:
            raise ValueError(f"expected log_prob as one number, got shape {tuple(log_prob.shape)}; sum it")
        return -log_prob / self.data_size

    @final
    def use_prior(self, prior: Prior | Callable[[Tensors], Tensor] | None, data_size: int | None = None) -> None:
        """Replaces the prior, from the next step on; None trains without a prior.

        Optimisers made afterwards do not decay the weights under the prior.

        Args:
            prior: a `Prior`, or a function of one member's tensors by name that returns log p(θ), ().
            data_size: N, if the posterior does not know it yet.
        """
        size = self.data_size if data_size is None else data_size
        if (made := make_prior(prior, data_size=size)) is not None:
            own, shared = self.particles.own_parameters(), self.particles.shared_parameters()
            shapes = {name: t.shape for name, t in shared.items()} | {name: t.shape[1:] for name, t in own.items()}
            made.check_fits({n.removeprefix(PREFIX): s for n, s in shapes.items() if n.startswith(PREFIX)})
        self.prior, self.data_size = made, size
        self._with_prior = None

    @final
    def parameter_groups(
        self, lr: float, weight_decay: float = 0.0, *, likelihood_lr: float | None = None
    ) -> list[dict[str, Any]]:
        """Parameter groups for an optimiser, from `groups`, without empty ones.

            torch.optim.SGD(posterior.parameter_groups(0.1, 5e-4), lr=0.1, momentum=0.9)

        Args:
            lr: learning rate of the weights; groups with their own rate (modulations, latents) keep it.
            weight_decay: weight decay of the groups that allow it: not of weights under a prior, nor of learned noise.
            likelihood_lr: learning rate of learned noise; None is `lr`.
        """
        rates = {} if likelihood_lr is None else {"likelihood": likelihood_lr}
        return optimizer_groups(self, self.groups(), lr=lr, weight_decay=weight_decay, rates=rates)

    def default_optimizer(self) -> Optimizer:
        """`fit`'s optimiser if none is given: AdamW with rate 1e-3, and 1e-2 for learned noise.

        The noise is one number and starts far from its optimum, at 1. Weight decay is 1e-4, but 0 on weights under a prior.
        """
        if (choosy := next((each for each in self.watchers if each.optimizers is not None), None)) is not None:
            return choosy.default_optimizer()
        return torch.optim.AdamW(self.parameter_groups(1e-3, 1e-4, likelihood_lr=1e-2), fused=True)

    def default_schedule(self, epochs: int) -> Callable[[int], float]:
        """epoch -> factor of the learning rate: constant for the first half, linear to 1 % at 90 %, constant again.

        With watchers, the schedule is that of the first one that records, which keeps the weights moving meanwhile.
        """
        for watcher in self.watchers:
            if watcher.recorders:
                return watcher.default_schedule(epochs)
        return lambda epoch: plateau_linear(epoch / max(epochs, 1))


def annealing_weight(posterior: TrainableModule, annealing: Annealing) -> Tensor | float:
    """() a_t at this step, counted within the run if the schedule spans the run, else over all steps."""
    step = posterior.steps - posterior.steps_before_run if annealing.steps is None else posterior.steps
    return annealing(step, posterior.run_length)


def connected_mesh(posterior: TrainableModule) -> Any:
    """The posterior's mesh, if it has other processes that are still connected; else None."""
    mesh = posterior.mesh
    return mesh if is_mesh(mesh) and mesh.size > 1 and mesh.is_alive else None


def is_mesh(mesh: Any) -> TypeGuard[Any]:
    """Whether this is a mesh, and not None or "independent"; raises for anything else."""
    if (known := hasattr(mesh, "is_alive")) or mesh in (None, "independent"):
        return known
    raise ValueError(f'expected a mesh, "independent" or None, got {mesh!r}; pass ds.distributed.mesh(...)')
