"""Data: sets read from the user's files, a small real set inside the package, toys, splits and batches."""

# ruff: noqa: F403, F405 - the names of __all__ are those of the files below
from dissensus.data.augmentation import *
from dissensus.data.batches import *
from dissensus.data.images import *
from dissensus.data.input_transforms import *
from dissensus.data.segmentation import *
from dissensus.data.splits import *
from dissensus.data.table_encoding import *
from dissensus.data.tabular import *
from dissensus.data.toy import *

__all__ = [
    "CLASSIFICATION_SETS", "REGRESSION_SETS", "VOID", "Augmentation", "Batches", "ImageInputs", "ImageSet",
    "RegressionSplit", "SegmentationAugmentation", "SegmentationSet", "Standardiser", "TableEncoder", "TabularSet",
    "bdd_anomaly", "camvid", "cifar10", "cifar100", "class_weights", "cubic", "cubic_gap", "digits", "donuts",
    "far_ring", "fashion", "fashion_mnist", "five_blobs", "gaussian_process", "hill", "image_folder", "image_set",
    "mnist", "noisy_labels", "notmnist", "quadratic_features", "regression_split", "segmentation_folder",
    "split_indices", "streethazards", "svhn", "three_clusters", "train_validation", "two_moons", "uci_classification",
    "uci_regression", "with_unknown", "x_sin_x",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
