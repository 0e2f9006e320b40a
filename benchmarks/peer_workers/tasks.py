"""The same networks, weights, data and clock for every library that uses torch: plain modules, all seeded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

RATE = {"lr": 0.01, "momentum": 0.9}  # of SGD
LOOKED_AT = 64  # inputs whose predictions are compared


class Block(nn.Module):
    """Two 3×3 convolutions and a shortcut without weights (He et al., 2016)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.stride, self.more = stride, width - inputs

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more)))


def resnet(stages: tuple[int, ...], depth: int) -> nn.Module:
    """`depth` blocks of each width."""
    widths = [width for width in stages for _ in range(depth)]
    blocks = [Block(a, b, 1 + (a != b)) for a, b in zip([stages[0], *widths], widths, strict=False)]
    stem = (nn.Conv2d(3, stages[0], 3, padding=1, bias=False), nn.BatchNorm2d(stages[0]), nn.ReLU())
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(stages[-1], 10))


def mlp(widths: tuple[int, ...] = (784, 200, 200, 200, 10), dropout: float = 0.0) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths[:-1]):
        layers += [nn.Linear(a, b), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*layers, nn.Linear(*widths[-2:]))


def conv() -> nn.Module:
    first = (nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(1568, 64), nn.ReLU(), nn.Linear(64, 10))


NETWORKS: dict[str, tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = {  # title, network, shape of an input
    "mlp": ("MLP 784-200-200-200-10", mlp, (784,)),
    "mlp-dropout": ("MLP 784-200-200-200-10, dropout", lambda: mlp(dropout=0.1), (784,)),
    "mlp-wide": ("MLP 784-512-512-512-10", lambda: mlp((784, 512, 512, 512, 10)), (784,)),
    "conv": ("small conv net", conv, (1, 28, 28)),
    "resnet20": ("ResNet-20", lambda: resnet((16, 32, 64), 3), (3, 32, 32)),
    "resnet18": ("ResNet-18", lambda: resnet((64, 128, 256, 512), 2), (3, 32, 32)),
    "tiny": ("MLP 4-8-3", lambda: mlp((4, 8, 3)), (4,)),
    "tiny-dropout": ("MLP 4-8-3, dropout", lambda: mlp((4, 8, 3), 0.1), (4,)),
}


class Moment:
    """A moment on the GPU; noting it makes nobody wait, so that hosts may run ahead as they do without a clock."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __sub__(self, other: Moment) -> float:
        """Seconds since the other, once both have passed."""
        return float(other.event.elapsed_time(self.event)) / 1e3


class Watched:
    """Batches that note when each is asked for: the time between two is a step, whoever runs the loop."""

    def __init__(
        self, batches: list[tuple[Tensor, Tensor]], clock: Callable[[], float], moment: type[Moment] | None = None
    ) -> None:
        self.batches, self.clock, self.asked = batches, clock, list[list[Any]]()
        self.moment = moment or clock

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.asked.append(times := [])
        for batch in self.batches:
            times.append(self.moment())
            yield batch

    def timed(self, train: Callable[[], object]) -> dict[str, float]:
        """Seconds of one step of all members, and of the whole call; who trains members in turn asks once for each."""
        self.asked.clear()
        start = self.clock()
        train()
        whole = self.clock() - start
        steps = [[b - a for a, b in pairwise(times)] for times in self.asked]
        return {"training step": sum(median(each) for each in steps if each), "epoch": whole}


@dataclass
class Case:
    """What is asked of a worker."""

    operation: str
    network: str = "mlp"
    members: int = 1  # networks, or samples
    batch: int = 128
    rows: int = 1280
    calls: int = 1  # in a round
    device: str = "cpu"
    timer: str = "perf_counter"  # or process_time

    def __post_init__(self) -> None:
        if self.device == "cuda":  # the same arithmetic on all sides: no TF32, and cuDNN's fastest algorithms
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cudnn.benchmark = True

    def clock(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return float(getattr(time, self.timer)())

    def networks(self) -> list[nn.Module]:
        """Members with weights of their own, the same in every process."""
        made = []
        for seed in range(self.members):
            torch.manual_seed(seed)
            made.append(NETWORKS[self.network][1]().to(self.device))
        return made

    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs from N(0, 1), classes by a random linear map, so that there is something to learn."""
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self.rows, *NETWORKS[self.network][2], generator=generator)
        classes = 3 if self.network.startswith("tiny") else 10
        y = (x.flatten(1) @ torch.randn(x[0].numel(), classes, generator=generator)).argmax(1)
        return x.to(self.device), y.to(self.device)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        x, y = self.data()
        return list(zip(x.split(self.batch), y.split(self.batch), strict=True))

    def watched(self) -> Watched:
        return self.watching(self.batches())

    def watching(self, batches: list[Any]) -> Watched:
        return Watched(batches, self.clock, Moment if self.device == "cuda" else None)

    def loader(self) -> DataLoader[Any]:
        data = TensorDataset(*self.data())
        if self.device == "cpu":
            return DataLoader(data, batch_size=self.batch)
        # Rows on a GPU are taken a batch at a time: one by one, taking them would be all that is measured.
        return DataLoader(data, None, sampler=BatchSampler(SequentialSampler(data), self.batch, False))

    def trained(self) -> nn.Module:
        """The first network after three epochs of a plain loop, in eval mode."""
        network = self.networks()[0]
        optimizer = torch.optim.SGD(network.parameters(), **RATE)
        for _ in range(3):
            for x, y in self.batches():
                optimizer.zero_grad()
                F.cross_entropy(network(x), y).backward()
                optimizer.step()
        return network.eval()

    def seconds(self, call: Callable[[], object], name: str) -> Callable[[], dict[str, float]]:
        """Runs the call as often as a round asks for; seconds of one.

        Who predicts one input waits for the result.
        """
        waits = self.device == "cuda" and name == "prediction of one"

        def run() -> dict[str, float]:
            start = self.clock()
            for _ in range(self.calls):
                call()
                if waits:
                    torch.cuda.synchronize()
            return {name: (self.clock() - start) / self.calls}

        return run

    def looked_at(self) -> Tensor:
        return self.data()[0][:LOOKED_AT]

    def over(self, predict: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        """Predictions of all rows, batch by batch."""
        batches = [x for x, _ in self.batches()]
        return lambda: torch.cat([predict(x) for x in batches])


Prepared = tuple[Callable[[], dict[str, float]], Callable[[], Tensor | None]]  # a round; what is compared


def none() -> None:
    """Random predictions: nothing to compare."""
