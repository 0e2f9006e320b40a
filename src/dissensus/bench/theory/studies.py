"""What `dissensus theory` shows: drawn and trained embedded networks beside what the theory says of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

from dissensus.reporting.plots import INK, PALETTE, STYLE, Curve, Panel, curve_figure
from dissensus.surgery.modulation import Modulation
from dissensus.theory import EmbeddedNetwork, embedded_kernels, ensemble_dynamics, train_embedded
from dissensus.theory.embedded import EmbeddedKernels

Measured = dict[str, Any]  # a row of a table
INPUTS, VARIANCE = 4, 2.0
KERNELS = {
    "gp_same": "K_d, within a member",
    "gp_cross": "K_o, between members",
    "common_same": "Θ_d, within a member",
    "common_cross": "Θ_o, between members",
    "individual": "Θ_ind, its modulations",
}
DOTS = {"linestyle": "none", "marker": "o", "markersize": 3.5}


class Study(NamedTuple):
    """A figure, what it says in sentences, and the rows it is made of where they are to be kept."""

    figure: Figure
    said: list[str]
    rows: Sequence[Measured] = ()


class Setting(NamedTuple):
    """Modulations, which of them learn, and γ as a function of the number of members; two hidden layers."""

    u: Modulation
    trained: Literal["both", "none"] = "both"
    gamma: Callable[[int], float] = float

    @property
    def law(self) -> dict[str, Any]:
        return {"depth": 2, "u": self.u, "v": Modulation.constant(1.0), "weight_variance": VARIANCE}

    def kernels(self, x: Tensor, other: Tensor | None = None) -> EmbeddedKernels:
        """The analytic ones."""
        return embedded_kernels(x, other, activation="relu", trained=self.trained, **self.law)

    def draw(self, *, width: int, members: int, seed: int, dtype: torch.dtype) -> EmbeddedNetwork:
        """One random network."""
        generator = torch.Generator().manual_seed(seed)
        return EmbeddedNetwork.draw(INPUTS, width=width, members=members, generator=generator, dtype=dtype, **self.law)


SETTINGS = {
    "independent: u = ±1, γ = M": Setting(Modulation.sign()),
    "collective: dropout 0.8, γ = 1": Setting(Modulation.bernoulli(0.8), "none", lambda members: 1.0),
}


def data(count: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """(x (count, 4), y (count, 1)) of unit variance."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, INPUTS, generator=generator, dtype=torch.float64)
    return x, torch.randn(count, 1, generator=generator, dtype=torch.float64)


def empirical_kernels(network: EmbeddedNetwork, x: Tensor, *, trained: str) -> dict[str, float]:
    """Those of the first input with the second, of the first member and between it and the second."""
    blocks = network.blocks(x[:1], x[1:])
    width = len(network.shared["weight3"])
    # The last hidden layer's units (M, 2, N): covariances given all layers below the output's.
    eye = math.sqrt(width) * torch.eye(width, dtype=x.dtype)
    last = network.outputs({**network.shared, "weight3": eye}, network.own, x)
    return {
        "gp_same": VARIANCE * float(last[0, 0] @ last[0, 1]) / width,
        "gp_cross": VARIANCE * float(last[0, 0] @ last[1, 1]) / width,
        "common_same": float(blocks.common[0, 0]),
        "common_cross": float(blocks.common[0, 1]),
        "individual": float(blocks.individual[0]) if trained == "both" else 0.0,
    }


def kernels(widths: Sequence[int], *, seeds: int) -> Study:
    """Deviation of empirical from analytic kernels over the width, one panel a setting, with a line of slope −½."""
    x, panels, said = data(2, seed=0)[0], [], []
    rows: list[Measured] = []
    for name, setting in SETTINGS.items():
        expected = setting.kernels(x[:1], x[1:])
        for width, seed in product(widths, range(seeds)):
            network = setting.draw(width=width, members=2, seed=seed, dtype=torch.float64)
            place = {"setting": name, "width": width, "seed": seed}
            for kernel, found in empirical_kernels(network, x, trained=setting.trained).items():
                rows.append(
                    {**place, "kernel": kernel, "empirical": found, "analytic": float(getattr(expected, kernel))}
                )
        curves = []
        for (kernel, label), colour in zip(KERNELS.items(), PALETTE, strict=False):
            # Relative to the same kernel within a member: between members it may be 0.
            scale = float(getattr(expected, kernel.replace("cross", "same"))) or 1.0
            mine = [row for row in rows if (row["setting"], row["kernel"]) == (name, kernel)]
            off = torch.tensor([row["empirical"] - row["analytic"] for row in mine], dtype=x.dtype).view(
                len(widths), seeds
            )
            far = (off.square().mean(1).sqrt() / scale).tolist()
            if kernel == "common_cross":
                said.append(
                    f"{name}: Θ_o deviates by {far[0]:.3g} at N = {widths[0]}, by {far[-1]:.3g} at N = {widths[-1]}"
                )
                guide = [1.6 * far[0] * (width / widths[0]) ** -0.5 for width in widths]
            if max(far) > 0:
                look = {"color": colour, "marker": "o", "markersize": 4, "linewidth": 1}
                curves.append(Curve(widths, far, label, look))
        curves.append(Curve(widths, guide, "N^−½", {"color": INK, "linestyle": "--", "linewidth": 0.9}))
        labels = {"xlabel": "width N", "ylabel": "deviation / kernel within a member", "title": name}
        panels.append(Panel(curves, {"xscale": "log", "yscale": "log", **labels}, ticks=widths))
    return Study(curve_figure(panels, size=(9.6, 3.6)), said, rows)


def course(setting: Setting, *, width: int, members: int, steps: int, seed: int) -> tuple[Tensor, Tensor, float]:
    """Residuals (T, M, 6, 1) of a network trained at 0.1·B/λ_max on six points, what the kernels said before, and its error.

    The error is the largest over time, relative to the initial residual.
    """
    (x, y), gamma = data(6, seed=3), setting.gamma(members)
    dynamics = ensemble_dynamics(x, y, kernels=setting.kernels, members=members, gamma=gamma)
    rate = 0.05 * dynamics.largest_rate
    outputs, _ = train_embedded(
        setting.draw(width=width, members=members, seed=seed, dtype=torch.float32), x.float(), y.float(),
        steps=steps, learning_rate=rate, gamma=gamma, train_modulations=setting.trained == "both",
    )  # fmt: skip
    found = outputs.double()
    predicted = dynamics.members(found[0], range(steps + 1), learning_rate=rate, descent="steps")
    error = (found - predicted).flatten(1).norm(dim=1).max() / (found[0] - y).norm()
    return found - y, predicted - y, float(error)


def dynamics(width: int, members: int, steps: int, seed: int) -> Study:
    """Training curves of both modes in each setting, points measured and lines predicted."""
    panels, said, times = [], [], range(steps + 1)
    for name, setting in SETTINGS.items():
        *both, error = course(setting, width=width, members=members, steps=steps, seed=seed)
        means = [residual.mean(1, keepdim=True) for residual in both]
        modes = {"mean − target": means, "members − mean": [f - mean for f, mean in zip(both, means, strict=True)]}
        curves = []
        for (label, mode), colour in zip(modes.items(), PALETTE, strict=False):
            measured, predicted = (each.flatten(1).square().mean(1).sqrt() for each in mode)
            curves.append(Curve(times, predicted, f"{label}, predicted", {"color": colour, "linewidth": 1.2}))
            curves.append(Curve(times[::3], measured[::3], f"{label}, trained", {"color": colour, **DOTS}))
        panels.append(Panel(curves, {"yscale": "log", "xlabel": "steps", "ylabel": "root mean square", "title": name}))
        said.append(f"{name}: largest error {100 * error:.1f} % of the initial residual")
    return Study(curve_figure(panels, size=(9.6, 3.6)), said)


def slope(rows: Sequence[Measured]) -> tuple[float, float, float]:
    """(slope, lower, upper) of log error over log width, with a 95 % interval over seeds."""
    x, y = torch.tensor([(row["width"], row["error"]) for row in rows], dtype=torch.float64).log().T
    centred = x - x.mean()
    found = float(centred @ y / (centred @ centred))
    rest = y - y.mean() - found * centred
    error = float((rest @ rest / (len(y) - 2) / (centred @ centred)).sqrt())
    return found, found - 1.96 * error, found + 1.96 * error


def width(widths: Sequence[int], *, seeds: int, members: int) -> Study:
    """Error of predicted training over the width, a point a seed, with the fitted slope."""
    rows: list[Measured] = []
    curves, said = [], []
    for (name, setting), colour, shift in zip(SETTINGS.items(), PALETTE, (0.97, 1.03), strict=False):
        mine: list[Measured] = []
        for width, seed in product(widths, range(seeds)):
            *_, error = course(setting, width=width, members=members, steps=60, seed=seed)
            mine.append({"setting": name, "width": width, "seed": seed, "error": error})
        rows += mine
        said.append("{}: slope {:.3f}, 95 % interval {:.3f} to {:.3f}".format(name, *slope(mine)))
        x, y = [shift * row["width"] for row in mine], [row["error"] for row in mine]
        label = "{}: slope {:.2f} ({:.2f}…{:.2f})".format(name, *slope(mine))
        curves.append(Curve(x, y, label, {"color": colour, "alpha": 0.6, **DOTS}))
    axes = {"xscale": "log", "yscale": "log", "xlabel": "width N", "ylabel": "largest error / initial residual"}
    return Study(curve_figure([Panel(curves, axes, ticks=widths)], size=(6.2, 3.8)), said, rows)


def regime_map(collectivities: Sequence[float], members: Sequence[int]) -> tuple[Tensor, Tensor]:
    """((R, S), (R, S)) for u = p + √(1 − p²) N(0, 1) of R collectivities p² and S numbers of members.

    The largest stable rate at γ = M over one member's; and at γ = 1, u fixed, the speed of differences over the mean's.
    """
    x, _ = data(6, seed=3)
    rate, speed = torch.zeros(2, len(collectivities), len(members), dtype=torch.float64)

    def largest(kernel: Tensor) -> float:
        return float(torch.linalg.eigvalsh(kernel)[-1])

    for i, collectivity in enumerate(collectivities):
        u = Modulation.between(math.sqrt(collectivity))
        learning, fixed = Setting(u).kernels(x), Setting(u, "none").kernels(x)
        for j, count in enumerate(members):
            rate[i, j] = largest(learning.mean_mode(1, 1.0)) / largest(learning.mean_mode(count, float(count)))
            speed[i, j] = largest(fixed.difference_mode(count, 1.0)) / largest(fixed.mean_mode(count, 1.0))
    return rate, speed


def regimes() -> Study:
    """The map of collectivity × members: two panels of the numbers of `regime_map`."""
    collectivities, members = [i / 40 for i in range(41)], [2, 4, 8, 16, 32, 64, 128]
    rate, speed = regime_map(collectivities, members)
    shown = {
        "largest stable rate at γ = M,\nrelative to one member": rate,
        "at γ = 1, u fixed: speed of differences\nover that of the mean": speed,
    }
    places = range(len(members))
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(9.6, 4.0), layout="constrained")
        for axes, (title, values) in zip(figure.subplots(1, 2), shown.items(), strict=True):
            logs = values.clamp(min=1e-3).log10().numpy()
            drawn = axes.pcolormesh(places, collectivities, logs, cmap="viridis", vmin=-2, vmax=0)
            levels = {"levels": [0.02, 0.05, 0.1, 0.2, 0.5], "colors": "white", "linewidths": 0.8}
            lines = axes.contour(places, collectivities, values.numpy(), **levels)
            axes.clabel(lines, fmt="%g", fontsize=8)
            axes.set_xticks(places, [str(count) for count in members])
            axes.set(xlabel="members M", ylabel="collectivity U₁²/U₂", title=title)
            figure.colorbar(drawn, ax=axes, ticks=[-2, -1, 0]).ax.set_yticklabels(["0.01", "0.1", "1"])
    said = [
        f"collectivity {collectivities[i]:.1f}: 128 members at γ = M take {float(rate[i, -1]):.3g} of one's rate"
        for i in (0, 20, 40)
    ]
    return Study(figure, said)
