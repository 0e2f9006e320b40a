"""Images and masks that tests write to folders."""

from pathlib import Path

import numpy as np
from PIL import Image


def write(folder: Path, name: str, array: np.ndarray) -> None:
    """An image (H, W, 3) or a mask (H, W) as a file."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)
