"""The command line: parses, calls, prints. A user's error is printed in one line, with exit code 2."""

import logging
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table as Grid
from rich.text import Text

from dissensus.bench import torchrun_ranks
from dissensus.bench.capacity_table import LENET, capacities
from dissensus.bench.report.prose import cautions, question_sentences
from dissensus.bench.report.results import CONTROL, Results, table_text
from dissensus.bench.report.tables import Table, main_table, measures_and_draws
from dissensus.bench.rows.named_sets import SETS, set_location
from dissensus.bench.run import jobs
from dissensus.bench.run.convert import convert
from dissensus.bench.run.jobs import writable_folder
from dissensus.bench.run.run import CALIBRATED, Run, ignore_message
from dissensus.bench.run.run_folder import ORIGIN, provenance
from dissensus.bench.run.segment_images import write_maps
from dissensus.bench.run.shared_training import train_runs
from dissensus.bench.setting_checks import name_list
from dissensus.bench.task.config import SIZES, load_task, own_tasks, read_task, run_config, task_names
from dissensus.bench.task.objects import check_overrides_read, count_setting
from dissensus.bench.task.schema import Calibration, check_value, fields_of
from dissensus.bench.user_code import is_import_path
from dissensus.evaluation.evaluation import Evaluation, metric_text
from dissensus.methods import METHODS
from dissensus.utils.checks import first_names, integer
from dissensus.utils.extras import MissingExtra
from dissensus.version import __version__

app = typer.Typer(
    help="Trains neural networks with uncertainty, and measures how good their uncertainty is.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

STOPPED = 130  # exit code of a command stopped by the user, as in shells

TaskName = Annotated[str, typer.Argument(help="Name of a task (see `dissensus list`), or a .toml file.")]
Size = Annotated[str, typer.Option(help=f"Size of the task, from short to long: {', '.join(SIZES)}.")]
Sets = Annotated[list[str], typer.Option("--set", help="Override a value: training.epochs=3, method.members=8, …")]
OutFolder = Annotated[Path | None, typer.Option(help="Folder to write to; runs/TASK-SIZE by default.")]
Data = Annotated[str | None, typer.Option(help="Folder of your data sets; default: the variable DISSENSUS_DATA.")]
Baseline = Annotated[str | None, typer.Option(help="Method to compare with; default: the task's baseline.")]
Holm = Annotated[bool, typer.Option("--holm", help="Adjust p-values for the number of comparisons in a table (Holm).")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print no progress.")]


def _print_version(asked: bool) -> None:
    if asked:
        print(f"dissensus {__version__}")
        raise typer.Exit


# Commands that several processes share; the first process does the others alone.
TOGETHER = ("bench", "train", "evaluate")


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options before a command."""
    if context.invoked_subcommand not in TOGETHER:
        torchrun_ranks.exit_other_ranks()


@app.command("bench")
def bench_command(
    task: TaskName = "digits",
    methods: Annotated[str | None, typer.Option(help="Methods, separated by commas; default: the task's.")] = None,
    set_: Sets = [],  # noqa: B006 - typer reads it
    seeds: Annotated[int, typer.Option(help="Number of seeds: every method is trained once with each.")] = 1,
    size: Size = "short",
    out: OutFolder = None,
    data: Data = None,
    baseline: Baseline = None,
    holm: Holm = False,
    jobs_: Annotated[int, typer.Option("--jobs", help="Number of processes that train at the same time.")] = 1,
    quiet: Quiet = False,
) -> None:
    """Train, evaluate and report all methods of a task. The same command continues a stopped bench."""
    chosen, tell = name_list(methods or "") or None, ignore_message if quiet else _tell
    loaded = load_task(task, size=size, overrides=set_, methods=chosen)
    check_overrides_read(set_, chosen or loaded.methods)
    asked: dict[str, Any] = {"methods": chosen, "seeds": seeds, "out": out, "source": data, "jobs": jobs_, "tell": tell}
    asked |= {"baseline": baseline, "holm": holm, "progress": not quiet}
    if {"grid", "widths"} & loaded.settings.keys():
        from dissensus.bench.run_grid import bench_grid  # loads matplotlib

        said, files = bench_grid(loaded, **asked)
        print_each([*said, *files])
        return
    results, written = jobs.bench(loaded, **asked)
    print_results(results)
    print_each(written)


@app.command("train")
def train_command(
    task: TaskName,
    method: Annotated[str, typer.Option(help="The method.")],
    set_: Sets = [],  # noqa: B006 - typer reads it
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and of the order of batches.")] = 0,
    size: Size = "short",
    out: OutFolder = None,
    data: Data = None,
    quiet: Quiet = False,
) -> None:
    """Train one method on a task and print the run's folder."""
    loaded = load_task(task, size=size, overrides=set_, methods=[method])
    check_overrides_read(set_, [method])
    folder = jobs.default_folder(loaded) if out is None else out
    runs = jobs.begin_runs(loaded, [run_config(loaded, method, seed)], folder, source=data)
    runs[0].is_shared = torchrun_ranks.is_training_shared(1)
    with jobs.withdraw_on_failure(runs):
        train_runs(runs, progress=not quiet)
    print(runs[0].folder)


@app.command("evaluate")
def evaluate_command(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    again: Annotated[bool, typer.Option("--again", help="Evaluate again, even if results exist.")] = False,
    data: Data = None,
    quiet: Quiet = False,
) -> None:
    """Evaluate a trained run and print its metrics."""
    opened = Run.open(run, source=data)
    opened.is_shared = torchrun_ranks.is_training_shared(1)
    if again:
        opened.posterior()  # raises for a damaged posterior before results are removed
        opened.remove_evaluation()
    print(opened.evaluate(tell=ignore_message if quiet else lambda text: _tell(f"evaluating {text}")).table())


@app.command("calibrate")
def calibrate_command(
    run: Annotated[Path, typer.Argument(help="The folder of a trained run.")],
    method: Annotated[
        str | None, typer.Option(help="temperature, vector, isotonic or histogram; regressions: scale or isotonic.")
    ] = None,
    level: Annotated[float | None, typer.Option(help="Coverage of conformal sets or intervals, such as 0.9.")] = None,
    score: Annotated[str | None, typer.Option(help="Score of sets: lac, aps, raps, …; or cqr, residual.")] = None,
    risk: Annotated[float | None, typer.Option(help="Largest share of errors among answers.")] = None,
    confidence: Annotated[float | None, typer.Option(help="Confidence of the gate's promise; 0.95 by default.")] = None,
    rows: Annotated[float | None, typer.Option(help="Number or share of test rows to calibrate on.")] = None,
    data: Data = None,
    quiet: Quiet = False,
) -> None:
    """Calibrate a trained run, add conformal sets or a gate, and print test metrics before and after.

    The calibration rows are held out of the test rows, as in the run's data.calibration or --rows; the other rows are tested
    on. Options that are not given are taken from the task's calibration table. ds.load reads the result, RUN/calibrated.
    """
    asked = {"method": method, "level": level, "score": score, "risk": risk, "confidence": confidence}
    given = {name: value for name, value in asked.items() if value is not None}
    for name, value in given.items():
        check_value(f"--{name}", value, fields_of(Calibration)[name])
    with nullcontext() if quiet else log_to_stderr(level=logging.WARNING):
        before, after = jobs.calibrate_run(Run.open(run, source=data), given, rows=rows)
    print_before_and_after(before, after)
    print(run / CALIBRATED)


@app.command("report")
def report_command(
    runs: Annotated[list[str], typer.Argument(help="Run folders, or folders that contain run folders.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder, or a .html, .md, .csv or .tex file; default: beside the first run.")
    ] = None,
    baseline: Baseline = None,
    holm: Holm = False,
    methods: Annotated[str, typer.Option(help="Only these methods, in this order, separated by commas.")] = "",
    names: Annotated[str, typer.Option(help="New names of methods: map=MAP,mine:Method=Ours.")] = "",
    metrics: Annotated[str, typer.Option(help="Only these metrics, in this order: accuracy,nll,ood/SET/auroc.")] = "",
    transpose: Annotated[bool, typer.Option("--transpose", help="One row per method.")] = False,
    figures: Annotated[Path | None, typer.Option(help="Folder for the figures as PDF and SVG.")] = None,
) -> None:
    """Write results.csv, report.md and report.html of evaluated runs, or one file, such as LaTeX tables in page.tex."""
    folder = jobs.find_runs(runs)[0].parent if out is None else out
    shown = {"methods": name_list(methods), "names": name_list(names), "metrics": name_list(metrics)}
    results, written = jobs.report_runs(runs, folder, baseline=baseline, holm=holm, transpose=transpose, **shown)
    if figures is not None:
        from dissensus.bench.report.report_figures import write_figures  # loads matplotlib

        written += write_figures(results, writable_folder(figures))
    print_results(results)
    print_each(written)


@app.command("predict")
def predict_command(
    run: Annotated[Path, typer.Argument(help="The folder of a trained segmentation run.")],
    images: Annotated[list[Path], typer.Argument(help="Image files.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write to; RUN/maps by default.")] = None,
    tile: Annotated[int | None, typer.Option(help="Side in pixels of the tiles of a very large image.")] = None,
) -> None:
    """Segment images and write PNG maps: classes, confidence, total and epistemic uncertainty of every pixel."""
    print_each(write_maps(Run.open(run), images, run / "maps" if out is None else out, tile=tile))


@app.command("convert")
def convert_command(
    weights: Annotated[Path, typer.Argument(help="File with a state dict: .pt, .pth, .th, .npz or .safetensors.")],
    method: Annotated[str, typer.Option(help="A method that takes one network.")],
    out: Annotated[Path, typer.Option(help="New or empty folder for the posterior.")],
    set_: Annotated[
        list[str], typer.Option("--set", help="network.name=ResNet, network.depth=20, method.samples=50, …")
    ] = [],  # noqa: B006 - typer reads it
    seed: Annotated[int, typer.Option(help="Seed of the method's random initialisation: factors, masks, latents.")] = 0,
) -> None:
    """Turn trained weights into a posterior of a method, save it and print its folder, which ds.load reads.

    For your own network (network.name=package.module:name), pass the network to ds.load too.
    """
    with log_to_stderr():
        convert(weights, method, out, overrides=set_, seed=seed)
    print(out)


@app.command("capacity")
def capacity_command(
    networks: Annotated[
        list[str] | None,
        typer.Argument(help="Networks of dissensus.nets, or package.module:name; by default those of the talk."),
    ] = None,
    set_: Annotated[list[str], typer.Option("--set", help="Set a value of all networks: network.outputs=100, …")] = [],  # noqa: B006 - typer reads it
) -> None:
    """Count the weights and nodes of networks: a node is an input of a linear layer or an input channel of a convolution."""
    found = capacities(networks or [], set_)
    columns = ("weights", "nodes", "weights / node", "parameters")
    grid = Grid("network", *(Column(each, justify="right") for each in columns))
    for name, each in found.items():
        grid.add_row(escape(name), f"{each.weights:,}", f"{each.nodes:,}", f"{each.ratio:,.0f}", f"{each.parameters:,}")
    wide_console().print(grid)
    left = {name: first_names(list(each.left)) for name, each in found.items() if each.left}
    print_each(f"{name}: no nodes in {layers}; ds.capacity(network).left says why" for name, layers in left.items())
    if not networks:
        print(LENET)


@app.command("list")
def list_command(data: Data = None) -> None:
    """List tasks, methods and data sets with their places, including task files in the current folder."""
    tasks = Grid("task", "what", "data", "methods", title="Tasks", title_justify="left")
    own = own_tasks()
    for name, task in {**{name: read_task(name) for name in task_names()}, **own}.items():
        named, used = task["data"]["name"], ", ".join(name_list(task["methods"]))
        tasks.add_row(*map(escape, (name, str(task.get("title", "")), named, used)))
    methods = Grid("method", "what", "networks", title="Methods", title_justify="left")
    for name, method in METHODS.items():
        methods.add_row(name, escape((method.__doc__ or "").strip().split("\n")[0]), count_setting(method) or "one")
    for file, task in own.items():
        for name in filter(is_import_path, name_list(task["methods"])):
            methods.add_row(escape(name), f"your own, named in {escape(file)}", "–")
    known = Grid("data set", "what", "where", title="Data sets", title_justify="left")
    for name, source in SETS.items():
        known.add_row(name, escape(source.description), escape(set_location(name, data)))
    for file, task in own.items():
        if is_import_path(task["data"]["name"]):
            known.add_row(escape(task["data"]["name"]), "your own function", f"named in {escape(file)}")
    console = wide_console()
    for grid in (tasks, methods, known):
        console.print(grid)


def main() -> None:
    """Runs the command line; a user's error is one line on stderr, with exit code 2."""
    try:
        torchrun_ranks.connect()
        with torchrun_ranks.print_on_first_rank():
            # The exit code of a command that does not return.
            code = app(prog_name="dissensus", standalone_mode=False)
    except (ValueError, TypeError, OSError, MissingExtra) as error:
        if os.environ.get("DISSENSUS_TRACEBACK"):
            raise
        _fail(str(error) or type(error).__name__)
    except (KeyboardInterrupt, typer.Abort):
        code = STOPPED
    except Exception as error:
        usage = getattr(error, "format_message", None)  # click's errors about arguments
        if usage is None:
            raise
        if str(usage()).strip():
            _fail(usage())
        sys.exit(2)  # no arguments at all: the help was printed
    if code == STOPPED:
        _fail("stopped; the same command continues from here", code=STOPPED)
    sys.exit(code or 0)


def _fail(text: str, *, code: int = 2) -> None:
    print(f"dissensus: {torchrun_ranks.failure_message(text)}", file=sys.stderr)
    sys.exit(code)


def _tell(text: str) -> None:
    Console(stderr=True, highlight=False).print(f"[bold]{escape(text)}[/bold]")


def safe_markup(text: str) -> str:
    """A title or a name as safe markup, without control characters."""
    return escape(text.translate(CONTROL))


def wide_console() -> Console:
    """A console that does not truncate tables if the output is not a terminal."""
    wide = None if sys.stdout.isatty() else max(shutil.get_terminal_size().columns, 160)
    return Console(width=wide, highlight=False)


def print_before_and_after(before: Evaluation, after: Evaluation) -> None:
    """Prints test metrics before and after calibration, without those of members and cost."""
    grid = Grid("", "before", "after")
    for key, value in after.metrics.items():
        if not key.startswith(("members/", "networks/", "cost/")):
            found = before.metrics.get(key)
            grid.add_row(safe_markup(key), "" if found is None else metric_text(found), metric_text(value))
    wide_console().print(grid)


def print_results(results: Results) -> None:
    """Prints a report's main table, the reasons why methods are not compared, and the sentences on the task's question."""
    found, draws = measures_and_draws(results)
    table: Table = main_table(results, found, draws)
    title = Text(results.title.translate(CONTROL))
    grid = Grid("", *map(safe_markup, table.headings), title=title, title_justify="left")
    group = ""
    for row in table.rows:
        if row.group != group:
            group = row.group
            grid.add_section()
            grid.add_row(f"[dim]{safe_markup(group)}[/dim]", *[""] * len(row.cells))
        label = f"{row.label}{f', {row.unit}' if row.unit else ''} {row.arrow}".strip()
        texts = [(cell.best, safe_markup(f"{cell.text}{' ≈' if cell.equal else ''}")) for cell in row.cells]
        grid.add_row(safe_markup(label), *(f"[bold]{text}[/bold]" if best else text for best, text in texts))
    console = wide_console()
    console.print(grid)
    console.print("bold: best   ≈: not distinguishable from the best (p ≥ 0.05)   ↑ ↓: higher or lower is better")
    if all(len(several) == 1 for several in results.methods.values()):
        console.print("one seed: p-values count test examples only; --seeds 5 counts training variation too")
    for sentence in (*cautions(results, draws), *question_sentences(results)):
        console.print(safe_markup(sentence))


@contextmanager
def log_to_stderr(level: int = logging.INFO) -> Iterator[None]:
    """Context that prints log messages of this level or above to stderr."""
    log, shown = logging.getLogger("dissensus"), logging.StreamHandler()
    shown.setFormatter(logging.Formatter("dissensus: %(message)s"))
    before = log.level
    log.addHandler(shown)
    log.setLevel(level)
    try:
        yield
    finally:
        log.removeHandler(shown)
        log.setLevel(before)


def print_each(several: Iterable[str | Path]) -> None:
    """Prints one line for each."""
    for each in several:
        print(each)


def parse_widths(text: str) -> list[int]:
    """The numbers in "64,128"."""
    return sorted({integer("--widths", int(each) if each.isdecimal() else each) for each in name_list(text) or [text]})


theory = typer.Typer(help="Figures that compare the theory of wide ensembles with measurements.", no_args_is_help=True)
app.add_typer(theory, name="theory")
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
    """Makes the study of this name in `theory_studies` a command, whose options have these defaults."""

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
    theory.command(name, help=summary)(write)


add_command("kernels", "Analytic against empirical kernels as the width grows.", widths="64,128,256,512,1024", seeds=20)
add_command("dynamics", "Training in two regimes against its prediction.", width=1500, members=4, steps=60, seed=0)
about = "How the error of predicted training falls with the width."
add_command("width", about, widths="375,750,1500", seeds=10, members=4)
add_command("regimes", "Stable rates and training speeds over collectivity and members.")
