"""Predictions with a row per example: truth, answer, uncertainty, sets and gates, for pandas and as HTML for notebooks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dissensus.utils.arrays import as_dataframe, tensor_of


def predictive_frame(predictive: Any, targets: Any, classes: Sequence[str], posterior: Any) -> Any:
    """The pandas.DataFrame of `Predictive.to_dataframe`."""
    if predictive.kind == "tokens":
        raise TypeError("expected one answer per input, got tokens; use .sequence(mask), or evaluation.examples()")
    targets = predictive.targets if targets is None else tensor_of(targets).to(predictive.mean.device)
    columns = prediction_columns(predictive, targets)
    for name, promise in {} if posterior is None else posterior.promises.items():
        if promise.kind == "gate":
            columns[f"{name}/accepted"] = promise(predictive).accept
        elif predictive.kind == "regression":
            columns[f"{name}/lower"], columns[f"{name}/upper"] = promise.interval(predictive)
        else:
            columns[f"{name}/set"] = promise.set(predictive)
    return example_frame(columns, classes or getattr(posterior, "classes", None) or ())


def prediction_columns(predictive: Any, targets: Tensor | None = None) -> dict[str, Tensor]:
    """Name -> (B,) or (B, D): target, answer, confidence or interval, parts of the uncertainty; means over pixels."""
    if targets is not None and len(targets) != len(predictive):
        raise ValueError(f"expected {len(predictive)} targets, got {len(targets)}; pass one per input")
    mean, parts = predictive.mean, {name: getattr(predictive, name) for name in ("total", "aleatoric", "epistemic")}
    known = {} if targets is None else {"target": targets}
    if predictive.kind == "regression":
        ends = zip(("lower90", "upper90"), predictive.interval(0.9), strict=True)
        return known | {"mean": mean, "std": predictive.total.sqrt()} | parts | dict(ends)
    sure = {"confidence": predictive.confidence, **parts}
    if predictive.kind == "multilabel":
        return {name: values > 0.5 for name, values in known.items()} | {"prediction": mean > 0.5} | sure
    found = {"prediction": mean.argmax(predictive.class_axis)}
    if targets is not None:
        true = targets.argmax(predictive.class_axis) if targets.is_floating_point() else targets.long()
        found = {"target": true, **found, "correct": found["prediction"] == true}
    if mean.ndim == 2:
        return found | sure
    void = -1 if predictive.ignore_index is None else predictive.ignore_index
    counted = found.get("target", found["prediction"]) != void  # (B, ...)
    maps = {name: values for name, values in (found | sure).items() if name not in ("target", "prediction")}
    return {k: torch.where(counted, v, 0).flatten(1).sum(1) / counted.flatten(1).sum(1) for k, v in maps.items()}


def example_frame(columns: Mapping[str, Tensor], classes: Sequence[str]) -> Any:
    """A pandas.DataFrame of columns (N,), classes by name, sets (N, K) as tuples; numbers (N, D) are columns NAME/i."""
    names, shown = dict(enumerate(classes)), dict[str, Any]()
    for name, values in columns.items():
        name, values = name.replace("target", "truth"), values.detach().cpu()
        if values.ndim == 1:
            named = values.dtype == torch.int64 and len(names) > 0
            shown[name] = [names.get(i, i) for i in values.tolist()] if named else values.numpy()
        elif not values.is_floating_point():
            inside = torch.split(values.nonzero()[:, 1], values.ne(0).sum(1).tolist())
            shown[name] = [tuple(names.get(i, i) for i in each.tolist()) for each in inside]
        else:
            outputs = values.reshape(len(values), -1).T.numpy()
            each = {f"{name}/{names.get(i, i)}": column for i, column in enumerate(outputs)}
            shown |= each if len(outputs) > 1 else {name: outputs[0]}
    return as_dataframe(shown)


ROWS = 5  # rows of a table


def html_table(predictive: Any) -> str:
    """A table with a row for each of the first inputs; values are averaged over pixels."""
    few = predictive[:ROWS]
    shown = {name: _texts(values.double()) for name, values in prediction_columns(few).items()}
    unit = "variance" if predictive.kind == "regression" else "nats"
    head = "".join(f"<th>{name}</th>" for name in ("input", *shown))
    rows = zip(range(len(few)), *shown.values(), strict=True)
    body = "".join(f"<tr>{''.join(f'<td>{each}</td>' for each in row)}</tr>" for row in rows)
    more = f", the first {len(few)} of {len(predictive)} inputs" if len(few) < len(predictive) else ""
    return f"<p><code>{predictive!r}</code>{more}; uncertainties: {unit}</p><table><tr>{head}</tr>{body}</table>"


def _texts(values: Tensor) -> list[str]:
    """One text per input: all outputs if there are few, else their mean."""
    flat = values.reshape(len(values), -1)
    flat = flat if flat.shape[1] <= 4 else flat.mean(1, keepdim=True)
    return [", ".join(f"{each:.4g}" for each in row) for row in flat.tolist()]
