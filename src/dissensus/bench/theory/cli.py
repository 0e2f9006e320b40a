"""`dissensus theory …`: parses, calls, writes a figure and its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dissensus.bench.names import listed
from dissensus.bench.run.jobs import checked_folder
from dissensus.bench.run.provenance import provenance
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
    _write(out, "kernels", widths=_numbers(widths), seeds=seeds)


@app.command()
def dynamics(
    width: Annotated[int, typer.Option(help="Units of a hidden layer.", min=1)] = 1500,
    members: Members = 4,
    steps: Annotated[int, typer.Option(help="Steps of gradient descent.", min=1)] = 60,
    seed: Annotated[int, typer.Option(help="Of the network.")] = 0,
    out: Folder = Path("theory"),
) -> None:
    """Training curves of the two regimes against their prediction."""
    _write(out, "dynamics", width=width, members=members, steps=steps, seed=seed)


@app.command()
def width(
    widths: WidthList = "375,750,1500", seeds: Seeds = 10, members: Members = 4, out: Folder = Path("theory")
) -> None:
    """How the error of predicted training falls with the width."""
    _write(out, "width", widths=_numbers(widths), seeds=seeds, members=members)


@app.command()
def regimes(out: Folder = Path("theory")) -> None:
    """The map of collectivity × members: stable rates and speeds."""
    _write(out, "regimes")


def _numbers(text: str) -> list[int]:
    found = sorted({int(each) if each.isdecimal() else 0 for each in listed(text)})
    if not found or found[0] < 1:
        raise ValueError(f"expected whole numbers with commas between, got {text!r}; for example 64,128")
    return found


def _write(out: Path, name: str, **settings: Any) -> None:
    """The rows of a study as CSV, where there are any, and its figure; prints what it says and where they are."""
    from dissensus.bench.theory import studies  # loads matplotlib
    from dissensus.reporting.figures import write_png

    found = getattr(studies, name)(**settings)
    if found.rows:
        about = provenance(torch.device("cpu"))
        facts = {key: about[key] for key in ("commit", "torch", "device", "command")}
        write_text(out / f"{name}.csv", table_text([*found.rows[0], *facts], [row | facts for row in found.rows]))
        print(out / f"{name}.csv")
    print(*found.said, sep="\n")
    write_png(found.figure, out / f"theory-{name}.png")
    print(out / f"theory-{name}.png")
