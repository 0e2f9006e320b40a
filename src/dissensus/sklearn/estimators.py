"""Classifier and Regressor: scikit-learn estimators that train any method of this library on a table."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, column_or_1d
from torch import Tensor, nn

from dissensus.calibration.conformal import lac
from dissensus.core.calibrated import stored_guarantees
from dissensus.core.likelihood import Classification, Likelihood
from dissensus.core.particles import Particles
from dissensus.core.predictive import CategoricalPredictive
from dissensus.core.regression import HeteroscedasticRegression, RealTargets
from dissensus.data.input_transforms import Standardiser
from dissensus.sklearn.base import TABLE, TableEstimator
from dissensus.storage import load as load_posterior
from dissensus.utils.checks import one_of
from dissensus.utils.file_errors import read_errors


class Interval(NamedTuple):
    """Result of `Regressor.predict(X, interval=0.9)`: arrays of the targets' shape, in their units."""

    mean: np.ndarray
    lower: np.ndarray
    upper: np.ndarray


class Classifier(ClassifierMixin, TableEstimator):  # type: ignore[misc]
    __doc__ = f"""A scikit-learn classifier for tables, with class probabilities from any method.

    Labels may be text or numbers; `classes_` has them in the order of the probabilities.
    {(TableEstimator.__doc__ or "").partition(chr(10))[2]}"""

    _score = "lac"

    def predict(self, X: Any) -> np.ndarray:
        """(N,) the most probable labels."""
        likeliest = self.predict_proba(X).argmax(1)
        labels: np.ndarray = self.classes_[likeliest]
        return labels

    def predict_proba(self, X: Any) -> np.ndarray:
        """(N, C) probabilities of the mixture."""
        return self.predictive(X).mean.numpy()

    def predict_set(self, X: Any, level: float = 0.9) -> np.ndarray:
        """(N, C) boolean: whether each class is in the prediction set of a row.

        The set is conformal, with a coverage guarantee, if `conformal` rows were reserved. Otherwise it has the fewest classes
        whose probabilities sum to `level`, without a guarantee.
        """
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
            raise ValueError(f"expected at least two classes, got one class, {self.classes_[0]!r}; pass other rows too")
        return codes.astype(np.int64)

    def _measure(self, targets: np.ndarray) -> None:
        pass

    def _encode_targets(self, targets: np.ndarray) -> Tensor:
        return torch.from_numpy(targets)

    def _outputs(self, y: Tensor) -> tuple[int, Likelihood]:
        return len(self.classes_), copy.deepcopy(self.likelihood) or Classification()

    def _finish(self) -> None:
        super()._finish()
        self.posterior_.classes = tuple(map(str, self.classes_))

    def _state(self) -> dict[str, Any]:
        return {"classes": self.classes_.tolist(), "dtype": self.classes_.dtype.str}

    def _restore(self, state: dict[str, Any]) -> None:
        self.classes_ = np.array(state["classes"], dtype=state["dtype"])


class Regressor(RegressorMixin, TableEstimator):  # type: ignore[misc]
    __doc__ = f"""A scikit-learn regressor for tables, with predictive distributions from any method.

    Targets (N,) or (N, D) are standardised with the training rows; predictions are in the units of the targets.
    {(TableEstimator.__doc__ or "").partition(chr(10))[2]}"""

    _score = "residual"

    def predict(self, X: Any, interval: float | None = None) -> np.ndarray | Interval:
        """(N,) or (N, D) predicted means; with `interval`, a level such as 0.9, an `Interval` of mean, lower and upper.

        Conformal intervals, with a coverage guarantee, are mean ± threshold · deviation. Without conformal rows they are the
        mixture's central intervals, without a guarantee.
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
        measured = Standardiser.of_rows(np.sort(targets, axis=0))  # sorted, so that sums do not depend on the order
        self.scale_ = _scale(HeteroscedasticRegression(targets=measured))

    def _encode_targets(self, targets: np.ndarray) -> Tensor:
        return torch.from_numpy(targets - self.scale_.mean.numpy()).float()  # float32 cannot distinguish dates

    def _outputs(self, y: Tensor) -> tuple[int, Likelihood]:
        likelihood = copy.deepcopy(self.likelihood) or HeteroscedasticRegression()
        if not isinstance(likelihood, RealTargets):
            got = f"{type(likelihood).__name__}; pass ds.Regression(), or derive yours from it"
            raise TypeError(f"expected a likelihood of real targets, got {got}")
        likelihood.set_target_scale({"mean": torch.zeros(y.shape[1]), "std": self.scale_.std})
        return y.shape[1] * (2 if isinstance(likelihood, HeteroscedasticRegression) else 1), likelihood

    def _finish(self) -> None:
        super()._finish()
        families = [part for part in self.posterior_.modules() if isinstance(part, Particles)]  # stored draws, too
        for likelihood in {template.likelihood for family in families for template in family.templates}:
            assert isinstance(likelihood, RealTargets)
            likelihood.targets = None  # the targets so far had their mean subtracted
            likelihood.set_target_scale(self.scale_)
        for name, promise in stored_guarantees(self.posterior_).items():
            self.posterior_.add_guarantee(name, promise)  # of residuals over deviations, which do not depend on units

    def _state(self) -> dict[str, Any]:
        return {"targets_2d": self.targets_2d_}

    def _restore(self, state: dict[str, Any]) -> None:
        self.scale_, self.targets_2d_ = _scale(self.posterior_.likelihood), bool(state["targets_2d"])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _scale(likelihood: Any) -> Standardiser:
    mean, std = (torch.tensor(likelihood.targets[key], dtype=torch.float64) for key in ("mean", "std"))
    return Standardiser(mean, std)


def load(folder: str | os.PathLike[str], network: nn.Module | None = None) -> Classifier | Regressor:
    """Loads an estimator written by `save`; `network`: as in `ds.load`, if the estimator has your own network."""
    path = Path(folder) / TABLE
    with read_errors(path, "save the estimator again"):
        state = json.loads(path.read_text())
        kinds = {"Classifier": Classifier, "Regressor": Regressor}
        given: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in state["arguments"].items()
        }
        estimator = kinds[one_of("estimator", state["estimator"], kinds)](**given)
        estimator.n_features_in_ = int(state["columns"])
        if state["names"]:
            estimator.feature_names_in_ = np.array(state["names"], dtype=object)
        estimator.posterior_ = load_posterior(folder, network)
        inputs: Any = estimator.posterior_.inputs
        estimator.encoder_ = inputs.encoder
        estimator._restore(state)
    return estimator
