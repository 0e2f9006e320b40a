"""Networks for tests, examples and benchmarks; users can bring any network.

Each stores its arguments in `.config`, so that `ds.load` can rebuild it from a saved posterior.
"""

from torch import nn

from dissensus.nets.blocks import Erf, NTKLinear, Residual
from dissensus.nets.convnets import VGG16, AlexNet, ConvNet, LeNet
from dissensus.nets.mlp import MLP
from dissensus.nets.resnet import ResNet, ResNet50, WideResNet
from dissensus.nets.segmentation_nets import ENet, PSPNet

_CLASSES = (MLP, AlexNet, ConvNet, ENet, LeNet, PSPNet, ResNet, ResNet50, VGG16, WideResNet)
NETS: dict[str, type[nn.Module]] = {net.__name__: net for net in _CLASSES}

__all__ = [
    "MLP", "NETS", "VGG16", "AlexNet", "ConvNet", "ENet", "Erf", "LeNet", "NTKLinear", "PSPNet", "ResNet", "ResNet50",
    "Residual", "WideResNet",
]  # fmt: skip
