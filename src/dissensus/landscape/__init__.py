"""The loss around and between members: on planes through three, along random directions from one, on paths between two."""

from dissensus.landscape.loss_surfaces import Path, Surface, curve, directions, path, plane

__all__ = ["Path", "Surface", "curve", "directions", "path", "plane"]
