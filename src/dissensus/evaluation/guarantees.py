"""Measures promises on test rows: coverage and size of conformal sets, risk and acceptance of gates."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dissensus.calibration.conformal import Conformal, measure_coverage
from dissensus.calibration.selective import Gate, error_mask
from dissensus.core.predictive import CategoricalPredictive, Predictive

log = logging.getLogger("dissensus")

Promises = Mapping[str, Any]  # name -> Conformal or Gate: `posterior.promises`
RowValues = dict[str, Tensor]  # "NAME/covered", "NAME/size", "NAME/accepted", "NAME/error" -> (B,), and of ANSWERS
ANSWERS = ("/set", "/lower", "/upper")  # (B, K) or of the mean's shape: large, and in the units of the predictions
DIFFICULTIES = ("easy", "medium", "hard")  # thirds of the rows, by the predictive's total uncertainty


def guarantee_outcomes(
    promises: Promises,
    predictive: Predictive,
    generator: torch.Generator,
    *,
    y: Tensor | None = None,
    x: Any = None,
    weight: Tensor | None = None,
) -> RowValues:
    """Sets or intervals, whether they cover, and their size; accepted and error of gates; y is None for foreign inputs."""
    found: RowValues = {}
    if isinstance(predictive, CategoricalPredictive) and predictive.log_mean.ndim > 2:
        return found  # pixels have no promises
    for name, promise in promises.items():
        if isinstance(promise, Gate):
            found[f"{name}/accepted"] = promise(predictive).accept.double()
            if y is not None and "risk" in promise.facts:
                found[f"{name}/error"] = error_mask(predictive, y, promise.facts["tolerance"]).double()
        elif isinstance(promise, Conformal) and y is not None:
            rows = _row_values(promise, x, weight)
            if rows is not None:
                outcome = measure_coverage(promise, predictive, y, generator, **rows)
                found |= {f"{name}/{key}": values for key, values in outcome.items()}
    return found


def _row_values(promise: Conformal, x: Any, weight: Tensor | None) -> dict[str, Tensor] | None:
    """Weight and group of the rows, if the promise needs them; None if they are unknown."""
    found: dict[str, Tensor | None] = {}
    if promise.facts["weighted"]:
        found["weight"] = weight if promise.weight_of is None or x is None else promise.weight_of(x)
    if promise.facts["by"] == "group":
        found["group"] = None if promise.group_of is None or x is None else promise.group_of(x)
    return None if None in found.values() else found  # type: ignore[return-value]


def join_outcomes(parts: Iterable[RowValues]) -> RowValues:
    """The outcomes of all batches."""
    parts = list(parts)
    return {key: torch.cat([part[key] for part in parts]) for key in (parts[0] if parts else ())}


def guarantee_metrics(promises: Promises, rows: RowValues) -> dict[str, float]:
    """NAME/coverage, size and level of conformal sets; NAME/accepted, risk or refused of gates, and the promised values."""
    found: dict[str, float] = {}
    for name, promise in promises.items():
        if f"{name}/covered" in rows:
            found |= {f"{name}/{key}": value for key, value in _set_metrics(rows, name).items()}
            found[f"{name}/level"] = promise.level
        elif f"{name}/accepted" in rows:
            accepted = rows[f"{name}/accepted"]
            if "false_alarm" in promise.facts:
                found[f"{name}/refused"] = 1 - float(accepted.mean())
                found[f"{name}/promised"] = promise.facts["false_alarm"]
                continue
            found[f"{name}/accepted"] = float(accepted.mean())
            if f"{name}/error" in rows:
                if accepted.any():
                    found[f"{name}/risk"] = float((accepted * rows[f"{name}/error"]).sum() / accepted.sum())
                found[f"{name}/promised"] = promise.facts["risk"]
        else:
            log.warning("the rows' weights or groups are not known, so %s is not evaluated; call it by hand", name)
    return found


def guarantee_details(
    promises: Promises, rows: RowValues, y: Tensor, predictive: Predictive
) -> tuple[dict[str, float], RowValues]:
    """(NAME/easy/coverage, …, NAME/worst_class/coverage; arrays NAME/class/coverage and size (K,), test/NAME/… (N,))."""
    found: dict[str, float] = {}
    arrays = {f"test/{key}": value for key, value in rows.items()}
    classes = isinstance(predictive, CategoricalPredictive)
    rank = predictive.total.double().reshape(len(y), -1).sum(1).argsort(stable=True).argsort()
    third = rank * len(DIFFICULTIES) // max(len(y), 1)
    for name in promises:
        if f"{name}/covered" not in rows:
            continue
        for i, difficulty in enumerate(DIFFICULTIES):
            chosen = {key: value[third == i] for key, value in rows.items()}
            found |= {f"{name}/{difficulty}/{key}": value for key, value in _set_metrics(chosen, name).items()}
        if classes:
            number = predictive.mean.shape[1]
            counts = torch.bincount(y, minlength=number)
            for key, values in (("coverage", rows[f"{name}/covered"]), ("size", rows[f"{name}/size"])):
                arrays[f"{name}/class/{key}"] = torch.bincount(y, values, minlength=number) / counts  # NaN without rows
            found[f"{name}/worst_class/coverage"] = float(arrays[f"{name}/class/coverage"][counts > 0].min())
    return found, arrays


def guarantee_tables(promises: Promises, parts: Sequence[Mapping[tuple[int, int], RowValues]]) -> dict[str, Tensor]:
    """NAME/coverage, size, accepted, risk or refused -> (T, S) on corrupted inputs; NaN if nothing was accepted."""
    places = parts[0] if parts else ()
    found = {at: guarantee_metrics(promises, join_outcomes(part[at] for part in parts)) for at in places}
    keys = dict.fromkeys(key for each in found.values() for key in each)
    names = [key for key in keys if not key.endswith(("/level", "/promised"))]
    shape = [1 + max(axis) for axis in zip(*found, strict=True)]
    tables = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name in names}
    for at, each in found.items():
        for name in tables.keys() & each.keys():
            tables[name][at] = each[name]
    return tables


def _set_metrics(rows: RowValues, name: str) -> dict[str, float]:
    """coverage; size, the mean of finite sizes; empty and infinite, the shares of such sizes, if there are any."""
    covered, size = rows[f"{name}/covered"], rows[f"{name}/size"]
    finite = size.isfinite()
    found = {"coverage": float(covered.mean())}
    if (size == 0).any():
        found["empty"] = float((size == 0).double().mean())
    if finite.any():
        found["size"] = float(size[finite].mean())
    if not finite.all():
        found["infinite"] = float((~finite).double().mean())
    return found
