"""VGG16 for 32×32 images (Simonyan & Zisserman, ICLR 2015): thirteen 3×3 convolutions, then three linear layers of 512."""

from torch import Tensor, nn

from dissensus.nets.blocks import draw_convolutions

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))  # each ends in a pooling


class VGG16(nn.Module):
    """(B, C, H, W) -> (B, outputs); H and W are at least 32, and what is left of larger images is averaged.

    Args:
        outputs: logits or means.
        channels: C.
        batch_norm: after every convolution; papers on weight averaging and on node noise train it without.
        dropout: rate before the two hidden linear layers; 0 has no dropout modules.
    """

    def __init__(self, outputs: int = 10, *, channels: int = 3, batch_norm: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = {"outputs": outputs, "channels": channels, "batch_norm": batch_norm, "dropout": dropout}
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
        hidden = [[*([nn.Dropout(dropout)] if dropout else []), nn.Linear(512, 512), nn.ReLU()] for _ in range(2)]
        self.head = nn.Sequential(*hidden[0], *hidden[1], nn.Linear(512, outputs))
        draw_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x).mean((2, 3)))
        return logits
