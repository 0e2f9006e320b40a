"""Trainers of other libraries: `hf` for transformers' Trainer, `lightning` for Lightning's; imported on first use."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name not in ("hf", "lightning"):
        raise AttributeError(f"module 'dissensus.integrations' has no attribute {name!r}")
    return import_module(f"dissensus.integrations.{name}")
