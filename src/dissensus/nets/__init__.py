"""Networks for tests, examples and benchmarks; users can bring any network.

Each stores its arguments in `.config`, so that `ds.load` can rebuild it from a saved posterior.
"""

from torch import nn

from dissensus.nets.alexnet import AlexNet
from dissensus.nets.blocks import Erf, Residual
from dissensus.nets.conv import ConvNet
from dissensus.nets.enet import ENet
from dissensus.nets.lenet import LeNet
from dissensus.nets.mlp import MLP
from dissensus.nets.ntk import NTKLinear
from dissensus.nets.pspnet import PSPNet, ResNet50
from dissensus.nets.resnet import ResNet
from dissensus.nets.vgg import VGG16
from dissensus.nets.wide_resnet import WideResNet

NETS: dict[str, type[nn.Module]] = {
    "MLP": MLP,
    "AlexNet": AlexNet,
    "ConvNet": ConvNet,
    "ENet": ENet,
    "LeNet": LeNet,
    "PSPNet": PSPNet,
    "ResNet": ResNet,
    "ResNet50": ResNet50,
    "VGG16": VGG16,
    "WideResNet": WideResNet,
}

__all__ = [
    "MLP",
    "NETS",
    "VGG16",
    "AlexNet",
    "ConvNet",
    "ENet",
    "Erf",
    "LeNet",
    "NTKLinear",
    "PSPNet",
    "ResNet",
    "ResNet50",
    "Residual",
    "WideResNet",
]
