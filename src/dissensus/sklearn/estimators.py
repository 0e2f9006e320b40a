"""Classifier and Regressor: a method of this library with all that a table needs around it."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_consistent_length, check_is_fitted, column_or_1d
from torch import Tensor, nn

from dissensus.core.likelihood import Classification, Likelihood
from dissensus.core.optimisation import refusal
from dissensus.core.posterior import Posterior
from dissensus.core.predictive import CategoricalPredictive, Predictive, RegressionPredictive
from dissensus.core.regression import HeteroscedasticRegression
from dissensus.data.batches import Batches, check_index
from dissensus.data.frames import TableEncoder
from dissensus.data.standardise import Standardiser
from dissensus.guarantees.conformal import ConformalScore, conformal
from dissensus.nets import MLP
from dissensus.numerics.checks import number, one_of, share, whole
from dissensus.numerics.damage import reading
from dissensus.sklearn.methods import posterior_of
from dissensus.sklearn.rows import checked_table, ordered, repeated, split_rows, taken
from dissensus.standing.conformal import Conformal
from dissensus.standing.quantiles import least_rows
from dissensus.standing.scores import lac
from dissensus.storage import load as load_posterior
from dissensus.storage import save as save_posterior
from dissensus.storage.atomic import write_whole
from dissensus.train import fit

TABLE = "table.json"
STEPS = 2000  # of a run where `epochs` is None, within 20 to 200 epochs
LEAST = 20  # rows to judge an epoch by; with fewer the last epoch is kept


class Interval(NamedTuple):
    """What `Regressor.predict(X, interval=0.9)` gives, arrays of the targets' shape in their units."""

    mean: np.ndarray
    lower: np.ndarray
    upper: np.ndarray


class _TableEstimator(BaseEstimator):  # type: ignore[misc]
    """Base class of `Classifier` and `Regressor`.

    Args:
        method: a name of `ds.METHODS`, or a class of your own.
        members: networks, or members of one; None: 5 of a method built from several networks, else the method's own.
        settings: further keywords of the method, a dict.
        hidden: widths of the network's hidden layers.
        network: a function (inputs, outputs) -> module in place of that network.
        likelihood: what its outputs mean; None: `Classification()`, `HeteroscedasticRegression()`.
        epochs: at most; None: about 2,000 steps, within 20 to 200 epochs.
        batch_size: None: a sixteenth of the rows, within 32 to 256.
        lr, weight_decay: of AdamW, with the method's schedule; a method with an optimiser of its own takes that.
        validation: share of the rows that judge epochs: the best one is kept. 0, or fewer than 20 rows: the last.
        conformal: share of the rows that nothing else is done with but to calibrate intervals and sets: those of a new row
            then hold its target with the probability asked for. 0: the mixture's own, as good as the posterior.
        patience: epochs without a better score after which training stops; None never stops early.
        categories: columns whose numbers are codes, by name or position.
        device: where to train; predictions are made on the CPU, in float64.
        random_state: of the networks, the split and the order of batches; None differs from fit to fit.
    """

    _score: ClassVar[ConformalScore]

    def __init__(
        self,
        method: str | type[Posterior] = "deep_ensemble",
        *,
        members: int | None = None,
        settings: dict[str, Any] | None = None,
        hidden: Sequence[int] = (128, 128),
        network: Callable[[int, int], nn.Module] | None = None,
        likelihood: Likelihood | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        lr: float = 3e-3,
        weight_decay: float = 1e-2,
        validation: float = 0.1,
        conformal: float = 0.0,
        patience: int | None = 30,
        categories: Sequence[str | int] = (),
        device: str = "cpu",
        random_state: Any = None,
    ) -> None:
        self.method = method
        self.members = members
        self.settings = settings
        self.hidden = hidden
        self.network = network
        self.likelihood = likelihood
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.weight_decay = weight_decay
        self.validation = validation
        self.conformal = conformal
        self.patience = patience
        self.categories = categories
        self.device = device
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """This, trained on rows X with targets y; a DataFrame and a Series are paired by their index.

        The order of rows does not matter. `sample_weight`: how often each row counts.
        """
        for name in ("validation", "conformal"):
            number(name, getattr(self, name), least=0, below=1)
        if y is None:
            raise ValueError(
                f"{type(self).__name__} requires y to be passed, but the target y is None; pass the targets of the rows"
            )
        check_index(X, y, sample_weight)
        table = checked_table(self, X, reset=True)
        targets = self._targets(y)
        check_consistent_length(X, targets)
        rows, weights = repeated(X, targets, sample_weight)
        order, groups = ordered(table, targets, rows)
        rows, weights = rows[order], None if weights is None else weights[order]
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        labels = targets[rows] if targets.dtype == np.int64 else None
        shares = (self.conformal, self.validation)
        train, calibrating, held = split_rows(groups, shares, seed=seed, labels=labels, least=LEAST)
        if self.conformal and not len(calibrating):
            raise ValueError(
                f"expected at least {LEAST} rows to calibrate on, got {self.conformal:g} of {len(rows)}; pass more rows, or a "
                "larger share as conformal="
            )
        self.encoder_ = TableEncoder.of(taken(table, rows[train]), categories=self.categories)
        self._measure(targets[rows[train]])

        def batch_tensors(part: np.ndarray) -> list[Any]:
            weight = None if weights is None else torch.from_numpy(weights[part]).float()
            return [self.encoder_(taken(table, rows[part])), self._encoded(targets[rows[part]]), weight]

        with torch.random.fork_rng(devices=[] if self.device == "cpu" else None):
            torch.manual_seed(seed)
            self._train(batch_tensors(train), batch_tensors(held) if len(held) else None, seed)
            if len(calibrating):
                x, y, weight = batch_tensors(calibrating)
                rows_left = Batches(x.double(), y, weight=weight, batch_size=1024)
                conformal(self.posterior_, rows_left, score=self._score)
        return self

    def _train(self, train: list[Any], held: list[Any] | None, seed: int) -> None:
        x, y, weight = train
        outputs, likelihood = self._outputs(y)
        size = self.batch_size or min(256, max(32, len(x) // 16))
        batches = Batches(x, y, weight=weight, batch_size=whole("batch_size", size), shuffle=True, seed=seed)
        epochs = self.epochs or min(200, max(20, math.ceil(STEPS / len(batches))))
        posterior = posterior_of(
            self.method,
            lambda: (self.network or self._network)(x.shape[1], outputs),
            likelihood=likelihood,
            members=self.members,
            data_size=len(x),
            settings=dict(self.settings or {}),
        )
        optimizer = scheduler = None
        if refusal(posterior, torch.optim.AdamW) is None:
            groups = posterior.parameter_groups(self.lr, self.weight_decay, likelihood_lr=max(self.lr, 1e-2))
            optimizer = torch.optim.AdamW(groups, lr=self.lr, fused=True)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, posterior.default_schedule(epochs))
        judged = held is not None and posterior.goes_back
        self.history_ = fit(
            posterior,
            batches,
            epochs=epochs,
            validation=Batches(held[0], held[1], weight=held[2], batch_size=1024) if judged and held else None,
            patience=self.patience if judged else None,
            optimizer=optimizer,
            scheduler=scheduler,
            precision="float32",
            device=self.device,
            progress=False,
        )
        self.posterior_ = posterior.cpu().double()

    def _network(self, inputs: int, outputs: int) -> nn.Module:
        return MLP(inputs, outputs, hidden=self.hidden)

    def predictive(self, X: Any) -> Predictive:
        """The prediction with every member, in float64, in the units of y: `.epistemic`, `.sample`, `.quantile`, …"""
        check_is_fitted(self)
        x = self.encoder_(checked_table(self, X, reset=False), dtype=torch.float64)
        parts = [x[start : start + 4096] for start in range(0, len(x), 4096)]
        found: Predictive = self._in_units(Predictive.cat([self.posterior_.predict(part) for part in parts]))
        return found

    def _threshold(self, level: float) -> Tensor | None:
        """(1, P) the calibration rows' score at this level; None where nothing was calibrated."""
        share("level", level, hint="pass for example 0.9")
        if "conformal" not in self.posterior_.promises:
            return None
        promise = self.posterior_.promises["conformal"]
        assert isinstance(promise, Conformal)
        if promise.rows < least_rows(level):
            raise ValueError(
                f"expected a level that {promise.rows} calibration rows can promise, got {level:g}, which needs "
                f"{least_rows(level)}; pass a lower one, or fit with more rows"
            )
        tensors = {name: getattr(promise, name) for name in ("scores", "mass", "sizes", "groups")}
        return Conformal({**promise.facts, "level": level}, tensors).thresholds(torch.ones(1, dtype=torch.float64))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes all of it into one folder, without a pickle: `ds.sklearn.load` reads it. Objects among the arguments
        (a network's function, a likelihood) are not kept: what is loaded predicts, and would train with the defaults."""
        check_is_fitted(self)
        given = self.get_params(deep=False)
        plain = {
            key: value
            for key, value in given.items()
            if isinstance(value, str | int | float | tuple | list | dict | None)
        }
        state = {
            "estimator": type(self).__name__,
            "arguments": plain,
            "columns": self.n_features_in_,
            "names": list(map(str, getattr(self, "feature_names_in_", ()))),
            "encoder": self.encoder_.config(),
            **self._state(),
        }
        text = json.dumps(state)
        save_posterior(self.posterior_, folder)
        write_whole({Path(folder) / TABLE: text.encode()})

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.string = tags.input_tags.categorical = True
        return tags


class Classifier(ClassifierMixin, _TableEstimator):  # type: ignore[misc]
    __doc__ = f"""Class probabilities for rows of a table, in scikit-learn's manner.

    Labels may be text or any numbers; `classes_` has them in the order of the probabilities.
    {(_TableEstimator.__doc__ or "").partition(chr(10))[2]}"""

    _score = "lac"

    def predict(self, X: Any) -> np.ndarray:
        """(N,) the likeliest labels."""
        likeliest = self.predict_proba(X).argmax(1)
        labels: np.ndarray = self.classes_[likeliest]
        return labels

    def predict_proba(self, X: Any) -> np.ndarray:
        """(N, C) probabilities of the mixture."""
        return self.predictive(X).mean.numpy()

    def predict_set(self, X: Any, level: float = 0.9) -> np.ndarray:
        """(N, C) whether each class is in the set: conformal, or the fewest whose probabilities sum to at least `level`."""
        predictive = self.predictive(X)
        assert isinstance(predictive, CategoricalPredictive)
        threshold = self._threshold(level)
        if threshold is None:
            return predictive.credible_set(level).numpy()
        return (lac(predictive, torch.zeros(len(predictive)), {}) <= threshold).numpy()

    def _targets(self, y: Any) -> np.ndarray:
        labels = column_or_1d(y, warn=True)
        check_array(labels, ensure_2d=False, dtype=None, ensure_all_finite=True, input_name="y")
        check_classification_targets(labels)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"expected at least two classes, got one class, {self.classes_[0]!r}; pass rows of others, too"
            )
        return codes.astype(np.int64)

    def _measure(self, targets: np.ndarray) -> None:
        pass

    def _encoded(self, targets: np.ndarray) -> Tensor:
        return torch.from_numpy(targets)

    def _outputs(self, y: Tensor) -> tuple[int, Likelihood]:
        return len(self.classes_), copy.deepcopy(self.likelihood) or Classification()

    def _in_units(self, predictive: Predictive) -> Predictive:
        return predictive

    def _state(self) -> dict[str, Any]:
        return {"classes": self.classes_.tolist(), "dtype": self.classes_.dtype.str}

    def _restore(self, state: dict[str, Any]) -> None:
        self.classes_ = np.array(state["classes"], dtype=state["dtype"])


class Regressor(RegressorMixin, _TableEstimator):  # type: ignore[misc]
    __doc__ = f"""Predictive distributions of real targets for rows of a table, in scikit-learn's manner.

    Targets (N,) or (N, D) are standardised by the training rows; all that comes back is in their units.
    {(_TableEstimator.__doc__ or "").partition(chr(10))[2]}"""

    _score = "residual"

    def predict(self, X: Any, interval: float | None = None) -> np.ndarray | Interval:
        """(N,) or (N, D) means; with `interval`, a level such as 0.9, an `Interval` of mean, lower and upper.

        Conformal intervals are mean ± threshold · deviation, the others the mixture's central ones.
        """
        predictive = self.predictive(X)
        found = [predictive.mean]
        if interval is not None and (threshold := self._threshold(interval)) is not None:
            half = threshold * predictive.total.sqrt()
            found += [predictive.mean - half, predictive.mean + half]
        elif interval is not None:
            found += predictive.interval(interval)
        arrays = [each.numpy() if self.targets_2d_ else each[:, 0].numpy() for each in found]
        return arrays[0] if interval is None else Interval(*arrays)

    def _targets(self, y: Any) -> np.ndarray:
        targets: np.ndarray = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")
        self.targets_2d_ = targets.ndim > 1
        return targets.reshape(len(targets), -1)

    def _measure(self, targets: np.ndarray) -> None:
        self.scale_ = Standardiser.of_rows(np.sort(targets, axis=0))  # sums do not depend on the order

    def _encoded(self, targets: np.ndarray) -> Tensor:
        return self.scale_(targets)

    def _outputs(self, y: Tensor) -> tuple[int, Likelihood]:
        likelihood = copy.deepcopy(self.likelihood) or HeteroscedasticRegression()
        return y.shape[1] * (2 if isinstance(likelihood, HeteroscedasticRegression) else 1), likelihood

    def _in_units(self, predictive: Predictive) -> Predictive:
        means, variances = predictive.described()
        return RegressionPredictive(self.scale_.inverse(means), variances * self.scale_.std**2)

    def _state(self) -> dict[str, Any]:
        return {"mean": self.scale_.mean.tolist(), "std": self.scale_.std.tolist(), "targets_2d": self.targets_2d_}

    def _restore(self, state: dict[str, Any]) -> None:
        mean, std = (torch.tensor(state[key], dtype=torch.float64) for key in ("mean", "std"))
        self.scale_, self.targets_2d_ = Standardiser(mean, std), bool(state["targets_2d"])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def load(folder: str | os.PathLike[str], network: nn.Module | None = None) -> Classifier | Regressor:
    """The estimator that `save` wrote; `network`: as in `ds.load`, for one with a network of your own."""
    path = Path(folder) / TABLE
    with reading(path, "save the estimator again"):
        state = json.loads(path.read_text())
        kinds = {"Classifier": Classifier, "Regressor": Regressor}
        given: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in state["arguments"].items()
        }
        estimator = kinds[one_of("estimator", state["estimator"], kinds)](**given)
        estimator.n_features_in_ = int(state["columns"])
        if state["names"]:
            estimator.feature_names_in_ = np.array(state["names"], dtype=object)
        estimator.encoder_ = TableEncoder.of_config(state["encoder"])
        estimator._restore(state)
    estimator.posterior_ = load_posterior(folder, network)
    return estimator
