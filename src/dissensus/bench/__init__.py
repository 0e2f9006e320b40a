"""The bench: tasks, runs, reports and the command line; `read` returns results."""

from importlib import import_module
from typing import Any

__all__ = ["read"]


def __getattr__(name: str) -> Any:
    if name != "read":
        raise AttributeError(f"module 'dissensus.bench' has no attribute {name!r}")
    return import_module("dissensus.bench.run.jobs").read  # needs the extra `bench`
