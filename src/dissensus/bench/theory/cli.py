"""`dissensus theory …`: parses, calls, writes a figure and its rows."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from dissensus.bench.names import listed
from dissensus.bench.run.jobs import checked_folder
from dissensus.bench.run.provenance import provenance
from dissensus.bench.theory import runs as runs

app = typer.Typer(help="What wide ensembles do, computed and measured: figures.", no_args_is_help=True)

Out = Annotated[Path, typer.Option(help="Folder to write to.")]
Widths = Annotated[str, typer.Option(help="Widths, with commas between.")]
Seeds = Annotated[int, typer.Option(help="Random networks for each width.")]
Members = Annotated[int, typer.Option(help="Members of the ensemble.")]


@app.command()
def kernels(widths: Widths = "64,128,256,512,1024", seeds: Seeds = 20, out: Out = Path("theory")) -> None:
    """Analytic against empirical kernels as the width grows."""
    from dissensus.bench.theory.figures import kernel_figure

    sizes = _numbers(widths)
    checked_folder(out)
    rows = runs.kernel_rows(sizes, seeds=seeds)
    _write(out, "kernels", rows)
    for name, (seen, found) in runs.deviations(rows, "common_cross").items():
        print(f"{name}: Θ_o deviates by {found[0]:.3g} at N = {seen[0]}, by {found[-1]:.3g} at N = {seen[-1]}")
    _save(kernel_figure(rows), out, "kernels")


@app.command()
def dynamics(
    width: Annotated[int, typer.Option(help="Units of a hidden layer.")] = 1500,
    members: Members = 4,
    steps: Annotated[int, typer.Option(help="Steps of gradient descent.")] = 60,
    seed: Annotated[int, typer.Option(help="Of the network.")] = 0,
    out: Out = Path("theory"),
) -> None:
    """Training curves of the two regimes against their prediction."""
    from dissensus.bench.theory.figures import dynamics_figure

    checked_folder(out)
    courses = {
        name: runs.course(setting, width=width, members=members, steps=steps, seed=seed, dtype=torch.float32)
        for name, setting in runs.SETTINGS.items()
    }
    for name, found in courses.items():
        print(f"{name}: largest error {100 * found.error:.1f} % of the initial residual")
    _save(dynamics_figure(courses), out, "dynamics")


@app.command()
def width(widths: Widths = "375,750,1500", seeds: Seeds = 10, members: Members = 4, out: Out = Path("theory")) -> None:
    """How the error of predicted training falls with the width."""
    from dissensus.bench.theory.figures import width_figure

    sizes = _numbers(widths)
    checked_folder(out)
    rows = runs.width_rows(sizes, seeds=seeds, members=members)
    _write(out, "width", rows)
    for name in runs.SETTINGS:
        found, lower, upper = runs.slope([row for row in rows if row["setting"] == name])
        print(f"{name}: slope {found:.3f}, 95 % interval {lower:.3f} to {upper:.3f}")
    _save(width_figure(rows), out, "width")


@app.command()
def regimes(out: Out = Path("theory")) -> None:
    """The map of collectivity × members: stable rates and speeds."""
    from dissensus.bench.theory.figures import regime_figure

    checked_folder(out)
    collectivities, members = [i / 40 for i in range(41)], [2, 4, 8, 16, 32, 64, 128]
    rate, speed = runs.regime_map(collectivities, members)
    for i in (0, 20, 40):
        print(f"collectivity {collectivities[i]:.1f}: 128 members at γ = M take {float(rate[i, -1]):.3g} of one's rate")
    _save(regime_figure(rate, speed, collectivities, members), out, "regimes")


def _numbers(text: str) -> list[int]:
    try:
        found = [int(each) for each in listed(text)]
    except ValueError:
        raise ValueError(f"expected whole numbers with commas between, got {text!r}; for example 64,128") from None
    if not found or min(found) < 1:
        raise ValueError(f"expected widths of at least 1, got {text!r}; for example 64,128")
    return found


def _write(out: Path, name: str, rows: Sequence[runs.Row]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    about = provenance(torch.device("cpu"))
    facts = {key: about[key] for key in ("commit", "torch", "device", "command")}
    with (out / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *facts], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **facts} for row in rows)
    print(out / f"{name}.csv")


def _save(figure: object, out: Path, name: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / f"theory-{name}.png", dpi=110, facecolor="white")  # type: ignore[attr-defined]
    print(out / f"theory-{name}.png")
