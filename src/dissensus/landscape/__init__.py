"""The loss around and between members: on planes through three, along random directions from one, on paths between two."""

from dissensus.landscape.paths import Path, curve, path
from dissensus.landscape.surfaces import Surface, directions, plane

__all__ = ["Path", "Surface", "curve", "directions", "path", "plane"]
