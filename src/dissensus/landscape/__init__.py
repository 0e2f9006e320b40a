"""The loss around and between members: planes through three of them, random directions from one, ways from one to another."""

from dissensus.landscape.paths import Path, curve, path
from dissensus.landscape.surfaces import Surface, directions, plane

__all__ = ["Path", "Surface", "curve", "directions", "path", "plane"]
