"""Published test sets for tasks, read where they lie in DISSENSUS_DATA: CIFAR-10.1 and CIFAR-10H; ImageNet and ImageNet-V2.

    python benchmarks/papers.py --task benchmarks/cifar10-shift.toml --data FOLDER
    python benchmarks/papers.py --task benchmarks/imagenet-node.toml --data FOLDER

FOLDER holds CIFAR-10's files, CIFAR-10-C, CIFAR-10.1 (cifar10.1_v6_data.npy and cifar10.1_v6_labels.npy) and CIFAR-10H
(cifar10h-counts.npy); or imagenet/train/CLASS, imagenet/val/CLASS, imagenet_v2/0 … 999 and resnet50.pt, a state dict.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

import dissensus as ds


class ImageFiles:
    """Images (N, 3, side, side) uint8 in files; a part of them is read when a batch is made, never all together."""

    dtype, ndim = torch.uint8, 4

    def __init__(self, files, side):
        self.files, self.shape = files, torch.Size((len(files), 3, side, side))
        self.nbytes = self.shape.numel()

    def __len__(self):
        return len(self.files)

    def __getitem__(self, rows):
        return ImageFiles([self.files[row] for row in rows.tolist()], self.shape[-1])

    def to(self, device):
        return self

    def read(self):
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return torch.from_numpy(np.stack([*pool.map(partial(central_square, side=self.shape[-1]), self.files)]))


def central_square(path, side):
    """(3, side, side) uint8: the central square, seven eighths of the shorter side, as usual for ImageNet."""
    with Image.open(path) as opened:
        image = ImageOps.fit(opened.convert("RGB"), (side, side), Image.Resampling.BILINEAR, 1 / 16)
    return np.asarray(image).transpose(2, 0, 1)


def labelled_files(folder, names, side):
    """The images in FOLDER/NAME and the number of the name."""
    parts = [sorted(path for path in (folder / name).iterdir() if path.name[0] != ".") for name in names]
    return ImageFiles([file for part in parts for file in part], side), np.repeat(
        np.arange(len(parts)), [*map(len, parts)]
    )


def imagenet(side=224):
    """ImageNet's training and validation images, and ImageNet-V2 as another test set."""
    root = Path(os.environ["DISSENSUS_DATA"])
    names = sorted(path.name for path in (root / "imagenet/train").iterdir() if path.is_dir())
    train, test = (labelled_files(root / "imagenet" / part, names, side) for part in ("train", "val"))
    new = labelled_files(root / "imagenet_v2", [str(i) for i in range(len(names))], side)
    return {"train": train, "test": test, "classes": names, "shift": {"imagenet_v2": new}}


def cifar10():
    """CIFAR-10, the new images of CIFAR-10.1, and the test images with the distribution of people's answers."""
    root = Path(os.environ["DISSENSUS_DATA"])
    train, test = (ds.data.cifar10(split) for split in ("train", "test"))
    new = [np.load(root / f"CIFAR-10.1/cifar10.1_v6_{part}.npy") for part in ("data", "labels")]
    counts = np.load(root / "CIFAR-10H/cifar10h-counts.npy")
    people = test.images.numpy(), counts / counts.sum(1, keepdims=True)
    rows = {name: (each.images.numpy(), each.labels.numpy()) for name, each in (("train", train), ("test", test))}
    return {**rows, "classes": train.classes, "shift": {"cifar10_1": tuple(new), "cifar10h": people}}
