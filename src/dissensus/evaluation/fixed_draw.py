"""One draw of a posterior, run batch by batch: all numbers of an evaluation belong to the same functions."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dissensus.core import batch as batches
from dissensus.core.batch import Inputs
from dissensus.core.drawn_functions import DrawnFunctions
from dissensus.core.likelihood import Classification
from dissensus.core.particles import Member
from dissensus.core.posterior import Posterior, check_diverged, checked_members, inference_context
from dissensus.core.predictive import Predictive
from dissensus.core.processes import connected_mesh, map_batches, partition_functions
from dissensus.engine.async_checks import AsyncHostCopy, Timer, check_input_values, largest_input
from dissensus.engine.captured_prediction import CapturedFunction
from dissensus.engine.precision import PredictionPrecision, precision_context, prediction_precision, warn_of_precision
from dissensus.numerics.randomness import preserve_random_state


class Answer(NamedTuple):
    """Outputs of the functions for one batch, on the posterior's device."""

    predictive: Predictive
    energy: Tensor | None  # (M, B, ...) energy of every member's logits; None if outputs are not logits


class FixedDraw:
    """M functions drawn once from a posterior. Call them only inside `draw_once`, which makes them."""

    def __init__(self, posterior: Posterior, drawn: DrawnFunctions, precision: PredictionPrecision = "float32") -> None:
        self.posterior = posterior
        self.precision = precision
        self.drawn = drawn
        self.members = drawn.members
        self.correction = posterior.current_correction()
        self.logits = isinstance(posterior.likelihood, Classification)
        self.portion = partition_functions(posterior, drawn)

        @contextmanager
        def context() -> Iterator[None]:  # for each batch: other threads run between
            with inference_context(posterior), precision_context(posterior, precision):
                yield

        how: dict[str, Any] = {"context": context, "keeps": True, "half": precision == "bf16"}
        self._describe = cache(lambda mine: CapturedFunction(mine.describe, mine, **how))
        self._everything = cache(
            lambda mine: CapturedFunction(partial(mine.map_members, _outputs_and_description), mine, **how)
        )

    @property
    def device(self) -> torch.device:
        return self.posterior.device

    @property
    def ignore_index(self) -> int | None:
        """The label of ignored places; None if all places count."""
        return getattr(self.posterior.likelihood, "ignore_index", None)

    @property
    def is_single_process(self) -> bool:
        """Whether no other process shares the work."""
        return connected_mesh(self.posterior) is None

    def predict(self, x: Inputs) -> Predictive:
        """The mixture's prediction for one batch."""
        answer, maxima = self._answer(x, energy=False)
        check_diverged(self.posterior, maxima)
        return answer.predictive

    def answer(self, x: Inputs) -> Answer:
        """The mixture's prediction and every member's energy for one batch, from one forward pass."""
        answer, maxima = self._answer(x, energy=self.logits)
        check_diverged(self.posterior, maxima)
        return answer

    def start_answer(self, x: Inputs) -> Callable[[], tuple[Answer, float]]:
        """A function that waits for what `answer(x)` gives: (the answer on the host, the seconds it took).

        Until then the device can go on with another batch. Inputs on a device are checked to be finite, too.
        """
        timer = Timer(self.device)
        answer, maxima = self._answer(x, energy=self.logits)
        timer.stop()
        made, with_energy = type(answer.predictive), answer.energy is not None
        energy = [answer.energy] if answer.energy is not None else []
        arriving = AsyncHostCopy([maxima, largest_input(x), *energy, *answer.predictive.defining_tensors()])

        def read() -> tuple[Answer, float]:
            maxima, most, *described = arriving.read()
            check_input_values(most, x)
            check_diverged(self.posterior, maxima)
            energy = described.pop(0) if with_energy else None
            return Answer(made(*described), energy), timer.seconds()

        return read

    def _answer(self, x: Inputs, *, energy: bool) -> tuple[Answer, Tensor]:
        """The answer, with or without energies, and the members' maxima, which must be checked."""
        said = self._run_function(self._everything if energy else self._describe, x)
        outputs, described = (said[0], said[1:]) if energy else (None, said)
        maxima: list[Tensor] = []
        predictive = self.drawn.likelihood.predictive(*described)
        members = checked_members(self.posterior, predictive, self.correction, later=maxima)
        # Energy of the members' logits at the temperature; a calibration of their mean does not change it.
        energies = None if outputs is None else -self.correction.correct_logits(outputs).double().logsumexp(2)
        return Answer(self.correction.correct_mixture(members), energies), maxima[0]

    def run_batches(
        self, work: Callable[[Any], Any], given: Iterable[Any], device: Any = "cpu"
    ) -> Iterator[tuple[Any, Any]]:
        """Yields (batch, work(batch)) in order, with result tensors on `device`: see `map_batches`."""
        return map_batches(self.posterior, work, given, self.portion, device)

    def _run_function(self, function: Callable[[DrawnFunctions], CapturedFunction], x: Inputs) -> Any:
        x = batches.move_to_device(x, self.device)
        with precision_context(self.posterior, self.precision):
            self.posterior.check_inputs(x)
        with batches.UnchangedInputs(x):
            return self.portion.gather_tensors(lambda: function(self.portion.local_functions)(x))


@contextmanager
def draw_once(posterior: Posterior, precision: PredictionPrecision = "float32") -> Iterator[FixedDraw]:
    """Context with the functions of one draw, in eval mode without gradients; modes and random states are restored."""
    prediction_precision("precision", precision)
    warn_of_precision(posterior, precision)
    with inference_context(posterior):
        drawn = posterior.draw()
    with torch.no_grad(), preserve_random_state(posterior.device, mine=lambda: posterior.network_is_random):
        yield FixedDraw(posterior, drawn, precision)


def _outputs_and_description(member: Member, x: Inputs) -> tuple[Any, ...]:
    outputs = batches.call_network(member.network, x)
    return outputs, *member.likelihood.describe(outputs)
