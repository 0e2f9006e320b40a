"""A training run to be killed: `torchrun --nproc-per-node 2 trainee.py FOLDER [MEMBERS]`.

Each attempt trains a few epochs further than the one before, then waits to be killed; where a file `go` is in the folder it
trains to the end. Ranks write their process ids, and when they have begun to train.
"""

import os
import sys
import time
from pathlib import Path

FOLDER = Path(sys.argv[1])
ATTEMPT, RANK = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
(FOLDER / f"pid-{ATTEMPT}-{RANK}").write_text(str(os.getpid()))  # first of all: it may be killed while it starts

import torch  # noqa: E402

import dissensus as ds  # noqa: E402

EPOCHS = 45
FURTHER = 2  # epochs that an attempt trains


class Slow(ds.data.Batches):
    """Batches that take some time, so that a kill meets training as often as waiting."""

    def __iter__(self):
        for batch in super().__iter__():
            time.sleep(0.01)
            yield batch


def main():
    ds.distributed.start(timeout=float(os.environ.get("DISSENSUS_TEST_TIMEOUT", "60")))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = ds.distributed.mesh(members=int(sys.argv[2]) if len(sys.argv) > 2 else None)
    x, y = ds.data.two_moons(60, seed=0)
    posterior = ds.DeepEnsemble([ds.nets.MLP(2, 2, hidden=(8,), dropout=0.1) for _ in range(4)])
    begun = 0

    def wait(epoch):
        nonlocal begun
        if not begun:
            (FOLDER / f"begun-{ATTEMPT}-{RANK}").touch()
        begun += 1
        while begun >= FURTHER and not (FOLDER / "go").exists():
            time.sleep(0.01)

    loader = Slow(x, y, batch_size=20, shuffle=True, seed=1)
    ds.fit(posterior, loader, epochs=EPOCHS, mesh=mesh, checkpoint=FOLDER / "run.ckpt", callback=wait, progress=False)
    if mesh.is_first:
        ds.save(posterior, FOLDER / "saved")
        (FOLDER / "attempts").write_text(str(ATTEMPT))


if __name__ == "__main__":
    main()
