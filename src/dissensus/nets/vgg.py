"""VGG16 (Simonyan & Zisserman, ICLR 2015): thirteen 3×3 convolutions, then three linear layers."""

from typing import Literal

from torch import Tensor, nn

from dissensus.nets.blocks import draw_convolutions
from dissensus.utils.checks import one_of

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))  # each ends with pooling


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
                layers.append(nn.Conv2d(previous, width, 3, padding=1))
                if batch_norm:
                    layers.append(nn.BatchNorm2d(width))
                layers.append(nn.ReLU())
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
        logits: Tensor = self.head(self.pool(self.features(x)).flatten(1))
        return logits
