"""The strength of the repulsion: its factor relative to a loss that is a mean over data."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dissensus.core.batch import Batch
from dissensus.core.posterior import Posterior
from dissensus.utils.checks import integer, number, one_of

Repulsion = Literal["1/B", "1/N"] | float


class RepellingPosterior(Posterior):
    """Base class of methods whose members repel each other; call `set_repulsion` in the constructor."""

    def set_repulsion(self, repulsion: Repulsion, batch_size: int | None) -> None:
        """Sets the strength of the repulsion."""
        self.repulsion, self.batch_size = repulsion, batch_size
        self.strength = Strength(repulsion, self.data_size, batch_size)

    def before_step(self, batch: Batch) -> None:
        super().before_step(batch)
        self.strength.note_batch_size(batch.size, training=self.training)


@dataclass
class Strength:
    """The factor c: "1/N", correct for a posterior with N = `data_size` points; "1/B", stronger by N/B; or a number.

    B is `batch_size`, or else the largest batch seen in training times the batches per step. So a smaller last batch repels
    no more strongly than others, and gradients accumulated over several batches no more than those of one large batch.
    """

    repulsion: Repulsion
    data_size: int | None
    batch_size: int | None = None
    largest: int = 0  # size of the largest batch seen in training
    last: int = 0  # size of the last batch seen

    def __post_init__(self) -> None:
        if isinstance(self.repulsion, str):
            one_of("repulsion", self.repulsion, ("1/B", "1/N"), hint="name one of them, or pass a number")
        else:
            number("repulsion", self.repulsion, least=0)
        if self.batch_size is not None:
            integer("batch_size", self.batch_size)
        if self.repulsion == "1/N" and self.data_size is None:
            raise ValueError('expected data_size with repulsion "1/N", got none; pass data_size=len(training_set)')

    def note_batch_size(self, size: int, *, training: bool) -> None:
        """Records the size of a batch; call it with every batch."""
        self.last = size
        if training:
            self.largest = max(self.largest, size)

    def __call__(self, size: int = 1, weight: Tensor | None = None, *, gathered: int = 1) -> Tensor | float:
        """c for a batch with weights (B,), one of `gathered` batches per step; 0 if all weights are 0.

        `size`: batch size, used if no batch was seen before.
        """
        strength = self._full_batch_strength(size, gathered)
        if weight is None:
            return strength
        # A sum over a batch is too large for float16.
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        total = weight.sum()
        share: Tensor | float = 1.0
        if self.repulsion == "1/B" and self.batch_size is None:
            # An example of weight two counts as two; examples of weight 0 make the batch smaller.
            share = (weight > 0).sum() / total.clamp(min=torch.finfo(weight.dtype).tiny)
        return strength * share * (total > 0)

    def _full_batch_strength(self, size: int, gathered: int) -> float:
        if self.repulsion == "1/N":
            return 1 / (self.data_size or 1)
        if self.repulsion != "1/B":
            return float(self.repulsion)
        return 1 / (self.batch_size or (self.largest or self.last or size) * gathered)
