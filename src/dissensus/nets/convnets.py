"""Convolutional networks without shortcuts: a small one for digits, and three of the literature.

LeNet-5: LeCun, Bottou, Bengio & Haffner, Proc. IEEE 1998, in its modern form: ReLU, max pooling, all maps connected.
AlexNet in its one-column form: Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014.
VGG16: Simonyan & Zisserman, ICLR 2015.
"""

from typing import Literal

from torch import Tensor, nn

from dissensus.nets.blocks import draw_convolutions
from dissensus.utils.checks import one_of

# VGG16: channels of each stage, which ends with pooling
STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class ConvNet(nn.Module):
    """Small convolutional network: (B, C, H, W) -> (B, outputs); two 3×3 convolutions with pooling, one hidden layer.

    Args:
        channels: input channels C.
        outputs: number of outputs (logits or means).
        size: image size H = W in pixels.
        width: channels of the first convolution; the second has twice as many.
        hidden: units of the hidden linear layer.
        dropout: dropout rate before both linear layers; 0 adds no dropout modules.
    """

    def __init__(
        self, channels: int, outputs: int, *, size: int = 28, width: int = 16, hidden: int = 64, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.config: dict[str, float] = {"channels": channels, "outputs": outputs, "size": size}
        self.config |= {"width": width, "hidden": hidden, "dropout": dropout}
        self.features = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        )  # fmt: skip
        drop = [nn.Dropout(dropout)] if dropout else []
        flat = 2 * width * (size // 4) ** 2
        self.head = nn.Sequential(*drop, nn.Linear(flat, hidden), nn.ReLU(), *drop, nn.Linear(hidden, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class LeNet(nn.Module):
    """LeNet-5: (B, C, H, W) -> (B, outputs); two 5×5 convolutions with pooling, then linear layers of 120 and 84 units.

    It has 44,426 parameters for 28×28 images, and 61,706 for the paper's 32×32.

    Args:
        outputs: number of outputs (logits or means).
        channels: input channels C.
        size: image size H = W in pixels, at least 16.
    """

    def __init__(self, outputs: int = 10, *, channels: int = 1, size: int = 28) -> None:
        super().__init__()
        self.config = {"outputs": outputs, "channels": channels, "size": size}
        self.features = nn.Sequential(
            nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        flat = 16 * (((size - 4) // 2 - 4) // 2) ** 2
        dense = [nn.Linear(flat, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, outputs)]
        self.head = nn.Sequential(nn.Flatten(), *dense)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class AlexNet(nn.Module):
    """AlexNet for images: (B, C, H, W) -> (B, outputs), with H and W at least 63.

    Its tensors have the names and shapes of torchvision's AlexNet.

    Args:
        outputs: number of outputs (logits or means).
        channels: input channels C.
        hidden: units of the two hidden linear layers.
        dropout: dropout rate before each of them; 0 adds none.
    """

    def __init__(self, outputs: int = 1000, *, channels: int = 3, hidden: int = 4096, dropout: float = 0.5) -> None:
        super().__init__()
        self.config = {"outputs": outputs, "channels": channels, "hidden": hidden, "dropout": dropout}
        self.features = nn.Sequential(
            nn.Conv2d(channels, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2),
            nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2),
            nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, stride=2),
        )  # fmt: skip
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(
            _dropout_layer(dropout), nn.Linear(256 * 36, hidden), nn.ReLU(),
            _dropout_layer(dropout), nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, outputs),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


def _dropout_layer(rate: float) -> nn.Module:
    return nn.Dropout(rate) if rate else nn.Identity()  # a placeholder keeps torchvision's layer numbers


class VGG16(nn.Module):
    """VGG16 for images: (B, C, H, W) -> (B, outputs), with H and W at least 32.

    Args:
        outputs: number of outputs (logits or means).
        channels: input channels C.
        batch_norm: adds batch normalisation after every convolution. Papers on weight averaging and node noise use none.
        dropout: dropout rate before the two hidden linear layers; 0 adds no dropout modules.
        head: "small" averages the last feature maps, as is usual for 32×32 images; "large" pools them to 7×7, as is usual
            for 224×224 (torchvision), which gives the linear layers about fifty times the inputs.
        hidden: units of the two hidden linear layers; None means 512, or 4,096 with a large head.
    """

    def __init__(
        self,
        outputs: int = 10,
        *,
        channels: int = 3,
        batch_norm: bool = True,
        dropout: float = 0.0,
        head: Literal["small", "large"] = "small",
        hidden: int | None = None,
    ) -> None:
        super().__init__()
        one_of("head", head, ("small", "large"))
        self.config: dict[str, object] = {"outputs": outputs, "channels": channels, "batch_norm": batch_norm}
        self.config |= {"dropout": dropout, "head": head, "hidden": hidden}
        layers: list[nn.Module] = []
        previous = channels
        for stage in STAGES:
            for width in stage:
                norm = [nn.BatchNorm2d(width)] if batch_norm else []
                layers += [nn.Conv2d(previous, width, 3, padding=1), *norm, nn.ReLU()]
                previous = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        side, units = (1, 512) if head == "small" else (7, 4096)
        units = units if hidden is None else hidden
        self.pool = nn.AdaptiveAvgPool2d(side)
        layers = []
        for inputs in (512 * side**2, units):
            layers += [*([nn.Dropout(dropout)] if dropout else []), nn.Linear(inputs, units), nn.ReLU()]
        self.head = nn.Sequential(*layers, nn.Linear(units, outputs))
        draw_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.features(x)).flatten(1))
