"""Figures for notebooks."""

import io
from functools import partial

from matplotlib.figure import Figure


def shown(figure: Figure) -> Figure:
    """The figure on white, with a PNG representation: without pyplot a notebook would show only its name."""
    figure.set_facecolor("white")
    figure._repr_png_ = partial(_png, figure)  # type: ignore[attr-defined]
    return figure


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
