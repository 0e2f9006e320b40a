"""Writes tests/theory/neural_tangents.json: kernels of wide networks by neural-tangents, to compare ours with.

    python3.11 -m venv tangents
    tangents/bin/pip install jax==0.4.23 jaxlib==0.4.23 tf2jax==0.3.6 "numpy<2" "scipy<1.12" neural-tangents==0.6.5
    tangents/bin/python benchmarks/make_kernel_vectors.py tests/theory/neural_tangents.json

Newer versions of jax do not import neural-tangents 0.6.5. Its "ntk" form multiplies gradients by W_std and b_std, ours by 1:
the two are compared at W_std = b_std = 1, and at other variances in the "standard" form, where both mean the same.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from neural_tangents import stax

jax.config.update("jax_enable_x64", True)
WIDTH = 64  # of hidden layers; the "standard" tangent kernel depends on it
LAWS = {"ntk": (1.0, 1.0), "standard": (1.4, 0.3)}  # W_std, b_std
ACTIVATIONS = {
    "relu": stax.Relu,
    "leaky_relu": lambda: stax.LeakyRelu(0.2),
    "erf": stax.Erf,
    "gelu": stax.Gelu,
    "tanh": lambda: stax.ElementwiseNumerical(jax.numpy.tanh, deg=200),
    "identity": stax.Identity,
}


def networks(activation, form, w, b):
    """Name -> layers; the tests build the same in torch."""
    law = {"W_std": w, "b_std": b, "parameterization": form}
    phi = ACTIVATIONS[activation]

    def dense(width):
        return stax.Dense(width, **law)

    def conv(strides=(1, 1)):
        return stax.Conv(WIDTH, (3, 3), strides=strides, padding="SAME", **law)

    def residual(*branch):
        return stax.serial(stax.FanOut(2), stax.parallel(stax.Identity(), stax.serial(*branch)), stax.FanInSum())

    yield "dense", stax.serial(dense(WIDTH), phi(), dense(WIDTH), phi(), dense(WIDTH), phi(), dense(1))
    yield "dense-residual", stax.serial(dense(WIDTH), residual(phi(), dense(WIDTH)), phi(), dense(1))
    if activation in ("relu", "erf"):
        yield "conv-flatten", stax.serial(conv(), phi(), conv(), phi(), stax.Flatten(), dense(1))
        yield "conv-pool", stax.serial(conv(), phi(), conv(), phi(), stax.GlobalAvgPool(), dense(1))
        yield (
            "conv-residual",
            stax.serial(
                conv(), residual(phi(), conv(), phi(), conv()), stax.AvgPool((2, 2), strides=(2, 2)), phi(),
                stax.GlobalAvgPool(), dense(WIDTH), phi(), dense(1),
            ),
        )  # fmt: skip


def main() -> None:
    random = np.random.default_rng(0)
    inputs = {"vectors": random.normal(size=(4, 5)), "images": random.normal(size=(2, 4, 6, 3))}
    rows = []
    for form, (w, b) in LAWS.items():
        for activation in ACTIVATIONS:
            for name, (_, _, kernel) in networks(activation, form, w, b):
                x = inputs["images" if name.startswith("conv") else "vectors"]
                found = kernel(x, None, ("nngp", "ntk"))
                rows.append(
                    {
                        "network": name,
                        "activation": activation,
                        "parameterization": form,
                        "weight_variance": w**2,
                        "bias_variance": b**2,
                        "nngp": np.asarray(found.nngp).tolist(),
                        "ntk": np.asarray(found.ntk).tolist(),
                    }
                )
    images = inputs["images"].transpose(0, 3, 1, 2)  # channels first, as torch has them
    Path(sys.argv[1]).write_text(
        json.dumps({"width": WIDTH, "vectors": inputs["vectors"].tolist(), "images": images.tolist(), "rows": rows})
    )


if __name__ == "__main__":
    main()
