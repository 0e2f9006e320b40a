"""Accelerate around posteriors, networks and loaders: the right gradients or an error that says what to pass."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="Accelerate is not installed")
HERE = Path(__file__).parent
GROUP = "expected one process, got rank 0 of 2, whose gradients nobody averages"
LOADER = "expected the loader itself, got one that Accelerate has divided over processes"
TWO = {
    "outputs of a prepared posterior": "right",
    "its backward": GROUP,
    "its loss": GROUP,
    "fit of a prepared posterior": "expected a posterior, got DistributedDataParallel",
    "fit with a prepared loader": LOADER,
    "fit with a prepared optimizer": "right",
    "fit of a prepared network": "expected a plain network, got DistributedDataParallel",
    "outputs of a prepared network": "right",
    "an ensemble of prepared networks": "expected a network to copy, got DistributedDataParallel",
    "evaluation with a prepared loader": LOADER,
}


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_are_right_or_an_error_says_what_to_pass(size):
    path = os.pathsep.join([str(HERE.parent), *sys.path])
    run = [] if size == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    command = [sys.executable, *run, HERE / "accelerated.py"]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines() if line.split(": ")[0] in TWO)
    assert found.keys() == TWO.keys(), done.stderr
    for name, word in found.items():
        expected = TWO[name] if size == 2 else "evaluated" if name.startswith("evaluation") else "right"
        assert word.startswith(expected), name
