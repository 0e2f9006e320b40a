"""Images in folders, one for each class."""

import numpy as np
import pytest
import torch
from PIL import Image

import dissensus as ds


def save(path, value, size=(4, 6)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((*size, 3), value, dtype=np.uint8)).save(path)


def test_labels_are_the_folders_in_alphabetical_order(tmp_path):
    for i, name in enumerate(["b", "a", "c"]):
        save(tmp_path / "train" / name / "deeper" / "1.png", 10 * i)
        save(tmp_path / "train" / name / "2.jpg", 10 * i)
    save(tmp_path / "test" / "c" / "1.png", 20)
    train = ds.data.image_folder(tmp_path / "train")
    assert train.classes == ("a", "b", "c")
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert train.images.shape == (6, 3, 4, 6)
    assert train.images[::2, 0, 0, 0].tolist() == [10, 0, 20]
    test = ds.data.image_folder(tmp_path / "test", classes=train.classes)
    assert test.labels.tolist() == [2]  # not 0, as it would be alone
    with pytest.raises(ValueError, match=r"expected the classes c in .*train, got 'a' too"):
        ds.data.image_folder(tmp_path / "train", classes=["c"])


def test_hidden_files_and_folders_are_no_images_and_no_classes(tmp_path):
    save(tmp_path / "a" / "1.png", 10)
    save(tmp_path / "a" / ".ipynb_checkpoints" / "1-checkpoint.png", 10)
    save(tmp_path / ".ipynb_checkpoints" / "2.png", 10)
    (tmp_path / "a" / "._1.png").write_bytes(b"of a file manager")
    found = ds.data.image_folder(tmp_path)
    assert (found.classes, len(found)) == (("a",), 1)


def test_resizing_is_that_of_torch_with_antialiasing(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "1.png")
    found = ds.data.image_folder(tmp_path, size=(8, 12)).images[0].float()
    wanted = torch.nn.functional.interpolate(
        torch.from_numpy(pixels).permute(2, 0, 1)[None].float(), (8, 12), mode="bilinear", antialias=True
    )[0]
    assert (found - wanted).abs().max() <= 1.0  # PIL rounds to whole numbers after each axis
    assert ds.data.image_folder(tmp_path, size=8, channels=1).images.shape == (1, 1, 8, 8)
