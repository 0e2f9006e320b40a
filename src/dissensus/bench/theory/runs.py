"""What `dissensus theory` measures: drawn and trained embedded networks beside what the theory says of them, as rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dissensus.surgery.modulation import Modulation
from dissensus.theory import EmbeddedNetwork, embedded_kernels, ensemble_dynamics, train_embedded
from dissensus.theory.embedded import EmbeddedKernels

Measured = dict[str, Any]  # a row of a table
ONE = Modulation.constant(1.0)
INPUTS, DEPTH, VARIANCE = 4, 2, 2.0
KERNELS = {
    "gp_same": "K_d, within a member",
    "gp_cross": "K_o, between members",
    "common_same": "Θ_d, within a member",
    "common_cross": "Θ_o, between members",
    "individual": "Θ_ind, its modulations",
}


class Setting(NamedTuple):
    """Modulations, which of them learn, and γ as a function of the number of members."""

    u: Modulation
    trained: Literal["both", "none"]
    gamma: Callable[[int], float]


SETTINGS = {
    "independent: u = ±1, γ = M": Setting(Modulation.sign(), "both", float),
    "collective: dropout 0.8, γ = 1": Setting(Modulation.bernoulli(0.8), "none", lambda members: 1.0),
}


def data(count: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """(x (count, 4), y (count, 1)) of unit variance."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, INPUTS, generator=generator, dtype=torch.float64)
    return x, torch.randn(count, 1, generator=generator, dtype=torch.float64)


def kernels_of(setting: Setting) -> Callable[..., EmbeddedKernels]:
    """The analytic kernels of a setting."""
    law: dict[str, Any] = {"depth": DEPTH, "u": setting.u, "v": ONE, "weight_variance": VARIANCE}
    return partial(embedded_kernels, activation="relu", trained=setting.trained, **law)


def draw(setting: Setting, *, width: int, members: int, seed: int, dtype: torch.dtype) -> EmbeddedNetwork:
    """One random network of a setting."""
    law: dict[str, Any] = {"depth": DEPTH, "u": setting.u, "v": ONE, "weight_variance": VARIANCE}
    generator = torch.Generator().manual_seed(seed)
    return EmbeddedNetwork.draw(INPUTS, width=width, members=members, generator=generator, dtype=dtype, **law)


def kernel_rows(widths: Sequence[int], *, seeds: int) -> list[Measured]:
    """Analytic and empirical kernels of two inputs, one row a setting, width, seed and kernel."""
    x, _ = data(2, seed=0)
    rows = []
    for name, setting in SETTINGS.items():
        expected = kernels_of(setting)(x[:1], x[1:])
        for width in widths:
            for seed in range(seeds):
                network = draw(setting, width=width, members=2, seed=seed, dtype=torch.float64)
                blocks = network.blocks(x[:1], x[1:])
                found = {
                    "common_same": float(blocks.common[0, 0]),
                    "common_cross": float(blocks.common[0, 1]),
                    "individual": float(blocks.individual[0]) if setting.trained == "both" else 0.0,
                }
                last = network_features(network, x)  # covariances given all layers below the output's
                found["gp_same"] = VARIANCE * float(last[0, 0] @ last[0, 1]) / width
                found["gp_cross"] = VARIANCE * float(last[0, 0] @ last[1, 1]) / width
                rows += [
                    {"setting": name, "width": width, "seed": seed, "kernel": field, "empirical": found[field],
                     "analytic": float(getattr(expected, field))}
                    for field in KERNELS
                ]  # fmt: skip
    return rows


def network_features(network: EmbeddedNetwork, x: Tensor) -> Tensor:
    """(M, B, N) units of the last hidden layer."""
    width = network.shared[f"weight{DEPTH + 1}"].shape[0]
    eye = math.sqrt(width) * torch.eye(width, dtype=x.dtype)
    return network.outputs({**network.shared, f"weight{DEPTH + 1}": eye}, network.own, x)


def settings_of(rows: Sequence[Measured]) -> dict[str, list[Measured]]:
    """Setting -> its rows, in their order."""
    return {name: [row for row in rows if row["setting"] == name] for name in dict.fromkeys(r["setting"] for r in rows)}


def deviations(rows: Sequence[Measured], kernel: str) -> dict[str, tuple[list[int], list[float]]]:
    """Setting -> (widths, root mean square deviation from the analytic value over seeds).

    Relative to the same kernel within a member: between members it may be 0.
    """
    found = {}
    for name, mine in settings_of(rows).items():
        scale = next(row["analytic"] for row in mine if row["kernel"] == kernel.replace("cross", "same")) or 1.0
        squares: dict[int, list[float]] = {}
        for row in mine:
            if row["kernel"] == kernel:
                squares.setdefault(row["width"], []).append((row["empirical"] - row["analytic"]) ** 2)
        widths = sorted(squares)
        found[name] = widths, [math.sqrt(fmean(squares[width])) / scale for width in widths]
    return found


class Course(NamedTuple):
    """Training of one network beside its prediction."""

    followed: dict[str, tuple[list[float], list[float]]]  # difference -> root mean square of it, measured and predicted
    error: float  # largest over time, relative to the initial residual


def course(setting: Setting, *, width: int, members: int, steps: int, seed: int, dtype: torch.dtype) -> Course:
    """One network trained at 0.1·B/λ_max on six points, and what the kernels said before."""
    x, y = data(6, seed=3)
    gamma = setting.gamma(members)
    dynamics = ensemble_dynamics(x, y, kernels=kernels_of(setting), members=members, gamma=gamma)
    rate = 0.05 * dynamics.largest_rate
    network = draw(setting, width=width, members=members, seed=seed, dtype=dtype)
    outputs, _ = train_embedded(
        network, x.to(dtype), y.to(dtype), steps=steps, learning_rate=rate, gamma=gamma,
        train_modulations=setting.trained == "both",
    )  # fmt: skip
    found = outputs.double()
    predicted = dynamics.members(found[0], range(steps + 1), learning_rate=rate, descent="steps")
    error = (found - predicted).flatten(1).norm(dim=1).max() / (found[0] - y).norm()

    def sizes(difference: Callable[[Tensor], Tensor]) -> tuple[list[float], list[float]]:
        measured, expected = (difference(f).flatten(1).square().mean(1).sqrt().tolist() for f in (found, predicted))
        return measured, expected

    followed = {
        "mean − target": sizes(lambda f: f.mean(1, keepdim=True) - y),
        "members − mean": sizes(lambda f: f - f.mean(1, keepdim=True)),
    }
    return Course(followed, float(error))


def width_rows(widths: Sequence[int], *, seeds: int, members: int = 4, steps: int = 60) -> list[Measured]:
    """Error of the predicted training for every setting, width and seed."""
    return [
        {
            "setting": name,
            "width": width,
            "seed": seed,
            "error": course(setting, width=width, members=members, steps=steps, seed=seed, dtype=torch.float32).error,
        }
        for name, setting in SETTINGS.items()
        for width in widths
        for seed in range(seeds)
    ]


def slope(rows: Sequence[Measured]) -> tuple[float, float, float]:
    """(slope, lower, upper) of log error over log width, with a 95 % interval over seeds."""
    x = torch.tensor([math.log(row["width"]) for row in rows], dtype=torch.float64)
    y = torch.tensor([math.log(row["error"]) for row in rows], dtype=torch.float64)
    centred = x - x.mean()
    found = float((centred * y).sum() / centred.square().sum())
    rest = y - y.mean() - found * centred
    error = float((rest.square().sum() / (len(y) - 2) / centred.square().sum()).sqrt())
    return found, found - 1.96 * error, found + 1.96 * error


def regime_map(collectivities: Sequence[float], members: Sequence[int]) -> tuple[Tensor, Tensor]:
    """((R, S), (R, S)) for u = p + √(1 − p²) N(0, 1) of R collectivities p² and S numbers of members.

    The largest stable rate at γ = M over one member's; and at γ = 1, u fixed, the speed of differences over the mean's.
    """
    x, _ = data(6, seed=3)
    rate, speed = torch.zeros(2, len(collectivities), len(members), dtype=torch.float64)
    for i, collectivity in enumerate(collectivities):
        setting = Setting(Modulation.between(math.sqrt(collectivity)), "both", float)
        kernels, fixed = (kernels_of(each)(x, None) for each in (setting, setting._replace(trained="none")))
        alone = float(torch.linalg.eigvalsh(kernels.mean_mode(1, 1.0))[-1])
        for j, count in enumerate(members):
            rate[i, j] = alone / float(torch.linalg.eigvalsh(kernels.mean_mode(count, float(count)))[-1])
            mean, difference = (
                torch.linalg.eigvalsh(mode(count, 1.0))[-1] for mode in (fixed.mean_mode, fixed.difference_mode)
            )
            speed[i, j] = difference / mean
    return rate, speed
