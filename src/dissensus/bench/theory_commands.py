"""`dissensus theory …`: one command per study, which writes a figure and its rows."""

from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dissensus.bench.names import name_list
from dissensus.bench.report.results import table_text
from dissensus.bench.run.jobs import writable_folder
from dissensus.bench.run.provenance import ORIGIN, provenance
from dissensus.utils.checks import integer


def parse_widths(text: str) -> list[int]:
    """The numbers in "64,128"."""
    return sorted({integer("--widths", int(each) if each.isdecimal() else each) for each in name_list(text) or [text]})


app = typer.Typer(help="Figures that compare the theory of wide ensembles with measurements.", no_args_is_help=True)
OPTIONS = {
    "widths": Annotated[str, typer.Option(help="Widths, separated by commas.", callback=parse_widths)],
    "width": Annotated[int, typer.Option(help="Units of each hidden layer.", min=1)],
    "seeds": Annotated[int, typer.Option(help="Random networks for each width.", min=1)],
    "members": Annotated[int, typer.Option(help="Members of the ensemble.", min=1)],
    "steps": Annotated[int, typer.Option(help="Steps of gradient descent.", min=1)],
    "seed": Annotated[int, typer.Option(help="Of the network.")],
    "out": Annotated[Path, typer.Option(help="Folder to write to.", callback=writable_folder)],
}


def add_command(name: str, summary: str, **defaults: Any) -> None:
    """Makes the study of this name in `studies` a command, whose options have these defaults."""

    def write(out: Path, **settings: Any) -> None:
        from dissensus.bench import theory_studies  # loads matplotlib
        from dissensus.bench.report.report_figures import write_files

        found, about = getattr(theory_studies, name)(**settings), provenance(torch.device("cpu"))
        rows = [row | {key: about[key] for key in ORIGIN} for row in found.rows]
        tables = {f"{name}.csv": table_text(list(rows[0]), rows)} if rows else {}
        print(*found.sentences, *write_files(out, {f"theory-{name}.png": found.figure}, tables), sep="\n")

    options, kind = {**defaults, "out": Path("theory")}.items(), Parameter.KEYWORD_ONLY
    parameters = [Parameter(key, kind, default=value, annotation=OPTIONS[key]) for key, value in options]
    write.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    app.command(name, help=summary)(write)


add_command("kernels", "Analytic against empirical kernels as the width grows.", widths="64,128,256,512,1024", seeds=20)
add_command("dynamics", "Training in two regimes against its prediction.", width=1500, members=4, steps=60, seed=0)
about = "How the error of predicted training falls with the width."
add_command("width", about, widths="375,750,1500", seeds=10, members=4)
add_command("regimes", "Stable rates and training speeds over collectivity and members.")
