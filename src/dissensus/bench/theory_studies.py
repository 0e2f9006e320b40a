"""The studies of `dissensus theory`: embedded networks, drawn and trained, compared with the theory's predictions."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from dissensus import theory
from dissensus.bench.report.comparisons import array_over, claim_of, slope_weights
from dissensus.layers.modulation import Modulation
from dissensus.plots.charts import INK, PALETTE, Curve, Panel, curve_figure

INPUTS, VARIANCE = 4, 2.0
LAW: dict[str, Any] = {"depth": 2, "v": Modulation.constant(1.0), "weight_variance": VARIANCE}
KERNELS = {
    "gp_same": "K_d, within a member",
    "gp_cross": "K_o, between members",
    "common_same": "Θ_d, within a member",
    "common_cross": "Θ_o, between members",
    "individual": "Θ_ind, its modulations",
}
DOTS = {"linestyle": "none", "marker": "o", "markersize": 3.5}
SPEEDS = ("largest stable rate at γ = M over one member's", "at γ = 1, u fixed: speed of differences over the mean's")
LOGS = {"xscale": "log", "yscale": "log", "xlabel": "width N"}


class Study(NamedTuple):
    """A figure, its findings in sentences, and its rows if they are to be saved."""

    figure: Figure
    sentences: list[str]
    rows: Sequence[dict[str, Any]] = ()


class Setting(NamedTuple):
    """Modulations, which of them are trained, and γ (None means M for M members); two hidden layers."""

    u: Modulation
    trained: Literal["both", "none"] = "both"
    gamma: float | None = None

    def kernels(self, x: Tensor, other: Tensor | None = None) -> theory.EmbeddedKernels:
        """The analytic kernels."""
        return theory.embedded_kernels(x, other, activation="relu", trained=self.trained, u=self.u, **LAW)

    def dynamics(self, members: int) -> theory.EnsembleDynamics:
        """The predicted training on the six points."""
        return theory.ensemble_dynamics(*SIX, kernels=self.kernels, members=members, gamma=self.gamma or members)

    def draw(self, *, width: int, members: int, seed: int, dtype: torch.dtype) -> theory.EmbeddedNetwork:
        """One random network."""
        generator = torch.Generator().manual_seed(seed)
        size: dict[str, Any] = {"width": width, "members": members, "dtype": dtype}
        return theory.EmbeddedNetwork.draw(INPUTS, u=self.u, generator=generator, **size, **LAW)


def random_data(count: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Random data of unit variance: x (count, 4), y (count, 1)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, INPUTS, generator=generator, dtype=torch.float64)
    return x, torch.randn(count, 1, generator=generator, dtype=torch.float64)


SETTINGS = {
    "independent: u = ±1, γ = M": Setting(Modulation.sign()),
    "collective: dropout 0.8, γ = 1": Setting(Modulation.bernoulli(0.8), "none", 1.0),
}
SIX = random_data(6, seed=3)


def kernels(widths: Sequence[int], *, seeds: int) -> Study:
    """Deviation of empirical from analytic kernels over the width, one panel per setting, with a line of slope −½."""
    panels, said = [], []
    for name, setting in SETTINGS.items():
        far = deviations(setting, widths, seeds)  # (5, W)
        curves = [
            Curve(widths, each, label, {"color": colour, "marker": "o", "markersize": 4, "linewidth": 1})
            for each, label, colour in zip(far, KERNELS.values(), PALETTE, strict=False)
            if each.any()
        ]
        between = far[list(KERNELS).index("common_cross")].tolist()
        guide = [1.6 * between[0] * (width / widths[0]) ** -0.5 for width in widths]
        curves.append(Curve(widths, guide, "N^−½", {"color": INK, "linestyle": "--", "linewidth": 0.9}))
        labels = {"ylabel": "deviation / kernel within a member", "title": name}
        panels.append(Panel(curves, LOGS | labels, ticks=widths))
        first, last = (f"by {between[i]:.3g} at N = {widths[i]}" for i in (0, -1))
        said.append(f"{name}: Θ_o deviates {first}, {last}")
    return Study(curve_figure(panels, size=(9.6, 3.6)), said)


def deviations(setting: Setting, widths: Sequence[int], seeds: int) -> Tensor:
    """(5, W) root mean square of empirical minus analytic KERNELS of two inputs, relative to the kernel within a member."""
    x, _ = random_data(2, seed=0)
    expected, found = setting.kernels(x[:1], x[1:]), []
    analytic = torch.cat([getattr(expected, kernel)[0] for kernel in KERNELS])  # (5,)
    scale = analytic[[0, 0, 2, 2, 4]]  # between members it may be 0
    for width, seed in product(widths, range(seeds)):
        network = setting.draw(width=width, members=2, seed=seed, dtype=torch.float64)
        # The last hidden layer's units (M, 2, N): covariances given all layers below the output's.
        eye = math.sqrt(width) * torch.eye(width, dtype=x.dtype)
        last = network.outputs({**network.shared, "weight3": eye}, network.own, x)
        blocks = network.blocks(x[:1], x[1:])
        own = blocks.individual[0] * (setting.trained == "both")
        found.append(torch.cat([VARIANCE / width * last[:, 1] @ last[0, 0], blocks.common[0].flatten(), own.flatten()]))
    off = torch.stack(found).view(len(widths), seeds, -1) - analytic
    return (off.square().mean(1).sqrt() / torch.where(scale == 0, 1.0, scale)).T


def training_course(setting: str, *, width: int, members: int, steps: int, seed: int) -> tuple[Tensor, Tensor, float]:
    """Residuals (T, M, 6, 1) of training at 0.1·B/λ_max, their prediction by the kernels, and its largest relative error."""
    (x, y), law = SIX, SETTINGS[setting]
    dynamics = law.dynamics(members)
    rate = 0.05 * dynamics.largest_rate
    network = law.draw(width=width, members=members, seed=seed, dtype=torch.float32)
    learning: dict[str, Any] = {"train_modulations": law.trained == "both", "gamma": dynamics.gamma}
    outputs, _ = theory.train_embedded(network, x.float(), y.float(), steps=steps, learning_rate=rate, **learning)
    found = outputs.double()
    predicted = dynamics.members(found[0], range(steps + 1), learning_rate=rate, descent="steps")
    error = (found - predicted).flatten(1).norm(dim=1).max() / (found[0] - y).norm()
    return found - y, predicted - y, float(error)


def dynamics(width: int, members: int, steps: int, seed: int) -> Study:
    """Training curves of both modes in each setting: points are measured, lines predicted."""
    panels, said, times = [], [], range(steps + 1)
    for name in SETTINGS:
        *both, error = training_course(name, width=width, members=members, steps=steps, seed=seed)
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
    """Error of predicted training over the width, one point per seed, with its log-log slope, fitted for each seed."""
    asked = product(SETTINGS, widths, range(seeds))
    places: list[dict[str, Any]] = [{"setting": name, "width": width, "seed": seed} for name, width, seed in asked]
    rows = [place | {"error": training_course(**place, members=members, steps=60)[2]} for place in places]
    errors = array_over(rows, "error", setting=SETTINGS, seed=range(seeds), width=widths)  # (2, S, W, 1)
    curves, said = [], []
    for name, each, colour, shift in zip(SETTINGS, errors, PALETTE, (0.97, 1.03), strict=False):
        slope = claim_of("", "", slope_weights(widths) @ np.log2(each), "")
        said.append(f"{name}: slope {slope.text}")
        x = shift * np.tile(widths, seeds)
        curves.append(Curve(x, each.ravel(), said[-1], {"color": colour, "alpha": 0.6, **DOTS}))
    panel = Panel(curves, {**LOGS, "ylabel": "largest error / initial residual"}, ticks=widths)
    return Study(curve_figure([panel], size=(6.2, 3.8)), said, rows)


def regimes() -> Study:
    """The numbers of `regime_map` over the collectivity, a curve for each number of members."""
    collectivities, members = [i / 40 for i in range(41)], [2, 4, 8, 16, 32, 64, 128]
    axes = {"yscale": "log", "ylim": (5e-3, 1.2), "xlabel": "collectivity U₁²/U₂"}
    found, panels = regime_map(collectivities, members), []
    for title, values in zip(SPEEDS, found, strict=True):
        looks = zip(members, PALETTE, values.T, strict=False)
        curves = [Curve(collectivities, each, f"M = {count}", {"color": colour}) for count, colour, each in looks]
        panels.append(Panel(curves, {**axes, "title": title}))
    rates = {i / 40: float(found[0, i, -1]) for i in (0, 20, 40)}
    said = [f"collectivity {c:.1f}: 128 members take {rate:.3g} of one's rate" for c, rate in rates.items()]
    return Study(curve_figure(panels, size=(9.6, 3.6)), said)


def regime_map(collectivities: Sequence[float], members: Sequence[int]) -> Tensor:
    """(2, R, S) for u = p + √(1 − p²) N(0, 1), with R collectivities p² and S numbers of members.

    First the largest stable rate at γ = M over one member's; second, at γ = 1 with fixed u, differences' speed over means'.
    """
    found = []
    for collectivity, count in product(collectivities, members):
        u = Modulation.between(math.sqrt(collectivity))
        rates = [Setting(u).dynamics(each).largest_rate for each in (count, 1)]
        fixed = Setting(u, "none", 1.0).dynamics(count)
        found.append((rates[0] / rates[1], fixed.difference_eigenvalues[-1] / fixed.mean_eigenvalues[-1]))
    return torch.tensor(found, dtype=torch.float64).T.view(2, len(collectivities), len(members))
