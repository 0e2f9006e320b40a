"""Published test sets that are read where they lie: corrupted files, CIFAR-10.1, CIFAR-10H, ImageNet and ImageNet-V2."""

import numpy as np
import pytest
import torch
from PIL import Image

import dissensus as ds
from dissensus.bench.rows.dataset_rows import standardised_batches
from dissensus.bench.rows.task_rows import task_data
from dissensus.evaluation.robustness_curves import Corruptions


@pytest.fixture(autouse=True)
def _small_files(monkeypatch):
    monkeypatch.setattr("dissensus.data.corruptions._ROWS_PER_SEVERITY", 20)


@pytest.fixture
def sets(benchmarks, folder, monkeypatch):
    """The functions that read these sets."""
    monkeypatch.setenv("DISSENSUS_DATA", str(folder))
    import published_sets

    return published_sets


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root, rng = tmp_path_factory.mktemp("published"), np.random.default_rng(0)
    for name in ("cifar-10-batches-bin", "CIFAR-10.1", "CIFAR-10H", "CIFAR-10-C"):
        (root / name).mkdir()
    labels = (np.arange(20) % 10).astype(np.uint8)[:, None]
    for name in ("test_batch", *(f"data_batch_{i}" for i in range(1, 6))):
        rows = rng.integers(0, 256, (20, 3072), dtype=np.uint8)
        np.concatenate([labels, rows], 1).tofile(root / f"cifar-10-batches-bin/{name}.bin")
    np.save(root / "CIFAR-10.1/cifar10.1_v6_data.npy", rng.integers(0, 256, (7, 32, 32, 3), dtype=np.uint8))
    np.save(root / "CIFAR-10.1/cifar10.1_v6_labels.npy", np.arange(7, dtype=np.int32))
    np.save(root / "CIFAR-10H/cifar10h-counts.npy", rng.integers(1, 20, (20, 10)))
    np.save(root / "CIFAR-10-C/labels.npy", np.tile(labels.ravel(), 5))
    np.save(root / "CIFAR-10-C/contrast.npy", rng.integers(0, 256, (100, 32, 32, 3), dtype=np.uint8))
    for part, count in (("train", 3), ("val", 2)):
        for number, name in enumerate(("n01", "n02")):
            (root / "imagenet" / part / name).mkdir(parents=True)
            for i in range(count):
                flat = np.full((60, 80, 3), 100 * number + i, dtype=np.uint8)
                Image.fromarray(flat).save(root / "imagenet" / part / name / f"{i}.png")
    for name in ("0", "1"):
        (root / "imagenet_v2" / name).mkdir(parents=True)
        Image.fromarray(np.full((40, 40, 3), 9, dtype=np.uint8)).save(root / f"imagenet_v2/{name}/a.png")
    return root


def test_published_corrupted_images_take_the_place_of_ours(folder):
    files = np.load(folder / "CIFAR-10-C/contrast.npy")
    spec = Corruptions(["contrast"], [2, 5], files=folder / "CIFAR-10-C")
    x, index = torch.rand(3, 3, 32, 32), torch.tensor([4, 0, 19])
    for severity in (2, 5):
        wanted = torch.from_numpy(files[20 * (severity - 1) + index.numpy()].transpose(0, 3, 1, 2)) / 255
        torch.testing.assert_close(spec.apply(x, "contrast", severity, index), wanted)
    scale = ds.data.Standardiser(torch.full((3, 1, 1), 0.5), torch.full((3, 1, 1), 0.25))
    scaled = Corruptions(["contrast"], [5], files=folder / "CIFAR-10-C", standardiser=scale)
    torch.testing.assert_close(scaled.apply(scale(x), "contrast", 5, index), (wanted - 0.5) / 0.25)


def test_published_corrupted_images_need_all_test_images(folder):
    loader = ds.data.Batches(torch.rand(10, 3, 32, 32), torch.arange(10) % 10, batch_size=5)
    spec = Corruptions(["contrast"], [1], files=folder / "CIFAR-10-C")
    posterior = ds.MAP(ds.nets.LeNet(10, channels=3, size=32))
    with pytest.raises(ValueError, match=r"expected all 20 test images of .*, got 10"):
        ds.evaluate(posterior, loader, corrupt=spec)


def test_other_test_sets_of_cifar10_are_shifted_sets(folder, sets, benchmarks):
    data = task_data({"name": "published_sets:cifar10", "validation": 0}, beside=str(benchmarks))
    new, people = data.shift["cifar10_1"], data.shift["cifar10h"]
    assert new.x.shape == (7, 3, 32, 32)
    assert new.y.tolist() == [*range(7)]
    pixels = np.load(folder / "CIFAR-10.1/cifar10.1_v6_data.npy")
    assert torch.equal(new.x[5, 2], torch.from_numpy(pixels[5, :, :, 2]))
    counts = np.load(folder / "CIFAR-10H/cifar10h-counts.npy")
    np.testing.assert_allclose(people.y.numpy(), counts / counts.sum(1, keepdims=True))
    assert torch.equal(people.x, data.test.x)


def test_images_of_imagenet_are_read_when_a_batch_is_made(benchmarks, folder, sets, monkeypatch):
    read, counted = sets.ImageFiles.read, []
    settings = {"name": "published_sets:imagenet", "side": 24, "standardise": "imagenet", "validation": 0}
    data = task_data(settings, beside=str(benchmarks))
    monkeypatch.setattr(type(data.train.x), "read", lambda self: counted.append(len(self)) or read(self))
    assert data.classes == ("n01", "n02")
    assert data.train.x.shape == (6, 3, 24, 24)
    assert data.shift["imagenet_v2"].y.tolist() == [0, 1]
    assert len(data.digest) == 12
    assert counted == []
    identity = ds.data.Standardiser(torch.zeros(3, 1, 1), torch.ones(3, 1, 1))
    seen = [(round(255 * float(x.mean())), int(y)) for x, y in standardised_batches(data.train, identity, batch_size=1)]
    assert sorted(seen) == [(0, 0), (1, 0), (2, 0), (100, 1), (101, 1), (102, 1)]
    assert counted == [1] * 6
    assert data.train.select(torch.tensor([5, 0])).x.read().shape == (2, 3, 24, 24)


def test_an_image_is_cut_to_seven_eighths_of_its_shorter_side(tmp_path, sets):
    picture = np.zeros((64, 128, 3), dtype=np.uint8)
    picture[4:60, 36:92] = 255  # the square that is wanted: 56 of 64 pixels, in the middle
    Image.fromarray(picture).save(tmp_path / "a.png")
    found = sets.ImageFiles([tmp_path / "a.png"], 56).read()
    assert found.shape == (1, 3, 56, 56)
    assert bool((found == 255).all())
