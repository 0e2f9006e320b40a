"""Data: sets read from the user's files, a small real set inside the package, toys, splits and batches.

File readers are imported on first use, which keeps `import dissensus` fast.
"""

# ruff: noqa: F403, F405 - the names of __all__ are those of the files below
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dissensus.data.augmentation import Augmentation, SegmentationAugmentation
from dissensus.data.batches import Batches
from dissensus.data.splits import noisy_labels, split_indices, train_validation
from dissensus.data.standardise import Standardiser

if TYPE_CHECKING:
    from dissensus.data.image_folders import image_folder
    from dissensus.data.images import *
    from dissensus.data.input_transforms import ImageInputs as ImageInputs
    from dissensus.data.segmentation import *
    from dissensus.data.shipped import *
    from dissensus.data.street_scenes import *
    from dissensus.data.table_encoding import TableEncoder as TableEncoder
    from dissensus.data.tabular import *
    from dissensus.data.toy import *

__all__ = [
    "CLASSIFICATION_SETS",
    "REGRESSION_SETS",
    "VOID",
    "Augmentation",
    "Batches",
    "ImageInputs",
    "ImageSet",
    "RegressionSplit",
    "SegmentationAugmentation",
    "SegmentationSet",
    "Standardiser",
    "TableEncoder",
    "TabularSet",
    "bdd_anomaly",
    "camvid",
    "cifar10",
    "cifar100",
    "class_weights",
    "cubic",
    "cubic_gap",
    "digits",
    "donuts",
    "far_ring",
    "fashion",
    "fashion_mnist",
    "five_blobs",
    "gaussian_process",
    "hill",
    "image_folder",
    "image_set",
    "mnist",
    "noisy_labels",
    "notmnist",
    "quadratic_features",
    "regression_split",
    "segmentation_folder",
    "split_indices",
    "streethazards",
    "svhn",
    "three_clusters",
    "train_validation",
    "two_moons",
    "uci_classification",
    "uci_regression",
    "with_unknown",
    "x_sin_x",
]


FILES = "image_folders table_encoding input_transforms images segmentation shipped street_scenes tabular toy"


def __getattr__(name: str) -> Any:
    if name in __all__:
        for file in FILES.split():
            module = import_module(f"{__name__}.{file}")
            if hasattr(module, name):
                globals()[name] = getattr(module, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
