"""Where is a classifier unsure? Entropy maps of one network, an ensemble and MC dropout on two moons.

One network is unsure only along its boundary. An ensemble is also unsure where its members draw the boundary differently,
which is where no data told them: the lower row, `epistemic`, shows that part alone. It is zero for one network.

    python examples/moons.py --out moons.png
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


def posteriors(members: int) -> dict[str, ds.Posterior]:
    """Name -> untrained posterior, all of the same kind of network."""
    hidden = (64, 64)
    return {
        "MAP": ds.MAP(ds.nets.MLP(2, 2, hidden=hidden)),
        "deep ensemble": ds.DeepEnsemble([ds.nets.MLP(2, 2, hidden=hidden) for _ in range(members)]),
        "MC dropout": ds.MCDropout(ds.nets.MLP(2, 2, hidden=hidden, dropout=0.2), samples=100),
    }


def entropy_maps(predictives: dict[str, ds.Predictive], axis: Tensor, x: Tensor, y: Tensor) -> Figure:
    """Total entropy above, epistemic part below, one column per method; predictives are over the grid axis × axis."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(predictives), figsize=(9.6, 6.2), sharex=True, sharey=True, layout="constrained")
    extent = (axis[0].item(), axis[-1].item()) * 2
    for column, (name, predictive) in enumerate(predictives.items()):
        for row, (part, entropy) in enumerate([("total", predictive.total), ("epistemic", predictive.epistemic)]):
            place = axes[row, column]
            picture = entropy.reshape(len(axis), len(axis)).T.numpy()  # imshow wants rows of one second coordinate
            shown = place.imshow(picture, origin="lower", extent=extent, cmap="magma", vmin=0, vmax=0.6931)
            place.scatter(*x.T.numpy(), c=y.numpy(), cmap="coolwarm", s=5, linewidths=0)
            place.set_title(f"{name}: {part}", fontsize=10)
    figure.colorbar(shown, ax=axes, shrink=0.7, label="nats (ln 2 = a coin)")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("moons.png"), help="the figure to write")
    parser.add_argument("--quick", action="store_true", help="a second's worth, to see that it runs")
    options = parser.parse_args()
    epochs, members, side = (10, 3, 30) if options.quick else (100, 10, 150)

    torch.manual_seed(0)
    x, y = ds.data.two_moons(300, seed=0)
    x_test, y_test = ds.data.two_moons(1000, seed=1)
    axis = torch.linspace(-3.0, 4.0, side)
    grid = torch.cartesian_prod(axis, axis)  # (side², 2)

    maps = {}
    print(f"{'':16}{'accuracy':>10}{'test nll':>10}{'epistemic: test':>17}{'map':>8}")
    for name, posterior in posteriors(members).items():
        loader = ds.data.Batches(x, y, batch_size=50, shuffle=True, seed=0)
        ds.fit(posterior, loader, epochs=epochs, progress=False)
        test = posterior.predict(x_test)
        maps[name] = posterior.predict(grid)
        accuracy, nll = ds.metrics.accuracy(test.mean, y_test), -test.log_prob(y_test).mean()
        print(f"{name:16}{accuracy:10.3f}{nll:10.3f}{test.epistemic.mean():17.4f}{maps[name].epistemic.mean():8.4f}")

    entropy_maps(maps, axis, x, y).savefig(options.out, dpi=150)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
