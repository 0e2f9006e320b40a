"""Prediction of one batch after the other, with one draw of functions for all: what the verbs of prediction have in common.

A read of a value makes the host wait for the device, and the device then wait for its next batch. Results and checks are
therefore copied while the device goes on, and read when it has the batch after theirs, or a few batches later.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from dissensus.core import batch as batches
from dissensus.core.batch import Batch, Inputs
from dissensus.core.drawn_functions import FunctionPartition
from dissensus.core.likelihood import Classification, RealTargets
from dissensus.core.member_runner import FallbackChain
from dissensus.core.particles import Member, Particles
from dissensus.core.posterior import Posterior, check_diverged, checked_members, inference_context
from dissensus.core.predictive import Predictive, RunningSummary
from dissensus.core.trainable import connected_mesh
from dissensus.engine.cuda_graphs import CapturedFunction
from dissensus.engine.loader import Loader
from dissensus.engine.training_step import autocast
from dissensus.numerics.randomness import preserve_random_state
from dissensus.utils.checks import one_of
from dissensus.utils.torch_modes import set_attributes

log = logging.getLogger("dissensus")

PredictionPrecision = Literal["float32", "bf16"]
LITTLE, BEHIND = 2**26, 16  # numbers; batches, where the user's code does not run between them


class Answer(NamedTuple):
    """Outputs of the functions for one batch, on the posterior's device."""

    predictive: Predictive
    energy: Tensor | None  # (M, B, ...) energy of every member's logits; None if outputs are not logits


class FixedDraw:
    """M functions drawn once from a posterior, run batch by batch: all their numbers belong to the same functions.

    `compiled`: by torch.compile. `keeps_weights`: that the user's code, which may change weights, does not run between
    batches. `count`: number of batches to come, where it is known.
    """

    def __init__(
        self,
        posterior: Posterior,
        precision: PredictionPrecision = "float32",
        *,
        compiled: bool = False,
        keeps_weights: bool = True,
        count: int | None = None,
    ) -> None:
        prediction_precision("precision", precision)
        warn_of_precision(posterior, precision)
        with inference_context(posterior):
            self.drawn = posterior.draw()
        self.posterior, self.precision, self.compiled, self.device = posterior, precision, compiled, posterior.device
        self.members = self.drawn.members
        self.correction = posterior.current_correction()
        self.logits = isinstance(posterior.likelihood, Classification)
        self.portion, mesh = FunctionPartition(self.drawn), connected_mesh(posterior)
        if mesh is not None:
            self.portion = mesh.partition_functions(self.drawn, self.device, lambda: not posterior.network_is_random)

        @contextmanager
        def context() -> Iterator[None]:  # not a method, by which the functions would keep themselves in memory
            # Around a batch, or a part of one: between two, the caller's modes and random state are in place.
            with inference_context(posterior), precision_context(posterior, precision):
                yield

        self.context = context
        how: dict[str, Any] = {"context": context, "keeps": keeps_weights, "half": precision == "bf16"}
        how |= {"plain": not compiled, "count": count}
        self._describe = cache(
            lambda mine: CapturedFunction(_compile(mine.describe) if compiled else mine.describe, mine, **how)
        )
        self._everything = cache(
            lambda mine: CapturedFunction(partial(mine.map_members, _outputs_and_description), mine, **how)
        )

    @property
    def ignore_index(self) -> int | None:
        """The label of ignored places; None if all places count."""
        return getattr(self.posterior.likelihood, "ignore_index", None)

    def predict(self, x: Inputs) -> Predictive:
        """The mixture's prediction for one batch."""
        return self.answer(x, energy=False).predictive

    def answer(self, x: Inputs, *, energy: bool = True) -> Answer:
        """The mixture's prediction for one batch and, of logits, every member's energy, from one forward pass."""
        answer, maxima = self._answer(x, energy=energy and self.logits)
        check_diverged(self.posterior, maxima)
        return answer

    def answers(
        self, loader: Iterable[Any], check: Callable[[Batch], object], bring: Callable[[Batch], list[Tensor]]
    ) -> Iterator[tuple[Batch, Answer, list[Tensor], float]]:
        """(batch, answer, tensors, seconds) of every batch, answers on the host; the device has the next batch meanwhile.

        `check`: raises where a batch cannot be used; `bring`: tensors of a batch that are wanted on the host.
        """
        late = connected_mesh(self.posterior) is None  # on a mesh, an error must come with its batch

        def work(batch: Batch) -> Any:
            check(batch)
            found = self._start_answer(batch.x)
            return found if late else found()

        def start_batches() -> Iterator[tuple[Batch, Any, AsyncHostCopy]]:
            for batch, found in self.run_batches(work, self.posterior.read(loader, anywhere=not late)):
                yield batch, found, AsyncHostCopy(bring(batch))

        for batch, found, arriving in delay_by_one(start_batches()):
            answer, seconds = found() if late else found
            yield batch, answer, arriving.read(), seconds

    def _start_answer(self, x: Inputs) -> Callable[[], tuple[Answer, float]]:
        """A function that waits for (the answer on the host, the seconds it took); inputs on a device are checked, too."""
        timer = Timer(self.device)
        answer, maxima = self._answer(x, energy=self.logits)
        timer.stop()
        energy = [] if answer.energy is None else [answer.energy]
        arriving = AsyncHostCopy([maxima, largest_input(x), *energy, *answer.predictive.defining_tensors()])

        def read() -> tuple[Answer, float]:
            maxima, most, *described = arriving.read()
            check_input_values(most, x)
            check_diverged(self.posterior, maxima)
            first = described.pop(0) if energy else None
            return Answer(answer.predictive._like(described), first), timer.seconds()

        return read

    def _answer(self, x: Inputs, *, energy: bool) -> tuple[Answer, Tensor]:
        """The answer, with or without energies, and the members' maxima, which must be checked."""
        x = self.check_and_move(x)
        found = self.portion.gather_tensors(lambda: self.describe_local(x, outputs=energy))
        outputs, described = (found[0], found[1:]) if energy else (None, found)
        members, maxima = self.correct_members(self.drawn.likelihood.predictive(*described))
        # Energy of the members' logits at the temperature; a calibration of their mean does not change it.
        energies = None if outputs is None else -self.correction.correct_logits(outputs).double().logsumexp(2)
        return Answer(self.correction.correct_mixture(members), energies), maxima

    def check_and_move(self, x: Inputs, rows: int | None = None) -> Inputs:
        """Inputs on the device, which the network takes; `rows`: that it sees at a time."""
        x = batches.move_to_device(x, self.device)
        with precision_context(self.posterior, self.precision):
            self.posterior.check_inputs(next(batches.split_rows(x, rows)))
        return x

    def describe_local(self, x: Inputs, *, outputs: bool = False, rows: int | None = None) -> tuple[Tensor, ...]:
        """What the functions that run here say of x; `outputs`: after their raw outputs; `rows`: that they see at a time."""
        function = (self._everything if outputs else self._describe)(self.portion.local_functions)
        with batches.UnchangedInputs(x):
            parts = batches.split_rows(x, rows)
            if rows is None or not self.posterior.network_is_random:
                return function(*parts)
            return tuple(torch.cat(each, 1) for each in zip(*map(function, parts), strict=True))  # in the usual order

    def correct_members(self, predictive: Predictive, first: int = 0) -> tuple[Predictive, Tensor]:
        """(prediction of these members through the correction, their maxima for `check_diverged`)."""
        maxima: list[Tensor] = []
        return checked_members(self.posterior, predictive, self.correction, first=first, later=maxima), maxima[0]

    def run_batches(
        self, work: Callable[..., Any], read: Iterable[Any], device: Any = "cpu", *, whole: bool = False
    ) -> Iterator[tuple[Any, Any]]:
        """(batch, work(batch)) for every batch, in order. Processes of the mesh share the work; each gets all results.

        `device`: device for the results of other processes. `whole`: whether `work` runs all functions itself.
        """
        posterior, mesh = self.posterior, connected_mesh(self.posterior)
        if mesh is None or posterior.particles.divided:  # whose processes all run each network together
            return ((batch, work(batch)) for batch in read)
        standing: list[Any] = [e for e in (posterior.calibration, *posterior.promises.values()) if e is not None]
        seen_by = (posterior.temperature, *((repr(each.config()), *each.buffers()) for each in standing))
        portion = FunctionPartition(self.drawn) if whole else self.portion
        return mesh.map_batches(work, read, portion=portion, seen_by=seen_by, device=device)


@contextmanager
def draw_once(posterior: Posterior, precision: PredictionPrecision = "float32") -> Iterator[FixedDraw]:
    """Context with the functions of one draw, in eval mode without gradients; modes and random states are restored."""
    draw = FixedDraw(posterior, precision)
    with torch.no_grad(), preserve_random_state(posterior.device, mine=lambda: posterior.network_is_random):
        yield draw


def predict_loader(
    posterior: Posterior,
    loader: Loader,
    *,
    precision: PredictionPrecision = "float32",
    compiled: bool = False,
    keep_members: bool = True,
    one_at_a_time: bool = False,
    keeps_weights: bool = True,
    labelled: bool = False,
    as_mixture: bool = True,
) -> Iterator[tuple[Batch, Predictive]]:
    """(batch, predictive of all members, or their summary) of one batch after the other, by all processes on a mesh.

    Targets are on the posterior's device. `keeps_weights`: that the user's code, which may change weights, does not run between
    batches; small ones then come together, but networks see each alone. `labelled`: whether targets must fit the network's
    outputs. `as_mixture`: False leaves out the calibration of the mixture, for a caller that adds members up.
    """
    draw = FixedDraw(posterior, precision, compiled=compiled, keeps_weights=keeps_weights, count=loader.length)
    # On a mesh an error must come with its batch, so that all processes raise it.
    at_once = draw.device.type != "cuda" or connected_mesh(posterior) is not None
    late = LateChecks(at_once=at_once, behind=BEHIND if keeps_weights else 1)
    alone = posterior.inputs is not None or connected_mesh(posterior) is not None
    if alone or not (keep_members and keeps_weights and as_mixture):
        given = iter(loader)
    else:
        # Who asks for the shape of outputs tries the network, on a batch of the loader.
        asks = labelled or isinstance(posterior.likelihood, RealTargets)
        given = loader.joined_batches(asks, lambda: not posterior.network_is_random)
    prediction = _BatchPrediction(draw, late, one_at_a_time, loader)

    def check(batch: Batch) -> Batch:
        if labelled:
            posterior.check_batch(batch)
        return batch

    in_turn = [each for each in draw.drawn.modules() if isinstance(each, Particles)] if one_at_a_time else []
    with set_attributes(*in_turn, how="loop"):
        work = prediction.predict_members if keep_members else prediction.predict_summary
        read = map(check, posterior.read(given, anywhere=at_once))
        for batch, found in draw.run_batches(work, read, draw.device):
            late.end_batch()
            batch = batch._replace(y=batches.move_to_device(batch.y, draw.device))
            yield batch, draw.correction.correct_mixture(found) if as_mixture else found
        late.finish()


class _BatchPrediction:
    """Predicts batches of a loader with a draw and checks them, now or late. `one_at_a_time`: functions run in turn."""

    def __init__(self, draw: FixedDraw, late: "LateChecks", one_at_a_time: bool, loader: Loader) -> None:
        self.draw, self.late, self.one_at_a_time, self.loader = draw, late, one_at_a_time, loader

    def predict_members(self, batch: Batch) -> Predictive:
        """The prediction of all members."""
        draw, x = self.draw, self._check_and_move(batch.x)
        described = draw.portion.gather_tensors(lambda: draw.describe_local(x, rows=self.loader.rows))
        return self._correct_and_check(draw.drawn.likelihood.predictive(*described), 0)

    def predict_summary(self, batch: Batch) -> Predictive:
        """The summary of all members, of which few need to be in memory at a time."""
        x = self._check_and_move(batch.x)
        running, *others = self.draw.portion.gather_results(lambda: RunningSummary(self._predict_pieces(x)))
        for other in others:
            running.merge(other)
        return running.summary()

    def _check_and_move(self, x: Inputs) -> Inputs:
        self.late.add_input_check(x)
        return self.draw.check_and_move(x, self.loader.rows)

    def _correct_and_check(self, found: Predictive, first: int) -> Predictive:
        members, maxima = self.draw.correct_members(found, first)
        self.late.add(maxima, lambda values: check_diverged(self.draw.posterior, values, first=first))
        return members

    def _fits_one_graph(self, x: Inputs) -> bool:
        """Whether all functions may run from one graph on a GPU: what they say of a batch takes little memory."""
        if self.draw.device.type != "cuda" or self.one_at_a_time:
            return False
        return self.draw.members * self.draw.posterior.output_shape(x).numel() <= LITTLE

    def _predict_pieces(self, x: Inputs) -> Iterator[Predictive]:
        """The functions that run here, all at once or one by one."""
        draw, first = self.draw, self.draw.portion.first_local_index
        if draw.compiled or draw.drawn.particles.how == "vectorised" or self._fits_one_graph(x):
            yield self._correct_and_check(draw.drawn.likelihood.predictive(*draw.describe_local(x)), first)
            return
        found = draw.portion.local_functions.predict_parts(x)
        while True:
            with draw.context():
                piece = next(found, None)
            if piece is None:
                return
            yield self._correct_and_check(piece, first)
            first += len(piece.defining_tensors()[0])


def _compile(function: Callable[[Inputs], tuple[Tensor, ...]]) -> Callable[[Inputs], tuple[Tensor, ...]]:
    note = "prediction runs uncompiled: this network cannot be compiled (%s)"
    return FallbackChain(note, compiled=torch.compile(function, dynamic=False), plain=function)


def _outputs_and_description(member: Member, x: Inputs) -> tuple[Any, ...]:
    outputs = batches.call_network(member.network, x)
    return outputs, *member.likelihood.describe(outputs)


Item = TypeVar("Item")
MOST = 2**28  # bytes of inputs on a device whose checks are waited for


class AsyncHostCopy:
    """Tensors on their way to the host; `read()` waits for them, but not for what the device got to do afterwards."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
        # Without waiting only from a CUDA device, where the copy goes to pinned memory and an event shows its end.
        self._tensors = [tensor.to("cpu", non_blocking=tensor.device.type == "cuda") for tensor in tensors]
        self._event = None
        if device is not None:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def read(self) -> list[Tensor]:
        if self._event is not None:
            self._event.synchronize()
            # Pinned memory is slow to get and is not given back: the next batches use it again.
            self._event, self._tensors = None, [tensor.clone() for tensor in self._tensors]
        return self._tensors


class LateChecks:
    """Checks in a run over batches, of values that the device computes: done late, those of the first batch at once.

    `at_once`: all of them, as where values are on the host, or where several processes must raise together. `behind`: batches
    by which they are late, fewer if inputs are large: the device still has work while the host prepares a slow batch.
    """

    def __init__(self, *, at_once: bool, behind: int = 1) -> None:
        self.at_once, self.delay = at_once, behind
        self._new: list[tuple[Tensor, Callable[[Tensor], object]]] = []
        self._pending: deque[tuple[AsyncHostCopy, list[Callable[[Tensor], object]]]] = deque()
        self._first = True

    def add(self, values: Tensor, check: Callable[[Tensor], object]) -> None:
        """Calls check(values), which raises if they are bad."""
        if self.at_once:
            check(values)
        else:
            self._new.append((values, check))

    def add_input_check(self, x: Inputs) -> None:
        """Checks that x is finite, unless `at_once`: then the loader's batches are checked when they are read."""
        size = sum(each.nbytes for each in batches.input_tensors(x) if each.device.type != "cpu")
        if not self.at_once and size:
            self.delay = max(1, min(self.delay, MOST // size))
            self.add(largest_input(x), lambda values: check_input_values(values, x))

    def end_batch(self) -> None:
        """To be called after every batch."""
        if self.at_once:
            return
        self._start_copy()
        self._run_checks(0 if self._first else self.delay)
        self._first = False

    def finish(self) -> None:
        """Does all checks that are left."""
        self._start_copy()
        self._run_checks(0)

    def _start_copy(self) -> None:
        if self._new:
            values, checks = zip(*self._new, strict=True)
            self._new = []
            self._pending.append((AsyncHostCopy(values), [*checks]))

    def _run_checks(self, left: int) -> None:
        """Does the checks of all but so many batches."""
        while len(self._pending) > left:
            arriving, checks = self._pending.popleft()
            for values, check in zip(arriving.read(), checks, strict=True):
                check(values)


class Timer:
    """Measures the time from its making to `stop`, on a CUDA device without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._end = self._now()

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def stop(self) -> None:
        self._end = self._now()

    def seconds(self) -> float:
        """The time between; waits until it is known."""
        if self._device.type != "cuda":
            return float(self._end - self._start)
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1000


def delay_by_one(items: Iterable[Item]) -> Iterator[Item]:
    """The items, each when the next one has been made; the first at once."""
    waiting: list[Item] = []
    for number, item in enumerate(items):
        yield from waiting
        waiting = [item]
        if number == 0:
            yield waiting.pop()
    yield from waiting


def check_input_values(found: Tensor, x: Inputs) -> None:
    """Raises if what `largest` found in the inputs is not finite, if possible with their row."""
    if not float(found) < math.inf:
        batches.check_finite(x, anywhere=True)
        what = "NaN or infinity in a batch that has been overwritten since"
        raise ValueError(f"expected finite inputs, got {what}; clean the data (−inf is allowed, for masks)")


def largest_input(x: Inputs) -> Tensor:
    """() the largest entry of x on a device other than the host, NaN if there is one; what is on the host counts as 0."""
    given = [each for each in batches.input_tensors(x) if each.device.type != "cpu" and each.is_floating_point()]
    found = [tensor.amax() for tensor in given if tensor.numel()]
    if len(found) == 1:
        return found[0]
    return torch.stack([each.double() for each in found]).amax() if found else torch.zeros(())


def prediction_precision(name: str, value: PredictionPrecision) -> PredictionPrecision:
    """The value, "float32" or "bf16"."""
    half = "16" in str(value) or "half" in str(value)
    hint = 'half precision is "bf16", because float16 overflows above 65504' if half else ""
    return one_of(name, value, ("float32", "bf16"), hint=hint)


def precision_context(posterior: Posterior, precision: PredictionPrecision) -> AbstractContextManager[object]:
    """The context in which the posterior's networks run; likelihoods compute in float32 in any case."""
    return autocast(posterior.device, torch.bfloat16 if precision == "bf16" else None)


def warn_of_precision(posterior: Posterior, precision: PredictionPrecision) -> None:
    """Warns if predictions in bf16 get corrections and guarantees that were fitted to predictions in float32."""
    fitted = [*posterior.promises, *(["a calibration"] if posterior.calibration is not None else [])]
    fitted += ["a temperature"] if precision == "bf16" and float(posterior.temperature) != 1.0 else []
    if precision == "bf16" and fitted:
        what = "fitted to predictions in float32, applied to predictions in bf16, for which nothing is guaranteed"
        log.warning("%s: %s; predict in float32 where a guarantee must hold", ", ".join(fitted), what)
