"""The history of a training run: one entry per epoch, the best one, and the part done of the present one."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dissensus.engine.memory import Memory
from dissensus.numerics.randomness import preserve_random_state
from dissensus.utils.arrays import as_dataframe
from dissensus.utils.checks import ListedAttributes
from dissensus.utils.progress import Progress


@dataclass
class Epoch:
    """The result of one epoch of training; `fit` passes it to its callback.

    Args:
        epoch: its number, from 1.
        loss: mean loss over members and batches.
        members: M mean losses, one per member.
        lr: learning rate of the first parameter group.
        seconds: training time in seconds, without validation.
        validation: negative log-likelihood of the mixture in nats; None without validation data.
        look: the same for the functions that would be sampled, for methods evaluated by them (TRADI); else None.
    """

    epoch: int
    loss: float  # mean over members and batches
    members: list[float]  # mean over batches, one per member
    lr: float
    seconds: float
    validation: float | None = None  # negative log-likelihood of the mixture
    look: float | None = None  # the same for the functions that would be sampled (TRADI)

    @property
    def selection_score(self) -> float | None:
        """The score, lower is better, by which `fit` chooses the epoch to keep; None without validation."""
        return self.validation if self.look is None else self.look

    def row(self) -> dict[str, Any]:
        """Its numbers by name, first "epoch"; losses of members are member0, member1, ...."""
        own = {name: getattr(self, name) for name in ("epoch", "loss", "validation", "lr", "seconds")}
        return own | {f"member{i}": loss for i, loss in enumerate(self.members)}


class TrainingStep:
    """One optimiser step; `fit` passes it to `on_step`. Its values are read from the device only if they are asked for.

    Args:
        step: the posterior's steps so far, from 1.
        losses: (M,) mean losses of its batches, of the members that this process trains.
        lr: learning rate of the first parameter group; as an attribute a number.
    """

    def __init__(self, step: int, losses: Tensor, lr: float | Tensor) -> None:
        self.step, self.losses = step, losses
        self._lr = lr.clone() if isinstance(lr, Tensor) else lr  # a tensor of captured steps is changed in place

    lr = property(lambda self: float(self._lr))
    loss = property(lambda self: float(self.losses.mean()))

    def row(self) -> dict[str, Any]:
        """Its numbers by name, first "step", as in `Epoch.row`."""
        own = {name: getattr(self, name) for name in ("step", "loss", "lr")}
        return own | {f"member{i}": loss for i, loss in enumerate(self.losses.tolist())}


@dataclass(repr=False)
class History(ListedAttributes):
    """The result of `fit`: one entry per epoch, and which one was kept. `history[-1]` is the last `Epoch`.

    Args:
        epochs: a list of `Epoch`.
        best: the `Epoch` kept by validation; None if none was chosen.
        engine: how members ran at the end, as in `fit(engine=...)`, and since which batch, with the seconds that decided it.
        memory: the expected memory of training, in bytes.
        drawing: seconds spent at the end to draw and store functions.
    """

    epochs: list[Epoch] = field(default_factory=list)
    best: Epoch | None = None  # kept by validation; None if none was chosen
    engine: str | None = None  # how members ran
    memory: Memory | None = None  # the expected memory of training
    drawing: float = 0.0  # seconds spent at the end to draw and store functions

    def __len__(self) -> int:
        return len(self.epochs)

    def __getitem__(self, index: int) -> Epoch:
        return self.epochs[index]

    def __repr__(self) -> str:
        kept = "" if self.best is None else f", kept epoch {self.best.epoch}"
        scores = f", loss {self.epochs[-1].loss:.4g}" if self.epochs else ""
        if self.epochs and (validation := self.epochs[-1].validation) is not None:
            scores += f", validation {validation:.4g}"
        seconds = sum(epoch.seconds for epoch in self.epochs)
        return f"History({len(self)} epochs{scores}{kept}, {seconds:.1f} s, engine {self.engine})"

    def _repr_html_(self) -> str:
        ends = [*self.epochs[:3], *self.epochs[3:][-3:]]
        head = "<th>epoch</th><th>loss</th><th>validation</th><th>learning rate</th><th>seconds</th>"
        body = "".join(
            f"<tr><td>{e.epoch}</td><td>{e.loss:.4f}</td><td>{'' if e.validation is None else f'{e.validation:.4f}'}</td>"
            f"<td>{e.lr:.3g}</td><td>{e.seconds:.2f}</td></tr>"
            for e in ends
        )
        return f"<p><code>{escape(repr(self))}</code></p><table><tr>{head}</tr>{body}</table>"

    def to_dataframe(self) -> Any:
        """A pandas.DataFrame with one row per epoch and a loss column per member."""
        return as_dataframe([epoch.row() for epoch in self.epochs], index="epoch")

    def plot(self) -> Any:
        """A matplotlib figure of the losses over epochs: members, their mean, validation and the epoch kept."""
        from dissensus.plots.charts import notebook_figure  # loads matplotlib
        from dissensus.plots.prediction_figures import training_figure

        if not self.epochs:
            raise ValueError("expected a history with epochs to plot, got an empty one; train for at least one epoch")
        validation = np.array([math.nan if e.selection_score is None else e.selection_score for e in self.epochs])
        best = None if self.best is None else self.best.epoch
        return notebook_figure(training_figure(np.array([e.members for e in self.epochs]), validation, best=best))


@dataclass
class Best:
    """The best state so far, by validation."""

    score: float = math.inf
    epoch: int = 0
    state: dict[str, Tensor] | None = None


@dataclass
class PartialEpoch:
    """The first batches of an epoch: number, examples, summed losses (M,), seconds; and the state at the epoch's beginning.

    A run that SIGTERM interrupted continues from it.
    """

    random: Tensor | None = None  # torch's random state at the beginning, on the host and on the GPU
    cuda: Tensor | None = None
    loader: dict[str, Any] | None = None
    batches: int = 0
    examples: int = 0
    total: Tensor | None = None
    seconds: float = 0.0

    def remaining_batches(self, loader: Iterable[Any], device: torch.device, bar: Progress) -> Iterator[Any]:
        """The loader's batches after this part; the loader is in its state at the beginning of the epoch."""
        if self.random is None or not self.batches:
            return iter(loader)
        with preserve_random_state(device):  # later draws are those that would have followed the last of these batches
            torch.set_rng_state(self.random.cpu())
            if self.cuda is not None and device.type == "cuda":
                torch.cuda.set_rng_state(self.cuda.cpu(), device)
            batches = iter(loader)
            for _ in range(self.batches):
                next(batches)
                bar.step()
        return batches
