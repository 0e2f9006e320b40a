"""Trains and evaluates runs in several processes at once; finished stages are kept."""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from dissensus.bench import torchrun_ranks
from dissensus.bench.rows.task_rows import DataCache
from dissensus.bench.run.run import Run, Tell
from dissensus.bench.run.shared_training import train_runs
from dissensus.core.errors import Diverged
from dissensus.storage.atomic_files import write_json
from dissensus.core.divergence import Diverged
from dissensus.storage.run_files import write_json

DIVERGED = "diverged.json"  # of a diverged run: the step and the members
_loaded: list[DataCache] = []  # data of a worker process, so that its runs read the same rows once


def run_in_processes(
    groups: Sequence[Sequence[Run]], jobs: int, *, source: str | None, tell: Tell, keep_going: bool = False
) -> None:
    """Trains and evaluates groups of runs, each group in one process, `jobs` processes at a time.

    Processes started by `torchrun` each take some of the groups; only the first returns, when all are done. `keep_going`: a
    diverged run is recorded in its folder and does not raise.
    """
    _run_groups(torchrun_ranks.groups_of_this_rank(groups), jobs, source=source, tell=tell, keep_going=keep_going)
    torchrun_ranks.exit_other_ranks()


def _run_groups(
    groups: Sequence[Sequence[Run]], jobs: int, *, source: str | None, tell: Tell, keep_going: bool
) -> None:
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


def train_and_evaluate(runs: Sequence[Run], *, keep_going: bool = False) -> None:
    """Trains and evaluates one run, or several runs that share a training."""
    try:
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
    return f"[{i}/{count}] {', '.join(run.folder.name for run in group)}: done{lost}"


def _prepare_worker(source: str | None, threads: int) -> None:
    os.environ.pop("RANK", None)  # this process was not started by `torchrun`
    torch.set_num_threads(threads)
    _loaded[:] = [DataCache(source)]


def _finish_in_worker(folders: list[Path], keep_going: bool) -> None:
    runs = [Run(folder, Run.open(folder).config, load=_loaded[0]) for folder in folders]
    train_and_evaluate(runs, keep_going=keep_going)
