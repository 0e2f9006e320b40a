"""The pictures of docs/methods and of the front page: every method on a line and in a plane, with one network and one recipe.

    python benchmarks/method_pictures.py                     # docs/figures/methods/NAME.png, docs/figures/front*.png
    python benchmarks/method_pictures.py swag forde front    # these alone

Left: y = x sin x seen in two intervals, standardised; lines are members, the band is two predictive deviations. Right: two
half circles; colour is the entropy of the averaged prediction, in nats. Networks see (x, x²) on the line, because FoRDE and
LIT compare directions of input gradients, and a direction needs two inputs.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image

import dissensus as ds

FOLDER = Path(__file__).parents[1] / "docs" / "figures"
FRONT = {"map": "one network", "deep_ensemble": "DeepEnsemble", "forde": "FoRDE", "batch_ensemble": "BatchEnsemble"}
FRONT |= {"tradi": "TRADI", "node_bnn": "NodeBNN"}
SIGNS = {"modulation": ds.Modulation.sign()}
SETTINGS = {  # where the defaults are for larger networks or longer runs
    "mc_dropout": {"rate": 0.1},
    "batch_ensemble": {"members": 5, **SIGNS},
    "dropout_ensemble": {"members": 5},
    "tradi": {"state_noise": (1e-2, 5e-3)},
    "sghmc": {"weight_prior_std": 1.0, "cycles": 0, "members": 20},
    "hmc": {"weight_prior_std": 1.0, "samples": 20, "warmup": 40, "leapfrog": 30},
    "mean_field_vi": {"deviation_lr": 0.02, "init_std": 0.05},
    "node_bnn": {"latent_lr": 0.01},
    "rank_one_bnn": {"latent_lr": 0.01, "components": 4},
    "lit": {"strength": 0.1},
    "feature_rde": {"layer": "layers.3", "head": "layers.4", "projection": 3},
    "gaussian_perturbation": {"noise": 0.1},
    "laplace": {"covariance": "joint"},  # by rows it is unsure everywhere with so few of them
}
SEVERAL = ("deep_ensemble", "weight_rde", "function_rde", "feature_rde", "forde", "svgd", "lit")
SIZED = ("weight_rde", "function_rde", "svgd", "sghmc", "hmc", "mean_field_vi", "node_bnn", "rank_one_bnn")
CHAINS = ("sghmc", "hmc")
RUNS = {  # rate and epochs, by method and number of outputs, where they are not 0.01 and 300
    ("sghmc", 1): (3e-4, 1500),  # the noise of 0.1 makes the loss a hundred times as steep
    ("sghmc", 2): (0.05, 300),
    ("tradi", 1): (3e-3, 600),  # what it tracks is the weights' movement, which the rate makes
    ("tradi", 2): (0.03, 60),  # before the loss of two classes that can be separated is zero, and the weights rest
}


def fitted(name: str, x: torch.Tensor, y: torch.Tensor, likelihood: ds.Likelihood, outputs: int) -> ds.Posterior:
    """The method after 300 epochs of Adam at 0.01, or what RUNS has for it; SGHMC brings its own steps."""
    torch.manual_seed(0)
    count = 5 if name in SEVERAL else 2 if name in CHAINS else 1
    networks = [ds.nets.MLP(x.shape[1], outputs, hidden=(32, 32)) for _ in range(count)]
    settings = SETTINGS.get(name, {}) | ({"data_size": len(x)} if name in SIZED else {})
    rate, epochs = RUNS.get((name, outputs), (1e-2, 300))
    if name == "sghmc":
        settings["lr"] = rate
    posterior = ds.METHODS[name](networks if count > 1 else networks[0], likelihood=likelihood, **settings)
    optimizer = None if name == "sghmc" else torch.optim.Adam(posterior.parameter_groups(rate))
    batches = ds.data.Batches(x, y, batch_size=len(x) // 2, shuffle=True, seed=0)
    ds.fit(posterior, batches, epochs=epochs, optimizer=optimizer, progress=False)
    return posterior


def line(name: str, *axes: plt.Axes) -> None:
    """Members, mean and band along a line, the same in each of the axes."""
    x, y = ds.data.x_sin_x()
    centre, scale = x.mean(), x.std()

    def features(x: torch.Tensor) -> torch.Tensor:
        z = (x - centre) / scale
        return torch.cat([z, z.square()], 1)

    posterior = fitted(name, features(x), y / 3, ds.Regression(noise=0.1), 1)
    grid = torch.linspace(0.0, 7.5, 200)[:, None]
    found = posterior.predict(features(grid))
    mean, half = 3 * found.mean[:, 0], 6 * found.total[:, 0].sqrt()
    for axis in axes:
        axis.fill_between(grid[:, 0], mean - half, mean + half, color="tab:blue", alpha=0.25, linewidth=0)
        axis.plot(grid[:, 0], 3 * found.member_means[:12, :, 0].T, color="0.35", linewidth=0.6, alpha=0.7)
        axis.plot(grid[:, 0], mean, color="tab:blue")
        axis.plot(x[:, 0], y[:, 0], ".", color="black", markersize=3)
        axis.set(xlim=(0, 7.5), ylim=(-9, 7), xticks=[], yticks=[])


def plane(name: str, *axes: plt.Axes) -> None:
    """Entropy of the averaged prediction over a plane, the same in each of the axes."""
    x, y = ds.data.two_moons(300, noise=0.1, seed=0)
    posterior = fitted(name, x, y, ds.Classification(), 2)
    across, up = np.linspace(-2.5, 3.5, 90), np.linspace(-2.2, 2.7, 70)
    grid = torch.tensor(np.stack(np.meshgrid(across, up), -1).reshape(-1, 2), dtype=torch.float32)
    entropy = posterior.predict(grid).total.reshape(70, 90)
    for axis in axes:
        axis.pcolormesh(across, up, entropy, cmap="Blues", vmin=0, vmax=np.log(2), rasterized=True)
        for label, colour in ((0, "tab:orange"), (1, "tab:green")):
            axis.plot(*x[y == label].T, ".", color=colour, markersize=2.5)
        axis.set(xlim=(-2.5, 3.5), ylim=(-2.2, 2.7), xticks=[], yticks=[])


def save(figure: plt.Figure, path: Path, dpi: int = 110) -> None:
    """A picture of few colours, so that a page of them stays small."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    plt.close(figure)
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="methods; all of them, and the front page's picture, by default")
    names = parser.parse_args().names
    for name in names or [*ds.METHODS, "front"]:
        if name == "front":
            front()
            continue
        figure, axes = plt.subplots(1, 2, figsize=(7, 2.6), layout="constrained")
        line(name, axes[0])
        plane(name, axes[1])
        save(figure, FOLDER / "methods" / f"{name.replace('_', '-')}.png")
        print(name, flush=True)


def front() -> None:
    """One column for each of a few methods; for phones two rows of three."""
    wide, axes = plt.subplots(2, 6, figsize=(10, 3.4), layout="constrained")
    narrow, folded = plt.subplots(4, 3, figsize=(4.2, 4.9), layout="constrained")
    for number, (name, title) in enumerate(FRONT.items()):
        row, column = divmod(number, 3)
        columns = axes[:, number], folded[2 * row : 2 * row + 2, column]
        for each in columns:
            each[0].set_title(title, fontsize=10)
        line(name, *(each[0] for each in columns))
        plane(name, *(each[1] for each in columns))
    save(wide, FOLDER / "front.png", dpi=180)
    save(narrow, FOLDER / "front-narrow.png", dpi=180)


if __name__ == "__main__":
    main()
