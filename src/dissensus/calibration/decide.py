"""decide: the prediction, sets and gates of a posterior for a batch of inputs, from one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dissensus.calibration.conformal import Conformal
from dissensus.calibration.selective import Gate
from dissensus.core.posterior import Posterior, expect_posterior
from dissensus.core.predictive import CategoricalPredictive, Predictive


def decide(posterior: Posterior, x: Any, *, weight: Tensor | None = None, group: Tensor | None = None) -> Decision:
    """Predicts a batch of inputs once and applies every promise of the posterior to the prediction.

    Args:
        posterior: a posterior with promises: `ds.conformal`, `ds.selective`, `ds.ood_gate`; saved ones are loaded with it.
        x: inputs (B, ...), as in `posterior.predict`.
        weight, group: (B,) as in `Conformal.set`, for promises that need them.

    Raises:
        ValueError: the posterior has no promise that holds for its present predictions.
    """
    promises = dict(expect_posterior(posterior).promises.items())  # of the present predictions: checked once for all
    if not promises:
        raise ValueError("expected a posterior with promises, got none; call ds.conformal, ds.selective or ds.ood_gate")
    predictive = posterior.predict(x)
    sets = {n: each.decide(predictive, x, weight, group) for n, each in promises.items() if isinstance(each, Conformal)}
    gates = {name: gate.decide(predictive).accept for name, gate in promises.items() if isinstance(gate, Gate)}
    return Decision(predictive, sets, gates, posterior.classes)


class Decision(NamedTuple):
    """The result of `ds.decide` for B inputs."""

    predictive: Predictive
    sets: dict[str, Tensor | tuple[Tensor, Tensor]]  # name -> (B, K) boolean; for a regression (lower, upper)
    gates: dict[str, Tensor]  # name -> (B,) boolean: whether the gate accepts the input
    classes: Sequence[str] | None  # the posterior's

    @property
    def accept(self) -> Tensor:
        """(B,) boolean: whether all gates accept the input; True without gates."""
        every = torch.ones(len(self.predictive), dtype=torch.bool, device=self.predictive.mean.device)
        return torch.stack([every, *self.gates.values()]).all(0)

    def to_dicts(self) -> list[dict[str, Any]]:
        """One dict per input, of JSON values: prediction, uncertainties, each promise by name, and `accept`."""
        predictive = self.predictive
        columns: dict[str, list[Any]] = {"prediction": predictive.mean.tolist()}
        if isinstance(predictive, CategoricalPredictive):
            names = list(self.classes or range(predictive.mean.shape[1]))
            columns = {"prediction": [names[k] for k in predictive.mean.argmax(1).tolist()]}
            columns["confidence"] = predictive.confidence.tolist()
        columns |= {name: getattr(predictive, name).tolist() for name in ("total", "aleatoric", "epistemic")}
        for name, found in self.sets.items():
            if isinstance(found, Tensor):
                columns[name] = [[names[k] for k in row.nonzero()[:, 0].tolist()] for row in found]
            else:
                columns[name] = [list(ends) for ends in zip(*(end.tolist() for end in found), strict=True)]
        columns |= {name: found.tolist() for name, found in (self.gates | {"accept": self.accept}).items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
