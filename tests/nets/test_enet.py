"""ENet: any size of image, values put back where they came from, and members side by side."""

import pytest
import torch
import torch.nn.functional as F

import dissensus as ds
from dissensus.nets.enet import unpooled


@pytest.mark.parametrize("size", [(180, 240), (23, 45), (16, 8), (9, 10)])
def test_outputs_have_the_size_of_the_image(size):
    assert ds.nets.ENet(3).eval()(torch.randn(1, 3, *size)).shape == (1, 3, *size)


@pytest.mark.parametrize("size", [(6, 8), (7, 8), (5, 7)])
def test_values_are_put_back_as_torch_does(size):
    x = torch.randn(2, 3, *size)
    pooled, places = F.max_pool2d(x, 2, ceil_mode=True, return_indices=True)
    assert torch.equal(unpooled(pooled, places, x.shape[2:]), F.max_unpool2d(pooled, places, 2, output_size=size))


def test_members_side_by_side_are_those_of_the_loop():
    ensemble = ds.DeepEnsemble([ds.nets.ENet(3).double() for _ in range(2)]).eval()
    x = torch.randn(1, 3, 13, 18, dtype=torch.float64)
    ensemble.particles.how = "vectorised"
    side_by_side = ensemble(x)
    assert ensemble.particles.how == "vectorised"  # nothing had to be run in a loop instead
    ensemble.particles.how = "loop"
    torch.testing.assert_close(ensemble(x), side_by_side, rtol=0, atol=1e-10)
