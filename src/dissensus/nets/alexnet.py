"""AlexNet in its one-column form (Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014)."""

from torch import Tensor, nn


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
            nn.Conv2d(channels, 64, 11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(
            _dropout_layer(dropout), nn.Linear(256 * 36, hidden), nn.ReLU(),
            _dropout_layer(dropout), nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, outputs),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.avgpool(self.features(x)).flatten(1))
        return logits


def _dropout_layer(rate: float) -> nn.Module:
    return nn.Dropout(rate) if rate else nn.Identity()  # a placeholder keeps torchvision's layer numbers
