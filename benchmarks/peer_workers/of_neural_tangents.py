"""neural-tangents, jitted and warm; kernels in float64, as this library's analytic ones always are."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import jax
import neural_tangents as nt
import numpy as np
from neural_tangents import stax

VERSIONS = ("neural-tangents", "jax")


def case_of(given: dict[str, object]) -> SimpleNamespace:
    return SimpleNamespace(**given)


def seconds(case: SimpleNamespace, call: Callable[[], object]) -> Callable[[], dict[str, float]]:
    def run() -> dict[str, float]:
        clock = getattr(time, case.timer)
        start = clock()
        for _ in range(case.calls):
            call()
        return {"kernel": (clock() - start) / case.calls}

    return run


def empirical(case: SimpleNamespace):  # type: ignore[no-untyped-def]
    """All blocks, implementation 3 (structured derivatives), float32, with the weights and inputs of the other side."""
    held = np.load(case.arrays)
    layers = len([name for name in held if name.endswith("weight")])
    law = {"W_std": 1.0, "b_std": 1.0, "parameterization": "standard"}
    widths = [held[f"{2 * i}.weight"].shape[0] for i in range(layers)]
    hidden = [layer for width in widths[:-1] for layer in (stax.Dense(width, **law), stax.Relu())]
    _, apply, _ = stax.serial(*hidden, stax.Dense(widths[-1], **law))
    params = []
    for i in range(layers):
        params += [(held[f"{2 * i}.weight"].T, held[f"{2 * i}.bias"][None])] + [()] * (i + 1 < layers)
    kernel = jax.jit(nt.empirical_ntk_fn(apply, trace_axes=(), vmap_axes=0, implementation=3))
    x = jax.numpy.asarray(held["x"])
    return (
        seconds(case, lambda: kernel(x, None, params).block_until_ready()),
        lambda: np.asarray(kernel(x[:4], None, params)),
    )


def analytic(case: SimpleNamespace):  # type: ignore[no-untyped-def]
    jax.config.update("jax_enable_x64", True)
    law = {"W_std": 1.0, "b_std": 1.0, "parameterization": "ntk"}
    x = np.load(case.arrays)["x"].astype(np.float64)
    if case.network == "conv":
        x = x[..., :12, :12].transpose(0, 2, 3, 1)  # channels last
        layers = [stax.Conv(8, (3, 3), padding="SAME", **law), stax.Relu()] * 2 + [stax.GlobalAvgPool()]
    else:
        layers = [stax.Dense(8, **law), stax.Relu()] * (len(np.load(case.arrays).files) // 2 - 1)
    kernel = jax.jit(stax.serial(*layers, stax.Dense(1, **law))[2], static_argnames="get")
    return (
        seconds(case, lambda: kernel(x, None, get=("nngp", "ntk")).ntk.block_until_ready()),
        lambda: np.asarray(kernel(x[:4], None, get="ntk")),
    )


OPERATIONS = {"empirical kernel": empirical, "analytic kernel": analytic}
