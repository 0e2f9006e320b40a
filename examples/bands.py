"""How far off may a regression be, and why? Bands of an ensemble on x sin x, split into noise and lack of data.

The aleatoric band is the noise the ensemble learned: the same everywhere, and more data would not shrink it. The epistemic
band is what the members disagree on: narrow at the data, wide in the gap and outside.

    python examples/bands.py --out bands.png
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import dissensus as ds

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def bands(grid: Tensor, predictive: ds.Predictive, x: Tensor, y: Tensor) -> Figure:
    """Members, mean, and two standard deviations of each part around it, over the grid (G, 1)."""
    import matplotlib.pyplot as plt

    figure, place = plt.subplots(figsize=(8, 4.5), layout="constrained")
    at, mean = grid[:, 0].numpy(), predictive.mean[:, 0].numpy()
    for part, variance, colour in [
        ("epistemic + aleatoric", predictive.total, "#cfe1f2"),
        ("epistemic", predictive.epistemic, "#7fb3d9"),
    ]:
        reach = 2 * variance[:, 0].sqrt().numpy()
        place.fill_between(at, mean - reach, mean + reach, color=colour, linewidth=0, label=f"± 2 std, {part}")
    place.plot(at, predictive.member_means[:, :, 0].T.numpy(), color="white", linewidth=0.5)  # (G, M)
    place.plot(at, mean, color="#08519c", label="mean")
    place.plot(at, (grid * grid.sin()).numpy(), color="black", linestyle="--", linewidth=1, label="x sin x")
    place.scatter(x.numpy(), y.numpy(), s=8, color="#d94801", zorder=3, label="data")
    place.set(xlim=(at[0], at[-1]), ylim=(-9, 9), xlabel="x", ylabel="y")
    place.legend(loc="lower left", fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bands.png"), help="the figure to write")
    parser.add_argument("--quick", action="store_true", help="a second's worth, to see that it runs")
    options = parser.parse_args()
    steps, members = (150, 4) if options.quick else (500, 10)

    torch.manual_seed(0)
    x, y = ds.data.x_sin_x()  # 45 points in [1.5, 2.5], 45 in [4.5, 6]; the noise's standard deviation is 0.25
    standardise = ds.data.Standardiser.of_rows(x)  # y stays in its own units, so the variances do too
    networks = [ds.nets.MLP(1, 1, hidden=(50, 50)) for _ in range(members)]
    ensemble = ds.DeepEnsemble(networks, likelihood=ds.Regression("learned"))
    optimizer = torch.optim.Adam(ensemble.parameters(), lr=0.02)
    loader = ds.data.Batches(standardise(x), y, batch_size=len(x))  # one step an epoch
    ds.fit(ensemble, loader, epochs=steps, optimizer=optimizer, progress=False)

    grid = torch.linspace(-1.0, 8.0, 361)[:, None]
    predictive = ensemble.predict(standardise(grid))
    low, high = predictive.interval(0.95)  # of the mixture, by bisection: not mean ± 1.96 std
    at = grid[:, 0]
    places = {
        "at the data": ((at >= 1.5) & (at <= 2.5)) | ((at >= 4.5) & (at <= 6)),
        "in the gap": (at > 2.5) & (at < 4.5),
        "outside": (at < 1.5) | (at > 6),
    }
    print(f"{'standard deviations':22}{'aleatoric':>11}{'epistemic':>11}{'total':>8}{'width of 95 %':>15}")
    for name, rows in places.items():
        parts = (predictive.aleatoric, predictive.epistemic, predictive.total)
        noise, doubt, both = (part[rows].mean().sqrt() for part in parts)
        print(f"{name:22}{noise:11.3f}{doubt:11.3f}{both:8.3f}{(high - low)[rows].mean():15.3f}")

    bands(grid, predictive, x, y).savefig(options.out, dpi=150)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
