"""Classifier and Regressor: scikit-learn estimators that train any method of this library on a table."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.model_selection import GroupKFold
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_consistent_length, check_is_fitted, column_or_1d
from torch import Tensor, nn

from dissensus.calibration.calibrate import best_temperature, predict_held_out
from dissensus.calibration.conformal import Conformal, ConformalScore, conformal, least_rows
from dissensus.core.calibrated import stored_guarantees
from dissensus.core.description import rename_hint, to_json_values
from dissensus.core.likelihood import Classification, HeteroscedasticRegression, Likelihood, RealTargets
from dissensus.core.particles import Particles
from dissensus.core.posterior import Posterior, inference_context
from dissensus.core.predictive import CategoricalPredictive, Predictive
from dissensus.data.batches import Batches, check_index
from dissensus.data.input_transforms import Standardiser, TableInputs
from dissensus.data.table_encoding import TableEncoder
from dissensus.layers.modulation import Modulation
from dissensus.methods import METHODS
from dissensus.nets import MLP
from dissensus.sklearn.cross_conformal import FoldPrediction, cross_interval, cross_set
from dissensus.sklearn.table_rows import checked_table, sort_rows, split_rows, split_units, take_rows, weighted_rows
from dissensus.storage import load as load_posterior, save as save_posterior
from dissensus.storage.atomic_files import write_atomically
from dissensus.training.fit import fit, refresh
from dissensus.training.history import Epoch, History
from dissensus.utils.checks import available_device, fraction, integer, number, one_of
from dissensus.utils.file_errors import read_errors
from dissensus.utils.parameter_groups import optimizer_refusal

MEMBERS = 5
TrainingRows = tuple[Any, np.ndarray, np.ndarray, bool, np.ndarray]  # table, targets, weights, whether copies, units
TABLE = "table.json"
STEPS = 2000  # steps of a run if `epochs` is None, within 20 to 200 epochs
LEAST = 20  # fewest validation rows; with fewer the last epoch is kept
WANTED = 100  # validation rows of a regression if `validation` is None, within a tenth and three tenths of the rows


class EarlyStopping:
    """A callback of `fit` that keeps the state with the least held-out error, and stops after `patience` worse epochs.

    Errors are means over the last `window` epochs; else few held-out rows would often choose a lucky early one. The likelihood
    is not used: a network with a variance output soon becomes overconfident on training rows, and the likelihood would then
    choose an early epoch, whose means are undertrained. A temperature sets the spread afterwards.
    """

    def __init__(self, posterior: Posterior, rows: Batches, patience: int | None, window: int) -> None:
        self.posterior, self.rows, self.patience = posterior, rows, patience
        self.recent: deque[float] = deque(maxlen=window)  # root mean squared errors, in deviations of the targets
        self.scores: list[float] = []  # their mean at each epoch
        self.state: dict[str, Tensor] = {}

    def __call__(self, epoch: Epoch) -> bool:
        self.recent.append(self._error())
        score = fmean(self.recent)
        if score < min(self.scores, default=math.inf):
            self.state = {name: tensor.detach().clone() for name, tensor in self.posterior.state_dict().items()}
        self.scores.append(score)
        return self.patience is not None and len(self.scores) - 1 - self.best > self.patience

    @property
    def best(self) -> int:
        """Index of the epoch kept."""
        return self.scores.index(min(self.scores))

    def _error(self) -> float:
        total = count = 0.0
        likelihood: Any = self.posterior.likelihood
        with inference_context(self.posterior):
            drawn = self.posterior.current()
            for x, y, *weights in self.rows:
                mean = drawn.predict(x.to(self.posterior.device)).mean.cpu().double()
                each = ((mean - y) / likelihood.target_scale(y)[1]).square().mean(1)  # outputs count equally
                weight = weights[0].double() if weights else torch.ones_like(each)
                total, count = total + float((weight * each).sum()), count + float(weight.sum())
        return math.sqrt(total / count)


# keywords without a default in the method
SETTLED: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "batch_ensemble": lambda network: {"modulation": Modulation.sign()},
    "hmc": lambda network: {"weight_prior_std": 1.0},
    "sghmc": lambda network: {"weight_prior_std": 1.0},
    "feature_rde": lambda network: dict(
        zip(("layer", "head"), [n for n, part in network.named_modules() if not [*part.children()]][-2:], strict=True)
    ),
    "lit": lambda network: {"strength": 0.1},
    "mc_dropout": lambda network: {"rate": 0.1},
}


def build_posterior(
    method: str | type[Posterior],
    make: Callable[[], nn.Module],
    *,
    likelihood: Likelihood,
    members: int | None,
    data_size: int,
    settings: dict[str, Any],
) -> Posterior:
    """The method with networks from `make`: `members` of them if it is built from several, else one."""
    kind: Any = METHODS[one_of("method", method, METHODS)] if isinstance(method, str) else method
    keywords = inspect.signature(kind).parameters
    several = kind.networks_taken == "several"
    taken = {"likelihood", *(["members"] if several else [])}
    known = [each for each in list(keywords)[1:] if each not in taken]  # the first one takes the networks
    for name in () if any(each.kind is each.VAR_KEYWORD for each in keywords.values()) else settings:
        hint = f"pass {name}= to the estimator" if name in taken else rename_hint(kind.name, name)
        one_of(f"a setting of {kind.__name__}", name, known, hint=hint)
    if members is not None:
        integer("members", members)
    count = (members or MEMBERS) if several else (members or 1) if kind.networks_taken == "any" else 1
    networks = [make() for _ in range(count)]
    given = {**(SETTLED[kind.name](networks[0]) if kind.name in SETTLED else {}), **settings}
    if "members" in keywords and not several and members is not None:
        given.setdefault("members", members)
    if "data_size" in keywords and ("data_size" in kind.needed or given.keys() & {"prior", "weight_prior_std"}):
        given.setdefault("data_size", data_size)
    return kind(networks if several or count > 1 else networks[0], likelihood=likelihood, **given)


class TableEstimator(BaseEstimator):  # type: ignore[misc]
    """Base class of `Classifier` and `Regressor`.

    Args:
        method: a name in `ds.METHODS`, or your own class.
        members: number of networks, or of members of one network; None means 5 networks, or the method's default members.
        settings: dict of further keywords of the method.
        hidden: widths of the network's hidden layers, or one width for one layer.
        network: a function (inputs, outputs) -> module that replaces the default network.
        likelihood: the likelihood of the outputs; None means `Classification()` or `HeteroscedasticRegression()`.
        epochs: most epochs; None means about 2,000 steps, within 20 to 200 epochs.
        batch_size: rows per batch; None means a sixteenth of the rows, within 32 to 256.
        lr, weight_decay: settings of AdamW, with the method's schedule. Methods with a special optimiser use that one.
        validation: share of the rows that choose the best epoch, by the likelihood of labels or the error of means. They also
            scale a regression's spread. With 0, or fewer than 20 rows, the last epoch is kept without scaling. None: a tenth;
            in regressions below 1,000 rows, 100 rows or three tenths, and all rows then train again, up to the best epoch.
        conformal, folds: share of rows reserved for calibrating intervals and sets, which then contain a new row's target with
            the requested probability 1 − α. "cv+" (Barber et al. 2021) reserves none: it trains once per fold without its rows,
            and once on all rows, for the mean. It takes the time and memory of `folds` + 1 fits. Its coverage is near 1 − α in
            practice, and at least 1 − 2α − √(2/n) for n rows. 0 uses the posterior's intervals and sets, without a guarantee.
        patience: epochs without a better score after which training stops; None never stops early.
        categories: columns whose numbers are codes, by name or position.
        device: device for training; predictions are made on the CPU, in float64.
        random_state: seed of the networks, the split and the order of batches; None differs between fits.
    """

    _score: ClassVar[ConformalScore]
    posterior_: Posterior
    history_: History
    scores_: list[float | None]

    def __init__(
        self,
        method: str | type[Posterior] = "deep_ensemble",
        *,
        members: int | None = None,
        settings: dict[str, Any] | None = None,
        hidden: int | Sequence[int] = (128, 128),
        network: Callable[[int, int], nn.Module] | None = None,
        likelihood: Likelihood | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        lr: float = 3e-3,
        weight_decay: float = 1e-2,
        validation: float | None = None,
        conformal: float | Literal["cv+"] = 0.0,
        folds: int = 5,
        patience: int | None = 30,
        categories: Sequence[str | int] = (),
        device: str = "cpu",
        random_state: Any = None,
    ) -> None:
        self.method, self.members, self.settings, self.hidden, self.network = method, members, settings, hidden, network
        self.likelihood, self.epochs, self.batch_size = likelihood, epochs, batch_size
        self.lr, self.weight_decay, self.validation = lr, weight_decay, validation
        self.conformal, self.folds, self.patience, self.categories = conformal, folds, patience, categories
        self.device, self.random_state = device, random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Trains on rows X with targets y; returns the estimator.

        A DataFrame and a Series are paired by their index; the order of rows does not matter. `sample_weight`: counts of rows.
        """
        validation = 0.0 if self.validation is None else self.validation
        if cross := isinstance(self.conformal, str):
            one_of("conformal", self.conformal, ("cv+",), hint='pass "cv+" or a share such as 0.2')
        share = 0.0 if isinstance(self.conformal, str) else number("conformal", self.conformal, least=0, below=1)
        number("validation", validation, least=0, below=1)
        number("validation + conformal", validation + share, below=1)
        if y is None:
            kind = type(self).__name__
            raise ValueError(f"{kind} requires y to be passed, but the target y is None; pass the targets of the rows")
        check_index(X, y, sample_weight)
        table = checked_table(self, X, reset=True)
        targets = self._targets(y)
        check_consistent_length(table, targets)
        rows, weights, copies = weighted_rows(table, targets, sample_weight)
        order, groups = sort_rows(table, targets, rows)
        rows, units = rows[order], split_units(groups)
        data = (take_rows(table, rows), targets[rows], weights[order], copies, units)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.folds_: list[Self] = []
        if cross:
            parts = GroupKFold(integer("folds", self.folds, least=2), shuffle=True, random_state=seed)
            split = parts.split(units, groups=units)
            self.folds_ = [copy.copy(self)._fit_rows(data, others, fold, 0.0, seed) for others, fold in split]
        return self._fit_rows(data, np.arange(len(rows)), None, share, seed)

    def _fit_rows(self, data: TrainingRows, given: Any, fold: np.ndarray | None, share: float, seed: int) -> Self:
        """Trains on the rows `given` and calibrates on the fold's rows; if None, on a share of those given."""
        table, targets, weights, copies, units = data
        device = available_device(self.device)
        labels = targets[given] if targets.dtype == np.int64 else None
        validation, retrain = self.validation, False
        if validation is None:
            kind: Any = METHODS.get(str(self.method), self.method)  # with fit_posthoc, a second run may take too long
            retrain = labels is None and getattr(kind, "judged_by", 0) == "current" and not hasattr(kind, "fit_posthoc")
            validation = min(0.3, max(0.1, WANTED / len(np.unique(units[given])))) if retrain else 0.1
        split = split_rows(units[given], (share, validation), seed=seed, labels=labels, least=LEAST)
        train, calibrating, held = (given[part] for part in split)
        if share and not len(calibrating):
            got = f'{share:g} of {len(given)}; pass more, raise conformal=, or pass "cv+"'
            raise ValueError(f"expected at least {LEAST} rows to calibrate on, got {got}")
        calibrating = calibrating if fold is None else fold
        self.held_weight_ = float(weights[calibrating].sum() / weights.mean())
        if copies:  # made after the split, so that no row is in two parts; calibration counts each row once
            train, held = (part.repeat(weights[part].astype(np.int64)) for part in (train, held))

        def measure_rows(part: np.ndarray) -> None:
            self.encoder_ = TableEncoder.of(take_rows(table, part), categories=self.categories)
            self._measure(targets[part])

        def batch_tensors(part: np.ndarray, *, weighted: bool = not copies) -> list[Any]:
            weight = torch.from_numpy(weights[part] / weights.mean()).float() if weighted else None
            return [self.encoder_(take_rows(table, part)), self._encode_targets(targets[part]), weight]

        with torch.random.fork_rng(devices=[] if device.type == "cpu" else None):
            torch.manual_seed(seed)
            measure_rows(train)
            epochs = self._train(batch_tensors(train), batch_tensors(held) if len(held) else None, seed, self.epochs)
            if retrain and validation > 0.1 and len(held):
                history, scores, temperature = self.history_, self.scores_, float(self.posterior_.temperature)
                measure_rows(everything := np.sort(np.r_[train, held]))
                until = history.best.epoch if history.best else 1
                self._train(batch_tensors(everything), None, seed, epochs, until=until)
                self.posterior_.recalibrate(temperature, None)
                self.history_, self.scores_ = history, scores
            if len(calibrating):
                x, y, weight = batch_tensors(calibrating, weighted=True)
                rows_left = Batches(x.double(), y, weight=weight, batch_size=1024)
                conformal(self.posterior_, rows_left, score=self._score, level=0.9 if fold is None else 0.5)
        self._finish()
        return self

    def _train(
        self, train: list[Any], held: list[Any] | None, seed: int, epochs: int | None, *, until: int | None = None
    ) -> int:
        """Trains a posterior, with the schedule of `epochs` epochs, of which it trains `until`; returns the former."""
        x, y, weight = train
        outputs, likelihood = self._outputs(y)
        size = min(256, max(32, len(x) // 16)) if self.batch_size is None else self.batch_size
        batches = Batches(x, y, weight=weight, batch_size=integer("batch_size", size), shuffle=True, seed=seed)
        most = min(200, max(20, math.ceil(STEPS / len(batches))))
        epochs = most if epochs is None else integer("epochs", epochs)
        make = partial(self.network or partial(MLP, hidden=self.hidden), x.shape[1], outputs)
        how: dict[str, Any] = {"likelihood": likelihood, "members": self.members, "data_size": len(x)}
        posterior = build_posterior(self.method, make, settings=dict(self.settings or {}), **how)
        optimizer = scheduler = None
        if optimizer_refusal(posterior, torch.optim.AdamW) is None:
            groups = posterior.parameter_groups(self.lr, self.weight_decay, likelihood_lr=max(self.lr, 1e-2))
            optimizer = torch.optim.AdamW(groups, lr=self.lr, fused=True)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, posterior.default_schedule(epochs))
        judging = None if held is None else Batches(held[0], held[1], weight=held[2], batch_size=1024)
        means = None
        if judging is not None and y.is_floating_point() and posterior.judged_by == "current":
            means = EarlyStopping(posterior, judging, self.patience, max(1, epochs // 20))
        by_likelihood = judging is not None and means is None and posterior.judged_by is not None
        self.history_ = fit(
            posterior,
            batches,
            epochs=epochs,
            validation=judging if by_likelihood else None,
            patience=self.patience if by_likelihood else None,
            callback=means if until is None else lambda epoch: epoch.epoch == until,
            optimizer=optimizer,
            scheduler=scheduler,
            precision="float32",
            device=self.device,
            progress=False,
            draw=means is None,
        )
        if means is not None:
            posterior.load_state_dict(means.state)
            self.history_.best = self.history_[means.best]
            refresh(posterior, batches)
        self.scores_ = [epoch.validation for epoch in self.history_.epochs] if means is None else [*means.scores]
        self.posterior_ = posterior.cpu().double()
        if held is not None and y.is_floating_point():
            judged = predict_held_out(self.posterior_, (held[0].double(), held[1], held[2]))
            self.posterior_.recalibrate(best_temperature(*judged, warn=False), None)
        return epochs

    def _finish(self) -> None:
        """Makes the posterior take tables, also when it is exported or loaded without this class."""
        self.posterior_.inputs = TableInputs(self.encoder_)

    def predictive(self, X: Any) -> Predictive:
        """The full predictive distribution with all members, in float64, in the units of y: `.epistemic`, `.sample`, …"""
        check_is_fitted(self)
        x = self.encoder_(checked_table(self, X, reset=False), dtype=torch.float64)
        encoded = copy.copy(self.posterior_)
        encoded.inputs = None
        return Predictive.cat([encoded.predict(x[start : start + 4096]) for start in range(0, len(x), 4096)])

    def _fold_predictions(self, X: Any, levels: Sequence[float]) -> list[FoldPrediction]:
        """X as predicted without each fold, or without the reserved rows, and their scores; [] if there are none."""
        found = []
        for fold in self.folds_ or [self]:
            promise = dict(fold.posterior_.promises.items()).get("conformal")
            if isinstance(promise, Conformal):
                weight = torch.diff(promise.mass, dim=0, prepend=torch.zeros_like(promise.mass[:1]))
                weight *= fold.held_weight_ / promise.mass[-1]
                found.append(FoldPrediction(fold.predictive(X), promise.scores, weight))
        for level in levels:
            fraction("level", level, hint="pass for example 0.9")
            if found and (rows := sum(len(each.scores) for each in found)) < least_rows(level):
                got = f"{level:g}, which needs {least_rows(level)}; pass a lower level, or fit with more rows"
                raise ValueError(f"expected a level that {rows} calibration rows can promise, got {got}")
        return found

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Saves the estimator to a folder, without a pickle; `ds.sklearn.load` reads it. Objects among the arguments (a
        network function, a likelihood) are not saved: the loaded estimator predicts, and would train with the defaults."""
        check_is_fitted(self)
        kept = {}
        for name, value in self.get_params(deep=False).items():
            with contextlib.suppress(TypeError):
                kept[name] = to_json_values(value)
        state = {"estimator": type(self).__name__, "arguments": kept, "columns": self.n_features_in_}
        state |= {"names": list(map(str, getattr(self, "feature_names_in_", ()))), "folds": len(self.folds_)}
        text = json.dumps({**state, "held_weight": self.held_weight_, **self._state()})
        save_posterior(self.posterior_, folder)
        for place, fold in enumerate(self.folds_):
            fold.save(Path(folder) / f"fold_{place}")
        write_atomically({Path(folder) / TABLE: text.encode()})

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.string = tags.input_tags.categorical = True
        return tags


class Interval(NamedTuple):
    """Result of `Regressor.predict(X, interval=0.9)`: arrays of the targets' shape, in their units."""

    mean: np.ndarray
    lower: np.ndarray  # with a first axis of levels if several were asked for
    upper: np.ndarray


class Classifier(ClassifierMixin, TableEstimator):  # type: ignore[misc]
    __doc__ = f"""A scikit-learn classifier for tables, with class probabilities from any method.

    Labels may be text or numbers; `classes_` has them in the order of the probabilities.
    {(TableEstimator.__doc__ or "").partition(chr(10))[2]}"""

    _score = "lac"

    def predict(self, X: Any) -> np.ndarray:
        """(N,) the most probable labels."""
        likeliest = self.predict_proba(X).argmax(1)  # first: it says that the estimator is not fitted
        return np.asarray(self.classes_[likeliest])

    def predict_proba(self, X: Any) -> np.ndarray:
        """(N, C) probabilities of the mixture."""
        return self.predictive(X).mean.numpy()

    def predict_set(self, X: Any, level: float = 0.9) -> np.ndarray:
        """(N, C) boolean: whether each class is in the prediction set of a row.

        Conformal, with a coverage guarantee, if `conformal` was given; else the fewest classes with probability `level`.
        """
        if folds := self._fold_predictions(X, [level]):
            return cross_set(folds, level).numpy()
        predictive = self.predictive(X)
        assert isinstance(predictive, CategoricalPredictive)
        return predictive.credible_set(level).numpy()

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

    def predict(
        self,
        X: Any,
        interval: float | Sequence[float] | None = None,
        quantiles: Sequence[float] | None = None,
        return_std: bool = False,
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray] | Interval:
        """(N,) or (N, D) predicted means, or one of the following.

        Args:
            interval: a level such as 0.9, for an `Interval`; or several, for ends (levels, N) or (levels, N, D). The ends are
                conformal, with a coverage guarantee, if `conformal` was given; otherwise the mixture's central intervals.
            quantiles: such as [0.1, 0.5, 0.9], for the mixture's (quantiles, N) or (quantiles, N, D), never with a guarantee.
            return_std: whether to return means and standard deviations of the mixture.
        """
        if (interval is not None) + (quantiles is not None) + return_std > 1:
            raise ValueError("expected one of interval, quantiles and return_std, got several; call predict for each")
        predictive: Any = self.predictive(X)
        mean = self._as_targets(predictive.mean)
        if quantiles is not None:
            return self._as_targets(torch.stack([predictive.quantile(each) for each in quantiles]))
        if return_std:
            return mean, self._as_targets(predictive.total.sqrt())
        if interval is None:
            return mean
        levels = np.atleast_1d(interval).tolist()
        folds = self._fold_predictions(X, levels)
        ends = [cross_interval(folds, level) if folds else predictive.interval(level) for level in levels]
        lower, upper = (self._as_targets(torch.stack(each)) for each in zip(*ends, strict=True))
        return Interval(mean, lower, upper) if np.ndim(interval) else Interval(mean, lower[0], upper[0])

    def _as_targets(self, values: Tensor) -> np.ndarray:
        """Values (..., N, D) as (..., N), if the targets were (N,)."""
        return (values if self.targets_2d_ else values[..., 0]).numpy()

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
        given: dict[str, Any] = {**state["arguments"]}
        given |= {key: tuple(value) for key, value in given.items() if isinstance(value, list)}
        estimator = kinds[one_of("estimator", state["estimator"], kinds)](**given)
        estimator.n_features_in_ = int(state["columns"])
        if state["names"]:
            estimator.feature_names_in_ = np.array(state["names"], dtype=object)
        estimator.posterior_ = load_posterior(folder, network)
        inputs: Any = estimator.posterior_.inputs
        estimator.encoder_ = inputs.encoder
        estimator._restore(state)
        estimator.held_weight_ = state["held_weight"]
    estimator.folds_ = [load(Path(folder) / f"fold_{place}", network) for place in range(state["folds"])]
    return estimator
