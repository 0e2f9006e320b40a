"""The street scenes are found and split in miniature folders of their layouts."""

import numpy as np
import pytest
import torch

from dissensus.data import VOID, bdd_anomaly, camvid, streethazards, with_unknown
from refusals import refuses
from small_scenes import write

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
        found = camvid(split)
        assert torch.equal(found.images[0], torch.from_numpy(image(number)).movedim(2, 0))
        assert found.masks.flatten()[:12].tolist() == [*range(11), VOID]
    assert (len(found.classes), found.classes[0], found.classes[9:]) == (11, "sky", ("pedestrian", "bicyclist"))
    assert torch.equal(camvid("test", folder=tmp_path / "CamVid").masks, found.masks)
    assert camvid("test", size=(2, 3)).images.shape == (1, 3, 2, 3)
    known, ood = with_unknown(found, ["pedestrian", "bicyclist"])
    assert len(known.classes) == 9
    assert ood.flatten()[:12].tolist() == [0] * 9 + [1, 1, VOID]


def test_streethazards_counts_from_one_and_has_anomalies_in_its_test_towns(tmp_path):
    root = tmp_path / "streethazards"
    for part, values in (
        ("train/*/training", range(14)),
        ("train/*/validation", range(14)),
        ("test/*/test", range(15)),
    ):
        for town in ("t1", "t2"):
            write(root / part.replace("*", "images"), f"{town}/1.png", image(1))
            write(root / part.replace("*", "annotations"), f"{town}/1.png", mask(*values))
    for split, classes in (("train", 13), ("val", 13), ("test", 14)):
        found = streethazards(split, folder=tmp_path)
        assert found.files == ("t1/1.png", "t2/1.png")
        assert found.masks[0].flatten()[: classes + 1].tolist() == [VOID, *range(classes)]
    known, ood = with_unknown(found, ["anomaly"])
    assert len(known.classes) == 13
    assert int((ood == 1).sum()) == 2


def test_bdd_anomaly_tests_on_the_scenes_with_trains_motorcycles_or_bicycles(tmp_path):
    scenes = {"train": {"a": (0, 255, 13), "b": (0, 16), "c": (18, 1)}, "val": {"d": (2, 3), "e": (17, 4)}}
    for part, each in scenes.items():
        for name, values in each.items():
            write(tmp_path / "seg" / "images" / part, f"{name}.jpg", image(1))
            write(tmp_path / "seg" / "labels" / part, f"{name}_train_id.png", mask(*values))
    for split, names in (("train", "a"), ("val", "d"), ("test", "bce")):
        assert bdd_anomaly(split, folder=tmp_path).files == tuple(f"{name}.jpg" for name in names)
    assert len(bdd_anomaly("test", folder=tmp_path).classes) == 19
    assert bdd_anomaly("train", folder=tmp_path).masks.flatten()[:3].tolist() == [0, VOID, 13]
    (tmp_path / "seg" / "labels" / "train" / "a_train_id.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"a mask .*a_train_id.png for the image .*a.jpg"):
        bdd_anomaly("train", folder=tmp_path)


@pytest.mark.parametrize("reader", [camvid, streethazards, bdd_anomaly])
def test_missing_folders_are_named(reader, tmp_path, monkeypatch):
    monkeypatch.delenv("DISSENSUS_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"\(.* and .*\) as one of .*, got folder=None and no DISSENSUS_DATA"):
        reader("test")
    refuses(lambda: reader("val", folder=tmp_path), r"got none of them in .*; put it there", FileNotFoundError)
    refuses(lambda: reader("training"), "of train, val, test, got 'training'")
