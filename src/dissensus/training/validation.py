"""Validation: the score of each epoch on held-out data, and the state of the best one."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from dissensus.core.drawn_functions import DrawnFunctions
from dissensus.core.likelihood import log_prob_sum
from dissensus.core.posterior import Posterior, checked_prediction, inference_context
from dissensus.core.trainable import Watchers
from dissensus.distributed.partition import TrainingPartition
from dissensus.engine.loader import Loader
from dissensus.methods.parts.sampling_posterior import RecordingPosterior
from dissensus.methods.snapshots import evenly_spaced
from dissensus.training.history import Best, Epoch, History
from dissensus.utils.shared_tensors import memory_place

LOOKS = 10  # most looks in a run: a look costs a draw


class Validation:
    """Scores the epochs of a run and keeps the best state. `loader`: None scores and keeps nothing."""

    def __init__(
        self,
        posterior: Posterior,
        loader: Iterable[Any] | None,
        division: TrainingPartition,
        best: Best,
        epochs: int,
        patience: int | None,
    ) -> None:
        self.posterior, self.division, self.epochs, self.patience = posterior, division, epochs, patience
        self.best = best
        self.loader = None if loader is None else division.complete_loader(Loader.for_posterior(loader, posterior))

    def scores(self, epoch: int) -> tuple[float | None, float | None]:
        """Negative log-likelihoods after this epoch: of the networks in training, and of functions drawn to be judged."""
        if self.loader is None:
            return None, None
        score = validation_nll(self.posterior, self.loader, None, self.division)
        drawn = draw_for_validation(self.posterior, epoch, self.epochs, self.loader)
        return score, None if drawn is None else validation_nll(self.posterior, self.loader, drawn, self.division)

    def add_epoch(self, epoch: Epoch, history: History) -> None:
        """Scores an epoch, adds it to the history, and keeps the present state if it is the best so far."""
        epoch.validation, epoch.look = self.scores(epoch.epoch)
        history.epochs.append(epoch)
        score = epoch.selection_score
        if score is not None and score < self.best.score and can_keep_epoch(self.posterior, epoch.epoch, self.epochs):
            own = [(k, v) for k, v in self.posterior.state_dict().items() if not k.startswith("watchers.")]
            frozen = {memory_place(p) for p in self.posterior.parameters() if not p.requires_grad}  # held, not copied
            self.best = Best(score, epoch.epoch, {k: v if memory_place(v) in frozen else v.clone() for k, v in own})
            history.best = epoch

    def remaining_epochs(self, first: int) -> Iterator[int]:
        """The epochs from this one on, until `patience` of them were no better than the best."""
        for epoch in range(first, self.epochs + 1):
            judged = self.best.state is not None and can_keep_epoch(self.posterior, epoch - 1, self.epochs)
            if self.patience is not None and judged and epoch - 1 - self.best.epoch >= self.patience:
                return
            yield epoch

    def restore_best(self) -> None:
        """Puts the best state back; watchers keep their records of the whole run."""
        if self.best.state is not None:
            watchers, self.posterior.watchers = self.posterior.watchers, Watchers()
            self.posterior.load_state_dict(self.best.state)
            self.posterior.watchers = watchers


def can_keep_epoch(posterior: Posterior, epoch: int, epochs: int) -> bool:
    """Whether validation may keep the state after this epoch, counted from 1.

    No epoch of a trajectory; if functions are drawn, up to ten evenly spaced ones of the last quarter, including the last.
    """
    first, every = evenly_spaced(epochs, LOOKS) if posterior.judged_by == "draw" else (0, 1)
    return posterior.judged_by is not None and posterior.ready and epoch > first and (epoch - 1 - first) % every == 0


def draw_for_validation(
    posterior: Posterior, epoch: int, epochs: int, validation: Iterable[Any]
) -> DrawnFunctions | None:
    """The functions drawn to evaluate this epoch; None if the networks in training are evaluated, or nothing is."""
    drawn = posterior.judged_by == "draw" and can_keep_epoch(posterior, epoch, epochs)
    if drawn and isinstance(posterior, RecordingPosterior):
        with inference_context(posterior):
            return posterior.draw_for_validation(validation)
    return None


def validation_nll(
    posterior: Posterior,
    loader: Iterable[Any],
    drawn: DrawnFunctions | None = None,
    division: TrainingPartition | None = None,
) -> float:
    """Mean negative log-likelihood of the mixture over a loader, with one draw, by default `current()`.

    With a division, each process evaluates some of the batches.
    """

    def sums(some: Iterable[Any]) -> tuple[float, float]:
        total, count = 0.0, 0.0
        with inference_context(posterior):
            functions = posterior.current() if drawn is None else drawn
            for given in posterior.read(some, anywhere=True):
                x, y, weight = posterior.prepare_batch(given)
                predictive = checked_prediction(posterior, functions.predict(x))
                found, counted = log_prob_sum(posterior.likelihood, predictive, y, weight)
                total, count = total + float(found), count + float(counted)
        return total, count

    # An error of one process, at its batches, is one of all: the others would wait for its sums.
    division = division or TrainingPartition(posterior, Loader(()))
    everyone = division.share_batches(sums, loader, "validation scores")
    total, count = (math.fsum(each) for each in zip(*everyone, strict=True))
    if not count:
        raise ValueError("expected at least one example to validate on, got none; pass a loader with data")
    return -total / count
