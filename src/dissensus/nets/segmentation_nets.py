"""Networks for segmentation of street scenes and rooms.

ENet: Paszke, Chaurasia, Kim & Culurciello, "ENet", 2016. PSPNet: Zhao, Shi, Qi, Wang & Jia, "Pyramid scene parsing network",
CVPR 2017, on the dilated ResNet-50 of Yu, Koltun & Funkhouser, CVPR 2017.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.nets.resnet import add_trunk, features, projection

POOLED = (1, 2, 3, 6)  # rows and columns of the pyramid
WIDE = 0
CONTEXT = (1, 2, WIDE, 4, 1, 8, WIDE, 16)  # dilation of each bottleneck of a stage; WIDE: 5×1 and 1×5 filters


class PSPNet(nn.Module):
    """PSPNet for segmentation: (B, C, H, W) -> (B, outputs, H, W).

    The backbone's tensors have the names of torchvision's ResNet-50, without fc. The last two stages are dilated instead of
    strided: features have an eighth of the image's size. In training mode it returns {"out": logits, "aux": logits}; the loss
    of "aux", a head on the third stage, counts `auxiliary_weight`; 0 leaves it out. `dropout`: of both last layers' channels.
    """

    def __init__(
        self, outputs: int = 13, *, channels: int = 3, dropout: float = 0.1, auxiliary_weight: float = 0.4
    ) -> None:
        super().__init__()
        self.config = {"outputs": outputs, "channels": channels, "dropout": dropout}
        self.config["auxiliary_weight"] = self.auxiliary_weight = auxiliary_weight
        add_trunk(self, channels, dilated=True)
        self.pyramid = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(size), *norm_block(nn.Conv2d(2048, 512, 1, bias=False), 512, nn.ReLU))
            for size in POOLED
        )
        self.head = pixel_head(2048 + 512 * len(POOLED), 512, outputs, dropout)
        if auxiliary_weight:
            self.auxiliary = pixel_head(1024, 256, outputs, dropout)

    def forward(self, x: Tensor) -> Tensor | dict[str, Tensor]:
        third = features(self, x, stages=3)
        found: Tensor = self.layer4(third)  # type: ignore[operator]
        pooled = [resize(part(found), found.shape[2:]) for part in self.pyramid]
        logits = resize(self.head(torch.cat([found, *pooled], dim=1)), x.shape[2:])
        if not (self.training and self.auxiliary_weight):
            return logits
        return {"out": logits, "aux": resize(self.auxiliary(third), x.shape[2:])}


class ENet(nn.Module):
    """ENet for segmentation of images of any size: (B, C, H, W) -> (B, outputs, H, W).

    Stages and blocks as in the paper: PReLU in the encoder, ReLU in the decoder, biases only in the last layer. As in the
    authors' code a block works on a quarter of its output's channels; unlike there, the decoder has dropout, and the last
    layer is 3×3 (theirs: 2×2). An odd side is rounded up when it is halved; the decoder
    restores the earlier size, and unpools with `scatter`, which runs under vmap; torch's `max_unpool2d` does not.

    Args:
        outputs: number of classes.
        channels: input channels C.
        dropout: rate at which whole channels are dropped; a tenth of it in the first stage.
    """

    def __init__(self, outputs: int = 11, *, channels: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.config = {"outputs": outputs, "channels": channels, "dropout": dropout}
        self.initial = Initial(channels, 16)
        self.down1 = DownBlock(16, 64, dropout / 10)
        self.stage1 = nn.Sequential(*(Bottleneck(64, 1, dropout / 10) for _ in range(4)))
        self.down2 = DownBlock(64, 128, dropout)
        self.stage2 = nn.Sequential(*(Bottleneck(128, dilation, dropout) for dilation in CONTEXT))
        self.stage3 = nn.Sequential(*(Bottleneck(128, dilation, dropout) for dilation in CONTEXT))
        self.up4 = UpBlock(128, 64, dropout)
        self.stage4 = nn.Sequential(*(Bottleneck(64, 1, dropout, activation=nn.ReLU) for _ in range(2)))
        self.up5 = UpBlock(64, 16, dropout)
        self.stage5 = Bottleneck(16, 1, dropout, activation=nn.ReLU)
        self.last = nn.ConvTranspose2d(16, outputs, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        half = self.initial(x)
        quarter, first = self.down1(half)
        quarter = self.stage1(quarter)
        eighth, second = self.down2(quarter)
        eighth = self.stage3(self.stage2(eighth))
        up = self.stage4(self.up4(eighth, second, quarter.shape[2:]))
        up = self.stage5(self.up5(up, first, half.shape[2:]))
        return self.last(up, output_size=x.shape[2:])


class Initial(nn.Module):
    """First stage: concatenates a strided convolution and max pooling; halves the size."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs - inputs, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.act = nn.PReLU(outputs)

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.max_pool2d(x, 2, ceil_mode=True)
        return self.act(self.norm(torch.cat([self.conv(x), pooled], dim=1)))


class Bottleneck(nn.Module):
    """Residual block: 1×1 projection, 3×3 convolution (dilated, or 5×1 and 1×5), 1×1 expansion."""

    def __init__(self, width: int, dilation: int, dropout: float, *, activation: type[nn.Module] = nn.PReLU) -> None:
        super().__init__()
        inner = width // 4
        if dilation == WIDE:
            middle = nn.Sequential(
                nn.Conv2d(inner, inner, (5, 1), padding=(2, 0), bias=False),
                nn.Conv2d(inner, inner, (1, 5), padding=(0, 2), bias=False),
            )
        else:
            middle = nn.Sequential(nn.Conv2d(inner, inner, 3, padding=dilation, dilation=dilation, bias=False))
        self.branch = nn.Sequential(
            *norm_block(nn.Conv2d(width, inner, 1, bias=False), inner, activation),
            *norm_block(middle, inner, activation),
            *projection(inner, width),
            nn.Dropout2d(dropout),
        )
        self.act = make_activation(activation, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x + self.branch(x))


class DownBlock(nn.Module):
    """Halves the size, rounding up, and adds channels; returns (features, indices of the pooled values)."""

    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        inner = outputs // 4
        self.branch = nn.Sequential(
            *norm_block(nn.Conv2d(inputs, inner, 2, stride=2, bias=False), inner, nn.PReLU),
            *norm_block(nn.Conv2d(inner, inner, 3, padding=1, bias=False), inner, nn.PReLU),
            *projection(inner, outputs),
            nn.Dropout2d(dropout),
        )
        self.act = nn.PReLU(outputs)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pooled, places = F.max_pool2d_with_indices(x, (2, 2), ceil_mode=True)
        found = self.branch(F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2)))
        # The paper pads the shortcut with channels of zeros.
        padded = F.pad(pooled, (0, 0, 0, 0, 0, found.shape[1] - pooled.shape[1]))
        return self.act(padded + found), places


class UpBlock(nn.Module):
    """Doubles the size, back to the size before pooling, and reduces the channels."""

    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        inner = outputs // 4
        self.shortcut = projection(inputs, outputs)
        self.reduce = nn.Sequential(*norm_block(nn.Conv2d(inputs, inner, 1, bias=False), inner, nn.ReLU))
        self.grow = nn.ConvTranspose2d(inner, inner, 3, stride=2, padding=1, bias=False)
        parts = (nn.BatchNorm2d(inner), nn.ReLU(), *projection(inner, outputs), nn.Dropout2d(dropout))
        self.expand = nn.Sequential(*parts)

    def forward(self, x: Tensor, places: Tensor, size: torch.Size) -> Tensor:
        grown = self.expand(self.grow(self.reduce(x), output_size=size))
        return F.relu(unpool(self.shortcut(x), places, size) + grown)


def unpool(x: Tensor, places: Tensor, size: torch.Size) -> Tensor:
    """(B, C, *size): the values of x (B, C, h, w) at the places pooling took them from, 0 elsewhere."""
    empty = x.new_zeros(*x.shape[:2], size[0] * size[1])
    return empty.scatter(2, places.flatten(2), x.flatten(2)).reshape(*x.shape[:2], *size)


def resize(x: Tensor, size: torch.Size) -> Tensor:
    return F.interpolate(x, size, mode="bilinear", align_corners=False)


def pixel_head(inputs: int, width: int, outputs: int, dropout: float) -> nn.Sequential:
    """(B, inputs, h, w) -> (B, outputs, h, w)."""
    block = norm_block(nn.Conv2d(inputs, width, 3, padding=1, bias=False), width, nn.ReLU)
    return nn.Sequential(*block, nn.Dropout2d(dropout), nn.Conv2d(width, outputs, 1))


def norm_block(layer: nn.Module, width: int, activation: type[nn.Module]) -> tuple[nn.Module, nn.Module, nn.Module]:
    return layer, nn.BatchNorm2d(width), make_activation(activation, width)


def make_activation(activation: type[nn.Module], width: int) -> nn.Module:
    return nn.PReLU(width) if activation is nn.PReLU else activation()
