"""Makes the data files inside the package, the same bytes every time: python benchmarks/make_embedded.py --data FOLDER

FOLDER holds mnist/ and fashion_mnist/ with the published IDX files, whose checksums are verified. From every class come
rows spread evenly over the original file (MNIST's test file is harder in its second half, so its first rows would
flatter), then all rows are put back into the original order.
"""

from __future__ import annotations

import argparse
import hashlib
import zipfile
from pathlib import Path

import numpy as np
import torch

from dissensus.data.images import ImageSet, image_set

EMBEDDED = Path(__file__).parents[1] / "src" / "dissensus" / "data" / "embedded"
TRAIN_PER_CLASS, TEST_PER_CLASS, FASHION_PER_CLASS = 1000, 200, 100


def spread_rows(labels: torch.Tensor, per_class: int) -> torch.Tensor:
    """(10 · per_class,) ascending rows: of the n rows of each class, number ⌊k n / per_class⌋, k = 0, 1, …"""
    chosen = []
    for label in range(10):
        rows = torch.nonzero(labels == label).flatten()
        chosen.append(rows[torch.arange(per_class) * len(rows) // per_class])
    return torch.cat(chosen).sort().values


def cut(source: ImageSet, per_class: int, prefix: str = "") -> dict[str, np.ndarray]:
    """Arrays images (K, 28, 28) uint8, labels (K,) uint8 and rows (K,) uint16 of the original file."""
    rows = spread_rows(source.labels, per_class)
    part = source.subset(rows)
    return {
        f"{prefix}images": part.images[:, 0].numpy(),
        f"{prefix}labels": part.labels.numpy().astype(np.uint8),
        f"{prefix}rows": rows.numpy().astype(np.uint16),
    }


def save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """An .npz with fixed time stamps. Of deflate, bzip2, LZMA and four pixel filters, measured on these images, LZMA is
    15 % smaller than deflate and the filters make digits larger; deflate is what every Python can read."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            with archive.open(entry, "w") as file:
                np.lib.format.write_array(file, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with mnist/ and fashion_mnist/")
    parser.add_argument("--out", type=Path, default=EMBEDDED, help="where to write; the package by default")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    train = image_set("mnist", "train", folder=arguments.data, verify=True)
    test = image_set("mnist", "test", folder=arguments.data, verify=True)
    clothes = image_set("fashion_mnist", "test", folder=arguments.data, verify=True)
    save(arguments.out / "digits.npz", cut(train, TRAIN_PER_CLASS, "train_") | cut(test, TEST_PER_CLASS, "test_"))
    save(arguments.out / "fashion.npz", cut(clothes, FASHION_PER_CLASS))
    for name in ("digits.npz", "fashion.npz"):
        raw = (arguments.out / name).read_bytes()
        print(f"{name}  {len(raw)} bytes  sha256 {hashlib.sha256(raw).hexdigest()}")


if __name__ == "__main__":
    main()
