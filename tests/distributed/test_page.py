"""The page on many machines: its script gives on two processes what it gives on one."""

import contextlib
import io
import os
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
    script = tmp_path / "training/fit.py"
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
