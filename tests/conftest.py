"""Every test starts from the same random state, on one thread, and on the CPU unless it is marked `gpu`."""

import copy
import gc
import logging
import os
import sys
from collections import OrderedDict
from pathlib import Path

import pytest

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # of processes that tests start, too
    os.environ.setdefault(name, "1")
os.environ.setdefault("DISSENSUS_COMMIT", "of the tests")  # instead of asking git, three times for every run
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # workers import torch each, and leave threads behind


def pytest_configure(config: pytest.Config) -> None:
    """A GPU is for tests marked `gpu`, by `pytest -m gpu`: `fit` takes one where there is one, also in other processes."""
    if "gpu" not in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def copy_ordered(ordered: OrderedDict, memo: dict) -> OrderedDict:
    memo[id(ordered)] = made = OrderedDict()
    made.update((copy.deepcopy(key, memo), copy.deepcopy(value, memo)) for key, value in ordered.items())
    return made


def pytest_collection_finish() -> None:
    """Where tests run: the process that hands them out to others needs no torch."""
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # modules and tests stay to the end: no collection need look at them again
    gc.set_threshold(50_000, 20, 50)  # and what tests leave is little
    # Three times in each test, pytest adds its handlers to every logger that does not propagate; torch has fifty.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True
    for device in (
        torch.cuda,
        torch.xpu,
        torch.mtia,
    ):  # torch writes a stack trace for each, to seed it once it is there
        if not device.is_available():
            device.manual_seed_all = lambda seed: None
    # A module has eleven empty ones, for hooks, and `copy` takes each apart as pickle does.
    copy._deepcopy_dispatch[OrderedDict] = copy_ordered


@pytest.fixture(autouse=True)
def same_start(request, monkeypatch):
    import torch

    torch.manual_seed(0)
    if "gpu" not in request.keywords:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def on_meta():
    """Networks of which only the shapes are looked at."""
    import torch

    with torch.device("meta"):
        yield


@pytest.fixture
def undrawn(monkeypatch):
    """Pages with an empty <svg> for each figure: figures are made, but drawing them takes longer than training.

    They are drawn in test_report.py, and for whole tasks in test_bench_particle_tasks.py and test_width_axis.py.
    """
    monkeypatch.setattr(
        "dissensus.bench.report.report_figures.svg", lambda figure, prefix: f'<svg id="{prefix}"></svg>'
    )


@pytest.fixture
def command_line(monkeypatch, capsys):
    """Runs `dissensus` with these arguments: (exit code, stdout, stderr)."""
    from dissensus.bench import cli

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dissensus", *arguments])
        with pytest.raises(SystemExit) as done:
            cli.main()
        return int(done.value.code or 0), *capsys.readouterr()

    return run


@pytest.fixture
def benchmarks(monkeypatch):
    """Programs in benchmarks/ can be imported; afterwards they are forgotten: `rows` and others are nobody else's names."""
    import torch

    folder = Path(__file__).parents[1] / "benchmarks"
    folders = [folder, folder / "peer_workers"]
    monkeypatch.setattr(sys, "path", [*map(str, folders), *sys.path])
    before = set(sys.modules)
    with torch.random.fork_rng():
        yield folder
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent in folders:
            del sys.modules[name]


@pytest.fixture(scope="module")
def unreported():
    """Benches without reports: runs and their files are looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dissensus.bench.report.html_report.write_report", lambda results, path: [])
        yield
