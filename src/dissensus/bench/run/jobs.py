"""Trains, evaluates and reports every method and seed of a task, in one process or several; finished stages are kept."""

import multiprocessing
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch

from dissensus.bench import torchrun_ranks
from dissensus.bench.report.results import Results, SettingSweep
from dissensus.bench.rows.task_rows import DataCache
from dissensus.bench.run.evaluate_run import with_reference, with_reference_halves
from dissensus.bench.run.run import Run, Tell, check_calibration, ignore_message
from dissensus.bench.run.run_folder import check_same_settings, no_run_error, remove_unused_run, untrained_error
from dissensus.bench.run.shared_training import companions, remove_leftovers, train_runs
from dissensus.bench.setting_checks import settings_errors
from dissensus.bench.task.config import RunConfig, Task, load_task, run_config
from dissensus.bench.task.objects import base_name, setting_value
from dissensus.core.divergence import Diverged
from dissensus.evaluation.evaluate import evaluate
from dissensus.evaluation.evaluation import Evaluation
from dissensus.methods import METHODS
from dissensus.storage.atomic_files import lock_file, remove_strays, temporary_name, write_json
from dissensus.utils.checks import first_names, integer, one_of


class RunOptions(TypedDict, total=False):
    """How the runs of a bench are done.

    `source`: the folder of the user's data. `tell`: function called with messages about progress. `jobs`: processes that
    train at the same time; a script that uses several must be guarded by `if __name__ == "__main__"`.
    """

    source: str | None
    progress: bool
    jobs: int
    tell: Tell


def default_folder(task: Task) -> Path:
    return Path("runs") / f"{task.name}-{task.size}"


def methods_and_folder(
    task: Task, methods: Sequence[str] | None, out: str | Path | None, seeds: int, baseline: str | None, jobs: int = 1
) -> tuple[list[str], Path]:
    """(methods to run, folder to write to) of a bench; raises for arguments that do not fit."""
    integer("--seeds", seeds)
    integer("--jobs", jobs)
    chosen, folder = list(methods or task.methods), default_folder(task) if out is None else Path(out)
    if baseline is not None:
        there = (Run.open(path.parent).config.method for path in folder.glob("*/metrics.json"))
        one_of("a baseline", baseline, dict.fromkeys([*chosen, *there]), hint="run it too, or choose one of them")
    return chosen, folder


def bench(
    task: Task,
    *,
    methods: Sequence[str] | None = None,
    seeds: int = 1,
    out: str | Path | None = None,
    baseline: str | None = None,
    holm: bool = False,
    **options: Unpack[RunOptions],
) -> tuple[Results, list[Path]]:
    """Trains, evaluates and reports a task: (results, report files).

    The report has all finished runs of the task in the folder. `baseline`: None is the task's. `holm`: adjusts p-values.
    """
    chosen, folder = methods_and_folder(task, methods, out, seeds, baseline, options.get("jobs", 1))
    there = earlier_runs(task, folder, {(method, seed) for method in chosen for seed in range(seeds)})
    runs, evaluations = run_all(task, methods=chosen, seeds=range(seeds), out=folder, **options)
    options.get("tell", ignore_message)("writing the report")
    from dissensus.bench.report.html_report import write_report  # loads matplotlib

    measured = dict(zip(runs, evaluations, strict=True)) | {run: run.measure() for run in there}
    ordered = in_task_order(measured)
    results = results_of_runs(ordered, [measured[run] for run in ordered]).with_baseline(baseline, holm=holm)
    return results, write_report(results, folder)


def earlier_runs(task: Task, folder: Path, planned: Collection[tuple[str, int]]) -> list[Run]:
    """The finished runs of a task in a folder, except planned (method, seed); raises if they had other settings of the task."""
    found = []
    for run in [Run.open(path.parent) for path in sorted(folder.glob("*/metrics.json"))]:
        config = run.config
        if (config.task, config.size) == (task.name, task.size) and (config.method, config.seed) not in planned:
            asked = run_config(task, config.method, config.seed)  # the method's own settings may differ
            check_same_settings(run.folder, replace(asked, settings=config.settings).table(), config.table())
            found.append(run)
    return found


def refuse_narrower(folder: Path, runs: Sequence[Run]) -> None:
    """Raises if a page of these runs would leave out finished runs of the folder."""
    left = {path.parent for path in folder.rglob("metrics.json")} - {run.folder for run in runs}
    found = first_names(sorted(str(path.relative_to(folder)) for path in left), 3)
    with withdraw_on_failure(runs):
        if left:
            fix = "name all methods and seeds, or another --out"
            raise ValueError(f"expected all finished runs of {folder} in this bench, got none of {found}; {fix}")


def in_task_order(runs: Iterable[Run]) -> list[Run]:
    """Runs by the task's order of methods, then by seed; methods that it does not name follow in the library's order."""
    every = sorted(runs, key=lambda run: (run.config.method, run.config.seed))
    first, order = every[0].config, list(METHODS)
    with suppress(ValueError, OSError):  # the task's file may be gone
        file = str(Path(first.folder, f"{first.task}.toml")) if first.folder else first.task
        order = [*load_task(file, size=first.size).methods, *order]
    place = {name: i for i, name in reversed([*enumerate(order)])}
    base = {run.config.method: place.get(base_name(run.config.method), len(order)) for run in every}
    return sorted(every, key=lambda run: place.get(run.config.method, base[run.config.method]))


def run_all(
    task: Task, *, methods: Sequence[str], seeds: Iterable[int], out: Path, **options: Unpack[RunOptions]
) -> tuple[list[Run], list[Evaluation]]:
    """(runs, their evaluations) of methods and seeds of a task, seed by seed, without a report."""
    configs = [run_config(task, method, seed) for seed in seeds for method in methods]
    runs = begin_runs(task, configs, out, source=options.get("source"))
    return runs, finish_runs(runs, **options)


def finish_runs(runs: Sequence[Run], **options: Unpack[RunOptions]) -> list[Evaluation]:
    """The evaluations of runs that have begun, one after the other or `jobs` at a time."""
    jobs, tell, progress = options.get("jobs", 1), options.get("tell", ignore_message), options.get("progress", False)
    groups = list({id(group[0]): group for group in (companions(run, runs) for run in runs)}.values())
    if progress and torchrun_ranks.size() == 1 and not all(run.is_trained for run in runs):
        with withdraw_on_failure(runs):
            tell(expected_time_text([group for group in groups if not all(run.is_trained for run in group)]))
    for run in runs:
        run.is_shared = jobs == 1 and torchrun_ranks.is_training_shared(len(groups))
    if jobs > 1 or (torchrun_ranks.size() > 1 and not runs[0].is_shared):
        run_in_processes(groups, jobs, source=options.get("source"), tell=tell)
    with withdraw_on_failure(runs):
        found: dict[int, Evaluation] = {}
        for wait in (False, True):  # first what no other process is at
            for i in (i for i in range(len(runs)) if i not in found):
                with lock_runs(companions(runs[i], runs), wait=wait) as is_mine:
                    if is_mine:
                        found[i] = _finish_run(i + 1, runs[i], runs, progress=progress, tell=tell)
    if runs[0].is_shared:
        torchrun_ranks.exit_other_ranks()
    for out in dict.fromkeys(run.folder.parent for run in runs):
        remove_leftovers(out)
    return [found[i] for i in range(len(runs))]


def lock_runs(group: Sequence[Run], *, wait: bool) -> AbstractContextManager[bool]:
    """Inside, True if no other process trains these runs, also on a machine that shares the folder."""
    first = group[0].folder
    return nullcontext(True) if group[0].is_shared else lock_file(first.with_name(f".{first.name}.lock"), wait=wait)


def expected_time_text(groups: Sequence[Sequence[Run]]) -> str:
    """Minutes of training per method and in all, each group of runs in one training."""
    names = [" + ".join(run.config.method for run in group) for group in groups]
    seconds = {name: group[0].expected_seconds() for name, group in dict(zip(names, groups, strict=True)).items()}
    times = {**seconds, "in all": sum(seconds[name] for name in names)}
    said = [f"{name} {'under 1' if time < 60 else f'about {time / 60:.0f}'} min" for name, time in times.items()]
    return f"training: {'; '.join(said)}"


@contextmanager
def withdraw_on_failure(runs: Sequence[Run]) -> Iterator[None]:
    """Context that, on failure, removes the folders made for these runs if they have no results."""
    try:
        yield
    except BaseException:
        for run in (each for each in runs if each.is_new):
            with lock_runs([run], wait=False) as is_mine:
                if is_mine:
                    remove_unused_run(run.folder)
        raise


def _finish_run(i: int, run: Run, runs: Sequence[Run], *, progress: bool, tell: Tell) -> Evaluation:
    """The evaluation of one of the runs, trained alone or together with its companions."""
    name = f"[{i}/{len(runs)}] {run.config.method}, seed {run.config.seed}"
    group = companions(run, runs)
    waiting = [each.config.method for each in group if each is not run and not each.is_trained]
    done = "trained already" if run.is_trained else "training"
    with_others = f"{'; training ' if run.is_trained else ' together with '}{', '.join(waiting)}" if waiting else ""
    tell(f"{name}: {done}{with_others}")
    train_runs(group, progress=progress)
    return run.evaluate(tell=lambda text: tell(f"{name}: evaluating {text}"))


def begin_runs(
    task: Task, configs: Sequence[RunConfig], out: Path, *, source: str | None = None, load: DataCache | None = None
) -> list[Run]:
    """The checked runs of these configs, each with its folder; nothing is trained yet. `load`: shared with other runs."""
    torchrun_ranks.connect()
    load = load or DataCache(source)
    names = [f"{each.method.replace(':', '.')}-seed{each.seed}" for each in configs]  # some file systems have no colon
    runs = [Run(out / name, config, load=load) for name, config in zip(names, configs, strict=True)]
    _ = runs[0].data  # load data before making the folder: missing data then leave nothing behind
    for run in runs:  # all of them before the first folder
        run.check()
    if torchrun_ranks.rank() == 0:
        writable_folder(out)
        for run in runs:  # raise for a folder of another run before anything is trained
            run.begin()
    torchrun_ranks.wait()
    if not all((run.folder / "config.toml").is_file() for run in runs):
        raise FileNotFoundError(f"expected a folder that all processes see, got {out}; choose a shared --out")
    return runs


def report_runs(
    folders: Sequence[str | Path], out: str | Path, *, baseline: str | None = None, holm: bool = False, **shown: Any
) -> tuple[Results, list[Path]]:
    """(results, report files) of run folders, or of folders of run folders; `shown`: arguments of `Results.arrange`."""
    from dissensus.bench.report.html_report import is_single_file, write_report  # loads matplotlib

    target = Path(out)
    results = read(*folders).with_baseline(baseline, holm=holm).arrange(**shown)
    with file_mismatch_errors(map(Path, folders)):
        writable_folder(target.parent if is_single_file(target) else target)
        return results, write_report(results, target)


def read(*folders: str | os.PathLike[str]) -> Results:
    """The results of run folders, or of folders that `dissensus bench` wrote, in the task's order of methods.

    `.methods` is name -> one `Evaluation` per seed; `.to_dataframe()` has one row per run and one column per metric.
    """
    runs = in_task_order(map(Run.open, find_runs(list(map(Path, folders)))))
    for run in runs:
        if not (run.folder / "metrics.json").is_file():
            fix = f"run `dissensus evaluate {run.folder}` first, or finish the bench"
            raise FileNotFoundError(f"expected a result in {run.folder}; {fix}")
    evaluations = [run.measure() for run in runs]
    with file_mismatch_errors(run.folder for run in runs):
        return results_of_runs(runs, evaluations)


def file_mismatch_errors(folders: Iterable[Path]) -> AbstractContextManager[None]:
    """Context that turns exceptions about files that do not fit together into one error."""
    wanted = "metrics.json and arrays.safetensors that belong together in"
    remedy = "run `dissensus evaluate --again` on them"
    return settings_errors(", ".join(map(str, folders)), wanted=wanted, remedy=remedy)


def find_runs(folders: Sequence[str | Path]) -> list[Path]:
    """The named run folders, or those inside the named folders, in order."""
    found: list[Path] = []
    for folder in map(Path, folders):
        inside = [folder] if (folder / "config.toml").is_file() else sorted(folder.glob("*/config.toml"))
        if not inside:
            raise no_run_error(folder)
        found += [path.parent if path.name == "config.toml" else path for path in inside]
    return list(dict.fromkeys(found))


def writable_folder(folder: Path) -> Path:
    """The folder, created if necessary; raises if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = temporary_name(folder / "probe")
        probe.touch()
        probe.unlink()
        remove_strays(folder / "probe")
    except OSError as error:  # a file of that name, no permission, no space
        raise OSError(f"expected a folder to write to, got {folder} ({error}); choose another --out") from error
    return folder


def calibrate_run(run: Run, asked: Mapping[str, Any], *, rows: float | None = None) -> tuple[Evaluation, Evaluation]:
    """(before, after): evaluations of a trained run on the remaining test rows, without and with these calibration settings.

    Other settings are those of the run; `rows`: number or share of test rows to hold out. The result is saved in calibrated/.
    """
    if not run.is_trained:
        raise untrained_error(run.folder)
    if rows is not None:
        number = rows if 0 < rows < 1 else integer("rows", int(rows) if rows == int(rows) else rows)
        run = Run(run.folder, replace(run.config, data=run.config.data | {"calibration": number}), load=run.load)
    settings = run.config.calibration | dict(asked)
    check_calibration(settings, run.config.data, run.kind)
    test = run.loader(run.data.test)
    return evaluate(run.posterior(), test), evaluate(run.calibrate(settings), test)


DIVERGED = "diverged.json"  # of a diverged run: the step and the members
_loaded: list[DataCache] = []  # data of a worker process, so that its runs read the same rows once


def run_in_processes(
    groups: Sequence[Sequence[Run]], jobs: int, *, source: str | None, tell: Tell, keep_going: bool = False
) -> None:
    """Trains and evaluates groups of runs, each group in one process, `jobs` processes at a time.

    Processes started by `torchrun` each take some of the groups; only the first returns, when all are done. `keep_going`: a
    diverged run is recorded in its folder and does not raise.
    """
    _run_groups(torchrun_ranks.groups_of_this_rank(groups), jobs, source, tell, keep_going)
    torchrun_ranks.exit_other_ranks()
    for group in groups:
        if not all(is_over(run.folder) for run in group):  # processes of another command were at it
            train_and_evaluate(group, keep_going=keep_going, wait=True)


def _run_groups(groups: Sequence[Sequence[Run]], jobs: int, source: str | None, tell: Tell, keep_going: bool) -> None:
    waiting = [group for group in groups if not all(is_over(run.folder) for run in group)]
    if not waiting:
        return
    if jobs == 1:
        for i, group in enumerate(waiting, start=1):
            train_and_evaluate(group, keep_going=keep_going)
            tell(_done_message(i, len(waiting), group))
        return
    threads = max(1, (os.cpu_count() or 1) // jobs)
    # Spawned, not forked: torch's thread pool can hang in a forked process.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        min(jobs, len(waiting)), mp_context=context, initializer=_prepare_worker, initargs=(source, threads)
    ) as pool:
        try:
            folders = [[run.folder for run in group] for group in waiting]
            jobs_of = [pool.submit(_finish_in_worker, each, keep_going) for each in folders]
            started = dict(zip(jobs_of, waiting, strict=True))
            for i, each in enumerate(as_completed(started), start=1):
                each.result()
                tell(_done_message(i, len(waiting), started[each]))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def train_and_evaluate(runs: Sequence[Run], *, keep_going: bool = False, wait: bool = False) -> None:
    """Trains and evaluates one run, or several that share a training, unless another process is at them and `wait` is False."""
    try:
        with lock_runs(runs, wait=wait) as is_mine:
            if is_mine:
                train_runs(runs)
                for run in runs:
                    run.evaluate()
    except Diverged as error:
        if not keep_going:
            raise
        for run in runs:
            write_json(run.folder / DIVERGED, {"step": error.step, "members": error.members, "what": error.what})


def is_over(folder: Path) -> bool:
    """Whether a run was measured or has diverged."""
    return any((folder / name).is_file() for name in ("metrics.json", DIVERGED))


def _done_message(i: int, count: int, group: Sequence[Run]) -> str:
    lost = " (diverged)" if any((run.folder / DIVERGED).is_file() for run in group) else ""
    end = f"done{lost}" if all(is_over(run.folder) for run in group) else "another process is at it"
    return f"[{i}/{count}] {', '.join(run.folder.name for run in group)}: {end}"


def _prepare_worker(source: str | None, threads: int) -> None:
    os.environ.pop("RANK", None)  # this process was not started by `torchrun`
    torch.set_num_threads(threads)
    _loaded[:] = [DataCache(source)]


def _finish_in_worker(folders: list[Path], keep_going: bool) -> None:
    runs = [Run(folder, Run.open(folder).config, load=_loaded[0]) for folder in folders]
    train_and_evaluate(runs, keep_going=keep_going)


FACTS = ("Command", "dissensus", "Commit", "Python", "torch", "numpy", "Device", "Threads", "Platform")


def results_of_runs(runs: Sequence[Run], evaluations: Sequence[Evaluation]) -> Results:
    """Results of run folders of one task."""
    first = runs[0].config
    tasks = {(run.config.task, run.config.size) for run in runs}
    if len(tasks) > 1:
        shown = ", ".join(f"{task} ({size})" for task, size in sorted(tasks))
        raise ValueError(f"expected runs of one task and size in a report, got {shown}; make one report for each")
    evaluations = compare_with_reference(runs, evaluations)
    methods: dict[str, list[Evaluation]] = {}
    origins: dict[str, list[dict[str, Any]]] = {}
    seen: dict[tuple[str, int], Run] = {}
    for run, evaluation in zip(runs, evaluations, strict=True):
        config, made = run.config, run.provenance
        other = seen.setdefault((config.method, config.seed), run)
        if other is not run:  # it is unclear which of them counts
            what = f"{config.method} with seed {config.seed} in {other.folder} and in {run.folder}"
            raise ValueError(f"expected one run of each method and seed in a report, got {what}; name one of them")
        origin = {"task": config.task, "size": config.size, "method": config.method, "seed": config.seed}
        origin |= {key: made.get(key, "") for key in ("commit", "dissensus", "torch", "device")}
        methods.setdefault(config.method, []).append(evaluation)
        origins.setdefault(config.method, []).append(origin)
    records = [run.provenance for run in runs]
    code = [" ".join(part) for each in records for part in each.get("code", {}).items()]
    facts = {
        "Task": f"{first.task}, size {first.size}",
        "Seeds": ", ".join(map(str, sorted({run.config.seed for run in runs}))),
        "Test examples": f"{len(evaluations[0].arrays['test/nll']):,}",
        # The common value of all runs, or all values.
        **{label: "; ".join(dict.fromkeys(str(each.get(label.lower(), "")) for each in records)) for label in FACTS},
        "Own code and rows": ", ".join(dict.fromkeys(code)),  # a name that appears twice was changed between runs
        "Started": str(records[0].get("started", "")),
    }
    baseline = first.baseline if first.baseline in methods else None
    focus, key = first.evaluation.get("focus"), first.evaluation.get("sweep")
    found = {run.config.method: setting_value(run.config.settings, key) for run in runs} if key else {}
    values = {method: float(value) for method, value in found.items() if value is not None}
    focus, sweep = focus if focus in methods else None, SettingSweep(key, values) if key and values else None
    known = {label: value for label, value in facts.items() if value}
    about: dict[str, Any] = {"title": first.title, "description": first.description, "reference": first.reference}
    return Results(**about, methods=methods, origins=origins, baseline=baseline, facts=known, focus=focus, sweep=sweep)


def compare_with_reference(runs: Sequence[Run], evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """The evaluations; with against/NAME, seed by seed, if the task names a reference method."""
    name = runs[0].config.evaluation.get("against")
    if name is None:
        return list(evaluations)
    references = {run.config.seed: run.predictions() for run in runs if run.config.method == name}
    if missing := {run.config.seed for run in runs} - references.keys():
        raise ValueError(f"expected {name} among the runs of seed {min(missing)}, got only others; run it too")
    return [
        with_reference_halves(evaluation, references[run.config.seed])
        if run.config.method == name
        else with_reference(evaluation, run.predictions(), references[run.config.seed])
        for run, evaluation in zip(runs, evaluations, strict=True)
    ]
