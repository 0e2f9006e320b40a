"""The reader of the published files: rows, labels, laziness, and what it says about missing or damaged ones."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from dissensus.data.corruptions import read_cifar_c
from refusals import refuses


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder like the published one, its 150 MB of pixels a sparse file: pixel (0, 0) of row i holds i in base 256."""
    images = np.lib.format.open_memmap(tmp_path / "fog.npy", mode="w+", dtype=np.uint8, shape=(50_000, 32, 32, 3))
    for i in (0, 9_999, 10_000, 29_999, 49_999):
        images[i, 0, 0] = (i >> 16, i >> 8 & 255, i & 255)
        images[i, 31, 2, 1] = 7
    images.flush()
    np.save(tmp_path / "labels.npy", np.tile(np.arange(10_000) % 10, 5).astype(np.uint8))
    return tmp_path


def test_a_severity_is_ten_thousand_rows_with_channels_first(folder: Path) -> None:
    for severity, first, last in ((1, 0, 9_999), (2, 10_000, None), (3, None, 29_999), (5, None, 49_999)):
        images, labels = read_cifar_c(folder, "fog", severity)
        assert images.shape == (10_000, 3, 32, 32)
        assert images.dtype == torch.uint8
        assert labels.dtype == torch.int64
        assert labels.tolist() == [i % 10 for i in range(10_000)]
        for row, number in ((0, first), (9_999, last)):
            if number is not None:
                assert images[row, :, 0, 0].tolist() == [number >> 16, number >> 8 & 255, number & 255]
                assert images[row, 1, 31, 2] == 7


def test_without_severity_all_fifty_thousand_come(folder: Path) -> None:
    images, labels = read_cifar_c(str(folder), "fog")
    assert images.shape == (50_000, 3, 32, 32)
    assert labels.shape == (50_000,)
    assert images[29_999, :, 0, 0].tolist() == [0, 29_999 >> 8, 29_999 & 255]


def test_the_documentations_example_runs(folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "corruptions.md").read_text(encoding="utf-8")
    names: dict[str, object] = {"folder": folder}
    exec(re.findall(r"```\n(from dissensus.data.corruptions.*?)```", page, flags=re.DOTALL)[0], names)
    assert names["images"].shape == (10_000, 3, 32, 32)  # type: ignore[attr-defined]


def test_writing_into_the_images_leaves_the_file_alone(folder: Path) -> None:
    images, _ = read_cifar_c(folder, "fog", 1)
    images[0] = 200
    again, _ = read_cifar_c(folder, "fog", 1)
    assert again[0, 2, 5, 5] == 0


def test_a_missing_file_is_named(folder: Path) -> None:
    refuses(lambda: read_cifar_c(folder, "snow", 1), r"snow\.npy, got nothing there", FileNotFoundError)
    (folder / "labels.npy").unlink()
    refuses(lambda: read_cifar_c(folder, "fog", 1), r"labels\.npy", FileNotFoundError)


def test_a_wrong_shape_or_type_is_named(folder: Path) -> None:
    np.save(folder / "snow.npy", np.zeros((10, 32, 32, 3), np.uint8))
    with pytest.raises(
        ValueError, match=r"expected uint8 of shape \(50000, 32, 32, 3\) in .*snow\.npy, got uint8 of shape"
    ):
        read_cifar_c(folder, "snow")
    np.save(folder / "labels.npy", np.zeros(50_000))
    refuses(lambda: read_cifar_c(folder, "fog"), r"labels\.npy, got float64")


def test_pickles_and_damaged_files_are_refused(folder: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (folder / "sprung",)  # type: ignore[return-value]

    (folder / "frost.npy").write_bytes(pickle.dumps(Trap()))
    np.save(folder / "snow.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    with (folder / "fog.npy").open("rb") as whole:
        (folder / "contrast.npy").write_bytes(whole.read(1000))
    (folder / "pixelate.npy").write_bytes(b"")
    for name in ("frost", "snow", "contrast", "pixelate"):
        with pytest.raises(ValueError, match=rf"expected a NumPy array file at .*{name}\.npy"):
            read_cifar_c(folder, name)
    assert not (folder / "sprung").exists()


def test_name_and_severity_are_checked(folder: Path) -> None:
    refuses(lambda: read_cifar_c(folder, "Fog"), r"expected name of .*fog.*, got 'Fog'")
    refuses(lambda: read_cifar_c(folder, "fog", 6), "expected severity")
