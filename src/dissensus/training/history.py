"""What training gave: one entry per epoch."""

import math
from dataclasses import dataclass, field

from torch import Tensor

from dissensus.engine.memory import Memory


@dataclass
class Epoch:
    """What one epoch of training gave; what `fit` passes to its callback.

    Args:
        epoch: its number, from 0.
        loss: mean over members and batches.
        members: M mean losses.
        lr: learning rate of the first parameter group.
        seconds: of training, without validation.
        validation: negative log-likelihood of the mixture; None without validation data.
        look: the same of what would be sampled, where a method is judged by that (TRADI).
    """

    epoch: int
    loss: float  # mean over members and batches
    members: list[float]  # mean over batches, one per member
    lr: float
    seconds: float
    validation: float | None = None  # negative log-likelihood of the mixture
    look: float | None = None  # the same of what would be sampled, where a method is judged by that (TRADI)

    @property
    def judge(self) -> float | None:
        """The score, lower is better, by which the state after this epoch is kept; None without validation."""
        return self.validation if self.look is None else self.look


@dataclass
class History:
    """What `fit` returns: one entry per epoch, and which one was kept. `history[-1]` is the last `Epoch`.

    Args:
        epochs: one `Epoch` each.
        best: the epoch kept by validation; None where none was chosen.
        engine: how members ran, as in `fit(engine=...)`.
        memory: what training was expected to need, in bytes.
        drawing: seconds at the end, in which functions were drawn and stored.
    """

    epochs: list[Epoch] = field(default_factory=list)
    best: int | None = None  # the epoch kept by validation; None where none was chosen
    engine: str | None = None  # how members ran
    memory: Memory | None = None  # what training was expected to need
    drawing: float = 0.0  # seconds at the end, in which functions were drawn and stored

    def __len__(self) -> int:
        return len(self.epochs)

    def __getitem__(self, index: int) -> Epoch:
        return self.epochs[index]


@dataclass
class Best:
    """The best state so far, by validation."""

    score: float = math.inf
    epoch: int = 0
    state: dict[str, Tensor] | None = None

    def better(self, score: float) -> bool:
        return score < self.score
