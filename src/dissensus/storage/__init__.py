"""Saving and loading posteriors, and files that are written completely or not at all."""

from dissensus.storage.folder import load, save

__all__ = ["load", "save"]
