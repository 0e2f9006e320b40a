"""What `dissensus theory` shows: drawn and trained embedded networks beside what the theory says of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from dissensus.reporting.estimates import array_over, claim_of, slope_weights
from dissensus.reporting.plots import INK, PALETTE, Curve, Panel, curve_figure
from dissensus.surgery.modulation import Modulation
from dissensus.theory import EmbeddedNetwork, embedded_kernels, ensemble_dynamics, train_embedded
from dissensus.theory.dynamics import EnsembleDynamics
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
LOGS = {"xscale": "log", "yscale": "log", "xlabel": "width N"}


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

    def dynamics(self, members: int) -> EnsembleDynamics:
        """Of training on the six points, by these kernels."""
        return ensemble_dynamics(*SIX, kernels=self.kernels, members=members, gamma=self.gamma(members))

    def draw(self, *, width: int, members: int, seed: int, dtype: torch.dtype) -> EmbeddedNetwork:
        """One random network."""
        generator = torch.Generator().manual_seed(seed)
        return EmbeddedNetwork.draw(INPUTS, width=width, members=members, generator=generator, dtype=dtype, **self.law)


def mean_gradient(members: int) -> float:
    """γ = 1."""
    return 1.0


def data(count: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """(x (count, 4), y (count, 1)) of unit variance."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, INPUTS, generator=generator, dtype=torch.float64)
    return x, torch.randn(count, 1, generator=generator, dtype=torch.float64)


SETTINGS = {
    "independent: u = ±1, γ = M": Setting(Modulation.sign()),
    "collective: dropout 0.8, γ = 1": Setting(Modulation.bernoulli(0.8), "none", mean_gradient),
}
SIX = data(6, seed=3)


def kernels(widths: Sequence[int], *, seeds: int) -> Study:
    """Deviation of empirical from analytic kernels over the width, one panel a setting, with a line of slope −½."""
    panels, said = [], []
    for name, setting in SETTINGS.items():
        far = deviations(setting, widths, seeds)  # (5, W)
        curves = [
            Curve(widths, each, label, {"color": colour, "marker": "o", "markersize": 4, "linewidth": 1})
            for each, label, colour in zip(far, KERNELS.values(), PALETTE, strict=False)
            if each.any()
        ]
        between = far[3]
        guide = 1.6 * between[0] * (torch.tensor(widths) / widths[0]) ** -0.5
        curves.append(Curve(widths, guide, "N^−½", {"color": INK, "linestyle": "--", "linewidth": 0.9}))
        axes = {**LOGS, "ylabel": "deviation / kernel within a member", "title": name}
        panels.append(Panel(curves, axes, ticks=widths))
        first, last = (f"by {float(between[i]):.3g} at N = {widths[i]}" for i in (0, -1))
        said.append(f"{name}: Θ_o deviates {first}, {last}")
    return Study(curve_figure(panels, size=(9.6, 3.6)), said)


def deviations(setting: Setting, widths: Sequence[int], seeds: int) -> Tensor:
    """(5, W) root mean square of empirical minus analytic KERNELS of two inputs, relative to the same within a member."""
    x, _ = data(2, seed=0)
    expected = setting.kernels(x[:1], x[1:])
    analytic = torch.cat([getattr(expected, kernel)[0] for kernel in KERNELS])  # (5,)
    scale = torch.cat([getattr(expected, kernel.replace("cross", "same"))[0] for kernel in KERNELS])  # cross may be 0
    found = []
    for width, seed in product(widths, range(seeds)):
        network = setting.draw(width=width, members=2, seed=seed, dtype=torch.float64)
        blocks = network.blocks(x[:1], x[1:])
        # The last hidden layer's units (M, 2, N): covariances given all layers below the output's.
        eye = math.sqrt(width) * torch.eye(width, dtype=x.dtype)
        last = network.outputs({**network.shared, "weight3": eye}, network.own, x)
        covariances = VARIANCE / width * last[:, 1] @ last[0, 0]  # of the first member, and between it and the second
        own = blocks.individual[0] if setting.trained == "both" else torch.zeros(1)
        found.append(torch.cat([covariances, blocks.common[0].flatten(), own.flatten()]))
    off = torch.stack(found).view(len(widths), seeds, -1) - analytic
    return (off.square().mean(1).sqrt() / torch.where(scale == 0, 1.0, scale)).T


def course(setting: Setting, *, width: int, members: int, steps: int, seed: int) -> tuple[Tensor, Tensor, float]:
    """Residuals (T, M, 6, 1) of a network trained at 0.1·B/λ_max on six points, what the kernels said before, and its error.

    The error is the largest over time, relative to the initial residual.
    """
    (x, y), dynamics = SIX, setting.dynamics(members)
    rate = 0.05 * dynamics.largest_rate
    network = setting.draw(width=width, members=members, seed=seed, dtype=torch.float32)
    learning: dict[str, Any] = {"train_modulations": setting.trained == "both", "gamma": dynamics.gamma}
    outputs, _ = train_embedded(network, x.float(), y.float(), steps=steps, learning_rate=rate, **learning)
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


def width(widths: Sequence[int], *, seeds: int, members: int) -> Study:
    """Error of predicted training over the width, a point a seed, with the slope of its logarithm, fitted seed by seed."""
    rows: list[Measured] = []
    curves, said = [], []
    for (name, setting), colour, shift in zip(SETTINGS.items(), PALETTE, (0.97, 1.03), strict=False):
        mine: list[Measured] = []
        for width, seed in product(widths, range(seeds)):
            *_, error = course(setting, width=width, members=members, steps=60, seed=seed)
            mine.append({"setting": name, "width": width, "seed": seed, "error": error})
        errors = array_over(mine, "error", seed=range(seeds), width=widths)  # (S, W, 1)
        slope = claim_of("", "slope", slope_weights(widths) @ np.log2(errors), "")
        said.append(f"{name}: slope {slope.text}")
        x, y = [shift * row["width"] for row in mine], [row["error"] for row in mine]
        curves.append(Curve(x, y, said[-1], {"color": colour, "alpha": 0.6, **DOTS}))
        rows += mine
    axes = {**LOGS, "ylabel": "largest error / initial residual"}
    return Study(curve_figure([Panel(curves, axes, ticks=widths)], size=(6.2, 3.8)), said, rows)


def regimes() -> Study:
    """The numbers of `regime_map` over the collectivity, a curve for each number of members."""
    collectivities, members = [i / 20 for i in range(21)], [2, 4, 8, 16, 32, 64, 128]
    titles = (
        "largest stable rate at γ = M over one member's",
        "at γ = 1, u fixed: speed of differences over the mean's",
    )
    panels, axes = [], {"yscale": "log", "ylim": (5e-3, 1.2), "xlabel": "collectivity U₁²/U₂"}
    found = regime_map(collectivities, members)
    for title, values in zip(titles, found, strict=True):
        looks = zip(members, PALETTE, values.T, strict=False)
        curves = [Curve(collectivities, each, f"M = {count}", {"color": colour}) for count, colour, each in looks]
        panels.append(Panel(curves, {**axes, "title": title}))
    said = [
        f"collectivity {collectivities[i]:.1f}: 128 members at γ = M take {float(found[0, i, -1]):.3g} of one's rate"
        for i in (0, 10, 20)
    ]
    return Study(curve_figure(panels, size=(9.6, 3.6)), said)


def regime_map(collectivities: Sequence[float], members: Sequence[int]) -> Tensor:
    """(2, R, S) for u = p + √(1 − p²) N(0, 1) of R collectivities p² and S numbers of members.

    The largest stable rate at γ = M over one member's; and at γ = 1, u fixed, the speed of differences over the mean's.
    """
    found = []
    for collectivity, count in product(collectivities, members):
        u = Modulation.between(math.sqrt(collectivity))
        rates = [Setting(u).dynamics(each).largest_rate for each in (count, 1)]
        fixed = Setting(u, "none", mean_gradient).dynamics(count)
        found.append((rates[0] / rates[1], fixed.difference_eigenvalues[-1] / fixed.mean_eigenvalues[-1]))
    return torch.tensor(found, dtype=torch.float64).T.view(2, len(collectivities), len(members))
