"""LeNet-5 (LeCun, Bottou, Bengio & Haffner, Proc. IEEE 1998) in its modern form: ReLU, max pooling, all maps connected."""

from torch import Tensor, nn


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
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(flat, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits
