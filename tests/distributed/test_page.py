"""Scripts under torchrun, of the page on many machines and the bench: what they give on one process."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workers import workers

import dissensus as ds
import tiny
from test_readme import python_blocks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "distributed.md"


def page(folder, blocks=None):
    """(weights, what was printed) after the first blocks of the page, run in a folder; None: after all."""
    before = os.getcwd()
    os.chdir(folder)
    names, printed = {"__name__": "__main__"}, io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            for _, code in python_blocks(PAGE.read_text())[:blocks]:
                exec(compile(code, "distributed.md", "exec"), names)
    finally:
        os.chdir(before)
    return names["posterior"].state_dict(), printed.getvalue()


@pytest.mark.slow
def test_the_code_of_the_page_gives_the_same_on_two_processes(tmp_path):
    wanted, printed = page(tmp_path, 3)
    for rank, (state, said) in enumerate(workers().run(2, page, str(tmp_path), 3)):
        assert said == (printed if rank == 0 else "")
        for name, tensor in wanted.items():
            torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-6)
    (first, _), (second, _) = workers().run(2, page, str(tmp_path))  # with a sampler, whose batches are others
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [path.name for path in tmp_path.iterdir()] == ["ensemble"]


@pytest.mark.slow
def test_the_script_of_the_page_runs_under_torchrun(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("".join(code for _, code in python_blocks(PAGE.read_text())[:2]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    source = str(Path(ds.__file__).parents[1])
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    wanted, printed = page(tmp_path, 2)
    assert done.stdout == printed  # once
    loaded = ds.load(tmp_path / "ensemble").state_dict()
    assert all(torch.allclose(loaded[name], tensor, rtol=0, atol=1e-6) for name, tensor in wanted.items())


def wrapped(rows):
    """Gradients of DistributedDataParallel around a posterior, whose outputs go into a loss of one's own."""
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([nn.Linear(4, 3) for _ in range(2)]).double()
    x, y = tiny.points()
    alone = rows is None
    here = slice(None) if alone else slice(*rows[torch.distributed.get_rank()])
    module = posterior if alone else DistributedDataParallel(posterior)
    outputs = module(x[here])  # (M, B, C)
    nn.functional.cross_entropy(outputs.flatten(0, 1), y[here].repeat(2)).backward()
    return tiny.gradients(posterior)


def test_torchs_wrapper_around_a_posterior_has_the_gradients_of_all_rows():
    expected = wrapped(None)
    for found in workers().run(2, wrapped, ((0, 6), (6, 12))):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-12)


SOURCE = Path(__file__).parents[2] / "src"
TIMES = re.compile(r"(Training, s|Prediction, ms per input|Command|Commit|Started).*")


def bench(folder, processes, *arguments):
    """Runs `dissensus` in the folder, by so many processes: (exit code, stdout, stderr)."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *start, "-m", "dissensus", *arguments], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, check=False, timeout=600,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def report(folder):
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
    assert report(tmp_path / "by2") == report(tmp_path / "by1")
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
