"""The size smoke of CIFAR-10: seconds, whatever the method."""

import time

import numpy as np
import pytest

from dissensus.bench.run import jobs
from dissensus.bench.run.build import check_complete
from dissensus.bench.task.config import load_task, run_config
from dissensus.methods import METHODS


def test_every_method_has_all_that_it_needs_and_little_to_do():
    for name in METHODS:
        config = run_config(load_task("cifar10", size="smoke", methods=[name]), name, 0)
        check_complete(config)
        counts = {
            key: value for key, value in config.settings.items() if key in ("members", "samples", "components", "rank")
        }
        assert all(value <= 4 for value in counts.values()), name
        assert counts or name in ("map", "swa"), name  # whose defaults would be long


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    """CIFAR-10, CIFAR-100 and SVHN in their formats, with random images."""
    folder, rng = tmp_path_factory.mktemp("cifar"), np.random.default_rng(0)
    ten, hundred, svhn = (folder / name for name in ("cifar-10-batches-bin", "cifar-100-binary", "svhn"))
    for each in (ten, hundred, svhn):
        each.mkdir()
    rows, labels = rng.integers(0, 256, (60, 3072), dtype=np.uint8), (np.arange(60) % 10).astype(np.uint8)[:, None]
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        np.concatenate([labels, rows], 1).tofile(ten / f"{name}.bin")
    np.concatenate([labels, labels, rows], 1).tofile(hundred / "test.bin")
    np.savez(svhn / "test_32x32.npz", images=rows.reshape(60, 32, 32, 3), labels=labels[:, 0])
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_seconds(name, cifar, tmp_path):
    start = time.process_time()
    task = load_task("cifar10", size="smoke", methods=[name])
    _, (evaluation,) = jobs.run_all(task, methods=[name], seeds=[0], out=tmp_path / "runs", source=cifar)
    assert time.process_time() - start < 25  # 1 to 4 s of a processor, hmc 10; a busy machine takes longer
    assert {"accuracy", "corrupt/nll", "ood/svhn/auroc", "ood/cifar100/auroc"} <= evaluation.metrics.keys()
