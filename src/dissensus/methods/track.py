"""track: one training run watched by several methods, so that all of them cost one run."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dissensus.core.batch import Inputs
from dissensus.core.functions import DrawnFunctions, MemberFunctions
from dissensus.core.likelihood import Classification, Likelihood
from dissensus.core.particles import Particles
from dissensus.core.posterior import Posterior


def track(
    module: nn.Module,
    methods: Sequence[Callable[..., Posterior]],
    *,
    likelihood: Likelihood | None = None,
    weight_prior_std: float | None = None,
    data_size: int | None = None,
) -> "Tracked":
    """A run over the module that every method watches; the posteriors are its elements, by position or by name.

    `methods`: classes that hold the caller's module (MAP, TRADI, SWAG, …), or functions of it that build one, such as
    `functools.partial(SWAG, rank=5)`. All see one network and one likelihood. Train the run, use the posteriors:

        tradi, swag = run = track(module, [TRADI, SWAG])
    """
    return Tracked(module, methods, likelihood=likelihood, weight_prior_std=weight_prior_std, data_size=data_size)


class Tracked(Posterior):
    """The network in training. What it predicts itself is what the network says now."""

    name = "tracked"

    def __init__(
        self,
        module: nn.Module,
        methods: Sequence[Callable[..., Posterior]],
        *,
        likelihood: Likelihood | None = None,
        weight_prior_std: float | None = None,
        data_size: int | None = None,
    ) -> None:
        if not methods:
            raise ValueError("expected at least one method to watch the run, got none; pass for example [TRADI, SWAG]")
        if odd := [each for each in methods if not callable(each)]:
            raise TypeError(
                f"expected methods, got {odd[0]!r}; pass a list of classes or of functions of the module, [TRADI, SWAG]"
            )
        particles = Particles.hold(module, likelihood or Classification())
        super().__init__(particles, weight_prior_std=weight_prior_std, data_size=data_size)
        prior = {"weight_prior_std": weight_prior_std, "data_size": data_size}
        keywords = {name: value for name, value in prior.items() if value is not None}
        self.posteriors = nn.ModuleList()
        for method in methods:
            posterior = method(module, likelihood=particles.likelihood, **keywords)
            if not isinstance(posterior, Posterior) or posterior.particles.template.network is not module:
                raise TypeError(
                    f"expected methods that hold the caller's module, got {type(posterior).__name__}, which does not; build "
                    "it and train it on its own"
                )
            posterior.particles = particles  # one likelihood: its learned noise is trained once, for all
            self.posteriors.append(posterior)
        self.keeps_best = all(posterior.keeps_best for posterior in self)
        self.deterministic = all(posterior.deterministic for posterior in self)

    def __len__(self) -> int:
        return len(self.posteriors)

    def __iter__(self) -> Iterator[Posterior]:
        return iter(self.posteriors)  # type: ignore[arg-type]

    def __getitem__(self, which: int | str) -> Posterior:
        """The posterior at a position, or the first of a name."""
        if isinstance(which, int):
            return self.posteriors[which]  # type: ignore[return-value]
        for posterior in self:
            if posterior.name == which:
                return posterior
        names = ", ".join(posterior.name for posterior in self)
        raise ValueError(f"expected one of {names}, got {which!r}; those are what watches this run")

    def begin(self, steps_per_epoch: int, epochs: int, *, done: int = 0) -> None:
        super().begin(steps_per_epoch, epochs, done=done)
        for posterior in self:
            posterior.begin(steps_per_epoch, epochs, done=done)

    def begin_unmeasured(self, epochs: int) -> None:
        super().begin_unmeasured(epochs)
        for posterior in self:
            posterior.begin_unmeasured(epochs)

    def observe(self, optimizer: Optimizer) -> bool:
        for posterior in self:
            posterior.observe(optimizer)
        return super().observe(optimizer)

    def before_step(self, x: Inputs, y: Tensor, weight: Tensor | None) -> None:
        for posterior in self:
            posterior.before_step(x, y, weight)

    def default_optimizer(self) -> Optimizer:
        """That of the first posterior which accepts but some, else the usual one."""
        choosy = next((posterior for posterior in self if posterior.optimizers is not None), None)
        return super().default_optimizer() if choosy is None else choosy.default_optimizer()

    def draw(self) -> DrawnFunctions:
        return MemberFunctions(self.particles)

    def store_draw(self, loader: Iterable[Any]) -> None:
        """Stores a draw of every posterior that has something to draw from."""
        for posterior in self:
            if posterior.ready:
                posterior.store_draw(loader)

    def identity(self) -> dict[str, Any]:
        posteriors = [posterior.identity() for posterior in self]
        return {"method": self.name, "class": type(self).__name__, "posteriors": posteriors}

    def config(self) -> dict[str, Any]:
        raise TypeError("expected one of the run's posteriors to save, got the run; save them one by one: for p in run")

    @classmethod
    def skeleton(cls, network: nn.Module, config: dict[str, Any], likelihood: Likelihood) -> "Tracked":
        raise TypeError("expected one of the run's posteriors, got the run; they are saved and loaded one by one")


def branch(posterior: Posterior, optimizer: Optimizer) -> tuple[Posterior, Optimizer]:
    """(a copy of the posterior, a copy of the optimiser over its parameters), to go on with in another way.

    Weights, what was observed and the optimiser's moments are copied; a scheduler is not: build one for the copy.
    """
    held = {id(parameter) for parameter in posterior.parameters()}
    if not all(id(p) in held for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "expected an optimizer over the posterior's parameters alone, got one that holds others; build it on "
            "posterior.parameters()"
        )
    other: tuple[Posterior, Optimizer] = copy.deepcopy((posterior, optimizer))
    # A scheduler replaces the optimiser's step by a wrapper around the original, which the copy must not step.
    other[1].__dict__.pop("step", None)
    return other
