"""Images and masks that tests write to folders."""

from pathlib import Path

import numpy as np
from PIL import Image


def write(folder: Path, name: str, array: np.ndarray) -> None:
    """An image (H, W, 3) or a mask (H, W) as a file."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


def write_scenes(folder: Path, places: dict[str, tuple[str, str]], labels: list[int], *, count: int = 4) -> None:
    """`count` scenes of 24×32 in each place, (images, masks) by split: stripes of the labels, every pixel's colour its label's.

    In "{:02d}" of a place's names the number of the scene is put; the last label is a block in the middle of every scene.
    """
    generator = np.random.default_rng(0)
    colours = generator.integers(0, 256, (256, 3))
    for number, (images, masks) in enumerate(places.values()):
        for i in range(count):
            mask = np.repeat(np.array(labels[:-1])[np.arange(32) * (len(labels) - 1) // 32][None], 24, axis=0)
            mask = np.roll(mask, 5 * i + number, axis=1).astype(np.uint8)
            mask[8:16, 10 + i : 18 + i] = labels[-1]
            image = np.clip(colours[mask] + generator.normal(0, 20, (24, 32, 3)), 0, 255).astype(np.uint8)
            write(folder, images.format(i), image)
            write(folder, masks.format(i), mask)


def write_camvid(folder: Path) -> Path:
    """CamVid with 4 scenes in every split: 10 classes and void in stripes, and a bicyclist in the middle."""
    splits = ("train", "val", "test")
    places = {split: (f"CamVid/{split}/{{:02d}}.png", f"CamVid/{split}annot/{{:02d}}.png") for split in splits}
    write_scenes(folder, places, [*range(10), 11, 10])
    return folder


def write_cifar(folder: Path, count: int = 24) -> Path:
    """CIFAR-10, the test rows of CIFAR-100 and of SVHN in their formats: so many random images in each file."""
    generator = np.random.default_rng(0)
    ten, hundred, svhn = (folder / name for name in ("cifar-10-batches-bin", "cifar-100-binary", "svhn"))
    for each in (ten, hundred, svhn):
        each.mkdir()
    rows = generator.integers(0, 256, (count, 3072), dtype=np.uint8)
    labels = (np.arange(count) % 10).astype(np.uint8)[:, None]
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        np.concatenate([labels, rows], 1).tofile(ten / f"{name}.bin")
    np.concatenate([labels, labels, rows], 1).tofile(hundred / "test.bin")
    np.savez(svhn / "test_32x32.npz", images=rows.reshape(count, 32, 32, 3), labels=labels[:, 0])
    return folder
