"""Runs of a bench that are trained, or stopped on the way."""

import pytest

from dissensus.bench.run.run import Run


def trained(run: Run) -> Run:
    """The run, begun and trained."""
    run.begin()
    run.train_alone()
    return run


def train_until(run: Run, last: int) -> None:
    """Begins and trains the run, which is interrupted after this epoch."""
    log = Run.log

    def stop(self, epoch):
        log(self, epoch)
        if epoch.epoch == last:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "log", stop)
        with pytest.raises(KeyboardInterrupt):
            trained(run)
