"""A small convolutional network for small images such as digits, fast on a CPU."""

from torch import Tensor, nn


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
            nn.Conv2d(channels, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        drop = [nn.Dropout(dropout)] if dropout else []
        flat = 2 * width * (size // 4) ** 2
        self.head = nn.Sequential(*drop, nn.Linear(flat, hidden), nn.ReLU(), *drop, nn.Linear(hidden, outputs))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.features(x))
        return outputs
