"""Image sets are found where users keep them, read whole and in order, and described when they are missing."""

import gzip
import hashlib
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.io import savemat

from dissensus.data import ImageSet, cifar10, cifar100, fashion_mnist, image_set, mnist, notmnist, svhn
from dissensus.data.catalogue import CATALOGUE
from dissensus.data.images import READERS
from refusals import refuses


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
@pytest.mark.parametrize(
    ("read", "sub"),
    [
        (mnist, "mnist"),
        (mnist, "MNIST/raw"),
        (fashion_mnist, "fashion_mnist"),
        (fashion_mnist, "FashionMNIST/raw"),
        (notmnist, "notmnist"),
    ],
)
def test_idx_sets_are_read_from_their_usual_folders(tmp_path, pictures, read, sub, suffix):
    write_idx(tmp_path / sub, pictures, suffix=suffix)
    found = read("test", folder=tmp_path)
    assert found.name == read.__name__
    assert found.images.dtype == torch.uint8
    np.testing.assert_array_equal(found.images.numpy(), pictures[0][:, None])
    assert found.labels.tolist() == pictures[1].tolist()
    assert len(found) == 6
    assert len(found.classes) == 10


def test_the_train_split_has_files_of_its_own(tmp_path, pictures):
    write_idx(tmp_path / "mnist", pictures, prefix="train")
    assert len(mnist("train", folder=tmp_path)) == 6
    with pytest.raises(FileNotFoundError):
        mnist("test", folder=tmp_path)


def test_files_directly_in_the_folder_are_told_apart_by_their_checksum(tmp_path, pictures, monkeypatch):
    write_idx(tmp_path, pictures)
    for read in (mnist, fashion_mnist, notmnist):
        with pytest.raises(FileNotFoundError, match="other sets use the same names"):
            read("test", folder=tmp_path)
    variant = CATALOGUE["mnist"].splits["test"][0]
    known = [(tmp_path / file.name).read_bytes() for file in variant.files]
    files = tuple(
        replace(file, bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest())
        for file, raw in zip(variant.files, known, strict=True)
    )
    source = replace(CATALOGUE["mnist"], splits={"test": (replace(variant, files=files),)})
    monkeypatch.setitem(CATALOGUE, "mnist", source)
    assert len(mnist("test", folder=tmp_path, verify=True)) == 6
    with pytest.raises(FileNotFoundError):
        fashion_mnist("test", folder=tmp_path)


def test_verify_compares_checksums(tmp_path, pictures):
    write_idx(tmp_path / "mnist", pictures)
    with pytest.raises(ValueError, match=r"sha256 8d422c7b.*got [0-9a-f]{64}; download the file again"):
        mnist("test", folder=tmp_path, verify=True)


def test_a_file_without_a_published_checksum_cannot_be_verified(tmp_path):
    (tmp_path / "svhn").mkdir()
    np.savez(tmp_path / "svhn/test_32x32.npz", images=np.zeros((1, 32, 32, 3), np.uint8), labels=[1])
    refuses(lambda: svhn("test", folder=tmp_path, verify=True), "verify=False")


def test_a_missing_set_says_which_files_to_put_where(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        cifar10("train", folder=tmp_path)
    message = str(caught.value)
    assert str(tmp_path / "cifar-10-batches-bin") in message
    assert str(tmp_path / "cifar-10-batches-py") in message
    for variant in CATALOGUE["cifar10"].splits["train"]:
        for file in variant.files:
            assert f"{file.name}  {file.bytes} bytes  sha256 {file.sha256}" in message


def test_a_partly_present_set_says_what_is_there(tmp_path):
    (tmp_path / "cifar-10-batches-bin").mkdir()
    (tmp_path / "cifar-10-batches-bin/data_batch_2.bin").write_bytes(bytes(3073))
    with pytest.raises(FileNotFoundError, match=r"got only cifar-10-batches-bin.data_batch_2\.bin"):
        cifar10("train", folder=tmp_path)


def test_without_any_folder_the_message_names_the_variable():
    refuses(lambda: mnist(), "got folder=None and no DISSENSUS_DATA in the environment", FileNotFoundError)


def test_the_environment_names_the_folder_and_the_argument_overrules_it(tmp_path, pictures, monkeypatch):
    write_idx(tmp_path / "a/mnist", pictures)
    write_idx(tmp_path / "b/mnist", (pictures[0][:2], pictures[1][:2]))
    monkeypatch.setenv("DISSENSUS_DATA", str(tmp_path / "a"))
    assert len(mnist("test")) == 6
    assert len(mnist("test", folder=tmp_path / "b")) == 2


def test_images_and_labels_that_do_not_belong_together_are_refused(tmp_path, pictures):
    write_idx(tmp_path / "mnist", (pictures[0], pictures[1][:5]))
    refuses(lambda: mnist("test", folder=tmp_path), "one class index per image")


def test_labels_outside_the_classes_are_refused(tmp_path, pictures):
    write_idx(tmp_path / "mnist", (pictures[0], pictures[1] + 1))
    refuses(lambda: mnist("test", folder=tmp_path), "labels from 0 to 9, got 2 to 10")


@pytest.mark.parametrize("sub", ["cifar-10-batches-bin", "."])
def test_cifar10_batches_are_joined_in_order(tmp_path, sub):
    rows = np.random.default_rng(1).integers(0, 256, (5, 2, 3073), dtype=np.uint8)
    rows[:, :, 0] = np.arange(10).reshape(5, 2)
    (tmp_path / sub).mkdir(exist_ok=True)
    for number, batch in enumerate(rows, 1):
        (tmp_path / sub / f"data_batch_{number}.bin").write_bytes(batch.tobytes())
    found = cifar10("train", folder=tmp_path)
    assert found.labels.tolist() == list(range(10))
    np.testing.assert_array_equal(found.images.numpy().reshape(10, -1), rows.reshape(10, -1)[:, 1:])
    assert found.classes[:3] == ("airplane", "automobile", "bird")


def test_cifar100_gives_the_fine_labels(tmp_path):
    rows = np.random.default_rng(2).integers(0, 256, (3, 3074), dtype=np.uint8)
    rows[:, :2] = [[4, 0], [1, 1], [14, 98]]
    (tmp_path / "cifar-100-binary").mkdir()
    (tmp_path / "cifar-100-binary/test.bin").write_bytes(rows.tobytes())
    found = cifar100("test", folder=tmp_path)
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
    found = svhn("test", folder=tmp_path)
    assert found.labels.tolist() == [0, 1, 9, 0]
    np.testing.assert_array_equal(found.images.numpy(), images)


def test_unknown_names_and_splits_are_value_errors(tmp_path):
    refuses(lambda: image_set("imagenet", "test", folder=tmp_path), "expected name of mnist, fashion_mnist")
    refuses(lambda: notmnist("train", folder=tmp_path), "expected split of notmnist of test, got 'train'")


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
    assert len(ImageSet(images, labels, "two", ("a", "b"))) == 2
    refuses(lambda: ImageSet(images.float(), labels, "two", ("a", "b")), r"int64 labels .*, got torch.float32")
    refuses(lambda: ImageSet(images, labels.int(), "two", ("a", "b")), r"int64 labels .* and torch.int32")
    refuses(lambda: ImageSet(images, labels[:1], "two", ("a", "b")), "labels \\(N,\\)")
    refuses(lambda: ImageSet(images, labels, "two", ("a",)), "labels from 0 to 0, got 0 to 1")


def test_a_subset_keeps_images_with_their_labels():
    images = torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(5, 1, 2, 2)
    part = ImageSet(images, torch.arange(5), "five", tuple("abcde")).subset(torch.tensor([3, 1]))
    assert part.images[:, 0, 0, 0].tolist() == [3, 1]
    assert part.labels.tolist() == [3, 1]
    assert part.name == "five"
