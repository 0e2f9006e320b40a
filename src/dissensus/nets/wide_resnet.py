"""Wide residual networks for 32×32 images (Zagoruyko & Komodakis, BMVC 2016), with normalisation before activation."""

import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.nets.blocks import draw_convolutions
from dissensus.utils.checks import integer


class WideResNet(nn.Module):
    """Wide residual network for small images: (B, C, H, W) -> (B, outputs).

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
                stride = 2 if stage and block == 0 else 1
                blocks.append(WideBlock(previous, units, stride, dropout=dropout))
                previous = units
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(previous)
        self.linear = nn.Linear(previous, outputs)
        draw_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.blocks(self.conv1(x))))
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


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
