"""Posterior: the contract every method keeps.

A method is one subclass. It says what its members are (`particles`), may say what one member's loss is (`member_loss`)
and how members act on each other (`couple`), and how functions are drawn (`draw`). Training, prediction, saving and the
engines are derived from these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Unpack, final

import torch
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core import inputs, noise, seam
from dissensus.core.batch import Batch, Inputs
from dissensus.core.errors import Diverged
from dissensus.core.finite import diverged_members, member_maxima
from dissensus.core.functions import DrawnFunctions, Predictor
from dissensus.core.likelihood import Likelihood
from dissensus.core.modes import eval_mode
from dissensus.core.particles import Member, Particles
from dissensus.core.predictive import Predictive
from dissensus.core.prior import PriorKeywords
from dissensus.core.regression import RealTargets
from dissensus.core.standing import Lens
from dissensus.core.training_rules import TrainingRules
from dissensus.core.turns import copied
from dissensus.numerics.arrays import as_tensor
from dissensus.numerics.randomness import Watch, looking_ahead, same_random_state
from dissensus.numerics.tree import Tensors


class Posterior(TrainingRules, ABC):
    """Something M functions can be drawn from; an `nn.Module`, so optimisers, `.to()` and checkpoints work as ever.

    Base class of all methods. Their constructors take what is said in their own docstrings, and these keywords:

    Args:
        likelihood: what the network's outputs mean; None is `Classification()`.
        prior: a `Prior`, or a function of one member's tensors by name that returns log p(θ), (); needs `data_size`.
            The loss then carries −log p(θ) / N, and weight decay leaves the covered tensors alone. None: no prior.
        weight_prior_std: σ, short for `prior=GaussianPrior(σ)`.
        data_size: N, the number of training examples, by which priors, KL terms and repulsions are divided.

    Public attributes: `particles` (the members' tensors), `likelihood`, `prior`, `data_size`, `temperature` () (1
    unless `temperature_scale` set it), `calibration` and `promises` (what stands on its predictions), `inputs` (from
    raw inputs to those of the network, or None), `classes` (their names, or None), `steps` () (optimiser steps so far),
    `watchers` (what `track` added), `device`.
    """

    name: ClassVar[str]  # what it is called on the command line and in saved files
    untrained: ClassVar[tuple[str, ...]] = ()  # keys of `config` that training does not read: only drawing does

    def __init__(self, particles: Particles, **prior: Unpack[PriorKeywords]) -> None:
        super().__init__(particles, **prior)
        if isinstance(network := particles.template.network, Posterior):
            raise TypeError(
                f"expected a network, got the posterior {type(network).__name__}; pass the network that it was made of"
            )
        where = next((each.device for each in particles.parameters()), None)  # a network may be on a GPU already
        self.register_buffer("temperature", torch.ones((), device=where))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=where))
        self.training = particles.training
        self.inputs: Callable[[Any], Tensor] | None = None  # from raw inputs to those of the network
        self.classes: tuple[str, ...] | None = None
        self.base: tuple[Posterior] | None = None  # the posterior that this one watches; in a tuple: it is no part
        self._known = inputs.KnownInputs()
        self._started = self._predicted = False  # whether a learned noise was looked at before a step, and a prediction
        self.draws_itself = False  # whether the network itself was seen to draw random numbers in eval mode

    # ------------------------------------------------------------------ what a method declares

    def member_loss(self, params: Tensors, buffers: Tensors, batch: Batch) -> tuple[Tensor, Any, Tensors]:
        """(loss (), z, buffers afterwards) of one member: a pure function. z is what members are compared in.

        Args:
            params, buffers: the member's tensors by name ("network.0.weight"), without a member axis.
            batch: x, y and weight, on the posterior's device.

        Returns:
            The batch-mean loss (), prior included; z, a tensor or a tree of tensors that `couple` reads, () for none;
            and the buffers by name as the forward pass left them.
        """
        value, buffers = self.particles.call(Member.nll, params, buffers, batch)
        penalty = self.penalty(params)
        return value + penalty if isinstance(penalty, Tensor) else value, (), buffers

    @abstractmethod
    def draw(self) -> DrawnFunctions:
        """A module (B, *in) -> (M, B, *out): functions drawn from the posterior, fixed until the next draw.

        Methods that store members draw those; methods that sample draw anew each time, until `ds.refresh` has stored a
        draw.
        """

    def current(self) -> DrawnFunctions:
        """The functions as trained so far, (B, *in) -> (M, B, *out): what validation during `fit` judges."""
        return self.draw()

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The keyword arguments, all JSON, that build this posterior again, given a network."""

    @final
    def identity(self) -> dict[str, Any]:
        """The method and the settings that training reads, all JSON: a checkpoint is resumed only where these agree."""
        settings = {key: value for key, value in self.config().items() if key not in self.untrained}
        watchers = [watcher.identity() for watcher in self.watchers]
        described = {"method": self.name, "class": type(self).__name__, **settings}
        return {**described, "watchers": watchers} if watchers else described

    @classmethod
    @abstractmethod
    def skeleton(cls, network: nn.Module, config: dict[str, Any], likelihood: Likelihood) -> Posterior:
        """A posterior with this network and config, whose tensors a file will overwrite.

        Args:
            network: a module of the architecture that `given` returned.
            config: what `config` returned.
        """

    def given(self) -> nn.Module:
        """A network of the architecture that the caller passed, with some member's tensors, copied.

        This is the architecture that saved files describe and `load` takes. Methods that cut layers put the plain ones
        back here.
        """
        return self.particles.member(0) if self.base is None else self.base[0].given()

    @property
    @final
    def cuts(self) -> bool:
        """Whether layers of the network were cut: files then describe another network than the one that runs."""
        return type(self).given is not Posterior.given or (self.base is not None and self.base[0].cuts)

    def store_draw(self, loader: Iterable[Any]) -> None:
        """Draws once and stores the draw with the posterior, its batch statistics refreshed from the loader.

        Does nothing where members are stored anyway. Call it as `ds.refresh(posterior, loader)`.
        """
        return None

    # ------------------------------------------------------------------ what every posterior can do

    @property
    @final
    def likelihood(self) -> Likelihood:
        """What the outputs of the members mean; a learned noise in it is each member's own."""
        return self.particles.likelihood

    @final
    def loss(self, x: Inputs, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """() Σ over members of the batch-mean loss, plus coupling terms Σ_i ⟨z_i, v_i⟩, with a graph.

        Coupling terms are linearised (v has no graph): gradients are right, but values are not to be compared over
        steps. Batch statistics are updated. `backward` gives the same gradients faster.

        Args:
            x: inputs (B, ...), a tensor, a tuple or a dict of tensors.
            y: targets, as the likelihood takes them.
            weight: (B,), how often each example counts; None counts each once.
        """
        batch = self.take(self.batch((x, y, weight)))
        self.before_step(batch)
        return seam.loss(self, batch)

    @final
    def backward(self, x: Inputs, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """(M,) losses; adds to `.grad` what `loss(x, y).backward()` would.

        The fast path of a loop of your own: zero_grad, backward, optimizer.step, `observe(optimizer)`. Arguments as in
        `loss`.
        """
        batch = self.take(self.batch((x, y, weight)))
        self.before_step(batch)
        return seam.backward(self, batch)

    @final  # type: ignore[misc]
    def forward(self, x: Inputs) -> Tensor:
        """(M, B, *out): draw()(x), the networks' own outputs. They are not calibrated: see `predictor`."""
        batches.size(x := self.transformed(x))  # an error where x has no tensor
        outputs: Tensor = self.draw()(x)
        return outputs

    @final
    def predict(self, x: Inputs) -> Predictive:
        """The prediction of the mixture of drawn functions, in eval mode and without gradients.

        Modes and torch's random streams are left as found.

        Args:
            x: one batch (B, ...), a tensor, a tuple or a dict of tensors, or arrays or a DataFrame of numbers; moved to
                the posterior's device. Where the posterior has `inputs`, raw ones, also a single example.

        Returns:
            A `Predictive` of B inputs with every member, calibrated; a `SummaryPredictive` where a calibration acts on
            their mean.

        Raises:
            Diverged: a member predicts NaN.
        """
        batches.size(x := self.transformed(x))  # an error where x has no tensor
        batches.check_finite(x, anywhere=True)
        x = batches.to(x, self.device)
        with left_as_found(self):
            drawn = self.draw()  # first: it may have to say that there is nothing to draw from
            self.check_inputs(x)
            return self.checked(drawn.predict(x))

    def __repr__(self) -> str:
        trained = sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
        frozen = sum(parameter.numel() for parameter in self.parameters()) - trained
        network = type(self.particles.template.network).__name__
        return (
            f"{type(self).__name__}({network}, members={self.particles.members}, parameters={trained:,}"
            f"{f' + {frozen:,} frozen' if frozen else ''}, "
            f"likelihood={type(self.likelihood).__name__})"
        )

    @final
    def checked_members(
        self, predictive: Predictive, lens: Lens, *, first: int = 0, later: list[Tensor] | None = None
    ) -> Predictive:
        """Some members as users see them through the lens; raises Diverged, naming members, where they hold NaN.

        Args:
            first: the index of the first of them.
            later: of a run over batches: gets what is to be looked at in the end, by `check_diverged`, so that the host need
                not wait for every batch. The first batch is looked at now.
        """
        maxima = member_maxima(predictive.described())
        if not later:
            self.check_diverged([maxima], first=first)
        if later is not None:
            later.append(maxima)
        if not self._predicted:
            self._predicted = True
            self._known.doubt(noise.doubt(self.particles))
        return lens.members(predictive)

    @final
    def check_diverged(self, maxima: Sequence[Tensor], *, first: int = 0) -> None:
        """Raises Diverged where a member's maxima, of any batch, hold NaN or +∞."""
        if maxima and (bad := diverged_members(torch.cat(list(maxima)))):
            raise Diverged([first + i for i in bad], int(self.steps), "prediction")

    @final
    def checked(self, predictive: Predictive) -> Predictive:
        """The networks' whole mixture as users see it: at this posterior's temperature and calibration, NaN refused."""
        lens = self.lens()
        return lens.mixture(self.checked_members(predictive, lens))

    @final
    def member(self, index: int) -> nn.Module:
        """One drawn function as an ordinary module (B, *in) -> (B, *out) that shares nothing with the posterior.

        The posterior's temperature and calibration do not act on it.

        Args:
            index: 0 to M − 1; negative ones count from the end.
        """
        return self.draw().member(index)

    @final
    def predictor(self) -> Predictor:
        """A module x -> {mean, total, aleatoric, epistemic} as in `predict`, calibrated: for `torch.export`.

        A copy of one draw: nothing that happens to the posterior afterwards changes it. It does not look for NaN.
        """
        with left_as_found(self):
            return Predictor(self.draw(), self.lens())

    def __deepcopy__(self, memo: dict[int, Any]) -> Posterior:
        return copied(self, memo, self.particles.template.network)

    @property
    @final
    def device(self) -> torch.device:
        """Where the posterior's tensors are."""
        return self.temperature.device

    @final
    def transformed(self, x: Any) -> Inputs:
        """Inputs as the networks take them: raw ones transformed, where this has `inputs`; arrays as tensors."""
        return batches.inputs_of(x) if self.inputs is None else self.inputs(x).to(self.temperature.dtype)

    @final
    def batch(self, given: Any, *, anywhere: bool = False) -> Batch:
        """What a loader gave, its inputs `transformed`, checked as in `Batch.of`; a `Batch` has been through here before."""
        raw = isinstance(given, tuple | list) and not isinstance(given, Batch)
        if self.inputs is not None and raw and len(given) in (2, 3):
            x, y = self.transformed(given[0]), as_tensor(given[1])
            if (
                isinstance(self.likelihood, RealTargets)
                and getattr(y, "ndim", 0) == 1
                and len(self.output_shape(x)) == 2
            ):
                y = y[:, None]  # a table's column
            given = (x, y, *given[2:])
        return Batch.of(given, anywhere=anywhere)

    @final
    def read(self, loader: Iterable[Any], *, anywhere: bool = False) -> Iterator[Batch]:
        """The loader's batches: the one door through which data come to a posterior."""
        return (self.batch(given, anywhere=anywhere) for given in loader)

    @property
    @final
    def others(self) -> Any:
        """The mesh, where it has other processes and they are still connected; else None."""
        return self.mesh if self.mesh is not None and self.mesh.size > 1 and self.mesh.alive else None

    @final
    def whole(self, loader: Any) -> Any:
        """The loader; where it gives each process a part of the data, one of all the parts."""
        if self.others is not None:
            return self.others.whole(loader)
        parts = batches.sampler_of(loader)
        if parts is not None and parts.num_replicas > 1 and self.ranks is None:
            raise ValueError(
                "expected a posterior on a mesh for a loader that gives each process a part of the data, got none; set "
                'posterior.mesh = ds.distributed.mesh(), or posterior.ranks = "independent" for numbers of the part'
            )
        return loader

    @final
    def shared(
        self, work: Callable[[Any], Any], given: Iterable[Any], drawn: DrawnFunctions, device: Any = "cpu"
    ) -> Iterator[tuple[Any, Any]]:
        """(batch, work(batch)) of every batch, in order. Processes of the mesh take turns, and each gets all that was found.

        Args:
            drawn: the functions that the work is done with, the same on all processes.
            device: where what other processes found shall lie.
        """
        if self.others is None:
            return ((batch, work(batch)) for batch in given)
        found: Iterator[tuple[Any, Any]] = self.others.in_turns(work, given, drawn=drawn, device=device)
        return found

    @final
    def take(self, batch: Batch) -> Batch:
        """The batch on this posterior's device; checked before it leaves the host, where labels can be read."""
        self.check_batch(batch)
        return batch.to(self.device)

    def check_batch(self, batch: Batch) -> None:
        """Raises a clear error where y does not fit the network's outputs; reads values only on the host."""
        self.likelihood.check(self.output_shape(batch.x), batch.y)

    def before_step(self, batch: Batch) -> None:
        super().before_step(batch)
        if not self._started:
            self._started = True
            self._known.doubt(noise.started(self.particles, lambda: self._first_member(batch.x), batch))

    @final
    def output_shape(self, x: Inputs) -> torch.Size:
        """Shape (B, *out) of one member's outputs for x; found by running it once per shape of x."""
        return self._known.output_shape(x, self._first_member, self.temperature.dtype)

    @final
    def check_inputs(self, x: Inputs) -> None:
        """Raises a clear error where the network cannot take x, or x has no batch axis; runs one example per shape of x."""
        self._known.check(x, self._first_member, self.temperature.dtype)

    def _first_member(self, x: Inputs) -> Tensor:
        particles, x = self.particles, batches.to(x, self.device)
        with left_as_found(self), Watch() as watch, batches.unchanged(x), inputs.explained(x, particles):
            outputs: Tensor = particles.call(lambda member: batches.call(member.network, x), *particles.at(0))[0]
            self.draws_itself |= watch.drew
        self._known.doubt(self.likelihood.doubt(outputs))
        return outputs


def refresh(posterior: Posterior, loader: Iterable[Any]) -> None:
    """Draws the functions of a sampling method, refreshes their batch statistics from the loader and stores both.

    `draw()` then returns those, and so does a saved and loaded posterior, until the next refresh. Methods that store
    their members anyway are left alone. Watchers are refreshed, too, where they have something to draw from. `fit`
    calls this at its end; after a loop of your own, call it yourself.

    Args:
        loader: training batches (x, y), as the networks saw them.
    """
    inputs.check_loader(loader)
    for each in [posterior, *(watcher for watcher in posterior.watchers if watcher.ready)]:
        if type(each).store_draw is not Posterior.store_draw:
            each.drop_promises("a new draw")
        each.store_draw(loader)


def expect_posterior(given: object) -> Posterior:
    """What was given, where that is a posterior: a network in its place is an ordinary mistake."""
    if not isinstance(given, Posterior):
        raise TypeError(f"expected a posterior, got {type(given).__name__}; wrap the network, for example in MAP(...)")
    return given


@contextmanager
def left_as_found(posterior: Posterior) -> Iterator[None]:
    """Inside, eval mode without gradients, and no other thread runs the network; modes and random streams are put back."""
    with (
        expect_posterior(posterior).particles.turn(),
        eval_mode(posterior, *posterior.particles.templates),
        torch.no_grad(),
        looking_ahead(),
        same_random_state(posterior.device, mine=lambda: posterior.draws_itself),
    ):
        yield
