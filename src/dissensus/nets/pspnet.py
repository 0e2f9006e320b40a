"""ResNet-50 for large images, and PSPNet built on it.

He, Zhang, Ren & Sun, "Deep residual learning", CVPR 2016. Zhao, Shi, Qi, Wang & Jia, "Pyramid scene parsing network", CVPR
2017, on the dilated ResNet of Yu, Koltun & Funkhouser, CVPR 2017.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.nets.blocks import draw_convolutions

BLOCKS = (3, 4, 6, 3)
POOLED = (1, 2, 3, 6)  # rows and columns of the pyramid


class ResNet50(nn.Module):
    """ResNet-50 for large images: (B, C, H, W) -> (B, outputs). Loads torchvision's weights: names and shapes are the same."""

    def __init__(self, outputs: int = 1000, *, channels: int = 3) -> None:
        super().__init__()
        self.config = {"outputs": outputs, "channels": channels}
        add_trunk(self, channels, dilated=False)
        self.fc = nn.Linear(2048, outputs)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(features(self, x).mean((2, 3)))
        return logits


class PSPNet(nn.Module):
    """PSPNet for segmentation: (B, C, H, W) -> (B, outputs, H, W).

    The backbone's tensors have the names of torchvision's ResNet-50, without fc. The last two stages are dilated instead of
    strided: features have an eighth of the image's size. There is no auxiliary head. `dropout` is the rate at which channels
    are dropped before the last layer.
    """

    def __init__(self, outputs: int = 13, *, channels: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.config = {"outputs": outputs, "channels": channels, "dropout": dropout}
        add_trunk(self, channels, dilated=True)
        self.pyramid = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(size), *norm_block(nn.Conv2d(2048, 512, 1, bias=False)))
            for size in POOLED
        )
        self.head = nn.Sequential(
            *norm_block(nn.Conv2d(2048 + 512 * len(POOLED), 512, 3, padding=1, bias=False)),
            nn.Dropout2d(dropout),
            nn.Conv2d(512, outputs, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        found = features(self, x)
        size = found.shape[2:]
        pooled = [F.interpolate(part(found), size, mode="bilinear", align_corners=False) for part in self.pyramid]
        logits = self.head(torch.cat([found, *pooled], dim=1))
        return F.interpolate(logits, x.shape[2:], mode="bilinear", align_corners=False)


class WideBottleneck(nn.Module):
    """Residual block of 1×1, 3×3 and 1×1 convolutions; the outer channels are four times the inner ones."""

    def __init__(self, inputs: int, inner: int, *, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        outputs = 4 * inner
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride=stride, padding=dilation, dilation=dilation, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        found = F.relu(self.bn1(self.conv1(x)))
        found = F.relu(self.bn2(self.conv2(found)))
        return F.relu(self.bn3(self.conv3(found)) + self.downsample(x))


def add_trunk(network: nn.Module, channels: int, *, dilated: bool) -> None:
    """Adds ResNet-50's layers conv1, bn1 and layer1 to layer4 to the network."""
    network.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    network.bn1 = nn.BatchNorm2d(64)
    inputs, dilation = 64, 1
    for i, count in enumerate(BLOCKS):
        stride, inner, before = 1 if i == 0 else 2, 64 * 2**i, dilation
        if dilated and i >= 2:
            stride, dilation = 1, dilation * 2
        # The first block of a dilated stage still has the dilation of the stage before.
        blocks = [WideBottleneck(inputs, inner, stride=stride, dilation=before)]
        blocks += [WideBottleneck(4 * inner, inner, dilation=dilation) for _ in range(count - 1)]
        network.add_module(f"layer{i + 1}", nn.Sequential(*blocks))
        inputs = 4 * inner
    draw_convolutions(network)


def features(network: nn.Module, x: Tensor) -> Tensor:
    """(B, 2048, h, w) features of a network with these layers."""
    x = F.relu(network.bn1(network.conv1(x)))  # type: ignore[operator]
    x = F.max_pool2d(x, 3, stride=2, padding=1)
    for i in range(1, len(BLOCKS) + 1):
        x = network.get_submodule(f"layer{i}")(x)
    return x


def norm_block(convolution: nn.Conv2d) -> tuple[nn.Module, nn.Module, nn.Module]:
    return convolution, nn.BatchNorm2d(convolution.out_channels), nn.ReLU()
