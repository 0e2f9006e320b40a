"""Segmentation sets read from folders that the tests make, classes made unknown, weights of classes."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dissensus.data import VOID, SegmentationSet, class_weights, segmentation_folder, with_unknown
from refusals import refuses
from small_scenes import write

CLASSES = ("sky", "road", "car")


def scenes(folder: Path, count: int = 3, size: tuple[int, int] = (4, 6), *, values=(0, 1, 2, 255)) -> tuple:
    """Images and masks in folder/images and folder/masks, as arrays."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, *size, 3), dtype=np.uint8)
    masks = np.array(values, np.uint8)[rng.integers(len(values), size=(count, *size))]
    for number, (image, mask) in enumerate(zip(images, masks, strict=True)):
        write(folder / "images", f"town/{number}.png", image)
        write(folder / "masks", f"town/{number}.png", mask)
    return images, masks


def read(folder: Path, classes=CLASSES, **options) -> SegmentationSet:
    return segmentation_folder(folder / "images", folder / "masks", classes, **options)


def test_a_folder_is_read_pixel_for_pixel_in_order_of_names(tmp_path):
    images, masks = scenes(tmp_path)
    (tmp_path / "masks" / "notes.txt").write_text("not an image")
    found = read(tmp_path)
    assert torch.equal(found.images, torch.from_numpy(images).movedim(3, 1))
    assert torch.equal(found.masks, torch.from_numpy(masks))
    assert found.files == ("town/0.png", "town/1.png", "town/2.png")
    assert (len(found), found.classes) == (3, CLASSES)
    some = found.subset(torch.tensor([2, 0]))
    assert torch.equal(some.masks, found.masks[[2, 0]])
    assert some.files == ("town/2.png", "town/0.png")


def test_classes_are_numbered_around_the_void_value(tmp_path):
    _, masks = scenes(tmp_path, values=(0, 1, 2, 3))
    for void in range(4):
        order = [value for value in range(4) if value != void]
        expected = np.full_like(masks, VOID)
        for number, value in enumerate(order):
            expected[masks == value] = number
        assert torch.equal(read(tmp_path, void=void).masks, torch.from_numpy(expected))


def test_masks_with_a_palette_hold_its_numbers(tmp_path):
    _, masks = scenes(tmp_path, count=1)
    picture = Image.fromarray(masks[0])
    picture.putpalette([value for colour in range(256) for value in (255 - colour, colour, 7)])
    picture.save(tmp_path / "masks" / "town" / "0.png")
    with Image.open(tmp_path / "masks" / "town" / "0.png") as opened:
        assert opened.mode == "P"
    assert torch.equal(read(tmp_path).masks[0], torch.from_numpy(masks[0]))


def test_resizing_averages_images_and_never_blends_labels(tmp_path):
    chequered = np.indices((32, 32)).sum(0) % 2 * 200
    write(tmp_path / "images", "a.png", chequered.astype(np.uint8)[..., None].repeat(3, 2))
    write(tmp_path / "masks", "a.png", np.kron([[0, 2], [255, 1]], np.ones((16, 16))).astype(np.uint8))
    write(tmp_path / "images", "b.png", np.full((2, 2, 3), 9, np.uint8))
    write(tmp_path / "masks", "b.png", np.array([[0, 1], [2, 255]], np.uint8))
    found = read(tmp_path, size=(2, 2))
    assert torch.equal(found.masks, torch.tensor([[[0, 2], [255, 1]], [[0, 1], [2, 255]]], dtype=torch.uint8))
    assert (found.images[0].int() - 100).abs().max() <= 1  # the mean, where picking pixels would give 0 or 200
    assert (found.images[1] == 9).all()
    assert set(read(tmp_path, size=(37, 41)).masks.unique().tolist()) == {0, 1, 2, 255}


def test_an_unknown_class_is_void_for_training_and_one_in_the_ood_masks(tmp_path):
    scenes(tmp_path)
    found = read(tmp_path)
    known, ood = with_unknown(found, ["road"])
    assert known.classes == ("sky", "car")
    numbers = {0: 0, 1: VOID, 2: 1, 255: VOID}
    assert torch.equal(known.masks, found.masks.clone().apply_(numbers.__getitem__))
    assert torch.equal(ood, found.masks.clone().apply_({0: 0, 1: 1, 2: 0, 255: VOID}.__getitem__))
    assert known.masks.dtype == ood.dtype == torch.uint8
    assert known.images is found.images


def test_weights_of_classes_are_those_of_enet():
    masks = torch.tensor([[[0, 0, 0, 1], [0, 0, 0, VOID]]], dtype=torch.uint8)
    torch.set_default_dtype(torch.float64)
    try:
        found = class_weights(masks, CLASSES)
    finally:
        torch.set_default_dtype(torch.float32)
    expected = [1 / math.log(1.02 + share) for share in (6 / 7, 1 / 7, 0.0)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)
    assert torch.equal(class_weights(masks, 3), found.float())


def test_bad_folders_are_one_error_each(tmp_path):
    scenes(tmp_path / "value", values=(0, 1, 2, 7))
    with pytest.raises(
        ValueError, match=r"values 0 to 2 for 3 classes or 255 for void in .*town/0.png, got 7; name all"
    ):
        read(tmp_path / "value")
    scenes(tmp_path / "sizes")
    write(tmp_path / "sizes" / "masks", "town/1.png", np.zeros((4, 5), np.uint8))
    with pytest.raises(ValueError, match=r"of one size, got 4×6 in .*images/town/1.png and 4×5 in .*masks/town/1.png"):
        read(tmp_path / "sizes")
    scenes(tmp_path / "alone")
    (tmp_path / "alone" / "masks" / "town" / "2.png").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"a mask .*masks/town/2.png for the image .*images/town/2.png, got none"
    ):
        read(tmp_path / "alone")
    scenes(tmp_path / "twice")
    write(tmp_path / "twice" / "masks", "town/1.bmp", np.zeros((4, 6), np.uint8))
    refuses(lambda: read(tmp_path / "twice"), r"one mask for the image .*town/1.png, got .*town/1.bmp and .*town/1.png")
    for name in ("images", "masks"):
        (tmp_path / "empty" / name).mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"expected images \(.png, .* in .*empty/images, got none"):
        read(tmp_path / "empty")
    refuses(lambda: read(tmp_path / "nowhere"), r"expected a folder .*nowhere/images, got none", FileNotFoundError)
    scenes(tmp_path / "different")
    write(tmp_path / "different" / "images", "town/3.png", np.zeros((8, 6, 3), np.uint8))
    write(tmp_path / "different" / "masks", "town/3.png", np.zeros((8, 6), np.uint8))
    with pytest.raises(
        ValueError, match=r"images of one size, got 4×6 in town/0.png and 8×6 in town/3.png; pass size="
    ):
        read(tmp_path / "different")
    scenes(tmp_path / "coloured")
    write(tmp_path / "coloured" / "masks", "town/0.png", np.zeros((4, 6, 3), np.uint8))
    refuses(lambda: read(tmp_path / "coloured"), r"a mask of one channel .* got 3 channels in .*town/0.png")
    (tmp_path / "coloured" / "masks" / "town" / "0.png").write_bytes(b"no picture")
    refuses(lambda: read(tmp_path / "coloured"), r"expected an image .*town/0.png, got a damaged one")
    refuses(lambda: read(tmp_path / "sizes", ("sky", "sky")), "different class names")


def test_bad_classes_are_one_error_each(tmp_path):
    scenes(tmp_path)
    found = read(tmp_path)
    with pytest.raises(ValueError, match="expected unknown class of sky, road, car, got 'cars'; did you mean 'car'"):
        with_unknown(found, ["cars"])
    refuses(lambda: with_unknown(found, "car"), "as a list of names, got 'car'")
    refuses(lambda: class_weights(found.masks, 2), "expected labels from 0 to 1, got 2")
    refuses(lambda: class_weights(torch.full((2, 2), VOID, dtype=torch.uint8), 2), "got none but VOID")
