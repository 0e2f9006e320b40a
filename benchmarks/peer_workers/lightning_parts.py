"""What workers of libraries on Lightning share; imported first, before torchvision."""

from __future__ import annotations

import logging
import warnings
from importlib.metadata import PackageNotFoundError, version

import torch


def torchvision_can_load() -> None:
    """Declares two operators that torchvision misses if torch is a build for CPUs and torchvision one for GPUs.

    Package indexes may have that pair only. No network here uses an operator of torchvision.
    """
    try:
        differ = version("torch").endswith("+cpu") and not version("torchvision").endswith("+cpu")
    except PackageNotFoundError:
        return
    for name in ("nms", "qnms") if differ else ():
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


torchvision_can_load()
warnings.filterwarnings("ignore")
for logger in ("lightning", "lightning.pytorch", "lightning.fabric"):
    logging.getLogger(logger).setLevel(logging.ERROR)


def barest(device: str) -> dict[str, object]:
    """Arguments of a Trainer for one epoch, with everything off that costs time."""
    return {
        "max_epochs": 1,
        "accelerator": "gpu" if device == "cuda" else "cpu",
        "devices": 1,
        "precision": "32-true",
        "barebones": True,
    }
