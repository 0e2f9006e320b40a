"""Text that is safe to show, numbers of bytes as text, and a table of predictions for notebooks."""

from typing import Any

from torch import Tensor

# Control characters that could steer a terminal; newlines and tabs are kept
CONTROL = dict.fromkeys({*range(32), *range(127, 160)} - {*b"\n\t"})


def format_bytes(size: int) -> str:
    """The size as text, such as "1.5 GiB"."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 999.5:  # 1000 and more would be written 1e+03
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


ROWS = 5  # rows of a table


def html_table(predictive: Any) -> str:
    """A table with a row for each of the first inputs; values are averaged over pixels."""
    classed, few = hasattr(predictive, "log_mean"), predictive[:ROWS]
    if classed and few.mean.ndim == 2:
        shown = {"class": few.mean.argmax(1).tolist(), "confidence": _texts(few.confidence)}
    else:
        shown = {} if classed else {"mean": _texts(few.mean)}
    shown |= {name: _texts(getattr(few, name)) for name in ("aleatoric", "epistemic", "total")}
    unit = "nats" if predictive.kind in ("classification", "multilabel", "tokens") else "variance"
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
