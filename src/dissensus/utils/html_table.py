"""A predictive as a small HTML table, for notebooks."""

from typing import Any

from torch import Tensor

ROWS = 5  # rows of a table


def html_table(predictive: Any) -> str:
    """A table with a row for each of the first inputs; values are averaged over pixels."""
    classed, few = hasattr(predictive, "log_mean"), predictive[:ROWS]
    if classed and few.mean.ndim == 2:
        shown = {"class": few.mean.argmax(1).tolist(), "confidence": _texts(few.confidence)}
    else:
        shown = {} if classed else {"mean": _texts(few.mean)}
    shown |= {name: _texts(getattr(few, name)) for name in ("aleatoric", "epistemic", "total")}
    unit = "nats" if classed else "variance"
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
