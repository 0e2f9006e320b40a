"""ResNet-50 with torchvision's names, and PSPNet on its dilated form."""

import pytest
import torch

import dissensus as ds
from dissensus.nets.resnet import features


def test_features_are_an_eighth_of_the_image_and_the_dilated_trunk_has_the_plain_ones_weights():
    segmenting, plain = ds.nets.PSPNet(5), ds.nets.ResNet50(5)
    found = segmenting.load_state_dict(plain.state_dict(), strict=False)
    assert set(found.unexpected_keys) == {"fc.weight", "fc.bias"}
    assert not any(name.startswith(("conv1", "bn1", "layer")) for name in found.missing_keys)
    x = torch.randn(1, 3, 64, 96)
    assert features(segmenting.eval(), x).shape == (1, 2048, 8, 12)
    assert features(plain.eval(), x).shape == (1, 2048, 2, 3)


def test_it_computes_what_torchvisions_does():
    models = pytest.importorskip("torchvision.models")
    theirs, mine = models.resnet50().eval(), ds.nets.ResNet50().eval()
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(mine(x), theirs(x))
