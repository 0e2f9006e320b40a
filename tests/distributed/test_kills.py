"""Runs under torchrun that are killed, told to end, or hang: the result is the undisturbed run's, and no file is left."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import dissensus as ds

HERE = Path(__file__).parent
KILLS = 20

pytestmark = pytest.mark.slow


def torchrun(folder, *arguments, restarts=0):
    """torchrun with two processes of trainee.py, in a session of its own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log.txt").open("a") as log:
        return subprocess.Popen(
            [*launcher, "--max-restarts", str(restarts), str(HERE / "trainee.py"), str(folder), *arguments], stdout=log,
            stderr=log, env=environment, start_new_session=True,
        )  # fmt: skip


def waited(paths, process, seconds=120):
    """Waits until all files are there and written."""
    deadline = time.monotonic() + seconds
    while not all(path.exists() and (path.stat().st_size or path.name.startswith("begun")) for path in paths):
        assert process.poll() is None, "torchrun ended"
        assert time.monotonic() < deadline, f"{paths[0].name} did not come in {seconds} s"
        time.sleep(0.02)


def ended(process, seconds=180):
    try:
        return process.wait(seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def undisturbed(folder):
    folder.mkdir()
    (folder / "go").touch()
    assert ended(torchrun(folder)) == 0, (folder / "log.txt").read_text()
    return ds.load(folder / "saved")


def difference(a, b):
    mine, theirs = a.state_dict(), b.state_dict()
    return max(float((mine[key].double() - theirs[key].double()).abs().max()) for key in mine)


def test_one_of_two_ranks_killed_at_twenty_random_moments(tmp_path):
    expected = undisturbed(tmp_path / "undisturbed")
    folder = tmp_path / "killed"
    folder.mkdir()
    process, chance = torchrun(folder, restarts=KILLS + 1), random.Random(0)
    try:
        for attempt in range(KILLS):
            pids = [folder / f"pid-{attempt}-{rank}" for rank in range(2)]
            waited(pids, process)
            if chance.random() < 0.75:  # while it trains, writes or waits; else while it starts
                waited([folder / f"begun-{attempt}-0"], process)
                time.sleep(chance.uniform(0, 0.5))
            else:
                time.sleep(chance.uniform(0, 2.0))
            os.kill(int(chance.choice(pids).read_text()), signal.SIGKILL)
        (folder / "go").touch()
    finally:
        code = ended(process)
    assert code == 0, (folder / "log.txt").read_text()[-5000:]
    assert (folder / "attempts").read_text() == str(KILLS)
    assert difference(expected, ds.load(folder / "saved")) == 0
    assert len(list((folder / "run.ckpt").iterdir())) == 1
    kinds = {path.name.split("-")[0] for path in folder.iterdir()}
    assert kinds == {"pid", "begun", "go", "attempts", "saved", "run.ckpt", "log.txt"}
    assert sorted(path.name for path in (folder / "saved").iterdir()) == ["config.json", "posterior.safetensors"]


@pytest.mark.parametrize("members", ["2", "1"])
def test_a_job_that_the_scheduler_ends_goes_on_in_the_next_one(members, tmp_path):
    expected = undisturbed(tmp_path / "undisturbed")
    folder = tmp_path / "ended"
    folder.mkdir()
    process = torchrun(folder, members)
    waited([folder / "begun-0-0"], process)
    process.send_signal(signal.SIGTERM)  # to torchrun, which passes it on
    assert ended(process) != 0
    assert len(list((folder / "run.ckpt").iterdir())) == 1
    for path in folder.glob("*-0-*"):
        path.unlink()
    (folder / "go").touch()
    assert ended(torchrun(folder, members)) == 0
    tolerance = 0 if members == "2" else 1e-5  # float32, sums over the data axis in another order
    assert difference(expected, ds.load(folder / "saved")) <= tolerance


def test_a_process_that_stands_still_is_named_and_the_run_recovers(tmp_path, monkeypatch):
    monkeypatch.setenv("DISSENSUS_TEST_TIMEOUT", "5")
    (tmp_path / "go").touch()
    process = torchrun(tmp_path, restarts=1)
    waited([tmp_path / "begun-0-1"], process)
    os.kill(int((tmp_path / "pid-0-1").read_text()), signal.SIGSTOP)
    assert ended(process) == 0, (tmp_path / "log.txt").read_text()[-5000:]
    assert "gives no sign of life: rank 1 on " in (tmp_path / "log.txt").read_text()
    assert (tmp_path / "attempts").read_text() == "1"
    assert torch.isfinite(ds.load(tmp_path / "saved").predict(torch.zeros(3, 2)).mean).all()
