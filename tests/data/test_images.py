"""Sets of images, of segmentations and of street scenes, and folders of classes: found where users keep them, read in order."""

import gzip
import hashlib
import math
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

import dissensus as ds
from dissensus.data.catalogue import CATALOGUE
from dissensus.data.images import READERS
from refusals import refuses
from small_scenes import write


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("DISSENSUS_DATA", raising=False)


@pytest.fixture
def pictures() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.integers(0, 256, (6, 28, 28), dtype=np.uint8), np.array([3, 1, 4, 1, 5, 9], np.uint8)


def write_idx(folder, pictures, prefix="t10k", suffix=".gz"):
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = pictures
    raw = (
        struct.pack(">IIII", 2051, *images.shape) + images.tobytes(),
        struct.pack(">II", 2049, len(labels)) + labels.tobytes(),
    )
    for kind, content in zip(("images-idx3", "labels-idx1"), raw, strict=True):
        (folder / f"{prefix}-{kind}-ubyte{suffix}").write_bytes(gzip.compress(content) if suffix else content)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(("read", "sub"), [
    (ds.data.mnist, "mnist"), (ds.data.mnist, "MNIST/raw"), (ds.data.fashion_mnist, "fashion_mnist"),
    (ds.data.fashion_mnist, "FashionMNIST/raw"), (ds.data.notmnist, "notmnist"),
])  # fmt: skip
def test_idx_sets_are_read_from_their_usual_folders(tmp_path, pictures, read, sub, suffix):
    write_idx(tmp_path / sub, pictures, suffix=suffix)
    found = read("test", folder=tmp_path)
    assert found.name == read.__name__
    assert found.images.dtype == torch.uint8
    np.testing.assert_array_equal(found.images.numpy(), pictures[0][:, None])
    assert found.labels.tolist() == pictures[1].tolist()
    assert len(found) == 6
    assert len(found.classes) == 10


def test_files_directly_in_the_folder_are_told_apart_by_their_checksum(tmp_path, pictures, monkeypatch):
    write_idx(tmp_path, pictures)
    for read in (ds.data.mnist, ds.data.fashion_mnist, ds.data.notmnist):
        refuses(partial(read, "test", folder=tmp_path), "other sets use the same names", FileNotFoundError)
    variant = CATALOGUE["mnist"].splits["test"][0]
    known = [(tmp_path / file.name).read_bytes() for file in variant.files]
    files = tuple(
        replace(file, bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest())
        for file, raw in zip(variant.files, known, strict=True)
    )
    source = replace(CATALOGUE["mnist"], splits={"test": (replace(variant, files=files),)})
    monkeypatch.setitem(CATALOGUE, "mnist", source)
    assert len(ds.data.mnist("test", folder=tmp_path, verify=True)) == 6
    with pytest.raises(FileNotFoundError):
        ds.data.fashion_mnist("test", folder=tmp_path)


def test_verify_compares_checksums_where_they_were_published(tmp_path, pictures):
    write_idx(tmp_path / "mnist", pictures)
    told = r"sha256 8d422c7b.*got [0-9a-f]{64}; download the file again"
    refuses(lambda: ds.data.mnist("test", folder=tmp_path, verify=True), told)
    (tmp_path / "svhn").mkdir()
    np.savez(tmp_path / "svhn/test_32x32.npz", images=np.zeros((1, 32, 32, 3), np.uint8), labels=[1])
    refuses(lambda: ds.data.svhn("test", folder=tmp_path, verify=True), "verify=False")


def test_a_missing_set_says_which_files_to_put_where_and_what_is_there(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        ds.data.cifar10("train", folder=tmp_path)
    message = str(caught.value)
    assert str(tmp_path / "cifar-10-batches-bin") in message
    assert str(tmp_path / "cifar-10-batches-py") in message
    for variant in CATALOGUE["cifar10"].splits["train"]:
        for file in variant.files:
            assert f"{file.name}  {file.bytes} bytes  sha256 {file.sha256}" in message

    (tmp_path / "cifar-10-batches-bin").mkdir()
    (tmp_path / "cifar-10-batches-bin/data_batch_2.bin").write_bytes(bytes(3073))
    told = r"got only cifar-10-batches-bin.data_batch_2\.bin"
    refuses(lambda: ds.data.cifar10("train", folder=tmp_path), told, FileNotFoundError)
    refuses(lambda: ds.data.mnist(), "got folder=None and no DISSENSUS_DATA in the environment", FileNotFoundError)


def test_splits_have_files_of_their_own_in_the_folder_of_the_environment_or_of_the_argument(
    tmp_path, pictures, monkeypatch
):
    write_idx(tmp_path / "a/mnist", pictures)
    write_idx(tmp_path / "b/mnist", (pictures[0][:2], pictures[1][:2]))
    write_idx(tmp_path / "c/mnist", pictures, prefix="train")
    assert len(ds.data.mnist("train", folder=tmp_path / "c")) == 6
    refuses(lambda: ds.data.mnist("test", folder=tmp_path / "c"), "mnist", FileNotFoundError)
    monkeypatch.setenv("DISSENSUS_DATA", str(tmp_path / "a"))
    assert len(ds.data.mnist("test")) == 6
    assert len(ds.data.mnist("test", folder=tmp_path / "b")) == 2


def test_labels_that_do_not_belong_to_images_or_classes_are_refused(tmp_path, pictures):
    write_idx(tmp_path / "mnist", (pictures[0], pictures[1][:5]))
    refuses(lambda: ds.data.mnist("test", folder=tmp_path), "one class index per image")
    write_idx(tmp_path / "mnist", (pictures[0], pictures[1] + 1))
    refuses(lambda: ds.data.mnist("test", folder=tmp_path), "labels from 0 to 9, got 2 to 10")


@pytest.mark.parametrize("sub", ["cifar-10-batches-bin", "."])
def test_cifar10_batches_are_joined_in_order(tmp_path, sub):
    rows = np.random.default_rng(1).integers(0, 256, (5, 2, 3073), dtype=np.uint8)
    rows[:, :, 0] = np.arange(10).reshape(5, 2)
    (tmp_path / sub).mkdir(exist_ok=True)
    for number, batch in enumerate(rows, 1):
        (tmp_path / sub / f"data_batch_{number}.bin").write_bytes(batch.tobytes())
    found = ds.data.cifar10("train", folder=tmp_path)
    assert found.labels.tolist() == list(range(10))
    np.testing.assert_array_equal(found.images.numpy().reshape(10, -1), rows.reshape(10, -1)[:, 1:])
    assert found.classes[:3] == ("airplane", "automobile", "bird")


def test_cifar100_gives_the_fine_labels(tmp_path):
    rows = np.random.default_rng(2).integers(0, 256, (3, 3074), dtype=np.uint8)
    rows[:, :2] = [[4, 0], [1, 1], [14, 98]]
    (tmp_path / "cifar-100-binary").mkdir()
    (tmp_path / "cifar-100-binary/test.bin").write_bytes(rows.tobytes())
    found = ds.data.cifar100("test", folder=tmp_path)
    assert [found.classes[label] for label in found.labels] == ["apple", "aquarium_fish", "woman"]
    assert len(found.classes) == 100


@pytest.mark.parametrize("ending", ["npz", "mat"])
def test_label_ten_of_svhn_is_the_digit_zero(tmp_path, ending):
    images = np.random.default_rng(3).integers(0, 256, (4, 3, 32, 32), dtype=np.uint8)
    labels = np.array([10, 1, 9, 10], np.uint8)
    (tmp_path / "svhn").mkdir()
    if ending == "npz":
        np.savez(tmp_path / "svhn/test_32x32.npz", images=images.transpose(0, 2, 3, 1), labels=labels)
    else:
        savemat(tmp_path / "svhn/test_32x32.mat", {"X": images.transpose(2, 3, 1, 0), "y": labels[:, None]})
    found = ds.data.svhn("test", folder=tmp_path)
    assert found.labels.tolist() == [0, 1, 9, 0]
    np.testing.assert_array_equal(found.images.numpy(), images)


def test_unknown_names_and_splits_are_value_errors(tmp_path):
    refuses(lambda: ds.data.image_set("imagenet", "test", folder=tmp_path), "expected name of mnist, fashion_mnist")
    refuses(lambda: ds.data.notmnist("train", folder=tmp_path), "expected split of notmnist of test, got 'train'")


def test_every_variant_of_the_catalogue_has_a_reader_and_plausible_files():
    for source in CATALOGUE.values():
        for variants in source.splits.values():
            for variant in variants:
                assert variant.reader in {"idx", *READERS}
                for file in variant.files:
                    assert (file.sha256 is None) == (file.bytes is None)
                    assert file.sha256 is None or len(bytes.fromhex(file.sha256)) == 32
    digests = [f.sha256 for s in CATALOGUE.values() for v in s.splits.values() for w in v for f in w.files if f.sha256]
    assert len(set(digests)) == len(digests)


def test_image_sets_check_what_they_are_given():
    images, labels = torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1])
    assert len(ds.data.ImageSet(images, labels, "two", ("a", "b"))) == 2
    refuses(lambda: ds.data.ImageSet(images.float(), labels, "two", ("a", "b")), r"int64 labels .*, got torch.float32")
    refuses(lambda: ds.data.ImageSet(images, labels.int(), "two", ("a", "b")), r"int64 labels .* and torch.int32")
    refuses(lambda: ds.data.ImageSet(images, labels[:1], "two", ("a", "b")), "labels \\(N,\\)")
    refuses(lambda: ds.data.ImageSet(images, labels, "two", ("a",)), "labels from 0 to 0, got 0 to 1")


def test_a_subset_keeps_images_with_their_labels():
    images = torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(5, 1, 2, 2)
    part = ds.data.ImageSet(images, torch.arange(5), "five", tuple("abcde")).subset(torch.tensor([3, 1]))
    assert part.images[:, 0, 0, 0].tolist() == [3, 1]
    assert part.labels.tolist() == [3, 1]
    assert part.name == "five"


# ------------------------------------------------------------- segmentations, classes made unknown, weights of classes
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


def read(folder: Path, classes=CLASSES, **options) -> ds.data.SegmentationSet:
    return ds.data.segmentation_folder(folder / "images", folder / "masks", classes, **options)


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
        expected = np.full_like(masks, ds.data.VOID)
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
    known, ood = ds.data.with_unknown(found, ["road"])
    assert known.classes == ("sky", "car")
    numbers = {0: 0, 1: ds.data.VOID, 2: 1, 255: ds.data.VOID}
    assert torch.equal(known.masks, found.masks.clone().apply_(numbers.__getitem__))
    assert torch.equal(ood, found.masks.clone().apply_({0: 0, 1: 1, 2: 0, 255: ds.data.VOID}.__getitem__))
    assert known.masks.dtype == ood.dtype == torch.uint8
    assert known.images is found.images


def test_weights_of_classes_are_those_of_enet():
    masks = torch.tensor([[[0, 0, 0, 1], [0, 0, 0, ds.data.VOID]]], dtype=torch.uint8)
    torch.set_default_dtype(torch.float64)
    try:
        found = ds.data.class_weights(masks, CLASSES)
    finally:
        torch.set_default_dtype(torch.float32)
    expected = [1 / math.log(1.02 + share) for share in (6 / 7, 1 / 7, 0.0)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)
    assert torch.equal(ds.data.class_weights(masks, 3), found.float())


def test_bad_folders_are_one_error_each(tmp_path):
    scenes(tmp_path / "value", values=(0, 1, 2, 7))
    told = r"values 0 to 2 for 3 classes or 255 for void in .*town/0.png, got 7; name all"
    refuses(lambda: read(tmp_path / "value"), told)
    scenes(tmp_path / "sizes")
    write(tmp_path / "sizes" / "masks", "town/1.png", np.zeros((4, 5), np.uint8))
    told = r"of one size, got 4×6 in .*images/town/1.png and 4×5 in .*masks/town/1.png"
    refuses(lambda: read(tmp_path / "sizes"), told)
    scenes(tmp_path / "alone")
    (tmp_path / "alone" / "masks" / "town" / "2.png").unlink()
    told = r"a mask .*masks/town/2.png for the image .*images/town/2.png, got none"
    refuses(lambda: read(tmp_path / "alone"), told, FileNotFoundError)
    scenes(tmp_path / "twice")
    write(tmp_path / "twice" / "masks", "town/1.bmp", np.zeros((4, 6), np.uint8))
    refuses(lambda: read(tmp_path / "twice"), r"one mask for the image .*town/1.png, got .*town/1.bmp and .*town/1.png")
    for name in ("images", "masks"):
        (tmp_path / "empty" / name).mkdir(parents=True)
    told = r"expected images \(.png, .* in .*empty/images, got none"
    refuses(lambda: read(tmp_path / "empty"), told, FileNotFoundError)
    refuses(lambda: read(tmp_path / "nowhere"), r"expected a folder .*nowhere/images, got none", FileNotFoundError)
    scenes(tmp_path / "different")
    write(tmp_path / "different" / "images", "town/3.png", np.zeros((8, 6, 3), np.uint8))
    write(tmp_path / "different" / "masks", "town/3.png", np.zeros((8, 6), np.uint8))
    told = r"images of one size, got 4×6 in town/0.png and 8×6 in town/3.png; pass size="
    refuses(lambda: read(tmp_path / "different"), told)
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
        ds.data.with_unknown(found, ["cars"])
    refuses(lambda: ds.data.with_unknown(found, "car"), "as a list of names, got 'car'")
    refuses(lambda: ds.data.class_weights(found.masks, 2), "expected labels from 0 to 1, got 2")
    refuses(lambda: ds.data.class_weights(torch.full((2, 2), ds.data.VOID, dtype=torch.uint8), 2), "got none but VOID")


# ------------------------------------------------------------------------------------------------------- street scenes
SIZE = (4, 6)


def image(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*SIZE, 3), dtype=np.uint8)


def mask(*values: int) -> np.ndarray:
    """A mask that begins with these values and goes on with the first."""
    found = np.full(SIZE, values[0], np.uint8)
    found.flat[: len(values)] = values
    return found


def test_camvid_has_eleven_classes_and_void(tmp_path, monkeypatch):
    for number, split in enumerate(("train", "val", "test")):
        write(tmp_path / "CamVid" / split, "0001TP_1.png", image(number))
        write(tmp_path / "CamVid" / f"{split}annot", "0001TP_1.png", mask(*range(12)))
    monkeypatch.setenv("DISSENSUS_DATA", str(tmp_path))
    for number, split in enumerate(("train", "val", "test")):
        found = ds.data.camvid(split)
        assert torch.equal(found.images[0], torch.from_numpy(image(number)).movedim(2, 0))
        assert found.masks.flatten()[:12].tolist() == [*range(11), ds.data.VOID]
    assert (len(found.classes), found.classes[0], found.classes[9:]) == (11, "sky", ("pedestrian", "bicyclist"))
    assert torch.equal(ds.data.camvid("test", folder=tmp_path / "CamVid").masks, found.masks)
    assert ds.data.camvid("test", size=(2, 3)).images.shape == (1, 3, 2, 3)
    known, ood = ds.data.with_unknown(found, ["pedestrian", "bicyclist"])
    assert len(known.classes) == 9
    assert ood.flatten()[:12].tolist() == [0] * 9 + [1, 1, ds.data.VOID]


def test_streethazards_counts_from_one_and_has_anomalies_in_its_test_towns(tmp_path):
    root = tmp_path / "streethazards"
    parts = {"train/*/training": range(14), "train/*/validation": range(14), "test/*/test": range(15)}
    for part, values in parts.items():
        for town in ("t1", "t2"):
            write(root / part.replace("*", "images"), f"{town}/1.png", image(1))
            write(root / part.replace("*", "annotations"), f"{town}/1.png", mask(*values))
    for split, classes in (("train", 13), ("val", 13), ("test", 14)):
        found = ds.data.streethazards(split, folder=tmp_path)
        assert found.files == ("t1/1.png", "t2/1.png")
        assert found.masks[0].flatten()[: classes + 1].tolist() == [ds.data.VOID, *range(classes)]
    known, ood = ds.data.with_unknown(found, ["anomaly"])
    assert len(known.classes) == 13
    assert int((ood == 1).sum()) == 2


def test_bdd_anomaly_tests_on_the_scenes_with_trains_motorcycles_or_bicycles(tmp_path):
    scenes = {"train": {"a": (0, 255, 13), "b": (0, 16), "c": (18, 1)}, "val": {"d": (2, 3), "e": (17, 4)}}
    for part, each in scenes.items():
        for name, values in each.items():
            write(tmp_path / "seg" / "images" / part, f"{name}.jpg", image(1))
            write(tmp_path / "seg" / "labels" / part, f"{name}_train_id.png", mask(*values))
    for split, names in (("train", "a"), ("val", "d"), ("test", "bce")):
        assert ds.data.bdd_anomaly(split, folder=tmp_path).files == tuple(f"{name}.jpg" for name in names)
    assert len(ds.data.bdd_anomaly("test", folder=tmp_path).classes) == 19
    assert ds.data.bdd_anomaly("train", folder=tmp_path).masks.flatten()[:3].tolist() == [0, ds.data.VOID, 13]
    (tmp_path / "seg" / "labels" / "train" / "a_train_id.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"a mask .*a_train_id.png for the image .*a.jpg"):
        ds.data.bdd_anomaly("train", folder=tmp_path)


@pytest.mark.parametrize("reader", [ds.data.camvid, ds.data.streethazards, ds.data.bdd_anomaly])
def test_missing_folders_are_named(reader, tmp_path, monkeypatch):
    monkeypatch.delenv("DISSENSUS_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"\(.* and .*\) as one of .*, got folder=None and no DISSENSUS_DATA"):
        reader("test")
    refuses(lambda: reader("val", folder=tmp_path), r"got none of them in .*; put it there", FileNotFoundError)
    refuses(lambda: reader("training"), "of train, val, test, got 'training'")


# -------------------------------------------------------------------------------------------------- folders of classes
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
    refuses(lambda: ds.data.image_folder(tmp_path / "train", classes=["c"]), "the classes c in .*train, got 'a' too")


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
