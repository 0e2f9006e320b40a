"""ENet: any size of image, values put back where they came from, and members side by side."""

import pytest
import torch
import torch.nn.functional as F

import dissensus as ds
from dissensus.nets.segmentation_nets import unpool


@pytest.mark.parametrize("size", [(180, 240), (23, 45), (16, 8), (9, 10)])
def test_outputs_have_the_size_of_the_image(size):
    assert ds.nets.ENet(3).eval()(torch.randn(1, 3, *size)).shape == (1, 3, *size)


@pytest.mark.parametrize("size", [(6, 8), (7, 8), (5, 7)])
def test_values_are_put_back_as_torch_does(size):
    x = torch.randn(2, 3, *size)
    pooled, places = F.max_pool2d(x, 2, ceil_mode=True, return_indices=True)
    assert torch.equal(unpool(pooled, places, x.shape[2:]), F.max_unpool2d(pooled, places, 2, output_size=size))


def test_members_side_by_side_are_those_of_the_loop():
    ensemble = ds.DeepEnsemble([ds.nets.ENet(3).double() for _ in range(2)]).eval()
    x = torch.randn(1, 3, 13, 18, dtype=torch.float64)
    ensemble.particles.how = "vectorised"
    side_by_side = ensemble(x)
    assert ensemble.particles.how == "vectorised"  # nothing had to be run in a loop instead
    ensemble.particles.how = "loop"
    torch.testing.assert_close(ensemble(x), side_by_side, rtol=0, atol=1e-10)


def nets(count: int = 2) -> list[torch.nn.Module]:
    return [ds.nets.ENet(3, dropout=0.2) for _ in range(count)]


POSTERIORS = {
    "deep_ensemble": lambda **keywords: ds.DeepEnsemble(nets(), **keywords),
    "mc_dropout": lambda **keywords: ds.MCDropout(*nets(1), samples=2, **keywords),
    "perturbation": lambda **keywords: ds.GaussianPerturbation(*nets(1), samples=2, **keywords),
    "swag": lambda **keywords: ds.SWAG(*nets(1), samples=2, rank=2, start=0, every=1, **keywords),
    "tradi": lambda **keywords: ds.TRADI(*nets(1), samples=2, **keywords),
    "batch_ensemble": lambda **keywords: ds.BatchEnsemble(
        *nets(1), members=2, modulation=ds.Modulation.normal(1.0, 0.1), **keywords
    ),
    "node_bnn": lambda **keywords: ds.NodeBNN(*nets(1), components=2, samples=2, data_size=4, **keywords),
    "forde": lambda **keywords: ds.FoRDE(nets(), **keywords),
}


OFTEN = ("batch_ensemble",)  # it cuts layers


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in POSTERIORS]
)
def test_every_posterior_trains_predicts_and_comes_back_bit_for_bit(name, tmp_path):
    images, masks = torch.rand(4, 3, 16, 24), torch.randint(3, (4, 16, 24), dtype=torch.uint8)
    masks[:, :2] = ds.data.VOID
    likelihood = ds.Classification(ds.data.VOID, class_weights=ds.data.class_weights(masks, 3))
    posterior = POSTERIORS[name](likelihood=likelihood)
    augment = ds.data.SegmentationAugmentation(seed=0)
    loader = ds.data.Batches(images, masks, batch_size=2, augment=augment)
    ds.fit(posterior, loader, epochs=1, progress=False)
    predictive = posterior.predict(images)
    assert predictive.member_means.shape == (2, 4, 3, 16, 24)
    ds.save(posterior, tmp_path / "posterior")
    loaded = ds.load(tmp_path / "posterior")
    assert torch.equal(loaded.predict(images).member_means, predictive.member_means)
