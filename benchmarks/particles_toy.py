"""Redoes the pictures of the particle papers: uncertainty between and outside the data, method by method.

    python benchmarks/particles_toy.py --seeds 5 --device cuda                      # the papers' step counts
    python benchmarks/particles_toy.py --seeds 1 --steps 1600 --tasks regression    # about three minutes on two cores
    python benchmarks/particles_toy.py --methods deep_ensemble forde forde_sample forde_log_prob

Regression: the 400 points in three clusters with features [x/2, (x/2)²], networks 2-200-50-50-50-1, noise 0.05 (what a
local fit leaves over), batches of 50. Classification: five Gaussian blobs on a ring, 40 points each, the same widths. All
methods start from the same 16 networks, with the same N(0, 1) prior on weights, the same order of batches and the same
optimiser: Adam, learning rate 1e-3, constant for half of the run and then down to 1 %.

One row per task, method and seed goes into the CSV as soon as it is there; rows that are there already are not computed
again, so a run that was stopped goes on. Figures are of the first seed.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import dissensus as ds
from dissensus.bench.provenance import provenance
from dissensus.core.posterior import Posterior, plateau_linear
from dissensus.methods import SVGD, DeepEnsemble, FeatureRDE, FoRDE, FunctionRDE, WeightRDE

HIDDEN = (200, 50, 50, 50)
HEAD, FEATURE = "layers.8", "layers.7"  # the last linear layer, and what it sees
STEPS = {"regression": 24_000, "classification": 10_000}  # 3,000 epochs of 8 batches; 10,000 as in the RDE paper
BATCH = 50
CLUSTERS = ((-7.2, -4.8), (-1.2, 1.2), (4.8, 7.2))
NOISE = 0.05
FAR = 1.0  # off the data: further than this from every training point; blobs have a standard deviation of 0.4

Build = Callable[..., Posterior]
METHODS: dict[str, Build] = {
    "deep_ensemble": lambda nets, **k: DeepEnsemble(nets, **k),
    "weight_rde": lambda nets, **k: WeightRDE(nets, **k),
    "function_rde": lambda nets, **k: FunctionRDE(nets, **k),
    "feature_rde": lambda nets, **k: FeatureRDE(nets, layer=FEATURE, head=HEAD, **k),
    "svgd": lambda nets, **k: SVGD(nets, **k),
    "forde": lambda nets, **k: FoRDE(nets, **k),
}
VARIANTS: dict[str, Build] = {
    "weight_rde_stein": lambda nets, **k: WeightRDE(nets, score="stein", **k),
    "function_rde_noise": lambda nets, **k: FunctionRDE(nets, repel_at="noise", **k),
    "svgd_function": lambda nets, **k: SVGD(nets, space="function", **k),
    "forde_sample": lambda nets, **k: FoRDE(nets, bandwidth="sample", **k),
    "forde_algorithm": lambda nets, **k: FoRDE(nets, bandwidth="algorithm", **k),
    "forde_log_prob": lambda nets, **k: FoRDE(nets, gradient="log_prob", **k),
    "forde_1/N": lambda nets, **k: FoRDE(nets, repulsion="1/N", **k),
}
COLUMNS = {
    "regression": ("sd_between", "sd_outside", "sd_at_data", "rmse"),
    "classification": ("entropy_off_data", "entropy_at_data", "accuracy", "nll"),
}
DIVERSITY = ("weight_distance", "function_distance", "gradient_angle")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, *VARIANTS], default=list(METHODS))
    parser.add_argument("--variants", action="store_true", help="all methods and all variants of them")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="optimiser steps; the papers' where not given")
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument(
        "--noise", type=float, default=NOISE, help="of the regression's likelihood; small is a strong pull"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "particles_toy")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    about, names = provenance(torch.device(arguments.device)), arguments.methods
    if arguments.variants:
        names = [*METHODS, *VARIANTS]
    for task in arguments.tasks:
        path, steps = arguments.out / f"{task}.csv", arguments.steps or STEPS[task]
        done = {(row["method"], row["seed"], row["steps"], row["members"], row["noise"]) for row in read(path)}
        for seed in range(arguments.seeds):
            for name in names:
                row = {"task": task, "method": name, "seed": seed, "steps": steps, "members": arguments.members}
                row |= {"noise": arguments.noise}
                if tuple(str(row[key]) for key in ("method", "seed", "steps", "members", "noise")) in done:
                    continue
                start = time.perf_counter()
                posterior = trained(row, device=arguments.device, engine=arguments.engine)
                row |= {key: round(value, 5) for key, value in measured(task, posterior, seed).items()}
                row |= {"seconds": round(time.perf_counter() - start, 1)} | about
                append(row, path)
                if seed == 0:
                    numpy.savez_compressed(arguments.out / f"{task}_{safe(name)}.npz", **pictured(task, posterior))
                numbers = "  ".join(f"{key} {row[key]:.4f}" for key in (*COLUMNS[task], *DIVERSITY))
                print(f"{task} {name:>18} seed {seed}  {numbers}  {row['seconds']:.0f} s", flush=True)
        arrays = {name: arguments.out / f"{task}_{safe(name)}.npz" for name in names}
        pictures = {name: dict(numpy.load(file)) for name, file in arrays.items() if file.exists()}
        draw = {"regression": bands, "classification": entropy_maps}[task]
        draw(pictures).savefig(arguments.out / f"{task}.png", dpi=110, bbox_inches="tight")
        shown = [row for row in read(path) if row["method"] in names]
        print(table(task, [row for row in shown if (row["steps"], row["noise"]) == (str(steps), str(arguments.noise))]))


def problem(
    task: str, seed: int, noise: float = NOISE
) -> tuple[Tensor, Tensor, Callable[[], nn.Module], ds.Likelihood]:
    """(x, y, makes one network, likelihood) of a task; the regression's points are the same for every seed."""
    if task == "regression":
        x, y = ds.data.three_clusters()
        return x, y, lambda: ds.nets.MLP(2, 1, hidden=HIDDEN), ds.Regression(noise=noise)
    x, y = ds.data.five_blobs(40, scale=0.4, seed=seed)
    return x, y, lambda: ds.nets.MLP(2, 5, hidden=HIDDEN), ds.Classification()


def trained(row: dict[str, Any], *, device: str, engine: str) -> Posterior:
    """The posterior that a row of the CSV is about. The seed decides networks and batches, so methods start alike."""
    seed = row["seed"]
    x, y, make, likelihood = problem(row["task"], seed, row["noise"])
    torch.manual_seed(seed)
    networks = [make() for _ in range(row["members"])]
    build = {**METHODS, **VARIANTS}[row["method"]]
    posterior = build(networks, likelihood=likelihood, data_size=len(x), weight_prior_std=1.0)
    posterior.to(device)
    loader = ds.data.Batches(x.to(device), y.to(device), batch_size=BATCH, shuffle=True, seed=seed)
    epochs = max(1, round(row["steps"] / len(loader)))
    optimizer = torch.optim.Adam(posterior.parameters(), lr=1e-3)
    scheduler = LambdaLR(optimizer, lambda epoch: plateau_linear(epoch / epochs))
    ds.fit(
        posterior,
        loader,
        epochs=epochs,
        optimizer=optimizer,
        scheduler=scheduler,
        precision="float32",
        engine=engine,
        device=device,
        progress=False,
    )
    return posterior


def measured(task: str, posterior: Posterior, seed: int) -> dict[str, float]:
    """The columns of one row."""
    x, y, _, _ = problem(task, seed)
    if task == "regression":
        where = torch.linspace(-10, 10, 801)
        sd = epistemic_sd(posterior, where)
        inside = torch.stack([(where >= low) & (where <= high) for low, high in CLUSTERS]).any(0)
        outside = (where < CLUSTERS[0][0]) | (where > CLUSTERS[-1][1])
        error = posterior.predict(x).mean.cpu() - y
        found = {
            "sd_between": sd[~inside & ~outside].mean(),
            "sd_outside": sd[outside].mean(),
            "sd_at_data": sd[inside].mean(),
            "rmse": error.square().mean().sqrt(),
        }
    else:
        plane = grid()
        off = torch.cdist(plane, x).amin(1) > FAR
        test, labels = ds.data.five_blobs(20, scale=0.4, seed=1000 + seed)
        predictive = posterior.predict(test)
        found = {
            "entropy_off_data": posterior.predict(plane[off]).total.mean(),
            "entropy_at_data": posterior.predict(x).total.mean(),
            "accuracy": (predictive.mean.argmax(1).cpu() == labels).float().mean(),
            "nll": -predictive.log_prob(labels.to(posterior.device)).mean(),
        }
    return {key: float(value) for key, value in (found | diversity(posterior, x)).items()}


def diversity(posterior: Posterior, x: Tensor) -> dict[str, Tensor]:
    """Mean distances between pairs of members: of weights, of outputs at the data (rms), of input gradients (angle)."""
    count = posterior.particles.members
    nets = [posterior.member(i).cpu() for i in range(count)]
    pairs = torch.triu_indices(count, count, 1)
    weights = torch.stack([nn.utils.parameters_to_vector(net.parameters()).detach() for net in nets])
    outputs = torch.stack([net(x).detach().flatten() for net in nets])
    leaf = x.clone().requires_grad_()
    slopes = torch.stack([torch.autograd.grad(net(leaf)[:, 0].sum(), leaf)[0] for net in nets])  # (M, N, D)
    cosine = nn.functional.cosine_similarity(slopes[pairs[0]], slopes[pairs[1]], dim=2)
    return {
        "weight_distance": nn.functional.pdist(weights).mean(),
        "function_distance": nn.functional.pdist(outputs).mean() / math.sqrt(outputs.shape[1]),
        "gradient_angle": cosine.clamp(-1, 1).arccos().mean(),
    }


def epistemic_sd(posterior: Posterior, where: Tensor) -> Tensor:
    """(n,) standard deviation over members of their means at inputs (n,)."""
    predictive = posterior.predict(ds.data.quadratic_features(where[:, None]))
    return predictive.epistemic[:, 0].sqrt().cpu()


def grid(side: int = 121) -> Tensor:
    """(side², 2) points of the window [−7, 7]²."""
    axis = torch.linspace(-7, 7, side)
    return torch.cartesian_prod(axis, axis)


# ---------------------------------------------------------------------------------------------------- figures


def pictured(task: str, posterior: Posterior) -> dict[str, Any]:
    """The arrays a figure needs."""
    if task == "regression":
        where = torch.linspace(-10, 10, 401)
        members = posterior.predict(ds.data.quadratic_features(where[:, None])).members[:, :, 0]
        return {"where": where.numpy(), "members": members.cpu().numpy()}
    entropy = posterior.predict(grid()).total.reshape(121, 121)
    return {"entropy": entropy.cpu().numpy()}


def panels(count: int) -> tuple[Any, list[Any]]:
    """A figure with so many axes, in rows of three."""
    from matplotlib.figure import Figure

    rows = math.ceil(count / 3)
    figure = Figure(figsize=(12, 3.2 * rows))
    axes = [figure.add_subplot(rows, 3, i + 1) for i in range(count)]
    figure.subplots_adjust(hspace=0.35, wspace=0.35)
    return figure, axes


def bands(pictures: dict[str, dict[str, Any]]) -> Any:
    """A figure of mean, ±3σ band and ten members of every method over the data."""
    x, y = ds.data.three_clusters()
    figure, axes = panels(len(pictures))
    for axis, (name, arrays) in zip(axes, pictures.items(), strict=True):
        mean, sd = arrays["members"].mean(0), arrays["members"].std(0)
        axis.fill_between(arrays["where"], mean - 3 * sd, mean + 3 * sd, color="tab:blue", alpha=0.25, linewidth=0)
        axis.plot(arrays["where"], arrays["members"][:10].T, color="tab:blue", alpha=0.35, linewidth=0.7)
        axis.plot(arrays["where"], mean, color="tab:blue", linewidth=1.6)
        axis.scatter(2 * x[:, 0], y[:, 0], s=3, color="tab:red", zorder=3)
        axis.set(title=name, xlim=(-10, 10), ylim=(-2.5, 2.5))
    return figure


def entropy_maps(pictures: dict[str, dict[str, Any]]) -> Any:
    """A figure of the entropy of the mean softmax of every method, 0 to log 5, with the training points."""
    x, y = ds.data.five_blobs(40, scale=0.4, seed=0)
    figure, axes = panels(len(pictures))
    for axis, (name, arrays) in zip(axes, pictures.items(), strict=True):
        image = axis.imshow(
            arrays["entropy"].T, origin="lower", extent=(-7, 7, -7, 7), vmin=0, vmax=math.log(5), cmap="viridis"
        )
        axis.scatter(x[:, 0], x[:, 1], s=4, c=y, cmap="Set1", linewidths=0)
        axis.set(title=name)
        figure.colorbar(image, ax=axis, fraction=0.046)
    return figure


# ---------------------------------------------------------------------------------------------------- files


def safe(name: str) -> str:
    return name.replace("/", "_over_")


def read(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV, none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(row: dict[str, Any], path: Path) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)


def table(task: str, rows: list[dict[str, str]]) -> str:
    """Mean ± standard deviation over seeds, one line per method."""
    columns = (*COLUMNS[task], *DIVERSITY)
    lines = [f"\n{task}, mean ± sd over seeds", f"{'method':>20} seeds " + " ".join(f"{c:>18}" for c in columns)]
    for name in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == name]
        cells = []
        for column in columns:
            values = numpy.array([float(row[column]) for row in mine])
            cells.append(f"{values.mean():>9.4f} ± {values.std(ddof=1) if len(values) > 1 else 0.0:<6.4f}")
        lines.append(f"{name:>20} {len(mine):>5} " + " ".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
