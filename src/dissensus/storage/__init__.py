"""Saving and loading posteriors, and files that are whole or not there."""

from dissensus.storage.folder import load, save

__all__ = ["load", "save"]
