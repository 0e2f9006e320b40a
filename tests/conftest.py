"""Every test starts from the same random state, on one thread, and on the CPU unless it is marked `gpu`."""

import gc
import logging
import os
import sys

import pytest
import torch

torch.set_num_threads(1)
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # of processes that tests start
    os.environ.setdefault(name, "1")
os.environ.setdefault("DISSENSUS_COMMIT", "of the tests")  # instead of asking git, three times for every run
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # workers import torch each, and leave threads behind


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests stay to the end: no collection need look at them again
    gc.set_threshold(50_000, 20, 50)  # and what tests leave is little
    # Three times in each test, pytest adds its handlers to every logger that does not propagate; torch has fifty.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True


@pytest.fixture(autouse=True)
def same_start(request, monkeypatch):
    if "gpu" in request.keywords:
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)  # the CPU's alone: torch writes a stack trace for each other device
        # `fit` takes a GPU where there is one; what these tests compare with stays on the CPU.
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


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


@pytest.fixture(scope="module")
def unreported():
    """Benches without reports: runs and their files are looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dissensus.bench.report.html_report.write_report", lambda results, path: [])
        yield
