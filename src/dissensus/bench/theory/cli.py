"""`dissensus theory …`: parses, calls, writes a figure and its rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dissensus.bench.names import listed
from dissensus.bench.run.jobs import checked_folder
from dissensus.bench.run.provenance import provenance
from dissensus.bench.theory import runs as runs
from dissensus.reporting.results import table_text
from dissensus.storage.files import write_text

app = typer.Typer(help="What wide ensembles do, computed and measured: figures.", no_args_is_help=True)

Folder = Annotated[Path, typer.Option(help="Folder to write to.", callback=checked_folder)]
WidthList = Annotated[str, typer.Option(help="Widths, with commas between.")]
Seeds = Annotated[int, typer.Option(help="Random networks for each width.", min=1)]
Members = Annotated[int, typer.Option(help="Members of the ensemble.", min=1)]


@app.command()
def kernels(widths: WidthList = "64,128,256,512,1024", seeds: Seeds = 20, out: Folder = Path("theory")) -> None:
    """Analytic against empirical kernels as the width grows."""
    from dissensus.bench.theory.figures import kernel_figure

    rows = runs.kernel_rows(_numbers(widths), seeds=seeds)
    said = [
        f"{name}: Θ_o deviates by {found[0]:.3g} at N = {seen[0]}, by {found[-1]:.3g} at N = {seen[-1]}"
        for name, (seen, found) in runs.deviations(rows, "common_cross").items()
    ]
    _write(out, "kernels", said, kernel_figure(rows), rows)


@app.command()
def dynamics(
    width: Annotated[int, typer.Option(help="Units of a hidden layer.", min=1)] = 1500,
    members: Members = 4,
    steps: Annotated[int, typer.Option(help="Steps of gradient descent.", min=1)] = 60,
    seed: Annotated[int, typer.Option(help="Of the network.")] = 0,
    out: Folder = Path("theory"),
) -> None:
    """Training curves of the two regimes against their prediction."""
    from dissensus.bench.theory.figures import dynamics_figure

    courses = {
        name: runs.course(setting, width=width, members=members, steps=steps, seed=seed, dtype=torch.float32)
        for name, setting in runs.SETTINGS.items()
    }
    said = [f"{name}: largest error {100 * each.error:.1f} % of the initial residual" for name, each in courses.items()]
    _write(out, "dynamics", said, dynamics_figure(courses))


@app.command()
def width(
    widths: WidthList = "375,750,1500", seeds: Seeds = 10, members: Members = 4, out: Folder = Path("theory")
) -> None:
    """How the error of predicted training falls with the width."""
    from dissensus.bench.theory.figures import error_figure

    rows = runs.width_rows(_numbers(widths), seeds=seeds, members=members)
    said = [
        "{}: slope {:.3f}, 95 % interval {:.3f} to {:.3f}".format(name, *runs.slope(mine))
        for name, mine in runs.settings_of(rows).items()
    ]
    _write(out, "width", said, error_figure(rows), rows)


@app.command()
def regimes(out: Folder = Path("theory")) -> None:
    """The map of collectivity × members: stable rates and speeds."""
    from dissensus.bench.theory.figures import regime_figure

    collectivities, members = [i / 40 for i in range(41)], [2, 4, 8, 16, 32, 64, 128]
    rate, speed = runs.regime_map(collectivities, members)
    said = [
        f"collectivity {collectivities[i]:.1f}: 128 members at γ = M take {float(rate[i, -1]):.3g} of one's rate"
        for i in (0, 20, 40)
    ]
    _write(out, "regimes", said, regime_figure(rate, speed, collectivities, members))


def _numbers(text: str) -> list[int]:
    found = [int(each) if each.isdecimal() else 0 for each in listed(text)]
    if not found or min(found) < 1:
        raise ValueError(f"expected whole numbers with commas between, got {text!r}; for example 64,128")
    return found


def _write(out: Path, name: str, said: Iterable[str], figure: Any, rows: Sequence[runs.Measured] = ()) -> None:
    """The rows as CSV, where there are any, and the figure; prints what is said and where they are."""
    from dissensus.reporting.figures import write_png

    if rows:
        about = provenance(torch.device("cpu"))
        facts = {key: about[key] for key in ("commit", "torch", "device", "command")}
        write_text(out / f"{name}.csv", table_text([*rows[0], *facts], [{**row, **facts} for row in rows]))
        print(out / f"{name}.csv")
    print(*said, sep="\n")
    write_png(figure, out / f"theory-{name}.png")
    print(out / f"theory-{name}.png")
