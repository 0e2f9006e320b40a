"""A mesh of one process goes through every exchange and changes nothing: with gloo here, with NCCL on a GPU."""

import pytest
import torch
from test_division import METHODS, small
from torch import distributed

import dissensus as ds
import tiny

NO_GPU = not torch.cuda.is_available()


def run(method, mesh, device):
    torch.manual_seed(0)
    posterior = METHODS[method](small).double()
    x, y = tiny.points()
    loader = ds.data.Batches(x, y, batch_size=7, shuffle=True, seed=3)
    engine = "loop" if posterior.particles.members == 1 else "vectorised"
    torch.manual_seed(1)
    settings = {"engine": engine, "device": device, "validation": (x, y), "progress": False}
    history = ds.fit(posterior, loader, epochs=3, mesh=mesh, **settings)
    state = {name: tensor.cpu() for name, tensor in posterior.state_dict().items() if not name.endswith(".vectors")}
    return state, [epoch.validation for epoch in history.epochs]


def check(method, backend, device, folder):
    wanted, scores = run(method, None, device)
    distributed.init_process_group(backend, init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    try:
        mesh = ds.distributed.mesh(members=1, data=1)
        found, validation = run(method, mesh, device)
    finally:
        distributed.destroy_process_group()
    assert mesh.data.bytes_sent["sum"] > 0
    assert validation == pytest.approx(scores, abs=1e-10)
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


SOME = ["map", "deep_ensemble", "multi_mc_dropout", "function_rde", "svgd", "batch_ensemble", "multi_swag", "node_bnn"]
# A GPU's fused dropout numbers entries as they lie in memory, and activations lie otherwise on a mesh: docs/distributed.md.
NCCL = [method for method in SOME if method != "multi_mc_dropout"]


@pytest.mark.parametrize("method", SOME)
def test_a_mesh_of_one_process_is_that_process(method, tmp_path):
    check(method, "gloo", "cpu", tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU, reason="needs a CUDA device, and there is none here")
@pytest.mark.parametrize("method", [*NCCL, "feature_rde", "forde", "tradi", "mean_field_vi", "multi_sghmc"])
def test_a_mesh_of_one_process_is_that_process_with_nccl(method, tmp_path):
    check(method, "nccl", "cuda", tmp_path)
