"""Residual networks for 32×32 images and, with depth 50, for large ones (He, Zhang, Ren & Sun, CVPR 2016).

For small images there are two families. Depths 20, 32, 44, 56 and 110 (and 8, for quick tests) have 16-32-64 channels and
parameter-free shortcuts, as in the paper's CIFAR section. Depths 18 and 34 have 64-128-256-512 channels, 1×1 shortcuts and
a 3×3 stem without pooling, as is usual for CIFAR.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.nets.blocks import draw_convolutions
from dissensus.utils.checks import integer, one_of

THIN = {8: 1, 20: 3, 32: 5, 44: 7, 56: 9, 110: 18}  # blocks per stage
WIDE = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
BLOCKS = (3, 4, 6, 3)  # of ResNet-50


class ResNet(nn.Module):
    """Residual network for small images: (B, C, H, W) -> (B, outputs).

    The parameter names of the thin family are those of widely used CIFAR checkpoints.

    Args:
        depth: 8, 20, 32, 44, 56 or 110 (16-32-64 channels), or 18 or 34 (64 to 512 channels).
        outputs: number of outputs (logits or means).
        channels: input channels C.
        skip: adds shortcuts around blocks; False gives the same layers without them (a plain network).
        zero_head: starts the last layer at zero, so that all classes are equally probable before training.
    """

    def __init__(
        self, depth: int = 20, outputs: int = 10, *, channels: int = 3, skip: bool = True, zero_head: bool = False
    ) -> None:
        super().__init__()
        one_of("depth", depth, sorted([*THIN, *WIDE]))
        self.config = {"depth": depth, "outputs": outputs, "channels": channels, "skip": skip}
        self.config |= {"zero_head": True} if zero_head else {}
        widths: tuple[int, ...] = (16, 32, 64) if depth in THIN else (64, 128, 256, 512)
        counts: tuple[int, ...] = (THIN[depth],) * 3 if depth in THIN else WIDE[depth]
        self.conv1 = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.stages = len(widths)
        previous = widths[0]
        for i, (width, count) in enumerate(zip(widths, counts, strict=True), start=1):
            blocks = []
            for j in range(count):
                stride = 2 if i > 1 and j == 0 else 1
                blocks.append(BasicBlock(previous, width, stride, learned_shortcut=depth in WIDE, skip=skip))
                previous = width
            self.add_module(f"layer{i}", nn.Sequential(*blocks))
        self.pool = MeanPool()
        self.linear = nn.Linear(previous, outputs)
        draw_convolutions(self)
        if zero_head:
            nn.init.zeros_(self.linear.weight)
            nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        for i in range(1, self.stages + 1):
            x = self.get_submodule(f"layer{i}")(x)
        return self.linear(self.pool(x))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions, with or without a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int, *, learned_shortcut: bool, skip: bool = True) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module | None = nn.Identity() if skip else None
        if skip and (stride != 1 or inputs != outputs):
            self.shortcut = projection(inputs, outputs, stride) if learned_shortcut else PaddedShortcut(outputs)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out if self.shortcut is None else out + self.shortcut(x))


def projection(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """A 1×1 convolution with batch norm, for shortcuts."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))


class MeanPool(nn.Module):
    """(B, C, H, W) -> (B, C): the mean over positions; its output is the last layer's feature."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class PaddedShortcut(nn.Module):
    """Shortcut without parameters: every second pixel, with channels of zeros added on both sides."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        pad = (self.outputs - x.shape[1]) // 2
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, pad, pad))


class WideResNet(nn.Module):
    """Wide residual network (Zagoruyko & Komodakis, BMVC 2016) for small images: (B, C, H, W) -> (B, outputs).

    Three stages of 16, 32 and 64 times `width` channels, with (depth − 4)/6 blocks each.

    Args:
        depth: a number 6n + 4: 10, 16, 22, 28, 40.
        width: factor of the channels; 10 as in the paper, 1 for a thin network.
        outputs: number of outputs (logits or means).
        channels: input channels C.
        dropout: dropout rate between the two convolutions of every block.
    """

    def __init__(
        self, depth: int = 28, width: int = 10, outputs: int = 10, *, channels: int = 3, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"expected a depth of 6n + 4 (10, 16, 22, 28, 40), got {depth}; choose one of them")
        integer("width", width, hint="10 is the paper's, 1 a thin network")
        self.config = {"depth": depth, "width": width, "outputs": outputs, "channels": channels, "dropout": dropout}
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        blocks: list[nn.Module] = []
        previous = 16
        for stage, units in enumerate((16 * width, 32 * width, 64 * width)):
            for block in range((depth - 4) // 6):
                blocks.append(WideBlock(previous, units, 2 if stage and block == 0 else 1, dropout=dropout))
                previous = units
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(previous)
        self.linear = nn.Linear(previous, outputs)
        draw_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.blocks(self.conv1(x))))
        return self.linear(x.mean((2, 3)))


class WideBlock(nn.Module):
    """x + conv(conv(x)), each after batch norm and ReLU; if channels change, the shortcut is a 1×1 convolution."""

    def __init__(self, inputs: int, outputs: int, stride: int, *, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        changes = stride != 1 or inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.bn1(x))
        out: Tensor = self.conv2(self.dropout(F.relu(self.bn2(self.conv1(active)))))
        carried: Tensor = x if self.shortcut is None else self.shortcut(active)
        return out + carried


class ResNet50(nn.Module):
    """ResNet-50 for large images: (B, C, H, W) -> (B, outputs). Loads torchvision's weights: names and shapes are the same."""

    def __init__(self, outputs: int = 1000, *, channels: int = 3) -> None:
        super().__init__()
        self.config = {"outputs": outputs, "channels": channels}
        add_trunk(self, channels, dilated=False)
        self.fc = nn.Linear(2048, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(features(self, x).mean((2, 3)))


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
            self.downsample = projection(inputs, outputs, stride)

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


def features(network: nn.Module, x: Tensor, *, stages: int = len(BLOCKS)) -> Tensor:
    """(B, 2048, h, w) features of a network with these layers; (B, 1024, h, w) after three stages."""
    x = F.relu(network.bn1(network.conv1(x)))  # type: ignore[operator]
    x = F.max_pool2d(x, 3, stride=2, padding=1)
    for i in range(1, stages + 1):
        x = network.get_submodule(f"layer{i}")(x)
    return x
