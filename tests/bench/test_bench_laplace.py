"""Laplace in a task: trained as MAP, fitted at the end, alone, as a variant and in a shared training."""

import json

import pytest
import torch

import dissensus as ds
from dissensus.bench.run import jobs
from dissensus.bench.task.config import load_task
from thinning import often

pytestmark = pytest.mark.usefixtures("undrawn")

TASK = """
methods = ["map", "laplace", "laplace-kron"]
baseline = "map"
data = { name = "two_moons", count = 90, validation = 10 }
network = { name = "MLP", hidden = [6], batch_norm = true }
training = { epochs = 3, batch_size = 20, lr = 0.02, keep_best = false, together = TOGETHER, threads = 1 }
method.laplace = { samples = 8 }
method.laplace-kron = { structure = "kron", prior_precision = 2.0 }
"""


@pytest.mark.parametrize("together", often(["true"], ["false"]))
def test_a_task_trains_fits_and_reports_it_and_its_variants(tmp_path, together):
    (tmp_path / "mine.toml").write_text(TASK.replace("TOGETHER", together))
    jobs.bench(load_task(str(tmp_path / "mine.toml")), out=tmp_path / "runs")
    found = {}
    for method in ("map", "laplace", "laplace-kron"):
        folder = tmp_path / "runs" / f"{method}-seed0"
        found[method] = ds.load(folder / "posterior")
        assert json.loads((folder / "metrics.json").read_text())
    trained = found["map"].particles.template.network.state_dict()
    for method in ("laplace", "laplace-kron"):
        posterior = found[method]
        network = posterior.network.state_dict()
        assert all(torch.equal(trained[name], network[name]) for name in trained)
        assert torch.equal(posterior.mean["layers.3.weight"], network["layers.3.weight"])
        assert posterior.draw().members == 8
    assert found["laplace"].curvature[0].structure == "full"
    assert found["laplace-kron"].curvature[0].structure == "kron"
    assert float(found["laplace-kron"].curvature[0].precision) == 2.0
    assert "laplace-kron" in (tmp_path / "runs" / "report.md").read_text()
