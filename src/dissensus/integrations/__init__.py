"""The library in other people's tools: `hf` (transformers' Trainer), `lightning`, and `loggers`; imported on first use."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name not in ("hf", "lightning", "loggers"):
        raise AttributeError(f"module 'dissensus.integrations' has no attribute {name!r}")
    return import_module(f"dissensus.integrations.{name}")
