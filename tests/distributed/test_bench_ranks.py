"""`torchrun -m dissensus bench`: the page of one process, up to times."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
TIMES = re.compile(r"(Training, s|Prediction, ms per input|Command|Commit|Started).*")


def bench(folder, processes, *arguments):
    """Runs `dissensus` in the folder, by so many processes: (exit code, stdout, stderr)."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *start, "-m", "dissensus", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=600,
    )
    return done.returncode, done.stdout, done.stderr


def page(folder):
    return TIMES.sub(r"\1", (folder / "report.md").read_text())


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        ["moons", "--methods", "map,deep_ensemble,swag", "--seeds", "2"],  # dealt out: each rank trains whole runs
        ["moons", "--methods", "deep_ensemble"],  # shared: a member on each rank
    ],
    ids=["dealt", "members"],
)
def test_two_processes_write_the_page_of_one(tmp_path, asked):
    for processes in (1, 2):
        code, out, err = bench(tmp_path, processes, "bench", *asked, "--size", "smoke", "--out", f"by{processes}")
        assert code == 0, err
        # One table, by the first process, and the names of three files.
        assert out.count("report.html") == out.count("┏") == 1
    assert page(tmp_path / "by2") == page(tmp_path / "by1")
    assert files(tmp_path / "by2") == files(tmp_path / "by1"), "and no file is left over"
    # What is done is not done again, by whatever number of processes.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "by2").rglob("metrics.json")}
    assert bench(tmp_path, 1, "bench", *asked, "--size", "smoke", "--out", "by2")[0] == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "by2").rglob("metrics.json")} == before


@pytest.mark.slow
def test_one_network_shared_by_rows_is_that_of_one_process_up_to_rounding(tmp_path):
    """Sums of gradients are rounded otherwise, in float32: 12 steps later metrics agree to three digits."""
    asked = ("bench", "digits", "--methods", "map", "--size", "smoke", "--set", "training.temperature=true")
    found = []
    for processes in (1, 2):
        code, _, err = bench(tmp_path, processes, *asked, "--out", f"by{processes}")
        assert code == 0, err
        folder = tmp_path / f"by{processes}"
        found.append(json.loads((folder / "map-seed0" / "metrics.json").read_text())["metrics"])
    assert files(tmp_path / "by2") == files(tmp_path / "by1")
    for name in ("accuracy", "nll", "brier", "corrupt/nll", "temperature"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-3), name


@pytest.mark.slow
def test_an_error_of_all_processes_is_said_once(tmp_path):
    code, out, err = bench(tmp_path, 2, "bench", "nosuch")
    assert code != 0
    assert out == ""
    assert err.count("dissensus: expected a task of") == 1
