"""Posterior: the base class of every method.

A method is one subclass. It defines its members (`particles`) and how functions are drawn (`draw`), and may define one
member's loss (`member_loss`) and how members interact (`couple`). Training, prediction, saving and the engines use these.
"""

from __future__ import annotations

import logging
import re
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Literal, Self, Unpack, final

import torch
from torch import Tensor, nn

from dissensus.core import batch as batches, gradients
from dissensus.core.batch import Batch, Inputs
from dissensus.core.calibrated import Correction
from dissensus.core.description import describe_network, describe_settings, restore_settings
from dissensus.core.divergence import Diverged, diverged_members, has_diverged, member_maxima
from dissensus.core.drawn_functions import DrawnFunctions, Predictor
from dissensus.core.likelihood import Likelihood, RealTargets, noise_warning, start_noise
from dissensus.core.member_runner import first_line, locked_deepcopy
from dissensus.core.particles import Member, Particles
from dissensus.core.predictive import Predictive, as_column
from dissensus.core.prior import PriorKeywords
from dissensus.core.trainable import TrainableModule
from dissensus.numerics.randomness import RandomnessDetector, preserve_random_state
from dissensus.utils.checks import pixel_warning
from dissensus.utils.parameter_groups import clip_members
from dissensus.utils.tensor_tree import Tensors
from dissensus.utils.torch_modes import eval_mode, keep_freed_memory, untimed_convolutions
from dissensus.utils.torch_private import MODULE_CALL, buffers_of, children_of

log = logging.getLogger("dissensus")
RAW_OUTPUTS = "posterior(x) gives every member's raw outputs: use posterior.predict(x), or for them posterior.draw()(x)"


class Posterior(TrainableModule, ABC):
    """A distribution over networks, from which M functions are drawn; the base class of all methods.

    It is an `nn.Module`, so optimisers, `.to()` and checkpoints work as usual. Besides their own arguments, all methods
    take these keywords:

    Args:
        likelihood: the distribution of targets given the network's outputs; None is `Classification()`.
        prior: a `Prior`, or a function of one member's tensors by name that returns log p(θ), (); needs `data_size`.
            It adds −log p(θ) / N to the loss, and the tensors under it get no weight decay. None: no prior.
        weight_prior_std: σ, short for `prior=GaussianPrior(σ)`.
        data_size: N, the number of training examples; priors, KL terms and repulsions are divided by it.

    Public attributes: `particles` (the members' tensors), `likelihood`, `prior`, `data_size`, `temperature` () (1
    unless `temperature_scale` set it), `calibration` and `promises` (fitted to its predictions), `inputs` (a transform
    from raw inputs to those of the network, or None), `classes` (their names, or None), `steps` () (optimiser steps so
    far), `watchers` (methods added by `track`), `device`.
    """

    name: ClassVar[str]  # its name on the command line and in saved files
    _attribute_hints: ClassVar = {"name": 'write name = "…" in the class'}
    # Its first argument: one network; a list of them (or a function, with members=); or either, a list being optional.
    networks_taken: ClassVar[Literal["one", "several", "any"]] = "one"
    draw_only_settings: ClassVar[tuple[str, ...]] = ()  # keys of `config` that only drawing reads, not training

    def __init__(self, particles: Particles, **prior: Unpack[PriorKeywords]) -> None:
        super().__init__(particles, **prior)
        if isinstance(network := particles.template.network, Posterior):
            kind = type(network).__name__
            raise TypeError(f"expected a network, got the posterior {kind}; pass the network inside it")
        self.initial_network = describe_network(network)
        where = next((each.device for each in particles.parameters()), None)  # a network may be on a GPU already
        self.register_buffer("temperature", torch.ones((), device=where))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=where))
        self.training = particles.training
        self.inputs: Callable[[Any], Tensor] | None = None  # transform from raw inputs to those of the network
        self.classes: tuple[str, ...] | None = None
        self.base: tuple[Posterior] | None = None  # the posterior that this one watches; a tuple, so it is no submodule
        self._known = KnownInputs()
        self._started = self._predicted = False  # whether learned noise was checked before a step, and a prediction

    def member_loss(self, params: Tensors, buffers: Tensors, batch: Batch) -> tuple[Tensor, Any, Tensors]:
        """(loss (), z, buffers afterwards) of one member: a pure function. z is the quantity in which members interact.

        Args:
            params, buffers: the member's tensors by name ("network.0.weight"), without a member axis.
            batch: x, y and weight, on the posterior's device.

        Returns:
            The batch-mean loss (), prior included; z, a tree of tensors for `couple`, () for none; the buffers afterwards.
        """
        value, buffers = self.particles.call(Member.nll, params, buffers, batch)
        penalty = self.penalty(params)
        return value + penalty if isinstance(penalty, Tensor) else value, (), buffers

    @abstractmethod
    def draw(self) -> DrawnFunctions:
        """M fixed functions drawn from the posterior, as a module (B, *in) -> (M, B, *out).

        Methods that store members return those; methods that sample draw anew each time, until `ds.refresh` has stored a draw.
        """

    def current(self) -> DrawnFunctions:
        """The present functions, (B, *in) -> (M, B, *out), which `fit` evaluates on validation data."""
        return self.draw()

    def config(self) -> dict[str, Any]:
        """The keyword arguments that rebuild this posterior, as JSON values, from attributes of the same names."""
        return describe_settings(self)

    @classmethod
    def skeleton(cls, network: nn.Module, config: dict[str, Any], likelihood: Likelihood) -> Self:
        """A posterior of a network like `plain_network()` and this `config()`, to be overwritten from a file."""
        constructor: Any = cls  # every method has its own keywords
        return constructor(network, likelihood=likelihood, **restore_settings(cls, config))

    def plain_network(self) -> nn.Module:
        """A copy of one member as a network of the caller's architecture.

        Saved files describe this architecture, and `load` takes it. Methods that cut layers put the plain ones back here.
        """
        return self.particles.member(0) if self.base is None else self.base[0].plain_network()

    def store_draw(self, loader: Iterable[Any]) -> None:
        """Stores a draw, with batch statistics re-estimated from the loader, if the method samples; users call `ds.refresh`."""
        return None

    @property
    @final
    def likelihood(self) -> Likelihood:
        """The likelihood of the members' outputs; each member has its own learned noise."""
        return self.particles.likelihood

    @final
    def loss(self, x: Inputs, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """() differentiable loss: Σ over members of the batch-mean loss, plus coupling terms Σ_i ⟨z_i, v_i⟩.

        Coupling terms are linearised (v is detached): gradients are right, but values cannot be compared between steps.
        Batch statistics are updated. `backward` computes the same gradients faster.

        Args:
            x: inputs (B, ...), a tensor, a tuple or a dict of tensors.
            y: targets, in the form that the likelihood takes.
            weight: (B,) example weights; None is 1 for each.
        """
        batch = self.prepare_batch(self._make_batch((x, y, weight)))
        self.before_step(batch)
        return gradients.loss(self, batch)

    @final
    def backward(self, x: Inputs, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """(M,) losses; adds the same gradients to `.grad` as `loss(x, y).backward()`, but faster.

        For your own training loop: zero_grad, backward, optimizer.step, `observe(optimizer)`. Arguments as in `loss`.
        """
        batch = self.prepare_batch(self._make_batch((x, y, weight)))
        self.before_step(batch)
        return gradients.backward(self, batch)

    @final
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """(M,) norms of the members' gradients; scales each in place to at most `max_norm`. torch's mixes members."""
        return clip_members(self.particles, max_norm)

    @final  # type: ignore[misc]
    def forward(self, x: Inputs) -> Tensor:
        """(M, B, *out): draw()(x), the networks' raw outputs, not calibrated; see `predictor` for calibrated ones."""
        self._known.warn_once(None if self.training or torch.compiler.is_compiling() else RAW_OUTPUTS)
        batches.count_examples(x := self.transform_inputs(x))  # raises if x has no tensor
        return self.draw()(x)

    @final
    def predict(self, x: Inputs) -> Predictive:
        """The calibrated prediction for one batch: the mixture of drawn functions, in eval mode and without gradients.

        Training modes and torch's random state are restored.

        Args:
            x: one batch (B, ...), a tensor, a tuple or a dict of tensors, or arrays or a DataFrame of numbers; moved to
                the posterior's device. The labels of a dict that a loader yielded are left out. If the posterior has
                `inputs`, raw inputs, or a single raw example.

        Returns:
            A `Predictive` for B inputs with every member; a `SummaryPredictive` if a calibration acts on their mean.

        Raises:
            Diverged: a member predicts NaN.
        """
        self._known.look(batches.check_finite(x := self.transform_inputs(x), anywhere=True))
        x = batches.move_to_device(x, self.device)
        with inference_context(self):
            drawn = self.draw()  # first: it raises if there is nothing to draw from
            self.check_inputs(x)
            return checked_prediction(self, drawn.predict(x))

    def __repr__(self) -> str:
        trained = sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
        frozen = sum(parameter.numel() for parameter in self.parameters()) - trained
        network = type(self.particles.template.network).__name__
        more = f", {more}" if (more := self.extra_repr()) else ""
        return (
            f"{type(self).__name__}({network}, members={self.particles.members}, parameters={trained:,}"
            f"{f' + {frozen:,} frozen' if frozen else ''}, likelihood={type(self.likelihood).__name__}{more})"
        )

    @final
    def member(self, index: int) -> nn.Module:
        """One drawn function as an ordinary module (B, *in) -> (B, *out), a copy independent of the posterior.

        Temperature and calibration are not applied to it.

        Args:
            index: 0 to M − 1; negative indices count from the end.
        """
        return self.draw().member(index)

    @final
    def predictor(self) -> Predictor:
        """A module x -> {mean, total, aleatoric, epistemic} with the values of `predict`, for `torch.export`.

        It holds a copy of one draw, so later changes of the posterior do not affect it. It does not check for NaN.
        """
        with inference_context(self):
            return Predictor(self.draw(), self.current_correction())

    def __deepcopy__(self, memo: dict[int, Any]) -> Posterior:
        return locked_deepcopy(self, memo, self.particles.template.network)

    @property
    @final
    def device(self) -> torch.device:
        """Where the posterior's tensors are."""
        return buffers_of(self)["temperature"].device

    @final
    def transform_inputs(self, x: Any) -> Inputs:
        """Inputs as the networks take them: arrays as tensors, raw inputs transformed by `inputs`, a mapping without labels."""
        if not isinstance(x, Tensor) and isinstance(x, Mapping):
            x = batches.drop_labels(self.particles.template.network, x)
        return batches.convert_inputs(x) if self.inputs is None else self.inputs(x).to(self.temperature.dtype)

    def _make_batch(self, given: Any, *, anywhere: bool = False) -> Batch:
        """A batch from a loader, its inputs transformed, its targets in the shape of the outputs; checked when it is made."""
        given = batches.split_labels(given)
        raw = isinstance(given, tuple | list) and not isinstance(given, Batch)
        if self.inputs is not None and raw and len(given) in (2, 3):
            given = (self.transform_inputs(given[0]), *given[1:])
        look = partial(self._known.look, training=self.training)
        x, y, weight = batch = Batch.from_tuple(given, anywhere=anywhere, look=look)
        if isinstance(self.likelihood, RealTargets) and y.ndim == 1 and y.is_floating_point():
            return Batch(x, as_column(y, self.likelihood.mean_shape(self.output_shape(x))), weight)
        return batch

    @final
    def read(self, loader: Iterable[Any], *, anywhere: bool = False) -> Iterator[Batch]:
        """The loader's batches, transformed and checked. All data reach a posterior through this method."""
        return (self._make_batch(given, anywhere=anywhere) for given in loader)

    @final
    def prepare_batch(self, batch: Batch) -> Batch:
        """The batch on this posterior's device; checked on the host first, where labels can be read."""
        self.check_batch(batch)
        return batch.to(self.device)

    def check_batch(self, batch: Batch) -> None:
        """Raises if y does not fit the network's outputs; reads values only on the host."""
        self.likelihood.check(self.output_shape(batch.x), batch.y)

    def before_step(self, batch: Batch) -> None:
        super().before_step(batch)
        if not self._started:
            self._started = True
            remark = start_noise(self.particles, lambda: self._run_first_member(batch.x), batch)
            self._known.warn_once(remark)

    @final
    def output_shape(self, x: Inputs) -> torch.Size:
        """Shape (B, *out) of one member's outputs for x; found by running it once per shape of x."""
        return self._known.output_shape(x, self._run_first_member, buffers_of(self)["temperature"])

    @final
    def check_inputs(self, x: Inputs) -> None:
        """Raises if the network fails on x, or x has no batch axis; runs one example per shape of x."""
        self._known.check(x, self._run_first_member, buffers_of(self)["temperature"])

    def _run_first_member(self, x: Inputs) -> Tensor:
        particles, x = self.particles, batches.move_to_device(x, self.device)
        batches.check_input_names(particles.template.network, x)
        explained, untimed = explain_input_errors(x, particles), untimed_convolutions(self.device)
        with inference_context(self), untimed, RandomnessDetector() as watch, batches.UnchangedInputs(x), explained:
            outputs: Tensor = particles.call_first(lambda member: batches.call_network(member.network, x))
            self.network_is_random |= watch.has_drawn
        self._known.warn_once(self.likelihood.output_warning(outputs))
        return outputs


def expect_posterior(given: object) -> Posterior:
    """The argument, if it is a posterior; raises for a plain network, a common mistake."""
    if not isinstance(given, Posterior):
        hint = "wrap the network, for example in MAP(...); calibrate changes the posterior itself"
        raise TypeError(f"expected a posterior, got {type(given).__name__}; {hint}")
    return given


@contextmanager
def inference_context(posterior: Posterior) -> Iterator[None]:
    """Eval mode without gradients, with the network locked; afterwards modes and random state are restored."""
    particles = expect_posterior(posterior).particles
    keep_freed_memory()
    random = preserve_random_state(posterior.device, mine=lambda: posterior.network_is_random, ahead=True)
    with particles.lock_network(), random, torch.set_grad_enabled(False):
        parts = posterior.known_parts(*children_of(posterior).values(), *particles.templates, trees=False)
        with eval_mode(posterior, *particles.templates, parts=[posterior, *parts]):
            yield


def has_converted_layers(posterior: Posterior) -> bool:
    """Whether the method has cut layers of the network, so that files describe another network than the running one."""
    watched = posterior.base is not None and has_converted_layers(posterior.base[0])
    return watched or type(posterior).plain_network is not Posterior.plain_network


def checked_prediction(posterior: Posterior, predictive: Predictive) -> Predictive:
    """The networks' mixture with temperature and calibration applied; raises Diverged on NaN."""
    lens = posterior.current_correction()
    return lens.correct_mixture(checked_members(posterior, predictive, lens))


def checked_members(
    posterior: Posterior, predictive: Predictive, lens: Correction, *, first: int = 0, later: list[Tensor] | None = None
) -> Predictive:
    """The calibrated prediction of members from `first` on; raises Diverged, or `later` takes their maxima to check."""
    described = predictive.defining_tensors()
    if later is not None:
        later.append(member_maxima(described))
    elif has_diverged(described):
        check_diverged(posterior, member_maxima(described), first=first)
    if not posterior._predicted:
        posterior._predicted = True
        posterior._known.warn_once(noise_warning(posterior.particles))
    return lens.correct_members(predictive)


def check_diverged(posterior: Posterior, maxima: Tensor, *, first: int = 0) -> None:
    """Raises Diverged if a member's maxima hold NaN or +∞."""
    if bad := diverged_members(maxima):
        raise Diverged([first + i for i in bad], int(posterior.steps), "prediction")


Forward = Callable[[Inputs], Tensor]
FEW = (8, 5)  # rows, by which a network is tried on a CPU


class KnownInputs:
    """Kinds of inputs (shapes without the batch axis, dtypes) that a network was tried with and accepts."""

    def __init__(self) -> None:
        self.shapes: dict[tuple[Any, ...], torch.Size] = {}  # shapes of outputs, without the batch axis
        self.taken: set[tuple[Any, ...]] = set()
        self.largest = float("-inf")  # value of inputs
        self.warnings = set[str]()  # that were logged

    def output_shape(self, x: Inputs, run: Forward, like: Tensor) -> torch.Size:
        """(B, ...) shape of run(x); run is called once per kind of x and dtype of the network, on a CPU for few rows."""
        key = _kind_of_inputs(x, like.dtype)
        if key not in self.shapes:
            few = [_outputs_of_part(run, x[:rows]) for rows in FEW] if like.is_cpu and isinstance(x, Tensor) else []
            shapes = [each.shape[1:] for each in few if each is not None]  # which may depend on the number of rows
            alike = len(shapes) == len(FEW) and len({*shapes}) == 1
            self.shapes[key] = shapes[0] if alike else batched_outputs(run, x).shape[1:]
        return torch.Size((batches.count_examples(x), *self.shapes[key]))

    def look(self, largest: float, training: bool = False) -> None:
        """Notes the largest value of training, or of the first inputs; warns if that of later ones looks like pixels."""
        if training or self.largest < 0:
            self.largest = max(self.largest, largest)
        elif largest > self.largest:
            self.warn_once(pixel_warning(largest, self.largest))

    def warn_once(self, word: str | None) -> None:
        """Logs a warning, once."""
        if word is not None and word not in self.warnings:
            log.warning("%s", word)
            self.warnings.add(word)

    def check(self, x: Inputs, run: Forward, like: Tensor) -> None:
        """Raises if run fails on x. For a single tensor it tries only the first example, if the network accepts that."""
        key = _kind_of_inputs(x, like.dtype)
        if key not in self.taken and key not in self.shapes and batches.count_examples(x) > 0:
            if not isinstance(x, Tensor) or _outputs_of_part(run, x[:1]) is None:
                batched_outputs(run, x)
            self.taken.add(key)


def _kind_of_inputs(x: Inputs, dtype: torch.dtype) -> tuple[Any, ...]:
    kinds = [(tensor.shape[1:], tensor.dtype) for tensor in batches.input_tensors(x)]
    return (dtype, *(x if isinstance(x, dict) else ()), *kinds)


def batched_outputs(run: Forward, x: Inputs) -> Tensor:
    """(B, ...) run(x); raises if the batch axis is not first, as for a single example that some layers accept."""
    outputs, size = run(x), batches.count_examples(x)
    if outputs.ndim == 0 or outputs.shape[0] != size:
        got, hint = tuple(outputs.shape), "pass a single example as x[None]"
        raise ValueError(f"expected outputs with the batch axis first ({size}, ...), got {got}; {hint}")
    return outputs


def _outputs_of_part(run: Forward, x: Tensor) -> Tensor | None:
    try:
        return batched_outputs(run, x)
    except Exception:  # batch norm without statistics, or a forward for a fixed batch size, may fail on few examples
        return None


@contextmanager
def explain_input_errors(x: Inputs, particles: Particles) -> Iterator[None]:
    """Turns torch's error for a network run on x into one that names the layer and what to convert."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        clear = _layer_error(error, x, particles)
        if clear is None:
            raise
        raise clear from error


def _layer_error(error: Exception, x: Inputs, particles: Particles) -> ValueError | None:
    """The error with the layer that raised it and the shapes of its inputs; None if no layer raised it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = [frame for frame in frames if isinstance(frame.f_locals.get("self"), nn.Module)]
    layer, home = inside[-1].f_locals["self"], inside[-1].f_globals["__name__"]
    name = next((name for name, part in particles.template.network.named_modules() if part is layer), None)
    calls = [f.f_locals for f in inside if f.f_code.co_name == MODULE_CALL and f.f_locals["self"] is layer]
    torchs = home.startswith(("torch.nn.", "dissensus.nets.")) or (
        home.startswith("dissensus.layers.") and isinstance(error, RuntimeError)
    )
    if name is None or not calls or not torchs or type(error) is NotImplementedError:
        return None
    given = batches.input_tensors((*calls[-1]["args"], *calls[-1]["kwargs"].values()))
    shapes = [", ".join(str(tuple(tensor.shape)) for tensor in each) for each in (batches.input_tensors(x), given)]
    where = f"layer '{name}'" if name else "the network"
    what = type(layer).__name__ if next(layer.children(), None) else str(layer)
    got = f"{shapes[0]}: {where}, {what}, got {shapes[1]} and raised: {first_line(error)}"
    remedy = _remedy(str(error), layer, given, particles)
    return ValueError(f"expected inputs that the network can take, got {got}; {remedy}")


def _remedy(said: str, layer: nn.Module, given: list[Tensor], particles: Particles) -> str:
    if "indices" in said:
        return "pass x.long()"
    own = next((tensor.dtype for tensor in particles.parameters() if tensor.is_floating_point()), None)
    if re.search(r"dtype|scalar type|input type", said, re.IGNORECASE) and own is not None:
        floating = all(tensor.is_floating_point() for tensor in given)
        pixels = "convert the posterior with .to(x.dtype)" if floating else "divide pixels by 255 in its forward"
        return f"pass x.to({own}), or {pixels}"
    if given and given[0].ndim > 2 and given[0].shape[-1] == getattr(layer, "in_channels", None):
        return "channels must come before height and width: pass x.movedim(-1, 1)"
    return "change the inputs (pass a single example as x[None]) or that layer"
