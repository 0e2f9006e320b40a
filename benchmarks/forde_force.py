"""Draws the law of FoRDE's force: along dimension d it is proportional to 1/Σ_dd (Trinh et al. 2024, section 3).

    python benchmarks/forde_force.py --figure docs/figures/forde-force.png

Nothing is trained. Directions are random unit vectors in 24 dimensions, Σ is diagonal with 1/Σ_dd from 0.01 to 10. Left, two
members: the force over the distance between them, dimension by dimension. Right, sixteen members and fifty examples: the root
mean square of the force over that of the distance to the members' mean.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

from dissensus import Lengthscales
from dissensus.numerics.rbf_kernels import BANDWIDTHS, FLOOR, Bandwidth, directions, kernel_exponents
from dissensus.plots.charts import INK, PALETTE, STYLE

DIMENSIONS = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, default=Path("forde-force.png"))
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    precision = torch.logspace(-2, 1, DIMENSIONS, dtype=torch.float64)
    pair, many = (unit_vectors(members, examples, generator) for members, examples in ((2, 1), (16, 50)))
    left = {name: (force(pair, precision, name) / (pair - pair.flip(0)))[0, 0] for name in BANDWIDTHS}
    right = {
        name: root_mean_square(force(many, precision, name)) / root_mean_square(many - many.mean(0))
        for name in BANDWIDTHS
    }
    for title, found in (("two members", left), ("sixteen members", right)):
        for name, values in found.items():
            print(f"{title}, {name}: slope {slope(precision, values):.4f} of the logarithms, 1 by the proposition")
    drawn({"Two members, one example": left, "Sixteen members, fifty examples": right}, precision).savefig(
        arguments.figure, dpi=110, facecolor="white"
    )


def unit_vectors(members: int, examples: int, generator: torch.Generator) -> Tensor:
    """(M, B, D) directions, as those of input gradients."""
    return directions(torch.randn(members, examples, DIMENSIONS, dtype=torch.float64, generator=generator))


def force(s: Tensor, precision: Tensor, bandwidth: Bandwidth) -> Tensor:
    """(M, B, D) −∂r_i/∂s_i, r_i the log density of member i among all, Σ⁻¹ = diag(precision)."""
    scales = Lengthscales(torch.eye(DIMENSIONS, dtype=torch.float64), precision)

    def log_density(s: Tensor) -> Tensor:
        exponents = kernel_exponents(scales.scale(s), bandwidth, FLOOR)[0]  # (B, M, M)
        return exponents.transpose(0, 1).flatten(1).logsumexp(1).sum()  # up to the constant log B

    return -torch.func.grad(log_density)(s)


def root_mean_square(values: Tensor) -> Tensor:
    """(D,) over members and examples."""
    return values.square().mean((0, 1)).sqrt()


def slope(x: Tensor, y: Tensor) -> float:
    """Of the straight line through the logarithms."""
    design = torch.stack([x.log(), torch.ones_like(x)], 1)
    return float(torch.linalg.lstsq(design, y.log()[:, None]).solution[0])


def drawn(panels: dict[str, dict[str, Tensor]], precision: Tensor) -> Figure:
    """Measured force against 1/Σ_dd on logarithmic axes, one colour a bandwidth, with lines of slope one."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 3.6))
        for axes, (title, found) in zip(figure.subplots(1, 2), panels.items(), strict=True):
            for (name, values), colour, size in zip(found.items(), PALETTE, (9, 6, 3), strict=False):
                axes.plot(precision, values, "o", color=colour, markerfacecolor="none", markersize=size, label=name)
                level = (values / precision)[: DIMENSIONS // 2].log().mean().exp()  # where the force is weak
                axes.plot(precision, level * precision, color=INK, linewidth=0.8, alpha=0.7)
            axes.set(xscale="log", yscale="log", xlabel="1/Σ_dd", ylabel="force / distance along d", title=title)
            axes.legend(title="bandwidth", title_fontsize=8.5)
        figure.subplots_adjust(left=0.08, right=0.98, top=0.9, bottom=0.15, wspace=0.25)
    return figure


if __name__ == "__main__":
    main()
