"""Applies a trained segmentation to the user's images and writes its maps as pictures."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dissensus.bench.run.jobs import writable_folder
from dissensus.bench.run.run import Run
from dissensus.data.input_transforms import Standardiser
from dissensus.predict import predict_image
from dissensus.storage.atomic_files import read_json
from dissensus.utils.file_errors import read_errors


def write_maps(run: Run, images: Sequence[Path], folder: Path, *, tile: int | None = None) -> Iterator[Path]:
    """Writes NAME-prediction.png in the colours of classes.png, and NAME-QUANTITY.png for each quantity; returns the paths.

    Images are resized to the height of the run's images; maps have the size of the image. `tile`: as in `predict_image`.
    """
    from PIL import Image

    from dissensus.plots import segmentation_maps  # loads matplotlib

    classes, standardiser = _segmentation_facts(run)
    names = [path.stem for path in images]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"expected images of different names, got two called {twice!r}; write their maps one by one")
    pictures = [read_picture(path) for path in images]  # all of them before anything is written
    writable_folder(folder)
    segmentation_maps.class_legend(classes).savefig(folder / "classes.png", dpi=110, facecolor="white")
    yield folder / "classes.png"
    posterior, largest = run.posterior(), math.log(len(classes))
    for path, picture in zip(images, pictures, strict=True):
        pixels = standardiser(resize_picture(picture, run.config.data.get("size")))
        said = predict_image(posterior, pixels, tile=tile, precision=run.config.precision)
        (confidence, prediction), apart = said.mean.cpu().max(0), said.epistemic
        heat = {  # with the largest value of its scale; for the epistemic part it depends on the image
            "confidence": (confidence, 1.0, segmentation_maps.CONFIDENCE),
            "total": (said.total.cpu(), largest, segmentation_maps.EPISTEMIC),
            "epistemic": (apart.cpu(), float(apart.max()) or 1.0, segmentation_maps.EPISTEMIC),
        }
        shown = {"prediction": segmentation_maps.class_image(prediction.numpy(), len(classes))}
        for name, (values, top, colours) in heat.items():
            shown[name] = segmentation_maps.heat_image(values.numpy(), largest=top, colours=colours)
        for name, drawn in shown.items():
            written = folder / f"{path.stem}-{name}.png"
            Image.fromarray(drawn).resize(picture.size, Image.Resampling.NEAREST).save(written)
            yield written


def _segmentation_facts(run: Run) -> tuple[list[str], Standardiser]:
    """The classes of a trained segmentation, and how its inputs are standardised."""
    if run.kind != "segmentation" or not run.is_trained:
        got = "one that is not trained" if not run.is_trained else f"a {run.kind}"
        raise ValueError(f"expected a trained run of a segmentation, got {got} in {run.folder}; train one first")
    facts = read_json(run.folder / "training.json")
    with read_errors(run.folder / "training.json"):
        mean, std = (torch.tensor(facts[name], dtype=torch.float64) for name in ("mean", "std"))
        return facts["classes"], Standardiser(mean, std)


def read_picture(path: Path) -> Any:
    """The image, rotated according to its EXIF data."""
    from PIL import Image, ImageOps

    if not path.is_file():
        raise FileNotFoundError(f"expected an image at {path}, got none; correct its name")
    with read_errors(path, "save it again", kind="an image"), Image.open(path) as opened:
        return ImageOps.exif_transpose(opened).convert("RGB")


def resize_picture(picture: Any, size: Sequence[int] | None) -> Tensor:
    """(3, H, W) uint8 at the height of the training images; at the picture's height if those were not resized."""
    from PIL import Image

    if size is not None:
        width = max(1, round(picture.width * size[0] / picture.height))
        picture = picture.resize((width, size[0]), Image.Resampling.BILINEAR)  # as `read_pairs` does
    return torch.from_numpy(np.array(picture)).movedim(2, 0)
