"""Networks the tests, examples and benchmarks need; users bring their own.

Each keeps the arguments it was built with in `.config`, so that a saved posterior of one can be loaded without it.
"""

from torch import nn

from dissensus.nets.blocks import Erf, Residual
from dissensus.nets.conv import ConvNet
from dissensus.nets.mlp import MLP
from dissensus.nets.resnet import ResNet

NETS: dict[str, type[nn.Module]] = {"MLP": MLP, "ConvNet": ConvNet, "ResNet": ResNet}

__all__ = ["MLP", "NETS", "ConvNet", "Erf", "ResNet", "Residual"]
